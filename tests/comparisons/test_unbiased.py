"""Bounds on unbiased attacks: closed forms, quadrature, attacks that attain or evade them; van Trees; bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from opacus_reconbound.comparisons import (
    fisher_information,
    gaussian_prior_information,
    midpoint_error,
    replacement_rdp,
    unbiased_error_by_rdp,
    van_trees_error,
)
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.leakage import Schedule


def constant(q: float, sigma: float, steps: int = 1) -> Schedule:
    return Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps)


# -- the Rényi divergence of order 2 -----------------------------------------------------------------------------------


def test_full_batches_in_closed_form() -> None:
    parts = constant(1.0, 2.0, 3) + constant(1.0, 5.0, 10)
    epsilon = 4 * (3 / 4 + 10 / 25)
    assert replacement_rdp(parts) == pytest.approx(epsilon, rel=1e-9)
    assert unbiased_error_by_rdp(parts, 2.0) == pytest.approx(1.0 / math.expm1(epsilon), rel=1e-9)


def chi_squared(q: float, sigma: float, one: float, other: float) -> float:
    """χ² between the mixtures with means ``other`` and ``one``, by quadrature."""

    def density(y: float, mean: float) -> float:
        return float((1 - q) * norm.pdf(y, 0, sigma) + q * norm.pdf(y, mean, sigma))

    def integrand(y: float) -> float:
        below = density(y, one)
        return (density(y, other) - below) ** 2 / below if below > 0 else 0.0

    reach = 1 + 12 * sigma + 4 / sigma
    return float(quad(integrand, -reach, reach, points=[-1, 0, 1], limit=400)[0])


@pytest.mark.parametrize("q", [0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("sigma", [0.7, 1.5, 6.0])
@pytest.mark.parametrize(("one", "other"), [(1.0, -1.0), (1.0, 0.0), (0.0, 1.0), (0.5, -1.0)])
def test_replacing_is_bounded_above(q: float, sigma: float, one: float, other: float) -> None:
    assert replacement_rdp(constant(q, sigma)) >= math.log1p(chi_squared(q, sigma, one, other)) * (1 - 1e-6)


@pytest.mark.parametrize(("q", "sigma"), [(0.01, 1.5), (0.3, 6.0), (1.0, 0.7)])
def test_and_the_bound_is_not_far_above(q: float, sigma: float) -> None:
    assert replacement_rdp(constant(q, sigma)) <= 1.05 * math.log1p(chi_squared(q, sigma, 1.0, -1.0))


def test_it_falls_with_steps_and_rate_and_rises_with_noise() -> None:
    base = unbiased_error_by_rdp(constant(0.1, 2.0, 10), 1.0)
    assert unbiased_error_by_rdp(constant(0.1, 2.0, 11), 1.0) < base
    assert unbiased_error_by_rdp(constant(0.2, 2.0, 10), 1.0) < base
    assert unbiased_error_by_rdp(constant(0.1, 2.5, 10), 1.0) > base
    assert unbiased_error_by_rdp(constant(0.1, 2.0, 10), 3.0) == pytest.approx(9 * base)


def test_extremes() -> None:
    assert unbiased_error_by_rdp(Schedule(), 1.0) == math.inf
    assert unbiased_error_by_rdp(constant(0.1, math.inf, 5), 1.0) == math.inf
    assert unbiased_error_by_rdp(constant(0.1, 0.0), 1.0) == 0.0
    assert unbiased_error_by_rdp(constant(1.0, 0.0), 1.0) == 0.0
    assert unbiased_error_by_rdp(constant(0.5, 1e-3, 10**6), 1.0) == 0.0


def test_an_unbiased_attack_stays_above_it() -> None:
    sigma, rng = 1.3, np.random.default_rng(0)
    record = np.array([0.4, -0.3, 0.2])  # in a box of side 2/√3, inside the unit ball: its gradient is itself, C = 1
    guesses = record + sigma * rng.standard_normal((100_000, 3))  # one full-batch step, all other records subtracted
    assert np.abs(guesses.mean(0) - record).max() < 0.02
    assert np.mean((guesses - record) ** 2) > unbiased_error_by_rdp(constant(1.0, sigma), 2 / math.sqrt(3))


# -- what 'unbiased' excludes ----------------------------------------------------------------------------------------


def test_the_midpoint_adversary_walks_through_the_unbiased_bound() -> None:
    """Paper, Appendix A: on [0, 1]^784 it attains at most 1/4 where the bound promises 1 and more."""
    rng = np.random.default_rng(0)
    schedule = constant(1.0, 3.0)
    assert unbiased_error_by_rdp(schedule, 1.0) < 1.0 < unbiased_error_by_rdp(constant(1.0, 8.0), 1.0)
    promised = unbiased_error_by_rdp(constant(1.0, 8.0), 1.0)
    for records in (rng.random((200, 784)), rng.integers(0, 2, (200, 784)), rng.beta(0.3, 2.0, (200, 784))):
        attained = midpoint_error(records, 0.0, 1.0)
        assert attained <= 0.25 < promised
        assert attained == pytest.approx(np.mean(np.square(records - 0.5)))
    assert midpoint_error(np.array([0.0, 255.0]), 0, 255) == 127.5**2  # its worst records


def test_clipping_to_the_box_evades_it_too() -> None:
    sigma, rng = 8.0, np.random.default_rng(0)
    records = rng.random((20_000, 4)) - 0.5  # a box of side 1, inside the unit ball
    guesses = records + sigma * rng.standard_normal(records.shape)
    promised = unbiased_error_by_rdp(constant(1.0, sigma), 1.0)
    assert np.mean((guesses - records) ** 2) > promised
    assert np.mean((np.clip(guesses, -0.5, 0.5) - records) ** 2) < promised


# -- Fisher information ----------------------------------------------------------------------------------------------


def test_fisher_information_of_a_linear_model_is_attained() -> None:
    rng, sigma, steps = np.random.default_rng(0), 2.0, 5
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    jacobian = 0.5 * rotation[:, :4]
    found = fisher_information(constant(1.0, sigma, steps), jacobian)
    assert found.trace == pytest.approx(4 * 0.25 * steps / sigma**2)
    assert found.leakage == pytest.approx(0.5 * math.sqrt(steps) / sigma)
    assert found.dimension == 4
    record = rng.standard_normal(4)
    seen = (jacobian @ record)[:, None] + sigma / math.sqrt(steps) * rng.standard_normal((6, 200_000))
    guesses = np.linalg.lstsq(jacobian, seen, rcond=None)[0]
    assert np.mean((guesses - record[:, None]) ** 2) == pytest.approx(found.unbiased_error, rel=0.01)


def test_the_information_behind_a_gate_is_not_above_its_bound() -> None:
    q, sigma = 0.3, 0.6
    slope = quad(
        lambda y: (
            (q * norm.pdf(y, 0.4, sigma) * (y - 0.4) / sigma**2) ** 2
            / ((1 - q) * norm.pdf(y, 0, sigma) + q * norm.pdf(y, 0.4, sigma))
        ),
        -6,
        7,
    )[0]
    bound = fisher_information(constant(q, sigma), [[1.0]]).trace
    assert 0.3 * bound < slope < bound


def test_largest_and_trace_differ_for_unequal_directions() -> None:
    found = fisher_information(constant(1.0, 1.0), np.diag([3.0, 1.0]))
    assert found.largest == pytest.approx(9.0)
    assert found.trace == pytest.approx(10.0)
    assert fisher_information(Schedule(), np.eye(2)).unbiased_error == math.inf
    assert fisher_information(constant(0.5, 0.0), np.eye(2)).unbiased_error == 0.0
    assert fisher_information(constant(0.5, 0.0), np.zeros((2, 2))).unbiased_error == math.inf


@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0])
def test_van_trees_is_the_posterior_variance_of_gaussians(sigma: float) -> None:
    variance, noise = 4.0, sigma**2 / 9
    information = fisher_information(constant(1.0, sigma), 3.0 * np.eye(5))
    bound = van_trees_error(information, gaussian_prior_information(np.full(5, variance)))
    assert bound == pytest.approx(variance * noise / (variance + noise), rel=1e-6)
    assert bound < min(information.unbiased_error, variance)


def test_van_trees_without_information_is_the_prior_variance() -> None:
    nothing = fisher_information(Schedule(), np.eye(3))
    assert van_trees_error(nothing, gaussian_prior_information([2.0, 2.0, 2.0])) == pytest.approx(2.0)
    assert van_trees_error(nothing, gaussian_prior_information([1.0, 2.0, 3.0])) < 2.0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: unbiased_error_by_rdp(Schedule(), 0.0), InvalidValueError, "peak > 0"),
        (lambda: midpoint_error(np.zeros(3), math.nan, 1.0), InvalidValueError, "low"),
        (lambda: midpoint_error([0.5, 1.5], 0.0, 1.0), DataError, r"entries in \[0, 1\]"),
        (lambda: midpoint_error(["x"], 0.0, 1.0), DataError, "numbers"),
        (lambda: fisher_information(Schedule(), [1.0, 2.0]), DataError, r"shape \(p, d\)"),
        (lambda: fisher_information(Schedule(), [[math.inf]]), DataError, "finite"),
        (lambda: fisher_information(Schedule(), [["x"]]), DataError, "numbers"),
        (lambda: gaussian_prior_information([1.0, 0.0]), DataError, "variances > 0"),
        (lambda: van_trees_error(fisher_information(Schedule(), [[1.0]]), 0.0), InvalidValueError, "prior_information"),
    ],
)
def test_bad_input(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("sigma", [1e-200, 1e-3, 1e99, 1e200])
def test_no_overflow(sigma: float) -> None:
    for q in (1e-9, 0.5, 1.0):
        schedule = constant(q, sigma, 2**53)
        assert unbiased_error_by_rdp(schedule, 1e200) >= 0.0
        assert fisher_information(schedule, [[1e200]]).unbiased_error >= 0.0
