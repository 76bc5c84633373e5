"""Backward, deterministic by construction: no atomics, every gradient summed in one program's order.

    delta_kernel   delta = rowsum(dO∘O) - dlse, and lse in base 2 (+inf where a row sees nothing)
    dkdv_kernel    one program a key tile and key head: over the query heads of the group, over the
                   query tiles that see it:   sᵀ = k·qᵀ   pᵀ = 2^(sᵀ - lse)   dv += pᵀ·dO
                                              dpᵀ = v·dOᵀ   dsᵀ = pᵀ(dpᵀ - delta)   dk += dsᵀ·q
                   or dk and dv in a launch each, where both do not fit into registers
    dq_kernel      one program a query tile and head: over the key tiles it sees:   dq += ds·k

Seven products a tile pair where a kernel with atomics needs five, but no float32 dq in memory, no
second pass over it and the same bits every run.
"""

import triton
import triton.language as tl

from regard.kernels.common import chunks, ranges, softmax
from regard.kernels.common.tiles import locate

_SIZES = ["rows_q", "rows_k", "heads_q", "group", "tiles", "stats_batch", "stats_head", "stats_delta"]
# stats' strides are in units of so many elements: dkdv_kernel reads two at once.
STATS_UNIT = tl.constexpr(32)
_VALUES = ["scale", "softcap", "left", "right"]
UNALIGNED = ["lse_ptr", "dlse_ptr", "table_ptr", "used_q_ptr", "used_k_ptr"]


def _strides(*names: str) -> list[str]:
    return [f"{t}_{s}" for t in names for s in ("batch", "row", "head")]


@triton.jit(
    do_not_specialize=[
        *_strides("out", "dout", "dlse"),
        "rows",
        "heads",
        "tiles",
        "stats_head",
        "stats_delta",
    ],
    do_not_specialize_on_alignment=UNALIGNED,
)
def delta_kernel(
    out_ptr, rest_ptr, dout_ptr, lse_ptr, dlse_ptr, stats_ptr,
    out_batch: tl.int64, out_row: tl.int64, out_head: tl.int64,
    dout_batch: tl.int64, dout_row: tl.int64, dout_head: tl.int64,
    dlse_batch: tl.int64, dlse_row: tl.int64, dlse_head: tl.int64,
    rows: tl.int32, heads: tl.int32, tiles: tl.int32, stats_head: tl.int64, stats_delta: tl.int64,
    UNIT: tl.constexpr, HAS_REST: tl.constexpr, HAS_DLSE: tl.constexpr,
    CHUNKS_V: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """stats[0] = lse in base 2, stats[1] = delta, both (batch, heads, rows and then spare ones).

    A row that sees no key, or does not exist, has lse -inf. It gets lse +inf and delta 0 here, which makes
    every probability of it exactly 0 in the kernels below, whatever its dout holds. So do the spare rows.
    delta is taken from out before its rounding (out + rest): from the rounded out, dS does not sum to 0 over
    a row, and where keys share a mean, dq had up to 90 times eager's error.
    """
    program = tl.program_id(0)
    head = (program // tiles) % heads
    batch = ((program // tiles) // heads).to(tl.int64)
    row = (program % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    row64 = row.to(tl.int64)
    out_base = out_ptr + batch * (out_batch * UNIT) + head * (out_head * UNIT)
    dout_base = dout_ptr + batch * (dout_batch * UNIT) + head * (dout_head * UNIT)
    out = chunks.load(out_base, row64, out_row * UNIT, rows, CHUNKS_V, HEAD_DIM_V)
    dout = chunks.load(dout_base, row64, dout_row * UNIT, rows, CHUNKS_V, HEAD_DIM_V)
    delta = tl.zeros([BLOCK_M], tl.float32)
    for i in tl.static_range(len(CHUNKS_V)):
        delta += tl.sum(out[i].to(tl.float32) * dout[i].to(tl.float32), 1)
    if HAS_REST:
        rest_base = rest_ptr + batch * (out_batch * UNIT) + head * (out_head * UNIT)
        rest = chunks.load(rest_base, row64, out_row * UNIT, rows, CHUNKS_V, HEAD_DIM_V)
        for i in tl.static_range(len(CHUNKS_V)):
            delta += tl.sum(rest[i].to(tl.float32) * dout[i].to(tl.float32), 1)
    inside = row < rows
    if HAS_DLSE:
        dlse_base = dlse_ptr + batch * dlse_batch + head * dlse_head
        delta -= tl.load(dlse_base + row64 * dlse_row, mask=inside, other=0.0)
    of_head = batch * heads + head
    lse = tl.load(lse_ptr + of_head * rows + row64, mask=inside, other=float("-inf"))
    empty = lse == float("-inf")
    at = stats_ptr + of_head * (stats_head * STATS_UNIT) + row64
    spare = row < stats_head * STATS_UNIT
    tl.store(at, tl.where(empty, float("inf"), lse * softmax.LOG2E), mask=spare)
    tl.store(at + stats_delta * STATS_UNIT, tl.where(empty, 0.0, delta), mask=spare)


@triton.jit
def probabilities(s, lse, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """(p, dscore): p = 2^(score - lse), and d score / d s over the scale (1 without softcap)."""
    if HAS_SOFTCAP:
        t = softmax.tanh(s * (scale / softcap))
        return tl.exp2(t * (softcap * softmax.LOG2E) - lse), 1.0 - t * t
    else:
        return tl.exp2(s * (scale * softmax.LOG2E) - lse), 1.0


@triton.jit
def add_to_dkdv(
    dk, dv, k, v, q_base, dout_base, stats_base, q_row, dout_row, q_head, dout_head, stats_head, stats_delta,
    begin, end, group, keys, offset, used_q, scale, softcap, left, right,
    EDGE: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Query tiles begin .. end - 1 of a group's heads into (dk, dv). EDGE: not every row sees every key.

    Keys past used_k need no mask: their rows of dk and dv are not kept. lse and delta are read without one,
    which costs 180 of 700 instructions a step: each thread holds 16 of them, and each would have a
    predicate of its own. What lies past used_q there is finite or not, but it is allocated.
    One loop over (head, tile): nested loops held 100 registers more and spilled.
    """
    rows = tl.arange(0, BLOCK_M)
    h = 0
    i = begin
    for _ in range(0, group * (end - begin)):
        first = i * BLOCK_M
        remaining = used_q - first
        q_tile = q_base + h * q_head + first * q_row
        q = chunks.load(q_tile, rows, q_row, remaining, CHUNKS, HEAD_DIM, not EDGE)
        stats = stats_base + h * stats_head + first
        lse = tl.load(stats + rows)
        s = chunks.inner(k, q, PRECISION)  # (BLOCK_N, BLOCK_M)
        p, dscore = probabilities(s, lse[None, :], scale, softcap, HAS_SOFTCAP)
        if EDGE:
            exists = (rows < remaining)[None, :]
            seen = ranges.visible(
                exists, (first + rows)[None, :], keys[:, None], offset, left, right, HAS_LEFT, HAS_RIGHT
            )
            p = tl.where(seen, p, 0.0)
        dout_tile = dout_base + h * dout_head + first * dout_row
        dout = chunks.load(dout_tile, rows, dout_row, remaining, CHUNKS_V, HEAD_DIM_V, not EDGE)
        if WANT_DV:
            dv = chunks.accumulate(dv, p.to(dout[0].dtype), dout, PRECISION)
        if WANT_DK:
            delta = tl.load(stats + stats_delta + rows)
            if EDGE:
                delta = tl.where(rows < remaining, delta, 0.0)
            dp = chunks.inner(v, dout, PRECISION)
            ds = p * (dp - delta[None, :]) * dscore
            dk = chunks.accumulate(dk, ds.to(q[0].dtype), q, PRECISION)
        i += 1
        h = tl.where(i == end, h + 1, h)
        i = tl.where(i == end, begin, i)
    return dk, dv


@triton.jit(
    do_not_specialize=[*_strides("q", "k", "v", "dout", "dk", "dv"), *_SIZES, *_VALUES],
    do_not_specialize_on_alignment=UNALIGNED,
)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dk_ptr, dv_ptr, stats_ptr, table_ptr, used_q_ptr, used_k_ptr,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    dout_batch: tl.int64, dout_row: tl.int64, dout_head: tl.int64,
    dk_batch: tl.int64, dk_row: tl.int64, dk_head: tl.int64,
    dv_batch: tl.int64, dv_row: tl.int64, dv_head: tl.int64,
    rows_q: tl.int32, rows_k: tl.int32, heads_q: tl.int32, group: tl.int32, tiles: tl.int32,
    stats_batch: tl.int64, stats_head: tl.int64, stats_delta: tl.int64,
    scale: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32,
    UNIT: tl.constexpr, PACKED: tl.constexpr, HAS_USED_Q: tl.constexpr, HAS_USED_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    heads_k = heads_q // group
    tile_index = program % tiles  # early key tiles see most rows of causal: they come first
    head_k = (program // tiles) % heads_k
    batch = (program // tiles) // heads_k
    start, length, used_k, first, q_start, used_q = locate(
        tile_index, batch, table_ptr, used_k_ptr, used_q_ptr, rows_k, rows_q,
        PACKED, HAS_USED_K, HAS_USED_Q, BLOCK_N,
    )  # fmt: skip
    if first >= length:
        return  # a spare slot

    start = start.to(tl.int64)
    q_start = q_start.to(tl.int64)
    b = batch.to(tl.int64)
    first64 = first.to(tl.uint32).to(tl.int64)  # its upper half takes no register
    q_row = q_row * UNIT
    dout_row = dout_row * UNIT
    k_base = k_ptr + b * (k_batch * UNIT) + (start + first64) * (k_row * UNIT) + head_k * (k_head * UNIT)
    v_base = v_ptr + b * (v_batch * UNIT) + (start + first64) * (v_row * UNIT) + head_k * (v_head * UNIT)
    tile = tl.arange(0, BLOCK_N)
    k = chunks.load(k_base, tile, k_row * UNIT, used_k - first, CHUNKS, HEAD_DIM)
    v = 0
    dk = 0
    dv = 0
    if WANT_DK:
        v = chunks.load(v_base, tile, v_row * UNIT, used_k - first, CHUNKS_V, HEAD_DIM_V)
        dk = chunks.zeros(BLOCK_N, CHUNKS)
    if WANT_DV:
        dv = chunks.zeros(BLOCK_N, CHUNKS_V)

    offset = used_k - used_q
    keys = first + tile
    last = tl.minimum(first + BLOCK_N, used_k) - 1
    rows = tl.where(first < used_k, used_q, 0)  # keys that do not exist are seen by nothing
    begin, full_begin, full_end, end = ranges.visible_tiles(
        first, last, -offset, right, left, rows, BLOCK_M, HAS_RIGHT, HAS_LEFT
    )
    head = head_k * group
    q_base = q_ptr + b * (q_batch * UNIT) + q_start * q_row + head * (q_head * UNIT)
    dout_base = dout_ptr + b * (dout_batch * UNIT) + q_start * dout_row + head * (dout_head * UNIT)
    stats_base = stats_ptr + b * (stats_batch * STATS_UNIT) + head * (stats_head * STATS_UNIT)
    if PACKED:
        stats_base += q_start
    if HAS_RIGHT:
        dk, dv = add_to_dkdv(
            dk, dv, k, v, q_base, dout_base, stats_base, q_row, dout_row, q_head * UNIT, dout_head * UNIT,
            stats_head * STATS_UNIT, stats_delta * STATS_UNIT, begin, full_begin, group, keys, offset,
            used_q, scale, softcap, left, right, True, WANT_DK, WANT_DV,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
            CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_M, PRECISION,
        )  # fmt: skip
    dk, dv = add_to_dkdv(
        dk, dv, k, v, q_base, dout_base, stats_base, q_row, dout_row, q_head * UNIT, dout_head * UNIT,
        stats_head * STATS_UNIT, stats_delta * STATS_UNIT, full_begin, full_end, group, keys, offset,
        used_q, scale, softcap, left, right, False, WANT_DK, WANT_DV,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_M, PRECISION,
    )  # fmt: skip
    dk, dv = add_to_dkdv(
        dk, dv, k, v, q_base, dout_base, stats_base, q_row, dout_row, q_head * UNIT, dout_head * UNIT,
        stats_head * STATS_UNIT, stats_delta * STATS_UNIT, full_end, end, group, keys, offset,
        used_q, scale, softcap, left, right, True, WANT_DK, WANT_DV,
        HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_M, PRECISION,
    )  # fmt: skip

    exists = keys < used_k
    at = start + first64
    if WANT_DK:
        dk_base = dk_ptr + b * (dk_batch * UNIT) + at * (dk_row * UNIT) + head_k * (dk_head * UNIT)
        dk = chunks.keep(chunks.scale(dk, tl.full([BLOCK_N], scale, tl.float32)), exists)
        chunks.store(dk_base, tile, dk_row * UNIT, length - first, dk, CHUNKS, HEAD_DIM)
    if WANT_DV:
        dv_base = dv_ptr + b * (dv_batch * UNIT) + at * (dv_row * UNIT) + head_k * (dv_head * UNIT)
        dv = chunks.keep(dv, exists)
        chunks.store(dv_base, tile, dv_row * UNIT, length - first, dv, CHUNKS_V, HEAD_DIM_V)


@triton.jit
def add_to_dq(
    dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, begin, end, rows, offset, used_k,
    scale, softcap, left, right,
    EDGE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Key tiles begin .. end - 1 into dq. EDGE: not every row sees every key."""
    tile = tl.arange(0, BLOCK_N)
    for j in range(begin, end):
        first = j * BLOCK_N
        remaining = used_k - first
        k = chunks.load(k_base + first * k_row, tile, k_row, remaining, CHUNKS, HEAD_DIM, not EDGE)
        v = chunks.load(v_base + first * v_row, tile, v_row, remaining, CHUNKS_V, HEAD_DIM_V, not EDGE)
        s = chunks.inner(q, k, PRECISION)  # (BLOCK_M, BLOCK_N)
        p, dscore = probabilities(s, lse[:, None], scale, softcap, HAS_SOFTCAP)
        if EDGE:
            keys = (first + tile)[None, :]
            seen = ranges.visible(
                keys < used_k, rows[:, None], keys, offset, left, right, HAS_LEFT, HAS_RIGHT
            )
            p = tl.where(seen, p, 0.0)
        dp = chunks.inner(dout, v, PRECISION)
        ds = p * (dp - delta[:, None]) * dscore
        dq = chunks.accumulate(dq, ds.to(k[0].dtype), k, PRECISION)
    return dq


@triton.jit(
    do_not_specialize=[*_strides("q", "k", "v", "dout", "dq"), *_SIZES, *_VALUES],
    do_not_specialize_on_alignment=UNALIGNED,
)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, dq_ptr, stats_ptr, table_ptr, used_q_ptr, used_k_ptr,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    dout_batch: tl.int64, dout_row: tl.int64, dout_head: tl.int64,
    dq_batch: tl.int64, dq_row: tl.int64, dq_head: tl.int64,
    rows_q: tl.int32, rows_k: tl.int32, heads_q: tl.int32, group: tl.int32, tiles: tl.int32,
    stats_batch: tl.int64, stats_head: tl.int64, stats_delta: tl.int64,
    scale: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32,
    UNIT: tl.constexpr, PACKED: tl.constexpr, HAS_USED_Q: tl.constexpr, HAS_USED_K: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
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

    k_start = k_start.to(tl.int64)
    b = batch.to(tl.int64)
    at = start.to(tl.int64) + first.to(tl.int64)
    k_row = k_row * UNIT
    v_row = v_row * UNIT
    q_base = q_ptr + b * (q_batch * UNIT) + at * (q_row * UNIT) + head * (q_head * UNIT)
    dout_base = dout_ptr + b * (dout_batch * UNIT) + at * (dout_row * UNIT) + head * (dout_head * UNIT)
    dq_base = dq_ptr + b * (dq_batch * UNIT) + at * (dq_row * UNIT) + head * (dq_head * UNIT)
    k_base = k_ptr + b * (k_batch * UNIT) + k_start * k_row + (head // group) * (k_head * UNIT)
    v_base = v_ptr + b * (v_batch * UNIT) + k_start * v_row + (head // group) * (v_head * UNIT)
    stats_base = stats_ptr + b * (stats_batch * STATS_UNIT) + head * (stats_head * STATS_UNIT) + at

    tile = tl.arange(0, BLOCK_M)
    rows = first + tile
    exists = rows < used_q
    q = chunks.load(q_base, tile, q_row * UNIT, used_q - first, CHUNKS, HEAD_DIM)
    dout = chunks.load(dout_base, tile, dout_row * UNIT, used_q - first, CHUNKS_V, HEAD_DIM_V)
    lse = tl.load(stats_base + tile, mask=exists, other=float("inf"))
    delta = tl.load(stats_base + stats_delta * STATS_UNIT + tile, mask=exists, other=0.0)
    dq = chunks.zeros(BLOCK_M, CHUNKS)

    offset = used_k - used_q
    last = tl.minimum(first + BLOCK_M, used_q) - 1
    keys = tl.where(first < used_q, used_k, 0)  # rows that do not exist see nothing
    begin, full_begin, full_end, end = ranges.visible_tiles(
        first, last, offset, left, right, keys, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LEFT:
        dq = add_to_dq(
            dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, begin, full_begin, rows, offset,
            used_k, scale, softcap, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
            CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
        )  # fmt: skip
    dq = add_to_dq(
        dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, full_begin, full_end, rows, offset,
        used_k, scale, softcap, left, right, False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = add_to_dq(
        dq, q, dout, lse, delta, k_base, v_base, k_row, v_row, full_end, end, rows, offset,
        used_k, scale, softcap, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP,
        CHUNKS, CHUNKS_V, HEAD_DIM, HEAD_DIM_V, BLOCK_N, PRECISION,
    )  # fmt: skip
    dq = chunks.keep(chunks.scale(dq, tl.full([BLOCK_M], scale, tl.float32)), lse != float("inf"))
    chunks.store(dq_base, tile, dq_row * UNIT, length - first, dq, CHUNKS, HEAD_DIM)
