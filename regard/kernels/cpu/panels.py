"""Attention by panels: a tile of query rows against every key that the tile sees, at once.

    for each chunk of (sequence, key head) pairs     k and v become matrices (pairs, keys, d) once
      for each tile of rows                          q and dout become (pairs, group * rows, d)
        s = q kT over the keys it sees               (pairs, group * rows, keys): the panel
        softcap, hide, softmax                       then out and lse, or dq, dk and dv

A panel holds whole rows, so the softmax needs no running state, and the backward takes delta from the
panel itself: delta_i = sum_j p_ij dp_ij - dlse_i, from the p and dp that it goes on to multiply. The usual
delta_i = dout_i . out_i carries the rounding of out, which does not cancel where keys look alike: on
repeated rows in bfloat16 it made dq 300 to 1800 times as wrong as eager PyTorch's.

All is computed in the softmax's dtype (float32; float64 for float64), but for what `operand_dtype` says.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.dispatch import Gradients, Incoming
from regard.kernels.cpu.tiles import Sequences, blank_rows, chunks, hide, pack, tiles, unpack
from regard.problem import Problem

INF = float("inf")
LOG2E = math.log2(math.e)


def forward(p: Problem, x: Sequences, out: Tensor, lse: Tensor) -> None:
    """Write out (n, sq, hq, dv) and lse (n, sq, hq, 1)."""
    blank = blank_rows(p, x)
    out[:, blank] = 0.0
    lse[:, blank] = -INF if x.sinks is None else x.sinks[:, None]
    for chunk in chunks(p, x):
        k, v = (pack(chunk.keys(t), lse.dtype) for t in (x.k, x.v))
        for rows, keys in tiles(p, x):
            seen = slice(keys.start, keys.stop)
            out_tile, lse_tile = chunk.rows(out, rows), chunk.rows(lse, rows)
            s = _products(p, pack(chunk.rows(x.q, rows), lse.dtype), k[:, seen])
            if p.softcap:
                s.tanh_().mul_(p.softcap)
            hide(p, x, chunk, rows, keys, s, to=-INF)
            m = s.amax(-1, keepdim=True)
            if x.sinks is not None:
                sink = pack(chunk.of_heads(x.sinks).expand_as(lse_tile), lse.dtype)
                m = torch.maximum(m, sink)
            m.masked_fill_(m == -INF, 0.0)  # a row that sees no key: exponentials of 0, not NaN
            e = _exp(s.sub_(m))
            total = e.sum(-1, keepdim=True)
            if x.sinks is not None:
                total += _exp(sink - m)
            unpack(lse_tile, total.log() + m)
            unpack(out_tile, torch.bmm(e, v[:, seen]).div_(total.masked_fill(total == 0, 1.0)))


def backward(p: Problem, x: Sequences, incoming: Incoming, grads: Gradients) -> None:
    """Write dq, dk and dv like q, k and v; add to dsinks (hq,). lse and dlse are (n, sq, hq, 1)."""
    dtype, operand = incoming.lse.dtype, operand_dtype(x.q.dtype)
    _backward_of_blank_rows(p, x, incoming, grads)
    for chunk in chunks(p, x):
        k = pack(chunk.keys(x.k), dtype)
        k_operand, v_operand = k.to(operand), pack(chunk.keys(x.v), operand)
        dk = None if grads.dk is None else torch.zeros_like(k)
        dv = None if grads.dv is None else torch.zeros_like(v_operand, dtype=dtype)
        for rows, keys in tiles(p, x):
            seen = slice(keys.start, keys.stop)
            q, dout, lse = (pack(chunk.rows(t, rows), dtype) for t in (x.q, incoming.dout, incoming.lse))

            # p = e * inverse. lse stands in for the row's maximum, and the row's own sum takes the
            # rounding of lse out again.
            lse = lse.masked_fill(lse == -INF, INF)  # a row that sees no key: e = 0
            s = _products(p, q, k[:, seen])
            if p.softcap:
                slope = s.tanh_().square().neg_().add_(1.0)
                s.mul_(p.softcap)
            e = _exp(s.sub_(lse))
            hide(p, x, chunk, rows, keys, e, to=0.0)
            inverse = e.sum(-1, keepdim=True)
            if x.sinks is not None:
                sink = chunk.of_heads(x.sinks).expand_as(chunk.rows(incoming.lse, rows))
                # lse holds the sink, so this is below 0 but in padding.
                e_sink = _exp((pack(sink, dtype) - lse).clamp_(max=0.0))
                inverse += e_sink
            inverse.masked_fill_(inverse == 0, 1.0).reciprocal_()

            dp = torch.bmm(dout.to(operand), v_operand[:, seen].mT).to(dtype)
            edp = dp.mul_(e)
            delta = edp.sum(-1, keepdim=True) * inverse
            if incoming.dlse is not None:
                delta -= pack(chunk.rows(incoming.dlse, rows), dtype)
            if grads.dsinks is not None:
                dsinks = chunk.of_heads(grads.dsinks)
                dsinks -= (e_sink * inverse * delta).view(sink.shape).sum((0, 3, 4))[..., None, None]
            if dv is not None:
                _add_product(dv[:, seen], e.to(operand).mT, (dout * inverse).to(operand))
            # ds times the row's total, 1 / inverse: the small factors below take it out.
            ds = edp.addcmul_(e, delta, value=-1.0)
            if p.softcap:
                ds.mul_(slope)
            ds = ds.to(operand)
            if dk is not None:
                _add_product(dk[:, seen], ds.mT, (q * inverse).to(operand))
            if grads.dq is not None:
                dq = torch.bmm(ds, k_operand[:, seen]) * (inverse * p.softmax_scale)
                unpack(chunk.rows(grads.dq, rows), dq)
        if grads.dk is not None and dk is not None:
            unpack(chunk.keys(grads.dk), dk.mul_(p.softmax_scale))
        if grads.dv is not None and dv is not None:
            unpack(chunk.keys(grads.dv), dv)


def _backward_of_blank_rows(p: Problem, x: Sequences, incoming: Incoming, grads: Gradients) -> None:
    blank = blank_rows(p, x)
    if grads.dq is not None:
        grads.dq[:, blank] = 0.0
    if grads.dsinks is not None and incoming.dlse is not None:  # there, lse is the sink
        grads.dsinks.add_(incoming.dlse[:, blank].sum((0, 1, 3)))


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the backward's matmul operands, but for the scores': bfloat16, or the softmax's dtype.

    A processor that multiplies bfloat16 natively does so 3 to 5 times as fast as float32. q, k, v and
    dout come in it; e, ds and what the products give (dp, dq, a tile's share of dk and dv) are rounded to
    it, where eager PyTorch rounds as well. float16 operands gain nothing.
    """
    native = dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("avx512_bf16", False)
    return dtype if native else torch.promote_types(dtype, torch.float32)


def _products(p: Problem, q: Tensor, k: Tensor) -> Tensor:
    """softmax_scale * q kT, over softcap if there is one: (pairs, rows, keys)."""
    return torch.bmm(q * (p.softmax_scale / (p.softcap or 1.0)), k.mT)


def _exp(x: Tensor) -> Tensor:
    """e ** x, in place. exp_ took 10 to 100 times as long where results are 0 or subnormal, exp2_ never."""
    return x.mul_(LOG2E).exp2_()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in total's dtype from tile to tile."""
    if total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total += torch.bmm(a, b)
