"""Saving and loading: plain payloads, ways to and from Opacus, and no history that shrinks by accident."""

from __future__ import annotations

import copy
import io
import json
import re
import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import create_accountant

from opacus_reconbound.errors import AccountingError, InvalidValueError, ReconboundError

HISTORY = [(1.0, 0.1, 5), (0.5, 0.2, 7)]


def accountant_with(name: str, history: list[Any]) -> Any:
    accountant = create_accountant(name)
    accountant.history = history
    return accountant


def checkpoint(run: Any) -> io.BytesIO:
    file = io.BytesIO()
    run.engine.save_checkpoint(path=file, module=run.module, optimizer=run.optimizer)
    file.seek(0)
    return file


def restore(run: Any, file: io.BytesIO) -> None:
    run.engine.load_checkpoint(path=file, module=run.module, optimizer=run.optimizer)


def test_engine_checkpoint_round_trip(name: str, mode: dict[str, Any], training: Any) -> None:
    run, resumed = training(name, **mode), training(name, **mode)
    run.epoch()
    restore(resumed, checkpoint(run))
    assert resumed.engine.accountant.history == run.engine.accountant.history
    assert resumed.engine.accountant.charged_bits == run.engine.accountant.charged_bits
    assert resumed.engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5)
    run.epoch()
    resumed.epoch()
    assert resumed.engine.accountant.history == [(1.0, 0.2, 10)]
    assert resumed.engine.accountant.charged_bits == run.engine.accountant.charged_bits


def test_checkpoints_from_and_to_the_plain_accountant(name: str, training: Any) -> None:
    plain, ours, back = training(name.removesuffix("+mi")), training(name), training(name.removesuffix("+mi"))
    plain.epoch()
    restore(ours, checkpoint(plain))
    assert ours.engine.accountant.history == [(1.0, 0.2, 5)]
    ours.epoch()
    back.engine.accountant.load_state_dict(ours.engine.accountant.to_opacus_state_dict())
    assert back.engine.accountant.history == [(1.0, 0.2, 10)]
    assert back.engine.get_epsilon(1e-5) == ours.engine.get_epsilon(1e-5)
    with pytest.raises(ValueError, match="cannot be loaded"):
        back.engine.accountant.load_state_dict(ours.engine.accountant.state_dict())


def test_an_older_checkpoint_does_not_lower_the_leakage_of_a_live_engine(name: str, training: Any) -> None:
    run = training(name)
    run.epoch()
    file = checkpoint(run)
    run.epoch()
    with pytest.raises(AccountingError, match=r"would forget steps.*fresh accountant"):
        restore(run, file)
    assert run.engine.accountant.history == [(1.0, 0.2, 10)]


def test_the_state_is_plain(name: str) -> None:
    accountant = accountant_with(name, HISTORY)
    state = accountant.state_dict()
    assert state == {"history": HISTORY, "mechanism": name, "reconbound": {"version": 1}}
    assert type(state) is OrderedDict
    assert type(state["history"]) is list
    assert {type(entry) for entry in state["history"]} == {tuple}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert accountant_with(name, loaded["history"]).charged_bits == accountant.charged_bits
    destination: dict[str, Any] = {"epoch": 3}
    assert accountant.state_dict(destination) is destination
    assert destination == {"epoch": 3, **state}


def test_the_state_survives_json(name: str) -> None:
    accountant, fresh = accountant_with(name, HISTORY), create_accountant(name)
    fresh.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert fresh.history == HISTORY
    assert fresh.charged_bits == accountant.charged_bits


def test_state_and_accountant_share_nothing(name: str) -> None:
    accountant = accountant_with(name, HISTORY)
    state = accountant.state_dict()
    kept = copy.deepcopy(state)
    accountant.step(noise_multiplier=0.5, sample_rate=0.2)
    fresh = create_accountant(name)
    fresh.load_state_dict(state)
    fresh.step(noise_multiplier=0.5, sample_rate=0.2)
    assert state == kept
    state["history"].clear()
    assert fresh.history == accountant.history == [(1.0, 0.1, 5), (0.5, 0.2, 8)]


def test_the_budget_is_configuration_and_not_state(name: str) -> None:
    accountant = accountant_with(name, HISTORY)
    accountant.budget_bits = 9.0
    fresh = create_accountant(name)
    fresh.budget_bits = 3.0
    fresh.load_state_dict(accountant.state_dict())
    assert fresh.budget_bits == 3.0


def test_a_larger_or_equal_history_replaces(name: str) -> None:
    accountant = accountant_with(name, HISTORY)
    accountant.load_state_dict(accountant_with(name, HISTORY[::-1]).state_dict())
    assert accountant.history == HISTORY[::-1]
    accountant.load_state_dict(accountant_with(name, [*HISTORY, (2.0, 0.1, 1)]).state_dict())
    assert len(accountant) == 13


def test_a_smaller_history_needs_a_word(name: str) -> None:
    accountant, smaller = accountant_with(name, HISTORY), accountant_with(name, HISTORY[:1]).state_dict()
    message = r"The state holds [\d.]+ bits of leakage, this accountant [\d.]+ bits from 12 steps.*allow_smaller=True"
    with pytest.raises(AccountingError, match=message):
        accountant.load_state_dict(smaller)
    with pytest.raises(AccountingError, match="would forget steps"):
        accountant.load_state_dict({"history": [], "mechanism": name.removesuffix("+mi")})
    assert accountant.history == HISTORY
    accountant.load_state_dict(smaller, allow_smaller=True)
    assert accountant.history == HISTORY[:1]
    assert accountant.charged_bits == accountant.schedule.charged_bits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: None, "Expected the state of an accountant .*Found NoneType"),
        (lambda state: {}, "Found mechanism None"),
        (lambda state: [state], "Found list"),
        (lambda state: {**state, "mechanism": "gdp"}, "Found mechanism 'gdp'"),
        (lambda state: {**state, "mechanism": ["rdp"]}, "Found mechanism"),
        (
            lambda state: {"mechanism": state["mechanism"], "reconbound": state["reconbound"]},
            "history of type NoneType",
        ),
        (lambda state: {**state, "history": "abc"}, "history of type str"),
        (lambda state: {**state, "history": [(1.0, 0.1, 5), (1.0, 2.0, 5)]}, r"history\[1\].*sample_rate in \[0, 1\]"),
        (lambda state: {**state, "history": [(1.0, 0.1, -5)]}, r"history\[0\].*num_steps"),
        (lambda state: {key: state[key] for key in ("history", "mechanism")}, "'reconbound': None"),
        (lambda state: {**state, "reconbound": {"version": 0}}, "names no version"),
        (lambda state: {**state, "reconbound": {"version": "1"}}, "names no version"),
        (lambda state: {**state, "reconbound": {"version": 2, "ledger": {"id": 1}}}, "which names no ledger"),
        (lambda state: {**state, "reconbound": {"version": 3}}, "version 2 at most. Found 3. Update opacus-reconbound"),
    ],
)
def test_anything_else_is_refused_and_changes_nothing(name: str, change: Any, message: str) -> None:
    accountant = accountant_with(name, HISTORY)
    state = accountant_with(name, [*HISTORY, (1.0, 0.1, 9)]).state_dict()
    with pytest.raises(InvalidValueError, match=message):
        accountant.load_state_dict(change(state))
    assert accountant.history == HISTORY
    assert len(accountant) == 12


numbers = st.one_of(
    st.floats(), st.integers(-5, 2**80), st.sampled_from([10**400, 10**5000, 2**53, 2**53 + 1, True, None, "1"])
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
plausible = st.tuples(st.floats(0.1, 9), st.floats(0, 1), st.integers(0, 2**53))
histories = st.one_of(
    st.lists(st.one_of(st.tuples(numbers, numbers, numbers), plausible, anything), max_size=4), anything
)
memories = st.fixed_dictionaries({"id": st.text(), "run": st.text(), "lines": st.integers(), "chain": st.text()})
states = st.one_of(
    anything,
    st.fixed_dictionaries(
        {"history": histories, "mechanism": st.sampled_from(["rdp+mi", "rdp", "prv+mi"])},
        optional={
            "reconbound": st.one_of(
                st.just({"version": 1}),
                st.fixed_dictionaries({"version": numbers}, optional={"ledger": st.one_of(anything, memories)}),
                anything,
            )
        },
    ),
)


@settings(max_examples=300, deadline=None)
@given(states, st.booleans())
def test_whatever_is_loaded_is_counted_or_refused_as_a_whole(state: Any, live: bool) -> None:
    accountant = accountant_with("rdp+mi", HISTORY if live else [])
    before = list(accountant.history), accountant.charged_bits, accountant.state_dict()
    try:
        accountant.load_state_dict(state)
    except ReconboundError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert len(refused) < 1000
        assert (accountant.history, accountant.charged_bits, accountant.state_dict()) == before
        return
    assert len(accountant.history) == len(state["history"])
    assert accountant.charged_bits >= accountant.leakage_bits >= 0.0
    assert accountant.charged_bits >= before[1]
    assert accountant.schedule.charged_bits == accountant.charged_bits
    assert accountant.schedule.steps == len(accountant)


@pytest.mark.parametrize("entry", [(1.0, 0.1, 2**53 + 1), (1.0, 10**5000, 1), (10**5000, 0.1, 1), "x" * 10**6])
def test_histories_that_no_number_can_hold(name: str, entry: Any) -> None:
    accountant = accountant_with(name, HISTORY)
    with pytest.raises(
        InvalidValueError, match=r"history\[0\] = \(noise_multiplier, sample_rate, num_steps\)"
    ) as caught:
        accountant.history = [entry]
    assert len(str(caught.value)) < 1000
    assert accountant.history == HISTORY


def test_more_steps_than_one_entry_may_hold(name: str) -> None:
    accountant = accountant_with(name, [(1e6, 0.1, 2**53)])
    accountant.step(noise_multiplier=1e6, sample_rate=0.1)
    assert accountant.history == [(1e6, 0.1, 2**53), (1e6, 0.1, 1)]
    assert accountant.schedule.steps == len(accountant) == 2**53 + 1
    assert accountant.charged_bits == accountant.schedule.charged_bits


def test_the_state_of_the_other_accountant_is_refused(name: str) -> None:
    other = "prv" if name == "rdp+mi" else "rdp"
    for foreign in (other, f"{other}+mi"):
        with pytest.raises(InvalidValueError, match=re.escape(f"{name!r} or {name[:3]!r}")):
            create_accountant(name).load_state_dict(accountant_with(foreign, HISTORY).state_dict())


def test_a_larger_state_of_another_run_would_forget_steps_too() -> None:
    ours, other = create_accountant("rdp+mi"), create_accountant("rdp+mi")
    ours.history = [(1.0, 0.01, 5)]
    other.history = [(2.0, 0.02, 100_000)]
    assert other.charged_bits > ours.charged_bits
    with pytest.raises(AccountingError, match="not all in the state"):
        ours.load_state_dict(other.state_dict())
    assert ours.history == [(1.0, 0.01, 5)]
    other.history = [(2.0, 0.02, 100), (1.0, 0.01, 5)]
    ours.load_state_dict(other.state_dict())
    assert len(ours) == 105


def test_threads_that_share_an_account_lose_no_step() -> None:
    accountant = create_accountant("rdp+mi")
    accountant.budget_bits = 1e9

    def work() -> None:
        for _ in range(5000):
            accountant.step(noise_multiplier=1.0, sample_rate=0.01)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(accountant) == 20_000
