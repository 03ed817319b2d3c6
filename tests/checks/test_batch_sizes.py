"""The wager on equal batch sizes: Poisson batches almost never lose it, fixed and shared ones soon do."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom

from opacus_reconbound._mechanism import BatchSizes, _log_odds
from opacus_reconbound.errors import AccountingError


def optimizer(expected: float, **attributes: Any) -> Any:
    p = torch.nn.Parameter(torch.zeros(1))
    p.grad_sample = torch.zeros(0)
    idle = {"_is_last_step_skipped": False, "_step_skip_queue": []}
    return SimpleNamespace(expected_batch_size=expected, param_groups=[{"params": [p]}], **(idle | attributes))


def steps_until_noticed(sizes: Any, *, records: int, rate: float, **attributes: Any) -> int | None:
    optim, seen = optimizer(int(records * rate), **attributes), BatchSizes()
    for step, size in enumerate(sizes):
        optim.param_groups[0]["params"][0].grad_sample = torch.empty(int(size))
        try:
            seen.observe(optim, rate)
        except AccountingError:
            return step + 1
    return None


CASES = [(100, 0.01), (100, 0.2), (1000, 0.05), (60_000, 256 / 60_000), (64, 0.5), (30, 0.9)]


@pytest.mark.parametrize(("records", "rate"), CASES)
def test_poisson_batches_are_left_alone(records: int, rate: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        assert steps_until_noticed(rng.binomial(records, rate, 2000), records=records, rate=rate) is None


@pytest.mark.parametrize(("records", "rate"), CASES)
def test_the_wager_is_fair_at_best(records: int, rate: float) -> None:
    """E[factor] <= 1 under Poisson sampling, so that its wealth is a supermartingale."""
    odds = _log_odds(rate, records)
    if odds is None:
        return
    sizes = np.arange(records + 1)
    equal = float(np.square(binom.pmf(sizes, records, rate)).sum())
    assert equal * math.exp(odds[0]) + (1 - equal) * math.exp(odds[1]) <= 1.0


@pytest.mark.parametrize(("records", "rate"), [case for case in CASES if case[0] * 1 >= 100 and case[1] < 0.5][1:])
def test_fixed_batches_are_noticed(records: int, rate: float) -> None:
    batch = int(records * rate)
    noticed = steps_until_noticed([batch] * 100, records=records, rate=rate)
    assert noticed is not None
    assert noticed <= 40


@pytest.mark.parametrize("shared", [2, 3])
def test_steps_that_share_a_batch_are_noticed(shared: int) -> None:
    sizes = np.repeat(np.random.default_rng(0).binomial(1000, 0.05, 200), shared)
    for start in range(shared):
        noticed = steps_until_noticed(sizes[start:], records=1000, rate=0.05)
        assert noticed is not None
        assert noticed <= 80


def test_what_it_cannot_judge_it_leaves_alone() -> None:
    same = [20] * 200
    assert steps_until_noticed(same, records=100, rate=0.2) is not None
    assert steps_until_noticed(same, records=100, rate=0.2, _is_last_step_skipped=True) is None
    assert steps_until_noticed(same, records=100, rate=0.2, _step_skip_queue=[True]) is None
    assert steps_until_noticed(same, records=100, rate=0.2, world_size=2) is None
    assert steps_until_noticed(same, records=20, rate=1.0) is None
    assert steps_until_noticed([0] * 200, records=100, rate=0.001) is None
    assert _log_odds(1e-4, 100) is None
    sizes = np.random.default_rng(0).binomial(1000, 0.05, 5000)
    optim, seen = optimizer(10_000.0), BatchSizes()  # a denominator of the user's own, far above the batches' mean
    for size in sizes:
        optim.param_groups[0]["params"][0].grad_sample = torch.empty(int(size))
        seen.observe(optim, 0.05)
