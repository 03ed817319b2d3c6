"""A floor on a plain loop: where it ends, what it logs and shows; on real Opacus engines."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODES, Training, make_training
from opacus import PrivacyEngine
from opacus.schedulers import LambdaNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager

from opacus_reconbound import (
    Floor,
    Ledger,
    ReconstructionBudgetExceeded,
    SourceCertificate,
    attach,
    fingerprint,
    make_private_with_rho,
    step_leakage,
)
from opacus_reconbound.certificates import ReplicaDesign
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.errors import AccountingError, FloorUnreachableError, InvalidValueError
from opacus_reconbound.representations import Pixels

CERTIFICATE = SourceCertificate(
    designs=(ReplicaDesign(temperature=1.0, intercept=0.9),),
    trace=TraceScale(scale=1.0, upper=1.1, level=0.05, pairs=10, squared_diameter=4.0),
    representation=Pixels((0, 1)).describe((4,)),
    reference=SampleSummary(n=10, fingerprint="a"),
    estimation=SampleSummary(n=10, fingerprint="b"),
    alpha=0.05,
    alpha_split={"replica": 0.05},
    seed=0,
)
NAMES = ["reconstruction/rho_star", "reconstruction/leakage_bits", "reconstruction/steps_left"]


def floor_after(steps: float, sigma: float = 1.0, rate: float = 0.2) -> float:
    """A floor between ρ* after this many steps rounded down, and one more."""
    return CERTIFICATE.bound(steps * 1.000001 * float(step_leakage(rate, sigma))).rho


def on(training: Training, **options: Any) -> Floor:
    options = {"min_rho": floor_after(7.5), "verbose": False} | options
    return attach(training.engine, CERTIFICATE, model=training.module, optimizer=training.optimizer, **options)


# ---- where it ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_loop_ends_before_the_step_that_would_breach(mode: str) -> None:
    training = make_training("rdp+mi", **MODES[mode])
    account = training.engine.accountant
    with on(training, epochs=4) as floor:
        batches = floor.guard(training.loader)
        assert len(batches) == 5
        training.epoch(batches)
        assert (len(account), floor.stopped) == (5, False)
        training.epoch(batches)
        assert (len(account), floor.stopped) == (7, True)
        before = training.parameters()
        training.epoch(batches)
        training.epoch(floor.guard(training.loader))
    assert len(account) == 7
    assert all(torch.equal(a, b) for a, b in zip(before, training.parameters(), strict=True))
    assert floor.stopping_reason == "the next step would breach the floor"
    assert floor.bound == account.bound(CERTIFICATE)
    assert floor.bound.rho >= floor_after(7.5) > CERTIFICATE.bound(account.charged_bits * 8 / 7).rho
    assert floor.forecast.last_step == 7
    assert floor.forecast.steps == 20


def test_without_its_loader_the_step_is_refused() -> None:
    training, rows = make_training("rdp+mi"), []
    with (
        pytest.raises(ReconstructionBudgetExceeded),
        on(training, log=lambda values, step: rows.append((step, values))) as floor,
    ):
        for _ in range(3):
            training.epoch()
    assert len(training.engine.accountant) == 7
    assert floor.stopping_reason == "the next step would have breached the floor"
    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [values["reconstruction/steps_left"] for _, values in rows] == [6, 5, 4, 3, 2, 1, 0]


def test_noise_that_falls_between_the_batch_and_the_step_is_refused() -> None:
    training = make_training("rdp+mi")
    scheduler = LambdaNoise(training.optimizer, noise_lambda=lambda epoch: 1.0 if epoch < 2 else 0.3)
    with pytest.raises(ReconstructionBudgetExceeded), on(training) as floor:
        for x, y in floor.guard(training.loader):
            training.backward(x, y)
            scheduler.step()
            training.optimizer.step()
    assert len(training.engine.accountant) == 1
    assert floor.stopped


def test_noise_that_falls_after_a_step_ends_the_loop() -> None:
    training = make_training("rdp+mi")
    with on(training) as floor:
        for x, y in floor.guard(training.loader):
            training.backward(x, y)
            training.optimizer.step()
            training.optimizer.noise_multiplier = 0.3
    assert len(training.engine.accountant) == 1
    assert floor.stopped


def test_a_floor_that_is_spent_already_hands_out_nothing() -> None:
    training = make_training("rdp+mi")
    training.epoch()
    with on(training, min_rho=floor_after(3.5), epochs=2) as floor:
        assert list(floor.guard(training.loader)) == []
    assert floor.stopped
    assert floor.forecast.breached


def test_without_a_floor_it_only_watches() -> None:
    training, rows = make_training("rdp+mi"), []
    with on(training, min_rho=None, log=lambda values, step: rows.append(values)) as floor:
        training.epoch(floor.guard(training.loader))
        training.epoch(floor.guard(training.loader))
    assert training.engine.accountant.budget_bits is None
    assert not floor.stopped
    assert [list(values) for values in rows] == [NAMES[:2]] * 10


@pytest.mark.parametrize("min_rho", [None, 0.6])
def test_after_make_private_with_rho(min_rho: float | None) -> None:
    plain = make_training("rdp+mi")
    engine = PrivacyEngine(accountant="prv+mi")
    module = torch.nn.Linear(5, 3)
    module, optimizer, loader = make_private_with_rho(
        engine,
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(plain.loader.dataset, batch_size=20),
        certificate=CERTIFICATE,
        min_rho=0.8,
        epochs=3,
        max_grad_norm=1.0,
    )
    training = Training(engine, module, optimizer, loader, torch.nn.CrossEntropyLoss())
    budget = engine.accountant.budget_bits
    with on(training, min_rho=min_rho) as floor:
        assert engine.accountant.budget_bits == budget, "the stricter floor stays"
        for _ in range(5):
            training.epoch(floor.guard(loader))
    assert len(engine.accountant) == 15
    assert floor.stopped
    assert floor.bound.rho >= 0.8


def test_logical_batches() -> None:
    training, steps = make_training("rdp+mi"), []
    with on(training, log=lambda values, step: steps.append(step)) as floor:
        for _ in range(3):
            with BatchMemoryManager(
                data_loader=training.loader, max_physical_batch_size=8, optimizer=training.optimizer
            ) as split:
                training.epoch(floor.guard(split))
    assert floor.stopped
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert len(training.engine.accountant) == 7


def test_what_guard_refuses_is_refused() -> None:
    training = make_training("rdp+mi", poisson_sampling=False)
    with on(training) as floor, pytest.raises(AccountingError, match="does not draw Poisson batches"):
        floor.guard(training.loader)


def test_all_runs_on_a_ledger_count(tmp_path: Path) -> None:
    training = make_training("rdp+mi")
    ledger = Ledger(tmp_path / "ledger.jsonl", fingerprint=fingerprint(training.loader.dataset))
    ledger.add([(1.0, 0.2, 4)], run="earlier")
    training.engine.accountant.use_ledger(ledger, run="now")
    with on(training) as floor:
        training.epoch(floor.guard(training.loader))
    assert len(training.engine.accountant) == 3
    assert floor.bound.rho >= floor_after(7.5)
    assert ledger.reserved_bits == 0, "what was reserved is given back"


# ---- what it logs ----------------------------------------------------------------------------------------------------


def test_the_figures_are_on_the_safe_side_and_go_everywhere(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    training, rows, exact = make_training("rdp+mi"), [], []

    def keep(values: dict[str, float], step: int) -> None:
        rows.append((step, values))
        exact.append(floor.bound)

    writer = tensorboard.SummaryWriter(tmp_path / "board")
    floor = on(training, log=[keep, tmp_path / "log.csv", writer], delta=1e-5, epsilon_every_n_steps=3)
    for _ in range(3):
        training.epoch(floor.guard(training.loader))
    floor.close()
    writer.close()

    assert [step for step, _ in rows] == [1, 2, 3, 4, 5, 6, 7]
    for (_, values), bound in zip(rows, exact, strict=True):
        assert bound.rho - 1e-6 < values[NAMES[0]] <= bound.rho
        assert bound.leakage_bits <= values[NAMES[1]] < bound.leakage_bits + 1e-6
    assert [step for step, values in rows if "privacy/epsilon" in values] == [1, 3, 6, 7]
    assert rows[-1][1]["privacy/epsilon"] == pytest.approx(training.engine.get_epsilon(1e-5), rel=1e-6)

    with (tmp_path / "log.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == ["step", *NAMES, "privacy/epsilon"]
    read = [(int(row.pop("step")), {name: float(text) for name, text in row.items() if text}) for row in table]
    assert read == rows

    board = reader.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {*NAMES, "privacy/epsilon"}
    for name in NAMES:
        assert [(e.step, e.value) for e in board.Scalars(name)] == [(step, values[name]) for step, values in rows]


def test_a_table_is_continued_but_not_mixed(tmp_path: Path) -> None:
    for steps in (5, 10):
        training = make_training("rdp+mi")
        with on(training, min_rho=floor_after(20), log=str(tmp_path / "log.csv")) as floor:
            training.epoch(floor.guard(training.loader))
        lines = (tmp_path / "log.csv").read_text().splitlines()
        assert len(lines) == 1 + steps
    assert lines[0] == ",".join(["step", *NAMES])
    with pytest.raises(InvalidValueError, match=r"log = '.*log\.csv' holds other columns, step,"):
        on(make_training("rdp+mi"), min_rho=None, log=tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text().splitlines() == lines


def test_it_lets_go() -> None:
    training, steps = make_training("rdp+mi"), []
    with on(training, log=lambda values, step: steps.append(step)) as floor:
        training.epoch(floor.guard(training.loader))
    floor.close()
    budget = training.engine.accountant.budget_bits
    with pytest.raises(ReconstructionBudgetExceeded):
        for x, y in floor.guard(training.loader):
            training.backward(x, y)
            training.optimizer.noise_multiplier = 0.1
            training.optimizer.step()
    assert steps == [1, 2, 3, 4, 5]
    assert budget is not None, "the budget stays armed"


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_forecast_progress_and_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    training = make_training("rdp+mi")
    with on(training, epochs=4, verbose=True, progress=True) as floor:
        for _ in range(4):
            training.epoch(floor.guard(training.loader))
    out, err = capsys.readouterr()
    assert floor.forecast.describe() in out
    assert "the floor" in out
    assert "reached at step 7, and training will stop there." in out
    assert "Training was stopped: the next step would breach the floor" in out
    assert "7 steps were taken. With confidence 0.95" in out
    last = err.split("\r")[-1]
    rho, bits = floor.bound.rho, floor.bound.leakage_bits
    assert "7/20" in last
    assert f"rho*={math.floor(rho * 1000) / 1000:.3g}" in last
    assert f"bits={math.ceil(bits * 1000) / 1000:.3g}" in last
    assert "left=0" in last


def test_it_is_silent_where_it_is_told_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    training = make_training("rdp+mi")
    with on(training) as floor:  # standard error is no terminal here
        training.epoch(floor.guard(training.loader))
    assert capsys.readouterr() == ("", "")


def test_an_error_of_the_loop_is_not_talked_over(capsys: pytest.CaptureFixture[str]) -> None:
    training = make_training("rdp+mi")
    with pytest.raises(ZeroDivisionError), on(training, verbose=True) as floor:
        for _ in floor.guard(training.loader):
            1 / 0
    assert not floor.stopped
    assert "steps were taken" not in capsys.readouterr().out
    assert not training.optimizer.original_optimizer._optimizer_step_post_hooks


def test_a_stricter_budget_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    training = make_training("rdp+mi")
    training.engine.accountant.set_floor(CERTIFICATE, floor_after(3.5))
    with on(training, verbose=True) as floor:
        training.epoch(floor.guard(training.loader))
    assert len(training.engine.accountant) == 3
    assert "still armed with a stricter budget" in capsys.readouterr().out


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"min_rho": 0}, InvalidValueError, r"min_rho.*Found 0"),
        ({"min_rho": 0.99}, FloorUnreachableError, "0.99"),
        ({"epochs": 0}, InvalidValueError, "epochs.*Found 0"),
        ({"delta": 1}, InvalidValueError, "delta.*Found 1"),
        ({"epsilon_every_n_steps": 0}, InvalidValueError, "epsilon_every_n_steps.*Found 0"),
        ({"log": 3}, InvalidValueError, "Expected log to be a function .*Found 3"),
        ({"log": [print, None]}, InvalidValueError, "Found None"),
        ({"log": "no/such/folder/log.csv"}, InvalidValueError, r"log = 'no/such/folder/log\.csv' cannot be written"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], match: str) -> None:
    training = make_training("rdp+mi")
    with pytest.raises(error, match=match):
        on(training, **options)
    assert training.engine.accountant.budget_bits is None
    assert not training.optimizer.original_optimizer._optimizer_step_post_hooks


def test_what_does_not_belong_together() -> None:
    training, other = make_training("rdp+mi"), make_training("rdp+mi")
    with pytest.raises(AccountingError, match="another account"):
        attach(other.engine, CERTIFICATE, model=training.module, optimizer=training.optimizer)
    with pytest.raises(AccountingError, match="2 accounts"):
        attach(other.engine, CERTIFICATE, model=training.module, optimizer=[training.optimizer, other.optimizer])
    plain = make_training("rdp")
    with pytest.raises(AccountingError, match="keeps no account"):
        on(plain)
    with pytest.raises(AccountingError, match="not a DPOptimizer"):
        attach(training.engine, CERTIFICATE, model=training.module, optimizer=training.optimizer.original_optimizer)
    with pytest.raises(InvalidValueError, match="Expected a SourceCertificate"):
        attach(training.engine, "c.json", model=training.module, optimizer=training.optimizer)  # type: ignore[arg-type]
