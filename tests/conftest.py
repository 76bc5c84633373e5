"""What all tests share: the device, the seed, and a word on where they run."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def device() -> torch.device:
    """The GPU where there is one, the CPU elsewhere: the same tests run on either."""
    return DEVICE


@pytest.fixture
def gpu() -> torch.device:
    """For a test that says something about a GPU alone."""
    if DEVICE.type != "cuda":
        pytest.skip("needs a GPU")
    return DEVICE


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_report_header() -> str:
    where = (
        torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "the CPU; tests that need a GPU skip"
    )
    if importlib.util.find_spec("triton") is None:
        kernels = "no Triton here"
    else:
        kernels = "Triton's interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "Triton's compiler"
    return f"regard: on {where}; PyTorch {torch.__version__}; {kernels}"
