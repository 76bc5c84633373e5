"""The CPU backend's own parts: ranges, memory, PyTorch's kernel, what is not finite, threads.

Its values are compared with the reference in test_scenarios.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import problem, reference
from regard.kernels import cpu
from regard.kernels.cpu import flash, tiles
from regard.kernels.cpu.ranges import first_row_with_a_key, key_range
from regard.kernels.cpu.slabs import SHORT, Even, Padded, slabs

NAN, INF = float("nan"), float("inf")
SIDES = st.none() | st.integers(0, 12)


def sees(row: int, key: int, sq: int, sk: int, left: int | None, right: int | None) -> bool:
    distance = key - (row + sk - sq)
    return (left is None or distance >= -left) and (right is None or distance <= right)


@given(st.integers(1, 12), st.integers(0, 12), SIDES, SIDES, st.data())
def test_key_range_is_what_counting_finds(
    sq: int, sk: int, left: int | None, right: int | None, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, sq - 1))
    stop = data.draw(st.integers(start + 1, sq))
    visible = [[sees(i, j, sq, sk, left, right) for j in range(sk)] for i in range(start, stop)]
    some = [j for j in range(sk) if any(row[j] for row in visible)]
    every = [j for j in range(sk) if all(row[j] for row in visible)]
    keys = key_range(start, stop, sq, sk, left, right)
    assert list(range(keys.start, keys.stop)) == some
    assert list(range(keys.full_start, keys.full_stop)) == every
    assert keys.start <= keys.full_start <= keys.full_stop <= keys.stop


@given(st.integers(1, 12), st.integers(0, 12), SIDES, SIDES)
def test_first_row_with_a_key_is_what_counting_finds(
    sq: int, sk: int, left: int | None, right: int | None
) -> None:
    first = first_row_with_a_key(sq, sk, right)
    has_key = [any(sees(i, j, sq, sk, left, right) for j in range(sk)) for i in range(sq)]
    assert has_key == [i >= first for i in range(sq)]


class Largest(TorchDispatchMode):
    """Records the most elements of any tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        for t in tree_leaves(results):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return results


LENGTHS = st.lists(st.tuples(st.integers(0, 2 * SHORT), st.integers(0, 2 * SHORT)), max_size=40)


@settings(deadline=None)
@given(LENGTHS)
def test_slabs_hold_every_sequence_with_rows_once(lengths: list[tuple[int, int]]) -> None:
    cu_q, cu_k = (cumulative([n[side] for n in lengths]) for side in (0, 1))
    q, k = (torch.empty(int(cu[-1]), 1, 1) for cu in (cu_q, cu_k))
    inputs = problem.Inputs(q, k, k, None, cu_q, cu_k)
    found = []
    for rows, keys in slabs(problem.build(inputs, 1.0, 0.0, None, None, False), inputs):
        for row, key in zip(rows.apart(), keys.apart(), strict=True):
            found.append((row.rows.start, row.rows.stop, key.rows.start, key.rows.stop))
        if isinstance(rows, Padded) and isinstance(keys, Padded):
            assert rows.used.tolist() == [span.length for span in rows.spans]
            assert rows.length * len(rows.spans) <= 2048
            assert keys.length * len(keys.spans) <= 2048
    starts = zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False)
    assert sorted(found) == [s for s in starts if s[1] > s[0]]


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + len(shape))).to(dtype)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """out, lse, dq, dk, dv by the CPU backend."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    call = regard.attention if q.dim() == 4 else regard.attention_varlen
    out, lse = call(*leaves, **options, return_lse=True, backend="cpu")
    if dlse is None:
        return [out, lse, *torch.autograd.grad(out, leaves, dout)]
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 9.0},
        {"softcap": 9.0, "causal": True},
        {"causal": True, "window_size": (200, 0)},
        {"window_size": (400, None)},
        {"causal": True},
        {"seqused_k": torch.tensor([700, 1199], dtype=torch.int32)},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_tensor_grows_with_the_square_of_the_length(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = draw(2, 1200, 2, 16, dtype=dtype), *(draw(2, 1200, 1, 16, dtype=dtype) for _ in range(2))
    largest = Largest()

    def watched(f: Any) -> Any:
        def run(*args: Any) -> None:
            with largest:  # it does not see into an operator, so it is entered inside
                f(*args)

        return run

    with (
        mock.patch.object(cpu, "forward", watched(cpu.forward)),
        mock.patch.object(cpu, "backward", watched(cpu.backward)),
    ):
        gradients(q, k, v, q, **options)
    # A panel, or FED rows of the longest sequence; or a tensor of the call's own size.
    assert 0 < largest.elements <= max(tiles.PANEL, tiles.FED * 1200, q.numel())


@pytest.mark.parametrize(
    ("sq", "sk", "dv", "options", "forward", "backward"),
    [
        (50, 50, 16, {}, True, True),
        (50, 70, 16, {}, True, True),
        (50, 50, 16, {"causal": True}, True, True),
        (50, 50, 16, {"causal": True, "window_size": (49, 3)}, True, True),
        (1, 70, 16, {"causal": True}, True, True),
        (50, 70, 16, {"causal": True}, False, False),
        (50, 50, 16, {"causal": True, "window_size": (48, None)}, False, False),
        (50, 50, 24, {}, False, False),
        (50, 50, 16, {"softcap": 5.0}, False, False),
        (50, 50, 16, {"sinks": torch.zeros(2)}, False, False),
        (50, 50, 16, {"dlse": True}, True, False),
        (0, 50, 16, {}, False, False),
        (50, 0, 16, {}, False, False),
    ],
    ids=str,
)
def test_what_pytorch_has_a_kernel_for_is_left_to_it(
    sq: int, sk: int, dv: int, options: dict[str, Any], forward: bool, backward: bool
) -> None:
    q, k, v, dout = draw(2, sq, 2, 16), draw(2, sk, 2, 16), draw(2, sk, 2, dv), draw(2, sq, 2, dv)
    dlse = draw(2, 2, sq) if options.pop("dlse", False) else None
    with (
        mock.patch.object(flash, "forward", wraps=flash.forward) as flash_forward,
        mock.patch.object(flash, "backward", wraps=flash.backward) as flash_backward,
    ):
        gradients(q, k, v, dout, dlse, **options)
    assert (flash_forward.called, flash_backward.called) == (forward, backward)


MASKED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "causal": (150, 150, {"causal": True}),
    "window": (150, 150, {"window_size": (20, 3)}),
    "left": (40, 60, {"window_size": (7, None)}),
    "softcap": (60, 50, {"causal": True, "softcap": 5.0}),
    "short": (20, 30, {"causal": True}),
}


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", MASKED)
def test_what_is_not_finite_stays_where_it_can_be_seen(
    name: str, packed: bool, where: str, value: float
) -> None:
    sq, sk, options = MASKED[name]
    tensors = {
        "q": draw(1, sq, 2, 8),
        "k": draw(1, sk, 2, 8),
        "v": draw(1, sk, 2, 8),
        "dout": draw(1, sq, 2, 8),
    }
    window = options.get("window_size", (None, 0))
    mask = reference.visible(torch.arange(sq), torch.arange(sk), sk - sq, *window)
    at = (sq if where in ("q", "dout") else sk) // 2
    rows = torch.arange(sq) == at if where in ("q", "dout") else mask[:, at]  # that meet the value
    keys = mask[rows].any(0)

    def run() -> list[Tensor]:
        if not packed:
            return [t[0] for t in gradients(**tensors, **options)]
        # Two sequences after it, of about its length: short ones share calls.
        joined = {n: torch.cat([t[0], draw(2 * t.shape[1] - 1, 2, 8)]) for n, t in tensors.items()}
        cu_q, cu_k = cumulative([sq, sq, sq - 1]), cumulative([sk, sk, sk - 1])
        return gradients(**joined, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)

    clean = run()
    tensors[where][0, at] = value
    got = run()
    for result, expected, meets, seqlen in zip(
        (got[0], got[1].t(), *got[2:]),
        (clean[0], clean[1].t(), *clean[2:]),
        (rows, rows, rows, keys, keys),
        (sq, sq, sq, sk, sk),
        strict=True,
    ):
        safe = torch.ones(result.shape[0], dtype=torch.bool)
        safe[:seqlen] = ~meets
        torch.testing.assert_close(result[safe], expected[safe])
    if value == INF:  # in k, it may make a probability 0
        return
    met = {"q": got[0][:sq][rows], "k": got[0][:sq][rows], "v": got[0][:sq][rows], "dout": got[2][:sq][rows]}
    assert not met[where].isfinite().all(-1).any()


CALLS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window_size": (30, 4), "softcap": 4.0},
    {
        "seqused_q": torch.tensor([70, 7], dtype=torch.int32),
        "seqused_k": torch.tensor([9, 80], dtype=torch.int32),
    },
]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_change_the_time_alone(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = draw(2, 70, 4, 32, dtype=dtype), *(draw(2, 80, 2, 32, dtype=dtype) for _ in range(2))
    results = []
    for count in (1, 2, 1, 2):
        torch.set_num_threads(count)
        results.append(gradients(q, k, v, q, draw(2, 4, 70), **options))
    for one, two, one_again, two_again in zip(*results, strict=True):
        assert torch.equal(one, one_again)
        assert torch.equal(two, two_again)
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_stay_as_they_are(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = [draw(2, 70, 2, 32, dtype=dtype), *(draw(2, 80, 2, 32, dtype=dtype) for _ in range(2))]
    inputs += [draw(2, 70, 2, 32, dtype=dtype), draw(2, 2, 70)]
    before = [t.clone() for t in inputs]
    gradients(*inputs, **options)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("wanted", ["q", "k", "v", "sinks"])
def test_a_gradient_wanted_alone_is_the_same(options: dict[str, Any], wanted: str) -> None:
    tensors = {"q": draw(2, 70, 2, 8), "k": draw(2, 80, 2, 8), "v": draw(2, 80, 2, 8)}
    if wanted == "sinks":
        tensors["sinks"] = draw(2)

    def run(leaves: list[str]) -> Tensor:
        given = {name: t.detach().requires_grad_(name in leaves) for name, t in tensors.items()}
        out = regard.attention(**given, **options, backend="cpu")
        assert isinstance(out, Tensor)
        (grad,) = torch.autograd.grad(out, given[wanted], draw(2, 70, 2, 8))
        return grad

    torch.testing.assert_close(run([wanted]), run(list(tensors)), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("options", [{}, {"window_size": (1, 0)}], ids=str)
def test_a_batch_of_70001(options: dict[str, Any]) -> None:
    few = [draw(7, 4, 2, 8, seed=i) for i in range(4)]
    many = [t[torch.arange(70001) % 7] for t in few]
    expected = gradients(*few, **options)
    for mine, true in zip(gradients(*many, **options), expected, strict=True):
        torch.testing.assert_close(mine, true[torch.arange(70001) % 7])


def test_a_sink_far_above_the_scores_in_padded_sequences() -> None:
    """exp(sink - lse) is at most 1 in a row; in padding, where lse is 0, it would be infinite."""
    lengths = cumulative([3, 5])
    tensors = [draw(8, 2, 4, seed=i).double() for i in range(3)] + [torch.tensor([1000.0, 0.0]).double()]
    grads = []
    for call, options in ((regard.attention_varlen, {"backend": "cpu"}), (reference.attention_varlen, {})):
        q, k, v, sinks = (t.clone().requires_grad_() for t in tensors)
        out = call(q, k, v, lengths, lengths, sinks=sinks, **options)
        out = out if isinstance(out, Tensor) else out[0]
        grads.append(torch.autograd.grad(out.square().sum(), (q, k, v, sinks)))
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true)


def test_a_sequence_alone_is_read_where_it_lies() -> None:
    q = draw(500, 2, 8)
    inputs = problem.Inputs(q, q, q, None, cumulative([300, 200]), cumulative([300, 200]))
    for rows, _ in slabs(problem.build(inputs, 1.0, 0.0, None, None, False), inputs):
        assert isinstance(rows, Even)
        assert rows.take(q[None]).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
