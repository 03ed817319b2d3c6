"""Schedules: published runs, additivity, exact sums, conversions, errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from helpers import GOLDEN, nats
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.leakage import ExactSum, Run, Schedule, step_charge, step_leakage

runs = st.lists(
    st.builds(Run, st.sampled_from([0.0, 1e-6, 0.02, 0.5, 1.0]), st.sampled_from([0.3, 1.0, 7.5]), st.integers(0, 999)),
    max_size=8,
)


@pytest.mark.parametrize("row", GOLDEN["gamma"]["rows"], ids=lambda row: f"{row['data']}-{row['sigma']}")
def test_published_whole_runs(row: dict) -> None:
    schedule = Schedule.constant(sample_rate=float(Fraction(row["q"])), noise_multiplier=row["sigma"], steps=row["T"])
    # printed to eight digits after the point, from σ printed to six
    assert nats(schedule.leakage_bits) == pytest.approx(row["gamma"], abs=5e-6 * row["gamma"] + 5e-9)


@given(first=runs, second=runs)
def test_leakage_adds_up(first: list[Run], second: list[Run]) -> None:
    a, b = Schedule(tuple(first)), Schedule(tuple(second))
    assert (a + b).steps == a.steps + b.steps
    assert (a + b).leakage_bits == pytest.approx(a.leakage_bits + b.leakage_bits, rel=1e-14)
    assert (a + b).leakage_bits == (b + a).leakage_bits


@given(parts=runs)
def test_the_sum_is_exact_and_rounded_once(parts: list[Run]) -> None:
    schedule = Schedule(tuple(parts))
    exact = sum((Fraction(step_leakage(r.sample_rate, r.noise_multiplier)) * r.steps for r in parts), Fraction(0))
    assert schedule.leakage_bits == exact.numerator / exact.denominator
    running = ExactSum()
    for run in parts:
        for _ in range(run.steps % 7):
            running.add(step_leakage(run.sample_rate, run.noise_multiplier))
        running.add(step_leakage(run.sample_rate, run.noise_multiplier), run.steps - run.steps % 7)
    assert running.value == schedule.leakage_bits


@given(parts=runs)
def test_history_round_trip(parts: list[Run]) -> None:
    schedule = Schedule(tuple(parts))
    history = [(run.noise_multiplier, run.sample_rate, run.steps) for run in schedule]
    assert Schedule.from_history(history) == schedule
    assert Schedule.from_history([list(entry) for entry in history]) == schedule


def test_equal_neighbours_merge_and_empty_runs_vanish() -> None:
    schedule = Schedule((Run(0.1, 1.0, 2), Run(0.2, 1.0, 0), Run(0.1, 1.0, 3)))
    assert schedule.runs == (Run(0.1, 1.0, 5),)
    assert Schedule().leakage_bits == Schedule().charged_bits == 0.0


def test_from_arrays() -> None:
    schedule = Schedule.from_arrays(sample_rates=0.1, noise_multipliers=[1.0, 2.0], steps=[3, 4])
    assert schedule.runs == (Run(0.1, 1.0, 3), Run(0.1, 2.0, 4))


def test_the_sampling_excess_is_what_the_grid_adds() -> None:
    schedule = Schedule.constant(sample_rate=1e-6, noise_multiplier=1.0, steps=10)
    recorded, charged = step_charge(1e-6, 1.0)
    assert schedule.sampling_excess_bits == pytest.approx(10 * (charged - recorded), rel=1e-9)
    assert schedule.charged_bits / schedule.leakage_bits > 1.02
    on_grid = Schedule.constant(sample_rate=0.25, noise_multiplier=1.0, steps=10)
    assert on_grid.sampling_excess_bits == 0.0


@given(parts=runs, data=st.data())
def test_progress_agrees_with_the_truncated_schedule(parts: list[Run], data: st.DataObject) -> None:
    schedule = Schedule(tuple(parts))
    at = data.draw(st.integers(0, schedule.steps))
    remaining, head = at, []
    for run in schedule:
        head.append(Run(run.sample_rate, run.noise_multiplier, min(run.steps, remaining)))
        remaining -= head[-1].steps
    expected = Schedule(tuple(head)).charged_bits
    value = float(schedule.charged_bits_at(at))
    assert expected <= value <= expected * (1 + 1e-12)


def test_infinite_leakage() -> None:
    schedule = Schedule.constant(sample_rate=0.1, noise_multiplier=0.0, steps=1)
    assert schedule.leakage_bits == schedule.charged_bits == math.inf
    assert schedule.sampling_excess_bits == 0.0
    assert schedule.charged_bits_at([0, 1]).tolist() == [0.0, math.inf]
    assert Schedule.constant(sample_rate=0.1, noise_multiplier=0.0, steps=0).leakage_bits == 0.0


def test_huge_step_counts_stay_exact() -> None:
    steps = 2**40 + 12345
    bits = step_leakage(0.01, 1.0)
    exact = Fraction(bits) * steps
    schedule = Schedule.constant(sample_rate=0.01, noise_multiplier=1.0, steps=steps)
    assert schedule.leakage_bits == exact.numerator / exact.denominator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_rate": 1.2, "noise_multiplier": 1.0, "steps": 1}, r"sample_rate in \[0, 1\].*1\.2"),
        ({"sample_rate": math.nan, "noise_multiplier": 1.0, "steps": 1}, "NaN"),
        ({"sample_rate": 0.1, "noise_multiplier": -1.0, "steps": 1}, "noise_multiplier >= 0"),
        ({"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 1.5}, "whole number"),
        ({"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": -1}, "whole number"),
        ({"sample_rate": "x", "noise_multiplier": 1.0, "steps": 1}, "number"),
    ],
)
def test_bad_runs(arguments: dict, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Schedule.constant(**arguments)


def test_bad_histories_name_the_entry() -> None:
    with pytest.raises(InvalidValueError, match=r"history\[1\]"):
        Schedule.from_history([(1.0, 0.1, 5), (1.0, 0.1)])
    with pytest.raises(InvalidValueError, match=r"history\[0\]"):
        Schedule.from_history([(1.0, 3.0, 5)])
    with pytest.raises(InvalidValueError, match="Run objects"):
        Schedule(((0.1, 1.0, 3),))  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="one length"):
        Schedule.from_arrays(sample_rates=[0.1, 0.2], noise_multipliers=[1.0, 1.0, 1.0])


def test_progress_outside_the_run() -> None:
    with pytest.raises(InvalidValueError, match=r"\[0, 10\]"):
        Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=10).charged_bits_at(11)


def test_schedules_are_frozen_and_compare_by_value() -> None:
    schedule = Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=1)
    with pytest.raises(AttributeError):
        schedule.runs = ()  # type: ignore[misc]
    assert schedule == Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=1)
    with pytest.raises(TypeError):
        schedule + 1  # type: ignore[operator]


def test_per_step_noise_of_a_long_run_is_summed_like_its_parts() -> None:
    sigma = np.linspace(0.6, 3.0, 2000)
    schedule = Schedule.from_arrays(sample_rates=0.01, noise_multipliers=sigma)
    assert schedule.leakage_bits == math.fsum(step_leakage(0.01, float(s)) for s in sigma)


def test_more_steps_than_can_be_counted() -> None:
    most = 2**53
    for steps in (most + 1, 2**63, 10**30):
        with pytest.raises(InvalidValueError, match=f"steps to be a whole number <= {most}. Found {steps}"):
            Schedule.constant(sample_rate=0.01, noise_multiplier=1.0, steps=steps)
    full = Schedule.constant(sample_rate=0.01, noise_multiplier=1.0, steps=most)
    assert full.leakage_bits == Fraction(step_leakage(0.01, 1.0)) * most
    both = full + Schedule.constant(sample_rate=0.02, noise_multiplier=1.0, steps=most)
    assert both.steps == 2 * most
    assert both.leakage_bits == pytest.approx((step_leakage(0.01, 1.0) + step_leakage(0.02, 1.0)) * most, rel=1e-15)


@given(parts=runs, factor=st.floats(0.1, 10))
def test_scaled_noise(parts: list[Run], factor: float) -> None:
    schedule = Schedule(tuple(parts))
    scaled = schedule.scaled(factor)
    assert [(run.sample_rate, run.steps) for run in scaled] == [(run.sample_rate, run.steps) for run in schedule]
    assert [r.noise_multiplier for r in scaled] == [factor * r.noise_multiplier for r in schedule]
    assert schedule.scaled(1.0) == schedule
    assert Schedule.constant(sample_rate=0.1, noise_multiplier=math.inf, steps=1).scaled(0.0).leakage_bits == 0.0
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidValueError, match="factor"):
            schedule.scaled(bad)
