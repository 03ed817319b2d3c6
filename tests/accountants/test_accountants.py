"""The accountants in real engines: drop-in for Opacus, and γ a pure function of the history."""

from __future__ import annotations

import copy
import importlib
import math
import pickle
from typing import Any

import pytest
from helpers import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant, create_accountant, register_accountant, registry
from opacus.accountants.utils import get_noise_multiplier
from opacus.schedulers import ExponentialNoise

from opacus_reconbound import accountants
from opacus_reconbound.accountants import (
    MutualInformationAccountant,
    PRVMutualInformationAccountant,
    RDPMutualInformationAccountant,
    StepHook,
)
from opacus_reconbound.errors import AccountingError, InvalidValueError
from opacus_reconbound.leakage import Schedule, step_charge, step_leakage

rates = st.sampled_from([0.0, 1e-6, 0.01, 0.1, 1 / 3, 1.0])
noises = st.sampled_from([0.05, 0.5, 1.0, 1.0 + 2**-52, 7.25, 1e4])
pairs = st.tuples(noises, rates)
histories = st.lists(st.tuples(noises, rates, st.integers(0, 50)), max_size=8)


def steps(accountant: Any, pair: tuple[float, float], count: int) -> None:
    for _ in range(count):
        accountant.step(noise_multiplier=pair[0], sample_rate=pair[1])


def figures(accountant: MutualInformationAccountant) -> tuple[float, float, float, int]:
    return (
        accountant.leakage_bits,
        accountant.charged_bits,
        accountant.sampling_excess_bits,
        len(accountant),
    )


# -- as a drop-in ----------------------------------------------------------------------------------------------


def test_training_is_charged_step_by_step(name: str, mode: dict[str, Any], training: Any) -> None:
    run = training(name, **mode)
    run.epoch()
    accountant = run.engine.accountant
    assert accountant.mechanism() == name
    assert accountant.history == [(1.0, 0.2, 5)]
    assert len(accountant) == 5
    assert accountant.leakage_bits == pytest.approx(5 * step_leakage(0.2, 1.0), rel=1e-15)
    assert accountant.charged_bits == pytest.approx(5 * step_charge(0.2, 1.0)[1], rel=1e-15)
    assert accountant.charged_bits == accountant.schedule.charged_bits
    plain = create_accountant(name.removesuffix("+mi"))
    plain.history = [(1.0, 0.2, 5)]
    assert run.engine.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_calibration_to_epsilon_gives_the_noise_of_the_plain_accountant(name: str, training: Any) -> None:
    ours = training(name, epsilon=2.0)
    assert ours.optimizer.noise_multiplier == training(name.removesuffix("+mi"), epsilon=2.0).optimizer.noise_multiplier
    assert len(ours.engine.accountant) == 0


def test_keywords_meant_for_the_optimizer_are_swallowed(name: str) -> None:
    # make_private_with_epsilon hands one dictionary to the accountant and to the optimizer
    keywords = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 20}
    ours = get_noise_multiplier(accountant=name, clipbound_learning_rate=0.2, max_clipbound=10.0, **keywords)
    assert ours == get_noise_multiplier(accountant=name.removesuffix("+mi"), **keywords)


def test_keywords_of_the_inner_accountant_pass() -> None:
    history = [(1.0, 0.1, 30)]
    rdp, prv = RDPMutualInformationAccountant(), PRVMutualInformationAccountant()
    rdp.history, prv.history = history, history
    plain = RDPAccountant()
    plain.history = history
    assert rdp.get_epsilon(1e-5, [4, 8]) == rdp.get_epsilon(1e-5, alphas=[4, 8]) == plain.get_epsilon(1e-5, [4, 8])
    assert rdp.get_epsilon(1e-5, alphas=[2]) > rdp.get_epsilon(1e-5)
    assert prv.get_epsilon(1e-5, eps_error=0.1) > prv.get_epsilon(1e-5)


@pytest.mark.parametrize("row", GOLDEN["opacus_epsilon"]["rows"], ids=lambda row: f"opacus-tests-{row['accountant']}")
def test_published_epsilon(row: dict[str, Any]) -> None:
    accountant = create_accountant(row["accountant"] + "+mi")
    accountant.history = [(row["sigma"], row["q"], row["steps"])]
    assert accountant.get_epsilon(row["delta"]) == pytest.approx(row["epsilon"], rel=1e-4)


def test_epsilon_equals_the_plain_accountant(name: str) -> None:
    plain, ours = create_accountant(name.removesuffix("+mi")), create_accountant(name)
    for pair in [(1.0, 0.01), (2.0, 0.01), (1.0, 0.01)]:
        steps(plain, pair, 20)
        steps(ours, pair, 20)
    assert ours.history == plain.history
    assert ours.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_epsilon_before_the_first_step_is_zero(name: str) -> None:
    accountant = create_accountant(name)
    assert accountant.get_epsilon(1e-5) == 0.0
    accountant.history = [(1.0, 0.1, 0)]
    assert accountant.get_epsilon(1e-5) == 0.0
    assert figures(accountant) == (0.0, 0.0, 0.0, 0)


def test_a_step_without_noise_leaks_everything(name: str) -> None:
    accountant = create_accountant(name)
    steps(accountant, (1.0, 0.1), 3)
    steps(accountant, (0.0, 0.1), 1)
    assert accountant.get_epsilon(1e-5) == math.inf
    assert figures(accountant) == (math.inf, math.inf, 0.0, 4)


def test_noise_scheduler(name: str, training: Any) -> None:
    run = training(name)
    scheduler = ExponentialNoise(run.optimizer, gamma=0.9)
    for _ in range(3):
        run.epoch()
        scheduler.step()
    sigmas = [1.0, 0.9, 0.9 * 0.9]
    assert run.engine.accountant.history == [(sigma, 0.2, 5) for sigma in sigmas]
    expected = math.fsum(5 * [step_leakage(0.2, sigma) for sigma in sigmas])
    assert run.engine.accountant.leakage_bits == expected


def test_two_optimizers_of_one_engine_add_up(name: str, training: Any) -> None:
    first = training(name)
    second = training(name, engine=first.engine, noise_multiplier=2.0, data_loader=first.loader)
    first.epoch()
    second.epoch()
    assert first.engine.accountant.history == [(1.0, 0.2, 5), (2.0, 0.2, 5)]
    assert len(first.engine.accountant) == 10


def test_accumulated_batches_are_not_charged_as_one_poisson_batch(name: str, training: Any) -> None:
    run = training(name, poisson_sampling=False)
    before = run.parameters()
    for x, y in list(run.loader)[:2]:
        run.criterion(run.module(x), y).backward()
    with pytest.raises(AccountingError, match=r"2 batches were accumulated into one step.*per_pass"):
        run.optimizer.step()
    assert all(p.grad is None for p in run.module.parameters())
    assert all((a == b).all() for a, b in zip(before, run.parameters(), strict=True))
    assert run.engine.accountant.history == []


def test_the_hook_names_what_it_charges(name: str) -> None:
    accountant = create_accountant(name)
    hook = accountant.get_optimizer_hook_fn(sample_rate=0.25)
    assert isinstance(hook, StepHook)
    assert hook.accountant is accountant
    assert hook.sample_rate == 0.25
    assert copy.deepcopy(hook).accountant is accountant  # a copied optimizer is no way around the accounting


# -- registration ----------------------------------------------------------------------------------------------


def test_registered_without_touching_the_accountants_of_opacus() -> None:
    assert type(create_accountant("rdp+mi")).__name__ == "RDPMutualInformationAccountant"
    assert type(create_accountant("rdp")) is RDPAccountant
    assert isinstance(create_accountant("rdp+mi"), RDPAccountant)


def test_reloading_registers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    namespace = dict(vars(accountants))
    try:
        reloaded = importlib.reload(accountants)
        assert type(create_accountant("rdp+mi")) is reloaded.RDPMutualInformationAccountant
    finally:
        vars(accountants).update(namespace)


def test_a_foreign_accountant_of_that_name_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ACCOUNTANTS", dict(registry._ACCOUNTANTS))
    register_accountant("rdp+mi", RDPAccountant, force=True)
    with pytest.raises(AccountingError, match=r"already has an accountant 'rdp\+mi'.*another name"):
        accountants._register(RDPMutualInformationAccountant)
    assert type(create_accountant("rdp+mi")) is RDPAccountant


# -- γ is a function of the history ----------------------------------------------------------------------------


@given(history=histories, read=st.booleans())
def test_incremental_recomputed_and_schedule_agree_to_the_last_bit(
    history: list[tuple[float, float, int]], read: bool
) -> None:
    stepped, assigned, plain = RDPMutualInformationAccountant(), RDPMutualInformationAccountant(), RDPAccountant()
    for sigma, q, count in history:
        steps(stepped, (sigma, q), count)
        steps(plain, (sigma, q), count)
        if read:
            assert len(stepped) == stepped.schedule.steps
            assert stepped.charged_bits >= stepped.leakage_bits
    assigned.history = history
    schedule = Schedule.from_history(history)
    assert stepped.history == plain.history
    assert figures(stepped) == figures(assigned)
    assert figures(stepped) == (
        schedule.leakage_bits,
        schedule.charged_bits,
        schedule.sampling_excess_bits,
        schedule.steps,
    )


@settings(max_examples=30)
@given(history=histories, more=histories, budget=st.sampled_from([None, 1e9]))
def test_a_step_after_an_assignment_continues_from_it(
    history: list[tuple[float, float, int]], more: list[tuple[float, float, int]], budget: float | None
) -> None:
    accountant, whole = RDPMutualInformationAccountant(), RDPMutualInformationAccountant()
    steps(accountant, (3.0, 0.5), 2)
    assert len(accountant) == 2
    accountant.budget_bits = budget
    accountant.history = history
    for sigma, q, count in more:
        steps(accountant, (sigma, q), count)
    whole.history = history + more
    assert figures(accountant) == figures(whole)


def test_split_runs_are_one_run() -> None:
    split, whole = RDPMutualInformationAccountant(), RDPMutualInformationAccountant()
    split.history = [(1.0, 0.1, 5), (1.0, 0.1, 5)]
    whole.history = [(1.0, 0.1, 10)]
    assert figures(split) == figures(whole)


def test_many_distinct_entries_agree_with_single_steps() -> None:
    sigmas = [0.5 + 0.01 * i for i in range(200)]
    stepped, assigned = RDPMutualInformationAccountant(), RDPMutualInformationAccountant()
    for sigma in sigmas:
        steps(stepped, (sigma, 0.013), 1)
        assert stepped.charged_bits > 0  # each read on its own
    assigned.history = [(sigma, 0.013, 1) for sigma in sigmas]
    assert figures(stepped) == figures(assigned)


MUTATIONS = {
    "append": lambda h: h.append((2.0, 0.1, 4)),
    "extend": lambda h: h.extend([(2.0, 0.1, 4)]),
    "iadd": lambda h: h.__iadd__([(2.0, 0.1, 4)]),
    "imul": lambda h: h.__imul__(2),
    "insert": lambda h: h.insert(0, (2.0, 0.1, 4)),
    "setitem": lambda h: h.__setitem__(0, (2.0, 0.1, 4)),
    "setitem, equal count": lambda h: h.__setitem__(-1, (2.0, 0.1, 7)),
    "slice": lambda h: h.__setitem__(slice(0, 1), [(2.0, 0.1, 4)] * 3),
    "delitem": lambda h: h.__delitem__(0),
    "pop": lambda h: h.pop(),
    "remove": lambda h: h.remove((1.0, 0.1, 5)),
    "clear": lambda h: h.clear(),
    "sort": lambda h: h.sort(),
    "reverse": lambda h: h.reverse(),
}


@pytest.mark.parametrize("change", MUTATIONS.values(), ids=MUTATIONS)
def test_a_history_edited_in_place_is_read_afresh(change: Any) -> None:
    accountant = RDPMutualInformationAccountant()
    accountant.history = [(1.0, 0.1, 5), (0.7, 0.2, 7)]
    assert accountant.charged_bits > 0
    change(accountant.history)
    schedule = Schedule.from_history(accountant.history)
    assert figures(accountant)[:2] == (schedule.leakage_bits, schedule.charged_bits)
    assert len(accountant) == schedule.steps


def test_assigning_copies() -> None:
    accountant = RDPMutualInformationAccountant()
    history = [(1.0, 0.1, 5)]
    accountant.history = history
    steps(accountant, (1.0, 0.1), 1)
    assert history == [(1.0, 0.1, 5)]
    assert accountant.history == [(1.0, 0.1, 6)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((-1.0, 0.1, 5), r"history\[1\].*noise_multiplier >= 0"),
        ((1.0, 1.5, 5), r"history\[1\].*sample_rate in \[0, 1\]"),
        ((1.0, 0.1, 2.5), r"history\[1\].*num_steps to be a whole number"),
        ((1.0, float("nan"), 5), r"history\[1\].*NaN"),
        ((1.0, 0.1), r"history\[1\] = \(noise_multiplier, sample_rate, num_steps\)"),
        (None, r"history\[1\]"),
    ],
)
def test_a_wrong_entry_is_named(entry: Any, message: str) -> None:
    accountant = RDPMutualInformationAccountant()
    with pytest.raises(InvalidValueError, match=message):
        accountant.history = [(1.0, 0.1, 5), entry]
    assert accountant.history == []
    accountant.history.extend([(1.0, 0.1, 5), entry])
    with pytest.raises(InvalidValueError, match=message):
        _ = accountant.leakage_bits
    with pytest.raises(InvalidValueError, match=message):
        accountant.get_epsilon(1e-5)


@pytest.mark.parametrize(
    ("sigma", "q", "message"),
    [
        (float("nan"), 0.1, "noise_multiplier to be a number. Found NaN"),
        (-1.0, 0.1, "noise_multiplier >= 0. Found -1.0"),
        ("1.0x", 0.1, "noise_multiplier to be a number"),
        (1.0, float("nan"), "sample_rate to be a number. Found NaN"),
        (1.0, 1.2, r"sample_rate in \[0, 1\].*Found 1.2.*accumulate fewer"),
        (1.0, -0.1, r"sample_rate in \[0, 1\]"),
    ],
)
def test_a_wrong_step_is_not_charged(sigma: float, q: float, message: str) -> None:
    accountant = RDPMutualInformationAccountant()
    steps(accountant, (1.0, 0.1), 2)
    with pytest.raises(InvalidValueError, match=message):
        accountant.step(noise_multiplier=sigma, sample_rate=q)
    with pytest.raises(InvalidValueError, match="Nothing was charged"):
        accountant.would_exceed(1.0, noise_multiplier=sigma, sample_rate=q)
    assert accountant.history == [(1.0, 0.1, 2)]


def test_steps_are_recorded_as_plain_floats() -> None:
    import numpy as np
    import torch

    accountant = RDPMutualInformationAccountant()
    accountant.step(noise_multiplier=torch.tensor(1.0), sample_rate=np.float64(0.25))
    accountant.step(noise_multiplier=1, sample_rate=0.25)
    assert accountant.history == [(1.0, 0.25, 2)]
    assert [type(value) for value in accountant.history[0]] == [float, float, int]


def test_reading_changes_nothing(name: str) -> None:
    accountant = create_accountant(name)
    steps(accountant, (1.0, 0.1), 3)
    steps(accountant, (2.0, 0.1), 2)
    accountant.budget_bits = 5.0
    before = copy.deepcopy(accountant)
    first = (figures(accountant), accountant.get_epsilon(1e-5), accountant.schedule, accountant.state_dict())
    accountant.leakage_after(noise_multiplier=0.5, sample_rate=0.9, steps=100)
    accountant.would_exceed(noise_multiplier=0.0, sample_rate=0.9)
    accountant.steps_left(noise_multiplier=1.0, sample_rate=0.1)
    assert accountant.history == before.history == [(1.0, 0.1, 3), (2.0, 0.1, 2)]
    assert accountant.budget_bits == before.budget_bits
    assert first == (figures(accountant), accountant.get_epsilon(1e-5), accountant.schedule, accountant.state_dict())
    assert figures(before) == figures(accountant)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["deepcopy", "pickle"])
def test_a_copy_is_independent(name: str, copied: Any) -> None:
    accountant = create_accountant(name)
    accountant.budget_bits = 5.0
    steps(accountant, (1.0, 0.1), 3)
    expected = figures(accountant)
    twin = copied(accountant)
    assert (figures(twin), twin.budget_bits) == (expected, 5.0)
    steps(twin, (1.0, 0.1), 2)
    twin.history.append((1.0, 0.3, 1))
    assert figures(accountant) == expected
    assert twin.history == [(1.0, 0.1, 5), (1.0, 0.3, 1)]
    assert twin.leakage_bits == twin.schedule.leakage_bits
    steps(accountant, (1.0, 0.1), 1)
    assert accountant.history == [(1.0, 0.1, 4)]
