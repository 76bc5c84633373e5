"""From a Problem and its tensors to launches: strides, features, tile tables, grids."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from regard.dispatch import Gradients, Incoming, Results
from regard.kernels.common import chunks, launcher, softmax
from regard.kernels.common.tiles import make_table
from regard.kernels.portable import config
from regard.kernels.portable.backward_kernels import STATS_UNIT, delta_kernel, dkdv_kernel, dq_kernel
from regard.kernels.portable.forward_kernel import forward_kernel
from regard.problem import Inputs, Problem

SPARE_ROWS = 128  # the largest block_m of a dkdv configuration


def forward(p: Problem, x: Inputs, results: Results) -> None:
    """Write out, lse and, where it is wanted, rest."""
    out, lse, rest = results
    unit, tensors = _tensors({"q": x.q, "k": x.k, "v": x.v, "out": out})
    cfg = config.choose(p, unit > 1).forward
    with launcher.on_device(p.device):
        tiles, table = _query_tiles(p, x, cfg.block_m)
        arguments = {
            **tensors,
            **_common(p, x, cfg, unit, tiles, table),
            "rest_ptr": out if rest is None else rest,
            "lse_ptr": lse,
            "sinks_ptr": lse if x.sinks is None else x.sinks,
            "lse_batch": 0 if p.packed else lse.stride(0),
            "lse_head": lse.stride(-2),
            "HAS_SINKS": p.has_sinks,
            "HAS_REST": rest is not None,
        }
        launcher.run(forward_kernel, _programs(p, tiles, p.heads_q), arguments)


def backward(p: Problem, x: Inputs, incoming: Incoming, grads: Gradients) -> None:
    """Write the gradients that are wanted."""
    with launcher.on_device(p.device):
        stats = _stats(p, incoming)
        per_row = {
            "stats_ptr": stats,
            "stats_batch": 0 if p.packed else stats.stride(1) // STATS_UNIT.value,
            "stats_head": stats.stride(-2) // STATS_UNIT.value,
            "stats_delta": stats.stride(0) // STATS_UNIT.value,
        }
        read = {"q": x.q, "k": x.k, "v": x.v, "dout": incoming.dout}
        if grads.dk is not None and grads.dv is not None:
            unit, tensors = _tensors({**read, "dk": grads.dk, "dv": grads.dv})
            row = config.choose(p, unit > 1)
            passes = ((row.dkdv, True, row.dv is None), *([] if row.dv is None else [(row.dv, False, True)]))
            for cfg, want_dk, want_dv in passes:
                tiles, table = _key_tiles(p, x, cfg.block_n)
                arguments = {
                    **tensors,
                    **per_row,
                    **_common(p, x, cfg, unit, tiles, table),
                    "WANT_DK": want_dk,
                    "WANT_DV": want_dv,
                }
                launcher.run(dkdv_kernel, _programs(p, tiles, p.heads_k), arguments)
        if grads.dq is not None:
            unit, tensors = _tensors({**read, "dq": grads.dq})
            cfg = config.choose(p, unit > 1).dq
            tiles, table = _query_tiles(p, x, cfg.block_m)
            arguments = {**tensors, **per_row, **_common(p, x, cfg, unit, tiles, table)}
            launcher.run(dq_kernel, _programs(p, tiles, p.heads_q), arguments)
    if grads.dsinks is not None and x.sinks is not None:
        lse_log2, delta = stats[..., : p.seqlen_q].unbind()
        heads = (p.heads_q, 1)
        weights = torch.exp2(x.sinks.view(heads) * softmax.LOG2E.value - lse_log2)  # 0 for empty rows
        per_head = (weights * delta).sum(-1)
        grads.dsinks.copy_(-(per_head if p.packed else per_head.sum(0)))


def _stats(p: Problem, incoming: Incoming) -> Tensor:
    """(2, *lse's shape) float32, with spare rows at each head's end: lse in base 2 and delta.

    The spare rows are as many as a tile of dkdv_kernel, which reads them without a mask.
    """
    lse, dlse = incoming.lse, incoming.dlse
    padded = _cdiv(p.seqlen_q + SPARE_ROWS, STATS_UNIT.value) * STATS_UNIT.value
    stats = lse.new_empty((2, *lse.shape[:-1], padded))
    out, rest, dout = incoming.out, incoming.rest, incoming.dout
    unit, tensors = _tensors({"out": out, "dout": dout})
    # A program holds its rows of out and dout in registers, a pointer an element where they are unaligned.
    block = 64 if unit > 1 and p.head_dim_v <= 256 else 16
    tiles = _cdiv(padded, block)
    batch = 1 if p.packed else p.batch
    strides = (
        (0, 0, 0) if dlse is None else (0 if p.packed else dlse.stride(0), dlse.stride(-1), dlse.stride(-2))
    )
    arguments = {
        **tensors,
        "rest_ptr": out if rest is None else rest,
        "lse_ptr": lse,
        "dlse_ptr": lse if dlse is None else dlse,
        "stats_ptr": stats,
        "dlse_batch": strides[0],
        "dlse_row": strides[1],
        "dlse_head": strides[2],
        "rows": p.seqlen_q,
        "heads": p.heads_q,
        "tiles": tiles,
        "stats_head": padded // STATS_UNIT.value,
        "stats_delta": stats.stride(0) // STATS_UNIT.value,
        "UNIT": unit,
        "HAS_REST": rest is not None,
        "HAS_DLSE": dlse is not None,
        "CHUNKS_V": chunks.split(p.head_dim_v),
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": block,
        "num_warps": 4,
    }
    launcher.run(delta_kernel, tiles * p.heads_q * batch, arguments)
    return stats


def _common(
    p: Problem, x: Inputs, cfg: config.Config, unit: int, tiles: int, table: Tensor | None
) -> dict[str, Any]:
    """What every kernel of tiles takes. In capitals what it is compiled for: nothing that data decides."""
    nothing = x.q  # stands in for a pointer that no feature reads
    far = p.seqlen_q + p.seqlen_k  # a window wider than this sees everything: kept within int32
    tf32 = p.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return {
        "table_ptr": nothing if table is None else table,
        "used_q_ptr": nothing if x.seqused_q is None else x.seqused_q,
        "used_k_ptr": nothing if x.seqused_k is None else x.seqused_k,
        "rows_q": p.seqlen_q,
        "rows_k": p.seqlen_k,
        "heads_q": p.heads_q,
        "group": p.group,
        "tiles": tiles,
        "scale": p.softmax_scale,
        "softcap": p.softcap,
        "left": 0 if p.window_left is None else min(p.window_left, far),
        "right": 0 if p.window_right is None else min(p.window_right, far),
        "UNIT": unit,
        "PACKED": p.packed,
        "HAS_USED_Q": x.seqused_q is not None,
        "HAS_USED_K": x.seqused_k is not None,
        "HAS_LEFT": p.window_left is not None,
        "HAS_RIGHT": p.window_right is not None,
        "HAS_SOFTCAP": p.softcap > 0,
        "CHUNKS": chunks.split(p.head_dim),
        "CHUNKS_V": chunks.split(p.head_dim_v),
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "PRECISION": "tf32" if tf32 else "ieee",
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "num_warps": cfg.num_warps,
        "num_stages": cfg.num_stages,
    }


def _tensors(named: dict[str, Tensor]) -> tuple[int, dict[str, Any]]:
    """UNIT, the one thing about strides that a kernel is compiled for; pointers and strides in units of it.

    It is 16 bytes of elements where every row of every tensor begins at a multiple of 16 bytes, else 1.
    """
    # (batch, row, head) in elements; a packed tensor has no batch.
    strides = {name: (0, *t.stride()[:-1])[-3:] for name, t in named.items()}
    pointers = steps = 0  # or'ed together: a power of two divides them all iff it divides this
    for name, t in named.items():
        pointers |= t.data_ptr()
        batch, row, head = strides[name]
        steps |= batch | row | head
    width = 16 // t.element_size()
    unit = width if pointers % 16 == 0 and steps % width == 0 else 1
    arguments: dict[str, Any] = {}
    for name, (batch, row, head) in strides.items():
        pointer_name, batch_name, row_name, head_name = _parameters(name)
        arguments[pointer_name] = named[name]
        arguments[batch_name] = batch // unit
        arguments[row_name] = row // unit
        arguments[head_name] = head // unit
    return unit, arguments


@functools.cache
def _parameters(tensor: str) -> tuple[str, str, str, str]:
    """What kernels call a tensor's pointer and strides."""
    return f"{tensor}_ptr", f"{tensor}_batch", f"{tensor}_row", f"{tensor}_head"


def _query_tiles(p: Problem, x: Inputs, block: int) -> tuple[int, Tensor | None]:
    """How many query tiles a head has (a batch entry's when dense), and the packed tile table."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return _cdiv(p.seqlen_q, block), None
    table = make_table(
        x.cu_seqlens_q, x.seqused_q, p.seqlen_q, x.cu_seqlens_k, x.seqused_k, p.seqlen_k, block
    )
    return table.shape[0], table


def _key_tiles(p: Problem, x: Inputs, block: int) -> tuple[int, Tensor | None]:
    """The same for key tiles."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return _cdiv(p.seqlen_k, block), None
    table = make_table(
        x.cu_seqlens_k, x.seqused_k, p.seqlen_k, x.cu_seqlens_q, x.seqused_q, p.seqlen_q, block
    )
    return table.shape[0], table


def _cdiv(a: int, b: int) -> int:
    """triton.cdiv takes 2 µs, with the detour on which kernels call it."""
    return -(-a // b)


def _programs(p: Problem, tiles: int, heads: int) -> int:
    return tiles * heads * (1 if p.packed else p.batch)
