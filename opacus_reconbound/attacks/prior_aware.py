"""The prior-aware attack of Hayes et al. (2023) on the linear model of Schwethelm et al. (2024): paper, section 6.

The loss of that model is linear in its weights, so that a record's gradient is its own input, centred; clipped, it is
the unit vector u = (x − μ)/‖x − μ‖, in units of the clipping norm. The adversary knows all other records, their part in
each step included, and subtracts them from every update; what is left of step t is the residual

    r_t = b_t u + σ w_t,        w_t ~ N(0, I),        b_t ~ Bernoulli(q) and unknown.

A candidate v has the likelihood Π_t [(1 − q) φ(r_t) + q φ(r_t − v)], the gate marginalised step by step. Candidates are
records of the source that the adversary holds, equally likely beforehand. The posterior mean of their vectors is the
estimate of least squared error under that prior; the likeliest candidate is reported beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from opacus_reconbound import _validate
from opacus_reconbound.attacks.results import AttackErrors, bootstrap_errors, rows
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.leakage.calibration import noise_for_leakage

__all__ = [
    "FULL_BATCH",
    "SUBSAMPLED",
    "PriorAwareAttack",
    "Threat",
    "directions",
    "log_likelihoods",
    "observe",
    "attack_prior_aware",
]

Array = NDArray[np.float64]

_AT_ONCE = 2**22  # numbers of one table of steps and candidates


@dataclass(frozen=True)
class Threat:
    """What is released: ``steps`` Poisson-subsampled Gaussian steps.

    Attributes:
        sample_rate: q in (0, 1], the probability that the target enters a step; which steps it entered is not known.
        steps: T, at least one.
    """

    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", _validate.sample_rate(self.sample_rate))
        object.__setattr__(self, "steps", _validate.steps("steps", self.steps, minimum=1))
        if self.sample_rate == 0:
            raise InvalidValueError("Expected sample_rate > 0. Found 0: nothing about the target is released.")


FULL_BATCH = Threat(1.0, 1)
SUBSAMPLED = Threat(0.02, 100)


@dataclass(frozen=True, kw_only=True, eq=False)
class PriorAwareAttack:
    """How well the attack did at one leakage.

    Attributes:
        threat: what was released.
        leakage_bits: γ that the noise was calibrated to.
        noise_multiplier: σ, the least that keeps the release within γ.
        mean: errors of the posterior mean, the attack's estimate for squared error.
        best: errors of the likeliest candidate.
        candidates: how many.
    """

    threat: Threat
    leakage_bits: float
    noise_multiplier: float
    mean: AttackErrors
    best: AttackErrors
    candidates: int


def directions(records: ArrayLike, centre: ArrayLike) -> Array:
    """Clipped gradients in units of the clipping norm: (x − μ)/‖x − μ‖; zero for a record that is the centre.

    Args:
        records: (n, ...), raw records; each is flattened.
        centre: μ, one record, fixed on records that are not attacked.

    Returns:
        (n, d), of norm one or zero.
    """
    moved = rows("records", records)
    mean = np.asarray(centre, dtype=np.float64).reshape(-1)
    if mean.shape != moved.shape[1:] or not np.isfinite(mean).all():
        raise DataError(f"Expected centre to be one finite record of {moved.shape[1]} entries. Found {mean.shape}.")
    moved = moved - mean
    norms = np.linalg.norm(moved, axis=1, keepdims=True)
    return np.asarray(np.divide(moved, norms, out=np.zeros_like(moved), where=norms > 0))


def observe(direction: ArrayLike, threat: Threat, *, noise_multiplier: float, rng: np.random.Generator) -> Array:
    """Residuals of one target: what the adversary has left of every step, in units of the clipping norm.

    Returns:
        (T, d).
    """
    u = np.asarray(direction, dtype=np.float64)
    sigma = _validate.positive("noise_multiplier", noise_multiplier)
    gates = rng.random(threat.steps) < threat.sample_rate
    residuals = sigma * rng.standard_normal((threat.steps, len(u)))
    residuals[gates] += u
    return residuals


def log_likelihoods(
    residuals: ArrayLike, candidates: ArrayLike, *, sample_rate: float, noise_multiplier: float
) -> Array:
    """ln of each candidate's likelihood over that of noise alone: Σ_t ln(1 − q + q e^{(⟨r_t, v⟩ − ‖v‖²/2)/σ²}).

    Args:
        residuals: (T, d), of all steps.
        candidates: (n, d), their directions.
        sample_rate: q in (0, 1].
        noise_multiplier: σ in (0, inf).

    Returns:
        (n,), in nats.
    """
    r, v = rows("residuals", residuals), rows("candidates", candidates)
    q = Threat(sample_rate, len(r)).sample_rate
    sigma = _validate.positive("noise_multiplier", noise_multiplier)
    if r.shape[1] != v.shape[1]:
        raise DataError(f"Residuals have {r.shape[1]} entries, but candidates {v.shape[1]}. Take both from one model.")
    if q == 1.0:  # a sum over steps, so the steps are added first
        r, steps = r.sum(axis=0, keepdims=True), len(r)
        return np.asarray(((v @ r[0] - 0.5 * steps * np.square(v).sum(axis=1)) / sigma) / sigma)
    found = np.empty(len(v))
    size = max(1, _AT_ONCE // len(r))
    for start in range(0, len(v), size):
        part = v[start : start + size]
        exponents = ((r @ part.T - 0.5 * np.square(part).sum(axis=1)) / sigma) / sigma
        found[start : start + size] = np.logaddexp(math.log1p(-q), math.log(q) + exponents).sum(axis=0)
    return found


def attack_prior_aware(
    targets: ArrayLike,
    candidates: ArrayLike,
    *,
    leakage_bits: float,
    threat: Threat,
    variance: float,
    target_vectors: ArrayLike | None = None,
    candidate_vectors: ArrayLike | None = None,
    centre: ArrayLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> PriorAwareAttack:
    """Release each target under the least noise that γ allows, attack it, and measure the error.

    The candidates and the centre must not depend on the targets (paper, Appendix F, 8 to 10): see ``attack_plan``.

    Args:
        targets: (k, ...), raw records to attack, independent draws of the source.
        candidates: (n, ...), raw records of the source that the adversary holds.
        leakage_bits: γ in (0, inf), to which σ is calibrated.
        threat: q and T.
        variance: tr Σ of the representation, as in ``certificate.trace.reference``.
        target_vectors: (k, m), Ψ of the targets; None for the raw values.
        candidate_vectors: (n, m), Ψ of the candidates; None for the raw values.
        centre: μ; None for the mean of the candidates.
        resamples: of the bootstrap.
        seed: of the release and the bootstrap; a target's noise depends on its index and the seed alone.

    Raises:
        DataError: arrays of unlike shape, or not finite.
        InvalidValueError: an argument out of range, or vectors of only one of the two.
    """
    raw_targets, raw_candidates = rows("targets", targets), rows("candidates", candidates)
    if (target_vectors is None) != (candidate_vectors is None):
        raise InvalidValueError("Expected target_vectors and candidate_vectors together, or neither.")
    z = raw_targets if target_vectors is None else rows("target_vectors", target_vectors)
    pool = raw_candidates if candidate_vectors is None else rows("candidate_vectors", candidate_vectors)
    for name, vectors, records in (("target", z, raw_targets), ("candidate", pool, raw_candidates)):
        if len(vectors) != len(records):
            raise DataError(f"There are {len(vectors)} {name}_vectors for {len(records)} records. Give one for each.")
    if z.shape[1] != pool.shape[1] or raw_targets.shape[1] != raw_candidates.shape[1]:
        raise DataError("Targets and candidates have unlike shapes. Take both from one source and one representation.")
    seed = _validate.integer("seed", seed)
    bits = _validate.positive("leakage_bits", leakage_bits)
    q = threat.sample_rate
    sigma = noise_for_leakage(bits, sample_rate=q, steps=threat.steps)
    mu = raw_candidates.mean(axis=0) if centre is None else centre
    u, v = directions(raw_targets, mu), directions(raw_candidates, mu)
    mean, best = np.empty(len(z)), np.empty(len(z))
    for i, direction in enumerate(u):
        residuals = observe(direction, threat, noise_multiplier=sigma, rng=np.random.default_rng([seed, i]))
        scores = log_likelihoods(residuals, v, sample_rate=q, noise_multiplier=sigma)
        mean[i] = np.square(z[i] - softmax(scores) @ pool).sum()
        best[i] = np.square(z[i] - pool[int(np.argmax(scores))]).sum()
    return PriorAwareAttack(
        threat=threat,
        leakage_bits=bits,
        noise_multiplier=sigma,
        mean=bootstrap_errors(mean, variance, resamples=resamples, seed=seed),
        best=bootstrap_errors(best, variance, resamples=resamples, seed=seed),
        candidates=len(pool),
    )
