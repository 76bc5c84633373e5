"""Every named scenario on every backend that serves here, and proof that the instruments notice faults.

A scenario is one test for each dtype and backend, over all its kinds of values. The CPU backend runs on the
CPU whatever else is here. In a process with TRITON_INTERPRET=1 it is the portable backend alone, in float16
and float32, on what the interpreter can do in time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from regard import dispatch
from regard.kernels import cpu
from regard.testing import SCENARIOS, Arena, Scenario, check, poisoned, reason_to_skip

from conftest import DEVICE  # isort: skip

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _device(backend: str) -> torch.device:
    return torch.device("cpu") if backend == "cpu" else DEVICE


def _served(backend: str) -> str | None:
    """Why a backend serves nothing here, or None."""
    if INTERPRETED and backend != "portable":
        return "the interpreter is for the portable kernels"
    problems = [
        Scenario(name="plain", q=(1, 8, 2, 64), k=(1, 8, 2, 64)).problem(_device(backend), dtype)
        for dtype in (torch.float16, torch.bfloat16)
    ]
    reasons = [dispatch.load(backend).supports(problem) for problem in problems]
    return None if None in reasons else reasons[0]


def _cases() -> Iterator[Any]:
    for backend in dispatch.BACKENDS:
        reason = _served(backend)
        if reason is not None:
            yield pytest.param(backend, None, "", id=backend, marks=pytest.mark.skip(reason=reason))
            continue
        for scenario in SCENARIOS:
            for dtype in scenario.dtypes:
                yield pytest.param(backend, scenario, dtype, id=f"{backend}-{scenario.name}-{dtype}")


@pytest.mark.parametrize(("backend", "scenario", "dtype"), list(_cases()))
def test_scenario(backend: str, scenario: Scenario, dtype: str) -> None:
    device = _device(backend)
    reason = reason_to_skip(scenario, device, getattr(torch, dtype), backend)
    if reason is None and scenario.full and device.type == "cpu":
        reason = "takes too long on a CPU for every change; `regard verify` runs it"
    if reason is not None:
        pytest.skip(reason)
    for kind in scenario.kinds:
        result = check(scenario, device, getattr(torch, dtype), backend, kind)
        assert result.passed, str(result)


def test_names_are_unique() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)


PLAIN = Scenario(name="plain", q=(2, 20, 4, 16), k=(2, 20, 2, 16), causal=True)
SPARE = Scenario(name="spare", q=(23, 2, 16), k=(23, 2, 16), cu_q=(0, 3, 9, 20), cu_k=(0, 3, 9, 20))


def _check(scenario: Scenario) -> Any:
    return check(scenario, "cpu", torch.float32, "cpu")


def _after(monkeypatch: pytest.MonkeyPatch, name: str, then: Any) -> None:
    """Let the CPU backend's forward or backward do `then` with its results when it is done."""
    right = getattr(cpu, name)

    def wrong(problem: Any, inputs: Any, *rest: Any) -> None:
        right(problem, inputs, *rest)
        then(*(rest[0][:2] if name == "forward" else rest))  # out and lse, or what arrives and the gradients

    monkeypatch.setattr(cpu, name, wrong)


FAULTS: dict[str, tuple[str, Any]] = {
    "out a little off": ("forward", lambda out, lse: out[1, 7].mul_(1 + 1e-4)),
    "lse a little off": ("forward", lambda out, lse: lse[1, 2, 7].add_(1e-4)),
    "NaN in one element": ("forward", lambda out, lse: out[1, 7, 1, 3].fill_(float("nan"))),
    "dq scaled in one batch": ("backward", lambda _, grads: grads.dq[1].mul_(5)),
    "dk of the last key": ("backward", lambda _, grads: grads.dk[0, -1].mul_(1.001)),
    "dv unwritten": ("backward", lambda _, grads: grads.dv.fill_(float("nan"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_number_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(PLAIN).passed
    _after(monkeypatch, *FAULTS[fault])
    assert not _check(PLAIN).passed


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_a_number_in_a_row_that_does_not_exist_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(SPARE).passed
    if name == "out":
        _after(monkeypatch, "forward", lambda out, lse: out[21].fill_(1e-30))
    else:
        _after(monkeypatch, "backward", lambda _, grads: getattr(grads, name)[21].fill_(1e-30))
    result = _check(SPARE)
    assert result.faults == [f"{name} is not 0.0 in a row that does not exist"]


def test_a_row_left_unwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that a backend is given is full of NaN, so leaving a row out cannot pass by luck."""
    right = cpu.forward

    def lazy(problem: Any, inputs: Any, results: Any) -> None:
        mine = torch.zeros_like(results.out)
        right(problem, inputs, results._replace(out=mine))
        results.out[:, 1:] = mine[:, 1:]

    monkeypatch.setattr(cpu, "forward", lazy)
    assert any("out is NaN" in fault for fault in _check(PLAIN).faults)


def test_other_bits_in_a_second_run_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(name="repeated", q=PLAIN.q, k=PLAIN.k, repeats=2)
    assert _check(scenario).passed
    runs: list[int] = []

    def drift(out: Any, lse: Any) -> None:
        runs.append(1)
        out.view(torch.int32)[0, 0, 0, 0] += len(runs)

    _after(monkeypatch, "forward", drift)
    assert _check(scenario).faults == ["out has other bits in run 2", "out has other bits in run 3"]


def test_a_write_beside_a_tensor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(name="fenced", q=PLAIN.q, k=PLAIN.k, arena=True)
    assert _check(scenario).passed

    def stray(out: Any, lse: Any) -> None:
        if out.storage_offset() > 0:  # in the arena
            out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(7.0)

    _after(monkeypatch, "forward", stray)
    faults = _check(scenario).faults
    assert len([fault for fault in faults if "something was written beside" in fault]) == 5


def test_an_arena_keeps_values_and_strides() -> None:
    arena = Arena(shift=1)
    t = torch.randn(3, 4, 5).transpose(0, 1)
    placed = arena.place("t", t)
    assert placed is not None
    assert torch.equal(placed, t)
    assert placed.stride() == t.stride()
    assert arena.broken() == []
    placed[0, 0, 0] = 9.0
    assert arena.broken() == ["t"]


def test_poisoned_allocations_are_full_of_nan() -> None:
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.ones(3).new_empty(2).isnan().all()
        assert torch.empty_like(torch.ones(4, dtype=torch.float16)).isnan().all()
