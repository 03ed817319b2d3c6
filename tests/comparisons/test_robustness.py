"""Reconstruction robustness: closed forms, order of the routes, monotonicity, a real attack, κ, bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from opacus_reconbound.comparisons import largest_success, prior_success
from opacus_reconbound.comparisons.robustness import ORDERS, _two_point, renyi_divergences
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.leakage import Schedule

KAPPAS = [1e-9, 1e-3, 0.1, 0.5, 0.9]


def constant(q: float, sigma: float, steps: int = 1) -> Schedule:
    return Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize(("sigma", "steps"), [(0.5, 1), (2.0, 1), (3.0, 10)])
def test_full_batches_are_one_gaussian(kappa: float, sigma: float, steps: int) -> None:
    expected = norm.cdf(norm.ppf(kappa) + math.sqrt(steps) / sigma)
    assert largest_success(constant(1.0, sigma, steps), kappa) == pytest.approx(expected, rel=1e-9)


def test_full_batches_of_several_noises_add_up() -> None:
    parts = constant(1.0, 2.0, 3) + constant(1.0, 5.0, 10) + constant(0.0, 1.0, 7) + constant(1.0, math.inf, 3)
    expected = norm.cdf(norm.ppf(0.01) + math.sqrt(3 / 4 + 10 / 25))
    assert largest_success(parts, 0.01) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_one_subsampled_step_is_that_of_the_best_threshold(kappa: float) -> None:
    q, sigma = 0.25, 0.8
    expected = (1 - q) * kappa + q * norm.sf(norm.isf(kappa) - 1 / sigma)
    assert largest_success(constant(q, sigma), kappa) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize(("q", "sigma"), [(0.25, 0.8), (0.02, 1.0)])
def test_the_divergences_and_the_prv_accountant_err_upwards(q: float, sigma: float, kappa: float) -> None:
    exact = largest_success(constant(q, sigma), kappa)
    for order, divergence in renyi_divergences(constant(q, sigma)).items():
        for reverse in (False, True):
            assert _two_point(kappa, order, divergence, reverse=reverse) >= exact


def test_a_route_by_divergences_is_close_where_the_truth_is_known() -> None:
    exact = norm.cdf(norm.ppf(0.01) + 1.0)
    by_divergences = min(
        _two_point(0.01, order, value, reverse=False) for order, value in renyi_divergences(constant(1.0, 1.0)).items()
    )
    assert exact < by_divergences < 1.5 * exact


@pytest.mark.parametrize("kappa", [1e-5, 0.01, 0.3])
def test_prv_tightens_and_stays_above_an_attack(kappa: float) -> None:
    q, sigma, steps, n = 0.2, 1.5, 20, 200_000
    schedule = constant(q, sigma, steps)
    tight, loose = largest_success(schedule, kappa, prv=True), largest_success(schedule, kappa)
    assert kappa < tight < loose
    # the best test of the pair itself, simulated: threshold on the log likelihood ratio at level κ under Q
    rng = np.random.default_rng(0)

    def ratios(mean: np.ndarray) -> np.ndarray:
        y = mean + sigma * rng.standard_normal((n, steps))
        return np.log1p(q * np.expm1(y / sigma**2 - 0.5 / sigma**2)).sum(axis=1)

    without = ratios(np.zeros((n, steps)))
    attained = np.mean(ratios(rng.random((n, steps)) < q) > np.quantile(without, 1.0 - kappa))
    if kappa >= 0.01:
        assert attained < tight * 1.02
        assert tight < attained * 1.3  # e^ε κ + δ is a tangent, not the curve
        assert attained < loose < 1.6 * attained


def test_it_falls_with_noise_and_rises_with_steps_rate_and_prior() -> None:
    base = (0.02, 1.1, 500, 0.01)
    for index, values in enumerate(
        [[0.001, 0.02, 0.3, 1.0], [3.0, 1.1, 0.7, 0.4], [1, 2, 500, 5000], [1e-6, 0.01, 0.4]]
    ):
        found = []
        for value in values:
            q, sigma, steps, kappa = (*base[:index], value, *base[index + 1 :])
            found.append(largest_success(constant(q, sigma, int(steps)), kappa))
        assert all(a < b or b == 1.0 for a, b in itertools.pairwise(found)), found


@settings(max_examples=30, deadline=None)
@given(
    q=st.floats(0, 1),
    sigma=st.floats(0, 1e3),
    steps=st.integers(0, 10**7),
    kappa=st.floats(0, 1),
    more=st.integers(1, 99),
)
def test_a_probability_not_below_the_prior(q: float, sigma: float, steps: int, kappa: float, more: int) -> None:
    found = largest_success(constant(q, sigma, steps), kappa)
    assert kappa <= found <= 1.0
    assert found <= largest_success(constant(q, sigma, steps + more), kappa) * (1 + 1e-9)


def test_extremes() -> None:
    assert largest_success(Schedule(), 0.25) == 0.25
    assert largest_success(constant(0.5, math.inf, 9), 0.25) == 0.25
    assert largest_success(constant(0.5, 0.0, 9), 0.25) == 1.0
    assert largest_success(constant(0.5, 1e-200, 9), 0.0) == 1.0
    assert largest_success(constant(0.5, 1.0, 9), 0.0) == 0.0
    assert largest_success(constant(0.5, 1.0, 9), 1.0) == 1.0
    assert largest_success(constant(0.5, 0.3, 10**9), 0.01, prv=True) == pytest.approx(1.0)


def test_divergences_of_full_batches() -> None:
    found = renyi_divergences(constant(1.0, 2.0, 3))
    assert set(found) == {1, *ORDERS}
    for order, value in found.items():
        assert value == pytest.approx(3 * order / 8, rel=1e-9)
        assert value >= 3 * order / 8


# -- κ -----------------------------------------------------------------------------------------------------------------


def test_prior_success_counts_the_best_guess() -> None:
    records = np.array([[0.0, 0], [1, 0], [0, 1], [10, 10], [3, 0]])
    assert prior_success(records, 1.0) == 3 / 5  # about the first
    assert prior_success(records, 0.1) == 1 / 5
    assert prior_success(records, 0.75, guesses=[[0.5, 0.5]]) == 3 / 5  # no record does that
    assert prior_success(records, 0.75) == 1 / 5
    assert prior_success(records, 2 * 0.75) == 3 / 5  # twice the distance covers every guess
    assert prior_success(records.reshape(5, 1, 2), 100.0) == 1.0


def test_prior_success_of_a_uniform_law() -> None:
    records = np.random.default_rng(1).random((3000, 1))
    assert prior_success(records, 0.05) == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: largest_success(constant(0.1, 1.0), 1.5), InvalidValueError, r"prior_success in \[0, 1\]"),
        (lambda: largest_success(constant(0.1, 1.0), math.nan), InvalidValueError, "prior_success"),
        (lambda: prior_success([[1.0]], 0.0), InvalidValueError, "within > 0"),
        (lambda: prior_success([1.0, 2.0], 1.0), DataError, r"shape \(n, ...\)"),
        (lambda: prior_success([[1.0], [math.nan]], 1.0), DataError, "finite"),
        (lambda: prior_success([["a"]], 1.0), DataError, "numbers"),
        (lambda: prior_success([[1.0]], 1.0, guesses=[[1.0, 2.0]]), DataError, "2 coordinates, records 1"),
    ],
)
def test_bad_input(call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


# -- what the routes rest on -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q", "sigma"), [(1 / 64, 0.8), (0.375, 1.0), (0.75, 3.0)])
@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_divergences_bound_both_directions(q: float, sigma: float, order: int) -> None:
    y = np.linspace(-15 * sigma, 15 * sigma + 10, 200_001)
    without = norm.logpdf(y, 0, sigma)
    with_record = np.logaddexp(math.log1p(-q) + without, math.log(q) + norm.logpdf(y, 1, sigma))

    def divergence(first: np.ndarray, second: np.ndarray) -> float:
        if order == 1:
            return float((np.exp(first) * (first - second)).sum() * (y[1] - y[0]))
        return math.log(np.exp(order * first + (1 - order) * second).sum() * (y[1] - y[0])) / (order - 1)

    bound = renyi_divergences(constant(q, sigma))[order]
    assert divergence(with_record, without) == pytest.approx(bound, rel=1e-6)
    assert divergence(without, with_record) < bound


def test_equal_runs_apart_are_one_for_the_prv_accountant() -> None:
    parts = constant(0.02, 1.0, 50) + constant(0.05, 3.0, 10) + constant(0.02, 1.0, 50)
    together = constant(0.02, 1.0, 100) + constant(0.05, 3.0, 10)
    found = largest_success(parts, 0.01, prv=True)
    assert found == pytest.approx(largest_success(together, 0.01, prv=True), rel=1e-9)
    assert largest_success(constant(0.02, 1.0, 100), 0.01, prv=True) < found < largest_success(parts, 0.01)


@pytest.mark.parametrize("sigma", [1e-99, 1e99, 1e200])
def test_no_overflow(sigma: float) -> None:
    expected = 1.0 if sigma < 1 else 0.1
    assert largest_success(constant(0.3, sigma, 2**53), 0.1, prv=True) == pytest.approx(expected, abs=0.2)
