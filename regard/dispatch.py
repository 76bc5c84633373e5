"""Which backend serves a call, and why each other one does not.

A backend is a package under `kernels` with the three functions of `Backend`. The first of BACKENDS that
supports a problem serves it; a named one never falls back.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from regard.problem import Inputs, Problem

BACKENDS = ("cpu", "portable")


class Results(NamedTuple):
    """Where a forward writes, every element.

    rest, laid out like out, is what rounding left off out: with it a backward takes delta from out as it was.
    It is None where no gradient is wanted, where the dtype is wide enough, or the backend does without.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor | None


class Incoming(NamedTuple):
    """What a backward starts from: the forward's results and the gradients that arrived for them.

    dout has a last stride of 1 and otherwise any strides; dlse (any strides) is None where lse is unused.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor | None
    dout: Tensor
    dlse: Tensor | None


class Gradients(NamedTuple):
    """Where a backward writes, every element; None where a gradient is not wanted. dk and dv together."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None


class Backend(Protocol):
    KEEPS_REST: bool  # whether backward wants Results.rest for 16-bit dtypes

    def supports(self, problem: Problem) -> str | None:
        """The reason why this backend cannot serve the problem, or None."""

    def forward(self, problem: Problem, inputs: Inputs, results: Results) -> None:
        """Write every element of the results."""

    def backward(self, problem: Problem, inputs: Inputs, incoming: Incoming, grads: Gradients) -> None:
        """Write every element of the gradients that are wanted."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The chosen backend (None when nothing serves the call) and each other one's reason."""

    problem: Problem
    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"served by {self.backend}" if self.backend else "no backend serves this call"]
        lines += [f"  {name}: {reason}" for name, reason in self.reasons.items()]
        return "\n".join(lines)


@functools.cache
def load(name: str) -> Backend:
    """The backend's module. Kernels are imported at the first use, not with the package."""
    return cast(Backend, importlib.import_module(f"regard.kernels.{name}"))


def check_name(backend: str | None) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected None or one of {', '.join(BACKENDS)}, got {backend!r}")


def explain(problem: Problem, backend: str | None = None) -> Explanation:
    """Ask every backend in order. With `backend` named, only that one may serve."""
    check_name(backend)
    chosen, reasons = None, {}
    for name in BACKENDS:
        reason = load(name).supports(problem)
        if reason is None and backend not in (None, name):
            reason = f"could serve, but backend={backend!r} was asked for"
        elif reason is None and chosen is not None:
            reason = f"could serve, but {chosen} comes first"
        if reason is None:
            chosen = name
        else:
            reasons[name] = reason
    return Explanation(problem, chosen, reasons)


def select(problem: Problem, backend: str | None) -> str:
    """The name of the backend that serves the problem.

    Raises ValueError for an unknown name, NotImplementedError when nothing serves.
    """
    check_name(backend)
    reasons = {}
    for name in BACKENDS if backend is None else (backend,):
        reason = load(name).supports(problem)
        if reason is None:
            return name
        reasons[name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    if backend is not None:
        raise NotImplementedError(f"backend {why}; backend=None chooses one that can")
    raise NotImplementedError(f"no backend serves this call: {why}")
