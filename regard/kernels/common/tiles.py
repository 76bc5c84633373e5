"""Tiles of packed input, from a table made on the device without a sync.

cu_seqlens cuts the rows into n + 2 regions: the rows before the first sequence, the n sequences, and the
rows after the last one. Every row is in exactly one region, whatever the numbers in cu_seqlens, because
they are clamped to the rows and made rising; rows outside the sequences are in regions of which nothing
is used, so a kernel that walks the table writes every row. The grid is an upper bound from shapes alone;
a slot past the last tile has 0 rows, and its program leaves before it reads anything else.
"""

import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.common import launcher

FIELDS = tl.constexpr(
    8
)  # int32 a slot: start, rows, used, first, other_start, other_used; 2 spare for alignment


def make_table(
    cu_seqlens: Tensor,
    seqused: Tensor | None,
    rows: int,
    other_cu_seqlens: Tensor,
    other_seqused: Tensor | None,
    other_rows: int,
    tile: int,
) -> Tensor:
    """(slots, FIELDS) int32: for tiles of `tile` rows of one side, where they lie and what they face.

    A slot holds the region's first row, its number of rows, how many of them exist, the tile's first row
    within the region, and the first row and number of existing rows of the same sequence on the other side.
    """
    sequences = cu_seqlens.shape[0] - 1
    regions = sequences + 2
    slots = triton.cdiv(rows, tile) + regions
    bounds, offsets = cu_seqlens.new_empty((2, regions + 1)).unbind()
    table = cu_seqlens.new_empty((slots, FIELDS.value))
    arguments = {
        "bounds_ptr": bounds,
        "offsets_ptr": offsets,
        "sequences": sequences,
        "tile": tile,
        "num_warps": 4,
    }
    launcher.run(_bounds_kernel, 1, arguments | {"cu_ptr": cu_seqlens, "rows": rows, "BLOCK": 256})
    arguments |= {
        "used_ptr": bounds if seqused is None else seqused,
        "other_cu_ptr": other_cu_seqlens,
        "other_used_ptr": bounds if other_seqused is None else other_seqused,
        "table_ptr": table,
        "slots": slots,
        "other_rows": other_rows,
        "HAS_USED": seqused is not None,
        "HAS_OTHER_USED": other_seqused is not None,
        "BLOCK": 128,
    }
    launcher.run(_table_kernel, triton.cdiv(slots, 128), arguments)
    return table


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def _bound(cu_ptr, index, sequences, rows):
    """Where region `index` begins, before the bounds are made rising: 0, cu_seqlens .., rows."""
    inside = (index >= 1) & (index <= sequences + 1)
    bound = tl.load(cu_ptr + index - 1, mask=inside, other=0)
    bound = tl.where(index > sequences + 1, rows, bound)
    return tl.minimum(tl.maximum(bound, 0), rows)


@triton.jit(
    do_not_specialize=["sequences", "rows", "tile"],
    do_not_specialize_on_alignment=["cu_ptr", "bounds_ptr", "offsets_ptr"],
)
def _bounds_kernel(
    cu_ptr, bounds_ptr, offsets_ptr, sequences: tl.int32, rows: tl.int32, tile: tl.int32, BLOCK: tl.constexpr
):
    """bounds: where each region begins, rising. offsets: tiles before each region. One program."""
    regions = sequences + 2
    highest = 0
    tiles = 0
    for start in range(0, regions + 1, BLOCK):
        index = start + tl.arange(0, BLOCK)
        begin = tl.maximum(tl.associative_scan(_bound(cu_ptr, index, sequences, rows), 0, _max), highest)
        end = tl.maximum(tl.associative_scan(_bound(cu_ptr, index + 1, sequences, rows), 0, _max), begin)
        count = tl.where(index < regions, (end - begin + tile - 1) // tile, 0)
        tl.store(bounds_ptr + index, begin, mask=index <= regions)
        tl.store(offsets_ptr + index, tiles + tl.cumsum(count, 0) - count, mask=index <= regions)
        highest = tl.maximum(highest, tl.max(begin, 0))
        tiles += tl.sum(count, 0)


@triton.jit(
    do_not_specialize=["sequences", "slots", "other_rows", "tile"],
    do_not_specialize_on_alignment=[
        "bounds_ptr",
        "offsets_ptr",
        "used_ptr",
        "other_cu_ptr",
        "other_used_ptr",
        "table_ptr",
    ],
)
def _table_kernel(
    bounds_ptr,
    offsets_ptr,
    used_ptr,
    other_cu_ptr,
    other_used_ptr,
    table_ptr,
    sequences: tl.int32,
    slots: tl.int32,
    other_rows: tl.int32,
    tile: tl.int32,
    HAS_USED: tl.constexpr,
    HAS_OTHER_USED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    regions = sequences + 2
    # The last region whose offset is <= slot, by bisection: regions without tiles share an offset.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + regions
    width = regions
    while width > 0:
        middle = (low + high) // 2
        at_or_before = tl.load(offsets_ptr + middle) <= slot
        low = tl.where(at_or_before, middle, low)
        high = tl.where(at_or_before, high, middle)
        width = width // 2
    total = tl.load(offsets_ptr + regions)
    valid = slot < total
    start = tl.load(bounds_ptr + low)
    rows = tl.where(valid, tl.load(bounds_ptr + low + 1) - start, 0)
    first = (slot - tl.load(offsets_ptr + low)) * tile
    sequence = low - 1
    exists = valid & (low >= 1) & (low <= sequences)
    used = tl.where(exists, rows, 0)
    if HAS_USED:
        used = tl.minimum(tl.maximum(tl.load(used_ptr + sequence, mask=exists, other=0), 0), used)
    other_start = tl.load(other_cu_ptr + sequence, mask=exists, other=0)
    other_start = tl.minimum(tl.maximum(other_start, 0), other_rows)
    other_end = tl.load(other_cu_ptr + sequence + 1, mask=exists, other=0)
    other_used = tl.maximum(tl.minimum(other_end, other_rows) - other_start, 0)
    if HAS_OTHER_USED:
        limit = tl.load(other_used_ptr + sequence, mask=exists, other=0)
        other_used = tl.minimum(tl.maximum(limit, 0), other_used)
    row = table_ptr + slot * FIELDS
    inside = slot < slots
    tl.store(row, start, mask=inside)
    tl.store(row + 1, rows, mask=inside)
    tl.store(row + 2, used, mask=inside)
    tl.store(row + 3, first, mask=inside)
    tl.store(row + 4, other_start, mask=inside)
    tl.store(row + 5, tl.where(exists, other_used, 0), mask=inside)


@triton.jit
def locate(
    tile_index,
    batch,
    table_ptr,
    used_ptr,
    other_used_ptr,
    rows,
    other_rows,
    PACKED: tl.constexpr,
    HAS_USED: tl.constexpr,
    HAS_OTHER_USED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile's place: (start, rows, used, first, other_start, other_used), from the table or the shape."""
    if PACKED:
        slot = table_ptr + tile_index.to(tl.int64) * FIELDS
        start = tl.load(slot)
        length = tl.load(slot + 1)
        used = tl.load(slot + 2)
        first = tl.load(slot + 3)
        other_start = tl.load(slot + 4)
        other_used = tl.load(slot + 5)
    else:
        start = 0
        length = rows
        used = rows
        first = tile_index * BLOCK
        other_start = 0
        other_used = other_rows
        if HAS_USED:
            used = tl.minimum(tl.maximum(tl.load(used_ptr + batch), 0), rows)
        if HAS_OTHER_USED:
            other_used = tl.minimum(tl.maximum(tl.load(other_used_ptr + batch), 0), other_rows)
    return start, length, used, first, other_start, other_used
