"""Gaussian mixtures with equal weights: their log density, and the information density of dithered centres.

The work is (draws × centres) exponentials. A tile of exponents comes from one matrix product, −‖y − c‖²/(2s²)
written as an inner product of k + 2 coordinates; it is exponentiated in place and summed along its rows. Exponents
are kept to base 2: PyTorch's ``exp2`` on a CPU takes a quarter of the time of its ``exp``, and a hundredth where the
result underflows. A tile is float32 for float32 centres (float64 for float64 centres); sums over tiles are float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from opacus_reconbound import _validate
from opacus_reconbound.certificates.devices import float64_device, to_float64
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = ["CHUNK", "InformationDensity", "information_density", "log_mixture"]

CHUNK = 2**22
"""Default number of exponents in memory at once."""

_SLAB = 2**14  # centres prepared at once, and the width of a tile off the CPU
_WIDE, _NARROW = 4096, 512  # the width of a tile on a CPU, with few draws and with many: the fastest measured
_MANY = 256
_SUM_ULPS = 256.0  # exp and one float32 row sum of a tile, in units of the roundoff; both are far below it
_NEGLIGIBLE = 40.0  # nats: n e^{−40} of a mixture is nothing beside the draw's own centre


@dataclass(frozen=True, eq=False, kw_only=True)
class InformationDensity:
    """The information density of each draw and a bound on the arithmetic's error in it.

    Attributes:
        nats: ι, shape (N,), float64.
        error_nats: a bound on |computed ι − exact ι|, shape (N,), float64.
    """

    nats: torch.Tensor
    error_nats: torch.Tensor


def log_mixture(
    draws: torch.Tensor,
    centres: torch.Tensor,
    scale: float | torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Return ln[(1/n) Σ_j exp(−‖y − c_j‖²/(2s²))] for each draw y.

    With roundoff u (2⁻²⁴ for float32 centres) the error is at most
    u [(k + 6)((|y| + |c|)²/(2s²) + |offset|) + 256] nats, lengths taken from the mean of the centres, c the centres
    that matter to y.

    Args:
        draws: y, shape (N, k).
        centres: c_j, shape (n, k); their dtype is that of the tiles.
        scale: s, a number or one for each draw, shape (N,).
        offsets: a guess of each result plus ln n, shape (N,), such as the exponent of the draw's own centre; it saves
            a sweep. A bad guess costs time, not accuracy. None: the largest exponent, found in a first sweep.
        chunk: exponents in memory at once.

    Returns:
        Natural logarithms, shape (N,), float64, on the device of ``centres``, or on the host if it has no float64.

    Raises:
        InvalidValueError: if the shapes do not fit or a scale is not positive.
    """
    chunk = _validate.integer("chunk", chunk, minimum=1)
    if draws.ndim != 2 or centres.ndim != 2 or draws.shape[1] != centres.shape[1] or centres.shape[0] < 1:
        raise InvalidValueError(
            "Expected draws of shape (N, k) and centres of shape (n, k) with n >= 1. "
            f"Found {tuple(draws.shape)} and {tuple(centres.shape)}."
        )
    home = float64_device(centres.device)
    s = torch.as_tensor(scale, dtype=torch.float64).to(home).expand(draws.shape[0])
    if not bool((s > 0).all()):
        raise InvalidValueError("Expected scale > 0. Found a scale that is zero, negative or NaN.")
    with torch.no_grad(), torch.autocast(centres.device.type, enabled=False):
        y = draws.to(device=home, dtype=torch.float64)
        if offsets is None:
            guess = _Sweep(y, centres, s, torch.zeros_like(s), chunk).largest()
        else:
            guess = offsets.to(device=home, dtype=torch.float64)
        sums = _Sweep(y, centres, s, guess, chunk).sums()
        result = guess + sums.log() - math.log(len(centres))
        failed = ~(torch.isfinite(sums) & (sums > 0.0))
        if offsets is not None and bool(failed.any()):
            result[failed] = log_mixture(y[failed], centres, s[failed], chunk=chunk)
        return result


def information_density(
    centres: torch.Tensor,
    index: torch.Tensor,
    noise: torch.Tensor,
    scale: float | torch.Tensor,
    *,
    chunk: int = CHUNK,
) -> InformationDensity:
    """ι = ln[φ_s(w) / f̂(c_J + w)], f̂ = (1/n) Σ_j N(c_j, s² I), for each draw (J, w).

    For J uniform and w ~ N(0, s² I) its mean is h(f̂) − h(w), in nats. It is at most ln n.

    Args:
        centres: c_j, shape (n, k).
        index: J, shape (N,), integers.
        noise: w/s, standard normal, shape (N, k).
        scale: s, a number or one for each draw, shape (N,).
        chunk: exponents in memory at once.

    Returns:
        ι and the arithmetic's error, on the device of :func:`log_mixture`. The error bound is that of a float inner
        product of k + 2 rounded factors, over the centres whose weight is not below e^{−40} of the draw's own.
    """
    home = float64_device(centres.device)
    s = torch.as_tensor(scale, dtype=torch.float64).to(home).expand(noise.shape[0])
    w = noise.to(device=home, dtype=torch.float64)
    own = to_float64(centres[index.to(centres.device)])
    draws = torch.addcmul(own, w, s[:, None])
    half_square = 0.5 * w.square().sum(1)
    nats = -half_square - log_mixture(draws, centres, s, offsets=-half_square, chunk=chunk)

    roundoff = 0.5 * torch.finfo(_tile_dtype(centres)).eps
    length = (draws - _mean(centres)).norm(dim=1) / s
    reach = 2.0 * length + (2.0 * (half_square + _NEGLIGIBLE)).sqrt()
    size = 0.5 * reach.square() + half_square
    error = roundoff * ((centres.shape[1] + 6.0) * size + _SUM_ULPS)
    return InformationDensity(nats=nats, error_nats=error)


class _Sweep:
    """All exponents −‖y − c_j‖²/(2s²) − offset, to base 2, a tile at a time."""

    def __init__(
        self, y: torch.Tensor, centres: torch.Tensor, s: torch.Tensor, offsets: torch.Tensor, chunk: int
    ) -> None:
        self._centres = centres
        self._mean = _mean(centres)
        self._dtype = _tile_dtype(centres)
        width = (_NARROW if len(y) >= _MANY else _WIDE) if centres.device.type == "cpu" else _SLAB
        self._columns = min(width, chunk, len(centres))
        self._rows = max(1, min(chunk // self._columns, len(y)))
        y = y - self._mean
        inverse = s.square().reciprocal()
        last = -0.5 * inverse * y.square().sum(1) - offsets
        left = torch.cat([y * inverse[:, None], -0.5 * inverse[:, None], last[:, None]], 1)
        self._left = (left * nats_to_bits(1.0)).to(self._dtype).to(centres.device)

    def sums(self) -> torch.Tensor:
        """Σ_j 2^exponent, shape (N,), float64."""
        total = torch.zeros(len(self._left), dtype=torch.float64, device=self._mean.device)
        for rows, tile in self._tiles():
            total[rows] += to_float64(tile.exp2_().sum(1))
        return total

    def largest(self) -> torch.Tensor:
        """max_j exponent in nats, shape (N,), float64."""
        best = torch.full((len(self._left),), -math.inf, dtype=torch.float64, device=self._mean.device)
        for rows, tile in self._tiles():
            best[rows] = torch.maximum(best[rows], to_float64(tile.amax(1)))
        return best / nats_to_bits(1.0)

    def _tiles(self) -> Iterator[tuple[slice, torch.Tensor]]:
        memory = torch.empty(self._rows * self._columns, dtype=self._dtype, device=self._centres.device)
        for start in range(0, len(self._centres), _SLAB):
            c = to_float64(self._centres[start : start + _SLAB]) - self._mean
            slab = torch.cat([c.T, c.square().sum(1)[None], torch.ones_like(c[None, :, 0])])
            slab = slab.to(self._dtype).to(self._centres.device)
            for column in range(0, slab.shape[1], self._columns):
                right = slab[:, column : column + self._columns].contiguous()
                width = right.shape[1]
                for row in range(0, len(self._left), self._rows):
                    rows = slice(row, min(row + self._rows, len(self._left)))
                    left = self._left[rows]
                    tile = memory[: len(left) * width].view(len(left), width)
                    yield rows, torch.mm(left, right, out=tile)


def _mean(centres: torch.Tensor) -> torch.Tensor:
    """The mean of the centres in float64, where float64 exists."""
    return to_float64(centres).mean(0)


def _tile_dtype(centres: torch.Tensor) -> torch.dtype:
    """float32, unless the centres are float64 or matrix products of float32 are set to a lower precision."""
    return torch.float64 if centres.dtype == torch.float64 or _products_are_rounded() else torch.float32


def _products_are_rounded() -> bool:
    """Whether this process lets float32 matrix products run in tf32 or bf16; their errors would not be certified."""
    try:
        if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
            return True
    except RuntimeError:  # PyTorch refuses to answer when the old and the new setting disagree
        return True
    settings = (torch.backends, torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return any(getattr(setting, "fp32_precision", "none") not in ("none", "ieee") for setting in settings)
