"""Fano's bound on exact recovery: closed forms, a guess, the best test of a finite channel, bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from opacus_reconbound.comparisons import exact_recovery
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.leakage import Schedule


@pytest.mark.parametrize("count", [2, 10, 256**3, 2**500])
def test_a_guess_and_certainty(count: int) -> None:
    assert 1 / count <= exact_recovery(0.0, count) <= 1.01 / count + 1e-13
    assert exact_recovery(math.log2(count), count) == 1.0
    assert exact_recovery(math.inf, count) == 1.0


@pytest.mark.parametrize("s", [0.2, 0.5, 0.9])
def test_it_inverts_fanos_inequality(s: float) -> None:
    gamma = math.log2(10) + s * math.log2(s) + (1 - s) * math.log2(1 - s) - (1 - s) * math.log2(9)
    assert exact_recovery(gamma, 10) == pytest.approx(s, rel=1e-9)


def test_a_biased_source_is_guessed_at_least_as_often_as_its_mode() -> None:
    p = np.array([0.7, 0.1, 0.1, 0.1])
    entropy = float(-(p * np.log2(p)).sum())
    assert exact_recovery(0.0, 4, entropy) == pytest.approx(0.7, rel=1e-6)  # equality: the others are equal
    q = np.array([0.6, 0.3, 0.1, 0.0001])
    q = q / q.sum()
    assert exact_recovery(0.0, 4, float(-(q * np.log2(q)).sum())) > q.max()


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_two_records_in_one_gaussian_step(sigma: float) -> None:
    # gradients −1 and 1; the best attack is a sign
    attained = float(norm.cdf(1 / sigma))
    leakage = Schedule.constant(sample_rate=1.0, noise_multiplier=sigma, steps=1).charged_bits
    assert attained < exact_recovery(leakage, 2)


def test_it_rises_with_leakage_and_falls_with_entropy() -> None:
    by_leakage = [exact_recovery(bits, 1000) for bits in (0.0, 0.1, 1.0, 5.0, 9.0)]
    by_entropy = [exact_recovery(1.0, 1000, bits) for bits in (9.9, 8.0, 4.0, 1.5)]
    assert all(a < b for a, b in itertools.pairwise(by_leakage))
    assert all(a < b for a, b in itertools.pairwise(by_entropy))
    assert exact_recovery(1.0, 1000, 0.5) == 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1.0, 10), "leakage_bits >= 0"),
        ((math.nan, 10), "leakage_bits"),
        ((1.0, 1), "candidates"),
        ((1.0, 2.5), "candidates"),
        ((1.0, 8, 4.0), "that needs more of them"),
        ((1.0, 8, -1.0), "entropy_bits >= 0"),
    ],
)
def test_bad_input(arguments: tuple, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        exact_recovery(*arguments)
