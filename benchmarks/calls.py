"""One contestant's call: its inputs in its natural layout, and what of it is timed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.suites import Case

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Data(NamedTuple):
    """A case's tensors: q (b, sq, hq, d), k, v, dout like out; packed (total, h, d) with cu_seqlens."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None


def random_data(case: Case, device: torch.device, seed: int = 0) -> Data:
    """N(0, 1) inputs, never zeros: a GPU draws less power on zeros and runs faster than on real data."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, heads: int, dim: int) -> Tensor:
        shape = (rows, heads, dim) if case.packed else (case.batch, rows, heads, dim)
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    def cumulative(lengths: tuple[int, ...] | None) -> Tensor | None:
        if lengths is None:
            return None
        starts = [0, *itertools.accumulate(lengths)]
        return torch.tensor(starts, dtype=torch.int32, device=device)

    return Data(
        normal(case.seqlen_q, case.heads_q, case.head_dim),
        normal(case.seqlen_k, case.heads_k, case.head_dim),
        normal(case.seqlen_k, case.heads_k, case.head_dim_v),
        normal(case.seqlen_q, case.heads_q, case.head_dim_v),
        cumulative(case.lengths_q),
        cumulative(case.lengths_k),
    )


@dataclass(frozen=True, slots=True)
class Call:
    """attend(q, k, v) -> out on tensors laid out as the contestant likes them best.

    heads_first means (b, h, s, d), contiguous; packed rows are then a batch of one.
    """

    attend: Attend
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    heads_first: bool
    packed: bool

    @classmethod
    def on(cls, data: Data, attend: Attend, *, heads_first: bool = False) -> Call:
        packed = data.cu_seqlens_q is not None
        tensors = [data.q, data.k, data.v, data.dout]
        if heads_first:
            tensors = [(t[None] if packed else t).transpose(1, 2).contiguous() for t in tensors]
        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        return cls(attend, (q, k, v), tensors[3], heads_first, packed)

    def forward(self) -> Tensor:
        return self.attend(*self.leaves)

    def backward(self, out: Tensor, keep: bool = False) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.dout, retain_graph=keep)

    def timed(self, direction: str) -> Callable[[], object]:
        """What one measurement runs. The forward records its graph, as in training, for all alike; the
        backward starts from one kept graph."""
        if direction == "forward":
            return self.forward
        if direction == "both":
            return lambda: self.backward(self.forward())
        out = self.forward()
        return lambda: self.backward(out, keep=True)

    def back(self, t: Tensor) -> Tensor:
        """A result in the layout of Data."""
        if self.heads_first:
            t = t.transpose(1, 2)
            return t[0] if self.packed else t
        return t
