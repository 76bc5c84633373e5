"""The result file: rows as they are measured, with the machine and the software they belong to."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One case in one direction. ours_ms is None where regard failed, and notes say why.

    ours_ms and peers_ms are medians in milliseconds; flops is the work of one call, as `suites.flops` counts
    it; notes name each contestant that did not take part, with its reason.
    """

    suite: str
    case: str
    direction: str
    ours_ms: float | None
    peers_ms: dict[str, float]
    flops: float
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        """The fastest peer's name."""
        return min(self.peers_ms, key=lambda name: self.peers_ms[name], default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time over ours: above 1 is ahead. None without either."""
        if self.best is None or self.ours_ms is None:
            return None
        return self.peers_ms[self.best] / self.ours_ms

    def __str__(self) -> str:
        label = f"{self.suite}  {self.case:36} {self.direction:9}"
        if self.ours_ms is None:
            return f"{label} FAILED  {self.notes.get('regard', '')}"
        peers = "  ".join(f"{name} {ms:.4g}" for name, ms in self.peers_ms.items())
        ratio = f"{self.ratio:.3f}x {self.best}" if self.ratio is not None else "no peer"
        return f"{label} {self.ours_ms:9.4g} ms  {ratio}  ({peers})"


class Report:
    """Collects rows and, with a path, rewrites the file at each, so that a stopped run keeps what it has."""

    def __init__(self, device: torch.device, path: Path | None, **about: Any) -> None:
        self._device, self._path = device, path
        self.document: dict[str, Any] = {
            "gpu": environment.device_name(device),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            **about,
            "versions": environment.versions(device),
            "clocks": {"start": environment.nvidia_smi(device)},
            "rows": [],
        }

    def append(self, row: Row) -> None:
        self.document["clocks"]["last"] = environment.nvidia_smi(self._device)
        self.document["rows"].append(as_json(row))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(unfinished, self._path)


def as_json(row: Row) -> dict[str, Any]:
    """The row as the file holds it: times to 0.1 µs, the ratio to three places."""
    entry = asdict(row)
    entry["ours_ms"] = None if row.ours_ms is None else round(row.ours_ms, 4)
    entry["peers_ms"] = {name: round(ms, 4) for name, ms in row.peers_ms.items()}
    entry["ratio"] = None if row.ratio is None else round(row.ratio, 3)
    return entry
