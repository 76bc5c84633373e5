"""Compile portable kernels for an arch that is not there, and read what ptxas says of them.

Run as `python tests/compiling.py ARCH [PATTERN]` in its own process: a failing pair of kernel and arch can
end it. Prints one JSON line a kernel: {kernel, case, arch, registers, spill, shared, mma}.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from regard.dispatch import Gradients, Incoming, Results
from regard.kernels import portable
from regard.kernels.common import launcher
from regard.kernels.portable import launch
from regard.problem import Inputs, build

# Every table row (its largest head dim), chunked and padded head dims, and each feature in every way that
# changes the code: the loops of a window with softcap and sinks are the longest.
CASES = {
    "d64": {"d": 64},
    "d64-causal": {"d": 64, "causal": True},
    "d128": {"d": 128},
    "d128-causal": {"d": 128, "causal": True},
    "d256-causal": {"d": 256, "causal": True},
    "d512-causal": {"d": 512, "causal": True},
    "d80-packed-window-softcap-sinks": {
        "d": 80,
        "packed": True,
        "window": True,
        "softcap": 30.0,
        "sinks": True,
    },
    "d64-packed-window-sinks": {"d": 64, "packed": True, "window": True, "sinks": True},
    "d128-packed-window-sinks": {"d": 128, "packed": True, "window": True, "sinks": True},
    "d256-packed-window-sinks": {"d": 256, "packed": True, "window": True, "sinks": True},
    "d64-window-softcap": {"d": 64, "window": True, "softcap": 30.0},
    "d128-packed-window-softcap": {"d": 128, "packed": True, "window": True, "softcap": 30.0},
    "d128-packed-causal": {"d": 128, "packed": True, "causal": True},
    "d192,128-causal-used": {"d": 192, "dv": 128, "causal": True, "used": True},
    "d33-unaligned-window": {"d": 33, "window": True},
    "d127-unaligned-softcap": {"d": 127, "window": True, "softcap": 30.0},
    "d255-unaligned-causal": {"d": 255, "causal": True},
    "d511-unaligned-causal": {"d": 511, "causal": True},
    "d256-window-softcap": {"d": 256, "window": True, "softcap": 30.0},
    "d64-float32-causal": {"d": 64, "causal": True, "dtype": torch.float32},
    "d128-float32-causal": {"d": 128, "causal": True, "dtype": torch.float32},
    "d256-float32-causal": {"d": 256, "causal": True, "dtype": torch.float32},
    "d512-float32-window-softcap": {"d": 512, "window": True, "softcap": 30.0, "dtype": torch.float32},
}


def record(case: dict[str, Any], arch: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The (kernel, launch arguments) of one case's forward and backward, caught before the launch."""
    d, dv = case["d"], case.get("dv", case["d"])
    dtype = case.get("dtype", torch.bfloat16)
    rows, n, (heads_q, heads_k) = case.get("rows", 256), case.get("batch", 2), case.get("heads", (4, 4))
    batch = () if case.get("packed") else (n,)
    pad, shift = case.get("pad", 0), case.get("shift", 0)  # unaligned rows; unaligned index tensors

    def tensor(heads: int, head_dim: int) -> torch.Tensor:
        return torch.empty(*batch, rows, heads, head_dim + pad, dtype=dtype, device="meta")[..., :head_dim]

    def index(size: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size + shift, dtype=kind)[shift:]

    q, k, v, out = tensor(heads_q, d), tensor(heads_k, d), tensor(heads_k, dv), tensor(heads_q, dv)
    used = index(n) if case.get("used") else None
    cu = index(n + 1) if case.get("packed") else None
    sinks = index(heads_q, torch.float32) if case.get("sinks") else None
    inputs = Inputs(q, k, v, sinks, cu, cu, used, used)
    window = case.get("window")
    left, right = (7, 7) if window is True else window or (None, None)
    right = 0 if case.get("causal") and window is None else right
    problem = build(inputs, case.get("scale", 0.1), case.get("softcap", 0.0), left, right, False)
    problem = dataclasses.replace(problem, arch=arch)
    if portable.supports(problem):
        return
    lse = torch.empty(problem.lse_shape, device="meta")
    calls: list[tuple[Any, dict[str, Any]]] = []
    launcher.run = lambda kernel, programs, arguments: calls.append((kernel, arguments))
    rest = None if case.get("no_rest") else (out if out.dtype.itemsize == 2 else None)
    launch.forward(problem, inputs, Results(out, lse, rest))
    grads = Gradients(q, k, v, None)
    launch.backward(problem, inputs, Incoming(out, lse, rest, out, lse), grads)
    yield from calls


def specialize(kernel: Any, arguments: dict[str, Any], arch: int) -> tuple[Any, Any, Any, Any]:
    """(options, signature, constants, attributes): all that a compilation depends on."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode}
    bound, specialization, rest = binder(**arguments, **options)
    packed: tuple[Any, Any, Any, Any] = kernel._pack_args(backend, rest, bound, specialization, rest)
    return packed


def compile_for(kernel: Any, arguments: dict[str, Any], arch: int) -> Any:
    """Compile for sm_<arch> with no driver."""
    options, signature, constants, attributes = specialize(kernel, arguments, arch)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options.__dict__)


def resources(compiled: Any, arch: int) -> dict[str, Any]:
    """What ptxas reports for the compiled kernel's PTX."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", str(ptx), "-o"]
        report = subprocess.run(
            [*command, str(ptx.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        ).stderr
    numbers = {
        "registers": r"Used (\d+) registers",
        "spill": r"(\d+) bytes spill stores",
    }
    found = {name: int(match[1]) for name, p in numbers.items() if (match := re.search(p, report))}
    mma = re.findall(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync", compiled.asm["ptx"])
    return found | {"shared": compiled.metadata.shared, "mma": sorted(set(mma))}


def main(arch: int, pattern: str = "") -> None:
    for name, case in CASES.items():
        if not re.search(pattern, name):
            continue
        for kernel, arguments in record(case, arch):
            row = {"kernel": kernel.fn.__name__, "case": name, "arch": arch}
            print(json.dumps(row | resources(compile_for(kernel, arguments, arch), arch)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
