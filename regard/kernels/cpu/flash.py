"""PyTorch's own CPU flash attention, for what it serves: full or plain causal attention of equal lengths.

It computes in float32 (float64 for float64) here, but for bfloat16's forward. In float16 its products are no
faster, and its lse is good to 2e-5 only. Its backward in half precision takes delta from the rounded out
(see `panels`) and adds up dq, dk and dv in the input's dtype: on structured input in bfloat16, dq came out
10 to 20 times as wrong as eager PyTorch's. In float32 it is as good as eager.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.dispatch import Gradients, Incoming
from regard.kernels.cpu.tiles import Sequences, sees_all
from regard.problem import Problem

# Elements of q in one call: a copy in float32 is 64 MB.
PIECE = 2**24


def serves(p: Problem, x: Sequences) -> bool:
    sq, sk = x.q.shape[1], x.k.shape[1]
    if x.used_q is not None or x.row_by_row or sq == 0 or sk == 0:  # it divides by zero on an empty tensor
        return False
    if p.softcap or p.has_sinks or p.head_dim != p.head_dim_v:
        return False
    return sees_all(p, x) or _is_causal(p, x)


def forward(p: Problem, x: Sequences, out: Tensor, lse: Tensor) -> None:
    """Write out (n, sq, hq, d) and lse (n, sq, hq, 1)."""
    dtype = p.dtype if p.dtype == torch.bfloat16 else lse.dtype
    for piece in _pieces(x):
        k, v = (_heads_first(t[piece], dtype) for t in (x.k, x.v))
        # It knows no groups. One query head of each group at a time reads k and v where they lie.
        for member in range(p.group):
            mine = slice(member, None, p.group)
            o, e = _forward(p, x, _heads_first(x.q[piece, :, mine], dtype), k, v)
            out[piece, :, mine] = o.transpose(1, 2)
            lse[piece, :, mine, 0] = e.transpose(1, 2)


def backward(p: Problem, x: Sequences, incoming: Incoming, grads: Gradients) -> None:
    """Write dq, dk and dv like q, k and v. It knows no dlse."""
    dtype = incoming.lse.dtype
    for piece in _pieces(x):
        q, dout, out, lse = (
            _heads_first(t[piece], dtype) for t in (x.q, incoming.dout, incoming.out, incoming.lse)
        )
        # It takes heads in parallel, nothing else, so k and v are repeated rather than read in turn.
        k, v = (_repeated(_heads_first(t[piece], dtype), p.group) for t in (x.k, x.v))
        lse = lse[..., 0]
        if p.dtype != dtype:
            out, lse = _forward(p, x, q, k, v)  # anew, without the rounding
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, not sees_all(p, x), scale=p.softmax_scale
        )
        for grad, result in zip(grads[:3], results, strict=True):
            if grad is not None:
                if result.shape[1] != grad.shape[2]:
                    n, rows, heads, d = grad[piece].shape
                    result = result.view(n, heads, p.group, rows, d).sum(2)
                grad[piece] = result.transpose(1, 2)


def _is_causal(p: Problem, x: Sequences) -> bool:
    sq, sk = x.q.shape[1], x.k.shape[1]
    return sq == sk and p.window_right == 0 and (p.window_left is None or p.window_left >= sk - 1)


def _pieces(x: Sequences) -> Iterator[slice]:
    """Sequences, as many at a time as PIECE allows."""
    n = x.q.shape[0]
    step = max(1, PIECE // x.q[0].numel())
    return (slice(at, min(at + step, n)) for at in range(0, n, step))


def _heads_first(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.transpose(1, 2).to(dtype)


def _repeated(t: Tensor, group: int) -> Tensor:
    n, heads, rows, d = t.shape
    return t[:, :, None].expand(n, heads, group, rows, d).flatten(1, 2)  # a view if group is 1


def _forward(p: Problem, x: Sequences, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, not sees_all(p, x), scale=p.softmax_scale
    )
    return results
