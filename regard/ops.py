"""The torch.library operators, their fakes and their autograd: the only place where autograd lives.

Operators take tensors and plain numbers, so that torch.compile keeps a call as one node; inside, the
numbers become a Problem again and the dispatch chooses a backend.

They are registered by hand: torch.library.custom_op and register_autograd do the same in 70 µs a call that
asks for gradients, where this takes 19 (50 are spent on looking for arguments left at a default).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from regard import dispatch
from regard.problem import Inputs, Problem, build, check_values


def attention(problem: Problem, inputs: Inputs, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a described call, differentiable."""
    p = problem
    out, lse, _ = _forward(
        *inputs,
        p.softmax_scale,
        p.softcap,
        p.window_left,
        p.window_right,
        p.deterministic,
        backend,
        False,  # differentiable: `_Attention` alone knows
    )
    return out, lse


def _compute(
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
    with _no_autocast(q.device.type):
        served_by.forward(problem, inputs, results)
    return _all_tensors(results)


def _compute_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(q, k, v, *args[:5])
    problem = build(inputs, *args[5:10])
    backend, differentiable = args[10:]
    if q.device.type == "meta":  # no backend computes there, so none wants a rest
        return _all_tensors(empty_results(problem, inputs, rest=False))
    served_by = dispatch.load(dispatch.select(problem, backend))
    return _all_tensors(empty_results(problem, inputs, differentiable and served_by.KEEPS_REST))


def _differentiate(
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
    q, k, v = _unit_rows(q, k, v)
    inputs = Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = build(inputs, softmax_scale, softcap, window_left, window_right, deterministic)
    served_by = dispatch.load(dispatch.select(problem, backend))
    grads = empty_gradients(inputs, needs_dq, needs_dkv, needs_dsinks)
    incoming = _incoming(out, lse, rest, dout, dlse)
    with _no_autocast(q.device.type):
        served_by.backward(problem, inputs, incoming, grads)
    return tuple(q.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


def _incoming(
    out: Tensor, lse: Tensor, rest: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> dispatch.Incoming:
    """What a backward starts from, laid out as backends read it; an expanded dout is copied, documented."""
    out, dout = _unit_rows(out, torch.zeros_like(out) if dout is None else dout)
    kept = rest if rest.shape == out.shape else None
    if kept is not None and kept.stride() != out.stride():
        kept = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device).copy_(kept)
    return dispatch.Incoming(out, lse.contiguous(), kept, dout, dlse)


def _unit_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each with a last stride of 1: a saved-tensor hook may hand back a tensor laid out otherwise."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _differentiate_fake(
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


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast would cast inside a backend, too. Entering costs 3 µs, so only where it is on."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _define(
    name: str, compute: Callable[..., Any], fake: Callable[..., Any], function: type[torch.autograd.Function]
) -> Any:
    """The operator regard::name with compute's signature. function: where a call asks for gradients."""
    schema = torch.library.infer_schema(compute, mutates_args=())
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    operator = getattr(torch.ops.regard, name).default

    def autograd(*arguments: Any) -> tuple[Tensor, ...]:
        _refuse_tangents(arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            results: tuple[Tensor, ...] = function.apply(*arguments)  # type: ignore[no-untyped-call]
            return results
        return _below_autograd(operator, arguments)

    # Around a graph break, torch.compile would otherwise trace into what runs eagerly.
    for key, kernel in (("CompositeExplicitAutograd", compute), ("Autograd", autograd)):
        _LIBRARY.impl(name, _disable_dynamo(kernel), key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"regard::{name}", fake, lib=_LIBRARY)
    return operator


def _below_autograd(operator: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, ...] = operator(*arguments)
    return results


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        results = _below_autograd(_forward, (*arguments[:-1], True))
        ctx.arguments = arguments[8:-1]
        ctx.save_for_backward(*arguments[:8], *results)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dlse, _ = incoming
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


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _below_autograd(_backward, arguments)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise NotImplementedError("regard's attention is differentiated once: no second derivatives")


def _refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """PyTorch would drop a tangent at an operator without a rule for it, and call the derivative 0."""
    for t in arguments:
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError("regard's attention has no forward-mode derivative: use reverse mode")


_LIBRARY = torch.library.Library("regard", "FRAGMENT")  # type: ignore[no-untyped-call]
_forward = _define("attention", _compute, _compute_fake, _Attention)
_backward = _define("attention_backward", _differentiate, _differentiate_fake, _AttentionBackward)


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
    if like.is_contiguous():
        return like.new_empty(shape)
    strides = like.stride()
    last = like.dim() - 1
    order = [*sorted(range(last), key=lambda i: -strides[i]), last]
    inverse = [order.index(i) for i in range(like.dim())]
    return like.new_empty([shape[i] for i in order]).permute(inverse)
