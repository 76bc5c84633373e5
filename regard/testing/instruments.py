"""Memory that tells: fresh tensors full of NaN, fences around every tensor, and a GPU kept busy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from regard.problem import Inputs

FENCE = 67  # elements on each side, odd so that a fenced tensor is not aligned
WILD = 2**30  # what lies beside integers: a row number that leads far outside any tensor


def poison(t: Tensor) -> Tensor:
    """Fill with NaN, or with a wild number where there is no NaN."""
    return t.fill_(float("nan") if t.is_floating_point() else WILD if t.dtype.itemsize >= 4 else 1)


def poison_free_memory(device: torch.device, size: int = 2**28) -> None:
    """Leave NaN in the memory that PyTorch's CUDA allocator hands out next. Nothing to do on a CPU."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        poison(torch.empty(min(size, free // 2) // 4, device=device))
        small = [poison(torch.empty(2**n, device=device)) for n in range(6, 19) for _ in range(8)]
        del small


class Arena:
    """Memory in which each tensor lies between fences; `broken` names the fences that were written to.

    Within `allocating()` every tensor that Python code allocates (torch.empty and its kin) comes from
    the arena too, full of NaN. shift moves every tensor by that many elements.
    """

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift
        self._kept: list[tuple[str, Tensor, Tensor]] = []  # name, buffer, what it must still hold
        self._fresh: list[tuple[str, Tensor, int, int]] = []  # name, buffer, where the tensor is

    def place(self, name: str, t: Tensor | None) -> Tensor | None:
        """A copy of t with its strides, in a fenced buffer of which nothing may change."""
        if t is None:
            return None
        span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
        buffer, start = self._buffer(t, span)
        placed = buffer.as_strided(t.shape, t.stride(), start)
        # Overlapping (expanded) tensors cannot be written whole; each element of theirs once is enough.
        once = [slice(0, 1) if s == 0 else slice(None) for s in t.stride()]
        placed[tuple(once)].copy_(t[tuple(once)])
        self._kept.append((name, buffer, buffer.clone()))
        return placed

    def fresh(self, name: str, t: Tensor) -> Tensor:
        """A dense uninitialised tensor like t, whose fences may not change."""
        buffer, start = self._buffer(t, t.numel())
        self._fresh.append((name, buffer, start, start + t.numel()))
        return buffer.as_strided(t.shape, t.stride(), start)

    def broken(self) -> list[str]:
        """The tensors outside which, or (for inputs) in which, something was written."""
        names = [name for name, now, then in self._kept if not _same_bits(now, then)]
        for name, buffer, start, end in self._fresh:
            outside = torch.cat([buffer[:start], buffer[end:]])
            if not _same_bits(outside, poison(torch.empty_like(outside))):
                names.append(name)
        return names

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        with _allocations(lambda name, t: self.fresh(name, t) if _is_dense(t) else poison(t)):
            yield

    def _buffer(self, t: Tensor, span: int) -> tuple[Tensor, int]:
        start = FENCE + self.shift
        return poison(t.new_empty(start + span + FENCE)), start


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every tensor that Python code allocates inside (torch.empty and its kin) is full of NaN."""
    with _allocations(lambda _, t: poison(t)):
        yield


@contextlib.contextmanager
def _allocations(take: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Hand every newly allocated, uninitialised tensor to `take`, and use what it returns."""

    def wrap(name: str, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            t = allocate(*args, **kwargs)
            return t if t.is_meta or inside else guarded(name, t)

        return allocated

    inside: list[bool] = []

    def guarded(name: str, t: Tensor) -> Tensor:
        inside.append(True)  # `take` allocates too
        try:
            return take(f"{name}{tuple(t.shape)}", t)
        finally:
            inside.pop()

    with contextlib.ExitStack() as stack:
        for owner, name in _ALLOCATORS:
            stack.enter_context(mock.patch.object(owner, name, wrap(name, getattr(owner, name))))
        yield


_ALLOCATORS = [
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
]


@contextlib.contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Keep a second CUDA stream at work, so that blocks of a kernel finish in another order each run."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    a = torch.randn(1024, 1024, device=device)
    with torch.cuda.stream(stream):
        for _ in range(200):
            a = torch.tanh(a @ a)
    yield
    stream.synchronize()


def place_inputs(arena: Arena, inputs: Inputs) -> Inputs:
    return Inputs(*(arena.place(name, t) for name, t in zip(Inputs._fields, inputs, strict=True)))  # type: ignore[arg-type]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors hold the same bits, NaN and signs of zero included."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and _same_bits(a.contiguous(), b.contiguous())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return torch.equal(a.view(as_integers), b.view(as_integers))


def _is_dense(t: Tensor) -> bool:
    return (
        t.numel() == 0 or 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) == t.numel()
    )
