"""The demo: its model learns, agrees with the reference, and keeps documents apart."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_lm.py"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def train_lm() -> Any:
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("train_lm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = module  # Batch and Result look for their module
    spec.loader.exec_module(module)
    return module


def test_it_learns_and_agrees_with_the_reference(train_lm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = train_lm.main(["--steps", "12", "--device", DEVICE])
    assert len(result.regard) == 12
    assert result.regard[0] - result.regard[-1] > 1.5
    assert result.regard == pytest.approx(result.reference, abs=1e-4)
    assert result.unseen[0] == pytest.approx(result.unseen[1], abs=1e-4)
    printed = capsys.readouterr().out
    assert "difference" in printed
    assert f"{result.regard[-1]:.5f}" in printed


def test_documents_do_not_see_each_other(train_lm: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    model = train_lm.Model(train_lm.on_regard).to(DEVICE)
    batch = train_lm.pack(train_lm.documents()[0], 1000, generator, DEVICE)
    starts = batch.cu_seqlens.tolist()
    assert len(starts) > 2
    with torch.no_grad():
        packed = model(batch.tokens, batch.cu_seqlens)
        for begin, end in itertools.pairwise(starts):
            alone = torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE)
            torch.testing.assert_close(packed[begin:end], model(batch.tokens[begin:end], alone))
