"""The specification against arithmetic that can be followed by eye, PyTorch's own attention, and differences.

In the tiny cases every query is 1 and a key is the logarithm of a weight, so that a row's probabilities are
the weights of the keys it sees over their sum, and its lse is the logarithm of that sum.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard import reference

WEIGHTS = (1.0, 2.0, 5.0)
VALUES = ((10.0, -1.0), (20.0, 0.5), (50.0, 3.0))  # two columns for keys of one: dv is not d
SINK = 8.0
NAN, INF = float("nan"), float("inf")

# Name: (options, the keys that each query row sees, None where the row does not exist, the number of keys).
Seen = list[tuple[int, ...] | None]
CASES: dict[str, tuple[dict[str, Any], Seen, int]] = {
    "full": ({}, [(0, 1, 2), (0, 1, 2)], 3),
    "one key": ({}, [(0,)], 1),
    "no keys": ({}, [(), ()], 0),
    "causal": ({"causal": True}, [(0,), (0, 1), (0, 1, 2)], 3),
    "causal, fewer rows than keys": ({"causal": True}, [(0, 1), (0, 1, 2)], 3),
    "causal, more rows than keys": ({"causal": True}, [(), (), (0,), (0, 1)], 2),
    "window 1, 0": ({"window_size": (1, 0)}, [(0,), (0, 1), (1, 2)], 3),
    "window 0, 1": ({"window_size": (0, 1)}, [(0, 1), (1, 2), (2,)], 3),
    "window 0, 0, fewer rows": ({"window_size": (0, 0)}, [(1,), (2,)], 3),
    "window to the right alone": ({"window_size": (None, 1)}, [(0, 1), (0, 1, 2), (0, 1, 2)], 3),
    "window to the left alone, more rows": ({"window_size": (0, None)}, [(0, 1), (0, 1), (1,)], 2),
    "causal and a wider window": ({"causal": True, "window_size": (0, 5)}, [(0,), (1,), (2,)], 3),
    "seqused_k 2": ({"causal": True, "seqused_k": 2}, [(0,), (0, 1)], 3),
    "seqused_k 0": ({"seqused_k": 0}, [(), ()], 3),
    "seqused_q 1": ({"causal": True, "seqused_q": 1}, [(0, 1, 2), None], 3),
    "seqused_q 2, seqused_k 1": ({"causal": True, "seqused_q": 2, "seqused_k": 1}, [(), (0,), None], 3),
}


def f64(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def i32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_hand(seen: Seen, sink: float, softcap: float) -> tuple[list[list[float]], list[float]]:
    """out and lse, a row each, in plain Python."""

    def weight(key: int) -> float:
        score = math.log(WEIGHTS[key])
        return math.exp(softcap * math.tanh(score / softcap)) if softcap else WEIGHTS[key]

    outs, lses = [], []
    for keys in seen:
        total = sum(map(weight, keys or ())) + (sink if keys is not None else 0.0)
        outs.append([sum(weight(j) * VALUES[j][c] for j in keys or ()) / (total or 1.0) for c in range(2)])
        lses.append(math.log(total) if total else -INF)
    return outs, lses


def call(name: str, packed: bool, sink: float, softcap: float, device: torch.device) -> tuple[Tensor, ...]:
    """out (sq, 2), lse (sq,) of one tiny case, and its leaves q, k, v; NaN lies around a packed one."""
    options, seen, sk = CASES[name]
    options = {n: i32([x], device) if n.startswith("seqused") else x for n, x in options.items()}
    q = torch.ones(len(seen), 1, 1, dtype=torch.float64, device=device)
    k = f64(WEIGHTS[:sk], device).log().view(sk, 1, 1)
    v = f64(VALUES[:sk], device).view(sk, 1, 2)
    options |= {"softcap": softcap, "sinks": f64([sink], device).log() if sink else None}
    if not packed:
        leaves = [t[None].requires_grad_() for t in (q, k, v)]
        out, lse = reference.attention(*leaves, **options)
        return out[0, :, 0], lse[0, 0], *leaves
    around = [torch.nn.functional.pad(t, (0, 0, 0, 0, 2, 1), value=NAN) for t in (q, k, v)]
    leaves = [t.requires_grad_() for t in around]
    lengths = [i32([2, 2 + t.shape[0]], device) for t in (q, k)]
    out, lse = reference.attention_varlen(*leaves, *lengths, **options)
    assert not out[:2].any()
    assert not out[-1:].any()
    assert lse[0, [0, 1, -1]].tolist() == [-INF] * 3
    return out[2:-1, 0], lse[0, 2:-1], *leaves


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sink", [0.0, SINK], ids=["plain", "sink"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_by_hand(name: str, packed: bool, sink: float, softcap: float, device: torch.device) -> None:
    out, lse, *_ = call(name, packed, sink, softcap, device)
    expected = by_hand(CASES[name][1], sink, softcap)
    torch.testing.assert_close(out, f64(expected[0], device).view_as(out), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, f64(expected[1], device), rtol=1e-13, atol=1e-13)


def test_the_numbers_themselves(device: torch.device) -> None:
    """by_hand in figures: weights 1, 2, 5 of 8; with a sink of 8, half of that."""
    out, lse, *_ = call("full", False, 0.0, 0.0, device)
    assert out[0].tolist() == pytest.approx([(10 + 40 + 250) / 8, (-1 + 1 + 15) / 8])
    assert lse[0].item() == pytest.approx(math.log(8))
    out, lse, *_ = call("full", False, SINK, 0.0, device)
    assert out[0].tolist() == pytest.approx([300 / 16, 15 / 16])
    assert lse[0].item() == pytest.approx(math.log(16))
    out, lse, *_ = call("causal, more rows than keys", False, 0.0, 0.0, device)
    assert out.tolist() == [[0, 0], [0, 0], [10, -1], pytest.approx([50 / 3, 0])]
    assert lse.tolist() == [-INF, -INF, 0, pytest.approx(math.log(3))]


@pytest.mark.parametrize("sink", [0.0, SINK], ids=["plain", "sink"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", CASES)
def test_what_sees_nothing_gets_no_gradient(
    name: str, packed: bool, sink: float, device: torch.device
) -> None:
    out, lse, *leaves = call(name, packed, sink, 0.0, device)
    grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    first = 2 if packed else 0
    dq, dk, dv = (g.reshape(-1, g.shape[-1])[first:] for g in grads)
    _, seen, sk = CASES[name]
    met = {key for keys in seen for key in keys or ()}
    assert all(g.isfinite().all() for g in grads)
    assert [bool(row.any()) for row in dv[:sk]] == [key in met for key in range(sk)]
    assert not any(dq[i].any() for i, keys in enumerate(seen) if not keys)
    assert not any(dk[key].any() for key in range(sk) if key not in met)
    if packed:
        assert not any(g[[0, 1, -1]].any() for g in grads)


def test_gradients_by_hand(device: torch.device) -> None:
    """Through lse the gradient of a score is its probability; through out, p times what v is above out."""
    out, lse, q, k, v = call("one key", False, SINK, 0.0, device)
    p = 1 / (1 + SINK)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k), retain_graph=True)
    assert (dq.item(), dk.item()) == (0, pytest.approx(p))  # the key is log 1
    dk, dv = torch.autograd.grad(out[0, 0], (k, v))
    assert dk.item() == pytest.approx(p * (10 - 10 * p))
    assert dv.flatten().tolist() == pytest.approx([p, 0])


def test_a_sink_joins_the_denominator_alone(device: torch.device) -> None:
    q, k, v = (torch.randn(1, 4, 2, 3, dtype=torch.float64, device=device) for _ in range(3))
    sinks = f64([0.3, -2.0], device).requires_grad_()
    out, lse = reference.attention(q, k, v, sinks=sinks, causal=True)
    plain, plain_lse = reference.attention(q, k, v, causal=True)
    share = torch.exp(sinks[:, None] - torch.logaddexp(plain_lse, sinks[:, None]))  # of the denominator
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[:, None]))
    torch.testing.assert_close(out, plain * (1 - share).transpose(1, 2)[..., None])
    (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(dsinks, share.detach().sum((0, 2)))


def test_a_group_of_query_heads_shares_a_key_head(device: torch.device) -> None:
    """Four query heads on two key heads: 0 and 1 see weights 1 and 1, heads 2 and 3 weights 1 and 3."""
    q = torch.ones(1, 1, 4, 1, dtype=torch.float64, device=device)
    k = f64([[1.0, 1.0], [1.0, 3.0]], device).log().view(1, 2, 2, 1)
    v = f64([[0.0, 0.0], [8.0, 80.0]], device).view(1, 2, 2, 1)
    out, lse = reference.attention(q, k, v)
    assert out.flatten().tolist() == pytest.approx([4, 4, 60, 60])
    assert lse.exp().flatten().tolist() == pytest.approx([2, 2, 4, 4])


def test_the_default_scale_is_one_over_the_root_of_the_head_dim(device: torch.device) -> None:
    q = f64([2.0, 0, 0, 0], device).view(1, 1, 1, 4)
    k = f64([[0.0, 7, 7, 7], [math.log(3), 7, 7, 7]], device).view(1, 2, 1, 4)
    v = f64([0.0, 8.0], device).view(1, 2, 1, 1)
    assert reference.attention(q, k, v)[0].item() == pytest.approx(6)  # 2 log 3 / sqrt(4)
    assert reference.attention(q, k, v, softmax_scale=1.0)[0].item() == pytest.approx(8 * 9 / 10)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("hk", "dv"), [(4, 8), (2, 8), (1, 5)])
def test_against_pytorch(causal: bool, hk: int, dv: int, device: torch.device) -> None:
    shapes = [(2, 9, 4, 8), (2, 9, hk, 8), (2, 9, hk, dv)]
    tensors = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    dout = torch.randn(2, 9, 4, dv, dtype=torch.float64, device=device)
    out, lse = reference.attention(*tensors, causal=causal)
    q, k, v = (t.transpose(1, 2) for t in tensors)
    theirs = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, theirs)
    for mine, true in zip(
        torch.autograd.grad(out, tensors, dout), torch.autograd.grad(theirs, tensors, dout), strict=True
    ):
        torch.testing.assert_close(mine, true)
    scores = torch.einsum("bihd,bjhd->bhij", tensors[0], tensors[1].repeat_interleave(4 // hk, 2)) / 8**0.5
    if causal:
        scores = scores + torch.full((9, 9), -INF, dtype=torch.float64, device=device).triu(1)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    q = torch.randn(1, 3, 2, 4, device=device).to(dtype)
    out, lse = reference.attention(q, q, q, causal=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (out.dtype, lse.dtype) == (dtype, wide)
    torch.testing.assert_close(out[:, 0], q[:, 0], rtol=0, atol=0)  # one key: its value


def test_gradients_are_those_of_differences(device: torch.device) -> None:
    """Three packed sequences with rows around them, a window, and everything that has a gradient."""
    lengths = [i32(values, device) for values in ([1, 4, 4, 6], [0, 3, 5, 7], [2, 0, 2], [3, 2, 1])]
    cu_q, cu_k, used_q, used_k = lengths
    shapes = [(7, 2, 2), (8, 1, 2), (8, 1, 3), (2,)]
    leaves = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention_varlen(
            q,
            k,
            v,
            cu_q,
            cu_k,
            sinks=sinks,
            softcap=0.9,
            window_size=(1, 0),
            seqused_q=used_q,
            seqused_k=used_k,
        )
        return out, lse[lse != -INF]  # differences of infinities are none

    assert attend(*leaves)[1].numel() == 4 * 2  # 2, 0 and 2 rows of two heads
    assert torch.autograd.gradcheck(attend, leaves)
