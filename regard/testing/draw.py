"""How a scenario's tensors are drawn (what values) and laid out (where they lie in memory)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Shape = tuple[int, ...]


def gaussian(name: str, shape: Shape, source: Generator) -> Tensor:
    """Standard normal values, float32. The name (q, k, v, dout, dlse) does not matter."""
    return torch.randn(shape, generator=source, device=source.device)


def structured(name: str, shape: Shape, source: Generator) -> Tensor:
    """What activations look like: a mean that rows share, a channel in 64 far out, rows that repeat.

    Independent Gaussian values hide faults that cancel in a mean. Here each head has a mean vector of
    size 1 sigma; the outlying channels lie 10 (q, dout) or 30 (k, v) sigma off with one sign for all
    rows; of four rows the last repeats the first.
    """
    t = gaussian(name, shape, source)
    heads, d = shape[-2:]
    t += torch.randn((heads, d), generator=source, device=source.device)
    far = torch.arange(0, d, 64, device=t.device) if d > 1 else torch.arange(0, device=t.device)
    t[..., far] += 10.0 if name in ("q", "dout") else 30.0
    rows = t.flatten(0, -3)
    rows[3::4] = rows[: max(0, rows.shape[0] - 3) : 4].clone()
    return t


def outliers(name: str, shape: Shape, source: Generator) -> Tensor:
    """Gaussian, but a channel in 64 of k and v is 100 sigma wide: the softmax saturates."""
    t = gaussian(name, shape, source)
    if name in ("k", "v"):
        t[..., ::64] *= 100.0
    return t


def negative(name: str, shape: Shape, source: Generator) -> Tensor:
    """Every score lies near -200: q about +c, k about -c, where c² sqrt(d) = 200."""
    t = gaussian(name, shape, source)
    if name not in ("q", "k"):
        return t
    offset = math.sqrt(200.0 / math.sqrt(shape[-1]))
    return 0.1 * t + (offset if name == "q" else -offset)


def one_hot(name: str, shape: Shape, source: Generator) -> Tensor:
    """Scores 0 and v[j] the j-th unit vector: out is the mask itself, each row divided by its count."""
    if name in ("q", "k"):
        return torch.zeros(shape, device=source.device)
    if name == "v":
        eye = torch.eye(shape[-3], shape[-1], device=source.device)
        return eye[:, None, :].expand(shape).clone()
    return gaussian(name, shape, source)


Kind = Callable[[str, Shape, Generator], Tensor]
KINDS: dict[str, Kind] = {
    f.__name__.replace("_", "-"): f for f in (gaussian, structured, outliers, negative, one_hot)
}


def existing(rows: Shape, cu: Tensor | None, used: Tensor | None) -> Tensor | None:
    """Which rows exist, bool of shape (b, s) or (rows,); None when all do."""
    if cu is None and used is None:
        return None
    if cu is None:
        assert used is not None
        return torch.arange(rows[1], device=used.device) < used[:, None]
    index = torch.arange(rows[0], device=cu.device)
    ends = cu[1:] if used is None else cu[:-1] + used
    return ((index[:, None] >= cu[:-1]) & (index[:, None] < ends)).any(1)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same values, placed as the layout says. t is contiguous, (b, s, h, d) or packed (rows, h, d).

    plain: contiguous. heads-first: heads outside rows, (b, h, s, d) or (h, rows, d) in memory.
    rows-first: (s, b, h, d), whose batch stride is smaller than its row stride. heads-outermost:
    (h, s, b, d). slice: the first d of d + 3 channels. offset: one element off. shared: one batch
    element (packed: one row) stands for all, with stride 0. far: more than 2**31 elements from the first
    batch element (packed: row) to the last. For an arriving gradient also three whose last stride is not
    1: every-other ([..., ::2]), transposed, and expanded (every element is the same one).
    """
    return LAYOUTS[layout](t)


def _permuted(*order: int) -> Callable[[Tensor], Tensor]:
    """Memory order of the dense dimensions (b, s, h, d); a packed tensor has no b and ignores it."""

    def place(t: Tensor) -> Tensor:
        dims = [i - (4 - t.dim()) for i in order if i >= 4 - t.dim()]
        inverse = [dims.index(i) for i in range(t.dim())]
        return t.permute(dims).contiguous().permute(inverse)

    return place


def _slice(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t, (0, 3), value=float("nan"))[..., : t.shape[-1]]


def _offset(t: Tensor) -> Tensor:
    buffer = t.new_full((t.numel() + 1,), float("nan"))
    buffer[1:] = t.flatten()
    return buffer[1:].view(t.shape)


def _every_other(t: Tensor) -> Tensor:
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"))
    wide[..., ::2] = t
    return wide[..., ::2]


def _expanded(t: Tensor) -> Tensor:
    return t.flatten()[:1].view([1] * t.dim()).expand(t.shape) if t.numel() else t


def _shared(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape) if t.shape[0] else t


def _far(t: Tensor) -> Tensor:
    step = 2**31 // max(1, t.shape[0] - 1) + 64
    strides = (max(step, t[0].numel()), *t[0].contiguous().stride())
    buffer = t.new_empty(strides[0] * (t.shape[0] - 1) + t[0].numel())
    return buffer.as_strided(t.shape, strides).copy_(t)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": Tensor.contiguous,
    "heads-first": _permuted(0, 2, 1, 3),
    "rows-first": _permuted(1, 0, 2, 3),
    "heads-outermost": _permuted(2, 1, 0, 3),
    "transposed": _permuted(0, 1, 3, 2),
    "slice": _slice,
    "offset": _offset,
    "every-other": _every_other,
    "expanded": _expanded,
    "shared": _shared,
    "far": _far,
}
