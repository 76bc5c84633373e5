"""How far a result may be from the truth.

The reference in float64 is the judge, the reference in the input's dtype (eager PyTorch) the
yardstick. A result may have twice eager's error, three times for gradients under softcap, plus a
rounding band. Both are compared twice: the largest error of an element in the tensor, and for each row
(the last dimension) the norm of its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.testing.judge import Heads, Results, attention
from regard.testing.scenarios import Case

# Eager's error in one row is a draw of luck: it can be 0 where an equally good result's is not. Each row
# is compared with eager's worst among 32 rows before to 32 after it (over 65 draws of a normal
# error the maximum lies at 2.4 sigma, and twice that is exceeded once in 10**6 rows).
NEIGHBOURS = 32


@dataclass
class Errors:
    """The worst error of each tensor as a multiple of eager's, and what is wrong whatever the size."""

    multiples: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, name: str, multiple: float) -> None:
        self.multiples[name] = max(multiple, self.multiples.get(name, 0.0))


def limit(case: Case, name: str) -> float:
    """How many times eager's error a result may have."""
    return 3.0 if case.options["softcap"] and name.startswith("d") else 2.0


def compare(
    case: Case, heads: Heads, got: Results, true: Results, eager: Results, exists: tuple[Tensor, Tensor]
) -> Errors:
    """Errors of some heads of a call. true and eager: the reference in float64 and in the call's dtype.

    exists: which rows of q and of k do. got may have more rows than true, which repeat the first ones.
    """
    errors = Errors()
    bands = _bands(case, heads, true)
    for name in Results._fields:
        mine, wanted, peer = (getattr(results, name) for results in (got, true, eager))
        if mine is None or wanted is None or peer is None:
            if (mine is None) != (wanted is None):
                errors.faults.append(f"{name} is {'missing' if mine is None else 'not expected'}")
            continue
        if name != "dsinks":
            rows = exists[1 if name in ("dk", "dv") else 0]
            nothing = float("-inf") if name == "lse" else 0.0
            if bool((mine[~rows] != nothing).any()):
                errors.faults.append(f"{name} is not {nothing} in a row that does not exist")
        band = bands[name]
        if mine.shape[0] != wanted.shape[0]:
            index = torch.arange(mine.shape[0], device=mine.device) % wanted.shape[0]
            wanted, peer = wanted[index], peer[index]
            band = band._replace(noise=None if band.noise is None else band.noise[index])
        multiple = _multiple(errors, name, mine.double(), wanted, peer.double(), band, limit(case, name))
        errors.note(name, multiple)
    return errors


class Band(NamedTuple):
    """What rounding may add to eager's error: a part of the row's scale, of every element, and of noise."""

    relative: float
    floor: float
    noise: Tensor | None = None


def _multiple(
    errors: Errors, name: str, mine: Tensor, true: Tensor, peer: Tensor, band: Band, factor: float
) -> float:
    """The worst error, by row and by element, as a multiple of eager's plus 1 / factor of the band."""
    finite = true.isfinite()
    if not torch.equal(mine.isfinite(), finite) or not torch.equal(mine[~finite], true[~finite]):
        at = (mine.isfinite() != finite).nonzero()
        where = f", first at {tuple(at[0].tolist())}" if len(at) else ""
        errors.faults.append(f"{name} is NaN or infinite, or is not, in {len(at)} wrong places{where}")
        return float("inf")
    if mine.numel() == 0:
        return 0.0
    zero = torch.zeros((), dtype=torch.float64, device=true.device)
    error, eager_error = (torch.where(finite, t - true, zero).abs() for t in (mine, peer))
    scale = torch.where(finite, true, zero).abs()
    noise = zero.expand_as(true) if band.noise is None else band.noise.double().abs()
    allowed = eager_error.max() + (band.relative * scale.max() + noise.max() + band.floor) / factor
    worst = _ratio(error.max(), allowed)
    floor = band.floor
    if error.dim() == 3:
        floor *= true.shape[-1] ** 0.5
        error, eager_error, scale, noise = (
            torch.linalg.vector_norm(t, dim=-1) for t in (error, eager_error, scale, noise)
        )
    near = _pooled(torch.nn.functional.max_pool1d, eager_error)
    around = torch.maximum(scale.flatten(), _rms(scale))
    allowed = near + (band.relative * around + _rms(noise) + floor) / factor
    return float(torch.maximum(worst, _ratio(error.flatten(), allowed).max()))


def _rms(t: Tensor) -> Tensor:
    """The root mean square over each row's neighbours."""
    return _pooled(torch.nn.functional.avg_pool1d, t.square(), count_include_pad=False).sqrt()


def _pooled(pool: Callable[..., Tensor], t: Tensor, **options: bool) -> Tensor:
    return pool(t.reshape(1, -1), 2 * NEIGHBOURS + 1, stride=1, padding=NEIGHBOURS, **options)[0]


def _ratio(error: Tensor, allowed: Tensor) -> Tensor:
    return torch.where(error == 0, error, error / allowed)


def _bands(case: Case, heads: Heads, true: Results) -> dict[str, Band]:
    """The rounding band of each tensor.

    With u the unit roundoff of the dtype and w that of what is accumulated in:
    - Storing a result costs one u, relative to it. (Rounding P and dS on the way costs more where terms
      cancel; eager does the same, so its error shows it.)
    - A probability recomputed from lse as exp(s - lse) has a relative error of w (|s| + |lse|). Eager's
      softmax has none in a row that sees one key.
    - The exponentials of PyTorch's CPU kernel are good to 2**-14 in half precision (5.3e-5, measured in the
      lse of 64 equal scores), well below u; lse, in float32, shows it where eager has no error at all.
    - dS = P (dP - delta) sums to 0 over a row, but delta = sum(dout * out) is summed in another order
      than dP, and sum(P) is not quite 1. So delta is as good as off by w (2 + |s| + |lse|) |dout| |out|.
      An error e of delta does what a gradient -e into lse would do: the judge says how much that is.
    - Below the dtype's smallest normal number the spacing is fixed: half of it is lost in storing.
    In float64 the judge is as rounded as what it judges, and the yardstick shows no error: four times as
    much is allowed.
    """
    info = torch.finfo(case.dtype)
    u = info.eps / 2
    w = torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps / 2
    if case.dtype == torch.float64:
        u, w = 4 * u, 4 * w
    scale = case.options["softmax_scale"] or heads.q.shape[-1] ** -0.5
    score = scale * _largest(_norms(heads.q)) * _largest(_norms(heads.k))
    if case.options["softcap"]:
        score = min(score, case.options["softcap"])
    lse = true.lse.nan_to_num(0.0, 0.0, 0.0).abs()
    exponent = w * (1 + score + _largest(lse))
    band = Band(u + exponent, info.smallest_normal * info.eps / 2)
    fast = 2.0**-14 if case.dtype.itemsize == 2 and heads.q.device.type == "cpu" else 0.0
    bands = dict.fromkeys(("out", "dv"), band) | {"lse": Band(0.0, exponent + fast)}
    noise = Results(*[None] * 6)  # type: ignore[arg-type]
    if heads.dout is not None and lse.numel():
        delta = w * (2 + score + lse) * _norms(heads.dout) * _norms(true.out)
        source = torch.Generator(lse.device).manual_seed(0)
        sign = torch.randint(0, 2, delta.shape, generator=source, device=lse.device) * 2 - 1
        noise = attention(case, heads._replace(dout=None, dlse=delta * sign), torch.float32)
    return bands | {name: band._replace(noise=getattr(noise, name)) for name in ("dq", "dk", "dsinks")}


def _norms(t: Tensor) -> Tensor:
    """The norm of each row, 0 for those with NaN (which do not exist)."""
    dtype = torch.promote_types(t.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(t, dim=-1, dtype=dtype)
    return norms.nan_to_num(0.0, 0.0)


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0
