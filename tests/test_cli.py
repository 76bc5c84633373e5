"""The command line: what it prints, writes and returns, for good runs, failing ones and bad arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import regard
from regard import dispatch, matrix
from regard.cli import main
from regard.kernels import cpu
from regard.testing import checks, suite

pytest.importorskip("rich")

SMALL = ["tail-one-row", "causal-1-queries-on-8", "--device", "cpu", "--backend", "cpu"]


def test_verify_prints_a_table_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["verify", *SMALL, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "tail-one-row" in printed
    assert "8 of 8 runs passed" in printed
    assert "FAIL" not in printed
    report = json.loads(file.read_text())
    assert report["passed"] is True
    assert report["backend"] == "cpu"
    assert report["device"].startswith("cpu")
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["regard"] == regard.__version__
    assert len(report["runs"]) == 8
    for run in report["runs"]:
        assert run["passed"]
        assert run["multiples"].keys() == run["limits"].keys() == {"out", "lse", "dq", "dk", "dv"}
        assert run["worst"] in run["multiples"]


def test_quick_leaves_out_the_large_ones_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "train-d64-s1024-full", "tail-one-row", "--device", "cpu", "--quick"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "skipped, left out of quick runs: train-d64-s1024-full (bfloat16, float16)" in printed


def test_a_wrong_result_fails_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cpu.backward

    def wrong(problem: Any, inputs: Any, incoming: Any, grads: Any) -> None:
        right(problem, inputs, incoming, grads)
        if problem.seqlen_k == 8:
            grads.dk.mul_(1.5)

    monkeypatch.setattr(cpu, "backward", wrong)
    file = tmp_path / "report.json"
    assert main(["verify", *SMALL, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "FAILED causal-1-queries-on-8[gaussian] on cpu (cpu, bfloat16) FAILS" in printed
    assert "4 of 8 runs passed" in printed
    runs = json.loads(file.read_text())["runs"]
    assert {r["scenario"]: (r["worst"], r["passed"]) for r in runs if not r["passed"]} == {
        "causal-1-queries-on-8": ("dk", False)
    }


def test_an_infinity_fails_and_is_still_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(problem: Any, inputs: Any, results: Any) -> None:
        results.out.fill_(float("inf"))
        results.lse.zero_()

    monkeypatch.setattr(cpu, "forward", wrong)
    file = tmp_path / "report.json"
    assert main(["verify", *SMALL, "--json", str(file)]) == 1
    report = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["passed"] is False
    assert report["runs"][0]["multiples"]["out"] == "inf"
    assert any("out is NaN or infinite" in fault for fault in report["runs"][0]["faults"])


def test_an_exception_is_a_failure_and_the_rest_still_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cpu.forward

    def breaks(problem: Any, *arguments: Any) -> None:
        if problem.seqlen_k == 8:
            raise RuntimeError("a [red] herring")
        right(problem, *arguments)

    monkeypatch.setattr(cpu, "forward", breaks)
    assert main(["verify", *SMALL]) == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: a [red] herring" in printed
    assert "4 of 8 runs passed" in printed


def test_after_a_dead_cuda_context_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def execute(run: Any, device: Any) -> Any:
        done.append(run)
        if len(done) == 3:
            raise suite.ContextLost("an illegal memory access")
        return checks.check(run.scenario, device, run.dtype, run.backend, run.kind)

    monkeypatch.setattr(suite, "execute", execute)
    file = tmp_path / "report.json"
    assert main(["verify", *SMALL, "--json", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "the CUDA context is dead after an illegal memory access" in printed
    assert "2 of 3 runs passed" in printed
    assert "5 were not run" in printed
    assert [r["run"] for r in json.loads(file.read_text())["runs"]] == [True] * 3 + [False] * 5


def test_a_dead_cuda_context_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run = suite.plan(torch.device("cpu"), patterns=["tail-one-row"])[0][0]
    monkeypatch.setattr(checks, "check", illegal)
    assert "illegal memory access" in suite.execute(run, torch.device("cpu")).faults[0]
    monkeypatch.setattr(torch, "ones", illegal)
    with pytest.raises(suite.ContextLost, match="illegal memory access"):
        suite.execute(run, torch.device("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU skips")
def test_what_a_machine_cannot_run_is_listed_and_nothing_run_is_no_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "huge-*", "tail-one-row"]) == 0
    printed = capsys.readouterr().out
    assert "skipped, meant for a GPU: huge-batch-8300 (bfloat16)" in printed
    assert main(["verify", "huge-batch-8300"]) == 1
    assert "Nothing was run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["verify", "--device", "tpu"], "--device: expected cpu, cuda or cuda:N, got 'tpu'"),
        (["verify", "--device", "meta"], "--device: expected cpu, cuda or cuda:N, got 'meta'"),
        (["verify", "--device", "cuda:99"], "--device: cuda:99 is not here"),
        (["verify", "--backend", "cudnn"], "--backend: invalid choice: 'cudnn'"),
        (["verify", "no-such-*"], "no scenario is named 'no-such-*'"),
        (["verify", "tail-one-row", "--json", "/no/such/folder/x"], "No such file or directory"),
        (["explain", "--q", "2,x"], "--q: expected a shape as 2,4096,16,128, got '2,x'"),
        (["explain", "--q", "2,-3,4,5"], "--q: expected a shape"),
        (["explain", "--q", "2,3"], "q: expected 4 dimensions"),
        (["explain", "--q", "5", "--sinks"], "q: expected 4 dimensions"),
        (["explain", "--packed", "3", "--q", "1,2,3,4"], "q: expected 3 dimensions"),
        (["explain", "--packed", "-1", "--q", "9,3,4"], "--packed: expected a number of sequences >= 0"),
        (["explain", "--k", "2,4096,3,128"], "k: expected a number of key heads that divides q's heads"),
        (["explain", "--dv", "513"], "v: expected a head dim of 1 to 512"),
        (["explain", "--dtype", "int8"], "--dtype: invalid choice"),
        (["explain", "--window", "3"], "--window: expected LEFT,RIGHT as 1024,0 or none,0, got '3'"),
        (["explain", "--window=-3,0"], "window_size: expected numbers of keys >= 0"),
        (["explain", "--scale", "-1"], "softmax_scale: expected a finite number > 0"),
        (["explain", "--softcap", "nan"], "softcap: expected a finite number > 0"),
        (["explain", "--device", "cpu", "--arch", "90"], "--arch: a CPU has no compute capability"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "matrix"])
def test_without_rich_it_says_what_to_install(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit, match=r"needs rich; pip install 'regard\[cli\]'"):
        main([command])


def test_explain_and_markdown_need_no_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["explain", "--device", "cpu"]) == 0
    assert main(["matrix", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("served by cpu\n")


def test_explain_says_who_serves_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    dense = ["explain", "--q", "2,4096,16,128", "--k", "2,4096,4,128", "--causal", "--window", "1024,0"]
    assert main([*dense, "--arch", "80"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("served by portable\n")
    assert "  cpu: serves tensors on the CPU, not on cuda\n" in printed
    assert main([*dense, "--arch", "75"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("no backend serves this call\n")
    assert "portable: needs compute capability 8.0 or newer, not 7.5" in printed
    packed = ["--packed", "8", "--q", "1000,16,80", "--k", "900,4,80", "--dv", "64", "--dtype", "fp64"]
    more = ["--sinks", "--seqused-q", "--seqused-k", "--softcap", "30", "--scale", "0.1", "--deterministic"]
    assert main(["explain", "--device", "cpu", *packed, *more, "--window", "none,7"]) == 0
    assert "portable: serves float16, bfloat16 and float32, not float64" in capsys.readouterr().out
    assert main(["explain", "--device", "cpu", *packed, "--backend", "portable"]) == 1
    assert "cpu: could serve, but backend='portable' was asked for" in capsys.readouterr().out


def test_the_matrix_is_what_supports_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix"]) == 0
    printed = capsys.readouterr().out
    columns, rows, notes = matrix.matrix()
    assert columns == ["", *dispatch.BACKENDS]
    for row in rows:
        assert row[0] in printed
    for note in notes:
        assert note in printed
    table = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
    assert table["float64"] == table["float64"] | {"cpu": "yes", "portable": "no"}
    assert table["head dims"]["cpu"] == "1 to 512"


def test_the_matrix_of_a_narrow_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def supports(p: Any) -> str | None:
        if p.capability not in (90, 100):
            return "needs sm_90 or sm_100"
        if p.head_dim not in (1, 2, 3, 64, 128) or p.softcap or p.head_dim != p.head_dim_v:
            return "no"
        return "sm_90 only" if p.packed and p.capability != 90 else None

    monkeypatch.setattr(dispatch, "BACKENDS", ("narrow",))
    monkeypatch.setattr(dispatch, "load", lambda name: SimpleNamespace(supports=supports))
    _, rows, notes = matrix.matrix()
    table = dict(rows)
    assert table["runs on"] == "sm_90, sm_100"
    assert table["causal"] == "yes"
    assert table["packed (cu_seqlens)"] == "sm_90"
    assert table["softcap"] == "no"
    assert table["head dims"] == "1 to 3, 64, 128"
    assert notes == ["narrow: sm_90 only", "narrow: no"]
    lines = matrix.markdown().splitlines()
    assert lines[:3] == ["|  | narrow |", "| --- | --- |", "| runs on | sm_90, sm_100 |"]


def test_python_dash_m_runs_it() -> None:
    command = [sys.executable, "-m", "regard", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"regard {regard.__version__}\n"


def test_two_processes_give_the_same_table(capsys):
    assert main(["verify", "tail-s*", "--device", "cpu"]) == 0
    alone = capsys.readouterr().out
    assert main(["verify", "tail-s*", "--device", "cpu", "--jobs", "2"]) == 0
    together = capsys.readouterr().out
    assert alone.splitlines()[:-1] == together.splitlines()[:-1]  # the last line holds seconds
    with pytest.raises(SystemExit):
        main(["verify", "--jobs", "0"])
    assert "expected a number of processes >= 1, got '0'" in capsys.readouterr().err


def test_a_run_without_room_beside_others_is_run_again_alone(monkeypatch):
    runs, _ = suite.plan(torch.device("cpu"), "cpu", patterns=["tail-s9"])
    monkeypatch.setattr(suite, "ProcessPoolExecutor", lambda jobs, context: ThreadPoolExecutor(jobs))
    seen = []

    def first_crowded(run, device):
        crowded = run is runs[0] and run not in seen
        seen.append(run)
        faults = ["OutOfMemoryError: no room"] if crowded else []
        return suite.Result(run.scenario.name, run.backend, str(device), run.dtype_name, {}, {}, faults)

    monkeypatch.setattr(suite, "_execute_while_alive", first_crowded)
    results = list(suite.execute_all(runs, torch.device("cpu"), jobs=2))
    assert [run for run, _ in results] == [*runs[1:], runs[0]]
    assert all(result is not None and result.passed for _, result in results)
