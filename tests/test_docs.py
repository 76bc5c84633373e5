"""README's code runs and prints what it shows, generated sections are current, links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# A block of Python, and the block of output that follows some.
BLOCKS = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.DOTALL)


def _generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_code_runs_and_prints_what_it_shows() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = BLOCKS.findall(README.read_text())
    assert len(blocks) >= 6
    assert any(shown for _, shown in blocks)
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), names)
        if shown:
            assert printed.getvalue() == shown


@pytest.mark.parametrize("name", ["README.md", "docs/support.md"])
def test_generated_sections_are_current(name: str) -> None:
    text = (ROOT / name).read_text()
    assert _generate().render(text) == text, "run `make docs`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text()):
        if not target.startswith(("https:", "http:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_changelog_knows_this_version() -> None:
    assert f"## {regard.__version__}" in (ROOT / "CHANGELOG.md").read_text()
