"""The reference on a drawn call, a few heads and rows at a time, so that memory stays bounded.

Results are in one form, whatever the call's: rows of all sequences end to end, (rows, heads, dim).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from regard import reference
from regard.testing.scenarios import Case

# Scores in one piece. The reference and its backward keep some 16 matrices of that many elements, 8
# bytes each: about 1 GB on a CPU, 8 GB on a GPU.
PIECE = {"cpu": 2**23, "cuda": 2**26}


class Heads(NamedTuple):
    """Some heads of a call in rows: q (rows_q, hq, d), k, v, sinks (hq,), dout as out, dlse (rows_q, hq)."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    dout: Tensor | None
    dlse: Tensor | None


class Results(NamedTuple):
    """Of some heads, or all: out (rows_q, hq, dv), lse (rows_q, hq), dq, dk, dv like q, k, v, dsinks (hq,).

    A gradient is None where nothing flows into it.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dsinks: Tensor | None


class Sequence(NamedTuple):
    """Where a sequence's existing rows lie among all rows."""

    q0: int
    q1: int
    k0: int
    k1: int


def in_rows(case: Case, results: Results) -> Results:
    """Results as the call returns them, brought to the one form."""
    if case.inputs.cu_seqlens_q is not None:
        return results._replace(lse=results.lse.t())
    dsinks = results.dsinks
    out, dq, dk, dv = (
        None if t is None else t.flatten(0, 1) for t in (results.out, results.dq, results.dk, results.dv)
    )
    assert out is not None
    return Results(out, results.lse.transpose(1, 2).flatten(0, 1), dq, dk, dv, dsinks)


def head_groups(case: Case) -> Iterator[slice]:
    """The key heads, as many at a time as fit in one piece."""
    q, k, v = case.inputs[:3]
    group = q.shape[-2] // k.shape[-2]
    rows = max(q.shape[:-2].numel(), k.shape[:-2].numel())
    a_head = group * max([rows * max(q.shape[-1], v.shape[-1]), *(_scores(s) for s in sequences(case))])
    step = max(1, PIECE[q.device.type] // max(1, a_head))
    for first in range(0, k.shape[-2], step):
        yield slice(first, min(first + step, k.shape[-2]))


def sequences(case: Case) -> list[Sequence]:
    """The sequences that differ from one another."""
    bounds = []
    for side in "qk":
        t: Tensor = getattr(case.inputs, side)
        cu: Tensor | None = getattr(case.inputs, f"cu_seqlens_{side}")
        used: Tensor | None = getattr(case.inputs, f"seqused_{side}")
        if cu is not None:
            starts = cu[:-1].tolist()
            lengths = cu.diff().tolist()
        else:
            starts = [i * t.shape[1] for i in range(case.distinct)]
            lengths = [t.shape[1]] * case.distinct
        lengths = lengths if used is None else used.tolist()
        bounds.append([(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    return [Sequence(*a, *b) for a, b in zip(*bounds, strict=True)]


def narrow(case: Case, results: Results, heads: slice) -> Results:
    """Results in the one form, of these key heads and their query heads."""
    heads_q = query_heads(case, heads)

    def of(t: Tensor | None, heads: slice) -> Tensor | None:
        return None if t is None else t[:, heads]

    return Results(
        results.out[:, heads_q],
        results.lse[:, heads_q],
        of(results.dq, heads_q),
        of(results.dk, heads),
        of(results.dv, heads),
        None if results.dsinks is None else results.dsinks[heads_q],
    )


def take(case: Case, heads: slice) -> Heads:
    """These key heads and their query heads, of the distinct sequences, in the dtype of the call."""
    heads_q = query_heads(case, heads)
    packed = case.inputs.cu_seqlens_q is not None

    def rows_of(t: Tensor, heads: slice) -> Tensor:
        t = t[..., heads, :] if packed else t[: case.distinct, :, heads].flatten(0, 1)
        return t.to(case.dtype)

    q, k, v, sinks = case.inputs[:4]
    dlse = case.dlse
    if dlse is not None:
        dlse = dlse[heads_q].t() if packed else dlse[: case.distinct, heads_q].transpose(1, 2).flatten(0, 1)
    return Heads(
        rows_of(q, heads_q),
        rows_of(k, heads),
        rows_of(v, heads),
        None if sinks is None else sinks[heads_q],
        None if case.dout is None else rows_of(case.dout, heads_q),
        dlse,
    )


def attention(case: Case, heads: Heads, dtype: torch.dtype) -> Results:
    """What `reference.py` makes of some heads, computed in dtype.

    Each sequence is sliced to the rows that exist, then into pieces of rows with the keys that they can
    see. A sum over pieces is kept in float64.
    """
    accumulated = torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (None if t is None else t.to(dtype) for t in (*heads[:3], heads.dout))
    sinks, dlse = (None if t is None else t.to(accumulated) for t in (heads.sinks, heads.dlse))
    assert q is not None
    assert k is not None
    assert v is not None
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], float("-inf"), dtype=accumulated)
    sums = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v)]
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float64)
    for seq in sequences(case):
        for rows, keys, window in _pieces(case, seq, q.shape[-2]):
            leaves = [t.detach().requires_grad_() for t in (q[rows], k[keys], v[keys])]
            leaves += [] if sinks is None else [sinks.detach().requires_grad_()]
            options = case.options | {"causal": False, "window_size": window}
            sink = None if sinks is None else leaves[3]
            o, e = reference.attention(*(t[None] for t in leaves[:3]), sinks=sink, **options)
            out[rows], lse[rows] = o[0].detach(), e[0].t().detach()
            ends = [] if dout is None else [(o, dout[rows][None])]
            ends += [] if dlse is None else [(e, dlse[rows].t()[None])]
            results, arriving = zip(*ends, strict=True)
            grads = torch.autograd.grad(results, leaves, arriving, allow_unused=True)
            places = [(sums[0], rows), (sums[1], keys), (sums[2], keys), (dsinks, slice(None))]
            for (total, where), grad in zip(places, grads, strict=False):
                if grad is not None and total is not None:
                    total[where] += grad
    dq, dk, dv = (t.to(dtype) for t in sums)
    return Results(out, lse, dq, dk, dv, dsinks)


def query_heads(case: Case, heads: slice) -> slice:
    """The query heads that read these key heads."""
    group = case.inputs.q.shape[-2] // case.inputs.k.shape[-2]
    return slice(heads.start * group, heads.stop * group)


def _scores(seq: Sequence) -> int:
    return (seq.q1 - seq.q0) * (seq.k1 - seq.k0)


def _pieces(
    case: Case, seq: Sequence, heads: int
) -> Iterator[tuple[slice, slice, tuple[int | None, int | None]]]:
    """A sequence in pieces: rows, the keys that they can see, and the window that the piece needs.

    Rows i0 to i1 of a sequence see keys from i0 + offset - left to i1 - 1 + offset + right, where offset
    is sk - sq. A piece is aligned to its own end, so its window is shifted by how far its offset is
    from theirs.
    """
    sq, sk = seq.q1 - seq.q0, seq.k1 - seq.k0
    offset = sk - sq
    left, right = case.options["window_size"]
    if case.options["causal"]:
        right = 0 if right is None else min(right, 0)
    step = max(1, PIECE[case.inputs.q.device.type] // max(1, heads * sk))
    for i0 in range(0, sq, step):
        i1 = min(i0 + step, sq)
        first = 0 if left is None else min(max(0, i0 + offset - left), sk)
        last = sk if right is None else min(max(first, i1 + offset + right), sk)
        shift = (last - first) - (i1 - i0) - (i0 + offset - first)
        window = (None if left is None else left + shift, None if right is None else right - shift)
        if last == first:
            window = (None, None)
        yield slice(seq.q0 + i0, seq.q0 + i1), slice(seq.k0 + first, seq.k0 + last), window
