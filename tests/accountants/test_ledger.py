"""Accountants on a ledger: restarts, branches and trials add up, and the floor holds for the total."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import create_accountant
from torch.utils.data import TensorDataset

from opacus_reconbound import Ledger, ReconstructionBudgetExceeded, Schedule, fingerprint
from opacus_reconbound.errors import AccountingError, DataError, LedgerError
from opacus_reconbound.leakage import step_charge


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl", fingerprint="records")


def on(ledger: Ledger, run: str, name: str = "rdp+mi") -> Any:
    accountant = create_accountant(name)
    accountant.use_ledger(ledger, run=run)
    return accountant


def take(accountant: Any, steps: int) -> None:
    for _ in range(steps):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)


def bits(steps: int) -> float:
    return Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=steps).charged_bits


def test_trials_add_up(ledger: Ledger, name: str) -> None:
    for index in range(3):
        trial = on(Ledger(ledger.path), f"trial {index}", name)
        take(trial, 10)
        assert trial.charged_bits == bits(10 * (index + 1))
        assert len(trial) == 10
        trial.settle()
    assert ledger.total_bits == bits(30)


def test_a_resumed_run_is_counted_once_and_what_was_redone_twice(ledger: Ledger) -> None:
    first = on(ledger, "a")
    take(first, 10)
    state = first.state_dict()
    take(first, 4)  # after the checkpoint
    first.settle()
    for order in ("load first", "ledger first"):
        resumed, before = create_accountant("rdp+mi"), ledger.total_bits
        if order == "load first":
            resumed.load_state_dict(copy.deepcopy(state))
            with pytest.raises(AccountingError, match=r"charged to a ledger, as run 'a'.*use_ledger"):
                take(resumed, 1)
            assert create_accountant("rdp+mi").load_state_dict(resumed.state_dict()) is None  # it remembers on
            resumed.use_ledger(Ledger(ledger.path), run="a")
        else:
            resumed.use_ledger(Ledger(ledger.path), run="a")
            resumed.load_state_dict(copy.deepcopy(state))
        assert resumed.charged_bits == before
        take(resumed, 3)
        resumed.settle()
    assert len(resumed) == 13
    assert ledger.total_bits == bits(20)
    assert resumed.leakage_bits == Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=13).leakage_bits


def test_a_history_from_elsewhere_is_added_once(ledger: Ledger) -> None:
    plain = create_accountant("rdp")
    for _ in range(7):
        plain.step(noise_multiplier=1.0, sample_rate=0.1)
    before = create_accountant("rdp+mi")
    before.load_state_dict(plain.state_dict())
    before.use_ledger(ledger, run="before")
    after = on(ledger, "after")
    after.load_state_dict(plain.state_dict())
    assert after.charged_bits == bits(14)
    after.history.append((1.0, 0.1, 2))
    assert after.charged_bits == after.charged_bits == bits(16)
    after.load_state_dict(after.state_dict())
    assert ledger.total_bits == bits(16)


def test_the_floor_holds_for_the_total(ledger: Ledger) -> None:
    one = on(ledger, "one")
    take(one, 6)
    one.settle()
    two = on(ledger, "two")
    two.budget_bits = bits(10)
    assert two.steps_left(noise_multiplier=1.0, sample_rate=0.1) == 4
    assert not two.would_exceed(noise_multiplier=1.0, sample_rate=0.1, steps=4)
    assert two.would_exceed(noise_multiplier=1.0, sample_rate=0.1, steps=5)
    with pytest.raises(ReconstructionBudgetExceeded, match="in all runs on the ledger") as stop:
        take(two, 5)
    assert stop.value.leakage_bits == bits(10) == two.charged_bits
    assert stop.value.next_bits == bits(11)
    assert len(two) == 4
    two.settle()
    ledger.set_budget(bits(11))
    three = on(ledger, "three")
    assert three.budget_bits == bits(11)
    with pytest.raises(ReconstructionBudgetExceeded):
        take(three, 2)
    assert len(three) == 1


def test_another_or_an_older_ledger_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    run = on(ledger, "a")
    old = ledger.path.read_bytes()
    take(run, 5)
    state = run.state_dict()
    other = Ledger(tmp_path / "other.jsonl", fingerprint="records")
    with pytest.raises(LedgerError, match="another ledger"):
        on(other, "a").load_state_dict(state)
    with pytest.raises(AccountingError, match=r"charged to the ledger .* already"):
        run.use_ledger(other, run="a")
    ledger.path.write_bytes(old)
    resumed = create_accountant("rdp+mi")
    resumed.load_state_dict(state)
    with pytest.raises(LedgerError, match="older than the state"):
        resumed.use_ledger(Ledger(ledger.path), run="a")


def test_a_real_engine_resumes_on_its_ledger(ledger: Ledger, training: Any, tmp_path: Path) -> None:
    run = training("rdp+mi")
    run.engine.accountant.use_ledger(ledger, run="a")
    run.epoch()
    run.engine.save_checkpoint(path=tmp_path / "c.pt", module=run.module, optimizer=run.optimizer)
    resumed = training("rdp+mi")
    resumed.engine.accountant.use_ledger(Ledger(ledger.path), run="a")
    resumed.engine.load_checkpoint(path=tmp_path / "c.pt", module=resumed.module, optimizer=resumed.optimizer)
    resumed.epoch()
    resumed.engine.accountant.settle()
    assert ledger.schedule.steps == 10
    assert resumed.engine.accountant.charged_bits == resumed.engine.accountant.schedule.charged_bits


def test_killed_training_never_loses_a_step(tmp_path: Path) -> None:
    """Every step that was applied is on the ledger, whenever the process is killed, while it writes files too."""
    folder = Path(__file__).resolve().parent
    path = os.pathsep.join(filter(None, [str(folder.parents[1]), str(folder.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(folder / "killed_training.py"), "8"],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    bits = step_charge(0.2, 1.0)[1]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 8
    for killed, line in enumerate(lines, 1):
        # 4 reserved, one more charged and not announced, and what a checkpoint had to settle
        assert line["announced"] * bits <= line["total"] * (1 + 1e-12)
        assert line["total"] <= (line["announced"] + 5 * killed) * bits * (1 + 1e-12)
        applied, accounted = line["saved"]
        assert accounted == applied
    assert lines[-1]["announced"] > lines[-1]["saved"][0] > 10


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_checkpoint_that_was_cut_off_changes_no_account(training: Any, tmp_path: Path, share: float) -> None:
    run, file = training("rdp+mi"), tmp_path / "c.pt"
    run.epoch()
    run.engine.save_checkpoint(path=file, module=run.module, optimizer=run.optimizer)
    run.epoch()
    before, weights = run.engine.accountant.state_dict(), run.parameters()
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    with pytest.raises(Exception, match=r"."):
        run.engine.load_checkpoint(path=file, module=run.module, optimizer=run.optimizer)
    assert run.engine.accountant.state_dict() == before
    assert all(torch.equal(one, two) for one, two in zip(run.parameters(), weights, strict=True))


def test_fingerprints() -> None:
    x, y = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    data = TensorDataset(x, y)
    assert fingerprint(data) == fingerprint(TensorDataset(x.flip(0), y.flip(0)))
    assert fingerprint(data) == fingerprint(torch.utils.data.DataLoader(data, batch_size=2))
    assert fingerprint(data) != fingerprint(TensorDataset(x, y.flip(0)))
    assert fingerprint(x) == fingerprint(x.numpy()) != fingerprint(x[:3])
    assert fingerprint([{"a": "text", "b": 1}]) == fingerprint([{"b": 1, "a": "text"}])
    with pytest.raises(DataError, match="change from one reading to the next"):
        fingerprint(Random())
    with pytest.raises(DataError, match="Record 0 holds a object"):
        fingerprint([object()])
    with pytest.raises(DataError, match="is empty"):
        fingerprint([])
    with pytest.raises(DataError, match="has no fingerprint"):
        fingerprint(iter([1]))


class Random(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(2)
