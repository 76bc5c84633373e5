"""One case after another: prepare each contestant, check it, then time those that are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks import check
from benchmarks.calls import Call, Data, random_data
from benchmarks.peers import Contestant
from benchmarks.report import Row
from benchmarks.suites import Case, flops
from benchmarks.timing import Stopwatch, race


def run_case(
    suite: str,
    case: Case,
    directions: Sequence[str],
    contestants: Sequence[Contestant],
    stopwatch: Stopwatch,
    device: torch.device,
) -> Iterator[Row]:
    """A row a direction. The first contestant is regard: where it fails, its row says so and has no times.

    A peer that refuses, fails or is wrong is left out of the row and named in its notes.
    """
    ours = contestants[0].name
    data = random_data(case, device)
    calls, absent = _prepare(case, data, contestants)
    gradients = set(directions) != {"forward"}
    slices = check.expect(case, data, gradients)
    wrong = _faults(calls, slices, gradients=False)
    # A contestant without a backward, or with wrong gradients, still races forward.
    right = {name: call for name, call in calls.items() if name not in wrong}
    wrong_gradients = _faults(right, slices, gradients=True) if gradients else {}
    for direction in directions:
        notes = absent | wrong | ({} if direction == "forward" else wrong_gradients)
        times: dict[str, float] = {}
        if ours not in notes:
            times, late = _race(calls, notes, direction, stopwatch)
            notes |= late
        our_time = times.pop(ours, None)
        if our_time is None:
            times = {}
        yield Row(suite, case.name, direction, our_time, times, flops(case, direction), notes)


def _prepare(
    case: Case, data: Data, contestants: Sequence[Contestant]
) -> tuple[dict[str, Call], dict[str, str]]:
    calls, absent = {}, {}
    for contestant in contestants:
        reason = contestant.refuses(case)
        if reason is None:
            try:
                calls[contestant.name] = contestant.prepare(case, data)
            except Exception as error:
                reason = _text(error)
        if reason is not None:
            absent[contestant.name] = reason
    return calls, absent


def _faults(calls: dict[str, Call], slices: list[check.Slice], *, gradients: bool) -> dict[str, str]:
    found = {}
    for name, call in calls.items():
        try:
            reason = check.fault(call, slices, gradients=gradients)
        except Exception as error:
            reason = _text(error)
        if reason is not None:
            found[name] = reason
    return found


def _race(
    calls: dict[str, Call], barred: dict[str, str], direction: str, stopwatch: Stopwatch
) -> tuple[dict[str, float], dict[str, str]]:
    racers, late = {}, {}
    for name, call in calls.items():
        if name not in barred:
            try:
                racers[name] = call.timed(direction)
            except Exception as error:
                late[name] = _text(error)
    times, errors = race(racers, stopwatch)
    return times, late | {name: _text(error) for name, error in errors.items()}


def _text(error: Exception) -> str:
    """The error's kind and first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
