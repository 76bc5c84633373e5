"""The CPU backend, in plain PyTorch: memory O(S D), no work for what a mask hides, any dtype and head dim.

Deterministic by construction: every sum is taken in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.dispatch import Gradients, Incoming, Results
from regard.kernels.cpu import flash, panels
from regard.kernels.cpu.slabs import Rows, slabs
from regard.kernels.cpu.tiles import Sequences, sees_all
from regard.problem import Inputs, Problem

KEEPS_REST = False  # a panel holds whole rows: delta is taken from their probabilities


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"serves tensors on the CPU, not on {problem.device.type}"
    return None


def forward(problem: Problem, inputs: Inputs, results: Results) -> None:
    out, lse, _ = results
    if _may_leave_rows(problem):
        out.zero_()
        lse.fill_(float("-inf"))
    out, lse = _batched(out), _rows_first(lse)
    for rows, _keys, x, _ in _slabs(problem, inputs):
        room = rows.room(out), rows.room(lse)
        by = flash if flash.serves(problem, x) else panels
        by.forward(problem, x, *room)
        rows.put(out, room[0])
        rows.put(lse, room[1])


def backward(problem: Problem, inputs: Inputs, incoming: Incoming, grads: Gradients) -> None:
    for grad in grads[:3]:
        if grad is not None and _may_leave_rows(problem):
            grad.zero_()
    if grads.dsinks is not None:
        grads.dsinks.zero_()
    dq, dk, dv = (None if t is None else _batched(t) for t in grads[:3])
    out, lse = _batched(incoming.out), _rows_first(incoming.lse)
    arriving = [_batched(incoming.dout)]
    if incoming.dlse is not None:
        arriving.append(_rows_first(incoming.dlse))
    for rows, keys, x, (dout, *dlse) in _slabs(problem, inputs, *arriving):
        places = [(rows, dq), (keys, dk), (keys, dv)]
        results = [None if t is None else place.room(t) for place, t in places]
        by = flash if not dlse and flash.serves(problem, x) else panels
        by.backward(
            problem,
            x,
            Incoming(rows.take(out), rows.take(lse), None, dout, dlse[0] if dlse else None),
            Gradients(results[0], results[1], results[2], grads.dsinks),
        )
        for (place, t), result in zip(places, results, strict=True):
            if t is not None and result is not None:
                place.put(t, result)


def _slabs(
    p: Problem, inputs: Inputs, *arriving: Tensor
) -> Iterator[tuple[Rows, Rows, Sequences, list[Tensor]]]:
    """Each slab's query rows, key rows, what lies there, and its rows of what arrives for the backward.

    A tile multiplies what it hides by 0, which leaves nothing of a finite number. A slab that holds NaN or
    infinity behind a mask is worked on by sequence and row instead.
    """
    for rows, keys in slabs(p, inputs):
        x, mine = _sequences(inputs, rows, keys), [rows.take(t) for t in arriving]
        if sees_all(p, x) or all(_finite(t) for t in (x.q, x.k, x.v, *mine)):
            yield rows, keys, x, mine
        else:
            for row, key in zip(rows.apart(), keys.apart(), strict=True):
                x = _sequences(inputs, row, key, row_by_row=True)
                yield row, key, x, [row.take(t) for t in arriving]


def _finite(t: Tensor) -> bool:
    # 0.5 ms for 4M elements, a tenth of isfinite().all()
    return t.numel() == 0 or all(bool(edge.isfinite()) for edge in torch.aminmax(t))


def _may_leave_rows(p: Problem) -> bool:
    """Whether there may be rows that belong to no sequence, or keys that no sequence of rows looks at."""
    return p.packed or p.has_seqused_q or p.has_seqused_k or p.seqlen_q == 0


def _sequences(inputs: Inputs, queries: Rows, keys: Rows, row_by_row: bool = False) -> Sequences:
    q, k, v = (_batched(t) for t in inputs[:3])
    return Sequences(
        queries.take(q), keys.take(k), keys.take(v), inputs.sinks, queries.used, keys.used, row_by_row
    )


def _batched(t: Tensor) -> Tensor:
    """(batch, rows, heads, dim), packed tensors as a batch of one."""
    return t if t.dim() == 4 else t[None]


def _rows_first(lse: Tensor) -> Tensor:
    """(b, hq, sq) or (hq, total) as (batch, rows, heads, 1)."""
    return (lse if lse.dim() == 3 else lse[None]).transpose(1, 2)[..., None]
