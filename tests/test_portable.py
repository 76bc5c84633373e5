"""The portable kernels' own parts: tile ranges, packed tile tables, chunks, what compiles and when.

Kernels run on the GPU where there is one, and in Triton's interpreter under TRITON_INTERPRET=1; elsewhere
only the host-side tests run. What the backend computes is tested with every other one in test_scenarios.py.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import regard  # noqa: E402
from regard.kernels.common import chunks, ranges, softmax, tiles  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU, or TRITON_INTERPRET=1 before Triton is imported",
)


@triton.jit
def _ranges_kernel(
    out_ptr, first, last, shift, before, after, count, BLOCK: tl.constexpr, B: tl.constexpr, A: tl.constexpr
):
    begin, full_begin, full_end, end = ranges.visible_tiles(
        first, last, shift, before, after, count, BLOCK, B, A
    )
    tl.store(out_ptr, begin)
    tl.store(out_ptr + 1, full_begin)
    tl.store(out_ptr + 2, full_end)
    tl.store(out_ptr + 3, end)


_BLOCK = 4


@runs_kernels
@settings(max_examples=200, deadline=None)
@given(
    first=st.integers(0, 12),
    size=st.integers(1, 6),
    shift=st.integers(-14, 14),
    before=st.none() | st.integers(0, 12),
    after=st.none() | st.integers(0, 12),
    count=st.integers(0, 24),
)
@example(first=0, size=4, shift=-9, before=None, after=0, count=8)
@example(first=0, size=4, shift=20, before=1, after=0, count=8)
def test_visible_tiles_are_the_brute_force_ones(first, size, shift, before, after, count):
    out = torch.full((4,), -7, dtype=torch.int32, device=DEVICE)
    last = first + size - 1
    _ranges_kernel[(1,)](
        out, first, last, shift, before or 0, after or 0, count, _BLOCK, before is not None, after is not None
    )
    begin, full_begin, full_end, end = out.tolist()

    def sees(x: int, y: int) -> bool:
        low = before is None or y >= x + shift - before
        high = after is None or y <= x + shift + after
        return low and high and 0 <= y < count

    assert 0 <= begin <= full_begin <= full_end <= end
    for tile in range(-(-count // _BLOCK) + 2):
        seen = [
            sees(x, y) for x in range(first, last + 1) for y in range(tile * _BLOCK, tile * _BLOCK + _BLOCK)
        ]
        inside = begin <= tile < end
        assert inside or not any(seen), f"tile {tile} is skipped but seen"
        if full_begin <= tile < full_end:
            assert all(seen), f"tile {tile} is called whole but is not"
        elif inside and all(seen):
            # A whole tile may stand among the masked ones only where the whole range is empty or ragged.
            raise AssertionError(f"tile {tile} is whole but masked")


def _table(cu, used, rows, other_cu, other_used, other_rows, tile):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)

    return tiles.make_table(
        tensor(cu), tensor(used), rows, tensor(other_cu), tensor(other_used), other_rows, tile
    )[:, :6].tolist()


@st.composite
def _packed(draw):
    lengths = draw(st.lists(st.integers(0, 19), min_size=0, max_size=12))
    other = draw(st.lists(st.integers(0, 19), min_size=len(lengths), max_size=len(lengths)))
    lead, tail = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    used = draw(st.none() | st.just([draw(st.integers(0, n)) for n in lengths]))
    return lengths, other, lead, tail, used


@runs_kernels
@settings(max_examples=60, deadline=None)
@given(case=_packed(), tile=st.sampled_from([1, 4, 16]))
def test_tile_table_covers_every_row_once(case, tile):
    lengths, other, lead, tail, used = case
    cu = [lead]
    other_cu = [0]
    for a, b in zip(lengths, other, strict=True):
        cu.append(cu[-1] + a)
        other_cu.append(other_cu[-1] + b)
    rows = cu[-1] + tail
    covered = [0] * rows
    exists = [0] * rows
    for start, length, existing, first, other_start, other_existing in _table(
        cu, used, rows, other_cu, None, other_cu[-1], tile
    ):
        if first >= length:
            continue  # a spare slot
        for row in range(first, min(first + tile, length)):
            covered[start + row] += 1
            exists[start + row] = row < existing
        if existing:
            i = max(s for s in range(len(lengths)) if cu[s] == start and lengths[s] > 0)
            assert (other_start, other_existing) == (other_cu[i], other[i])
    assert covered == [1] * rows
    expected = [0] * rows
    for i, n in enumerate(lengths):
        for row in range(n if used is None else used[i]):
            expected[cu[i] + row] = 1
    assert exists == expected


@runs_kernels
@pytest.mark.parametrize(
    "cu", [[0, 300, -5, 9, 20], [5, 5, 5, 5, 5], [2**31 - 1, -(2**31), 7, 3, 2**30], [9, 7, 5, 3, 1]]
)
def test_tile_table_stays_inside_the_rows_whatever_cu_seqlens_holds(cu):
    covered = [0] * 23
    for start, length, _, first, other_start, other_existing in _table(
        cu, [99, -4, 3, 2**31 - 1], 23, cu, cu[1:], 31, 4
    ):
        assert other_start >= 0
        assert other_start + other_existing <= 31
        for row in range(first, min(first + 4, length)):
            covered[start + row] += 1
    assert covered == [1] * 23


@pytest.mark.parametrize("head_dim", range(1, 513))
def test_chunks_cover_the_head_dim_with_little_padding(head_dim):
    split = chunks.split(head_dim)
    assert len(split) <= 2
    assert all(c >= 16 and c & (c - 1) == 0 for c in split)
    assert head_dim <= sum(split)
    assert sum(split) < max(16, 1.34 * head_dim) + 16


@pytest.mark.parametrize(
    ("head_dim", "split"), [(80, (64, 16)), (96, (64, 32)), (128, (128,)), (192, (128, 64))]
)
def test_chunks_of_common_head_dims_have_no_padding(head_dim, split):
    assert chunks.split(head_dim) == split


@triton.jit
def _tanh_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, softmax.tanh(tl.load(x_ptr + at)))


@runs_kernels
def test_tanh_is_accurate_everywhere():
    x = torch.cat([torch.logspace(-20, 3, 500), -torch.logspace(-20, 3, 500), torch.zeros(24)]).to(DEVICE)
    x = x[torch.randperm(1024, device=DEVICE)]
    y = torch.empty_like(x)
    _tanh_kernel[(1,)](x, y, 1024)
    expected = torch.tanh(x.double())
    error = (y.double() - expected).abs()
    assert (error <= 3 * torch.finfo(torch.float32).eps * expected.abs()).all()


@runs_kernels
def test_dtypes_and_sizes_that_have_no_kernel_are_refused_by_name():
    q = torch.randn(1, 4, 1, 8, dtype=torch.float64, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"portable: serves .* not float64"):
        regard.attention(q, q, q, backend="portable")


@runs_kernels
@pytest.mark.parametrize("empty", ["batch", "queries", "keys"])
def test_zero_sizes_are_normal_calls(empty):
    sizes = {"batch": (0, 4, 4), "queries": (2, 0, 4), "keys": (2, 4, 0)}[empty]
    b, sq, sk = sizes
    q, k, v = (torch.randn(b, s, 2, 8, device=DEVICE).requires_grad_() for s in (sq, sk, sk))
    out, lse = regard.attention(q, k, v, causal=True, return_lse=True, backend="portable")
    (out.sum() + torch.where(lse.isinf(), 0, lse).sum()).backward()
    assert out.shape == (b, sq, 2, 8)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for t in (q, k, v):
        assert t.grad is not None
        assert (t.grad == 0).all()
