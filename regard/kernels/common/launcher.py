"""The one door to a launch: what tests watch to see every kernel and its arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def run(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Launch `programs` programs of a Triton kernel in x, unless there is nothing to do."""
    if programs > 0:
        kernel[(programs,)](**arguments)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors' (a no-op for CPU tensors)."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
