"""A scenario: one named attention call, from shapes and options to drawn tensors."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.problem import Inputs, Problem, describe
from regard.testing import draw

FAR = 2**31  # elements: past what a 32-bit offset reaches


@dataclass(frozen=True)
class Case:
    """A drawn call: its tensors, its options, and the gradients that arrive for out and lse.

    Only the first `distinct` sequences of a batch differ from one another; the later ones repeat them.
    """

    inputs: Inputs
    dtype: torch.dtype
    options: dict[str, Any]
    dout: Tensor | None
    dlse: Tensor | None
    autocast: bool
    distinct: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One named call.

    Attributes:
        name: unique, in kebab case.
        q, k: shapes, (b, s, h, d) or, packed, (rows, h, d).
        dv: v's head dim where it differs from k's.
        cu_q, cu_k: cu_seqlens of a packed call.
        used_q, used_k: seqused.
        unused: what rows that do not exist (past seqused, outside cu) hold in every tensor.
        sinks: values, repeated over the query heads.
        kinds: how q, k, v and dout are drawn (see `draw.KINDS`); each is a run of its own.
        layout, dout: how the inputs and the arriving gradient lie in memory (see `draw`).
        loss: what the loss sees: "out", "lse" or "both".
        distinct: draw only so many sequences and repeat them to fill the batch.
        autocast: k and v in float32, under autocast to the dtype.
        repeats: run so many times, deterministic, beside other work; every run must give the same bits.
        arena: run in sentinel-filled memory, in three layouts, which must give the same bits.
        full: left out of quick runs.
        gpu: meant for a GPU alone (a GPU's limits, or too large for a CPU).
    """

    name: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    dv: int | None = None
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    unused: float = float("nan")
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float | None = None
    sinks: tuple[float, ...] | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    kinds: tuple[str, ...] = ("gaussian", "structured")
    layout: str = "plain"
    dout: str = "plain"
    loss: str = "both"
    distinct: int | None = None
    autocast: bool = False
    repeats: int = 0
    arena: bool = False
    full: bool = False
    gpu: bool = False

    @property
    def deterministic(self) -> bool:
        return self.repeats > 0 or self.arena

    @property
    def packed(self) -> bool:
        return self.cu_q is not None

    @property
    def scores(self) -> int:
        """How many scores an attention without masks would compute: what a run costs."""
        if self.cu_q is not None and self.cu_k is not None:
            ends = zip(self.cu_q, self.cu_q[1:], self.cu_k, self.cu_k[1:], strict=False)
            return self.q[1] * sum((b - a) * (d - c) for a, b, c, d in ends)
        return self.q[0] * self.q[1] * self.q[2] * self.k[1]

    def memory(self, dtype: torch.dtype) -> int:
        """Bytes for inputs, results, gradients and their copies in the arena; the judge's come on top."""
        elements = sum(torch.Size(s).numel() for s in (self.q, self.k, self._v_shape, self._out_shape))
        spread = 4 * FAR if self.layout == "far" else 0
        return dtype.itemsize * (elements * (5 if self.arena else 3) + spread)

    @property
    def _v_shape(self) -> tuple[int, ...]:
        return (*self.k[:-1], self.dv or self.k[-1])

    @property
    def _out_shape(self) -> tuple[int, ...]:
        return (*self.q[:-1], self.dv or self.k[-1])

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `regard.attention` that are not tensors."""
        return {
            "causal": self.causal,
            "window_size": self.window_size,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
        }

    def problem(self, device: torch.device, dtype: torch.dtype) -> Problem:
        """What the call asks for, without drawing its tensors."""

        def floats(shape: tuple[int, ...]) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        inputs = Inputs(
            floats(self.q),
            floats(self.k),
            floats(self._v_shape),
            floats((self.q[-2],)) if self.sinks is not None else None,
            *(self._lengths(t, torch.device("meta")) for t in self._length_arguments),
        )
        problem = describe(inputs, packed=self.packed, deterministic=self.deterministic, **self.options)
        return dataclasses.replace(problem, device=device)

    def draw(self, kind: str, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Case:
        """The call's tensors. The same kind, device, dtype and seed draw the same values."""
        source = torch.Generator(device=device)
        source.manual_seed(seed + zlib.crc32(self.name.encode()))
        lengths = [self._lengths(t, device) for t in self._length_arguments]
        batch = 1 if self.packed else self.q[0]

        def values(name: str, shape: tuple[int, ...], rows: Tensor | None) -> Tensor:
            few = shape if self.distinct is None else (self.distinct, *shape[1:])
            t = draw.KINDS[kind](name, few, source)
            if self.distinct is not None:
                t = t[torch.arange(batch, device=device) % self.distinct]
            if rows is not None:
                t[~rows] = self.unused
            return t.to(torch.promote_types(dtype, torch.float32) if name == "dlse" else dtype)

        rows_q = draw.existing(self.q[:-2], lengths[0], lengths[2])
        rows_k = draw.existing(self.k[:-2], lengths[1], lengths[3])
        q = draw.lay_out(values("q", self.q, rows_q), self.layout)
        k = draw.lay_out(values("k", self.k, rows_k), self.layout)
        v = draw.lay_out(values("v", self._v_shape, rows_k), self.layout)
        dout, dlse = None, None
        if self.loss != "lse":
            rows = None if self.dout == "expanded" else rows_q
            dout = draw.lay_out(values("dout", self._out_shape, rows), self.dout)
        if self.loss != "out":
            dlse = values("dlse", (*self.q[:-1], 1), rows_q)[..., 0].movedim(-1, 0 if self.packed else 1)
        if self.autocast:
            k, v = k.float(), v.float()
        sinks = None
        if self.sinks is not None:
            repeated = [self.sinks[h % len(self.sinks)] for h in range(self.q[-2])]
            sinks = torch.tensor(repeated, dtype=torch.float32, device=device)
        inputs = Inputs(q, k, v, sinks, *lengths)
        return Case(inputs, dtype, self.options, dout, dlse, self.autocast, self.distinct or batch)

    @property
    def _length_arguments(self) -> tuple[tuple[int, ...] | None, ...]:
        return self.cu_q, self.cu_k, self.used_q, self.used_k

    @staticmethod
    def _lengths(values: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int32, device=device)
