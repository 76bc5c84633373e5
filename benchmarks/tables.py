"""Result files as tables: Markdown for documents, rich for a terminal that has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.suites import DIRECTIONS

Document = dict[str, Any]


def markdown(document: Document) -> str:
    """A heading, a table with a line a case, and the software that was measured."""
    header, lines = rows(document)
    table = [header, ["---"] * len(header), *lines]
    return "\n".join(
        [
            f"### {title(document)}",
            "",
            *("| " + " | ".join(cells) + " |" for cells in table),
            "",
            footer(document),
        ]
    )


def show(document: Document) -> None:
    """Print the table: with rich on a terminal where it is installed, else as Markdown."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(markdown(document))
        return
    console = Console()
    if not console.is_terminal:
        print(markdown(document))
        return
    header, lines = rows(document)
    table = Table(title=title(document), caption=footer(document))
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for cells in lines:
        table.add_row(*cells)
    console.print(table)


def title(document: Document) -> str:
    unit = "ms" if document["gpu"].startswith("CPU") else "TFLOP/s"
    return f"{document['suite']} on {document['gpu']}: {unit}, {' / '.join(DIRECTIONS)}"


def footer(document: Document) -> str:
    software = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [f"{document['date'][:10]}; {software}."]
    if document["missing"]:
        lines.append(f"Not installed: {', '.join(document['missing'])}.")
    return " ".join(lines)


def rows(document: Document) -> tuple[list[str], list[list[str]]]:
    """The header, and for each case its cells: contestants, then how far ahead of the best peer regard is."""
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    peers: dict[str, None] = {}
    for row in document["rows"]:
        measured.setdefault(row["case"], {})[row["direction"]] = row
        peers |= dict.fromkeys(row["peers_ms"])
    cpu = document["gpu"].startswith("CPU")

    def speed(row: dict[str, Any], ms: float | None) -> str:
        if ms is None:
            return "-"
        return f"{ms:.3g}" if cpu else f"{row['flops'] / ms / 1e9:.0f}"

    def our_speed(row: dict[str, Any]) -> str:
        return "failed" if row["ours_ms"] is None else speed(row, row["ours_ms"])

    def peer_speed(peer: str, row: dict[str, Any]) -> str:
        return speed(row, row["peers_ms"].get(peer))

    def cell(by_direction: dict[str, dict[str, Any]], value: Callable[[dict[str, Any]], str]) -> str:
        found = [value(by_direction[d]) if d in by_direction else "-" for d in DIRECTIONS]
        return " / ".join(found) if set(found) != {"-"} else ""

    lines = []
    for case, by_direction in measured.items():
        cells = [case, cell(by_direction, our_speed)]
        for peer in peers:
            cells.append(cell(by_direction, partial(peer_speed, peer)))
        cells.append(cell(by_direction, lambda row: "-" if row["ratio"] is None else f"{row['ratio']:.2f}"))
        lines.append(cells)
    return ["case", "regard", *peers, "ahead of the best peer"], lines


def load(folder: Path) -> list[Document]:
    """Every result file of a folder, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
