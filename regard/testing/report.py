"""What came of many scenarios, as a table for people and as JSON for programs. The tables need rich."""

from __future__ import annotations

import json
import math
import platform
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import torch

import regard
from regard.testing import suite
from regard.testing.checks import Result
from regard.testing.suite import Run, Skipped

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Outcome:
    """Each run with its result, None for those not run because the CUDA context was dead by then."""

    device: torch.device
    results: list[tuple[Run, Result | None]]
    skipped: list[Skipped]
    seconds: float

    @property
    def failures(self) -> list[Result]:
        return [result for _, result in self.results if result is not None and not result.passed]

    @property
    def not_run(self) -> int:
        return sum(result is None for _, result in self.results)

    @property
    def passed(self) -> bool:
        """Whether something was run, all of it, and nothing failed."""
        return bool(self.results) and not self.failures and not self.not_run


def run_all(runs: list[Run], skipped: list[Skipped], device: torch.device, jobs: int = 1) -> Outcome:
    """Run them, so many at once, behind a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    started = time.monotonic()
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(runs))
        results = []
        executed = suite.execute_all(runs, device, jobs)
        for run in runs:
            progress.update(task, description=f"{run.scenario.name} {run.dtype_name}")
            results.append(next(executed))
            progress.advance(task)
    return Outcome(device, results, skipped, time.monotonic() - started)


def print_outcome(console: Console, outcome: Outcome) -> None:
    """A table with a row a scenario and dtype, then what was skipped and why, failures in full, a summary."""
    _print_table(console, outcome.results)
    _print_skipped(console, outcome.skipped)
    for result in outcome.failures:
        console.print(f"FAILED {result}", style="red", markup=False, soft_wrap=True)
    done = len(outcome.results) - outcome.not_run
    summary = f"{done - len(outcome.failures)} of {done} runs passed in {outcome.seconds:.0f} s"
    if outcome.not_run:
        summary += f"; {outcome.not_run} were not run: the CUDA context was dead"
    console.print(summary if outcome.results else "Nothing was run, so nothing is verified.")


def _print_table(console: Console, results: list[tuple[Run, Result | None]]) -> None:
    from rich.table import Table

    table = Table("scenario", "backend", "dtype", "tensor", box=None, pad_edge=False)
    table.add_column("error / eager's", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("")
    rows: dict[tuple[str, str, str], list[Result | None]] = {}
    for run, result in results:
        rows.setdefault((run.scenario.name, run.backend, run.dtype_name), []).append(result)
    for labels, group in rows.items():
        done = [result for result in group if result is not None]
        worst = max(done, key=lambda result: (not result.passed, result.share), default=None)
        if worst is None:
            table.add_row(*labels, "", "", "", "not run", style="yellow")
            continue
        tensor, multiple = worst.worst
        figures = [tensor, f"{multiple:.2f}", f"{worst.limits[tensor]:g}"] if worst.multiples else [""] * 3
        verdict, style = ("pass", None) if worst.passed else ("FAIL", "bold red")
        table.add_row(*labels, *figures, verdict, style=style)
    console.print(table)


def _print_skipped(console: Console, skipped: list[Skipped]) -> None:
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, dtype, reason in skipped:
        reasons.setdefault(reason, {}).setdefault(name, []).append(dtype)
    for reason, names in reasons.items():
        listed = ", ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in names.items())
        console.print(f"skipped, {reason}: {listed}", style="dim", markup=False, soft_wrap=True)


def write_json(file: IO[str], outcome: Outcome, asked: dict[str, Any]) -> None:
    """Everything: versions, device, what was asked for, each run and each tensor's error."""
    report = {
        "versions": versions(),
        "device": name(outcome.device),
        **asked,
        "passed": outcome.passed,
        "seconds": round(outcome.seconds, 1),
        "runs": [_row(run, result) for run, result in outcome.results],
        "skipped": [s._asdict() for s in outcome.skipped],
    }
    json.dump(report, file, indent=1, allow_nan=False)
    file.write("\n")


def _row(run: Run, result: Result | None) -> dict[str, Any]:
    row: dict[str, Any] = {"scenario": run.scenario.name, "kind": run.kind, "dtype": run.dtype_name}
    row |= {"backend": run.backend, "run": result is not None, "passed": result is not None and result.passed}
    if result is None:
        return row
    # JSON knows neither infinity nor NaN.
    multiples = {tensor: m if math.isfinite(m) else str(m) for tensor, m in result.multiples.items()}
    worst = result.worst[0] if result.multiples else None
    return row | {
        "worst": worst,
        "multiples": multiples,
        "limits": result.limits,
        "faults": result.faults,
    }


def versions() -> dict[str, str | None]:
    """Of all that a result may depend on; None for what is not installed."""
    try:
        import triton
    except ImportError:
        found = None
    else:
        found = triton.__version__
    return {
        "regard": regard.__version__,
        "torch": torch.__version__,
        "triton": found,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def name(device: torch.device) -> str:
    """A device in words."""
    if device.type != "cuda":
        return f"{device} ({platform.machine()}, {torch.get_num_threads()} threads)"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
