"""The public calls: arguments in, one Problem described, one operator called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard import dispatch, ops
from regard.problem import Inputs, Problem, check_hint, describe

Window = tuple[int | None, int | None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact scaled dot-product attention over dense batches, differentiable.

    Args:
        q: (b, sq, hq, d), float16, bfloat16, float32 or float64 (CPU only). Any strides whose last is 1.
        k: (b, sk, hk, d). hq must be a multiple of hk (grouped-query attention).
        v: (b, sk, hk, dv); dv may differ from d. Head dims are 1 to 512.
        causal: row i sees key j iff j <= i + sk - sq (bottom-right aligned).
        window_size: (left, right) keys around the diagonal, edges inclusive: row i sees key j iff
            i + sk - sq - left <= j <= i + sk - sq + right. None is unlimited. Composes with causal by and.
        softmax_scale: factor of q·k, 1e-37 to 1e38; default d ** -0.5.
        softcap: c > 0 makes scores c * tanh(score / c); None or 0 is off.
        sinks: (hq,), a logit a query head that joins the softmax's denominator only.
        seqused_q: (b,) int32. Rows past it do not exist: out 0, lse -inf, gradient 0.
        seqused_k: (b,) int32. Keys past it do not exist and are never read into a result. The
            diagonal is aligned to the used lengths.
        return_lse: also return the log-sum-exp of each row.
        deterministic: the same bits every run, for forward and backward.
        backend: "cpu" or "portable"; None chooses (see `explain`). A named backend never falls back.

    Returns:
        out (b, sq, hq, dv) in q's dtype and q's dimension order. With return_lse also lse (b, hq, sq),
        float32 (float64 for float64), natural log, sinks included. Both carry gradients. A row that sees
        no key: out 0, lse -inf (the sink's value with a sink).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, shape, dtype, device or value.
        NotImplementedError: no backend, or not the named one, serves the call.

    Under autocast q, k and v are cast as PyTorch's scaled_dot_product_attention casts them.

    Source: FlashAttention (arXiv:2205.14135) and FlashAttention-2 (arXiv:2307.08691) for the tiled
    forward and backward; sinks as in StreamingLLM (arXiv:2309.17453) and gpt-oss; softcap as in Gemma 2
    (arXiv:2408.00118).
    """
    q, k, v = _autocast(q, k, v)
    inputs = Inputs(q, k, v, sinks, None, None, seqused_q, seqused_k)
    problem = describe(
        inputs,
        packed=False,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )
    return _run(problem, inputs, return_lse, backend)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over packed sequences: `attention` for rows laid end to end.

    Args:
        q: (total_q, hq, d); k: (total_k, hk, d); v: (total_k, hk, dv).
        cu_seqlens_q, cu_seqlens_k: (n + 1,) int32 on q's device. Sequence i owns rows
            cu_seqlens[i] to cu_seqlens[i + 1]. Rows outside every sequence do not exist: out 0, lse -inf,
            gradient 0. Entries beyond the rows are an error on the CPU; on a GPU, where reading
            them would sync, they are cut to the rows.
        max_seqlen_q, max_seqlen_k: accepted as hints, never needed.
        seqused_q, seqused_k: (n,) int32, how many of a sequence's rows exist.
        The rest as in `attention`.

    Returns:
        out (total_q, hq, dv); with return_lse also lse (hq, total_q).

    Raises:
        As `attention`.
    """
    check_hint("max_seqlen_q", max_seqlen_q)
    check_hint("max_seqlen_k", max_seqlen_k)
    q, k, v = _autocast(q, k, v)
    inputs = Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    problem = describe(
        inputs,
        packed=True,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )
    return _run(problem, inputs, return_lse, backend)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    backend: str | None = None,
    **hints: Any,
) -> dispatch.Explanation:
    """Which backend serves this call, and why each other one does not. Computes nothing.

    Takes the arguments of `attention` or, with cu_seqlens, of `attention_varlen`; tensors on the meta
    device will do: they stand for the GPU where there is one and for the CPU elsewhere. Raises what the
    call itself would raise for bad input, but reports a backend that cannot serve instead of raising.
    """
    for name, value in hints.items():
        if name not in ("max_seqlen_q", "max_seqlen_k", "return_lse"):
            raise TypeError(f"explain() got an unexpected keyword argument {name!r}")
        if name != "return_lse":
            check_hint(name, value)
    q, k, v = _autocast(q, k, v)
    problem = describe(
        Inputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        packed=cu_seqlens_q is not None or cu_seqlens_k is not None,
        causal=causal,
        window_size=window_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
    )
    if problem.device.type == "meta":
        problem = replace(problem, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return dispatch.explain(problem, backend)


def _run(
    problem: Problem, inputs: Inputs, return_lse: bool, backend: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    dispatch.check_name(backend)
    sinks = inputs.sinks
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(problem.dtype, torch.float32))
    # Kernels read these by index alone; a column of a table or an expanded number is copied, a few bytes.
    small = (None if t is None else t.contiguous() for t in (sinks, *inputs[4:]))
    inputs = Inputs(*inputs[:3], *small)
    out, lse = ops.attention(problem, inputs, backend)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, cast as PyTorch's SDPA does: every floating tensor but float64 to its dtype."""
    first = tensors[0]
    if not isinstance(first, Tensor):
        return tensors
    device = first.device.type
    # Not torch.amp.is_autocast_available: torch.compile of PyTorch 2.11 cannot trace it.
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )
