"""From a Problem and its tensors to launches: strides, features, tile tables, grids."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from regard.dispatch import Gradients, Incoming
from regard.kernels.common import chunks, launcher, softmax
from regard.kernels.common.tiles import make_table
from regard.kernels.portable import config
from regard.kernels.portable.backward_kernels import delta_kernel, dkdv_kernel, dq_kernel
from regard.kernels.portable.forward_kernel import forward_kernel
from regard.problem import Inputs, Problem


def forward(p: Problem, x: Inputs, out: Tensor, lse: Tensor) -> None:
    """Write out and lse."""
    cfg = config.choose(p).forward
    tensors = {"q": x.q, "k": x.k, "v": x.v, "out": out}
    with launcher.on_device(p.device):
        tiles, table = _query_tiles(p, x, cfg.block_m)
        _launch(
            forward_kernel,
            _programs(p, tiles, p.heads_q),
            cfg,
            tensors,
            _features(p, tensors),
            _common(p, x, tiles, table),
            lse_ptr=lse,
            sinks_ptr=lse if x.sinks is None else x.sinks,
            lse_batch=0 if p.packed else lse.stride(0),
            lse_head=lse.stride(-2),
            HAS_SINKS=p.has_sinks,
            BLOCK_M=cfg.block_m,
            BLOCK_N=cfg.block_n,
        )


def backward(p: Problem, x: Inputs, incoming: Incoming, grads: Gradients) -> None:
    """Write the gradients that are wanted."""
    row = config.choose(p)
    with launcher.on_device(p.device):
        stats = _stats(p, incoming)
        per_row = {
            "stats_ptr": stats,
            "stats_batch": 0 if p.packed else stats.stride(1),
            "stats_head": stats.stride(-2),
            "stats_delta": stats.stride(0),
        }
        read = {"q": x.q, "k": x.k, "v": x.v, "dout": incoming.dout}
        if grads.dk is not None and grads.dv is not None:
            cfg = row.dkdv
            tiles, table = _key_tiles(p, x, cfg.block_n)
            tensors = read | {"dk": grads.dk, "dv": grads.dv}
            _launch(
                dkdv_kernel,
                _programs(p, tiles, p.heads_k),
                cfg,
                tensors,
                _features(p, tensors),
                _common(p, x, tiles, table),
                BLOCK_M=cfg.block_m,
                BLOCK_N=cfg.block_n,
                **per_row,
            )
        if grads.dq is not None:
            cfg = row.dq
            tiles, table = _query_tiles(p, x, cfg.block_m)
            tensors = read | {"dq": grads.dq}
            _launch(
                dq_kernel,
                _programs(p, tiles, p.heads_q),
                cfg,
                tensors,
                _features(p, tensors),
                _common(p, x, tiles, table),
                BLOCK_M=cfg.block_m,
                BLOCK_N=cfg.block_n,
                **per_row,
            )
    if grads.dsinks is not None and x.sinks is not None:
        lse_log2, delta = stats.unbind()
        heads = (p.heads_q, 1)
        weights = torch.exp2(x.sinks.view(heads) * softmax.LOG2E.value - lse_log2)  # 0 for empty rows
        per_head = (weights * delta).sum(-1)
        grads.dsinks.copy_(-(per_head if p.packed else per_head.sum(0)))


def _stats(p: Problem, incoming: Incoming) -> Tensor:
    """(2, *lse's shape) float32: lse in base 2 and delta."""
    lse, dlse = incoming.lse, incoming.dlse
    stats = lse.new_empty((2, *lse.shape))
    block = 64
    tiles = triton.cdiv(p.seqlen_q, block)
    tensors = {"out": incoming.out, "dout": incoming.dout}
    batch = 1 if p.packed else p.batch
    strides = (
        (0, 0, 0) if dlse is None else (0 if p.packed else dlse.stride(0), dlse.stride(-1), dlse.stride(-2))
    )
    unit, per_tensor = _strides(tensors)
    arguments = per_tensor | {
        "out_ptr": incoming.out,
        "dout_ptr": incoming.dout,
        "lse_ptr": lse,
        "dlse_ptr": lse if dlse is None else dlse,
        "stats_ptr": stats,
        "dlse_batch": strides[0],
        "dlse_row": strides[1],
        "dlse_head": strides[2],
        "rows": p.seqlen_q,
        "heads": p.heads_q,
        "tiles": tiles,
        "stats_delta": stats.stride(0),
        "UNIT": unit,
        "HAS_DLSE": dlse is not None,
        "CHUNKS_V": chunks.split(p.head_dim_v),
        "HEAD_DIM_V": p.head_dim_v,
        "BLOCK_M": block,
        "num_warps": 4,
    }
    launcher.run(delta_kernel, tiles * p.heads_q * batch, arguments)
    return stats


def _launch(
    kernel: Any,
    programs: int,
    cfg: config.Config,
    tensors: dict[str, Tensor],
    *arguments: dict[str, Any],
    **more: Any,
) -> None:
    merged = {f"{name}_ptr": t for name, t in tensors.items()} | more
    for part in arguments:
        merged |= part
    launcher.run(kernel, programs, merged | {"num_warps": cfg.num_warps, "num_stages": cfg.num_stages})


def _common(p: Problem, x: Inputs, tiles: int, table: Tensor | None) -> dict[str, Any]:
    """What every kernel takes at run time: where tiles lie, lengths, the score's numbers."""
    nothing = x.q  # stands in for a pointer that no feature reads
    far = p.seqlen_q + p.seqlen_k  # a window wider than this sees everything: kept within int32
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
        "PACKED": p.packed,
        "HAS_USED_Q": x.seqused_q is not None,
        "HAS_USED_K": x.seqused_k is not None,
    }


def _features(p: Problem, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a kernel is compiled for: alignment, masks, head dims, precision. Nothing that data decides."""
    unit, strides = _strides(tensors)
    tf32 = p.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return strides | {
        "UNIT": unit,
        "HAS_LEFT": p.window_left is not None,
        "HAS_RIGHT": p.window_right is not None,
        "HAS_SOFTCAP": p.softcap > 0,
        "CHUNKS": chunks.split(p.head_dim),
        "CHUNKS_V": chunks.split(p.head_dim_v),
        "HEAD_DIM": p.head_dim,
        "HEAD_DIM_V": p.head_dim_v,
        "PRECISION": "tf32" if tf32 else "ieee",
    }


def _strides(tensors: dict[str, Tensor]) -> tuple[int, dict[str, int]]:
    """UNIT and each tensor's (batch, row, head) strides in units of it.

    UNIT is 16 bytes of elements where every row of every tensor begins at a multiple of 16 bytes, else 1.
    It is the one thing about strides that a kernel is compiled for.
    """
    width = 16 // next(iter(tensors.values())).element_size()
    strides = {
        name: (0 if t.dim() == 3 else t.stride(0), t.stride(-3), t.stride(-2)) for name, t in tensors.items()
    }
    aligned = all(s % width == 0 for three in strides.values() for s in three) and all(
        t.data_ptr() % 16 == 0 for t in tensors.values()
    )
    unit = width if aligned else 1
    names = ("batch", "row", "head")
    return unit, {
        f"{t}_{n}": s // unit for t, three in strides.items() for n, s in zip(names, three, strict=True)
    }


def _query_tiles(p: Problem, x: Inputs, block: int) -> tuple[int, Tensor | None]:
    """How many query tiles a head has (a batch entry's when dense), and the packed tile table."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return triton.cdiv(p.seqlen_q, block), None
    table = make_table(
        x.cu_seqlens_q, x.seqused_q, p.seqlen_q, x.cu_seqlens_k, x.seqused_k, p.seqlen_k, block
    )
    return table.shape[0], table


def _key_tiles(p: Problem, x: Inputs, block: int) -> tuple[int, Tensor | None]:
    """The same for key tiles."""
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        return triton.cdiv(p.seqlen_k, block), None
    table = make_table(
        x.cu_seqlens_k, x.seqused_k, p.seqlen_k, x.cu_seqlens_q, x.seqused_q, p.seqlen_q, block
    )
    return table.shape[0], table


def _programs(p: Problem, tiles: int, heads: int) -> int:
    return tiles * heads * (1 if p.packed else p.batch)
