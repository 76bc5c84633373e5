"""Triton kernels for any NVIDIA GPU from sm_80, and for CPU tensors in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import torch

from regard.dispatch import Gradients, Incoming, Results
from regard.kernels.portable import config
from regard.problem import Inputs, Problem

KEEPS_REST = True
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_PROGRAMS = 2**31 - 1


def supports(problem: Problem) -> str | None:
    """The reason why the portable kernels cannot serve the problem, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if problem.dtype not in _DTYPES:
        return f"serves float16, bfloat16 and float32, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.device.type == "cuda" or problem.arch is not None:
        if problem.capability < 80:
            return f"needs compute capability 8.0 or newer, not {problem.capability / 10}"
    elif problem.device.type != "cpu" or not _interpreting():
        return f"needs a CUDA device, not {problem.device.type}"
    elif problem.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly: float16 or float32 there"
    wide = problem.dtype == torch.float32 and max(problem.head_dim, problem.head_dim_v) > 256
    if wide and problem.capability not in (0, 90, *config.LARGE_ARCHES):
        return "float32 head dims over 256 need 132 KB of shared memory, more than this GPU has"
    rows = problem.seqlen_q + problem.batch if problem.packed else problem.seqlen_q * problem.batch
    if rows * problem.heads_q > _MAX_PROGRAMS:
        return f"{rows} rows of {problem.heads_q} heads are more than one launch of {_MAX_PROGRAMS} programs"
    return None


def forward(problem: Problem, inputs: Inputs, results: Results) -> None:
    from regard.kernels.portable import launch

    launch.forward(problem, inputs, results)


def backward(problem: Problem, inputs: Inputs, incoming: Incoming, grads: Gradients) -> None:
    from regard.kernels.portable import launch

    launch.backward(problem, inputs, incoming, grads)


def _interpreting() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)
