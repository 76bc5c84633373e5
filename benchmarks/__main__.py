"""python -m benchmarks SUITE measures; python -m benchmarks tables prints the kept results as Markdown."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from benchmarks import environment, tables
from benchmarks.peers import PEERS, Contestant, Regard, distribution_versions
from benchmarks.report import RESULTS, Report
from benchmarks.runner import run_case
from benchmarks.suites import DIRECTIONS, SUITES
from benchmarks.timing import CpuStopwatch, CudaStopwatch
from regard.dispatch import BACKENDS


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.suite == "tables":
        print("\n\n".join(tables.markdown(document) for document in tables.load(RESULTS)))
        return 0
    device = torch.device(args.device or SUITES[args.suite].device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"{args.suite}: no CUDA device here; the suites cpu and smoke run without one", file=sys.stderr)
        return 2
    path = args.out
    if path is None and args.only is None and args.suite != "smoke":
        path = RESULTS / f"{environment.file_name(device)}-{args.suite}.json"
    return run(args.suite, device, args.backend, args.only, path)


def run(suite: str, device: torch.device, backend: str | None, only: str | None, path: Path | None) -> int:
    """Measure a suite. Returns 1 if any call of regard's failed, else 0."""
    contestants: list[Contestant] = [Regard(backend)]
    missing = {}
    for peer in PEERS[device.type]:
        reason = peer.missing()
        if reason is None:
            contestants.append(peer)
        else:
            missing[peer.name] = reason
            print(f"{peer.name} is left out: {reason}", file=sys.stderr)
    report = Report(
        device, path, suite=suite, backend=backend, missing=missing, peers=distribution_versions(contestants)
    )
    stopwatch = CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
    failed = 0
    named: set[str] = set()
    for case in SUITES[suite].cases:
        directions = [d for d in DIRECTIONS if only is None or re.search(only, f"{case.name} {d}")]
        if not directions:
            continue
        for row in run_case(suite, case, directions, contestants, stopwatch, device):
            report.append(row)
            failed += row.ours_ms is None
            print(row, file=sys.stderr)
            for note in sorted({f"  {name}: {reason}" for name, reason in row.notes.items()} - named):
                named.add(note)
                print(note, file=sys.stderr)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    tables.show(report.document)
    if failed:
        print(f"{failed} rows failed", file=sys.stderr)
    return int(failed > 0)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=[*SUITES, "tables"], help="what to measure, or tables")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the suite's own")
    parser.add_argument("--backend", choices=BACKENDS, help="regard's backend; default: as it chooses")
    parser.add_argument("--only", metavar="PATTERN", help="regular expression over 'case direction'")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="result file; default: benchmarks/results/<gpu>-<suite>.json for a complete run (not smoke)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
