"""Every portable kernel compiled without a GPU for every arch it claims, and how many there are.

Each arch is compiled in a process of its own, without TRITON_INTERPRET: interpreted, nothing compiles.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

import compiling  # noqa: E402

from regard.kernels.portable import config  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted Triton compiles nothing"
)

# Shared memory of a block in bytes, from the CUDA programming guide's table of compute capabilities.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024, 120: 99 * 1024}
TENSOR_CORES = {
    80: "mma.sync",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    103: "tcgen05.mma",
    120: "mma.sync",
}
PRODUCTS = {"forward_kernel", "dkdv_kernel", "dq_kernel"}


@functools.cache
def _report(arch: int) -> list[dict[str, Any]]:
    worker = Path(compiling.__file__)
    done = subprocess.run(
        [sys.executable, str(worker), str(arch)], capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("arch", sorted(SHARED))
def test_no_kernel_spills_and_each_fits(arch):
    report = _report(arch)
    refused = {"d512-float32-window-softcap"} if arch == 120 else set()
    assert {row["case"] for row in report} == set(compiling.CASES) - refused
    assert {row["kernel"] for row in report} >= PRODUCTS
    bad = [row for row in report if row["spill"] != 0 or row["shared"] > SHARED[arch]]
    assert not bad, "\n".join(map(str, bad))


@pytest.mark.parametrize("arch", sorted(SHARED))
def test_products_run_on_the_tensor_cores(arch):
    """At the head dims people train with; larger ones may need tiles too small for an arch's newest unit."""
    rows = [r for r in _report(arch) if r["case"] in ("d64", "d128") and r["kernel"] in PRODUCTS]
    assert len(rows) == 6
    for row in rows:
        assert TENSOR_CORES[arch] in row["mma"], row


def test_every_table_row_is_compiled():
    """A row added to a table without a case here would be one that no compiler has seen."""
    problems = [(name, max(c["d"], c.get("dv", 0))) for name, c in compiling.CASES.items()]
    for table, kind in (
        *((t, "aligned") for t in (config.HOPPER, config.LARGE, config.SMALL)),
        (config.FLOAT32, "float32"),
        (config.UNALIGNED, "unaligned"),
    ):
        dims = {
            d for name, d in problems if (kind in name) or (kind == "aligned" and "-float32-" not in name)
        }
        served = {next(row.head_dim for row in table if d <= row.head_dim) for d in dims}
        assert served == {row.head_dim for row in table}, kind


def _keys(**changes: Any) -> set[tuple[str, str]]:
    """What would be compiled for one call: a kernel's name and all that its compilation depends on."""
    keys = set()
    for kernel, arguments in compiling.record(_BASE | changes, 90):
        keys.add((kernel.fn.__name__, repr(compiling.specialize(kernel, arguments, 90)[1:])))
    return keys


_BASE = {
    "d": 64,
    "packed": True,
    "causal": True,
    "window": True,
    "softcap": 30.0,
    "sinks": True,
    "used": True,
}
_CHANGES: dict[str, list[dict[str, Any]]] = {
    "lengths": [{"rows": n} for n in (0, 1, 2, 15, 16, 17, 128, 4096, 70001)],
    "batch": [{"batch": n} for n in (1, 2, 3, 16, 300)],
    "heads": [{"heads": h} for h in ((1, 1), (3, 3), (16, 1), (28, 4), (40, 8), (64, 64))],
    "scale": [{"scale": s} for s in (1.0, 0.125, 16.0, 1e-3)],
    "softcap": [{"softcap": s} for s in (1.0, 16.0, 50.0)],
    "window": [{"window": w} for w in ((1, 1), (0, 16), (7, 3), (1024, 0))],
    "cu_seqlens' address": [{"shift": s} for s in (0, 1, 2, 3)],
}


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_at_run_time_compiles_nothing_new(what, packed):
    expected = _keys(packed=packed)
    names = {name for name, _ in expected}
    assert len(expected) == len(names)
    for change in _CHANGES[what]:
        assert _keys(packed=packed, **change) == expected, change


def test_rows_that_are_not_16_byte_aligned_are_one_more_compilation_and_no_more():
    aligned, odd, odder = _keys(d=64), _keys(d=64, pad=1), _keys(d=64, pad=3)
    assert odd == odder
    assert not {key for key in odd if key[0] in PRODUCTS} & aligned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="counts real compilations on a GPU")
def test_forty_growing_lengths_compile_once():
    import regard
    from regard.kernels.portable.forward_kernel import forward_kernel

    def compiled() -> int:
        return sum(len(cache[0]) for cache in forward_kernel.device_caches.values())

    counts = []
    for sk in range(128, 168):
        q, k, v = (torch.randn(2, s, 4, 64, device="cuda", dtype=torch.float16) for s in (1, sk, sk))
        regard.attention(q, k, v, causal=True, backend="portable")
        counts.append(compiled())
    assert counts[0] == counts[-1]


def test_configurations_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.HOPPER[0].forward.block_m = 1  # type: ignore[misc]
