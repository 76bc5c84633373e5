"""The torch.library operators, their fakes and their autograd: the only place where autograd lives.

Operators take tensors and plain numbers, so that torch.compile keeps a call as one node; inside, the
numbers become a Problem again and the dispatch chooses a backend.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import dispatch
from regard.problem import Inputs, Problem, build, check_values


def attention(problem: Problem, inputs: Inputs, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a described call, differentiable."""
    _refuse_tangents(*inputs[:4])
    p = problem
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in inputs[:4] if t is not None)
    out, lse, _ = _forward(
        *inputs,
        p.softmax_scale,
        p.softcap,
        p.window_left,
        p.window_right,
        p.deterministic,
        backend,
        differentiable,
    )
    return out, lse


@torch.library.custom_op("regard::attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    deterministic: bool,
    backend: str | None,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = build(inputs, softmax_scale, softcap, window_left, window_right, deterministic)
    check_values(problem, inputs)
    served_by = dispatch.load(dispatch.select(problem, backend))
    results = empty_results(problem, inputs, differentiable and served_by.KEEPS_REST)
    with torch.autocast(q.device.type, enabled=False):  # it would cast inside a backend, too
        served_by.forward(problem, inputs, results)
    return _all_tensors(results)


@_forward.register_fake
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, *args[:5])
    problem = build(inputs, *args[5:10])
    backend, differentiable = args[10:]
    if q.device.type == "meta":  # no backend computes there, so none wants a rest
        return _all_tensors(empty_results(problem, inputs, rest=False))
    served_by = dispatch.load(dispatch.select(problem, backend))
    return _all_tensors(empty_results(problem, inputs, differentiable and served_by.KEEPS_REST))


@torch.library.custom_op("regard::attention_backward", mutates_args=())
def _backward(
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs_dq: bool,
    needs_dkv: bool,
    needs_dsinks: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    softmax_scale: float,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = build(inputs, softmax_scale, softcap, window_left, window_right, deterministic)
    if dout is None:
        dout = torch.zeros_like(out)
    if dout.stride(-1) != 1:  # an expanded or transposed gradient: the one copy, documented
        dout = dout.contiguous()
    served_by = dispatch.load(dispatch.select(problem, backend))
    grads = empty_gradients(inputs, needs_dq, needs_dkv, needs_dsinks)
    incoming = dispatch.Incoming(out, lse, rest if rest.shape == out.shape else None, dout, dlse)
    with torch.autocast(q.device.type, enabled=False):
        served_by.backward(problem, inputs, incoming, grads)
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


@_backward.register_fake
def _backward_fake(
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    needs_dq: bool,
    needs_dkv: bool,
    needs_dsinks: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *args: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, sinks)
    grads = empty_gradients(inputs, needs_dq, needs_dkv, needs_dsinks)
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.arguments = inputs[:8], inputs[8:-1]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    _refuse_tangents(dout, dlse)
    *tensors, out, lse, rest = ctx.saved_tensors
    needs_dq, needs_dk, needs_dv, needs_dsinks = ctx.needs_input_grad[:4]
    needs_dkv = needs_dk or needs_dv
    dq, dk, dv, dsinks = _backward(
        out, lse, rest, dout, dlse, needs_dq, needs_dkv, needs_dsinks, *tensors, *ctx.arguments
    )
    return (
        dq if needs_dq else None,
        dk if needs_dk else None,
        dv if needs_dv else None,
        dsinks if needs_dsinks else None,
        *[None] * 11,
    )


def _refuse_second_derivative(ctx: Any, *_: Tensor) -> NoReturn:
    raise NotImplementedError("regard's attention is differentiated once: no second derivatives")


def _refuse_tangents(*tensors: Tensor | None) -> None:
    """PyTorch would drop a tangent at an operator without a rule for it, and call the derivative 0."""
    tangents = (forward_ad.unpack_dual(t).tangent for t in tensors if t is not None)  # type: ignore[no-untyped-call]
    if any(tangent is not None for tangent in tangents):
        raise NotImplementedError("regard's attention has no forward-mode derivative: use reverse mode")


_forward.register_autograd(_differentiate, setup_context=_setup_context)
_backward.register_autograd(_refuse_second_derivative)


def empty_results(problem: Problem, inputs: Inputs, rest: bool) -> dispatch.Results:
    """Uninitialised out (q's dtype and dimension order), lse (float32, float64 for float64) and rest."""
    q = inputs.q
    shape = (*q.shape[:-1], problem.head_dim_v)
    lse = q.new_empty(problem.lse_shape, dtype=torch.promote_types(q.dtype, torch.float32))
    wanted = rest and q.dtype.itemsize == 2
    return dispatch.Results(empty_in_order(q, shape), lse, empty_in_order(q, shape) if wanted else None)


def _all_tensors(results: dispatch.Results) -> tuple[Tensor, Tensor, Tensor]:
    """An operator returns tensors: an empty one stands for no rest."""
    out, lse, rest = results
    return out, lse, out.new_empty(0) if rest is None else rest


def empty_gradients(
    inputs: Inputs, needs_dq: bool, needs_dkv: bool, needs_dsinks: bool
) -> dispatch.Gradients:
    """Uninitialised gradients, each in its tensor's dimension order; None for those not wanted."""
    q, k, v, sinks = inputs[:4]
    return dispatch.Gradients(
        empty_in_order(q, q.shape) if needs_dq else None,
        empty_in_order(k, k.shape) if needs_dkv else None,
        empty_in_order(v, v.shape) if needs_dkv else None,
        torch.empty_like(sinks) if needs_dsinks and sinks is not None else None,
    )


def empty_in_order(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An uninitialised dense tensor of `shape` whose dimensions lie in memory in `like`'s order."""
    strides = like.stride()
    last = like.dim() - 1
    order = [*sorted(range(last), key=lambda i: -strides[i]), last]
    inverse = [order.index(i) for i in range(like.dim())]
    return like.new_empty([shape[i] for i in order]).permute(inverse)
