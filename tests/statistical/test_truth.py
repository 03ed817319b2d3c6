"""The truths that certificates are held against: each in a second way, or against a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers import (
    GOLDEN,
    Array,
    DiscreteSource,
    blahut_arimoto,
    gaussian_distortion_rate,
    gaussian_intercept,
    mixture_entropy,
)
from hypothesis import given
from hypothesis import strategies as st

variance_lists = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=6).map(np.array)


def binary_entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def grid_gaussian(count: int, reach: float = 5.0) -> DiscreteSource:
    """A standard Gaussian on equidistant points."""
    points = np.linspace(-reach, reach, count)[:, None]
    p = np.exp(-(points[:, 0] ** 2) / 2)
    return DiscreteSource(points, p / p.sum())


# ---- reverse water-filling -------------------------------------------------------------------------------------------


@given(st.floats(0.01, 100.0), st.floats(0.0, 10.0))
def test_one_gaussian(variance: float, rate: float) -> None:
    assert gaussian_distortion_rate(np.array([variance]), rate) == pytest.approx(variance * math.exp(-2 * rate))


@given(st.floats(0.01, 100.0), st.integers(1, 8), st.floats(0.0, 10.0))
def test_equal_coordinates_share_the_rate(variance: float, count: int, rate: float) -> None:
    expected = count * variance * math.exp(-2 * rate / count)
    assert gaussian_distortion_rate(np.full(count, variance), rate) == pytest.approx(expected)


@given(variance_lists, st.floats(0.0, 8.0))
def test_the_water_level(variances: Array, rate: float) -> None:
    """Found again by bisection on the level; and no other split of the rate over the coordinates does better."""
    low, high = 1e-12, float(variances.max())
    for _ in range(200):
        level = math.sqrt(low * high)
        spent = float(np.maximum(0.5 * np.log(variances / level), 0.0).sum())
        low, high = (level, high) if spent > rate else (low, level)
    found = gaussian_distortion_rate(variances, rate)
    assert found == pytest.approx(float(np.minimum(variances, high).sum()), rel=1e-9)
    rng = np.random.default_rng(len(variances))
    for shares in rng.dirichlet(np.ones(len(variances)), size=20):
        assert (variances * np.exp(-2 * rate * shares)).sum() >= found * (1 - 1e-12)


def test_two_coordinates_by_hand() -> None:
    """Below the water level of the smaller one the larger coordinate alone is described."""
    variances = np.array([4.0, 1.0])
    assert gaussian_distortion_rate(variances, 0.5 * math.log(2)) == pytest.approx(2 + 1)
    assert gaussian_distortion_rate(variances, math.log(2)) == pytest.approx(1 + 1)
    assert gaussian_distortion_rate(variances, 2 * math.log(2)) == pytest.approx(0.5 + 0.5)


# ---- Blahut and Arimoto ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.3, 1.0, 2.5, 6.0])
def test_a_binary_source_onto_its_own_points(slope: float) -> None:
    """R = ln 2 − H(δ), D = 4 δ: a Bernoulli source with Hamming distortion."""
    points = np.array([[-1.0], [1.0]])
    rate, distortion = blahut_arimoto(points, np.array([0.5, 0.5]), points, slope)
    delta = 1 / (1 + math.exp(4 / slope))
    assert distortion == pytest.approx(4 * delta, abs=1e-12)
    assert rate == pytest.approx(math.log(2) - binary_entropy(delta), abs=1e-9)


@pytest.mark.parametrize("slope", [0.2, 0.5, 1.0])
def test_a_gaussian_on_a_grid(slope: float) -> None:
    source = grid_gaussian(161)
    rate, distortion = blahut_arimoto(source.points, source.p, source.points, slope, rounds=600)
    assert distortion == pytest.approx(gaussian_distortion_rate(np.ones(1), rate), rel=2e-3)
    assert distortion == pytest.approx(slope / 2, rel=0.02)  # θ = −D'(R)/2


@pytest.mark.parametrize("seed", range(4))
def test_the_dual_closes_the_gap(seed: int) -> None:
    """Every D + slope R has a lower bound from the same multipliers; they meet within a thousandth of the variance."""
    source, slope = DiscreteSource.random(seed, atoms=5, dimension=1), 0.4
    side = np.linspace(source.points.min(), source.points.max(), 400)[:, None]
    rate, distortion = blahut_arimoto(source.points, source.p, side, slope, rounds=3000)
    kernel = np.exp(-((source.points[:, None] - side[None]) ** 2).sum(2) / slope)
    q = np.full(len(side), 1 / len(side))
    for _ in range(3000):
        q = source.p @ (q * kernel / (kernel @ q)[:, None])
    multipliers = 1.0 / (kernel @ q)
    largest = float((source.p * multipliers @ kernel).max())
    dual = slope * (source.p @ np.log(multipliers) - math.log(largest))
    assert dual <= distortion + slope * rate + 1e-12
    assert distortion + slope * rate == pytest.approx(dual, abs=1e-3)


# ---- entropies and intercepts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", GOLDEN["binary_awgn"]["rows"], ids=lambda row: f"s={row['s']}")
def test_the_entropy_of_a_binary_mixture(row: dict[str, float]) -> None:
    found = mixture_entropy(np.array([-1.0, 1.0]), np.array([0.5, 0.5]), row["s"])
    noise = 0.5 * math.log(2 * math.pi * math.e * row["s"] ** 2)
    assert (found - noise) / math.log(2) == pytest.approx(row["information_bits"], abs=1e-6)


@pytest.mark.parametrize(("m", "count"), [(2, 61), (4, 17)])
@pytest.mark.parametrize("scale", [0.4, 1.0, 3.0])
def test_the_intercept_of_a_gaussian(m: int, count: int, scale: float) -> None:
    """Gaussian couplings are the best ones: the potential on a grid, which knows nothing of them, agrees."""
    source = grid_gaussian(count, 4.0)
    variance = float(source.p @ source.points[:, 0] ** 2)
    assert gaussian_intercept(np.array([variance]), scale, m) == pytest.approx(source.intercept(scale, m), rel=0.01)


def test_the_intercept_of_two_replicas_in_closed_form() -> None:
    """−v + ε r/(1 − r²) = 0."""
    for v, epsilon in ((1.0, 0.3), (0.2, 1.0), (3.0, 0.01)):
        r = (math.sqrt(epsilon**2 + 4 * v**2) - epsilon) / (2 * v)
        expected = v * (1 - r) - epsilon / 2 * math.log(1 - r * r)
        assert gaussian_intercept(np.array([v]), epsilon, 2) == pytest.approx(expected, rel=1e-9)
