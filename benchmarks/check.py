"""Is a result right? Slices of it against the specification, in more precision, before anything is timed.

A slice is one sequence under one key head, whole: the first of both and the last of both. The
specification runs on blocks of rows, so that no S x S matrix is held.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.calls import Call, Data
from benchmarks.suites import Case
from regard import reference

# Scores of one block of rows, in elements: 256 MB in float32.
BLOCK = 2**26

# Largest relative error, of a slice as a whole and of its worst row. On these inputs eager PyTorch in the
# same dtype shows (5e-3, 1.6e-2) in bfloat16, (7e-4, 1.9e-3) in float16 and (7e-7, 2e-6) in float32: the
# bounds leave three times that, and float32 room for other orders of summation, so that a wrong mask,
# scale, head or row stands out. How exact a backend is, is the tests' business.
BOUNDS = {
    torch.bfloat16: (1.5e-2, 5e-2),
    torch.float16: (2e-3, 6e-3),
    torch.float32: (1e-5, 1e-4),
}

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Where a slice lies in q, out, dq (queries) and in k, v, dk, dv (keys), and what is right there."""

    queries: Index
    keys: Index
    expected: dict[str, Tensor]

    def errors(self, name: str, result: Tensor) -> tuple[float, float]:
        """(of the whole, of the worst row), relative. A row counts as at least the mean row's norm."""
        expected = self.expected[name]
        got = result[self.keys if name in ("dk", "dv") else self.queries].to(expected.dtype)
        error, norm = (got - expected).norm(dim=-1), expected.norm(dim=-1)
        return float(error.norm() / norm.norm()), float((error / norm.clamp(min=norm.mean())).max())


def expect(case: Case, data: Data, gradients: bool) -> list[Slice]:
    """The slices of a case: out, and with `gradients` dq, dk and dv."""
    ends = {(0, 0), (len(case.sequences) - 1, case.heads_k - 1)}
    return [_slice(case, data, sequence, head, gradients) for sequence, head in sorted(ends)]


def fault(call: Call, slices: list[Slice], *, gradients: bool) -> str | None:
    """Run the call once, compare the gradients or else the output; what is wrong, or None."""
    out = call.forward()
    results = {"out": call.back(out.detach())}
    if gradients:
        grads = call.backward(out)
        results = dict(zip(("dq", "dk", "dv"), map(call.back, grads), strict=True))
    whole_bound, row_bound = BOUNDS[out.dtype]
    for name, result in results.items():
        if not bool(result.isfinite().all()):
            return f"wrong {name}: not finite"
        for part in slices:
            whole, row = part.errors(name, result)
            if not (whole <= whole_bound and row <= row_bound):
                return (
                    f"wrong {name}: relative error {whole:.1e} (bound {whole_bound:.1e}), "
                    f"worst row {row:.1e} (bound {row_bound:.1e})"
                )
    return None


def _slice(case: Case, data: Data, sequence: int, head: int, gradients: bool) -> Slice:
    group = case.heads_q // case.heads_k
    heads_q, heads_k = slice(head * group, (head + 1) * group), slice(head, head + 1)
    queries: Index = (sequence, slice(None), heads_q)
    keys: Index = (sequence, slice(None), heads_k)
    if case.packed:
        queries = (_rows(data.cu_seqlens_q, sequence), heads_q)
        keys = (_rows(data.cu_seqlens_k, sequence), heads_k)
    dtype = torch.float64 if case.dtype == torch.float32 else torch.float32
    q, dout = data.q[queries].to(dtype), data.dout[queries].to(dtype)
    k, v = data.k[keys].to(dtype), data.v[keys].to(dtype)
    expected = {"out": torch.empty_like(dout)}
    if gradients:
        expected |= {"dq": torch.empty_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    sq, sk = q.shape[0], k.shape[0]
    step = max(1, BLOCK // (sk * group))
    for start in range(0, sq, step):
        rows = slice(start, min(start + step, sq))
        # The diagonal ends at the last key that the block's last row sees, so the block is a call of
        # its own with the keys cut there.
        end = max(0, rows.stop + sk - sq) if case.causal else sk
        inputs = [t.detach().requires_grad_(gradients) for t in (q[rows], k[:end], v[:end])]
        out, _ = reference.attention(
            *(t[None] for t in inputs), causal=case.causal, window_size=(case.window, None)
        )
        expected["out"][rows] = out[0].detach()
        if gradients:
            dq, dk, dv = torch.autograd.grad(out[0], inputs, dout[rows])
            expected["dq"][rows] = dq
            expected["dk"][:end] += dk
            expected["dv"][:end] += dv
    return Slice(queries, keys, expected)


def _rows(cu_seqlens: Tensor | None, sequence: int) -> slice:
    assert cu_seqlens is not None  # the case is packed
    return slice(*cu_seqlens[sequence : sequence + 2].tolist())
