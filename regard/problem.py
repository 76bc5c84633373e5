"""One attention call, described and validated: the only place that refuses input.

`describe` turns the public arguments into a `Problem` (what is asked for, no tensors) and `Inputs`
(the tensors). Everything that can be known from shapes, dtypes, devices and Python values is checked
here; `check_values` looks at the numbers inside cu_seqlens and seqused where they lie on the CPU.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_HEAD_DIM = 512
SMALLEST, LARGEST = 1e-37, 1e38  # what float32 holds, and still holds times log2(e)
MAX_WINDOW = 2**62  # wider than any tensor is long, and an operator's integers have 64 bits


class Inputs(NamedTuple):
    """The tensors of one call. Dense: q (b, sq, hq, d), k (b, sk, hk, d), v (b, sk, hk, dv).
    Packed: q (total_q, hq, d), k (total_k, hk, d), v (total_k, hk, dv) with cu_seqlens (n + 1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """What one call asks for. A backend's `supports` decides from this alone.

    seqlen_q and seqlen_k are lengths of one sequence when dense, totals of rows when packed. The
    causal mask is window_right = 0; None means unlimited. softcap 0.0 means off.
    """

    device: torch.device
    dtype: torch.dtype
    packed: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    has_sinks: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    deterministic: bool = False
    arch: int | None = None  # compute capability as 90 for 9.0; None: ask the device

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads_q // self.heads_k

    @property
    def capability(self) -> int:
        """Compute capability of the CUDA device as a number (90 for 9.0), 0 on other devices."""
        if self.arch is not None:
            return self.arch
        return _capability(self.device) if self.device.type == "cuda" else 0

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return (self.heads_q, self.seqlen_q)
        return (self.batch, self.heads_q, self.seqlen_q)


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def build(
    inputs: Inputs,
    softmax_scale: float,
    softcap: float,
    window_left: int | None,
    window_right: int | None,
    deterministic: bool,
) -> Problem:
    """The Problem of inputs that `describe` has already passed. Checks nothing."""
    q, k, v = inputs.q, inputs.k, inputs.v
    seqlen_q, heads_q, head_dim = q.shape[-3:]
    seqlen_k, heads_k, _ = k.shape[-3:]
    packed = inputs.cu_seqlens_q is not None
    return Problem(
        device=q.device,
        dtype=q.dtype,
        packed=packed,
        batch=inputs.cu_seqlens_q.shape[0] - 1 if inputs.cu_seqlens_q is not None else q.shape[0],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        has_sinks=inputs.sinks is not None,
        has_seqused_q=inputs.seqused_q is not None,
        has_seqused_k=inputs.seqused_k is not None,
        deterministic=deterministic,
    )


def describe(
    inputs: Inputs,
    *,
    packed: bool,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softmax_scale: float | None,
    softcap: float | None,
    deterministic: bool,
) -> Problem:
    """Validate one call and describe it.

    Raises TypeError for an argument of the wrong kind (not a tensor, a dtype that is not served, mixed
    dtypes) and ValueError for a wrong shape, stride, device or number. The message names the argument,
    what came and what was expected.
    """
    _check_qkv(inputs, packed)
    _check_index_tensors(inputs, packed)
    _check_sinks(inputs)
    _check_flag("causal", causal)
    _check_flag("deterministic", deterministic)
    left, right = _window(window_size)
    if causal:
        right = 0  # composes by and: no window_right >= 0 is narrower
    head_dim = inputs.q.shape[-1]
    return build(
        inputs,
        _positive("softmax_scale", softmax_scale, default=head_dim**-0.5),
        _positive("softcap", softcap, default=0.0, zero_is_off=True),
        left,
        right,
        deterministic,
    )


def _refuse(error: type[Exception], name: str, got: object, expected: str, hint: str = "") -> NoReturn:
    raise error(f"{name}: expected {expected}, got {got}{'; ' + hint if hint else ''}")


def _check_qkv(inputs: Inputs, packed: bool) -> None:
    q = inputs.q
    rank, layout = (3, "(total, heads, head_dim)") if packed else (4, "(batch, seqlen, heads, head_dim)")
    for name, t in (("q", q), ("k", inputs.k), ("v", inputs.v)):
        if not isinstance(t, Tensor):
            _refuse(TypeError, name, f"{type(t).__name__}", "a torch.Tensor")
        if t.layout != torch.strided or t.is_nested:
            got = "a nested tensor" if t.is_nested else f"layout {t.layout}"
            _refuse(TypeError, name, got, "a dense strided tensor")
        shape = t.shape
        if len(shape) != rank:
            hint = (
                "packed input goes through attention_varlen"
                if not packed
                else "dense input goes through attention"
            )
            _refuse(ValueError, name, f"shape {tuple(shape)}", f"{rank} dimensions {layout}", hint)
        if t.dtype not in DTYPES:
            _refuse(TypeError, name, t.dtype, "float16, bfloat16, float32 or float64")
        if t.dtype != q.dtype:
            _refuse(TypeError, name, t.dtype, f"q's dtype {q.dtype}", "cast q, k and v to one dtype")
        if t.device != q.device:
            _refuse(ValueError, name, f"device {t.device}", f"q's device {q.device}")
        if shape[-1] < 1 or shape[-1] > MAX_HEAD_DIM:
            _refuse(ValueError, name, f"head dim {shape[-1]}", f"a head dim of 1 to {MAX_HEAD_DIM}")
        if shape[-2] < 1:
            _refuse(ValueError, name, f"shape {tuple(shape)}", "at least one head")
        if t.stride(-1) != 1 and shape[-1] > 1 and t.numel() > 0:
            _refuse(
                ValueError,
                name,
                f"strides {t.stride()}",
                "a last dimension of stride 1",
                f"pass {name}.contiguous()",
            )
    k, v = inputs.k, inputs.v
    if k.shape[-1] != q.shape[-1]:
        _refuse(ValueError, "k", f"head dim {k.shape[-1]}", f"q's head dim {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        _refuse(
            ValueError,
            "v",
            f"shape {tuple(v.shape)}",
            f"k's shape {tuple(k.shape)} in all but the last dimension",
        )
    if q.shape[-2] % k.shape[-2] != 0:
        _refuse(
            ValueError,
            "k",
            f"{k.shape[-2]} heads for {q.shape[-2]} query heads",
            "a number of key heads that divides q's heads",
        )
    if not packed and k.shape[0] != q.shape[0]:
        _refuse(ValueError, "k", f"batch {k.shape[0]}", f"q's batch {q.shape[0]}")


def _check_index_tensors(inputs: Inputs, packed: bool) -> None:
    if packed:
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            _check_int32(name, getattr(inputs, name), inputs.q.device)
        cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        assert cu_q is not None  # _check_int32 has refused None
        assert cu_k is not None
        if cu_q.shape[0] < 1:
            _refuse(ValueError, "cu_seqlens_q", "0 entries", "n + 1 entries for n sequences")
        if cu_k.shape[0] != cu_q.shape[0]:
            _refuse(ValueError, "cu_seqlens_k", f"{cu_k.shape[0]} entries", f"cu_seqlens_q's {cu_q.shape[0]}")
        sequences = cu_q.shape[0] - 1
    else:
        sequences = inputs.q.shape[0]
    for name in ("seqused_q", "seqused_k"):
        t = getattr(inputs, name)
        if t is not None:
            _check_int32(name, t, inputs.q.device)
            if t.shape[0] != sequences:
                _refuse(ValueError, name, f"shape {tuple(t.shape)}", f"shape ({sequences},), one a sequence")


def _check_int32(name: str, t: Any, device: torch.device) -> None:
    if not isinstance(t, Tensor):
        _refuse(TypeError, name, type(t).__name__, "a torch.int32 tensor")
    if t.dtype != torch.int32:
        _refuse(TypeError, name, t.dtype, "torch.int32", f"pass {name}.to(torch.int32)")
    if t.dim() != 1:
        _refuse(ValueError, name, f"shape {tuple(t.shape)}", "1 dimension")
    if t.device != device:
        _refuse(ValueError, name, f"device {t.device}", f"q's device {device}")


def _check_sinks(inputs: Inputs) -> None:
    sinks, heads = inputs.sinks, inputs.q.shape[-2]
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        _refuse(TypeError, "sinks", type(sinks).__name__, "a torch.Tensor")
    if sinks.dtype not in DTYPES:
        _refuse(TypeError, "sinks", sinks.dtype, "a floating dtype")
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        _refuse(ValueError, "sinks", f"shape {tuple(sinks.shape)}", f"shape ({heads},), one a query head")
    if sinks.device != inputs.q.device:
        _refuse(ValueError, "sinks", f"device {sinks.device}", f"q's device {inputs.q.device}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(TypeError, name, repr(value), "True or False")


def _window(window_size: Any) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        _refuse(TypeError, "window_size", repr(window_size), "a pair (left, right)")
    return _window_side(window_size, 0), _window_side(window_size, 1)


def _window_side(window_size: Any, index: int) -> int | None:
    side = window_size[index]
    if side is None:
        return None
    if not _is_integer(side):
        _refuse(TypeError, "window_size", repr(window_size), "integers or None")
    side = operator.index(side)
    if side < 0:
        _refuse(ValueError, "window_size", repr(window_size), "numbers of keys >= 0", "None means unlimited")
    return min(side, MAX_WINDOW)


def _is_integer(value: Any) -> bool:
    # int first: torch.compile cannot ask a number that it keeps symbolic for its attributes.
    return not isinstance(value, (bool, float)) and (isinstance(value, int) or hasattr(value, "__index__"))


def _positive(name: str, value: Any, *, default: float, zero_is_off: bool = False) -> float:
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) or hasattr(value, "__float__")  # in this order: _is_integer
    if isinstance(value, (bool, Tensor)) or not is_number:
        _refuse(TypeError, name, type(value).__name__, "a Python number or None")
    number = float(value)
    if zero_is_off and number == 0:
        return 0.0
    if not 0 < number < math.inf:  # NaN fails both
        _refuse(ValueError, name, number, "a finite number > 0", "None means the default")
    if not SMALLEST <= number <= LARGEST:
        _refuse(ValueError, name, number, f"a number from {SMALLEST} to {LARGEST}")
    return number


def check_hint(name: str, value: Any) -> None:
    """max_seqlen_q and max_seqlen_k are accepted as hints: checked, never needed."""
    if value is not None and not _is_integer(value):
        _refuse(TypeError, name, repr(value), "an integer or None")


def check_values(problem: Problem, inputs: Inputs) -> None:
    """Refuse lengths that do not fit, where reading them costs no device sync (CPU tensors)."""
    if problem.device.type != "cpu":
        return
    for side, rows in (("q", problem.seqlen_q), ("k", problem.seqlen_k)):
        cu = inputs.cu_seqlens_q if side == "q" else inputs.cu_seqlens_k
        used = inputs.seqused_q if side == "q" else inputs.seqused_k
        if cu is None and used is None:
            continue
        room = torch.full((problem.batch,), rows, dtype=torch.int64)
        if cu is not None:
            name = f"cu_seqlens_{side}"
            if int(cu[0]) < 0:
                _refuse(ValueError, name, f"first entry {int(cu[0])}", "a first entry >= 0")
            if int(cu[-1]) > rows:
                _refuse(ValueError, name, f"last entry {int(cu[-1])}", f"at most {side}'s {rows} rows")
            room = cu.long().diff()
            if bool((room < 0).any()):
                at = int((room < 0).nonzero()[0])
                _refuse(ValueError, name, f"{cu[at : at + 2].tolist()} at entry {at}", "rising entries")
        if used is not None and bool(((used < 0) | (used > room)).any()):
            at = int(((used < 0) | (used > room)).nonzero()[0])
            _refuse(
                ValueError,
                f"seqused_{side}",
                f"{int(used[at])} for sequence {at}",
                f"0 to its {int(room[at])} rows",
            )
