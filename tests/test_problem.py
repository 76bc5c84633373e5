"""Everything that a call refuses: the type of the error, and a message with the argument, what came and what
was expected. And what looks odd and is served all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import problem, reference

NAN, INF = float("nan"), float("inf")
META = torch.device("meta")


def dense() -> dict[str, Any]:
    """A call that is served: 2 sequences of 5 rows on 7 keys, 4 heads on 2."""
    return {"q": torch.randn(2, 5, 4, 8), "k": torch.randn(2, 7, 2, 8), "v": torch.randn(2, 7, 2, 6)}


def packed() -> dict[str, Any]:
    """The same as one tensor each: 10 rows, 14 keys."""
    lengths = {"cu_seqlens_q": ints(0, 5, 10), "cu_seqlens_k": ints(0, 7, 14)}
    return {name: t.flatten(0, 1) for name, t in dense().items()} | lengths


def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


Change = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Bad:
    """A served call with one argument changed, and what must be said about it.

    value replaces the argument; a function is given the old one.
    """

    name: str
    value: Any
    error: type[Exception]
    got: str
    expected: str
    call: Callable[[], dict[str, Any]] = dense

    @property
    def id(self) -> str:
        return f"{self.call.__name__}: {self.name} {self.got}"

    def arguments(self) -> dict[str, Any]:
        arguments = self.call()
        arguments[self.name] = self.value(arguments[self.name]) if callable(self.value) else self.value
        return arguments


def attend(arguments: dict[str, Any]) -> Any:
    return (regard.attention_varlen if "cu_seqlens_q" in arguments else regard.attention)(**arguments)


def to(dtype: torch.dtype) -> Change:
    return lambda t: t.to(dtype)


def on_meta(t: Tensor) -> Tensor:
    return t.to(META)


def head_dim(size: int) -> Change:
    return lambda t: torch.zeros(*t.shape[:-1], size)


def heads(count: int) -> Change:
    return lambda t: torch.zeros(*t.shape[:-2], count, t.shape[-1])


def spread(t: Tensor) -> Tensor:
    """The same numbers with a last stride of 2."""
    return torch.stack([t, t], -1)[..., 0]


def nested(t: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(t), layout=torch.jagged)


TENSORS = [
    *(
        Bad(name, [[1.0]], TypeError, "list", "a torch.Tensor", call)
        for name in ("q", "k", "v")
        for call in (dense, packed)
    ),
    *(Bad(n, None, TypeError, "NoneType", "a torch.Tensor") for n in ("q", "k", "v")),
    Bad("q", lambda t: t.to_sparse(), TypeError, "layout torch.sparse_coo", "a dense strided tensor"),
    Bad("k", nested, TypeError, "a nested tensor", "a dense strided tensor"),
    *(
        Bad(n, lambda t: t[0], ValueError, "shape (", "4 dimensions (batch, seqlen, heads, head_dim)")
        for n in ("q", "k", "v")
    ),
    *(
        Bad(n, lambda t: t[None], ValueError, "shape (1, ", "3 dimensions (total, heads, head_dim)", packed)
        for n in ("q", "k", "v")
    ),
    *(
        Bad("q", to(dtype), TypeError, str(dtype), "float16, bfloat16, float32 or float64")
        for dtype in (torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn)
    ),
    *(
        Bad(n, to(torch.float16), TypeError, "torch.float16", "q's dtype torch.float32", call)
        for n in ("k", "v")
        for call in (dense, packed)
    ),
    Bad("q", to(torch.float64), TypeError, "torch.float32", "q's dtype torch.float64"),
    *(Bad(n, on_meta, ValueError, "device meta", "q's device cpu") for n in ("k", "v")),
    *(
        Bad(n, head_dim(size), ValueError, f"head dim {size}", "a head dim of 1 to 512")
        for n in ("q", "k", "v")
        for size in (0, 513)
    ),
    *(Bad(n, heads(0), ValueError, "shape (2, ", "at least one head") for n in ("q", "k", "v")),
    *(
        Bad(n, spread, ValueError, "strides (", f"a last dimension of stride 1; pass {n}.contiguous()", call)
        for n in ("q", "k", "v")
        for call in (dense, packed)
    ),
    Bad("k", head_dim(9), ValueError, "head dim 9", "q's head dim 8"),
    Bad("v", heads(4), ValueError, "shape (2, 7, 4, 6)", "k's shape (2, 7, 2, 8) in all but the last"),
    Bad("v", lambda t: t[:, :6], ValueError, "shape (2, 6, 2, 6)", "k's shape (2, 7, 2, 8) in all but"),
    Bad("v", lambda t: t[:1], ValueError, "shape (1, 7, 2, 6)", "k's shape (2, 7, 2, 8) in all but the last"),
    Bad("v", lambda t: t[:9], ValueError, "shape (9, 2, 6)", "k's shape (14, 2, 8) in all but", packed),
    Bad("q", heads(3), ValueError, "2 heads for 3 query heads", "a number of key heads that divides"),
    Bad("q", heads(1), ValueError, "2 heads for 1 query heads", "a number of key heads that divides"),
    Bad("q", lambda t: t[:1], ValueError, "batch 2", "q's batch 1"),
]
BLAMED = {
    "q torch.float32": "k",
    "q batch 2": "k",
    "q 2 heads for": "k",
}  # k is named for what q was changed to

ONE_EACH = "one a sequence"
INDICES = [
    *(
        Bad(n, value, error, got, expected, call)
        for call, names in (
            (packed, ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
            (dense, ("seqused_q", "seqused_k")),
        )
        for n in names
        for value, error, got, expected in (
            ([0, 5], TypeError, "list", "a torch.int32 tensor"),
            (
                ints(0, 5, dtype=torch.int64),
                TypeError,
                "torch.int64",
                f"torch.int32; pass {n}.to(torch.int32)",
            ),
            (torch.tensor([0.0, 5.0]), TypeError, "torch.float32", "torch.int32"),
            (ints(0, 5)[None], ValueError, "shape (1, 2)", "1 dimension"),
            (ints(0, 5).to(META), ValueError, "device meta", "q's device cpu"),
        )
    ),
    *(
        Bad(n, None, TypeError, "NoneType", "a torch.int32 tensor", packed)
        for n in ("cu_seqlens_q", "cu_seqlens_k")
    ),
    Bad("cu_seqlens_q", ints(), ValueError, "0 entries", "n + 1 entries for n sequences", packed),
    Bad("cu_seqlens_k", ints(0, 14), ValueError, "2 entries", "cu_seqlens_q's 3", packed),
    *(
        Bad(n, ints(*values), ValueError, f"shape ({len(values)},)", f"shape (2,), {ONE_EACH}", call)
        for n in ("seqused_q", "seqused_k")
        for values in ((), (1,), (1, 2, 3))
        for call in (dense, packed)
    ),
    *(
        Bad(f"cu_seqlens_{side}", ints(*values), ValueError, got, expected, packed)
        for side, rows in (("q", 10), ("k", 14))
        for values, got, expected in (
            ((-1, 5, 10), "first entry -1", "a first entry >= 0"),
            ((0, 5, rows + 1), f"last entry {rows + 1}", f"at most {side}'s {rows} rows"),
            ((0, rows + 1, rows), f"[{rows + 1}, {rows}] at entry 1", "rising entries"),
            ((3, 2, 10), "[3, 2] at entry 0", "rising entries"),
            ((0, 5, -1), "[5, -1] at entry 1", "rising entries"),
        )
    ),
    *(
        Bad(
            f"seqused_{side}",
            ints(2, used),
            ValueError,
            f"{used} for sequence 1",
            f"0 to its {rows} rows",
            call,
        )
        for side, rows in (("q", 5), ("k", 7))
        for used in (-1, rows + 1)
        for call in (dense, packed)
    ),
]

PER_HEAD = "shape (4,), one a query head"
OPTIONS = [
    *(
        Bad("sinks", *rest, call)
        for call in (dense, packed)
        for rest in (
            ([0.0] * 4, TypeError, "list", "a torch.Tensor"),
            (ints(0, 0, 0, 0), TypeError, "torch.int32", "a floating dtype"),
            (torch.zeros(2), ValueError, "shape (2,)", PER_HEAD),
            (torch.zeros(1, 4), ValueError, "shape (1, 4)", PER_HEAD),
            (torch.zeros(()), ValueError, "shape ()", PER_HEAD),
            (torch.zeros(4).to(META), ValueError, "device meta", "q's device cpu"),
        )
    ),
    *(
        Bad(n, value, TypeError, repr(value), "True or False")
        for n in ("causal", "deterministic")
        for value in (1, None, "yes")
    ),
    *(
        Bad("window_size", value, TypeError, repr(value), "a pair (left, right)")
        for value in (None, 3, (3,), (1, 2, 3), "ab")
    ),
    *(
        Bad("window_size", value, TypeError, repr(value), "integers or None")
        for value in ((1.0, 0), (None, True), ("1", 0))
    ),
    *(
        Bad("window_size", value, ValueError, repr(value), "numbers of keys >= 0; None means unlimited")
        for value in ((-1, 0), (3, -1), (-1, -1))
    ),
    *(
        Bad(n, value, ValueError, str(float(value)), "a finite number > 0; None means the default")
        for n, values in (
            ("softmax_scale", (NAN, INF, -INF, 0, 0.0, -0.5)),
            ("softcap", (NAN, INF, -INF, -1)),
        )
        for value in values
    ),
    *(
        Bad(n, value, ValueError, str(value), "a number from 1e-37 to 1e+38")
        for n in ("softmax_scale", "softcap")
        for value in (2e38, 1e300, 1e-38, 1e-320)
    ),
    *(
        Bad(n, value, TypeError, type(value).__name__, "a Python number or None")
        for n in ("softmax_scale", "softcap")
        for value in (True, "1", torch.tensor(1.0), 1j)
    ),
    *(
        Bad("backend", value, ValueError, repr(value), "None or one of cpu, portable", call)
        for value in ("flash", "", 3)
        for call in (dense, packed)
    ),
    *(
        Bad(n, value, TypeError, repr(value), "an integer or None", packed)
        for n in ("max_seqlen_q", "max_seqlen_k")
        for value in (7.0, True, "7")
    ),
]


def blamed(bad: Bad) -> str:
    return next((name for key, name in BLAMED.items() if f"{bad.name} {bad.got}".startswith(key)), bad.name)


@pytest.mark.parametrize("bad", [*TENSORS, *INDICES, *OPTIONS], ids=lambda bad: bad.id)
def test_refused(bad: Bad) -> None:
    with pytest.raises(bad.error) as raised:
        attend(bad.arguments())
    assert raised.type is bad.error
    said = str(raised.value)
    assert re.match(rf"{blamed(bad)}: expected .+, got .+", said), said
    before, after = said.split(", got ")
    expected, _, hint = bad.expected.partition("; ")
    assert expected in before, said
    assert bad.got in after, said
    assert hint in after, said


@pytest.mark.parametrize("bad", [*TENSORS, *INDICES], ids=lambda bad: bad.id)
def test_the_reference_refuses_the_same(bad: Bad) -> None:
    arguments = bad.arguments()
    call = reference.attention_varlen if "cu_seqlens_q" in arguments else reference.attention
    with pytest.raises(bad.error, match=f"^{blamed(bad)}: expected "):
        call(**arguments)


@pytest.mark.parametrize("bad", [*TENSORS, *OPTIONS], ids=lambda bad: bad.id)
def test_explain_refuses_the_same(bad: Bad) -> None:
    with pytest.raises(bad.error, match=f"^{blamed(bad)}: expected "):
        regard.explain(**bad.arguments())


def test_integers_are_refused_whether_or_not_a_gradient_is_asked_for() -> None:
    """PyTorch lets no integer tensor ask for a gradient; here it does not even get to attend."""
    whole = dense()["q"].to(torch.int32)
    with pytest.raises(RuntimeError, match="floating point"):
        whole.requires_grad_()
    with pytest.raises(TypeError, match=r"^q: expected float16, .*, got torch\.int32$"):
        regard.attention(whole, whole, whole)


def test_a_wrong_rank_names_the_call_that_takes_it() -> None:
    arguments = packed()
    lengths = [arguments.pop(n) for n in ("cu_seqlens_q", "cu_seqlens_k")]
    with pytest.raises(ValueError, match="packed input goes through attention_varlen"):
        regard.attention(**arguments)
    with pytest.raises(ValueError, match=r"dense input goes through attention$"):
        regard.attention_varlen(**dense(), cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])


def test_explain_takes_no_argument_that_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="'casual'"):
        regard.explain(**dense(), casual=True)


def test_a_backend_that_cannot_serve_says_why() -> None:
    arguments = {name: t.double() for name, t in dense().items()}
    with pytest.raises(
        NotImplementedError, match=r"^backend portable: .+; backend=None chooses one that can$"
    ):
        regard.attention(**arguments, backend="portable")


@pytest.mark.parametrize(
    "change",
    [
        {"softcap": 0},
        {"softcap": None, "softmax_scale": None},
        {"softmax_scale": np.float32(0.25), "softcap": np.float64(3)},
        {"window_size": [np.int64(2), None]},
        {"window_size": (10**12, 0)},
        {"sinks": torch.zeros(4, dtype=torch.float16)},
        {"sinks": torch.full((4,), -INF)},
        {"max_seqlen_q": 1, "max_seqlen_k": np.int32(10**6)},
        {"cu_seqlens_q": ints(2, 5, 9), "cu_seqlens_k": ints(3, 3, 12)},
        {"cu_seqlens_q": ints(0), "cu_seqlens_k": ints(0)},
        {"seqused_q": ints(0, 5), "seqused_k": ints(7, 0)},
        {"q": torch.zeros(0, 4, 8), "cu_seqlens_q": ints(0, 0, 0)},
        {"k": torch.zeros(0, 2, 8), "v": torch.zeros(0, 2, 6), "cu_seqlens_k": ints(0, 0, 0)},
    ],
    ids=lambda change: ",".join(change),
)
def test_served(change: dict[str, Any]) -> None:
    """What may look wrong and is not: lengths of 0, a first entry above 0, NumPy's numbers, wide windows."""
    arguments = packed() | change
    out = attend(arguments)
    assert out.shape == (*arguments["q"].shape[:-1], 6)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.nn.functional.pad(t, (1, 2))[..., 1:-2],
        lambda t: torch.stack([t, t], 1)[:, 1],
    ],
    ids=["(b, h, s, d)", "(s, b, h, d)", "padded", "every other"],
)
def test_any_strides_will_do_when_the_last_is_1(make: Change) -> None:
    arguments = {name: make(t) for name, t in dense().items()}
    torch.testing.assert_close(regard.attention(**arguments), reference.attention(**arguments)[0])


def test_a_last_dimension_of_one_has_no_stride_to_speak_of() -> None:
    arguments = {name: spread(t[..., :1]) for name, t in dense().items()}
    torch.testing.assert_close(regard.attention(**arguments), reference.attention(**arguments)[0])


def test_lengths_on_another_device_than_the_cpu_are_not_read() -> None:
    """Reading them would wait for the device. The meta device has nothing to read."""
    arguments = {n: t.to(META) for n, t in packed().items()}
    asked = problem.describe(
        problem.Inputs(**arguments),
        packed=True,
        causal=True,
        window_size=(3, 5),
        softmax_scale=None,
        softcap=None,
        deterministic=False,
    )
    problem.check_values(asked, problem.Inputs(**arguments))
    assert (asked.batch, asked.group, asked.lse_shape) == (2, 2, (4, 10))
    assert (asked.window_left, asked.window_right, asked.softmax_scale) == (3, 0, 8**-0.5)


def test_a_window_wider_than_an_operators_integers_sees_everything() -> None:
    q = torch.randn(1, 5, 2, 8)
    wide = regard.attention(q, q, q, window_size=(2**70, 2**63))
    assert torch.equal(wide, regard.attention(q, q, q))
