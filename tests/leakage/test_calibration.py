"""Calibration lands on the safe side, and close to it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.errors import CalibrationError, InvalidValueError
from opacus_reconbound.leakage import (
    Run,
    Schedule,
    batch_size_for_leakage,
    noise_for_leakage,
    noise_scale_for_leakage,
    sample_rate_for_leakage,
    steps_for_leakage,
)
from opacus_reconbound.leakage.calibration import steps_per_epoch

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


shapes = st.lists(st.builds(Run, rates, st.floats(0.1, 10), st.integers(1, 500)), min_size=1, max_size=6).map(
    lambda runs: Schedule(tuple(runs))
)


@given(budget=st.floats(-4, 4).map(lambda e: 10.0**e), shape=shapes)
def test_the_factor_meets_the_target_and_a_hair_less_would_not(budget: float, shape: Schedule) -> None:
    factor = noise_scale_for_leakage(budget, shape)
    assert shape.scaled(factor).charged_bits <= budget
    assert shape.scaled(factor * (1 - 1.1e-6)).charged_bits > budget
    coarse = noise_scale_for_leakage(budget, shape, relative_tolerance=0.1)
    assert factor * (1 - 1e-6) <= coarse <= factor * 1.1


@given(budget=st.floats(-4, 4).map(lambda e: 10.0**e), q=rates, steps=st.integers(1, 1000))
def test_the_factor_on_constant_noise_is_the_noise(budget: float, q: float, steps: int) -> None:
    shape = Schedule.constant(sample_rate=q, noise_multiplier=1.0, steps=steps)
    sigma = noise_for_leakage(budget, sample_rate=q, steps=steps)
    assert noise_scale_for_leakage(budget, shape) == pytest.approx(sigma, rel=2e-6)


@given(budget=st.floats(-4, 4).map(lambda e: 10.0**e), sigma=st.floats(0.3, 50), steps=st.integers(0, 100_000))
def test_the_rate_meets_the_target_and_the_next_would_not(budget: float, sigma: float, steps: int) -> None:
    def bits(rate: float) -> float:
        return Schedule.constant(sample_rate=rate, noise_multiplier=sigma, steps=steps).charged_bits

    try:
        rate = sample_rate_for_leakage(budget, noise_multiplier=sigma, steps=steps)
    except CalibrationError as error:
        assert bits(2.0**-24) == error.least_bits > budget  # noqa: PT017 - most examples raise nothing
        return
    assert bits(rate) <= budget
    assert rate == 1.0 or bits(rate * (1 + 1e-15)) > budget


@given(
    budget=st.floats(-2, 4).map(lambda e: 10.0**e),
    records=st.integers(1, 5000),
    sigma=st.floats(0.3, 50),
    length=st.integers(0, 50),
    by_steps=st.booleans(),
)
def test_the_batch_size_meets_the_target_and_one_more_would_not(
    budget: float, records: int, sigma: float, length: int, by_steps: bool
) -> None:
    arguments = {"steps" if by_steps else "epochs": length}

    def bits(size: int) -> float:
        per_epoch = steps_per_epoch(math.ceil(records / size))
        steps = length if by_steps else length * per_epoch
        return Schedule.constant(sample_rate=1 / per_epoch, noise_multiplier=sigma, steps=steps).charged_bits

    try:
        size = batch_size_for_leakage(budget, records=records, noise_multiplier=sigma, **arguments)
    except CalibrationError as error:
        assert bits(1) == error.least_bits > budget  # noqa: PT017 - most examples raise nothing
        return
    assert bits(size) <= budget
    assert all(bits(more) > budget for more in (size + 1, (size + records) // 2, records) if size < more <= records)


def test_limits() -> None:
    assert noise_for_leakage(math.inf, sample_rate=0.1, steps=10) == 0.0
    assert noise_for_leakage(1.0, sample_rate=0.0, steps=10) == 0.0
    assert noise_for_leakage(1.0, sample_rate=0.1, steps=0) == 0.0
    assert steps_for_leakage(1.0, sample_rate=0.1, noise_multiplier=0.0) == 0
    assert steps_for_leakage(1.0, sample_rate=0.0, noise_multiplier=1.0) is None
    assert steps_for_leakage(1.0, sample_rate=0.1, noise_multiplier=math.inf) is None
    assert steps_for_leakage(math.inf, sample_rate=0.1, noise_multiplier=1.0) is None
    some = Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=10)
    assert noise_scale_for_leakage(math.inf, some) == noise_scale_for_leakage(1.0, Schedule()) == 0.0
    assert noise_scale_for_leakage(1.0, Schedule.constant(sample_rate=0, noise_multiplier=math.inf, steps=9)) == 0.0
    assert sample_rate_for_leakage(0.0, noise_multiplier=1.0, steps=0) == 1.0
    assert sample_rate_for_leakage(0.0, noise_multiplier=math.inf, steps=9) == 1.0
    assert batch_size_for_leakage(math.inf, records=7, noise_multiplier=0.0, epochs=3) == 7
    assert batch_size_for_leakage(0.0, records=7, noise_multiplier=1.0, steps=0) == 7


def test_errors() -> None:
    with pytest.raises(CalibrationError, match="zero bits"):
        noise_for_leakage(0.0, sample_rate=0.1, steps=1)
    with pytest.raises(InvalidValueError, match="budget_bits >= 0"):
        noise_for_leakage(-1.0, sample_rate=0.1, steps=1)
    with pytest.raises(InvalidValueError, match="sample_rate"):
        steps_for_leakage(1.0, sample_rate=2.0, noise_multiplier=1.0)
    some = Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=10)
    with pytest.raises(CalibrationError, match="zero bits"):
        noise_scale_for_leakage(0.0, some)
    for noise in (0.0, math.inf):
        silent = Schedule.constant(sample_rate=0.1, noise_multiplier=noise, steps=1)
        with pytest.raises(InvalidValueError, match=rf"in \(0, inf\).*Found {noise}, which no factor changes"):
            noise_scale_for_leakage(1.0, some + silent)
    with pytest.raises(CalibrationError, match=r"Even sample_rate = 5\.96e-08 leaks inf bits in 10 steps") as caught:
        sample_rate_for_leakage(1.0, noise_multiplier=0.0, steps=10)
    assert (caught.value.least_bits, caught.value.at) == (math.inf, "sample_rate = 5.96e-08")
    with pytest.raises(CalibrationError, match=r"Even batch_size = 1 leaks \S+ bits in 500 steps, and 0\.001 are"):
        batch_size_for_leakage(0.001, records=100, noise_multiplier=0.5, epochs=5)
    for arguments in ({}, {"epochs": 1, "steps": 1}):
        with pytest.raises(InvalidValueError, match="either epochs or steps"):
            batch_size_for_leakage(1.0, records=5, noise_multiplier=1.0, **arguments)
    with pytest.raises(InvalidValueError, match=r"records .*Found 0"):
        batch_size_for_leakage(1.0, records=0, noise_multiplier=1.0, steps=1)
