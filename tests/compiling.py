"""Compile portable kernels for an arch that is not there, and read what ptxas says of them.

Run as `python tests/compiling.py ARCH [PATTERN]` in its own process: a failing pair of kernel and arch can
end it. Prints one JSON line a kernel: {kernel, case, arch, registers, spill, shared, mma}.
"""

from __future__ import annotations

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

from regard.dispatch import Gradients, Incoming
from regard.kernels.common import launcher
from regard.kernels.portable import launch
from regard.problem import Inputs, Problem, build

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
    "d128-packed-causal": {"d": 128, "packed": True, "causal": True},
    "d192,128-causal-used": {"d": 192, "dv": 128, "causal": True, "used": True},
    "d33-unaligned-window": {"d": 33, "window": True},
    "d256-window-softcap": {"d": 256, "window": True, "softcap": 30.0},
    "d64-float32-causal": {"d": 64, "causal": True, "dtype": torch.float32},
    "d128-float32-causal": {"d": 128, "causal": True, "dtype": torch.float32},
    "d512-float32-window-softcap": {"d": 512, "window": True, "softcap": 30.0, "dtype": torch.float32},
}


def record(case: dict[str, Any], arch: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The (kernel, launch arguments) of one case's forward and backward, caught before the launch."""
    d, dv = case["d"], case.get("dv", case["d"])
    dtype = case.get("dtype", torch.bfloat16)
    batch = () if case.get("packed") else (2,)
    q, k, v, out = (torch.empty(*batch, 256, 4, x, dtype=dtype) for x in (d, d, dv, dv))
    index = torch.zeros(3, dtype=torch.int32)
    used = torch.zeros(2, dtype=torch.int32) if case.get("used") else None
    sinks = torch.empty(4) if case.get("sinks") else None
    cu = index if case.get("packed") else None
    inputs = Inputs(q, k, v, sinks, cu, cu, used, used)
    left, right = (7, 7) if case.get("window") else (None, None)
    problem = build(inputs, 0.1, case.get("softcap", 0.0), left, 0 if case.get("causal") else right, False)
    problem = Problem(**{f: getattr(problem, f) for f in Problem.__slots__} | {"arch": arch})
    lse = torch.empty(problem.lse_shape)
    calls: list[tuple[Any, dict[str, Any]]] = []
    launcher.run = lambda kernel, programs, arguments: calls.append((kernel, arguments))
    launch.forward(problem, inputs, out, lse)
    grads = Gradients(q.clone(), k.clone(), v.clone(), None)
    launch.backward(problem, inputs, Incoming(out, lse, out.clone(), lse), grads)
    yield from calls


def compile_for(kernel: Any, arguments: dict[str, Any], arch: int) -> Any:
    """Bind the arguments as a launch would, and compile for sm_<arch> with no driver."""
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"debug": False, "instrumentation_mode": triton.knobs.compilation.instrumentation_mode}
    bound, specialization, rest = binder(**arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, rest, bound, specialization, rest)
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=target, options=parsed.__dict__
    )


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
