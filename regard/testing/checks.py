"""Run one scenario on one backend, forward and backward, and measure it against the reference."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard import dispatch, functional
from regard.problem import Inputs
from regard.testing import instruments, judge, measure
from regard.testing.judge import Results
from regard.testing.scenarios import Case, Scenario

# Layouts of the arena, in elements after a fence of 67. In a group every tensor is as far from a multiple of
# 16 bytes in one layout as in the other, and the bits must be the same; rows off 16 bytes are served by other
# tiles, whose results are measured by themselves.
ARENA_SHIFTS = ((5, 13, 29), (0, 8))
INTERPRETED_SCORES = 2**17  # Triton's interpreter takes seconds for more


@dataclass(frozen=True)
class Result:
    """What came of one scenario. multiples: a tensor's worst error in multiples of eager's."""

    scenario: str
    backend: str
    device: str
    dtype: str
    multiples: dict[str, float]
    limits: dict[str, float]
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.faults and all(m <= self.limits[name] for name, m in self.multiples.items())

    @property
    def worst(self) -> tuple[str, float]:
        """The tensor that comes closest to its limit, and its multiple."""
        if not self.multiples:
            return "none", 0.0
        name = max(self.multiples, key=lambda n: self.multiples[n] / self.limits[n])
        return name, self.multiples[name]

    @property
    def share(self) -> float:
        """How much of its limit the worst tensor takes: above 1 it fails."""
        name, multiple = self.worst
        return multiple / self.limits[name] if self.multiples else 0.0

    def __str__(self) -> str:
        verdict = "passes" if self.passed else "FAILS"
        errors = ", ".join(
            f"{name} {m:.2f}{'' if m <= self.limits[name] else f' > {self.limits[name]:g}'}"
            for name, m in self.multiples.items()
        )
        where = f"{self.scenario} on {self.backend} ({self.device}, {self.dtype})"
        return "; ".join([f"{where} {verdict}: errors as multiples of eager's: {errors}", *self.faults])


def reason_to_skip(scenario: Scenario, device: torch.device, dtype: torch.dtype, backend: str) -> str | None:
    """Why a scenario is not run here, or None."""
    if scenario.gpu and device.type != "cuda":
        return "meant for a GPU"
    reason = dispatch.load(backend).supports(scenario.problem(device, dtype))
    if reason is not None:
        return reason
    if device.type == "cpu" and backend == "portable" and scenario.scores > INTERPRETED_SCORES:
        return "too large for Triton's interpreter"
    needed = scenario.memory(dtype) + 16 * 8 * judge.PIECE[device.type]
    free = _free_memory(device)
    if needed > free:
        return f"needs {needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} are free"
    return None


def check(
    scenario: Scenario,
    device: torch.device | str,
    dtype: torch.dtype,
    backend: str | None = None,
    kind: str = "gaussian",
    seed: int = 0,
) -> Result:
    """Run a scenario forward and backward and measure every result against the reference.

    Args:
        scenario: one of `SCENARIOS`, or your own.
        device: where to run it, the judge included.
        dtype: of q, k and v.
        backend: as for `regard.attention`.
        kind: how values are drawn, a name in `KINDS`.
        seed: of the draw.

    Returns:
        Result: `passed`, `worst`, and by str() one line that says what went wrong where.

    Raises:
        what the call itself raises.
    """
    device = torch.device(device)
    case = scenario.draw(kind, device, dtype, seed)
    instruments.poison_free_memory(device)
    faults: list[str] = []
    with instruments.poisoned():
        results = run(case, case.inputs, backend, scenario.deterministic)
    if scenario.arena:
        faults += _arena_faults(case, backend)
    for i in range(scenario.repeats if device.type == "cuda" else min(scenario.repeats, 3)):
        with instruments.busy(device):
            again = run(case, case.inputs, backend, scenario.deterministic)
        faults += [f"{name} has other bits in run {i + 2}" for name in _different(results, again)]
    errors = _measure(case, results)
    served_by = backend or dispatch.select(scenario.problem(device, dtype), None)
    return Result(
        f"{scenario.name}[{kind}]",
        served_by,
        str(device),
        str(dtype).removeprefix("torch."),
        errors.multiples,
        {name: measure.limit(case, name) for name in errors.multiples},
        [*faults, *errors.faults],
    )


def run(case: Case, inputs: Inputs, backend: str | None, deterministic: bool = False) -> Results:
    """The public call and its backward, as a user would write them; results as the call returns them."""
    leaves = [t.detach().requires_grad_() for t in inputs[:4] if t is not None]
    q, k, v = leaves[:3]
    options: dict[str, Any] = {
        **case.options,
        "sinks": leaves[3] if inputs.sinks is not None else None,
        "seqused_q": inputs.seqused_q,
        "seqused_k": inputs.seqused_k,
        "return_lse": True,
        "deterministic": deterministic,
        "backend": backend,
    }
    with torch.autocast(q.device.type, case.dtype, enabled=case.autocast):
        if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None:
            lengths = inputs.cu_seqlens_q, inputs.cu_seqlens_k
            out, lse = functional.attention_varlen(q, k, v, *lengths, **options)
        else:
            out, lse = functional.attention(q, k, v, **options)
    ends = [(t, grad) for t, grad in ((out, case.dout), (lse, case.dlse)) if grad is not None]
    results, arriving = zip(*ends, strict=True)
    grads = torch.autograd.grad(results, leaves, arriving, allow_unused=True)
    dsinks = grads[3] if inputs.sinks is not None else None
    if q.device.type == "cuda":
        torch.cuda.synchronize(q.device)
    dq, dk, dv = grads[:3]
    return Results(out.detach(), lse.detach(), dq, dk, dv, dsinks)


def _measure(case: Case, results: Results) -> measure.Errors:
    results = judge.in_rows(case, results)
    exists = _existing_rows(case)
    total = measure.Errors()
    for heads in judge.head_groups(case):
        got = judge.narrow(case, results, heads)
        taken = judge.take(case, heads)
        true = judge.attention(case, taken, torch.float64)
        eager = judge.attention(case, taken, case.dtype)
        errors = measure.compare(case, taken, got, true, eager, exists)
        total.faults += errors.faults
        for name, multiple in errors.multiples.items():
            total.note(name, multiple)
    return total


def _existing_rows(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for t, first, last in zip(case.inputs[:2], ("q0", "k0"), ("q1", "k1"), strict=True):
        assert t is not None
        rows = torch.zeros(t.shape[:-2].numel(), dtype=torch.bool, device=t.device)
        for seq in judge.sequences(case):
            rows[getattr(seq, first) : getattr(seq, last)] = True
        distinct = case.distinct * (t.shape[1] if case.inputs.cu_seqlens_q is None else 0)
        if 0 < distinct < rows.shape[0]:
            rows = rows[torch.arange(rows.shape[0], device=t.device) % distinct]
        found.append(rows)
    return found[0], found[1]


def _arena_faults(case: Case, backend: str | None) -> list[str]:
    faults = []
    for group in ARENA_SHIFTS:
        first: Results | None = None
        for shift in group:
            arena = instruments.Arena(shift)
            inputs = instruments.place_inputs(arena, case.inputs)
            with arena.allocating():
                again = run(case, inputs, backend, deterministic=True)
            faults += [f"something was written beside {name} (shift {shift})" for name in arena.broken()]
            if first is None:
                first = again
                errors = _measure(case, first)
                faults += [f"{fault} (shift {shift})" for fault in errors.faults]
                faults += [
                    f"{name} is {m:.2f} times eager's error off (shift {shift})"
                    for name, m in errors.multiples.items()
                    if m > measure.limit(case, name)
                ]
            else:
                faults += [
                    f"{name} depends on where tensors lie (shift {shift})"
                    for name in _different(first, again)
                ]
            del arena, inputs, again
    return faults


def _different(a: Results, b: Results) -> list[str]:
    pairs = zip(Results._fields, a, b, strict=True)
    return [name for name, x, y in pairs if not instruments.same_bits(x, y)]


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return sys.maxsize
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024
