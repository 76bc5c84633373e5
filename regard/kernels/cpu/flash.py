"""PyTorch's own CPU flash attention, for what it serves: full or plain causal attention of equal lengths.

Its backward is not used. It takes delta from the rounded out (see `panels`) and adds up dq, dk and dv in
the input's dtype: up to 1800 times eager PyTorch's error in bfloat16, 2.3 times in float32. Nor is its
forward in float16, where it is no faster than panels and its lse is good to 2e-5 only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.cpu.ranges import KeyRange, key_range
from regard.kernels.cpu.tiles import Sequences
from regard.problem import Problem


def serves(p: Problem, x: Sequences) -> bool:
    sq, sk = x.q.shape[1], x.k.shape[1]
    if x.used_q is not None or sq == 0 or sk == 0:  # it divides by zero on an empty tensor
        return False
    if p.softcap or p.has_sinks or p.head_dim != p.head_dim_v or p.dtype == torch.float16:
        return False
    return _is_full(p, sq, sk) or _is_causal(p, sq, sk)


def forward(p: Problem, x: Sequences, out: Tensor, lse: Tensor) -> None:
    """Write out (n, sq, hq, d) and lse (n, sq, hq, 1)."""
    k, v = x.k.transpose(1, 2), x.v.transpose(1, 2)
    causal = not _is_full(p, x.q.shape[1], x.k.shape[1])
    # It knows no groups. One query head of each group at a time reads k and v where they lie.
    for member in range(p.group):
        mine = slice(member, None, p.group)
        o, e = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            x.q[:, :, mine].transpose(1, 2), k, v, 0.0, causal, scale=p.softmax_scale
        )
        out[:, :, mine] = o.transpose(1, 2)
        lse[:, :, mine, 0] = e.transpose(1, 2)


def _is_full(p: Problem, sq: int, sk: int) -> bool:
    return key_range(0, sq, sq, sk, p.window_left, p.window_right) == KeyRange(0, 0, sk, sk)


def _is_causal(p: Problem, sq: int, sk: int) -> bool:
    return sq == sk and p.window_right == 0 and (p.window_left is None or p.window_left >= sk - 1)
