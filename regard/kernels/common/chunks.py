"""Head dimensions as tuples of chunks.

A tile's head dimension is a sum of powers of two (80 = 64 + 16, 192 = 128 + 64), and operands and
accumulators are tuples with one tensor a chunk, so that no product is padded to the next power of two.
"""

import functools

import triton
import triton.language as tl


@functools.cache
def split(head_dim: int) -> tuple[int, ...]:
    """The chunks that cover head_dim: one or two powers of two from 16 to 256, the least padded sum.

    256 is two of 128: the forward stores a chunk at a time, and a single one of 256 made it spill 60 bytes.
    """
    sizes = (16, 32, 64, 128, 256)
    sums = [(a,) for a in sizes[:-1]] + [(a, b) for a in sizes for b in sizes if b <= a]
    return min((s for s in sums if sum(s) >= head_dim), key=lambda s: (sum(s), len(s)))


@triton.constexpr_function
def _columns_before(chunks, i):
    return sum(chunks[:i])


@triton.jit
def load(
    base, rows, row_stride, limit, CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr, WHOLE: tl.constexpr = False
):  # fmt: skip
    """Rows of (.., HEAD_DIM) at base as a tuple of (rows, chunk) tiles; 0 past limit. WHOLE: none is past."""
    tiles = ()
    for i in tl.static_range(len(CHUNKS)):
        columns = _columns_before(CHUNKS, i) + tl.arange(0, CHUNKS[i])
        pointers = base + rows[:, None] * row_stride + columns[None, :]
        if _columns_before(CHUNKS, i + 1) > HEAD_DIM:  # only the last chunk can be padded
            mask = (rows[:, None] < limit) | WHOLE
            tiles = tiles + (tl.load(pointers, mask=mask & (columns[None, :] < HEAD_DIM), other=0.0),)
        elif WHOLE:
            tiles = tiles + (tl.load(pointers),)
        else:
            tiles = tiles + (tl.load(pointers, mask=rows[:, None] < limit, other=0.0),)
    return tiles


@triton.jit
def store(base, rows, row_stride, limit, tiles, CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Write the tuple of tiles to rows below limit."""
    for i in tl.static_range(len(CHUNKS)):
        columns = _columns_before(CHUNKS, i) + tl.arange(0, CHUNKS[i])
        pointers = base + rows[:, None] * row_stride + columns[None, :]
        mask = rows[:, None] < limit
        if _columns_before(CHUNKS, i + 1) > HEAD_DIM:  # only the last chunk can be padded
            mask = mask & (columns[None, :] < HEAD_DIM)
        tl.store(pointers, tiles[i].to(base.dtype.element_ty), mask=mask)


@triton.jit
def _store_both(base, rest_base, rows, row_stride, limit, tile, COLUMN: tl.constexpr, HEAD_DIM: tl.constexpr):
    columns = COLUMN + tl.arange(0, tile.shape[1])
    mask = (rows[:, None] < limit) & (columns[None, :] < HEAD_DIM)
    at = rows[:, None] * row_stride + columns[None, :]
    rounded = tile.to(base.dtype.element_ty)
    tl.store(base + at, rounded, mask=mask)
    tl.store(rest_base + at, (tile - rounded.to(tl.float32)).to(rounded.dtype), mask=mask)


@triton.jit
def store_with_rest(
    base, rest_base, rows, row_stride, limit, tiles, CHUNKS: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """`store`, and what its rounding leaves off to rest_base. 64 columns at a time: more of both spills."""
    for i in tl.static_range(len(CHUNKS)):
        if CHUNKS[i] == 128:
            halves = tl.permute(tl.reshape(tiles[i], (rows.shape[0], 2, 64)), (0, 2, 1))
            left, right = tl.split(halves)
            _store_both(base, rest_base, rows, row_stride, limit, left, _columns_before(CHUNKS, i), HEAD_DIM)
            _store_both(
                base, rest_base, rows, row_stride, limit, right, _columns_before(CHUNKS, i) + 64, HEAD_DIM
            )
        else:
            _store_both(
                base, rest_base, rows, row_stride, limit, tiles[i], _columns_before(CHUNKS, i), HEAD_DIM
            )


@triton.jit
def zeros(ROWS: tl.constexpr, CHUNKS: tl.constexpr):
    tiles = ()
    for i in tl.static_range(len(CHUNKS)):
        tiles = tiles + (tl.full([ROWS, CHUNKS[i]], 0.0, tl.float32),)
    return tiles


@triton.jit
def scale(tiles, factor):
    """Each row of the tiles times its factor."""
    scaled = ()
    for i in tl.static_range(len(tiles)):
        scaled = scaled + (tiles[i] * factor[:, None],)
    return scaled


@triton.jit
def keep(tiles, exists):
    """The tiles with rows that do not exist set to 0, whatever they held."""
    kept = ()
    for i in tl.static_range(len(tiles)):
        kept = kept + (tl.where(exists[:, None], tiles[i], 0.0),)
    return kept


@triton.jit
def inner(a, b, PRECISION: tl.constexpr):
    """a · bᵀ over the head dimension: tuples of (M, chunk) and (N, chunk) -> (M, N) in float32."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(a)):
        product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def accumulate(tiles, weights, b, PRECISION: tl.constexpr):
    """tiles + weights · b: weights (M, N), b a tuple of (N, chunk), tiles a tuple of (M, chunk)."""
    sums = ()
    for i in tl.static_range(len(tiles)):
        sums = sums + (tl.dot(weights, b[i], tiles[i], input_precision=PRECISION),)
    return sums


@triton.jit
def rescale_and_add(tiles, factor, weights, b, PRECISION: tl.constexpr):
    """tiles · factor + weights · b, each product summed apart and added by an FMA, which rounds to nearest.

    Tensor cores truncate what they add to an accumulator: over 17,580 keys of one sign an H200's lost
    6.7e-5 of out, and with it delta was off by the same part in every row (dk: 3 times the error).
    """
    sums = ()
    for i in tl.static_range(len(tiles)):
        product = tl.dot(weights, b[i], input_precision=PRECISION)
        sums = sums + (tl.fma(tiles[i], tl.broadcast_to(factor[:, None], tiles[i].shape), product),)
    return sums
