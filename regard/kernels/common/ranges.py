"""Which tiles of the other side a tile sees, as one small pure function."""

import triton
import triton.language as tl


@triton.jit
def visible_tiles(
    first,
    last,
    shift,
    before,
    after,
    count,
    BLOCK: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
):
    """Tiles of BLOCK positions that positions first .. last (inclusive) see, of `count` positions.

    Position x sees y iff x + shift - before <= y <= x + shift + after and 0 <= y < count. Returns
    (begin, full_begin, full_end, end) in tiles, ascending: tiles full_begin .. full_end - 1 are seen
    whole by every position and lie inside count; the rest of begin .. end - 1 needs a mask. For query
    tiles shift = sk - sq, before = left, after = right; for key tiles shift = sq - sk, before = right,
    after = left.
    """
    see_begin = 0
    see_end = count
    full_begin = 0
    full_end = count
    if HAS_BEFORE:
        see_begin = tl.maximum(first + shift - before, 0)
        full_begin = tl.maximum(last + shift - before, 0)
    if HAS_AFTER:
        see_end = tl.minimum(last + shift + after + 1, count)
        full_end = tl.minimum(first + shift + after + 1, count)
    # max() first: division of negative numbers rounds towards zero here and down in Python.
    begin = see_begin // BLOCK
    end = tl.maximum((tl.maximum(see_end, 0) + BLOCK - 1) // BLOCK, begin)
    full_begin = tl.minimum((full_begin + BLOCK - 1) // BLOCK, end)
    full_end = tl.maximum(tl.minimum(tl.maximum(full_end, 0) // BLOCK, end), full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def visible(
    rows, keys, offset, left, right, q_count, k_count, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Which key each row sees: rows and keys broadcast against each other; offset is sk - sq."""
    mask = (rows < q_count) & (keys < k_count)
    if HAS_LEFT:
        mask = mask & (keys >= rows + offset - left)
    if HAS_RIGHT:
        mask = mask & (keys <= rows + offset + right)
    return mask
