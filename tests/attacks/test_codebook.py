"""Codebook releases: leakage within the rate, answers of least error, and known optima."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from helpers import gaussian_distortion_rate, nats
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.attacks import attack_codebook, fit_codebook, flip_probability
from opacus_reconbound.errors import DataError, InvalidValueError

pytest.importorskip("sklearn")


def revealed_bits(p: float) -> float:
    """1 − h(p) by mpmath's digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        x = mpmath.mpf(p)
        return float(1 + (x * mpmath.log(x) + (1 - x) * mpmath.log(1 - x)) / mpmath.log(2))


@given(st.floats(1e-14, 1.0, exclude_max=True))
def test_the_flipped_bit_reveals_what_it_may(bits: float) -> None:
    p = flip_probability(bits)
    found = revealed_bits(p)
    assert found <= bits
    assert found == pytest.approx(bits, rel=1e-5 if bits > 1e-13 else 1e-1)


def test_the_ends() -> None:
    assert flip_probability(0) == 0.5
    assert flip_probability(1) == 0.0
    with pytest.raises(InvalidValueError, match=r"in \[0, 1\]"):
        flip_probability(1.01)


def test_one_bit_about_a_gaussian_is_its_sign() -> None:
    """Lloyd and Max: cells split at the mean, answers ± √(2/π), error 1 − 2/π."""
    rng = np.random.default_rng(0)
    sample, targets = rng.standard_normal((20_000, 1)), rng.standard_normal((20_000, 1))
    found = attack_codebook(targets, sample, rate_bits=1, variance=1.0)
    np.testing.assert_allclose(np.sort(found.codebook.means.ravel()), [-0.798, 0.798], atol=0.02)
    assert found.errors.mse == pytest.approx(1 - 2 / math.pi, abs=4 * found.errors.mse_standard_error)
    assert found.codebook.entropy_bits == pytest.approx(1.0, abs=1e-3)


def test_a_flipped_sign_by_hand() -> None:
    """Posterior means ± (1 − 2p) √(2/π), error 1 − (1 − 2p)² 2/π; between prior and one bit."""
    rng = np.random.default_rng(1)
    sample, targets = rng.standard_normal((20_000, 1)), rng.standard_normal((20_000, 1))
    found = attack_codebook(targets, sample, rate_bits=0.3, variance=1.0)
    expected = 1 - (1 - 2 * found.flip) ** 2 * 2 / math.pi
    assert 0 < found.flip < 0.5
    assert found.errors.mse == pytest.approx(expected, abs=4 * found.errors.mse_standard_error)


@pytest.mark.parametrize("bits", [0.1, 0.5, 1, 2, 4])
@pytest.mark.parametrize("balanced", [True, False])
def test_no_codebook_beats_the_distortion_rate_function(bits: float, balanced: bool) -> None:
    variances = np.array([4.0, 1.0, 0.25])
    rng = np.random.default_rng(2)
    sample, targets = (rng.standard_normal((4000, 3)) * np.sqrt(variances) for _ in range(2))
    found = attack_codebook(targets, sample, rate_bits=bits, variance=variances.sum(), balanced=balanced)
    least = gaussian_distortion_rate(variances, nats(bits))
    assert least <= found.errors.mse + 3 * found.errors.mse_standard_error
    assert found.errors.mse < 1.15 * variances.sum() * (1 - 0.12 * min(bits, 1))
    assert found.codebook.entropy_bits <= max(1, bits) + 1e-9


def test_balance_uses_the_whole_rate() -> None:
    """A lopsided source: plain k-means spends cells on the tail."""
    sample = np.random.default_rng(3).exponential(size=(3000, 2)) ** 2
    plain, balanced = (fit_codebook(sample, 3, balanced=flag) for flag in (False, True))
    assert balanced.entropy_bits > 2.98 > plain.entropy_bits
    np.testing.assert_allclose(balanced.shares, 1 / 8, atol=0.02)
    assert (plain.offsets == 0).all()


def test_means_and_shares_are_those_of_the_cells() -> None:
    sample = np.random.default_rng(4).normal(size=(500, 3))
    for balanced in (True, False):
        codebook = fit_codebook(sample, 2, balanced=balanced)
        cells = codebook.index(sample)
        assert codebook.shares.sum() == pytest.approx(1.0)
        for j in range(4):
            np.testing.assert_allclose(codebook.means[j], sample[cells == j].mean(axis=0))
            assert codebook.shares[j] == (cells == j).mean()


def test_as_many_points_as_cells() -> None:
    points = np.array([[0.0], [1.0], [5.0], [9.0]])
    found = attack_codebook(points, np.repeat(points, 5, axis=0), rate_bits=2, variance=1.0)
    np.testing.assert_allclose(found.errors.squared, 0.0, atol=1e-12)


def test_seeds() -> None:
    sample = np.random.default_rng(5).normal(size=(300, 3))
    first, again, other = (fit_codebook(sample, 4, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.centres, again.centres)
    assert not np.allclose(first.centres, other.centres)


def test_bad_input() -> None:
    sample = np.random.default_rng(6).normal(size=(20, 2))
    with pytest.raises(InvalidValueError, match=r"whole number, or below 1. Found 1.5"):
        attack_codebook(sample, sample, rate_bits=1.5, variance=1.0)
    with pytest.raises(DataError, match="32 cells needs as many different vectors"):
        fit_codebook(sample, 5)
    with pytest.raises(DataError, match="Targets have 1 entries, but the sample 2"):
        attack_codebook(sample[:, :1], sample, rate_bits=1, variance=1.0)
    with pytest.raises(InvalidValueError, match="rate_bits"):
        fit_codebook(sample, 11)


def test_scikit_learn_stays_optional() -> None:
    code = """
import sys
sys.modules["sklearn"] = None
import numpy as np
from opacus_reconbound.attacks import FULL_BATCH, attack_prior_aware, fit_codebook
attack_prior_aware(np.eye(3), np.eye(3), leakage_bits=1, threat=FULL_BATCH, variance=1.0)
try:
    fit_codebook(np.eye(3), 1)
except ValueError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install 'opacus-reconbound[attacks]'" in run.stdout, run.stderr
