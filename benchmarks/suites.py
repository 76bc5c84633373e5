"""What is measured: cases as data, and the one place that counts their work."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

DIRECTIONS = ("forward", "backward", "both")


@dataclass(frozen=True, slots=True)
class Case:
    """One attention call. Lengths are of one sequence when dense, totals of rows when packed.

    window counts the keys to the left of the diagonal and needs causal; lengths_q and lengths_k make
    the case packed; label names what the numbers cannot (a mask, an origin); flex enters FlexAttention,
    which compiles for tens of seconds a shape and so is kept to the shapes its table row needs.
    """

    head_dim: int
    head_dim_v: int
    heads_q: int
    heads_k: int
    batch: int
    seqlen_q: int
    seqlen_k: int
    causal: bool
    window: int | None = None
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    label: str = ""
    dtype: torch.dtype = torch.bfloat16
    flex: bool = False

    @property
    def packed(self) -> bool:
        return self.lengths_q is not None

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(query rows, keys) of each sequence."""
        if self.lengths_q is None or self.lengths_k is None:
            return [(self.seqlen_q, self.seqlen_k)] * self.batch
        return list(zip(self.lengths_q, self.lengths_k, strict=True))

    @property
    def name(self) -> str:
        """As in "d128 s4096 causal". What is usual is left out: H·D = 2048 without sharing, bfloat16."""
        dims = f"d{_pair(self.head_dim, self.head_dim_v, ',')}"
        usual = self.heads_q == self.heads_k and self.heads_q * self.head_dim == 2048
        parts = [dims] if usual and self.head_dim == self.head_dim_v else [dims, self._heads]
        parts += [f"s{_pair(self.seqlen_q, self.seqlen_k, ':')}", "causal" if self.causal else "full"]
        parts += [f"window {self.window}"] if self.window is not None else []
        parts += [self.label] if self.label else []
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.bfloat16 else []
        return " ".join(parts)

    @property
    def _heads(self) -> str:
        return f"h{self.heads_q}:{self.heads_k}"


@dataclass(frozen=True, slots=True)
class Suite:
    """Cases that are run together, and the device type they are meant for."""

    device: str
    cases: tuple[Case, ...]


def visible_pairs(case: Case) -> int:
    """How many (row, key) pairs one head computes: exact, whatever the mask."""
    total = 0
    for sq, sk in case.sequences:
        diagonal = torch.arange(sq) + sk - sq
        last = diagonal.clamp(max=sk - 1) if case.causal else torch.full((sq,), sk - 1)
        first = torch.zeros(sq, dtype=torch.int64)
        if case.window is not None:
            first = (diagonal - case.window).clamp(min=0)
        total += int((last - first + 1).clamp(min=0).sum())
    return total


def flops(case: Case, direction: str) -> float:
    """Floating-point operations of one call.

    Forward: 2 · H · pairs · (D + Dv), the two products QKᵀ and PV over the pairs that the mask leaves,
    summed over the batch. Backward: 2.5 times that, for five products where the forward has two
    (recomputing S included); "both" is their sum.
    """
    forward = 2 * case.heads_q * visible_pairs(case) * (case.head_dim + case.head_dim_v)
    return forward * {"forward": 1.0, "backward": 2.5, "both": 3.5}[direction]


def document_lengths(total: int, shortest: int, longest: int, seed: int) -> tuple[int, ...]:
    """Seeded lengths from shortest to longest that sum to total."""
    rng = random.Random(seed)
    lengths = []
    while total > longest:
        lengths.append(rng.randint(shortest, min(longest, total - shortest)))
        total -= lengths[-1]
    return (*lengths, total)


def _pair(first: int, second: int, separator: str) -> str:
    return f"{first}" if first == second else f"{first}{separator}{second}"


def _dense() -> tuple[Case, ...]:
    """16k tokens and H·D = 2048 whatever the shape."""
    return tuple(
        Case(d, d, 2048 // d, 2048 // d, 16384 // s, s, s, causal, flex=s == 4096 and d in (64, 128))
        for d, s, causal in itertools.product((64, 128, 256), (1024, 4096, 16384), (False, True))
    )


def _dims() -> tuple[Case, ...]:
    shapes = ((80, 80, 16, 4), (96, 96, 16, 16), (192, 128, 16, 16), (192, 192, 16, 4))
    return tuple(Case(d, dv, hq, hk, 4, 4096, 4096, True) for d, dv, hq, hk in shapes)


def _masks() -> tuple[Case, ...]:
    documents = document_lengths(32768, 512, 4095, seed=0)
    # Video frames attending to a longer context: rows of eight unequal segments.
    starts = (0, 4032, 9072, 14112, 19152, 24292, 29232, 34272, 35280)
    rows = tuple(b - a for a, b in itertools.pairwise(starts))
    keys = (17580,) * len(rows)
    return (
        Case(128, 128, 16, 16, 1, 32768, 32768, True, window=1024, flex=True),
        _packed(128, 16, documents, documents, causal=True, label="documents", flex=True),
        _packed(128, 56, rows, keys, causal=False, label="video", flex=False),
        Case(128, 128, 16, 16, 1, 2048, 16384, True),
    )


def _packed(
    d: int,
    heads: int,
    rows: tuple[int, ...],
    keys: tuple[int, ...],
    *,
    causal: bool,
    label: str,
    flex: bool,
) -> Case:
    return Case(
        *(d, d, heads, heads, len(rows), sum(rows), sum(keys), causal),
        lengths_q=rows,
        lengths_k=keys,
        label=label,
        flex=flex,
    )


def _cpu() -> tuple[Case, ...]:
    shapes = ((8192, True, 256), (2048, False, None), (2048, True, None))
    return tuple(
        Case(64, 64, 4, 4, 1, s, s, causal, window=window, dtype=dtype)
        for (s, causal, window), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16))
    )


def _smoke() -> tuple[Case, ...]:
    """Every kind of case, tiny: that the machinery works, not how fast."""
    fp32 = torch.float32
    return (
        Case(16, 16, 4, 4, 2, 64, 64, False, dtype=fp32),
        Case(16, 24, 4, 2, 2, 40, 72, True, dtype=fp32),
        Case(16, 16, 4, 2, 1, 96, 96, True, window=16, dtype=fp32),
        Case(16, 16, 2, 2, 2, 50, 80, True, None, (20, 30), (35, 45), "packed", fp32),
    )


SUITES = {
    "dense": Suite("cuda", _dense()),
    "dims": Suite("cuda", _dims()),
    "masks": Suite("cuda", _masks()),
    "cpu": Suite("cpu", _cpu()),
    "smoke": Suite("cpu", _smoke()),
}
