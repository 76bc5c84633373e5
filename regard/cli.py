"""`regard verify | explain | matrix`: is it right here, what serves a call, what is served where.

Exit status: 0 when all is well, 1 for a failure (or a call that nothing serves), 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import regard
from regard import dispatch, matrix
from regard.problem import Inputs, describe
from regard.testing import report, suite

if TYPE_CHECKING:
    from rich.console import Console

_SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
_WIDTH = 110  # columns where the output is no terminal


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status; raises SystemExit(2) for bad arguments."""
    parser = argparse.ArgumentParser(prog="regard", description=regard.__doc__)
    parser.add_argument("--version", action="version", version=f"regard {regard.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, add_arguments in (
        ("verify", _verify, _verify_arguments),
        ("explain", _explain, _explain_arguments),
        ("matrix", _matrix, _matrix_arguments),
    ):
        summary = (command.__doc__ or "").strip()
        sub = commands.add_parser(name, help=summary.partition(".")[0], description=summary)
        add_arguments(sub)
        sub.set_defaults(run=command, parser=sub)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patterns", nargs="*", metavar="NAME", help="only these scenarios; wildcards will do")
    parser.add_argument("--device", type=_device, help="cpu, cuda or cuda:N; default: cuda if there is one")
    parser.add_argument("--backend", choices=dispatch.BACKENDS, help="default: what the dispatch picks")
    parser.add_argument("--quick", action="store_true", help="leave out the large scenarios")
    parser.add_argument("--jobs", type=_jobs, default=1, metavar="N", help="processes at once; default: 1")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything to FILE, too")


def _verify(options: argparse.Namespace) -> int:
    """Run each scenario forward and backward and compare it with the reference in float64.

    An error is a multiple of eager PyTorch's in the same dtype; a result passes up to the limit.
    """
    console = _console()
    device: torch.device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        runs, skipped = suite.plan(device, options.backend, quick=options.quick, patterns=options.patterns)
        file = options.json.open("w") if options.json else None
    except (ValueError, OSError) as error:
        options.parser.error(str(error))
    asked = {"backend": options.backend, "quick": options.quick, "patterns": options.patterns}
    console.print(f"regard {regard.__version__}, PyTorch {torch.__version__}, on {report.name(device)}")
    outcome = report.run_all(runs, skipped, device, options.jobs)
    if file is not None:
        with file:
            report.write_json(file, outcome, asked)
    report.print_outcome(console, outcome)
    return 0 if outcome.passed else 1


def _explain_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--q", type=_numbers, default=(2, 4096, 16, 128), metavar="B,S,H,D", help="default: 2,4096,16,128")
    add("--k", type=_numbers, metavar="B,S,H,D", help="default: as q")
    add("--dv", type=int, metavar="D", help="v's head dim; default: as k's")
    add("--packed", type=int, metavar="N", help="N packed sequences; q and k are then ROWS,H,D")
    add("--dtype", choices=(*_SHORT, *_SHORT.values()), default="bf16")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one or --arch is given")
    add("--arch", type=int, metavar="CC", help="compute capability, 90 for 9.0; the GPU need not be here")
    add("--causal", action="store_true")
    add("--window", type=_window, default=(None, None), metavar="LEFT,RIGHT", help="numbers or none")
    add("--scale", type=float, help="softmax_scale")
    add("--softcap", type=float)
    add("--sinks", action="store_true")
    add("--seqused-q", action="store_true")
    add("--seqused-k", action="store_true")
    add("--deterministic", action="store_true")
    add("--backend", choices=dispatch.BACKENDS, help="ask for this one by name")


def _explain(options: argparse.Namespace) -> int:
    """Say which backend would serve a call, and why each other one does not."""
    o = options
    device = o.device or ("cuda" if o.arch is not None or torch.cuda.is_available() else "cpu")
    if device == "cuda" and o.arch is None and not torch.cuda.is_available():
        o.parser.error("argument --device: there is no CUDA device here; name one with --arch, 90 for 9.0")
    if device == "cpu" and o.arch is not None:
        o.parser.error("argument --arch: a CPU has no compute capability")
    k = o.k or o.q
    dtype = getattr(torch, _SHORT.get(o.dtype, o.dtype))
    batch = o.packed if o.packed is not None else o.q[0]
    if batch < 0:
        o.parser.error("argument --packed: expected a number of sequences >= 0")

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cu_seqlens = tensor(batch + 1) if o.packed is not None else None
    inputs = Inputs(
        tensor(*o.q, dtype=dtype),
        tensor(*k, dtype=dtype),
        tensor(*k[:-1], o.dv or k[-1], dtype=dtype),
        tensor(*o.q[-2:-1], dtype=torch.float32) if o.sinks else None,
        cu_seqlens,
        cu_seqlens,
        tensor(batch) if o.seqused_q else None,
        tensor(batch) if o.seqused_k else None,
    )
    try:
        problem = describe(
            inputs,
            packed=o.packed is not None,
            causal=o.causal,
            window_size=o.window,
            softmax_scale=o.scale,
            softcap=o.softcap,
            deterministic=o.deterministic,
        )
    except (TypeError, ValueError) as error:
        o.parser.error(str(error))
    problem = dataclasses.replace(problem, device=torch.device(device), arch=o.arch)
    explanation = dispatch.explain(problem, o.backend)
    print(explanation)
    return 0 if explanation.backend is not None else 1


def _matrix_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="for a document")


def _matrix(options: argparse.Namespace) -> int:
    """Print which backend serves what, as the backends themselves say."""
    if options.markdown:
        print(matrix.markdown())
        return 0
    console = _console()
    from rich.table import Table

    columns, rows, notes = matrix.matrix()
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, style="dim", markup=False, soft_wrap=True)
    return 0


def _console() -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise SystemExit("regard: this command needs rich; pip install 'regard[cli]'") from None
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{text} is not here: PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"expected a shape as 2,4096,16,128, got {text!r}")
    return numbers


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of processes >= 1, got {text!r}")
    return int(text)


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        left, right = (None if side.strip() == "none" else int(side) for side in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected LEFT,RIGHT as 1024,0 or none,0, got {text!r}") from None
    return left, right


if __name__ == "__main__":
    sys.exit(main())
