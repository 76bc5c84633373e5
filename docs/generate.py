"""Write the generated sections of the documents: `make docs`.

A section lies between `<!-- generated: NAME -->` and `<!-- end -->`. NAME is `support`, the matrix from the
backends' own `supports`, or `measured`, the tables of the files in benchmarks/results.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "support.md")
_SECTION = re.compile(r"(?<=<!-- generated: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def support() -> str:
    return _output("regard.cli", "matrix", "--markdown")


def measured() -> str:
    return _output("benchmarks", "tables") or "Nothing has been measured yet."


SECTIONS: dict[str, Callable[[], str]] = {"support": support, "measured": measured}


def render(text: str) -> str:
    """The document with each generated section written anew."""
    return _SECTION.sub(lambda m: f"{m[1]}{m[2]}{SECTIONS[m[1]]()}\n", text)


def _output(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(render(document.read_text()))
