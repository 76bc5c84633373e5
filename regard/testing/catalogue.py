"""The scenarios, by kind. A name says what it is about; each kind has siblings of the case that led to it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from regard.testing.scenarios import Scenario

FP16, BF16, FP32, FP64 = ("float16",), ("bfloat16",), ("float32",), ("float64",)
ALL = (*BF16, *FP16, *FP32)
GPU: dict[str, Any] = {"full": True, "gpu": True, "dtypes": BF16}
SINKS = (-5.0, 0.0, 5.0)


def _dense(name: str, q: str, d: int, **rest: Any) -> Scenario:
    """q is "batch x rows x heads", heads being "query heads:key heads" where they differ; sk: as many."""
    b, sq, heads = q.split("x")
    hq, _, hk = heads.partition(":")
    rows_k = rest.pop("sk", int(sq))
    return Scenario(name=name, q=(int(b), int(sq), int(hq), d), k=(int(b), rows_k, int(hk or hq), d), **rest)


def _packed(name: str, q: list[int], heads: str, d: int, **rest: Any) -> Scenario:
    """Sequences of q rows on k keys (default: as many), then `spare` rows that belong to none."""
    cu_q = tuple(accumulate(q, initial=0))
    cu_k = tuple(accumulate(rest.pop("k", q), initial=0))
    spare = rest.pop("spare", 0)
    hq, _, hk = heads.partition(":")
    shapes = (cu_q[-1] + spare, int(hq), d), (cu_k[-1] + spare, int(hk or hq), d)
    return Scenario(name=name, q=shapes[0], k=shapes[1], cu_q=cu_q, cu_k=cu_k, **rest)


def _documents(total: int, shortest: int, longest: int) -> list[int]:
    """Document lengths from shortest to longest that fill `total` rows, in a fixed uneven order."""
    lengths: list[int] = []
    x = 1
    while sum(lengths) < total:
        x = x * 16807 % (2**31 - 1)
        lengths.append(shortest + x % (longest - shortest + 1))
    lengths[-1] -= sum(lengths) - total
    return lengths


# The four field reports, small and at their own size. Report 4's masks are documents and a window.
_VIDEO = [4032, 5040, 5040, 5040, 5140, 4940, 5040, 1008]
_SBHD: dict[str, Any] = {"causal": True, "layout": "rows-first", "dout": "rows-first", "loss": "out"}
_REPORTS = [
    _packed("report1-packed-d80-gqa-small", [40], "8:2", 80, causal=True, loss="out"),
    _packed("report1-packed-d80-gqa", [256], "16:4", 80, causal=True, loss="out"),
    _dense("report2-batches-d256-sbhd-small", "2x48x4:2", 256, **_SBHD),
    _dense("report2-batches-d256-sbhd", "2x384x16:2", 256, **_SBHD),
    _packed("report3-video-segments-small", [n // 84 for n in _VIDEO], "2", 128, k=[209] * 8, arena=True),
    _packed(
        "report3-video-segments", _VIDEO, "56", 128, k=[17580] * 8, arena=True, kinds=("structured",), **GPU
    ),
    _packed("report4-documents-small", _documents(512, 8, 64), "2", 128, causal=True),
    _packed("report4-documents", _documents(32768, 512, 4095), "16", 128, causal=True, **GPU),
    _dense("report4-window-small", "1x512x2", 128, causal=True, window_size=(15, 0)),
    _dense("report4-window", "1x32768x16", 128, causal=True, window_size=(1023, 0), **GPU),
]

_SHAPES = [
    *(
        _dense(f"train-d{d}-{name}-small", "1x256x4:2", d, causal=name == "causal")
        for d in (64, 128, 256)
        for name in ("causal", "full")
    ),
    _dense("train-fp32-small", "1x256x4", 64, causal=True, dtypes=FP32),
    _packed("train-packed-small", _documents(500, 20, 200), "4:2", 64, causal=True),
    *(
        _dense(f"train-d{d}-s1024-{name}", "2x1024x8:2", d, causal=name == "causal", full=True)
        for d in (64, 128, 256)
        for name in ("causal", "full")
    ),
    *(
        _dense(f"train-d{d}-s4096-{name}", "2x4096x8:2", d, causal=name == "causal", **GPU)
        for d in (64, 128, 256)
        for name in ("causal", "full")
    ),
    _dense("train-d128-s16384-causal", "1x16384x8", 128, causal=True, **GPU),
    _dense("train-fp32-s2048", "1x2048x8", 64, causal=True, **(GPU | {"dtypes": FP32})),
    _dense(
        "train-window-s8192", "1x8192x8:2", 128, causal=True, window_size=(1024, 0), dtypes=BF16, full=True
    ),
    _packed(
        "train-packed-s8192", _documents(8192, 30, 2000), "8:2", 128, causal=True, dtypes=BF16, full=True
    ),
]

_EMPTY_ROWS = [
    _packed("empty-rows-packed", [76, 34, 146], "1", 32, k=[1, 1, 1], causal=True, dtypes=FP16 + FP32),
    _dense("empty-rows-more-queries-than-keys", "2x40x4:2", 64, sk=24, causal=True),
    _dense("empty-rows-first", "1x10x2", 8, sk=9, causal=True, dtypes=FP32 + FP64),
    _dense("empty-rows-whole-tiles", "1x300x2", 64, sk=20, causal=True),
    _dense("empty-rows-window", "1x70x2", 64, sk=40, window_size=(3, 3), dtypes=FP16 + FP32),
    _dense("empty-rows-no-key-used", "3x17x2", 32, sk=9, used_k=(0, 9, 0), dtypes=FP16 + FP32),
    _dense("empty-rows-with-sinks", "2x40x4:2", 64, sk=24, causal=True, sinks=SINKS),
    _dense("empty-batch", "0x8x2", 16),
    _dense("empty-queries", "2x0x2", 16, sk=8),
    _dense("empty-keys", "2x8x4:2", 16, sk=0),
    _dense("empty-keys-with-sinks", "2x8x3", 16, sk=0, sinks=SINKS),
    _packed("empty-pack", [], "2", 16, spare=5),
    _packed("empty-pack-without-rows", [], "2", 16),
]

_PACKED = [
    _packed("packed-single-queries", [1, 0, 1], "9:3", 64, k=[3, 0, 5], causal=True),
    _packed("packed-every-other-empty", [0, 1, 0, 1, 0], "9:3", 64, k=[2, 3, 0, 5, 1], causal=True),
    _packed("packed-rows-beyond-the-last", [3, 6, 11], "4:2", 64, spare=3, arena=True, dtypes=ALL),
    _packed("packed-one-key-each", [1] * 33, "4", 64),
    _packed("packed-uneven", [1, 130, 2, 64, 63], "4:1", 64, k=[5, 64, 200, 1, 128], causal=True),
    _packed("packed-used", [20, 30, 14], "4:2", 64, used_q=(13, 0, 14), used_k=(20, 7, 0), spare=2),
    Scenario(name="packed-late-start", q=(40, 4, 64), k=(50, 2, 64), cu_q=(5, 17, 36), cu_k=(9, 20, 44)),
    _packed("packed-window", [100, 7, 61], "2", 64, window_size=(20, 5), dtypes=FP16 + FP32),
    _packed("packed-sinks-softcap", [33, 65], "6:3", 64, causal=True, sinks=SINKS, softcap=15.0),
]

_USED: dict[str, Any] = {"used_q": (70, 3, 0), "used_k": (5, 90, 17)}
_TAILS = [
    _dense("tail-s9", "2x9x2", 128, arena=True, dtypes=ALL),
    _dense("tail-s12", "2x12x2", 128, arena=True),
    _dense("tail-1001x503", "1x1001x2", 128, sk=503, arena=True, dtypes=BF16),
    _dense("tail-503x1001-causal", "1x503x2", 128, sk=1001, causal=True, dtypes=BF16),
    _dense("tail-one-row", "1x1x1", 64),
    _dense("cache-lengths-1-3", "2x1x2", 64, sk=3, used_k=(1, 3), arena=True, dtypes=ALL),
    _dense("cache-lengths-causal", "3x4x4:1", 64, sk=150, used_k=(4, 150, 65), causal=True),
    _dense("cache-unused-infinite", "3x4x4:1", 64, sk=150, used_k=(4, 150, 65), unused=float("inf")),
    _dense("cache-queries-and-keys-used", "3x70x2", 64, sk=90, causal=True, **_USED),
]

_HEAD_DIMS = [
    *(_dense(f"head-dim-{d}", "1x97x2", d, causal=True) for d in (64, 128, 136, 160, 192, 224, 256)),
    *(_dense(f"head-dim-{d}", "1x41x2:1", d, causal=True) for d in (1, 2, 3, 8, 16, 33, 40, 72, 80)),
    *(_dense(f"head-dim-{d}", "1x41x2:1", d, causal=True) for d in (96, 100, 257, 320, 511, 512)),
    *(_dense(f"head-dim-{d}-fp32", "1x41x2:1", d, dtypes=FP32) for d in (3, 64, 80, 128, 256, 512)),
    *(
        _dense(f"head-dim-{d}-and-{dv}", "1x65x4:2", d, dv=dv, causal=True)
        for d, dv in ((192, 128), (128, 192), (64, 128), (33, 80), (128, 1), (8, 512), (64, 256))
    ),
    _packed("head-dim-192-and-128-packed", [33, 70], "4:2", 192, dv=128, causal=True),
]

_GROUPS = [
    _dense("gqa-28-4-decode", "2x1x28:4", 128, sk=77),
    _dense("gqa-28-4", "1x50x28:4", 64, causal=True),
    _dense("gqa-40-8-decode", "2x1x40:8", 128, sk=77),
    _dense("gqa-40-8", "1x50x40:8", 64, causal=True),
    _dense("gqa-mqa-7", "2x65x7:1", 64, causal=True, dtypes=FP16 + FP32),
    _dense("gqa-ratio-3", "1x70x9:3", 64, window_size=(30, 10)),
]

_STRIDES = [
    *(
        _dense(f"strides-dout-{dout}", "2x32x4:1", 128, dout=dout, dtypes=FP16)
        for dout in ("transposed", "every-other", "slice", "expanded")
    ),
    *(
        _dense(f"strides-{layout}", "2x67x2:1", 64, causal=True, layout=layout, dout=layout, arena=True)
        for layout in ("heads-first", "rows-first", "heads-outermost", "slice", "offset", "shared")
    ),
    *(
        _packed(f"strides-packed-{layout}", [40, 27], "4:2", 64, causal=True, layout=layout, dout=layout)
        for layout in ("heads-first", "slice", "offset", "shared")
    ),
    _dense("strides-far-batches", "2x65x2", 64, causal=True, layout="far", **GPU),
    _packed("strides-far-rows", [40, 27], "2", 64, layout="far", **GPU),
]

_HUGE = [
    _dense("huge-batch-50", "50x1x4", 32, distinct=7),
    _dense("huge-batch-8300", "8300x1x16", 128, distinct=37, **GPU),
    _dense("huge-batch-65536", "65536x4x8", 64, distinct=61, **(GPU | {"dtypes": FP16})),
    _dense("huge-batch-70001", "70001x4x8", 64, distinct=61, **(GPU | {"dtypes": FP16})),
    _dense("huge-batch-70001-causal", "70001x4x8", 64, causal=True, distinct=61, **(GPU | {"dtypes": FP16})),
    _packed("huge-pack", [1, 3] * 1000, "2", 64, causal=True, **GPU),
    _dense("huge-heads", "1x4x70000", 16, **GPU),
    _dense("huge-length", "1x70001x1", 64, window_size=(300, 20), **GPU),
    _dense("huge-keys", "1x1x8:1", 128, sk=300_001, **GPU),
]

_S = 24  # one-hot v needs no more keys than channels
_ONE_HOT: dict[str, Any] = {"sk": _S, "kinds": ("one-hot",), "dtypes": FP16 + FP32}
_WINDOWS = [
    *(
        _dense(f"window-one-hot-{w}-s{s}x{_S}", f"1x{s}x1", _S, window_size=(w, w), **_ONE_HOT)
        for s in (9, _S, 33)
        for w in (0, 1, 2, 4, _S - 1, _S, _S + 1)
    ),
    *(
        _dense(f"window-one-hot-left-{w}", "1x20x1", _S, window_size=(w, None), **_ONE_HOT)
        for w in (0, 3, _S + 9)
    ),
    *(
        _dense(f"window-one-hot-right-{w}", "1x20x1", _S, window_size=(None, w), **_ONE_HOT)
        for w in (0, 3, _S + 9)
    ),
    _dense("window-one-hot-right-4-causal", "1x20x1", _S, window_size=(2, 4), causal=True, **_ONE_HOT),
    _dense("window-left-256", "1x700x2", 64, window_size=(256, 0), dtypes=BF16),
    _dense("window-two-sided", "1x300x4:2", 64, window_size=(40, 70)),
    _dense("window-zero", "1x150x2", 64, window_size=(0, 0)),
    _dense("window-right-with-causal", "1x150x2", 64, window_size=(33, 70), causal=True),
    _dense("window-left-only", "1x150x2", 64, sk=190, window_size=(33, None)),
    _dense("window-right-only", "1x150x2", 64, sk=190, window_size=(None, 33)),
    _dense("window-used", "2x90x2", 64, sk=120, window_size=(17, 3), used_q=(90, 31), used_k=(77, 120)),
]

_CAUSAL = [
    _packed("causal-one-hot-packed", [1, 2, 3, 4], "1", 32, k=[8] * 4, causal=True, kinds=("one-hot",)),
    *(_dense(f"causal-{n}-queries-on-8", f"1x{n}x2", 64, sk=8, causal=True) for n in (1, 2, 3, 4)),
    _dense("causal-more-keys", "2x70x2", 64, sk=200, causal=True),
    _dense("causal-fp32", "1x200x2", 64, causal=True, dtypes=FP32),
    _dense("causal-fp64", "1x60x4:2", 40, causal=True, dtypes=FP64),
]

_NEGATIVE: dict[str, Any] = {"causal": True, "kinds": ("negative",)}
_SCORES = [
    _dense(
        "softcap-20-hot", "1x130x2", 64, causal=True, softcap=20.0, softmax_scale=3.0, kinds=("gaussian",)
    ),
    _dense("softcap-50", "1x130x4:2", 64, softcap=50.0, dtypes=ALL),
    _dense("sinks", "1x130x6:3", 64, sinks=SINKS, dtypes=ALL),
    _dense("sinks-causal-window", "2x130x6:3", 64, sinks=SINKS, causal=True, window_size=(30, None)),
    _dense("sinks-far-below", "1x50x2", 64, sinks=(-1000.0,), causal=True),
    _dense("scores-near-minus-200", "1x130x2", 64, dtypes=ALL, **_NEGATIVE),
    _packed("scores-near-minus-200-packed", [3, 70, 60], "2", 64, k=[9, 70, 50], **_NEGATIVE),
    _dense("scores-outliers", "1x130x2", 128, causal=True, kinds=("outliers",), dtypes=BF16 + FP32),
    _dense("scores-small-scale", "1x97x2", 64, softmax_scale=1e-3),
    _dense("scores-large-scale", "1x97x2", 64, softmax_scale=4.0, causal=True),
    _dense("lse-alone", "1x97x4:2", 64, causal=True, loss="lse", dtypes=ALL),
    _packed("lse-alone-packed", [40, 57], "2", 64, loss="lse", sinks=(0.0,)),
    _dense("out-alone", "1x97x4:2", 64, causal=True, loss="out", dtypes=ALL),
    _dense("autocast-fp16", "1x4x36", 8, autocast=True, dtypes=FP16),
    _dense("autocast", "2x70x4:2", 64, causal=True, autocast=True),
]

_RUNS: dict[str, Any] = {"repeats": 30, "dtypes": BF16, "kinds": ("gaussian",)}
_DETERMINISM = [
    _dense("determinism-small", "1x150x3:1", 64, causal=True, **(_RUNS | {"dtypes": FP16})),
    _dense("determinism-full", "1x1000x6:2", 64, **_RUNS),
    _dense("determinism-causal", "1x1000x6:2", 64, causal=True, **_RUNS),
    _dense("determinism-window", "1x1000x6:2", 64, window_size=(100, 20), **_RUNS),
    _packed("determinism-packed", [400, 1, 0, 350, 249], "6:2", 64, causal=True, sinks=(0.0, 1.0), **_RUNS),
]

SCENARIOS: tuple[Scenario, ...] = (
    *(*_REPORTS, *_SHAPES, *_EMPTY_ROWS, *_PACKED, *_TAILS, *_HEAD_DIMS, *_GROUPS, *_STRIDES),
    *(*_WINDOWS, *_CAUSAL, *_SCORES, *_DETERMINISM, *_HUGE),
)
