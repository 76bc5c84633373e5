"""The specification in plain PyTorch: any device and dtype, differentiated by PyTorch.

Every step is written as the definition says it, in the dtype of the input, with an S x S score matrix
a sequence. In float64 it is the judge of every backend; in the input's own dtype it is the yardstick
that a backend's error is measured by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.problem import Inputs, Problem, check_values, describe


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`regard.attention`, as its definition: returns (out (b, sq, hq, dv), lse (b, hq, sq))."""
    inputs = Inputs(q, k, v, sinks, None, None, seqused_q, seqused_k)
    problem = describe(
        inputs,
        packed=False,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=False,
    )
    check_values(problem, inputs)
    rows_q = _used(seqused_q, problem.batch, problem.seqlen_q)
    rows_k = _used(seqused_k, problem.batch, problem.seqlen_k)
    outs, lses = [], []
    for b in range(problem.batch):
        out, lse = _sequence(problem, q[b, : rows_q[b]], k[b, : rows_k[b]], v[b, : rows_k[b]], sinks)
        outs.append(_pad(out, 0, 0, problem.seqlen_q, 0.0))
        lses.append(_pad(lse, 1, 0, problem.seqlen_q, float("-inf")))
    if not outs:
        return q.new_zeros((0, *q.shape[1:3], v.shape[-1])), _lse_like(q).new_zeros(problem.lse_shape)
    return torch.stack(outs), torch.stack(lses)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`regard.attention_varlen`, as its definition: returns (out (total_q, hq, dv), lse (hq, total_q))."""
    inputs = Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = describe(
        inputs,
        packed=True,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=False,
    )
    check_values(problem, inputs)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    total_q = problem.seqlen_q
    out = q.new_zeros((total_q, problem.heads_q, problem.head_dim_v))
    lse = torch.full_like(_lse_like(q), float("-inf")).expand(problem.heads_q, total_q)
    for i in range(problem.batch):
        q0, k0 = starts_q[i], starts_k[i]
        q1 = q0 + int(seqused_q[i]) if seqused_q is not None else starts_q[i + 1]
        k1 = k0 + int(seqused_k[i]) if seqused_k is not None else starts_k[i + 1]
        o, e = _sequence(problem, q[q0:q1], k[k0:k1], v[k0:k1], sinks)
        out = out + _pad(o, 0, q0, total_q, 0.0)
        rows = torch.arange(total_q, device=q.device)
        lse = torch.where((rows >= q0) & (rows < q1), _pad(e, 1, q0, total_q, float("-inf")), lse)
    return out, lse


def visible(rows: Tensor, keys: Tensor, offset: int, left: int | None, right: int | None) -> Tensor:
    """Which key each row sees, (rows, keys) bool: bottom-right aligned, edges inclusive.

    offset is sk - sq. Row i sees key j iff i + offset - left <= j <= i + offset + right.
    """
    distance = keys[None, :] - (rows[:, None] + offset)
    mask = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def _sequence(p: Problem, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """One sequence: q (sq, hq, d), k (sk, hk, d), v (sk, hk, dv) -> out (sq, hq, dv), lse (hq, sq)."""
    sq, sk = q.shape[0], k.shape[0]
    k = k.repeat_interleave(p.group, dim=1)
    v = v.repeat_interleave(p.group, dim=1)
    s = torch.einsum("qhd,khd->hqk", q * p.softmax_scale, k)
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    rows, keys = torch.arange(sq, device=q.device), torch.arange(sk, device=q.device)
    mask = visible(rows, keys, sk - sq, p.window_left, p.window_right)
    s = s.masked_fill(~mask, float("-inf"))
    s = s.to(_lse_like(q).dtype)
    sink = s.new_full((p.heads_q, sq, 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(s.dtype)[:, None, None].expand(-1, sq, 1)
    joined = torch.cat([s, sink], dim=-1)
    # A row that sees nothing has only -inf here; it is given any finite score before the softmax and
    # its result is replaced after, so that neither value nor gradient meets -inf - -inf.
    empty = (joined == float("-inf")).all(-1, keepdim=True)
    safe = joined.masked_fill(empty, 0.0)
    weights = torch.softmax(safe, dim=-1)[..., :sk].masked_fill(~mask, 0.0).to(v.dtype)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    lse = torch.logsumexp(safe, dim=-1).masked_fill(empty[..., 0], float("-inf"))
    return out, lse


def _lse_like(q: Tensor) -> Tensor:
    """A scalar of the softmax's dtype: float32, or float64 for float64."""
    return q.new_zeros((), dtype=torch.promote_types(q.dtype, torch.float32))


def _used(seqused: Tensor | None, batch: int, rows: int) -> list[int]:
    return [rows] * batch if seqused is None else seqused.tolist()


def _pad(t: Tensor, dim: int, start: int, size: int, value: float) -> Tensor:
    """t placed at `start` of a dimension of `size`, the rest filled with value."""
    end = size - start - t.shape[dim]
    after = [0, 0] * (t.dim() - 1 - dim)
    return torch.nn.functional.pad(t, [*after, start, end], value=value)
