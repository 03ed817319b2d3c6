"""Calibration lands on the safe side, and close to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.errors import CalibrationError, InvalidValueError
from opacus_reconbound.leakage import Schedule, noise_for_leakage, steps_for_leakage

rates = st.floats(-6, 0).map(lambda e: 10.0**e)


@given(budget=st.floats(-4, 4).map(lambda e: 10.0**e), q=rates, steps=st.integers(1, 100_000))
def test_the_noise_meets_the_target_and_little_less_would_not(budget: float, q: float, steps: int) -> None:
    sigma = noise_for_leakage(budget, sample_rate=q, steps=steps)
    assert Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps).charged_bits <= budget
    less = Schedule.constant(sample_rate=q, noise_multiplier=sigma * (1 - 3e-6), steps=steps)
    assert less.charged_bits > budget


@given(budget=st.floats(0, 50), q=rates, sigma=st.floats(0.3, 50))
def test_the_steps_meet_the_target_and_one_more_would_not(budget: float, q: float, sigma: float) -> None:
    steps = steps_for_leakage(budget, sample_rate=q, noise_multiplier=sigma)
    assert steps is not None
    assert Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps).charged_bits <= budget
    assert Schedule.constant(sample_rate=q, noise_multiplier=sigma, steps=steps + 1).charged_bits > budget


def test_limits() -> None:
    assert noise_for_leakage(math.inf, sample_rate=0.1, steps=10) == 0.0
    assert noise_for_leakage(1.0, sample_rate=0.0, steps=10) == 0.0
    assert noise_for_leakage(1.0, sample_rate=0.1, steps=0) == 0.0
    assert steps_for_leakage(1.0, sample_rate=0.1, noise_multiplier=0.0) == 0
    assert steps_for_leakage(1.0, sample_rate=0.0, noise_multiplier=1.0) is None
    assert steps_for_leakage(1.0, sample_rate=0.1, noise_multiplier=math.inf) is None
    assert steps_for_leakage(math.inf, sample_rate=0.1, noise_multiplier=1.0) is None


def test_errors() -> None:
    with pytest.raises(CalibrationError, match="zero bits"):
        noise_for_leakage(0.0, sample_rate=0.1, steps=1)
    with pytest.raises(InvalidValueError, match="budget_bits >= 0"):
        noise_for_leakage(-1.0, sample_rate=0.1, steps=1)
    with pytest.raises(InvalidValueError, match="sample_rate"):
        steps_for_leakage(1.0, sample_rate=2.0, noise_multiplier=1.0)
