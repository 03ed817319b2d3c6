"""Reconstruction robustness: how probable it is that some attack comes within η of a record.

Theorem (Balle et al. 2022; with the blow-up function Hayes et al. 2023; with trade-off functions Kaissis et al. 2023),
restated and derived again here. The record z has law π and the adversary knows everything else. Let P_z be the law of
the trajectory with z among the records and Q that without it, E the event that the attack's guess lies within η of z,
and κ = sup_a π(ball of radius η about a). For a trajectory from Q, which is independent of z, Pr[E] <= κ. For one from
P_z, Pr[E] is the success. So

    success <= B_κ = sup { P(A) : Q(A) <= κ },

for every pair (P, Q) that dominates all (P_z, Q): for a step (1−q) N(0, σ²) + q N(1, σ²) against N(0, σ²), mixture
first, composed over the steps. B_κ is computed from above, as the least of

- Φ(Φ⁻¹(κ) + μ), μ² = Σ 1/σ_t² over the steps with q > 0: exact at q = 1, an upper bound at q < 1, as P grows with q;
- (1−q) κ + q Φ(Φ⁻¹(κ) + 1/σ) for one single step: exact;
- the largest p with d_α(p ‖ κ) <= R_α and d_α(κ ‖ p) <= R_α, where d_α is the Rényi divergence of two coins (data
  processing) and R_α = Σ D_α(P_t ‖ Q_t), which bounds the other direction too (Mironov, Talwar and Zhang 2019), for
  integer orders α of Opacus's RDP accountant and, for α = 1, with γ in nats;
- on demand, the least of e^ε κ + δ with ε(δ) by Opacus's PRV accountant, whose loss variable is that of (P, Q).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.spatial.distance import cdist
from scipy.special import ndtr, ndtri

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.leakage import Run, Schedule, realised_sample_rate
from opacus_reconbound.units import bits_to_nats

__all__ = ["ORDERS", "largest_success", "prior_success", "renyi_divergences"]

ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256, 512)
_ROUNDING = 1e-12
_EPSILON_ERROR = 0.01  # of the PRV accountant; a hundredth of the success at most
_PRV_WORK = 3e4  # ε √steps times distinct steps; beyond it Opacus takes minutes, or more memory than there is
_LEAST_NOISE, _MOST_NOISE = 1e-100, 1e100  # beyond them 1/σ² or σ² overflows
_LEAST_DELTA = 1e-8  # the PRV accountant computes in double precision: smaller ones drown in its rounding
_CHUNK = 1 << 22  # distances at a time


def largest_success(schedule: Schedule, prior_success: float, *, prv: bool = False) -> float:
    """An upper bound on the probability that any attack on the schedule comes within η of a record.

    It assumes Poisson sampling, an adversary who knows all other records, and that κ is what it is said to be. Charged
    at the inclusion probability that Opacus's sampler realises.

    Args:
        schedule: the steps.
        prior_success: κ in [0, 1], the probability with which the best guess without the model comes within η.
        prv: look at Opacus's PRV accountant too, which takes seconds; where it cannot compute, the others stand.

    Returns:
        A probability, rounded up; κ at the least.
    """
    kappa = _probability("prior_success", prior_success)
    runs = _charged(schedule)
    if any(run.noise_multiplier <= _LEAST_NOISE for run in runs):
        return 1.0
    if kappa in (0.0, 1.0) or not runs:
        return kappa  # what has probability 0 under Q has it under P too
    mu = math.sqrt(math.fsum(run.steps / run.noise_multiplier**2 for run in runs))
    found = [_gaussian(kappa, mu)]
    if sum(run.steps for run in runs) == 1:
        q = runs[0].sample_rate
        found.append((1.0 - q) * kappa + q * found[0])
    elif any(run.sample_rate < 1.0 for run in runs):
        divergences = renyi_divergences(schedule)
        found += [
            _two_point(kappa, order, divergence, reverse=reverse)
            for order, divergence in divergences.items()
            for reverse in (False, True)
        ]
        if prv:
            found.append(_by_prv(runs, kappa, min(found), divergences))
    return min(1.0, max(kappa, min(found) * (1.0 + _ROUNDING)))


def renyi_divergences(schedule: Schedule) -> dict[int, float]:
    """Upper bounds on Σ D_α(P_t ‖ Q_t), mixture first, for α = 1 (γ in nats) and the integers of ``ORDERS`` (Opacus).

    Charged at the inclusion probability that Opacus's sampler realises.

    Returns:
        For each order α the Rényi divergence in nats, rounded up.
    """
    total = np.zeros(len(ORDERS))
    for run in _charged(schedule):
        if run.noise_multiplier <= _LEAST_NOISE:
            return dict.fromkeys((1, *ORDERS), math.inf)
        once = compute_rdp(
            q=run.sample_rate, noise_multiplier=run.noise_multiplier, steps=1, orders=[float(a) for a in ORDERS]
        )
        # sums of logarithms near 1: the error is absolute
        with np.errstate(over="ignore"):
            total += (np.maximum(np.asarray(once), 0.0) * (1.0 + 1e-10) + 1e-13) * run.steps
    return {1: bits_to_nats(schedule.charged_bits)} | dict(zip(ORDERS, total.tolist(), strict=True))


def prior_success(records: ArrayLike, within: float, *, guesses: ArrayLike | None = None) -> float:
    """κ as a held-out sample shows it, an estimate without confidence: the best of some guesses without the model.

    The population's κ is a supremum over all guesses, so this can be too small: no bound that uses it is certified. For
    the sample itself, no guess at all comes within η of more records than the best record does within 2η (triangle
    inequality), so ``prior_success(records, 2 * within)`` errs to the safe side there.

    Args:
        records: (n, ...), in the representation in which the distance is taken.
        within: η > 0, Euclidean distance in the records' units.
        guesses: (k, ...), the candidates; the records themselves and their mean unless given. A record counts as
            within η of itself.

    Returns:
        The largest share of the records that lie within η of one guess, in [0, 1].
    """
    points = _rows("records", records)
    eta = _validate.positive("within", within)
    if guesses is None:
        candidates = np.concatenate([points, points.mean(axis=0, keepdims=True)])
    else:
        candidates = _rows("guesses", guesses)
    if candidates.shape[1] != points.shape[1]:
        raise DataError(f"guesses have {candidates.shape[1]} coordinates, records {points.shape[1]}.")
    chunk = max(1, _CHUNK // len(points))
    best = 0
    for start in range(0, len(candidates), chunk):
        near = cdist(candidates[start : start + chunk], points) <= eta * (1.0 + 1e-12)
        best = max(best, int(near.sum(axis=1).max()))
    return best / len(points)


def _rows(name: str, values: ArrayLike) -> NDArray[np.float64]:
    try:
        rows = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"Expected {name} to be an array of numbers, one row each. {error}") from error
    if rows.ndim < 2 or rows.size == 0:
        raise DataError(f"Expected {name} of shape (n, ...) with n >= 1. Found shape {rows.shape}.")
    if not np.isfinite(rows).all():
        raise DataError(f"Expected {name} to be finite. Found NaN or infinity.")
    return rows.reshape(len(rows), -1)


def _probability(name: str, value: float) -> float:
    number = _validate.finite(name, value)
    if not 0.0 <= number <= 1.0:
        raise InvalidValueError(f"Expected {name} in [0, 1]. Found {value!r}.")
    return number


def _charged(schedule: Schedule) -> list[Run]:
    """The runs that reveal anything, at the rates that the sampler realises."""
    return [
        Run(realised_sample_rate(run.sample_rate), min(run.noise_multiplier, _MOST_NOISE), run.steps)
        for run in schedule
        if run.sample_rate > 0.0 and run.noise_multiplier < math.inf
    ]


def _gaussian(kappa: float, mu: float) -> float:
    """Φ(Φ⁻¹(κ) + μ), rounded up."""
    return min(1.0, float(ndtr(ndtri(kappa) + mu)) * (1.0 + _ROUNDING))


def _two_point(kappa: float, order: int, divergence: float, *, reverse: bool) -> float:
    """The largest p with d_α(p ‖ κ) <= R, or d_α(κ ‖ p) <= R in reverse, from above, for κ in (0, 1)."""
    limit = divergence * (1.0 + _ROUNDING) + _ROUNDING
    if math.isinf(limit):
        return 1.0
    known = (math.log(kappa), math.log1p(-kappa))

    def between(log_p: float) -> float:
        ours = (log_p, math.log(-math.expm1(log_p)))
        (a, a_rest), (b, b_rest) = (known, ours) if reverse else (ours, known)
        if order == 1:
            return math.exp(a) * (a - b) + math.exp(a_rest) * (a_rest - b_rest)
        hit, miss = order * a + (1 - order) * b, order * a_rest + (1 - order) * b_rest
        return float(np.logaddexp(hit, miss)) / (order - 1)

    return math.exp(_first_above(between, limit, known[0], 0.0)) * (1.0 + _ROUNDING)


def _first_above(function: Callable[[float], float], limit: float, low: float, high: float) -> float:
    """Bisection of an increasing function: where it first exceeds the limit, from above; ``high`` if nowhere."""
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if function(middle) > limit:
            high = middle
        else:
            low = middle
    return high


def _by_prv(runs: list[Run], kappa: float, known: float, divergences: Mapping[int, float]) -> float:
    """The least of e^ε κ + δ with ε(δ) from above by Opacus's PRV accountant; 1 where it cannot compute it."""
    best = 1.0
    deltas = np.unique(np.maximum(known * np.logspace(-4.0, 0.0, 49), _LEAST_DELTA))
    error = float(deltas[0]) / 1000.0
    steps: Counter[tuple[float, float]] = Counter()
    for run in runs:
        steps[run.noise_multiplier, run.sample_rate] += run.steps
    by_rdp = min(value - math.log(error) / (order - 1) for order, value in divergences.items() if order > 1)
    if not by_rdp * math.sqrt(steps.total()) * len(steps) <= _PRV_WORK:
        return best
    accountant = PRVAccountant()
    accountant.history = [(sigma, q, count) for (sigma, q), count in steps.items()]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            losses = accountant._get_dprv(eps_error=_EPSILON_ERROR, delta_error=error)
        except (ArithmeticError, MemoryError, RuntimeError, ValueError):
            return best
        for delta in deltas.tolist():
            try:
                epsilon = float(losses.compute_epsilon(delta, error, _EPSILON_ERROR)[2])
            except (ArithmeticError, IndexError, RuntimeError, ValueError):
                continue
            if math.isfinite(epsilon) and epsilon < 700.0:
                best = min(best, math.exp(epsilon) * kappa + delta)
    return best
