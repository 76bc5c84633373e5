"""The one door to a launch: what tests watch to see every kernel and its arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def run(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Launch `programs` programs of a Triton kernel in x, unless there is nothing to do.

    arguments: one a parameter of the kernel, by name, and Triton's options. Parameters go by position: by
    name, Triton copies all 50 three times on the way, 5 of a launch's 20 µs.
    """
    if programs > 0:
        options = dict(arguments)
        positional = [options.pop(name) for name in kernel.arg_names]
        kernel[(programs,)](*positional, **options)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensors', where it is not."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
