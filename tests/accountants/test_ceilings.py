"""Far from the budget a step is admitted by an upper bound on its charge; the decisions are those of the exact sum."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opacus_reconbound import accountants
from opacus_reconbound.accountants import RDPMutualInformationAccountant
from opacus_reconbound.errors import ReconstructionBudgetExceeded
from opacus_reconbound.leakage import Schedule, step_ceiling, step_charge

pairs = st.tuples(
    st.one_of(st.floats(-1.5, 3).map(lambda e: 10.0**e), st.sampled_from([0.5, 1.0, math.inf])),
    st.one_of(st.floats(-8, 0).map(lambda e: 10.0**e), st.sampled_from([0.0, 2.0**-24, 0.01, 1.0])),
)
distinct = st.lists(st.tuples(pairs, st.integers(1, 3)), min_size=1, max_size=12).map(
    lambda runs: [pair for pair, steps in runs for _ in range(steps)]
)


def exact_refusal(steps: list[tuple[float, float]], budget: float) -> int:
    """How many steps the exact sum admits."""
    total = Fraction(0)
    for index, (sigma, q) in enumerate(steps):
        total += Fraction(step_charge(q, sigma)[1])
        if total.numerator / total.denominator > budget:
            return index
    return len(steps)


def taken(accountant: RDPMutualInformationAccountant, steps: list[tuple[float, float]]) -> int:
    """How many of these steps it takes before it refuses one."""
    for index, (sigma, q) in enumerate(steps):
        try:
            accountant.step(noise_multiplier=sigma, sample_rate=q)
        except ReconstructionBudgetExceeded:
            return index
    return len(steps)


def armed(budget: float) -> RDPMutualInformationAccountant:
    accountant = RDPMutualInformationAccountant()
    accountant.budget_bits = budget
    return accountant


@settings(max_examples=500)
@given(pair=pairs)
def test_the_ceiling_is_not_below_the_charge_and_not_far_above(pair: tuple[float, float]) -> None:
    sigma, q = pair
    charge = step_charge(q, sigma)[1]
    assert charge <= step_ceiling(q, sigma) <= 2.5 * charge


extremes = st.tuples(
    st.one_of(st.floats(-323, 300), st.floats(150, 165)).map(lambda e: 10.0**e),
    st.one_of(st.floats(-323, 0).map(lambda e: 10.0**e), st.integers(1, 53).map(lambda e: 1.0 - 2.0**-e)),
)


@settings(max_examples=1000)
@given(pair=extremes)
@example(pair=(2.8271564305714114e161, 0.9999999962747097))
@example(pair=(8.138784593880845e160, 0.9999999999999999))
@example(pair=(1e-310, 0.01))
def test_the_ceiling_is_not_below_the_charge_at_the_ends_of_the_numbers(pair: tuple[float, float]) -> None:
    sigma, q = pair
    assert step_charge(q, sigma)[1] <= step_ceiling(q, sigma)


def test_the_ceiling_of_a_step_without_noise() -> None:
    assert step_ceiling(0.1, 0.0) == math.inf
    assert step_ceiling(0.0, 0.0) == step_ceiling(0.0, 1.0) == step_ceiling(0.1, math.inf) == 0.0


@given(steps=distinct, end=st.integers(0, 40), hair=st.sampled_from([-1, 0, 1]))
def test_it_refuses_the_step_that_the_exact_sum_refuses(steps: list[Any], end: int, hair: int) -> None:
    """The budget is the sum of the first steps, and one number below and above it."""
    budget = Schedule.from_history((sigma, q, 1) for sigma, q in steps[:end]).charged_bits
    if hair:
        budget = max(0.0, math.nextafter(budget, hair * math.inf))
    accountant = armed(budget)
    assert taken(accountant, steps) == exact_refusal(steps, budget)
    assert accountant.charged_bits == accountant.schedule.charged_bits <= budget
    assert len(accountant) == accountant.schedule.steps
    if len(accountant) < len(steps):
        sigma, q = steps[len(accountant)]
        with pytest.raises(ReconstructionBudgetExceeded) as stop:
            accountant.step(noise_multiplier=sigma, sample_rate=q)
        assert stop.value.leakage_bits == accountant.charged_bits
        assert stop.value.next_bits == Schedule.from_history([*accountant.history, (sigma, q, 1)]).charged_bits


@pytest.mark.parametrize("hair", [-1, 0, 1])
@pytest.mark.parametrize(
    ("sample_rate", "first", "last"), [(0.01, 1.0, 2.0), (0.01, 2.0, 1.0), (1e-5, 0.3, 0.25), (1.0, 5.0, 50.0)]
)
def test_at_the_boundary_of_a_long_schedule(sample_rate: float, first: float, last: float, hair: int) -> None:
    count = 3000
    sigmas = [first + (last - first) * index / count for index in range(count)]
    total = Schedule.from_arrays(sample_rates=sample_rate, noise_multipliers=sigmas).charged_bits
    budget = total if hair == 0 else math.nextafter(total, hair * math.inf)
    accountant = armed(budget)
    assert taken(accountant, [(sigma, sample_rate) for sigma in sigmas]) == count - (hair < 0)
    accountant.budget_bits = total
    exceeds = accountant.would_exceed(noise_multiplier=last, sample_rate=sample_rate)
    assert exceeds == (accountant.leakage_after(noise_multiplier=last, sample_rate=sample_rate) > total)


@given(steps=distinct, more=distinct, share=st.floats(0.5, 1.5))
def test_what_is_done_in_between_changes_no_decision(steps: list[Any], more: list[Any], share: float) -> None:
    """Reading, copying, lifting the budget, editing the history: the ceiling is dropped where it no longer holds."""
    finite = [step for step in steps if math.isfinite(step_charge(step[1], step[0])[1])]
    accountant = armed(1e300)
    taken(accountant, finite)
    budget = share * Schedule.from_history((s, q, 1) for s, q in finite + more).charged_bits
    ways = []
    for change in (
        lambda a: a.leakage_bits,
        lambda a: setattr(a, "history", list(a.history)),
        lambda a: a.history.extend([(1.0, 0.0, 1)]),
        lambda a: a.would_exceed(noise_multiplier=1.0, sample_rate=0.5, steps=1000),
        lambda a: len(a),
    ):
        twin = copy.deepcopy(accountant)
        change(twin)
        twin.budget_bits = budget
        ways.append(taken(twin, more))
    assert ways == [max(0, exact_refusal(finite + more, budget) - len(finite))] * len(ways)


@given(steps=distinct, sigma=st.floats(0.3, 30), q=st.floats(0, 1), count=st.integers(0, 10**6), share=st.floats(0, 3))
def test_would_exceed_is_what_the_exact_sum_says(
    steps: list[Any], sigma: float, q: float, count: int, share: float
) -> None:
    accountant = armed(1e300)
    taken(accountant, steps)
    pair = {"noise_multiplier": sigma, "sample_rate": q, "steps": count}
    after = copy.deepcopy(accountant).leakage_after(**pair)
    for budget in (share * after, after, math.nextafter(after, 0)):
        if math.isfinite(budget):
            assert copy.deepcopy(accountant).would_exceed(budget, **pair) == (after > budget)


def test_steps_after_the_budget_was_lifted_count() -> None:
    accountant = armed(1.0)
    taken(accountant, [(1.0, 0.1)] * 3)
    accountant.budget_bits = None
    taken(accountant, [(1.0 + i / 100, 0.1) for i in range(40)])
    accountant.budget_bits = accountant.charged_bits
    assert len(accountant) == 43
    with pytest.raises(ReconstructionBudgetExceeded):
        accountant.step(noise_multiplier=9.0, sample_rate=0.1)


def test_far_from_the_budget_no_step_is_summed_and_near_it_few_sums_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    charges = accountants.step_charges

    def counted(rates: Any, sigmas: Any) -> Any:
        sums.append(len(rates))
        return charges(rates, sigmas)

    monkeypatch.setattr(accountants, "step_charges", counted)
    steps = [(1.0 + index * 1e-4, 0.01) for index in range(5000)]
    accountant = armed(1e3)
    assert taken(accountant, steps) == 5000
    assert sums == []
    total = accountant.charged_bits
    assert sums == [5000]
    sums.clear()
    assert taken(armed(total), steps) == 5000
    assert len(sums) <= 20
    assert sum(sums) <= 5000 + len(sums)  # a sum begins with the last run of the one before
