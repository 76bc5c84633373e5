"""The CPU backend, in plain PyTorch: memory O(S D), no work for what a mask hides, any dtype and head dim.

Deterministic by construction: every sum is taken in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.dispatch import Gradients, Incoming
from regard.kernels.cpu import flash, panels
from regard.kernels.cpu.slabs import Rows, slabs
from regard.kernels.cpu.tiles import Sequences
from regard.problem import Inputs, Problem


def supports(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"serves tensors on the CPU, not on {problem.device.type}"
    return None


def forward(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    if _may_leave_rows(problem):
        out.zero_()
        lse.fill_(float("-inf"))
    out, lse = _batched(out), _rows_first(lse)
    with torch.autocast("cpu", enabled=False):
        for rows, keys in slabs(problem, inputs):
            x = _sequences(inputs, rows, keys)
            results = rows.room(out), rows.room(lse)
            (flash if flash.serves(problem, x) else panels).forward(problem, x, *results)
            rows.put(out, results[0])
            rows.put(lse, results[1])


def backward(problem: Problem, inputs: Inputs, incoming: Incoming, grads: Gradients) -> None:
    for grad in grads[:3]:
        if grad is not None and _may_leave_rows(problem):
            grad.zero_()
    if grads.dsinks is not None:
        grads.dsinks.zero_()
    dq, dk, dv = (None if t is None else _batched(t) for t in grads[:3])
    out, dout, lse = _batched(incoming.out), _batched(incoming.dout), _rows_first(incoming.lse)
    dlse = None if incoming.dlse is None else _rows_first(incoming.dlse)
    with torch.autocast("cpu", enabled=False):
        for rows, keys in slabs(problem, inputs):
            x = _sequences(inputs, rows, keys)
            places = [(rows, dq), (keys, dk), (keys, dv)]
            results = [None if t is None else place.room(t) for place, t in places]
            panels.backward(
                problem,
                x,
                Incoming(
                    rows.take(out), rows.take(lse), rows.take(dout), None if dlse is None else rows.take(dlse)
                ),
                Gradients(results[0], results[1], results[2], grads.dsinks),
            )
            for (place, t), result in zip(places, results, strict=True):
                if t is not None and result is not None:
                    place.put(t, result)


def _may_leave_rows(p: Problem) -> bool:
    """Whether there may be rows that belong to no sequence, or keys that no sequence of rows looks at."""
    return p.packed or p.has_seqused_q or p.has_seqused_k or p.seqlen_q == 0


def _sequences(inputs: Inputs, queries: Rows, keys: Rows) -> Sequences:
    q, k, v = (_batched(t) for t in inputs[:3])
    return Sequences(queries.take(q), keys.take(k), keys.take(v), inputs.sinks, queries.used, keys.used)


def _batched(t: Tensor) -> Tensor:
    """(batch, rows, heads, dim), packed tensors as a batch of one."""
    return t if t.dim() == 4 else t[None]


def _rows_first(lse: Tensor) -> Tensor:
    """(b, hq, sq) or (hq, total) as (batch, rows, heads, 1)."""
    return (lse if lse.dim() == 3 else lse[None]).transpose(1, 2)[..., None]
