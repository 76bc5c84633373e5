"""Forward: one program a query tile and query head, a running softmax over the key tiles it sees.

q tile ─┐
        ├─ s = q·kᵀ ─ softcap ─ mask ─ p = 2^(s·scale - m) ─ acc = acc·alpha + p·v ─ out, lse
k, v ───┘   (the mask only in tiles at the edges, in loops of their own)
"""

import triton
import triton.language as tl

from regard.kernels.common import chunks, ranges, softmax
from regard.kernels.common.tiles import locate

RUNTIME = [
    *(f"{t}_{s}" for t in ("q", "k", "v", "out") for s in ("batch", "row", "head")),
    *("rows_q", "rows_k", "heads_q", "group", "tiles", "lse_batch", "lse_head"),
    *("scale", "softcap", "left", "right"),
]
UNALIGNED = ["lse_ptr", "sinks_ptr", "table_ptr", "used_q_ptr", "used_k_ptr"]


@triton.jit
def capped(s, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """The score in base 2 up to a factor: (s, that factor). Without softcap the factor folds the scale."""
    if HAS_SOFTCAP:
        return softmax.tanh(s * (scale / softcap)), softcap * softmax.LOG2E
    else:
        return s, scale * softmax.LOG2E


@triton.jit
def attend(
    acc, m_i, l_i, w_i, q, k_base, v_base, k_row, v_row, begin, end, rows, offset, used_k,
    scale, softcap, left, right,
    EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Key tiles begin .. end - 1 into (acc, m_i, l_i, w_i). EDGE: not every row sees every key.

    l_i sums the probabilities as they are, for lse; w_i as they are rounded for the product with v, for out:
    out stays a weighted mean of v, without which dS does not sum to 0 and dq has up to 6 times eager's error.
    w_i is a product with ones, 8 columns wide: to sum the rounded numbers themselves, ptxas rounds one at a
    time instead of two, 64 slow conversions a step, and the forward lost 28 % at head dim 128.
    A loop for each kind of tile: with a branch in one loop ptxas waits after every single wgmma (C7515).
    """
    tile = tl.arange(0, BLOCK_N)
    ROUNDED: tl.constexpr = q[0].dtype != tl.float32
    ones = (tl.full([BLOCK_N, 8], 1.0, q[0].dtype),)
    for j in range(begin, end):
        first = j * BLOCK_N
        remaining = used_k - first
        k = chunks.load(k_base + first * k_row, tile, k_row, remaining, CHUNKS, HEAD_DIM, not EDGE)
        s = chunks.inner(q, k, PRECISION)  # (BLOCK_M, BLOCK_N)
        s, factor = capped(s, scale, softcap, HAS_SOFTCAP)
        if EDGE:
            keys = (first + tile)[None, :]
            seen = ranges.visible(
                keys < used_k, rows[:, None], keys, offset, left, right, HAS_LEFT, HAS_RIGHT
            )
            s = tl.where(seen, s, float("-inf"))
        p, m_i, l_i, alpha = softmax.running_softmax(s, factor, m_i, l_i)
        v = chunks.load(v_base + first * v_row, tile, v_row, remaining, CHUNKS_V, HEAD_DIM_V, not EDGE)
        weights = p.to(v[0].dtype)
        if ROUNDED:
            w_i = chunks.rescale_and_add(w_i, alpha, weights, ones, PRECISION)
        acc = chunks.rescale_and_add(acc, alpha, weights, v, PRECISION)
    return acc, m_i, l_i, w_i


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=UNALIGNED)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, rest_ptr, lse_ptr, sinks_ptr, table_ptr, used_q_ptr, used_k_ptr,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    out_batch: tl.int64, out_row: tl.int64, out_head: tl.int64,
    rows_q: tl.int32, rows_k: tl.int32, heads_q: tl.int32, group: tl.int32, tiles: tl.int32,
    lse_batch: tl.int64, lse_head: tl.int64,
    scale: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32,
    UNIT: tl.constexpr, PACKED: tl.constexpr, HAS_USED_Q: tl.constexpr, HAS_USED_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_REST: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Strides are in units of UNIT elements: the factor tells the compiler how the rows are aligned."""
    program = tl.program_id(0)
    tile_index = program % tiles
    head = (program // tiles) % heads_q
    batch = (program // tiles) // heads_q
    if HAS_RIGHT and not PACKED:
        tile_index = tiles - 1 - tile_index  # the longest rows of causal first
    start, length, used_q, first, k_start, used_k = locate(
        tile_index, batch, table_ptr, used_q_ptr, used_k_ptr, rows_q, rows_k,
        PACKED, HAS_USED_Q, HAS_USED_K, BLOCK_M,
    )  # fmt: skip
    if first >= length:
        return  # a spare slot

    start = start.to(tl.int64)
    k_start = k_start.to(tl.int64)
    b = batch.to(tl.int64)
    k_row = k_row * UNIT
    v_row = v_row * UNIT
    q_base = q_ptr + b * (q_batch * UNIT) + start * (q_row * UNIT) + head * (q_head * UNIT)
    k_base = k_ptr + b * (k_batch * UNIT) + k_start * k_row + (head // group) * (k_head * UNIT)
    v_base = v_ptr + b * (v_batch * UNIT) + k_start * v_row + (head // group) * (v_head * UNIT)

    out_at = b * (out_batch * UNIT) + (start + first) * (out_row * UNIT) + head * (out_head * UNIT)
    rows = first + tl.arange(0, BLOCK_M)
    q_tile = q_base + first * (q_row * UNIT)
    q = chunks.load(q_tile, tl.arange(0, BLOCK_M), q_row * UNIT, used_q - first, CHUNKS, HEAD_DIM)
    acc = chunks.zeros(BLOCK_M, CHUNKS_V)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    w_i = (tl.zeros([BLOCK_M, 8], tl.float32),)

    offset = used_k - used_q
    last = tl.minimum(first + BLOCK_M, used_q) - 1
    keys = tl.where(first < used_q, used_k, 0)  # rows that do not exist see nothing
    begin, full_begin, full_end, end = ranges.visible_tiles(
        first, last, offset, left, right, keys, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        acc, m_i, l_i, w_i = attend(
            acc, m_i, l_i, w_i, q, k_base, v_base, k_row, v_row, begin, full_begin, rows, offset,
            used_k, scale, softcap, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
            CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
        )  # fmt: skip
    acc, m_i, l_i, w_i = attend(
        acc, m_i, l_i, w_i, q, k_base, v_base, k_row, v_row, full_begin, full_end, rows, offset,
        used_k, scale, softcap, left, right, False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    acc, m_i, l_i, w_i = attend(
        acc, m_i, l_i, w_i, q, k_base, v_base, k_row, v_row, full_end, end, rows, offset, used_k,
        scale, softcap, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
    )  # fmt: skip

    lse_base = lse_ptr + b * lse_batch + head * lse_head + start
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head)
    weight = l_i if q[0].dtype == tl.float32 else tl.max(w_i[0], 1)  # its 8 columns are equal
    factor, lse = softmax.finish(m_i, l_i, weight, sink, rows < used_q, HAS_SINKS)
    tl.store(lse_base + rows, lse, mask=rows < length)
    tile = tl.arange(0, BLOCK_M)
    acc = chunks.keep(chunks.scale(acc, factor), factor != 0.0)  # 0 for no key, even where v holds inf
    if HAS_REST:
        chunks.store_with_rest(
            out_ptr + out_at,
            rest_ptr + out_at,
            tile,
            out_row * UNIT,
            length - first,
            acc,
            CHUNKS_V,
            HEAD_DIM_V,
        )
    else:
        chunks.store(out_ptr + out_at, tile, out_row * UNIT, length - first, acc, CHUNKS_V, HEAD_DIM_V)
