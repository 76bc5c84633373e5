"""The support matrix: which backend serves what, asked of the backends' own `supports`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from regard import dispatch
from regard.problem import DTYPES, MAX_HEAD_DIM, Problem

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ARCHS = (75, 80, 86, 89, 90, 100, 103, 120)
# Where a call may lie: a name, and what it changes in a Problem. No such device need be here.
TARGETS: dict[str, dict[str, Any]] = {
    "CPU": {"device": CPU},
    **{f"sm_{arch}": {"device": CUDA, "arch": arch} for arch in ARCHS},
}
BASE = Problem(
    device=CPU,
    dtype=torch.bfloat16,
    packed=False,
    batch=2,
    seqlen_q=1024,
    seqlen_k=1024,
    heads_q=16,
    heads_k=16,
    head_dim=128,
    head_dim_v=128,
    softmax_scale=128**-0.5,
)
FEATURES: dict[str, dict[str, Any]] = {
    **{str(dtype).removeprefix("torch."): {"dtype": dtype} for dtype in DTYPES},
    "causal": {"window_right": 0},
    "window": {"window_left": 1024, "window_right": 0},
    "window to both sides": {"window_left": 300, "window_right": 40},
    "packed (cu_seqlens)": {"packed": True, "batch": 7, "window_right": 0},
    "seqused_q, seqused_k": {"has_seqused_q": True, "has_seqused_k": True},
    "grouped heads, 28 on 4": {"heads_q": 28, "heads_k": 4},
    "one key head": {"heads_k": 1},
    "softcap": {"softcap": 30.0},
    "sinks": {"has_sinks": True},
    "deterministic": {"deterministic": True},
    "more keys than queries": {"seqlen_q": 1, "seqlen_k": 1000, "window_right": 0},
    "more queries than keys": {"seqlen_q": 1000, "seqlen_k": 3, "window_right": 0},
    "empty batch or length": {"batch": 0, "seqlen_q": 0},
    "70,001 batches": {"batch": 70001, "seqlen_q": 4, "seqlen_k": 4},
    "float32, head dim 512": {"dtype": torch.float32, "head_dim": 512, "head_dim_v": 512},
    "v wider than k, 64 and 256": {"head_dim": 64, "head_dim_v": 256},
    "v narrower than k, 192 and 128": {"head_dim": 192, "head_dim_v": 128},
}


class Matrix(NamedTuple):
    """columns: "" and the backends. rows: what is asked, and a cell a backend. notes: why not, by backend."""

    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def matrix() -> Matrix:
    """A cell says where a backend serves a feature: wherever it runs ("yes"), on some targets, or not."""
    home = {name: _targets(name, {}) for name in dispatch.BACKENDS}
    rows = [["runs on", *(_list(home[name]) for name in dispatch.BACKENDS)]]
    notes: list[str] = []
    for feature, changes in FEATURES.items():
        row = [feature]
        for name in dispatch.BACKENDS:
            targets = _targets(name, changes)
            row.append("yes" if targets == home[name] else _list(targets))
            for target in home[name]:
                reason = _reason(name, target, changes)
                note = f"{name}: {reason}"
                if reason is not None and note not in notes:
                    notes.append(note)
        rows.append(row)
    rows.append(["head dims", *(_head_dims(name, home[name]) for name in dispatch.BACKENDS)])
    return Matrix(["", *dispatch.BACKENDS], rows, notes)


def markdown() -> str:
    """The matrix as a Markdown table, and its notes as a list."""
    columns, rows, notes = matrix()
    lines = [_line(columns), _line(["---"] * len(columns)), *(_line(row) for row in rows)]
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).strip()


def _reason(backend: str, target: str, changes: dict[str, Any]) -> str | None:
    return dispatch.load(backend).supports(dataclasses.replace(BASE, **TARGETS[target], **changes))


def _targets(backend: str, changes: dict[str, Any]) -> list[str]:
    return [target for target in TARGETS if _reason(backend, target, changes) is None]


def _head_dims(backend: str, targets: list[str]) -> str:
    """The head dims that a backend serves on each of its targets, as ranges."""
    served = [
        d
        for d in range(1, MAX_HEAD_DIM + 1)
        if targets and all(_reason(backend, t, {"head_dim": d, "head_dim_v": d}) is None for t in targets)
    ]
    return _list(_ranges(served))


def _ranges(numbers: Iterable[int]) -> list[str]:
    """Rising numbers as "3" and "5 to 9"."""
    runs = []
    for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return runs


def _list(words: list[str]) -> str:
    return ", ".join(words) or "no"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
