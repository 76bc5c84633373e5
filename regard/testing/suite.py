"""Many scenarios in a row: which ones run here, each one's result, and no fault of one stops the others."""

from __future__ import annotations

import fnmatch
import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from regard import dispatch
from regard.testing import checks
from regard.testing.catalogue import SCENARIOS
from regard.testing.checks import Result
from regard.testing.scenarios import Scenario


class Run(NamedTuple):
    """One scenario in one dtype with values of one kind, on one backend."""

    scenario: Scenario
    dtype: torch.dtype
    kind: str
    backend: str

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Skipped(NamedTuple):
    """A scenario that is not run in a dtype, and why."""

    scenario: str
    dtype: str
    reason: str


class ContextLost(Exception):
    """The CUDA context is dead: no later call of this process can work."""


def plan(
    device: torch.device,
    backend: str | None = None,
    *,
    quick: bool = False,
    patterns: Iterable[str] = (),
) -> tuple[list[Run], list[Skipped]]:
    """What runs on a device, and what does not.

    Args:
        device: where.
        backend: a backend's name; None takes what the dispatch picks for each scenario.
        quick: leave out the scenarios that are `full`.
        patterns: names with wildcards, as in a shell; only scenarios that match one. None given: all.

    Returns:
        the runs and, for all that could have been one, the reasons why it is not.

    Raises:
        ValueError: a pattern matches no scenario.
    """
    patterns = tuple(patterns)
    for pattern in patterns:
        if not fnmatch.filter([s.name for s in SCENARIOS], pattern):
            raise ValueError(f"no scenario is named {pattern!r}")
    runs: list[Run] = []
    skipped: list[Skipped] = []
    for scenario in SCENARIOS:
        if patterns and not any(fnmatch.fnmatch(scenario.name, p) for p in patterns):
            continue
        for name in scenario.dtypes:
            dtype: torch.dtype = getattr(torch, name)
            served_by, reason = _backend(scenario, device, dtype, backend)
            if quick and scenario.full:
                reason = "left out of quick runs"
            elif served_by is not None:
                reason = checks.reason_to_skip(scenario, device, dtype, served_by)
            if served_by is None or reason is not None:
                skipped.append(Skipped(scenario.name, name, reason or ""))
            else:
                runs += [Run(scenario, dtype, kind, served_by) for kind in scenario.kinds]
    return runs, skipped


def execute(run: Run, device: torch.device) -> Result:
    """The result of a run; an exception becomes a failed one with its message.

    Raises:
        ContextLost: the run has left the CUDA context dead.
    """
    try:
        return checks.check(run.scenario, device, run.dtype, run.backend, run.kind)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    if device.type == "cuda":
        try:
            torch.ones(1, device=device).item()
        except RuntimeError:
            raise ContextLost(message) from None
    return failed(run, device, message)


def failed(run: Run, device: torch.device, message: str) -> Result:
    """The result of a run that came to nothing."""
    name = f"{run.scenario.name}[{run.kind}]"
    return Result(name, run.backend, str(device), run.dtype_name, {}, {}, [message])


def execute_all(
    runs: Iterable[Run], device: torch.device, jobs: int = 1
) -> Iterator[tuple[Run, Result | None]]:
    """Each run's result, by so many processes at once; 1 is this one.

    Runs that found the GPU's memory full beside the others come last, alone.
    Once a process has lost its CUDA context it runs nothing more: its later runs have None. One that dies
    takes the others with it: the first run without a result has failed, and the rest have None.
    """
    if jobs == 1:
        _make_alive()
        yield from ((run, _execute_while_alive(run, device)) for run in runs)
        return
    runs = list(runs)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_execute_while_alive, run, device) for run in runs]
        broken = False
        crowded_out = []
        for run, future in zip(runs, futures, strict=True):
            try:
                result = future.result()
            except BrokenProcessPool as error:
                result = None if broken else failed(run, device, f"a process died: {error}")
                broken = True
            if result is not None and any("OutOfMemoryError" in fault for fault in result.faults):
                crowded_out.append(run)
            else:
                yield run, result
    yield from execute_all(crowded_out, device)


_alive = True  # this process's CUDA context is


def _make_alive() -> None:
    global _alive
    _alive = True


def _execute_while_alive(run: Run, device: torch.device) -> Result | None:
    global _alive
    if not _alive:
        return None
    try:
        return execute(run, device)
    except ContextLost as error:
        _alive = False
        return failed(run, device, f"the CUDA context is dead after {error}")


def _backend(
    scenario: Scenario, device: torch.device, dtype: torch.dtype, backend: str | None
) -> tuple[str | None, str | None]:
    """The backend that is to serve a scenario; or None and the reason why there is none."""
    if backend is not None:
        return backend, None
    try:
        return dispatch.select(scenario.problem(device, dtype), None), None
    except NotImplementedError as error:
        return None, str(error)
