"""Which design is the highest where: the upper envelope of a certificate's converses, exactly.

Before its positive part is taken, every design is a convex decreasing function of the leakage γ in bits,

    A · 2^{−κ γ} + B − c γ:        a block has κ = 2/k, B = −ν², c = 0;  a replica design A = 0, B its intercept.

The difference of two of them has at most one extremum, which is known in closed form, hence at most two zeros, one on
either side of it. Between neighbouring zeros of all pairs the order of the designs does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from opacus_reconbound.certificates.designs import BlockDesign, Design
from opacus_reconbound.units import bits_to_nats

__all__ = ["Winner", "winners"]

_LN2 = bits_to_nats(1.0)
_MOST_EXPONENT = 1000.0  # as in BlockDesign: more is a corrupt entropy
_FARTHEST = 1e300  # bits


@dataclass(frozen=True, kw_only=True)
class Winner:
    """A range of leakages in which one design gives the bound.

    Attributes:
        start_bits: where the range begins, in bits.
        stop_bits: where it ends: the next design takes over, or, in the last range, the bound reaches zero.
        position: of the design in the certificate.
        design: the design.
    """

    start_bits: float
    stop_bits: float
    position: int
    design: Design


@dataclass(frozen=True)
class _Curve:
    """A · 2^{−κ γ} + B − c γ, γ in bits."""

    amplitude: float
    rate: float
    offset: float
    slope: float

    @classmethod
    def of(cls, design: Design) -> _Curve:
        if isinstance(design, BlockDesign):
            exponent = min(2.0 * design.entropy_bits / design.block_size, _MOST_EXPONENT)
            amplitude = design.block_size / (2.0 * math.pi * math.e) * 2.0**exponent
            return cls(amplitude, 2.0 / design.block_size, -design.dither, 0.0)
        return cls(0.0, 0.0, design.intercept, bits_to_nats(design.slope))

    def __call__(self, bits: float) -> float:
        return self.amplitude * math.pow(2.0, -self.rate * bits) + self.offset - self.slope * bits

    def many(self, bits: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(self.amplitude * np.exp2(-self.rate * bits) + self.offset - self.slope * bits)


def winners(designs: Sequence[Design]) -> tuple[Winner, ...]:
    """The ranges of leakage, from 0 on and without a gap, in which each design gives the largest distortion.

    Args:
        designs: the converses of a certificate.

    Returns:
        The ranges in order; the last one ends where nothing is guaranteed any more. Empty if nothing is guaranteed
        at any leakage. Where two designs are equal, the first one counts.
    """
    alive = [(position, _Curve.of(design)) for position, design in enumerate(designs)]
    alive = [(position, curve) for position, curve in alive if curve(0.0) > 0.0]
    end = min(_FARTHEST, max((designs[position].leakage_bits(0.0) for position, _ in alive), default=0.0))
    if end <= 0.0:
        return ()
    crossings = [0.0, end]
    for number, (_, first) in enumerate(alive):
        for _, second in alive[:number]:
            crossings += _zeros(first, second, end)
    points = np.unique(np.array([bits for bits in crossings if 0.0 <= bits <= end]))
    apart = points[1:-1][np.diff(points[:-1]) > 1e-12 * (1.0 + points[1:-1])]  # zeros of many pairs may coincide
    points = np.concatenate([[0.0], apart, [end]])
    middles = 0.5 * (points[:-1] + points[1:])
    with np.errstate(over="ignore"):
        heights = np.stack([curve.many(middles) for _, curve in alive])
    best = heights.argmax(axis=0)
    found: list[Winner] = []
    for start, stop, row in zip(points[:-1].tolist(), points[1:].tolist(), best.tolist(), strict=True):
        position = alive[row][0]
        if found and found[-1].position == position:
            start = found.pop().start_bits
        found.append(Winner(start_bits=start, stop_bits=stop, position=position, design=designs[position]))
    return tuple(found)


def _zeros(first: _Curve, second: _Curve, end: float) -> list[float]:
    """Where two curves cross in (0, end)."""
    if first.amplitude == second.amplitude == 0.0:
        slope = first.slope - second.slope
        return [(first.offset - second.offset) / slope] if slope else []

    def difference(bits: float) -> float:
        return first(bits) - second(bits)

    edges = [0.0, end]
    extremum = _extremum(first, second)
    if extremum is not None and 0.0 < extremum < end:
        edges.insert(1, extremum)
    zeros = []
    for left, right in pairwise(edges):
        if difference(left) * difference(right) < 0.0:
            zeros.append(float(brentq(difference, left, right, xtol=1e-13, rtol=1e-14, maxiter=5_000)))
    return zeros


def _extremum(first: _Curve, second: _Curve) -> float | None:
    """Where the difference of two curves, not both straight, is stationary."""
    if first.amplitude and second.amplitude:
        if first.rate == second.rate:
            return None
        steepness = (math.log(first.amplitude) + math.log(first.rate)) - (
            math.log(second.amplitude) + math.log(second.rate)
        )
        return steepness / (_LN2 * (first.rate - second.rate))
    curved, straight = (first, second) if first.amplitude else (second, first)
    if straight.slope <= 0.0:
        return None
    steepness = math.log(curved.amplitude) + math.log(_LN2 * curved.rate) - math.log(straight.slope)
    return steepness / (_LN2 * curved.rate)
