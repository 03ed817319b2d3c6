"""The squared error of unbiased attacks, from the Rényi divergence of order 2, and what 'unbiased' excludes.

Theorem (Guo et al. 2022; their deployable form, as the paper's Appendix A quotes it): if the output is (2, ε)-RDP for
replacing the record, every unbiased attack on a record in a box has

    MSE >= Σ_i diam_i² / (4 d (e^ε − 1))        per coordinate, diam_i the range of coordinate i.

Derivation. For an unbiased ẑ and any two records z, z' of the box, Cauchy and Schwarz give
(z_i − z'_i)² <= Var_z(ẑ_i) χ²(P_z' ‖ P_z), and χ² = e^{D_2} − 1 <= e^ε − 1. From every z some z' is diam_i/2 away in
coordinate i.

Replacing moves the clipped gradient by up to 2 clipping norms, so ε is not Opacus's, which is for adding or removing.
For a step with q and s = 1/σ², with P = (1−q) N(0) + q N(g), P' the same with g', and |g|, |g'| <= 1,

    χ²(P' ‖ P) = q² ∫ (N(g') − N(g))²/P <= min( q²/(1−q) a,  q² [(1−q) a + q b] ),   a = 4 sinh s,   b = e^{4s} − 1,

because 1/P <= 1/((1−q) N(0)) and, 1/x being convex, 1/P <= (1−q)/N(0) + q/N(g); ∫ (N(g') − N(g))²/N(0) =
e^{s|g'|²} + e^{s|g|²} − 2 e^{s g·g'} <= a, and ∫ (N(g') − N(g))²/N(g) <= b. At q = 1 this is D_2 = 4/σ², exactly. Steps
add up: ε = Σ ln(1 + χ²_t).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError
from opacus_reconbound.leakage import Schedule, realised_sample_rate

__all__ = ["midpoint_error", "replacement_rdp", "unbiased_error_by_rdp"]


def replacement_rdp(schedule: Schedule) -> float:
    """ε, an upper bound on the Rényi divergence of order 2 between trainings with one record replaced.

    Charged at the inclusion probability that Opacus's sampler realises.

    Returns:
        Nats, rounded up.
    """
    total = 0.0
    for run in schedule:
        if run.sample_rate == 0.0 or run.noise_multiplier == math.inf:
            continue
        q = realised_sample_rate(run.sample_rate)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            s = np.float64(run.noise_multiplier) ** -2.0
            near, far = 4.0 * np.sinh(s), np.expm1(4.0 * s)
            ways = () if q == 1.0 else (q * q / (1.0 - q) * near, q * q * ((1.0 - q) * near + q * far))
        total += run.steps * (math.log1p(float(min(ways))) if ways else float(4.0 * s))
    return total * (1.0 + 1e-12)


def unbiased_error_by_rdp(schedule: Schedule, peak: float) -> float:
    """A lower bound on the mean squared error per coordinate of every attack that is unbiased on a box.

    It says nothing of attacks that use knowledge of the source, nor even of one that clips its guess to the box: see
    ``midpoint_error``. It assumes Poisson sampling and an adversary who knows all other records.

    Args:
        schedule: the steps.
        peak: the range of each coordinate, data units.

    Returns:
        Squared data units, rounded down; inf where nothing is revealed (no unbiased attack exists).
    """
    side = _validate.positive("peak", peak)
    epsilon = replacement_rdp(schedule)
    if epsilon == 0.0:
        return math.inf
    return side * side / (4.0 * math.expm1(epsilon)) * (1.0 - 1e-12) if epsilon < 700.0 else 0.0


def midpoint_error(records: ArrayLike, low: float, high: float) -> float:
    """The mean squared error per coordinate of the adversary who ignores the model and guesses the midpoint.

    It is at most (high − low)²/4 on every record in the box, at any privacy level, where an unbiased bound may promise
    as much as one likes (paper, Appendix A): the guess is biased, and the bound says nothing about it.

    Args:
        records: any shape, entries in [low, high].
        low: the least value that an entry can take.
        high: the largest.

    Returns:
        Squared data units.
    """
    low, high = _validate.finite("low", low), _validate.finite("high", high)
    try:
        values = np.asarray(records, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"Expected records to be an array of numbers. {error}") from error
    if values.size == 0 or not (values.min() >= low and values.max() <= high):
        raise DataError(f"Expected records with entries in [{low:g}, {high:g}]. Found {_validate.shown(records)}.")
    return float(np.mean((values - 0.5 * (low + high)) ** 2))
