"""The reference potential of m replicas: Lemma 2 holds for whatever centres, and for the numbers actually returned."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import Array, DiscreteSource
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from opacus_reconbound.certificates.centres import Centres, fit_centres, log_sum_kernel
from opacus_reconbound.certificates.kernel import cost_error

seeds = st.integers(0, 10**6)
replica_counts = st.sampled_from([2, 4, 8])
scales = st.floats(0.05, 2.0)


def naive_log_sum(z: torch.Tensor, points: torch.Tensor, log_weights: torch.Tensor, rate: float) -> Array:
    x, c = z.double().numpy(), points.double().numpy()
    squares = ((x[:, None] - c[None]) ** 2).sum(2)
    return np.asarray(logsumexp(log_weights.numpy() - rate * squares, axis=1))


def random_centres(rng: np.random.Generator, count: int, dimension: int, scale: float, m: int) -> Centres:
    weights = rng.gamma(0.5, size=count) + 1e-9
    points = rng.normal(size=(count, dimension)) * rng.choice([0.1, 1.0, 4.0])
    return Centres(
        points=torch.from_numpy(points.astype(np.float32)),
        log_weights=torch.from_numpy(np.log(weights / weights.sum())),
        rate=(m - 1) / (m * scale),
        scale=scale,
    )


def gaussian(seed: int, n: int, dimension: int, size: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((size * rng.normal(size=(n, dimension)) / math.sqrt(dimension)).astype(np.float32))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads that wait for one another would take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "dimension", "cells"), [(1, 1, 2048), (37, 3, 8), (300, 300, 3000), (65, 784, 200)])
def test_log_sum_kernel_in_float64(n: int, dimension: int, cells: int) -> None:
    z, points = gaussian(0, n, dimension), gaussian(1, 23, dimension)
    log_weights = torch.linspace(-9, 2, 23, dtype=torch.float64)
    found = log_sum_kernel(z, points, log_weights, 3.0, cells)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), naive_log_sum(z, points, log_weights, 3.0), atol=3e-5)


def test_log_sum_kernel_far_from_every_point() -> None:
    """A record that no kernel reaches has a finite value."""
    z, points = torch.full((1, 2), 1e3), torch.zeros(3, 2)
    found = log_sum_kernel(z, points, torch.zeros(3, dtype=torch.float64), 5.0)
    assert float(found[0]) == pytest.approx(-5.0 * 2e6 + math.log(3), rel=1e-6)


@given(seeds, replica_counts, scales)
def test_the_potential_is_rounded_upwards_by_little(seed: int, m: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    dimension = int(rng.choice([1, 5, 300]))
    centres = random_centres(rng, int(rng.integers(1, 30)), dimension, scale, m)
    z = gaussian(seed, 40, dimension, float(rng.choice([0.1, 1.0, 30.0])))
    found = centres.potential(z).numpy()
    exact = -scale * naive_log_sum(z, centres.points, centres.log_weights, centres.rate)
    assert (found >= np.maximum(exact, 0.0)).all()
    largest = max(float(z.double().square().sum(1).max()), float(centres.points.double().square().sum(1).max()))
    assert (found <= np.maximum(exact, 0.0) + 4.0 * scale * centres.rate * cost_error(dimension, largest) + 1e-6).all()


def test_each_record_pays_for_its_own_rounding() -> None:
    """A far record does not raise the others' potentials."""
    centres = random_centres(np.random.default_rng(0), 12, 6, 0.3, 8)
    z = gaussian(3, 50, 6)
    before = centres.potential(z)
    z[7] = 1e4
    after = centres.potential(z)
    others = torch.arange(50) != 7
    assert torch.equal(before[others], after[others])
    assert after[7] > 1e6


# ---- Lemma 2 ---------------------------------------------------------------------------------------------------------


@given(seeds, replica_counts, scales)
def test_lemma_2_for_any_centres(seed: int, m: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    source = DiscreteSource.random(seed, atoms=int(rng.integers(2, 6)), dimension=int(rng.integers(1, 4)))
    centres = random_centres(rng, int(rng.integers(1, 20)), source.points.shape[1], scale, m)
    exact = source.potential(scale, m)
    assert exact.min() >= -1e-9
    f0 = centres.potential(source.tensor).numpy()
    assert (f0 >= 0).all()
    assert source.p @ np.exp((exact - f0) / scale) <= 1 + 1e-9


@given(seeds, replica_counts, scales, st.integers(1, 60), st.integers(0, 30))
def test_lemma_2_for_fitted_centres(seed: int, m: int, scale: float, n: int, rounds: int) -> None:
    rng = np.random.default_rng(seed)
    source = DiscreteSource.random(seed, atoms=int(rng.integers(2, 6)))
    reference = source.tensor[source.draw(rng, n)]
    centres = fit_centres(reference, scale=scale, replicas=m, rounds=rounds, seed=seed)
    assert len(centres.points) == max(1, n // 10)
    assert float(centres.log_weights.exp().sum()) <= 1.0
    f0 = centres.potential(source.tensor).numpy()
    assert (f0 >= 0).all()
    assert source.p @ np.exp((source.potential(scale, m) - f0) / scale) <= 1 + 1e-9


@pytest.mark.parametrize("m", [2, 4, 8])
def test_lemma_2_is_not_far_from_equality(m: int) -> None:
    """Weights that add up to a little more, or a rate a little smaller, would break it: the tests above can fail."""
    source, scale = DiscreteSource.random(4, atoms=2, dimension=1), 20.0
    exact = source.potential(scale, m)
    centres = Centres(
        points=torch.zeros(1, 1), log_weights=torch.zeros(1).double(), rate=(m - 1) / (m * scale), scale=scale
    )
    f0 = centres.potential(source.tensor).numpy()
    value = source.p @ np.exp((exact - f0) / scale)
    assert 0.99 < value <= 1
    less = Centres(points=centres.points, log_weights=centres.log_weights, rate=0.8 * centres.rate, scale=scale)
    assert source.p @ np.exp((exact - less.potential(source.tensor).numpy()) / scale) > 1


# ---- the fit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "m", "scale"), [(0, 2, 0.5), (1, 8, 0.2), (2, 16, 0.1)])
def test_expectation_maximisation_never_lowers_the_likelihood(seed: int, m: int, scale: float) -> None:
    """The mean of f_0 falls with every round, and by a good part of itself in all."""
    rng = np.random.default_rng(seed)
    modes = rng.normal(size=(6, 4)) * 0.6
    z = torch.from_numpy((modes[rng.integers(0, 6, 400)] + 0.1 * rng.normal(size=(400, 4))).astype(np.float32))
    means = [
        float(fit_centres(z, scale=scale, replicas=m, count=12, rounds=rounds, seed=seed).potential(z).mean())
        for rounds in range(12)
    ]
    assert (np.diff(means) <= 1e-6 * scale).all()
    assert means[-1] < 0.97 * means[0]


def test_a_seed_gives_the_same_centres() -> None:
    z = gaussian(0, 5000, 7)  # more than one chunk
    one, two = (fit_centres(z, scale=0.3, replicas=4, count=20, rounds=3, seed=5) for _ in range(2))
    other = fit_centres(z, scale=0.3, replicas=4, count=20, rounds=3, seed=6)
    assert torch.equal(one.points, two.points)
    assert torch.equal(one.log_weights, two.log_weights)
    assert not torch.equal(one.points, other.points)
    assert one.rate == pytest.approx(0.75 / 0.3)


def test_centres_that_nobody_is_near_are_kept_where_they_are() -> None:
    """Copies of one record and a far one: shares underflow, nothing becomes nan."""
    z = torch.cat([torch.zeros(99, 3), torch.full((1, 3), 100.0)])
    for seed in range(5):
        centres = fit_centres(z, scale=0.1, replicas=8, count=10, rounds=10, seed=seed)
        assert centres.points.isfinite().all()
        assert centres.log_weights.isfinite().all()
        assert float(centres.log_weights.exp().sum()) <= 1.0
        assert centres.potential(z).isfinite().all()
