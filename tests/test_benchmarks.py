"""The benchmark's machinery on a CPU: names, counts, checks, timing, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import check, tables
from benchmarks.calls import Call, Data, random_data
from benchmarks.peers import PEERS, CpuSdpa, FlashAttention, Flex, Sdpa, flex_block_mask
from benchmarks.report import Report, Row, as_json
from benchmarks.runner import run_case
from benchmarks.suites import DIRECTIONS, SUITES, Case, document_lengths, flops, visible_pairs
from benchmarks.timing import Budget, race
from regard import reference
from regard.reference import visible

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SMOKE = SUITES["smoke"].cases
CASES = [
    pytest.param(suite, case, id=f"{suite}-{case.name}") for suite, s in SUITES.items() for case in s.cases
]

ONCE = Budget(warmups=1, ms=0.0, rounds=1)


class InstantStopwatch:
    """Runs the work and takes its return value, or 1, for its milliseconds."""

    def __init__(self, budget: Budget = ONCE) -> None:
        self.budget = budget

    def measure(self, work: Callable[[], object]) -> Callable[[], float]:
        result = work()
        return lambda: result if isinstance(result, float) else 1.0

    def settle(self) -> None:
        pass


class Contestant:
    """The specification in the case's own dtype, spoilt by `spoil` where that is given."""

    def __init__(self, name: str, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        self.name, self.spoil = name, spoil

    def missing(self) -> str | None:
        return None

    def refuses(self, case: Case) -> str | None:
        return None

    def prepare(self, case: Case, data: Data) -> Call:
        options = {"causal": case.causal, "window_size": (case.window, None)}

        def attend(q, k, v):
            if case.packed:
                out, _ = reference.attention_varlen(q, k, v, data.cu_seqlens_q, data.cu_seqlens_k, **options)
            else:
                out, _ = reference.attention(q, k, v, **options)
            return self.spoil(out)

        return Call.on(data, attend)


def measured(contestants, case, directions=DIRECTIONS):
    rows = run_case("smoke", case, directions, contestants, InstantStopwatch(), CPU)
    return {row.direction: row for row in rows}


@pytest.mark.parametrize(
    ("suite", "name"),
    [
        ("dense", "d128 s4096 causal"),
        ("dense", "d64 s1024 full"),
        ("dense", "d256 s16384 causal"),
        ("dims", "d80 h16:4 s4096 causal"),
        ("dims", "d192,128 h16:16 s4096 causal"),
        ("masks", "d128 s32768 causal window 1024"),
        ("masks", "d128 s32768 causal documents"),
        ("masks", "d128 h56:56 s35280:140640 full video"),
        ("masks", "d128 s2048:16384 causal"),
        ("cpu", "d64 h4:4 s8192 causal window 256 float32"),
    ],
)
def test_a_case_is_named_by_what_is_unusual_about_it(suite, name):
    assert name in [case.name for case in SUITES[suite].cases]


def test_names_within_a_suite_differ():
    for suite in SUITES.values():
        assert len({case.name for case in suite.cases}) == len(suite.cases)


@pytest.mark.parametrize(("suite", "case"), CASES)
def test_a_case_is_a_valid_call(suite, case):
    assert case.window is None or case.causal
    assert case.heads_q % case.heads_k == 0
    assert (sum(q for q, _ in case.sequences), sum(k for _, k in case.sequences)) == (
        case.seqlen_q * (1 if case.packed else case.batch),
        case.seqlen_k * (1 if case.packed else case.batch),
    )
    if suite == "dense":
        assert case.batch * case.seqlen_q == 16384
        assert case.heads_q * case.head_dim == 2048


def test_the_dense_suite_has_every_shape_once():
    shapes = {(case.head_dim, case.seqlen_q, case.causal) for case in SUITES["dense"].cases}
    assert len(shapes) == len(SUITES["dense"].cases) == 18


def test_document_lengths_fit_their_bounds_and_repeat():
    lengths = document_lengths(32768, 512, 4095, seed=0)
    assert sum(lengths) == 32768
    assert min(lengths) >= 512
    assert max(lengths) <= 4095
    assert lengths == document_lengths(32768, 512, 4095, seed=0)
    assert lengths != document_lengths(32768, 512, 4095, seed=1)


@pytest.mark.parametrize(
    ("sq", "sk", "causal", "window"),
    [
        (7, 7, False, None),
        (7, 7, True, None),
        (5, 9, True, None),
        (9, 5, True, None),
        (9, 9, True, 3),
        (6, 11, True, 2),
    ],
)
def test_visible_pairs_are_what_the_specification_sees(sq, sk, causal, window):
    case = Case(8, 8, 1, 1, 3, sq, sk, causal, window)
    mask = visible(torch.arange(sq), torch.arange(sk), sk - sq, window, 0 if causal else None)
    assert visible_pairs(case) == 3 * int(mask.sum())


def test_packed_pairs_are_counted_a_sequence():
    packed = Case(8, 8, 1, 1, 2, 7, 9, True, None, (3, 4), (4, 5))
    apart = [Case(8, 8, 1, 1, 1, *lengths, True) for lengths in ((3, 4), (4, 5))]
    assert visible_pairs(packed) == sum(map(visible_pairs, apart))


def test_flops():
    case = Case(192, 128, 16, 4, 2, 100, 300, False)
    assert flops(case, "forward") == 2 * 2 * 16 * 100 * 300 * (192 + 128)
    assert flops(case, "backward") == 2.5 * flops(case, "forward")
    assert flops(case, "both") == flops(case, "forward") + flops(case, "backward")


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_the_check_accepts_the_specification_and_the_peer(case):
    data = random_data(case, CPU)
    slices = check.expect(case, data, gradients=True)
    assert len(slices) == 2
    for contestant in (Contestant("right"), CpuSdpa()):
        if contestant.refuses(case) is None:
            call = contestant.prepare(case, data)
            assert check.fault(call, slices, gradients=False) is None
            assert check.fault(call, slices, gradients=True) is None


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_blocks_of_rows_give_the_whole_slice(case, monkeypatch):
    data = random_data(case, CPU)
    whole = check.expect(case, data, gradients=True)
    monkeypatch.setattr(check, "BLOCK", 25 * case.seqlen_k * (case.heads_q // case.heads_k))
    for a, b in zip(whole, check.expect(case, data, gradients=True), strict=True):
        for name, expected in a.expected.items():
            torch.testing.assert_close(b.expected[name], expected)


def test_the_check_sees_one_wrong_row_a_wrong_gradient_and_nan():
    case = Case(16, 16, 2, 2, 1, 64, 64, True, dtype=torch.float32)
    data = random_data(case, CPU)
    slices = check.expect(case, data, gradients=True)

    def found(spoil, gradients=False):
        return check.fault(Contestant("spoilt", spoil).prepare(case, data), slices, gradients=gradients)

    one_row = torch.ones(64, 1, 1)
    one_row[40] = 1.01
    assert "wrong out" in found(lambda out: out * one_row)
    assert "not finite" in found(lambda out: out / 0)
    # Right forward, gradients of twice the loss.
    assert found(lambda out: 2 * out - out.detach()) is None
    assert "wrong dq" in found(lambda out: 2 * out - out.detach(), gradients=True)


def test_every_direction_is_measured_and_the_ratio_is_the_best_peers():
    rows = measured([Contestant("regard"), Contestant("one"), Contestant("two")], SMOKE[1])
    assert list(rows) == list(DIRECTIONS)
    for row in rows.values():
        assert row.ours_ms == 1.0
        assert row.peers_ms == {"one": 1.0, "two": 1.0}
        assert row.notes == {}
    row = Row("s", "c", "forward", 2.0, {"slow": 5.0, "fast": 3.0}, 1e9)
    assert (row.best, row.ratio) == ("fast", 1.5)
    assert Row("s", "c", "forward", 2.0, {}, 1e9).ratio is None


def test_a_peer_that_is_wrong_or_fails_is_left_out_and_named():
    def fails(out):
        raise RuntimeError("no such kernel\nand a long story")

    rows = measured(
        [Contestant("regard"), Contestant("wrong", lambda out: out * 1.1), Contestant("fails", fails)],
        SMOKE[0],
    )
    for row in rows.values():
        assert row.peers_ms == {}
        assert row.ours_ms is not None
        assert row.notes["wrong"].startswith("wrong out")
        assert row.notes["fails"] == "RuntimeError: no such kernel"


def test_a_peer_without_a_backward_still_races_forward():
    rows = measured([Contestant("regard"), Contestant("detached", torch.Tensor.detach)], SMOKE[0])
    assert "detached" in rows["forward"].peers_ms
    assert "detached" in rows["backward"].notes
    assert "detached" in rows["both"].notes


def test_no_time_is_reported_where_regard_is_wrong():
    rows = measured([Contestant("regard", lambda out: 2 * out - out.detach()), Contestant("peer")], SMOKE[0])
    assert rows["forward"].ours_ms == 1.0
    for direction in ("backward", "both"):
        assert rows[direction].ours_ms is None
        assert rows[direction].ratio is None
        assert rows[direction].peers_ms == {}
        assert rows[direction].notes["regard"].startswith("wrong dq")


def test_a_race_takes_medians_alternates_and_drops_who_fails():
    order = []
    times = iter([50.0, 50.0, 1.0, 9.0, 2.0])

    def steady():
        order.append("steady")
        return 10.0

    def moving():
        order.append("moving")
        return next(times)

    def fails():
        raise ValueError("out of memory")

    stopwatch = InstantStopwatch(Budget(warmups=2, ms=100.0, rounds=2))
    medians, errors = race({"steady": steady, "moving": moving, "fails": fails}, stopwatch)
    assert medians == {"steady": 10.0, "moving": 2.0}
    assert list(errors) == ["fails"]
    rounds = order[4:]
    assert len(rounds) == 6
    assert all({*rounds[i : i + 2]} == {"steady", "moving"} for i in (0, 2, 4))


def test_the_file_holds_each_row_as_it_is_measured(tmp_path):
    path = tmp_path / "results" / "machine-dense.json"
    report = Report(CPU, path, suite="dense", backend=None, missing={"FA9": "not there"}, peers={})
    for count, direction in enumerate(DIRECTIONS, 1):
        report.append(Row("dense", "d128 s4096 causal", direction, 2.0, {"cuDNN": 3.0, "FA2": 5.00001}, 1e12))
        document = json.loads(path.read_text())
        assert len(document["rows"]) == count
    assert document["rows"][0] == {
        "suite": "dense",
        "case": "d128 s4096 causal",
        "direction": "forward",
        "ours_ms": 2.0,
        "peers_ms": {"cuDNN": 3.0, "FA2": 5.0},
        "ratio": 1.5,
        "flops": 1e12,
        "notes": {},
    }
    assert {"gpu", "date", "versions", "clocks", "suite", "backend", "missing", "peers"} < set(document)
    assert {"regard", "torch", "triton"} <= set(document["versions"])
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_tables():
    rows = [
        Row("dense", "d64 s1024 full", "forward", 2.0, {"cuDNN": 3.0}, 1e12),
        Row("dense", "d64 s1024 full", "backward", 4.0, {"cuDNN": 2.0, "FA2": 5.0}, 2e12),
        Row("dense", "d64 s1024 causal", "forward", None, {}, 1e12, {"regard": "wrong out"}),
    ]
    document = {
        "gpu": "NVIDIA H200",
        "suite": "dense",
        "date": "2026-01-31T00:00:00+00:00",
        "versions": {"torch": "2.11.0"},
        "missing": {"FA3": "no module"},
        "rows": [as_json(row) for row in rows],
    }
    text = tables.markdown(document)
    assert "### dense on NVIDIA H200: TFLOP/s, forward / backward / both" in text
    assert "| case | regard | cuDNN | FA2 | ahead of the best peer |" in text
    assert "| d64 s1024 full | 500 / 500 / - | 333 / 1000 / - | - / 400 / - | 1.50 / 0.50 / - |" in text
    assert "| d64 s1024 causal | failed / - / - |  |  |  |" in text
    assert "2026-01-31; torch 2.11.0. Not installed: FA3." in text
    document["gpu"] = "CPU, 2 threads"
    assert "| d64 s1024 full | 2 / 4 / - | 3 / 2 / - |" in tables.markdown(document)


@pytest.mark.parametrize(
    "case",
    [
        Case(16, 16, 2, 2, 1, 40, 72, True),
        Case(16, 16, 2, 2, 1, 96, 96, True, window=16),
        Case(16, 16, 2, 2, 2, 60, 60, True, None, (25, 35), (25, 35)),
        Case(16, 16, 2, 2, 2, 60, 60, False, None, (25, 35), (25, 35)),
    ],
    ids=lambda case: case.name,
)
def test_flex_is_given_the_same_mask(case):
    mask = flex_block_mask(case, random_data(case, CPU))
    zero = torch.zeros((), dtype=torch.int64)
    rows, keys = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)[None]
    seen = mask.mask_mod(zero, zero, rows, keys)
    expected = torch.zeros_like(seen)
    q0 = k0 = 0
    for sq, sk in case.sequences if case.packed else case.sequences[:1]:
        right = 0 if case.causal else None
        block = visible(torch.arange(sq), torch.arange(sk), sk - sq, case.window, right)
        expected[q0 : q0 + sq, k0 : k0 + sk] = block
        q0, k0 = q0 + sq, k0 + sk
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("unlimited", [-1, None])
@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_flash_attention_is_called_as_its_interface_asks(case, unlimited, monkeypatch):
    """Stand-ins with its signatures, computed by the specification."""

    def limits(causal, window_size):
        left, right = (None if side == unlimited else side for side in window_size)
        return {"causal": causal, "window_size": (left, right)}

    def flash_attn_func(q, k, v, *, causal, window_size):
        return reference.attention(q, k, v, **limits(causal, window_size))

    def flash_attn_varlen_func(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size
    ):
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        return reference.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **limits(causal, window_size))

    module = ModuleType("flash_attention_stand_in")
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, module.__name__, module)
    peer = FlashAttention("FA", module.__name__, unlimited)
    assert peer.missing() is None
    data = random_data(case, CPU)
    slices = check.expect(case, data, gradients=True)
    assert check.fault(peer.prepare(case, data), slices, gradients=True) is None


def test_a_peer_that_is_not_installed_says_so():
    assert "ModuleNotFoundError" in FlashAttention("FA", "no_such_module_anywhere", None).missing()


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_through_one_backend_is_right(causal):
    case = Case(16, 16, 4, 2, 2, 64, 64, causal, dtype=torch.float32)
    peer = Sdpa("math", SDPBackend.MATH)
    assert peer.refuses(case) is None
    data = random_data(case, CPU)
    call = peer.prepare(case, data)
    assert check.fault(call, check.expect(case, data, gradients=True), gradients=True) is None


def test_sdpa_refuses_what_it_would_compute_wrongly():
    refusals = [Sdpa("cuDNN", SDPBackend.CUDNN_ATTENTION).refuses(case) for case in SUITES["masks"].cases]
    assert refusals == [
        "no window",
        "no packed rows",
        "no packed rows",
        "its causal mask is aligned top left",
    ]


def test_flex_runs_only_where_a_case_asks_for_it():
    flex = next(peer for peer in PEERS["cuda"] if isinstance(peer, Flex))
    entered = [case.name for case in SUITES["dense"].cases if flex.refuses(case) is None]
    assert entered == ["d64 s4096 full", "d64 s4096 causal", "d128 s4096 full", "d128 s4096 causal"]
    assert flex_block_mask(SUITES["dense"].cases[0], random_data(SMOKE[0], CPU)) is None


def test_the_smoke_suite_from_the_command_line(tmp_path):
    path = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "benchmarks", "smoke", "--device", "cpu", "--out", str(path)]
    done = subprocess.run(
        [*command, "--only", "s64 full float32 forward"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"] == "d16 h4:4 s64 full float32"
    assert row["ours_ms"] > 0
    assert row["peers_ms"]["SDPA"] > 0
    assert row["ratio"] == pytest.approx(row["peers_ms"]["SDPA"] / row["ours_ms"], rel=1e-2)
