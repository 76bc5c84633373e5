"""Interleaved timing: in each round each contestant is measured once, from a cold cache."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# Larger than any GPU's L2 (H200: 60 MB, B200: 126 MB): written before each measurement.
FLUSH_BYTES = 256 << 20

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Budget:
    """Warm-ups a contestant, then as many rounds as give each `ms` of measured time, at least `rounds`."""

    warmups: int
    ms: float
    rounds: int


class Stopwatch(Protocol):
    budget: Budget

    def measure(self, work: Work) -> Callable[[], float]:
        """Run the work from a cold cache; its milliseconds can be asked for after `settle`."""

    def settle(self) -> None:
        """Wait until all that was measured has run."""


class CudaStopwatch:
    """CUDA events around the work. Nothing waits within a round, so the host runs ahead of the device and a
    contestant's host time does not count unless it exceeds the device's time for the flush and the work."""

    budget = Budget(warmups=10, ms=150.0, rounds=10)

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=device)

    def measure(self, work: Work) -> Callable[[], float]:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._flush.zero_()
        start.record()
        work()
        end.record()
        return lambda: float(start.elapsed_time(end))

    def settle(self) -> None:
        torch.cuda.synchronize()


class CpuStopwatch:
    """The host's clock. Fewer, longer measurements: a call takes up to seconds here."""

    budget = Budget(warmups=2, ms=1000.0, rounds=7)

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32)

    def measure(self, work: Work) -> Callable[[], float]:
        self._flush.zero_()
        start = time.perf_counter()
        work()
        elapsed = (time.perf_counter() - start) * 1e3
        return lambda: elapsed

    def settle(self) -> None:
        pass


def race(racers: dict[str, Work], stopwatch: Stopwatch) -> tuple[dict[str, float], dict[str, Exception]]:
    """Median milliseconds of each racer, and the error of each that failed and was taken out."""
    budget = stopwatch.budget
    errors: dict[str, Exception] = {}
    expected: dict[str, float] = {}
    for name, work in racers.items():
        try:
            laps = [stopwatch.measure(work) for _ in range(budget.warmups)]
            stopwatch.settle()
            expected[name] = statistics.median(lap() for lap in laps[budget.warmups // 2 :])
        except Exception as error:
            errors[name] = error
    running = {name: racers[name] for name in expected}
    total = sum(expected.values())
    rounds = max(budget.rounds, int(budget.ms * len(running) / total)) if total else budget.rounds
    measured: dict[str, list[Callable[[], float]]] = {name: [] for name in running}
    rng = random.Random(0)
    for _ in range(rounds):
        # In a new order each round: what ran before heats the chip and must not always be the same.
        for name in rng.sample(list(running), len(running)):
            try:
                measured[name].append(stopwatch.measure(running[name]))
            except Exception as error:
                errors[name] = error
                del running[name]
    stopwatch.settle()
    return {name: statistics.median(lap() for lap in measured[name]) for name in running}, errors
