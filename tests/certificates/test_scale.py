"""The reference scale: point estimate, its upper bound and coverage, published MNIST values."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from helpers import GOLDEN, most_failures
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.scale import TraceScale, trace_point, trace_upper
from opacus_reconbound.errors import DataError, InvalidValueError


@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 6), st.floats(-100, 100), st.integers(1, 50))
def test_trace_point_is_numpys(seed: int, n: int, m: int, offset: float, chunk: int) -> None:
    z = np.random.default_rng(seed).normal(size=(n, m)) + offset
    mean, trace = trace_point(torch.from_numpy(z), chunk=chunk)
    np.testing.assert_allclose(mean.numpy(), z.mean(0), rtol=1e-12, atol=1e-12)
    assert trace == pytest.approx(z.var(axis=0).sum(), rel=1e-9)


def test_trace_point_of_float32_loses_nothing_to_the_offset() -> None:
    z = (np.random.default_rng(0).normal(size=(5000, 3)) + 1000.0).astype(np.float32)
    _, trace = trace_point(torch.from_numpy(z))
    assert trace == pytest.approx(z.astype(np.float64).var(axis=0).sum(), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1e6])
def test_constant_data(value: float) -> None:
    with pytest.raises(DataError, match=r"all alike.*nothing to reconstruct.*Check"):
        trace_point(torch.full((100, 5), value))


def test_one_record_that_differs_is_enough() -> None:
    z = torch.zeros(1000, 4)
    z[3, 1] = 1.0
    assert trace_point(z)[1] == pytest.approx(0.001 * 0.999, rel=1e-12)


@pytest.mark.parametrize("chance", [0.005, 0.1, 0.5])
@pytest.mark.parametrize("n", [40, 400])
def test_trace_upper_covers_a_bounded_law(chance: float, n: int) -> None:
    """Bernoulli coordinates, all equal: the squared distance takes its extremes only."""
    level, repeats, m = 0.3, 400, 3
    truth = m * chance * (1 - chance)
    rng = np.random.default_rng(n)
    failures = plain = 0
    for seed in range(repeats):
        z = torch.from_numpy(np.repeat(rng.random((n, 1)) < chance, m, axis=1).astype(np.float32))
        upper, pairs = trace_upper(z, level=level, squared_diameter=float(m), seed=seed)
        assert pairs == n // 2
        assert 0 < upper <= 0.5 * m * (1 + 1e-9)
        failures += upper < truth
        plain += float(z.var(dim=0, correction=1).sum()) < truth
    assert failures <= most_failures(repeats, level)
    assert plain > 0.2 * repeats  # the point estimate is no upper bound


def test_trace_upper_is_mean_and_range_term_where_all_pairs_are_alike() -> None:
    z = torch.eye(50)  # any two are at squared distance 2, so Y = 1 and its variance is zero
    upper, pairs = trace_upper(z, level=0.05, squared_diameter=1000.0, seed=1)
    assert pairs == 25
    assert upper == pytest.approx(1 + 7 * 500 * math.log(2 / 0.05) / (3 * 24), rel=1e-9)
    capped, _ = trace_upper(z, level=0.05, squared_diameter=2.0, seed=1)
    assert capped == pytest.approx(1.0, rel=1e-9)
    assert capped >= 1.0


def test_the_pairing_is_random_and_repeatable() -> None:
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 2)))
    first, again = (
        [trace_upper(z, level=0.05, squared_diameter=100.0, seed=seed)[0] for seed in range(9)] for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 9
    assert trace_upper(z, level=0.001, squared_diameter=100.0, seed=0)[0] > first[0]


def test_trace_upper_of_an_odd_sample_and_many_records() -> None:
    rng = np.random.default_rng(0)
    z = torch.from_numpy(rng.random((20_001, 2)).astype(np.float32))
    upper, pairs = trace_upper(z, level=0.05, squared_diameter=2.0, seed=3)
    assert pairs == 10_000
    assert 2 / 12 < upper < 2 / 12 * 1.05


GOOD = {"scale": 2.0, "upper": 2.5, "level": 0.05, "pairs": 10, "squared_diameter": 30.0}


def test_what_rho_is_relative_to() -> None:
    assert TraceScale(**GOOD).reference == 2.0
    assert TraceScale(**GOOD, normaliser="ucb").reference == 2.5
    assert TraceScale(**GOOD, normaliser="declared", declared=7.0).reference == 7.0
    labels = [
        TraceScale(**GOOD).label,
        TraceScale(**GOOD, normaliser="ucb").label,
        TraceScale(**GOOD, normaliser="declared", declared=7.0).label,
    ]
    assert "estimated" in labels[0]
    assert "upper bound" in labels[1]
    assert "0.95" in labels[1]
    assert "declared" in labels[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 0.0}, "trace.scale > 0"),
        ({"upper": -1.0}, "trace.upper > 0"),
        ({"level": 1.0}, r"trace.level in \(0, 1\)"),
        ({"squared_diameter": float("inf")}, "trace.squared_diameter to be finite"),
        ({"normaliser": "declared"}, "needs its value"),
        ({"declared": 1.0}, "needs its value"),
        ({"normaliser": "declared", "declared": 0.0}, "trace.declared > 0"),
        ({"normaliser": "mean"}, "'point', 'ucb' or a declared.*'mean'"),
    ],
)
def test_invalid_scales(change: dict, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        TraceScale(**(GOOD | change))


@pytest.mark.skipif("RECONBOUND_MNIST" not in os.environ, reason="set RECONBOUND_MNIST to an mnist.npz to check it")
def test_published_mnist_scale() -> None:
    with np.load(os.environ["RECONBOUND_MNIST"]) as file:
        images = np.concatenate([file["x_train"], file["x_test"]])
    order = np.random.default_rng(42).permutation(70_000)
    reference = torch.from_numpy(images[order[60_000:]].reshape(10_000, 784).astype(np.float32))
    published = GOLDEN["mnist_pixel_block_certificate"]
    _, trace = trace_point(reference)
    assert trace == pytest.approx(GOLDEN["paper_split_mnist"]["pixel_trace_ddof0"], rel=1e-6)
    assert trace == pytest.approx(published["tr_sigma_hat"], rel=1e-6)
    for seed in range(3):  # the published pairing is not known
        upper, pairs = trace_upper(reference, level=0.05, squared_diameter=published["B"], seed=seed)
        assert pairs == published["pairs"]
        assert upper == pytest.approx(published["tr_sigma_ucb95"], rel=0.01)
        assert upper > trace
