"""The ledger: runs add up, exactly; nothing is lost, whoever writes at once or is killed."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opacus_reconbound.errors import InvalidValueError, LedgerError, ReconboundError
from opacus_reconbound.leakage import Schedule, step_charge
from opacus_reconbound.leakage import ledger as ledger_module
from opacus_reconbound.leakage.ledger import _MARK, Ledger, _chain

BITS = step_charge(0.1, 1.0)[1]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl", fingerprint="records")


def constant(steps: int) -> Schedule:
    return Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=steps)


def test_runs_add_up_exactly_and_survive(ledger: Ledger) -> None:
    ledger.add([(1.0, 0.1, 10)], run="a")
    ledger.add([(0.7, 0.2, 3), (1.0, 0.1, 5)], run="b")
    again = Ledger(ledger.path)
    both = Schedule.from_history([(1.0, 0.1, 15), (0.7, 0.2, 3)])
    assert again.total_bits == ledger.total_bits == both.charged_bits
    assert [(run.run, run.schedule.steps) for run in again.runs] == [("a", 10), ("b", 8)]
    assert again.fingerprint == "records"
    assert again.id == ledger.id


def test_a_session_reserves_before_and_settles_after(ledger: Ledger) -> None:
    session = ledger.session("a", reserve_steps=8)
    for _ in range(11):
        assert session.charge(1.0, 0.1)
    other = Ledger(ledger.path)
    assert other.total_bits == constant(16).charged_bits  # eight settled, eight reserved
    assert session.total.value == constant(11).charged_bits
    session.settle()
    assert other.total_bits == constant(11).charged_bits
    assert other.reserved_bits == 0.0


def test_a_budget_binds_all_runs(ledger: Ledger) -> None:
    ledger.set_budget(constant(20).charged_bits)
    one, two = ledger.session("one", reserve_steps=4), Ledger(ledger.path).session("two", reserve_steps=4)
    taken = 0
    for _ in range(30):
        taken += one.charge(1.0, 0.1) + two.charge(1.0, 0.1)
    one.settle()
    two.settle()
    taken += one.charge(1.0, 0.1)
    one.settle()
    assert taken == 20
    assert ledger.total_bits == ledger.budget_bits


pairs = st.tuples(
    st.one_of(st.floats(-1, 3).map(lambda e: 10.0**e), st.sampled_from([0.5, 1.0, math.inf])),
    st.one_of(st.floats(-8, 0).map(lambda e: 10.0**e), st.sampled_from([0.0, 2.0**-24, 0.01, 1.0])),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(pairs, min_size=1, max_size=25),
    reserve=st.integers(1, 9),
    end=st.integers(0, 25),
    hair=st.sampled_from([-1, 0, 1, None]),
    settle=st.integers(2, 12),
)
def test_a_reader_never_finds_less_than_was_taken_and_decisions_are_exact(
    tmp_path: Path, steps: list[tuple[float, float]], reserve: int, end: int, hair: int | None, settle: int
) -> None:
    """Steps with a noise of their own, beside another run; the budget is the sum of the first, or a hair beside it."""
    path = tmp_path / "exact.jsonl"
    path.unlink(missing_ok=True)
    Ledger(path, fingerprint="records").add([(1.3, 0.2, 3)], run="other")
    budget = Schedule.from_history([(1.3, 0.2, 3)] + [(sigma, q, 1) for sigma, q in steps[:end]]).charged_bits
    if hair:
        budget = math.nextafter(budget, hair * math.inf)
    session = Ledger(path).session("a", reserve_steps=reserve)
    exact = 3 * Fraction(step_charge(0.2, 1.3)[1])
    for index, (sigma, q) in enumerate(steps):
        after = exact + Fraction(step_charge(q, sigma)[1])
        charged = session.charge(sigma, q, budget_bits=None if hair is None else budget)
        assert charged == (hair is None or after.numerator / after.denominator <= budget)
        exact = after if charged else exact
        if index % 3 == 0:
            assert session.total.value == exact.numerator / exact.denominator
        assert Ledger(path).total_bits >= exact.numerator / exact.denominator
        if index % settle == settle - 1:
            session.settle()
            assert Ledger(path).total_bits == exact.numerator / exact.denominator
    session.settle()
    assert Ledger(path).total_bits == exact.numerator / exact.denominator


@pytest.mark.parametrize("budget", [None, 1e3])
def test_within_a_reservation_few_steps_are_summed(
    ledger: Ledger, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed = []
    charge = ledger_module.step_charge
    monkeypatch.setattr(ledger_module, "step_charge", lambda q, sigma: summed.append(sigma) or charge(q, sigma))
    session = ledger.session("a", reserve_steps=200)
    history = [(2.0 + index / 1000, 0.01, 1) for index in range(1000)]
    for sigma, q, _ in history:
        assert session.charge(sigma, q, budget_bits=budget)
    session.settle()
    assert len(summed) < 50
    assert ledger.total_bits == Schedule.from_history(history).charged_bits


def test_what_could_not_be_written_still_counts_for_later_steps(ledger: Ledger) -> None:
    session = ledger.session("a", reserve_steps=4)
    assert session.charge(1.0, 0.1)
    content = ledger.path.read_bytes()
    ledger.path.unlink()
    with pytest.raises(LedgerError):
        session.add([(1.0, 0.1, 3)])
    ledger.path.write_bytes(content)
    assert session.charge(1.0, 0.1)
    assert Ledger(ledger.path).total_bits >= constant(5).charged_bits


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("reserve", [1, 5])
def test_processes_write_at_once(ledger: Ledger, reserve: int) -> None:
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=charge_steps, args=(ledger.path, f"run {index}", 40, reserve)) for index in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert ledger.total_bits == constant(160).charged_bits
    assert sorted(run.run for run in ledger.runs) == [f"run {index}" for index in range(4)]


def charge_steps(path: Path, run: str, steps: int, reserve: int) -> None:
    session = Ledger(path).session(run, reserve_steps=reserve)
    for _ in range(steps):
        assert session.charge(1.0, 0.1)
    session.settle()


def announce_steps(path: Path, write: int) -> None:
    session = Ledger(path).session("restarted", reserve_steps=3)
    while session.charge(1.0, 0.1):
        os.write(write, b".")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_killed_writers_never_lose_a_step(ledger: Ledger) -> None:
    """Every step that was announced is counted; at most the reservation and what was not announced is counted too."""
    waits = np.random.default_rng(0).random(20) * 0.03
    released = 0
    for attempt, wait in enumerate(waits.tolist()):
        read, write = os.pipe()
        process = multiprocessing.get_context("fork").Process(target=announce_steps, args=(ledger.path, write))
        process.start()
        os.close(write)
        time.sleep(wait)
        process.kill()
        process.join()
        while piece := os.read(read, 65536):
            released += len(piece)
        os.close(read)
        if attempt % 2:  # a line that was half-written when the machine stopped
            ledger.path.write_bytes(ledger.path.read_bytes() + b'{"run":"restarted","ses')
        total = Ledger(ledger.path).total_bits
        assert released * BITS * (1 - 1e-12) <= total <= (released + 4 * (attempt + 1)) * BITS * (1 + 1e-12)
    assert released > 50
    before = Ledger(ledger.path).total_bits
    ledger.add([(1.0, 0.1, 1)], run="after")
    assert Ledger(ledger.path).total_bits == ledger.total_bits == pytest.approx(before + BITS, rel=1e-12)


def test_a_line_cut_at_any_byte_is_repaired_or_was_complete(ledger: Ledger) -> None:
    ledger.add([(1.0, 0.1, 10)], run="a")
    before = ledger.path.read_bytes()
    ledger.add([(1.0, 0.1, 5)], run="b")
    after = ledger.path.read_bytes()
    for end in range(len(before), len(after) + 1):
        ledger.path.write_bytes(after[:end])
        cut = Ledger(ledger.path)
        expected = 15 if end >= len(after) - 1 else 10
        assert cut.total_bits == constant(expected).charged_bits
        cut.add([(1.0, 0.1, 1)], run="c")
        assert Ledger(ledger.path).total_bits == constant(expected + 1).charged_bits


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_to_the_file_it_never_counts_less(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "fuzzed.jsonl"
    path.unlink(missing_ok=True)
    good = Ledger(path, fingerprint="records")
    good.add([(1.0, 0.1, 10)], run="a")
    good.add([(0.5, 0.3, 2)], run="b")
    content = path.read_bytes()
    end = content.rfind(b"\n", 0, len(content) - 1) + 1
    at = data.draw(st.integers(0, end - 1))
    change = data.draw(st.sampled_from(["replace", "insert", "delete"]))
    piece = data.draw(st.binary(min_size=1, max_size=6))
    rest = content[at + (len(piece) if change != "insert" else 0) :]
    changed = content[:at] + (b"" if change == "delete" else piece) + rest
    path.write_bytes(changed)
    try:
        total = Ledger(path).total_bits
    except ReconboundError as error:
        if str(path) not in str(error):
            raise
        assert path.read_bytes() == changed  # nothing is repaired over what is not understood
    else:
        assert total >= good._total().value


numbers = st.one_of(
    st.floats(), st.integers(-5, 2**80), st.sampled_from([10**400, 2**53, 2**53 + 1, True, None, "1", "inf"])
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)
plausible = st.tuples(st.floats(0.1, 9), st.floats(0, 1), st.integers(0, 2**53))
written = st.one_of(
    anything,
    st.fixed_dictionaries(
        {
            "run": st.one_of(st.just("a"), anything),
            "session": st.one_of(st.just("s"), anything),
            "time": st.one_of(st.just(5), numbers),
            "entries": st.one_of(st.lists(st.one_of(plausible, st.tuples(numbers, numbers, numbers))), anything),
            "reserved_bits": numbers,
        }
    ),
    st.fixed_dictionaries({"budget_bits": numbers, "time": numbers}),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(written, min_size=1, max_size=3))
def test_lines_with_fitting_checksums_are_counted_or_refused(tmp_path: Path, lines: list[Any]) -> None:
    path = tmp_path / "fuzzed.jsonl"
    path.unlink(missing_ok=True)
    live = Ledger(path, fingerprint="records")
    live.add([(1.0, 0.1, 10)], run="a")
    before, chain, content = live.total_bits, live.position()[1], path.read_bytes()
    for line in lines:
        payload = json.dumps(line, separators=(",", ":")).encode()
        chain = _chain(chain, payload)
        content += payload[:-1] + _MARK + chain.encode() + b'"}\n'
    path.write_bytes(content)
    for reader in (lambda: live, lambda: Ledger(path)):
        try:
            ledger = reader()
            total = ledger.total_bits
        except ReconboundError as error:
            if str(path) not in str(error) or len(str(error)) > 1000:
                raise
            assert path.read_bytes() == content  # nothing is repaired over what is not understood
        else:
            assert total >= before
            assert sum(run.charged_bits for run in ledger.runs) == pytest.approx(total)


def test_more_steps_than_one_line_may_hold(ledger: Ledger) -> None:
    for _ in range(3):
        ledger.add([(1e6, 0.1, 2**53)], run="a")
    (run,) = Ledger(ledger.path).runs
    assert run.schedule.steps == 3 * 2**53
    assert run.charged_bits == run.schedule.charged_bits == ledger.total_bits


def test_an_older_copy_is_noticed(ledger: Ledger) -> None:
    ledger.add([(1.0, 0.1, 10)], run="a")
    old = ledger.path.read_bytes()
    ledger.add([(1.0, 0.1, 10)], run="a")
    position = ledger.position()
    assert Ledger(ledger.path).continues(*position)
    ledger.path.write_bytes(old)
    with pytest.raises(LedgerError, match="has become shorter"):
        ledger.add([(1.0, 0.1, 1)], run="a")
    assert not Ledger(ledger.path).continues(*position)


@pytest.mark.parametrize("content", [b"", b"hello\n", b"hello", b"{}\n", b"\xff\xfe\n"])
def test_what_is_no_ledger_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="is not a ledger"):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_ledger_of_other_records_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="other records: its fingerprint is 'records', not 'others'"):
        Ledger(ledger.path, fingerprint="others")
    with pytest.raises(InvalidValueError, match="To make one, say of which records"):
        Ledger(tmp_path / "none.jsonl")
    assert Ledger(tmp_path, fingerprint="x").path != Ledger(tmp_path, fingerprint="y").path


@pytest.mark.parametrize(
    "call",
    [
        lambda ledger: ledger.add([(1.0, 2.0, 3)], run="a"),
        lambda ledger: ledger.add([(1.0, 0.1, -3)], run="a"),
        lambda ledger: ledger.add([(1.0, 0.1, 3)], run=""),
        lambda ledger: ledger.set_budget(-1.0),
        lambda ledger: ledger.session("a\nb"),
        lambda ledger: ledger.session("a", reserve_steps=0),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(ledger: Ledger, call: Any) -> None:
    before = ledger.path.read_bytes()
    with pytest.raises(InvalidValueError, match="Expected"):
        call(ledger)
    assert ledger.path.read_bytes() == before
