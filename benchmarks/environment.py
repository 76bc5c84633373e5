"""The machine and the software that a measurement belongs to."""

from __future__ import annotations

import importlib
import re
import subprocess

import torch

import regard

CLOCKS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def device_name(device: torch.device) -> str:
    """The GPU's name, or a CPU's threads and vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def file_name(device: torch.device) -> str:
    """ "h200" for an NVIDIA H200, "cpu-2core" for two CPU threads."""
    if device.type == "cpu":
        return f"cpu-{torch.get_num_threads()}core"
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia")).strip("-")


def versions(device: torch.device) -> dict[str, str]:
    """What the figures depend on, by name."""
    found = {"regard": regard.__version__, "torch": torch.__version__}
    try:
        found["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        found["triton"] = "not installed"
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["driver"] = nvidia_smi(device, ("driver_version",)).get("driver_version", "unknown")
    return found


def nvidia_smi(device: torch.device, fields: tuple[str, ...] = CLOCKS) -> dict[str, str]:
    """Fields as nvidia-smi reads them now, with units; nothing on a CPU or without nvidia-smi."""
    if device.type != "cuda":
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, done.stdout.strip().split(", "), strict=True))
