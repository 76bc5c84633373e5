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
def visible(inside, rows, keys, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the keys that are `inside` each row sees: all broadcast together; offset is sk - sq."""
    if HAS_LEFT:
        inside = inside & (keys >= rows + offset - left)
    if HAS_RIGHT:
        inside = inside & (keys <= rows + offset + right)
    return inside
