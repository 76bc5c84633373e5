"""What PyTorch does around a call: operators, compile, autocast, checkpoints, transforms, partial gradients.

Values are compared with the same call without the wrapping; the scenarios compare that with the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import regard
from regard import dispatch, ops
from regard.problem import Inputs, Problem

# PyTorch's own forward mode and inductor still script something of theirs when first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

DENSE = {"causal": True, "softcap": 4.0}
PACKED = {"window_size": (3, 1)}
NAMES = ("q", "k", "v", "sinks")


def draw(device: torch.device, *, length: int = 7, packed: bool = False) -> dict[str, Any]:
    """q, k, v and sinks that ask for gradients; with lengths where packed: two sequences, two rows over."""
    lead = (2 * length + 2,) if packed else (2, length)
    shapes = ((*lead, 4, 8), (*lead, 2, 8), (*lead, 2, 6), (4,))
    leaves = {
        n: torch.randn(s, device=device, requires_grad=True) for n, s in zip(NAMES, shapes, strict=True)
    }
    if not packed:
        return leaves
    cu = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    return leaves | {"cu_seqlens_q": cu, "cu_seqlens_k": cu}


def attend(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    packed = "cu_seqlens_q" in arguments
    call, options = (regard.attention_varlen, PACKED) if packed else (regard.attention, DENSE)
    out, lse = call(**arguments, **options, return_lse=True)
    return out, lse


def loss(out: Tensor, lse: Tensor) -> Tensor:
    return out.sin().sum() + lse[lse.isfinite()].square().sum()


def gradients(result: Tensor, arguments: dict[str, Any]) -> dict[str, Tensor]:
    leaves = {n: t for n, t in arguments.items() if t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(result, tuple(leaves.values())), strict=True))


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


both = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])


def operands(device: torch.device, packed: bool, everything: bool, dtype: torch.dtype) -> list[Any]:
    """The operator's arguments up to `backend`."""
    a = draw(device, packed=packed)
    a |= {n: a[n].detach().to(dtype).requires_grad_() for n in ("q", "k", "v")}
    used = torch.tensor([3, 6], dtype=torch.int32, device=device) if everything else None
    lengths = (a.get("cu_seqlens_q"), a.get("cu_seqlens_k"), used, used)
    numbers = (0.3, 5.0, 3, 0, True) if everything else (0.3, 0.0, None, None, False)
    return [a["q"], a["k"], a["v"], a["sinks"] if everything else None, *lengths, *numbers, None]


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # of which one may have a rest
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "everything"])
def test_opcheck_forward(packed: bool, everything: bool, dtype: torch.dtype, device: torch.device) -> None:
    arguments = operands(device, packed, everything, dtype)
    torch.library.opcheck(ops._forward, (*arguments, True))
    torch.library.opcheck(
        ops._forward, (*(t.detach() if isinstance(t, Tensor) else t for t in arguments), False)
    )


@both
@pytest.mark.parametrize("wanted", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.parametrize("arriving", ["dout", "dlse", "both"])
def test_opcheck_backward(
    packed: bool, wanted: tuple[bool, bool, bool], arriving: str, device: torch.device
) -> None:
    """Without tensors that ask for gradients: it has no derivative."""
    arguments = [
        t.detach() if isinstance(t, Tensor) else t for t in operands(device, packed, True, torch.float32)
    ]
    out, lse, rest = ops._forward(*arguments, True)
    dout = None if arriving == "dlse" else torch.randn_like(out)
    dlse = None if arriving == "dout" else torch.randn_like(lse)
    torch.library.opcheck(ops._backward, (out, lse, rest, dout, dlse, *wanted, *arguments))


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole_layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu: Tensor) -> Tensor:
    """Both calls, one fed by the other."""
    out = regard.attention(2 * q, k, v, causal=True, softcap=4.0)
    assert isinstance(out, Tensor)
    b, s, heads, _ = out.shape
    values = out.reshape(b * s, heads, -1)
    rows = q.flatten(0, 1)
    return loss(
        *regard.attention_varlen(rows, rows, values, cu, cu, window_size=(3, 0), sinks=sinks, return_lse=True)
    )


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic: bool, device: torch.device) -> None:
    """No graph break, what eager computes, and one graph for every length where the length is dynamic."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(whole_layer, backend=counter, fullgraph=True)
    lengths = (7, 8, 19, 33) if dynamic else (7,)
    for length in lengths:
        a = draw(device, length=length)
        if dynamic:
            for name in ("q", "k", "v"):
                torch._dynamo.mark_dynamic(a[name], 1)
        cu = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
        results = [f(*a.values(), cu) for f in (compiled, whole_layer)]
        same(*results)
        same(*(gradients(result, a) for result in results))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh")
def test_compile_with_numbers_that_vary(device: torch.device) -> None:
    """torch.compile keeps a number symbolic from its second value on."""
    a = draw(device, packed=True)

    def call(a: dict[str, Any], length: int, factor: float) -> Tensor:
        out: Tensor = regard.attention_varlen(
            **a,
            max_seqlen_q=length,
            max_seqlen_k=length,
            window_size=(length, None),
            softmax_scale=factor,
            softcap=2 * factor,
        )
        return out

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for length, factor in ((7, 0.5), (9, 0.75), (12, 1.5)):
        same((compiled(a, length, factor),), (call(a, length, factor),))


@pytest.mark.usefixtures("fresh")
@both
def test_compile_with_inductor(packed: bool, device: torch.device) -> None:
    """The operators alone, on a view that is not contiguous: nothing here that needs a C++ compiler."""
    compiled = torch.compile(attend, backend="inductor", fullgraph=True)
    a = draw(device, packed=packed)
    a["q"] = a["q"].detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_()
    results = [f(a) for f in (compiled, attend)]
    same(*results)
    dout, dlse = torch.randn_like(results[0][0]), torch.randn_like(results[0][1])
    leaves = [a[n] for n in NAMES]
    same(*(torch.autograd.grad(result, leaves, (dout, dlse)) for result in results))
    assert results[0][0].stride() == results[1][0].stride()


@both
def test_autocast(packed: bool, device: torch.device) -> None:
    a = draw(device, packed=packed)
    with torch.autocast(device.type, torch.bfloat16):
        out, lse = attend(a)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    grads = gradients(loss(out.float(), lse), a)
    assert {g.dtype for g in grads.values()} == {torch.float32}
    cast = {n: t.detach().bfloat16().requires_grad_() if n in ("q", "k", "v") else t for n, t in a.items()}
    out_cast, lse_cast = attend(cast)
    assert torch.equal(out, out_cast)
    for name, grad in gradients(loss(out_cast.float(), lse_cast), cast).items():
        assert torch.equal(grads[name], grad.float())


@both
def test_autocast_leaves_float64_alone(packed: bool) -> None:
    """On the CPU, which alone serves float64."""
    a = draw(torch.device("cpu"), packed=packed)
    a = {n: t.double() if t.is_floating_point() else t for n, t in a.items()}
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(a)[0].dtype == torch.float64


@both
@pytest.mark.parametrize("through", ["out", "lse"])
def test_second_derivatives_are_refused(packed: bool, through: str, device: torch.device) -> None:
    a = draw(device, packed=packed)
    out, lse = attend(a)
    result = out.square().sum() if through == "out" else lse[lse.isfinite()].square().sum()
    first = torch.autograd.grad(result, a["q"], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(first.sum(), a["k"])


@both
def test_a_first_derivative_with_a_graph_is_the_same(packed: bool, device: torch.device) -> None:
    a = draw(device, packed=packed)
    leaves = [a[n] for n in NAMES]
    plain, graphed = (torch.autograd.grad(loss(*attend(a)), leaves, create_graph=g) for g in (False, True))
    same(plain, graphed)


@both
@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_is_refused(packed: bool, name: str, device: torch.device) -> None:
    """PyTorch's own way would be to drop the tangent, and to call the derivative 0."""
    for grad in (False, True):
        a = {
            n: t.detach().requires_grad_(grad and t.is_floating_point())
            for n, t in draw(device, packed=packed).items()
        }
        with forward_ad.dual_level():
            a[name] = forward_ad.make_dual(a[name], torch.ones_like(a[name]))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                attend(a)


@pytest.mark.usefixtures("fresh")
def test_forward_mode_of_a_compiled_call_is_refused(device: torch.device) -> None:
    """The operator refuses by itself: a graph calls it without what stands before it."""
    a = {n: t.detach() for n, t in draw(device).items()}
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    compiled(a)
    with forward_ad.dual_level():
        a["q"] = forward_ad.make_dual(a["q"], torch.ones_like(a["q"]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            compiled(a)


def test_forward_mode_through_the_backward_is_refused(device: torch.device) -> None:
    a = draw(device)
    out, _ = attend(a)
    with forward_ad.dual_level():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad(out, a["q"], dout)


@both
def test_only_what_asks_gets_a_gradient(packed: bool, device: torch.device) -> None:
    a = draw(device, packed=packed)
    true = gradients(loss(*attend(a)), a)
    for asks in itertools.product((False, True), repeat=4):
        some = dict(zip(NAMES, asks, strict=True))
        b = {n: t.detach().requires_grad_(some.get(n, False)) for n, t in a.items()}
        result = loss(*attend(b))
        assert result.requires_grad == any(asks)
        if any(asks):
            found = gradients(result, b)
            assert set(found) == {n for n in NAMES if some[n]}
            same(found, {n: true[n] for n in found})


@both
def test_a_gradient_of_part_of_what_asks(packed: bool, device: torch.device) -> None:
    """autograd.grad for one tensor, while all four ask."""
    a = draw(device, packed=packed)
    true = gradients(loss(*attend(a)), a)
    for name in NAMES:
        same(torch.autograd.grad(loss(*attend(a)), a[name])[0], true[name])


@both
def test_gradients_through_out_and_lse_add_up(packed: bool, device: torch.device) -> None:
    a = draw(device, packed=packed)
    leaves = [a[n] for n in NAMES]
    out, lse = attend(a)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    together = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    by_out = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    dq, dk, dv, dsinks = torch.autograd.grad(lse, leaves, dlse, retain_graph=True)
    assert not dv.any()
    same([x + y for x, y in zip(by_out, (dq, dk, dv, dsinks), strict=True)], list(together))
    zero = torch.autograd.grad((out, lse), leaves, (torch.zeros_like(out), dlse))
    same(zero, (dq, dk, dv, dsinks))


@both
def test_saved_tensors_may_come_back_with_any_strides(packed: bool, device: torch.device) -> None:
    """A hook keeps the values, not the layout: of q, k, v, out, lse and what bfloat16 rounds off out."""
    names = ("q", "k", "v", "sinks")
    a = {
        n: t.detach().to(torch.float16 if n in names[:3] else t.dtype).requires_grad_(n in names)
        for n, t in draw(device, packed=packed).items()
    }
    plain = gradients(loss(*attend(a)), a)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t
    ):
        result = loss(*attend(a))
        same(gradients(result, a), plain)


@both
def test_a_gradient_may_arrive_with_any_strides(
    packed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend's dout has a last stride of 1; what `sum` sends back is one number, expanded."""
    a = draw(device, packed=packed)
    leaves, (out, lse) = [a[n] for n in NAMES], attend(a)
    module = dispatch.load(str(regard.explain(**a).backend))
    backward, last_strides = module.backward, []

    def watched(problem: Problem, inputs: Inputs, incoming: dispatch.Incoming, *grads: Any) -> None:
        last_strides.append(incoming.dout.stride(-1))
        backward(problem, inputs, incoming, *grads)

    monkeypatch.setattr(module, "backward", watched)
    for dout, dlse in (
        (torch.ones((), device=device).expand_as(out), torch.ones((), device=device).expand_as(lse)),
        (
            torch.randn(*out.shape, 2, device=device)[..., 0],
            torch.randn(*lse.shape, 2, device=device)[..., 1],
        ),
        (torch.randn_like(out.mT).mT, torch.randn_like(lse.mT).mT),
    ):
        strided = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
        plain = (t.clone(memory_format=torch.contiguous_format) for t in (dout, dlse))
        same(strided, torch.autograd.grad((out, lse), leaves, tuple(plain), retain_graph=True))
    assert last_strides == [1] * 6


@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(packed: bool, reentrant: bool, device: torch.device) -> None:
    a = draw(device, packed=packed)
    true = gradients(loss(*attend(a)), a)
    leaves = {n: t.detach().requires_grad_(t.requires_grad) for n, t in a.items()}
    out, lse = checkpoint(
        lambda *t: attend(dict(zip(a, t, strict=True))), *leaves.values(), use_reentrant=reentrant
    )
    loss(out, lse).backward()  # reentrant checkpoints work with backward alone
    same({n: leaves[n].grad for n in NAMES}, true)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))
        self.to_q, self.to_kv = nn.Linear(8, 4 * 8), nn.Linear(8, 2 * 2 * 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (4, 8))
        k, v = self.to_kv(x).unflatten(-1, (2, 2, 8)).unbind(-3)
        out = regard.attention(q, k, v, causal=True, sinks=self.sinks)
        assert isinstance(out, Tensor)
        return out


def test_functional_call(device: torch.device) -> None:
    module, x = Layer().to(device), torch.randn(2, 5, 8, device=device)
    true = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
    parameters = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    result = torch.func.functional_call(module, parameters, (x,)).sin().sum()
    same(torch.autograd.grad(result, list(parameters.values())), true)


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
def test_vmap(shared: bool, device: torch.device) -> None:
    """PyTorch calls the operator once a sample: slow, and right."""
    many = [draw(device) for _ in range(3)]
    q, k, v, sinks = (torch.stack([a[n].detach() for a in many]) for n in NAMES)
    if shared:
        k, v, sinks = k[0], v[0], sinks[0]
    in_dims = (0, *[None if shared else 0] * 3)

    def one(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return attend({"q": q, "k": k, "v": v, "sinks": sinks})

    found = torch.func.vmap(one, in_dims=in_dims)(q, k, v, sinks)
    each = [
        one(*(t if d is None else t[i] for t, d in zip((q, k, v, sinks), in_dims, strict=True)))
        for i in range(3)
    ]
    same(found, tuple(torch.stack(parts) for parts in zip(*each, strict=True)))


def test_rest_is_kept_whenever_autograd_is_there(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only where the caller saw it: under vmap over a tensor from outside, or in an exported graph."""
    backend = dispatch.load("cpu" if device.type == "cpu" else "portable")
    right, knows_rest = backend.forward, backend.KEEPS_REST
    kept = []

    def forward(problem: Problem, inputs: Inputs, results: dispatch.Results) -> None:
        kept.append(results.rest is not None)
        right(problem, inputs, results if knows_rest else results._replace(rest=None))

    monkeypatch.setattr(backend, "forward", forward)
    monkeypatch.setattr(backend, "KEEPS_REST", True)
    q, k, v = (torch.randn(2, 5, 2, 8, device=device, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    torch.func.vmap(lambda q: regard.attention(q, k, v))(q[None])
    arguments = (k, v, *[None] * 5, 0.5, 0.0, None, None, False, None, False)
    torch.ops.regard.attention(q, *arguments)
    torch.ops.regard.attention(q.detach(), *arguments)
    assert kept == [True, True, False]


def test_batched_gradients(device: torch.device) -> None:
    a = draw(device)
    leaves = [a[n] for n in NAMES]
    out, _ = attend(a)
    douts = torch.randn(3, *out.shape, device=device)
    found = torch.autograd.grad(out, leaves, douts, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for dout in douts]
    same(found, tuple(torch.stack(parts) for parts in zip(*each, strict=True)))


TRANSFORMS: dict[str, tuple[Callable[..., Any], type[Exception]]] = {
    "grad": (lambda f, q: torch.func.grad(f)(q), RuntimeError),
    "vjp": (lambda f, q: torch.func.vjp(f, q)[1](torch.ones((), device=q.device)), RuntimeError),
    "jacrev": (lambda f, q: torch.func.jacrev(f)(q), RuntimeError),
    "jvp": (lambda f, q: torch.func.jvp(f, (q,), (q,)), NotImplementedError),
    "jacfwd": (lambda f, q: torch.func.jacfwd(f)(q), NotImplementedError),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_that_differentiate_are_refused(name: str, device: torch.device) -> None:
    """torch.library has no rule for torch.func's gradients; wrong numbers would be worse than none."""
    a = {n: t.detach() for n, t in draw(device).items()}
    transform, error = TRANSFORMS[name]
    with pytest.raises(error, match=r"functorch transforms|no forward-mode derivative"):
        transform(lambda q: attend(a | {"q": q})[0].sum(), a["q"])


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(packed: bool, mode: Callable[[], Any], device: torch.device) -> None:
    a = draw(device, packed=packed)
    true = attend(a)
    with mode():
        results = attend(a)
        assert not any(t.requires_grad for t in results)
        fresh_inside = attend({n: t.clone() for n, t in a.items()})
    same(results, tuple(t.detach() for t in true))
    same(fresh_inside, results)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_without_data(packed: bool, dtype: torch.dtype, kind: str, device: torch.device) -> None:
    """Shapes, dtypes, strides and devices of results and gradients, as with data."""
    a = draw(device, packed=packed)
    a = {n: t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for n, t in a.items()}
    a["q"] = a["q"].detach().transpose(-3, -2).contiguous().transpose(-3, -2).requires_grad_()

    def facts(a: dict[str, Any]) -> list[Any]:
        out, lse = attend(a)
        ends = [torch.empty_like(t) for t in (out, lse)]
        grads = torch.autograd.grad((out, lse), [a[n] for n in NAMES], ends)
        return [(t.shape, t.dtype, t.stride()) for t in (out, lse, *grads)]

    true = facts(a)
    if kind == "meta":
        assert facts({n: t.detach().to("meta").requires_grad_(t.requires_grad) for n, t in a.items()}) == true
    else:
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(t) for n, t in a.items()}
            assert facts(fakes) == true
            assert attend(fakes)[0].device == a["q"].device


def test_explain_takes_meta_tensors_for_those_of_this_machine(device: torch.device) -> None:
    a = {n: t.detach() for n, t in draw(device).items()}
    chosen = regard.explain(**a).backend
    assert chosen == {"cpu": "cpu", "cuda": "portable"}[device.type]
    assert regard.explain(**{n: t.to("meta") for n, t in a.items()}).backend == chosen


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_small_tensors_may_have_any_strides(
    backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks and lengths that are columns of a table: a backend gets them without gaps."""
    device = torch.device("cpu") if backend == "cpu" else device
    plain = draw(device, packed=True)
    plain |= {n: torch.tensor([5, 6], dtype=torch.int32, device=device) for n in ("seqused_q", "seqused_k")}
    if regard.explain(**plain, backend=backend).backend is None:
        pytest.skip(f"{backend} does not serve here")
    strided = plain | {n: torch.stack([t, t + 9], 1)[:, 0] for n, t in plain.items() if t.dim() == 1}
    module, seen = dispatch.load(backend), []
    forward = module.forward

    def watched(problem: Problem, inputs: Inputs, results: dispatch.Results) -> None:
        seen.extend(inputs[3:])
        forward(problem, inputs, results)

    monkeypatch.setattr(module, "forward", watched)
    results = [regard.attention_varlen(**a, backend=backend) for a in (strided, plain)]
    assert len(seen) == 10
    assert all(t.is_contiguous() for t in seen)
    same(*results)
    same(*(torch.autograd.grad(out.sin().sum(), [plain[n] for n in NAMES]) for out in results))
