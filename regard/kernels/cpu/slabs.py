"""Which sequences are worked on together.

PyTorch pays for every operator call, so sequences share calls: all of a dense batch, read where they lie,
and short ones of about one length, copied and padded. Any other sequence is alone, read where it lies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.problem import Inputs, Problem

# A sequence is short while calls of its own would cost more than its arithmetic.
SHORT = 128
# Short sequences share calls if their lengths agree when rounded up to 16: at most 15 rows of padding.
ROUND = 16
# Rows of a padded copy, query or key: 4 MB at 8 heads of 64 in float32, reused from group to group.
GROUP_ROWS = 2048


class Span(NamedTuple):
    """The existing query (or key) rows of a sequence, in tensors that start with (batch, row)."""

    batch: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Even:
    """Sequences of one length, one for each entry of a slice of the batch: read and written in place."""

    batch: slice
    rows: slice
    used: None = None

    def take(self, t: Tensor) -> Tensor:
        """t's rows (sequences, length, ...), a view."""
        return t[self.batch, self.rows]

    def room(self, t: Tensor) -> Tensor:
        """Where results for t's rows are written before `put`: t itself."""
        return t[self.batch, self.rows]

    def put(self, t: Tensor, results: Tensor) -> None:
        """Store what was written to `room(t)`: done already."""

    def apart(self) -> list[Even]:
        return [self]


@dataclass(frozen=True, slots=True)
class Padded:
    """Sequences of several lengths: copied, with zeros after each. used (sequences,) are the lengths."""

    spans: list[Span]
    length: int
    used: Tensor

    def take(self, t: Tensor) -> Tensor:
        """t's rows (sequences, length, ...), a copy."""
        padded = t.new_zeros((len(self.spans), self.length, *t.shape[2:]))
        for i, (batch, start, length) in enumerate(self.spans):  # one index_select for all was slower
            padded[i, :length] = t[batch, start : start + length]
        return padded

    def room(self, t: Tensor) -> Tensor:
        """Where results for t's rows are written before `put`."""
        return t.new_empty((len(self.spans), self.length, *t.shape[2:]))

    def put(self, t: Tensor, results: Tensor) -> None:
        """Store what was written to `room(t)`, without the padding."""
        for i, (batch, start, length) in enumerate(self.spans):
            t[batch, start : start + length] = results[i, :length]

    def apart(self) -> list[Even]:
        """Each sequence alone, where it lies."""
        return [_alone(span) for span in self.spans]


Rows = Even | Padded


def slabs(p: Problem, inputs: Inputs) -> Iterator[tuple[Rows, Rows]]:
    """(query rows, key rows): every sequence that has query rows, once."""
    if not p.packed and not p.has_seqused_q and not p.has_seqused_k:
        if p.batch and p.seqlen_q:
            batch = slice(0, p.batch)
            yield Even(batch, slice(0, p.seqlen_q)), Even(batch, slice(0, p.seqlen_k))
        return
    queries = _spans(p, p.seqlen_q, inputs.cu_seqlens_q, inputs.seqused_q)
    keys = _spans(p, p.seqlen_k, inputs.cu_seqlens_k, inputs.seqused_k)
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (mine, theirs) in enumerate(zip(queries, keys, strict=True)):
        if mine.length and max(mine.length, theirs.length) <= SHORT:
            groups[-(-mine.length // ROUND), -(-theirs.length // ROUND)].append(i)
        elif mine.length:
            yield _rows([mine]), _rows([theirs])
    for lengths, members in groups.items():
        step = GROUP_ROWS // (ROUND * max(lengths))
        for at in range(0, len(members), step):
            some = members[at : at + step]
            yield _rows([queries[i] for i in some]), _rows([keys[i] for i in some])


def _spans(p: Problem, seqlen: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[Span]:
    if cu_seqlens is None:
        batch, start, length = list(range(p.batch)), [0] * p.batch, [seqlen] * p.batch
    else:
        batch, start, length = [0] * p.batch, cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    if seqused is not None:
        length = seqused.tolist()
    return [Span(*span) for span in zip(batch, start, length, strict=True)]


def _rows(spans: list[Span]) -> Rows:
    if len(spans) == 1:
        return _alone(spans[0])
    used = torch.tensor([span.length for span in spans])
    return Padded(spans, max(1, int(used.max())), used)


def _alone(span: Span) -> Even:
    return Even(slice(span.batch, span.batch + 1), slice(span.start, span.start + span.length))
