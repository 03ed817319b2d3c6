"""Margins: published values, limits and monotonicity, and coverage against binomial limits."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import GOLDEN, most_failures
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.block import paper_draws
from opacus_reconbound.certificates.margins import (
    binary_entropy_bits,
    cantelli_bits,
    empirical_bernstein,
    mcdiarmid_bits,
    monte_carlo_constant,
    upper_tail,
)
from opacus_reconbound.errors import InvalidValueError

PUBLISHED = GOLDEN["margins"]
levels = st.floats(1e-9, 0.999)


@pytest.mark.parametrize("row", PUBLISHED["t_mcdiarmid_bits"], ids=lambda row: f"n={row['n']}")
def test_published_sampling_margin(row: dict[str, Any]) -> None:
    assert mcdiarmid_bits(row["n"], row["alpha2"] / row["grid"]) == pytest.approx(row["value"], rel=1e-9)


@pytest.mark.parametrize("row", PUBLISHED["t_cantelli_bits"], ids=lambda row: f"k={row['k']}-nu2={row['nu2']}")
def test_published_monte_carlo_margin(row: dict[str, Any]) -> None:
    k = row["k"]
    constant = monte_carlo_constant(k, row["nu2"], PUBLISHED["mean_square_norm"])
    found = cantelli_bits(constant=constant, blocks=784 // k, n=row["n"], draws=paper_draws(k), level=0.025 / 48)
    assert found == pytest.approx(row["value"], abs=5e-6)


@pytest.mark.parametrize("row", PUBLISHED["c_mc"], ids=lambda row: f"k={row['k']}-nu2={row['nu2']}")
def test_published_monte_carlo_constant(row: dict[str, Any]) -> None:
    found = monte_carlo_constant(row["k"], row["nu2"], PUBLISHED["mean_square_norm"])
    assert found == pytest.approx(row["value"], rel=2e-5)


@given(st.floats(0, 1))
def test_binary_entropy(p: float) -> None:
    value = binary_entropy_bits(p)
    assert 0.0 <= value <= 1.0
    assert value == pytest.approx(binary_entropy_bits(1.0 - p), abs=1e-12)
    assert value >= 4.0 * p * (1.0 - p) - 1e-12


def test_binary_entropy_of_small_probabilities() -> None:
    assert binary_entropy_bits(0.5) == 1.0
    assert binary_entropy_bits(0.0) == binary_entropy_bits(1.0) == 0.0
    assert binary_entropy_bits(1e-12) == pytest.approx(1e-12 * (math.log2(1e12) + 1 / math.log(2)), rel=1e-11)


@pytest.mark.parametrize("p", [-1e-9, 1.1, math.nan])
def test_binary_entropy_of_no_probability(p: float) -> None:
    with pytest.raises(InvalidValueError, match=r"probability in \[0, 1\]"):
        binary_entropy_bits(p)


@given(st.integers(4, 10**7), levels, st.floats(0.01, 0.99))
def test_sampling_margin_is_monotone(n: int, level: float, share: float) -> None:
    assert 0.0 < mcdiarmid_bits(n, level) < mcdiarmid_bits(n, level * share)
    assert mcdiarmid_bits(4 * n, level) < mcdiarmid_bits(n, level)


@given(st.floats(1e-3, 1e4), st.integers(1, 100), st.integers(2, 10**6), st.integers(1, 64), levels)
def test_monte_carlo_margin_scales(constant: float, blocks: int, n: int, draws: int, level: float) -> None:
    margin = cantelli_bits(constant=constant, blocks=blocks, n=n, draws=draws, level=level)
    assert margin > 0.0
    quarter = cantelli_bits(constant=constant, blocks=blocks, n=4 * n, draws=draws, level=level)
    assert quarter == pytest.approx(margin / 2, rel=1e-12)
    # Cantelli: at the distance t the tail of a variance v is v / (v + t²)
    v = constant / (blocks * n * draws)
    t = margin * math.log(2)
    assert v / (v + t * t) == pytest.approx(level, rel=1e-9)


@given(st.integers(1, 64), st.floats(0.01, 10), st.floats(0, 10), st.floats(0.001, 10))
def test_monte_carlo_constant_grows_with_the_norm(k: int, nu2: float, mu: float, more: float) -> None:
    assert monte_carlo_constant(k, nu2, mu) >= 9.0 * k * (1 - 1e-12)
    assert monte_carlo_constant(k, nu2, mu + more) > monte_carlo_constant(k, nu2, mu)


@given(st.floats(0, 10), st.floats(0.01, 100), st.integers(2, 10**6), levels, st.floats(0.1, 10))
def test_empirical_bernstein_scales_with_the_unit(v: float, r: float, n: int, level: float, unit: float) -> None:
    margin = empirical_bernstein(variance=v, value_range=r, n=n, level=level)
    assert margin > 0.0
    scaled = empirical_bernstein(variance=unit**2 * v, value_range=unit * r, n=n, level=level)
    assert scaled == pytest.approx(unit * margin, rel=1e-9)
    assert empirical_bernstein(variance=v, value_range=r, n=n, level=level / 2) > margin
    assert empirical_bernstein(variance=v + 1.0, value_range=r, n=n, level=level) > margin


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("n", [10, 60, 2000])
def test_coverage_of_empirical_bernstein(chance: float, n: int) -> None:
    rng = np.random.default_rng(n)
    level, repeats = 0.3, 1000
    counts = rng.binomial(n, chance, repeats)
    means = counts / n
    variances = n / (n - 1) * means * (1.0 - means)
    margins = np.array([empirical_bernstein(variance=v, value_range=1.0, n=n, level=level) for v in variances])
    for failures in (np.sum(means - margins > chance), np.sum(means + margins < chance)):
        assert failures <= most_failures(repeats, level)


def test_empirical_bernstein_is_not_idle() -> None:
    """Half the margin is not enough at this level, so the coverage test could fail."""
    rng = np.random.default_rng(1)
    level, n = 0.9, 2000
    means = rng.binomial(n, 0.5, 1000) / n
    margin = empirical_bernstein(variance=0.25, value_range=1.0, n=n, level=level)
    assert np.mean(means - margin / 4 > 0.5) > 0.25
    assert np.mean(means - margin > 0.5) <= level


@given(st.floats(0, 20), st.floats(1, 500), st.integers(50, 10**6), st.floats(1e-6, 0.5))
def test_upper_tail_is_the_least_of_its_rates(observed: float, clip: float, n: int, level: float) -> None:
    slack = math.exp(-clip)
    rates = (0.004, 0.01, 0.03, 0.1)
    values = []
    for rate in rates:
        shrink = (math.exp(-rate * clip) - 1 + rate * clip) / (math.exp(-clip) - 1 + clip) / rate
        if shrink < 1.0:
            values.append((observed + slack + math.log(4 / level) / (n * rate)) / (1.0 - shrink))
    found = upper_tail(observed, clip=clip, slack=slack, n=n, level=level)
    assert found == pytest.approx(min(values), rel=1e-6)
    assert found >= observed
    assert upper_tail(observed + 0.5, clip=clip, slack=slack, n=n, level=level) > found
    assert upper_tail(observed, clip=clip, slack=slack, n=n, level=level / 2) > found


def test_coverage_of_the_upper_tail() -> None:
    """X = ln of a unit-mean lognormal, clipped: E e^X = 1, the least slack there is."""
    rng = np.random.default_rng(7)
    level, repeats, n, sigma, clip = 0.3, 400, 300, 1.0, 7.5
    x = np.maximum(rng.normal(-(sigma**2) / 2, sigma, (repeats, n)), -clip)
    truth = sigma**2 / 2  # the clip at more than six deviations changes nothing visible
    observed = -x.mean(1)
    bounds = [upper_tail(float(y), clip=clip, slack=math.exp(-clip), n=n, level=level) for y in observed]
    assert np.sum(np.array(bounds) < truth - 1e-6) <= most_failures(repeats, level)
    assert np.mean(observed < truth) > 0.3  # the observed value alone would fail


def test_margins_shrink_to_nothing() -> None:
    sizes = [10**e for e in range(2, 8)]
    for values in (
        [mcdiarmid_bits(n, 0.01) for n in sizes],
        [cantelli_bits(constant=1e3, blocks=1, n=n, draws=1, level=0.01) for n in sizes],
        [empirical_bernstein(variance=1.0, value_range=20.0, n=n, level=0.01) for n in sizes],
    ):
        assert all(b < a for a, b in pairwise(values))
        assert values[-1] < 0.2


@pytest.mark.parametrize("level", [0.0, 1.0, -0.1, math.nan])
def test_levels_outside_the_open_interval(level: float) -> None:
    for call in (
        lambda: mcdiarmid_bits(100, level),
        lambda: cantelli_bits(constant=1.0, blocks=1, n=100, draws=1, level=level),
        lambda: empirical_bernstein(variance=1.0, value_range=1.0, n=100, level=level),
        lambda: upper_tail(1.0, clip=8.0, slack=0.0, n=100, level=level),
    ):
        with pytest.raises(InvalidValueError, match="level"):
            call()
