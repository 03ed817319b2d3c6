"""The prior-aware attack: against naive enumeration, in its limits, and with seeds."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from helpers import Array
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import multivariate_normal

from opacus_reconbound.attacks import (
    FULL_BATCH,
    SUBSAMPLED,
    Threat,
    attack_prior_aware,
    bootstrap_errors,
    directions,
    log_likelihoods,
    observe,
)
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.leakage import Schedule


def naive_posterior(residuals: Array, candidates: Array, q: float, sigma: float) -> Array:
    """By enumeration of all gate patterns, with densities as they stand."""
    steps, dimension = residuals.shape
    likelihoods = np.zeros(len(candidates))
    for j, candidate in enumerate(candidates):
        for gates in itertools.product([0, 1], repeat=steps):
            chance = math.prod(q if gate else 1 - q for gate in gates)
            for r, gate in zip(residuals, gates, strict=True):
                chance *= multivariate_normal.pdf(r, gate * candidate, sigma**2 * np.eye(dimension))
            likelihoods[j] += chance
    return likelihoods / likelihoods.sum()


@given(
    steps=st.integers(1, 4),
    count=st.integers(1, 5),
    q=st.sampled_from([0.02, 0.3, 0.9, 1.0]),
    sigma=st.sampled_from([0.3, 1.0, 4.0]),
    seed=st.integers(0, 2**16),
)
def test_the_posterior_is_that_of_enumeration(steps: int, count: int, q: float, sigma: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    candidates = directions(rng.standard_normal((count, 3)), np.zeros(3))
    residuals = observe(candidates[0], Threat(q, steps), noise_multiplier=sigma, rng=rng)
    found = softmax(log_likelihoods(residuals, candidates, sample_rate=q, noise_multiplier=sigma))
    np.testing.assert_allclose(found, naive_posterior(residuals, candidates, q, sigma), atol=1e-12)


def test_many_candidates_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    candidates, residuals = rng.standard_normal((50, 4)), rng.standard_normal((7, 4))
    whole = log_likelihoods(residuals, candidates, sample_rate=0.2, noise_multiplier=0.5)
    monkeypatch.setattr("opacus_reconbound.attacks.prior_aware._AT_ONCE", 21)
    np.testing.assert_allclose(
        log_likelihoods(residuals, candidates, sample_rate=0.2, noise_multiplier=0.5), whole, rtol=1e-12
    )


def test_little_noise_stays_finite() -> None:
    """Exponents of 1e10: densities as they stand would be 0/0."""
    rng = np.random.default_rng(0)
    candidates = directions(rng.standard_normal((20, 5)), np.zeros(5))
    for threat in (FULL_BATCH, Threat(0.5, 20)):
        residuals = observe(candidates[3], threat, noise_multiplier=1e-5, rng=rng)
        found = log_likelihoods(residuals, candidates, sample_rate=threat.sample_rate, noise_multiplier=1e-5)
        assert np.isfinite(found).all()
        assert np.argmax(found) == 3


def test_observed_residuals_are_gated_and_noisy() -> None:
    rng = np.random.default_rng(1)
    residuals = observe(np.array([100.0, 0.0]), Threat(0.3, 20_000), noise_multiplier=0.5, rng=rng)
    taken = residuals[:, 0] > 50
    assert taken.mean() == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 20_000))
    assert residuals[:, 1].std() == pytest.approx(0.5, rel=0.03)
    assert residuals[taken, 0].mean() == pytest.approx(100.0, abs=0.03)


def test_directions() -> None:
    found = directions([[3.0, 5.0], [0.0, 1.0]], [0.0, 1.0])
    np.testing.assert_allclose(found, [[0.6, 0.8], [0.0, 0.0]])
    images = np.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_allclose(np.linalg.norm(directions(images, np.zeros((3, 4))), axis=1), 1.0)


@pytest.mark.parametrize("threat", [FULL_BATCH, SUBSAMPLED], ids=str)
def test_the_limits(threat: Threat) -> None:
    """Hardly any leakage: the prior's mean. Very much: the target, where it is among the candidates."""
    rng = np.random.default_rng(2)
    pool, others = rng.normal(size=(200, 6)), rng.normal(size=(30, 6))
    least = attack_prior_aware(others, pool, leakage_bits=1e-9, threat=threat, variance=6.0)
    np.testing.assert_allclose(least.mean.squared, np.square(others - pool.mean(axis=0)).sum(axis=1), rtol=1e-3)
    most = attack_prior_aware(pool[:30], pool, leakage_bits=1e7, threat=threat, variance=6.0)
    entered = most.mean.squared < 1e-9
    never = (1 - threat.sample_rate) ** threat.steps  # about 13 % of targets enter no step of the second threat
    assert (~entered).sum() <= 30 * never + 4 * math.sqrt(30 * never * (1 - never))
    assert entered.sum() >= 20
    np.testing.assert_array_equal(most.best.squared[entered], 0.0)


def test_a_target_that_enters_no_step_is_guessed_from_the_prior() -> None:
    """Residuals of noise alone at little noise: they rule out no candidate more than any other."""
    rng = np.random.default_rng(3)
    candidates = directions(rng.standard_normal((50, 4)), np.zeros(4))
    residuals = 1e-3 * rng.standard_normal((10, 4))
    found = softmax(log_likelihoods(residuals, candidates, sample_rate=0.1, noise_multiplier=1e-3))
    np.testing.assert_allclose(found, 1 / 50)


@pytest.mark.parametrize("threat", [FULL_BATCH, SUBSAMPLED], ids=str)
def test_the_noise_is_calibrated(threat: Threat) -> None:
    rng = np.random.default_rng(4)
    found = attack_prior_aware(
        rng.normal(size=(3, 2)), rng.normal(size=(9, 2)), leakage_bits=2.89, threat=threat, variance=2
    )
    q, sigma, steps = threat.sample_rate, found.noise_multiplier, threat.steps
    leaked = Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps).charged_bits
    assert 2.89 * (1 - 1e-5) <= leaked <= 2.89
    if threat is FULL_BATCH:
        assert sigma == pytest.approx(1 / math.sqrt(2 * 2.89 * math.log(2)), rel=1e-5)


def test_vectors_of_a_representation() -> None:
    """The release is about raw records, the error about their vectors."""
    rng = np.random.default_rng(5)
    targets, pool = rng.normal(size=(20, 6)), rng.normal(size=(100, 6))
    keep = {"leakage_bits": 3.0, "threat": FULL_BATCH, "seed": 7}
    raw = attack_prior_aware(targets, pool, variance=6.0, **keep)
    double = attack_prior_aware(
        targets, pool, variance=24.0, target_vectors=2 * targets, candidate_vectors=2 * pool, **keep
    )
    np.testing.assert_allclose(double.mean.squared, 4 * raw.mean.squared)
    assert double.mean.rho == pytest.approx(raw.mean.rho)
    first = attack_prior_aware(
        targets, pool, variance=1, target_vectors=targets[:, :1], candidate_vectors=pool[:, :1], **keep
    )
    assert first.mean.mse < raw.mean.mse
    assert first.noise_multiplier == raw.noise_multiplier


def test_more_leakage_helps_and_the_mean_beats_the_best_candidate() -> None:
    rng = np.random.default_rng(6)
    targets, pool = rng.normal(size=(200, 3)), rng.normal(size=(1000, 3))
    found = [
        attack_prior_aware(targets, pool, leakage_bits=bits, threat=FULL_BATCH, variance=3.0)
        for bits in (0.1, 1.0, 4.0, 20.0)
    ]
    rho = [one.mean.rho for one in found]
    assert rho == sorted(rho, reverse=True)
    assert all(one.mean.mse <= one.best.mse for one in found[:3])


def test_seeds() -> None:
    rng = np.random.default_rng(8)
    targets, pool = rng.normal(size=(10, 4)), rng.normal(size=(50, 4))

    def run(seed: int, count: int = 10) -> Array:
        return attack_prior_aware(
            targets[:count], pool, leakage_bits=2.0, threat=Threat(0.2, 5), variance=4.0, seed=seed
        ).mean.squared

    np.testing.assert_array_equal(run(1), run(1))
    np.testing.assert_allclose(run(1, 4), run(1)[:4])
    assert not np.allclose(run(1), run(2))


def test_the_bootstrap() -> None:
    """Close to the sample's standard deviation over √n, and ρ's by the delta method."""
    squared = np.random.default_rng(9).exponential(size=400)
    found = bootstrap_errors(squared, 2.0, resamples=4000, seed=1)
    assert found.mse == pytest.approx(squared.mean())
    assert found.mse_standard_error == pytest.approx(squared.std() / 20, rel=0.05)
    assert found.rho == pytest.approx(math.sqrt(squared.mean() / 2))
    assert found.rho_standard_error == pytest.approx(found.mse_standard_error / (4 * found.rho), rel=0.03)
    assert np.square(found.rho_per_target).mean() == pytest.approx(found.rho**2)
    assert bootstrap_errors(squared, 2.0, seed=1).rho_standard_error != found.rho_standard_error
    with pytest.raises(FrozenInstanceError):
        found.rho = 0.0  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        found.squared[0] = 0.0


def test_bad_input() -> None:
    good = np.eye(3)
    keep = {"leakage_bits": 1.0, "threat": FULL_BATCH, "variance": 1.0}
    with pytest.raises(DataError, match="targets holds NaN"):
        attack_prior_aware(np.full((2, 3), np.nan), good, **keep)
    with pytest.raises(DataError, match="unlike shapes"):
        attack_prior_aware(np.eye(2), good, **keep)
    with pytest.raises(DataError, match="2 target_vectors for 3 records"):
        attack_prior_aware(good, good, target_vectors=good[:2], candidate_vectors=good, **keep)
    with pytest.raises(InvalidValueError, match="together, or neither"):
        attack_prior_aware(good, good, target_vectors=good, **keep)
    with pytest.raises(InvalidValueError, match="leakage_bits > 0"):
        attack_prior_aware(good, good, **(keep | {"leakage_bits": 0.0}))
    with pytest.raises(DataError, match="one finite record of 3 entries"):
        directions(good, np.zeros(2))
    with pytest.raises(DataError, match="Residuals have 2 entries, but candidates 3"):
        log_likelihoods(np.eye(2), good, sample_rate=0.5, noise_multiplier=1.0)
    with pytest.raises(InvalidValueError, match="nothing about the target is released"):
        Threat(0.0, 3)
    with pytest.raises(InvalidValueError, match="steps"):
        Threat(0.5, 0)
    with pytest.raises(DataError, match="two targets or more"):
        bootstrap_errors([1.0], 1.0)
    with pytest.raises(DataError, match="negative or not finite"):
        bootstrap_errors([1.0, -1.0], 1.0)
