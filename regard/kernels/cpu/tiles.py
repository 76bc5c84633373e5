"""How a slab is cut: chunks of (sequence, key head) pairs that share matmuls, and their tiles of rows.

A tile's scores are its panel, (pairs, group * rows, keys): the rows of a group of query heads are rows of
one matmul with the key head that they share, so k and v are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.cpu.ranges import KeyRange, first_row_with_a_key, key_range
from regard.problem import Problem

# Scores a panel: 2^18 in float32 are 1 MB, and the backward's p and dp together just fill an L2 cache of
# 2 MB. Elementwise passes ran at 6 to 15 elements a ns and core there, at half of that from 2^20 on.
PANEL = 2**18
# Rows of a panel that keep the matmuls fed: at 32,768 keys, 64 rows reached 142 Gflop/s a core, 16 rows 77.
FED = 64
# Rows of a tile. More of them mean fewer passes over k and dk; but where a diagonal cuts tiles, a taller
# one computes more scores beside it (a window of 256 and tiles of 128 rows: 383 keys for the 256 seen).
TALLEST, TALLEST_DIAGONAL = 512, 128

INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, slots=True)
class Sequences:
    """The tensors of a slab: q (n, sq, hq, d), k (n, sk, hk, d), v (n, sk, hk, dv), sinks (hq,).

    used_q and used_k (n,) are given where sequences of different lengths are padded with zeros. row_by_row
    asks for tiles of one row, which hold no key that is hidden from it: then nothing, NaN included, is ever
    multiplied by a hidden key's probability of 0. It is slow, and for input that is not finite.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    used_q: Tensor | None = None
    used_k: Tensor | None = None
    row_by_row: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Sequences [n0, n1) and key heads [h0, h1) of a slab: one matmul for all their pairs."""

    sequences: slice
    heads: slice
    group: int

    def keys(self, t: Tensor) -> Tensor:
        """(n, sk, hk, x) as a view (sequences, heads, sk, x)."""
        return t[self.sequences, :, self.heads].transpose(1, 2)

    def rows(self, t: Tensor, rows: slice) -> Tensor:
        """Rows of (n, sq, hq, x) as a view (sequences, heads, group, rows, x)."""
        t = t[self.sequences, rows]
        n, height, hq, x = t.shape
        return t.view(n, height, hq // self.group, self.group, x)[:, :, self.heads].permute(0, 2, 3, 1, 4)

    def of_heads(self, t: Tensor) -> Tensor:
        """(hq,) as a view (heads, group, 1, 1) that broadcasts against `rows`."""
        return t.view(t.shape[0] // self.group, self.group, 1, 1)[self.heads]


def pack(view: Tensor, dtype: torch.dtype) -> Tensor:
    """A view of `Chunk.rows` or `Chunk.keys` as contiguous matrices (pairs, rows or keys, x).

    Contiguous, because rows 8 heads apart slowed the matmuls to 75 %.
    """
    packed = view.to(dtype, memory_format=torch.contiguous_format).contiguous()
    return packed.flatten(2, -2).flatten(0, 1)


def unpack(view: Tensor, matrices: Tensor) -> None:
    """The inverse of `pack`: write matrices to the view."""
    view.copy_(matrices.view(view.shape))


def sees_all(p: Problem, x: Sequences) -> bool:
    """Whether every row sees every key of its sequence."""
    sq, sk = x.q.shape[1], x.k.shape[1]
    return key_range(0, sq, sq, sk, p.window_left, p.window_right) == KeyRange(0, 0, sk, sk)


def tile_rows(p: Problem, x: Sequences) -> tuple[int, int]:
    """Rows of a tile, and the most keys that one can see."""
    seqlen_q, seqlen_k = x.q.shape[1], x.k.shape[1]
    tallest, widest = TALLEST, max(1, seqlen_k)
    if p.window_left is not None or p.window_right is not None:
        tallest = 1 if x.row_by_row else TALLEST_DIAGONAL
    if p.window_left is not None and p.window_right is not None:
        widest = min(widest, tallest + p.window_left + p.window_right)
    rows = min(seqlen_q, tallest, max(1, FED // p.group, PANEL // (p.group * widest)))
    count = -(-seqlen_q // rows)
    return -(-seqlen_q // count), widest  # of even height


def chunks(p: Problem, x: Sequences) -> Iterator[Chunk]:
    """Every pair of the slab once, as many at a time as fill a panel."""
    n = x.q.shape[0]
    rows, keys = tile_rows(p, x)
    # A pair's packed rows count too: with a few keys a sequence they are larger than its scores.
    fit = max(1, PANEL // (p.group * rows * (keys + p.head_dim + p.head_dim_v)))
    heads, sequences = min(p.heads_k, fit), min(n, max(1, fit // p.heads_k))
    for n0 in range(0, n, sequences):
        for h0 in range(0, p.heads_k, heads):
            yield Chunk(slice(n0, min(n0 + sequences, n)), slice(h0, min(h0 + heads, p.heads_k)), p.group)


def blank_rows(p: Problem, x: Sequences) -> slice:
    """The rows that no tile covers: they see no key in any sequence of the slab."""
    if x.used_q is not None:
        return slice(0, 0)
    return slice(0, first_row_with_a_key(x.q.shape[1], x.k.shape[1], p.window_right))


def tiles(p: Problem, x: Sequences) -> Iterator[tuple[slice, KeyRange]]:
    """Each tile's rows and the keys it sees. Padded sequences differ: all keys, none in full."""
    sq, sk = x.q.shape[1], x.k.shape[1]
    height, _ = tile_rows(p, x)
    for start in range(blank_rows(p, x).stop, sq, height):
        stop = min(start + height, sq)
        if x.used_k is None:
            yield slice(start, stop), key_range(start, stop, sq, sk, p.window_left, p.window_right)
        else:
            yield slice(start, stop), KeyRange(0, sk, sk, sk)


def hide(
    p: Problem, x: Sequences, chunk: Chunk, rows: slice, keys: KeyRange, panel: Tensor, to: float
) -> None:
    """Set the panel to 0 or -inf where a row does not see the key, whatever is there, NaN included.

    By bits of integers: masked_fill_ and where run at 0.3 elements a ns and core, these at 8.
    """
    integer = INTEGER[panel.dtype]
    bits = int(torch.tensor(to, dtype=panel.dtype).view(integer))
    n = chunk.sequences.stop - chunk.sequences.start
    panel = panel.view(integer).view(n, -1, chunk.group, rows.stop - rows.start, keys.stop - keys.start)
    for start, stop in ((keys.start, keys.full_start), (keys.full_stop, keys.stop)):
        if start < stop:
            hidden = _hidden(p, x, chunk, rows, slice(start, stop), integer)
            strip = panel[..., start - keys.start : stop - keys.start]
            strip.bitwise_and_(~hidden)
            if bits:
                strip.bitwise_or_(hidden & bits)


def _hidden(p: Problem, x: Sequences, chunk: Chunk, rows: slice, keys: slice, dtype: torch.dtype) -> Tensor:
    """-1 where a row does not see the key, else 0: (rows, keys), or (sequences, 1, 1, rows, keys) if padded.

    Each bound is a number that is negative outside it; the sign of their union is spread over all bits.
    """
    sq, sk = x.q.shape[1], x.k.shape[1]
    row = torch.arange(rows.start, rows.stop, dtype=dtype)[:, None]
    key = torch.arange(keys.start, keys.stop, dtype=dtype)
    outside = torch.zeros((), dtype=dtype)
    if x.used_q is not None and x.used_k is not None:
        used_q, used_k = (t[chunk.sequences, None, None, None, None].to(dtype) for t in (x.used_q, x.used_k))
        distance = key - row - (used_k - used_q)
        outside = used_k - 1 - key
    else:
        distance = key - row - (sk - sq)
    if p.window_left is not None:
        outside = outside | (distance + min(p.window_left, sq + sk))
    if p.window_right is not None:
        outside = outside | (min(p.window_right, sq + sk) - distance)
    return outside >> (8 * dtype.itemsize - 1)
