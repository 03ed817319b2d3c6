"""The callback on real Trainers of both namespaces, automatic and manual optimization."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.schedulers import LambdaNoise
from spaces import BITS, DATA, NOISE, RATE, STEPS_PER_EPOCH, Space, floor_after
from torch.utils.data import DataLoader, RandomSampler

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.certificates.plan import SplitPlan
from opacus_reconbound.errors import (
    AccountingError,
    DataError,
    FloorUnreachableError,
    InvalidValueError,
    ReconstructionBudgetExceeded,
)
from opacus_reconbound.leakage import Schedule
from opacus_reconbound.leakage.ledger import Ledger


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("minimum", [{}, {"min_epochs": 2}, {"min_steps": 12}, {"min_epochs": 5, "max_epochs": 6}])
def test_halts_at_the_last_admissible_step(
    space: Space, certificate: SourceCertificate, tmp_path: Any, manual: bool, minimum: dict
) -> None:
    model, callback = space.module(manual), space.callback(certificate, floor_after(certificate, 5.5))
    minima: list[Any] = []

    class Spy(space.L.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            minima.append((trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps))

    trainer = space.trainer(tmp_path, Spy(), callback, **minimum)
    trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == trainer.global_step == 5
    assert trainer.state.status.value == "finished"
    assert callback.stopping_reason == "the next step would breach the floor"
    assert callback.bound.rho >= callback.min_rho > certificate.bound(BITS * 6).rho
    assert model.validations == 1
    assert (trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps) == minima[0]


def test_runs_to_the_end_where_the_floor_is_far(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 30))
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model)
    assert model.updates == 24
    assert callback.stopping_reason is None
    expected = Schedule.constant(sample_rate=RATE, noise_multiplier=NOISE, steps=24)
    assert callback.accountant.leakage_bits == expected.leakage_bits


def test_without_a_floor_it_only_logs(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model, callback = space.module(), space.callback(certificate)
    trainer = space.trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(model)
    assert model.updates == 8
    assert "reconstruction/steps_left" not in trainer.callback_metrics


def test_logged_values_are_on_the_safe_side(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model)
    metrics = trainer.callback_metrics
    assert float(metrics["reconstruction/rho_star"]) <= callback.bound.rho
    assert float(metrics["reconstruction/rho_star"]) == pytest.approx(callback.bound.rho, rel=1e-6)
    assert float(metrics["reconstruction/leakage_bits"]) >= callback.accountant.charged_bits
    assert float(metrics["reconstruction/steps_left"]) == 0.0
    assert float(metrics["privacy/epsilon"]) > 0


def test_csv_log_holds_every_step(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    logger = importlib.import_module(f"{space.L.__name__}.loggers").CSVLogger(tmp_path, name="", version="log")
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    trainer = space.trainer(tmp_path, callback, logger=logger, log_every_n_steps=1)
    trainer.fit(model)
    header, *rows = (tmp_path / "log" / "metrics.csv").read_text().splitlines()
    column = header.split(",").index("reconstruction/rho_star")
    values = [float(row.split(",")[column]) for row in rows if row.split(",")[column]]
    assert len(values) == 5
    assert values == sorted(values, reverse=True)


def test_a_spent_budget_takes_no_step(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    model.engine.accountant.history = [(NOISE, RATE, 5)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = space.trainer(tmp_path, callback, min_epochs=2)
    trainer.fit(model)
    assert model.updates == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert callback.stopping_reason == "the leakage budget was spent before training"


@pytest.mark.parametrize("manual", [False, True])
def test_noise_that_falls_is_caught_before_the_step(
    space: Space, certificate: SourceCertificate, tmp_path: Any, manual: bool
) -> None:
    """The prediction after step 3 is right about the old noise only; the check before step 4 uses the new."""
    model, callback = space.module(manual), space.callback(certificate, floor_after(certificate, 5.5))

    class Drop(space.L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                LambdaNoise(trainer.optimizers[0], noise_lambda=lambda _: 0.1).step()

    trainer = space.trainer(tmp_path, Drop(), callback, min_epochs=2)
    trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == 3
    assert trainer.state.status.value == "finished"
    assert callback.stopping_reason == "the next step would have breached the floor"


def test_another_callback_that_clears_the_stop_is_survived(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))

    class Stubborn(space.L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = False

    trainer = space.trainer(tmp_path, callback, Stubborn())
    trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == 5


def test_the_accountant_alone_stops_a_tuner_like_loop(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model)
    model.engine.accountant.history = []
    with pytest.raises(ReconstructionBudgetExceeded):
        space.trainer(tmp_path).fit(model)
    assert len(model.engine.accountant) == 5


@pytest.mark.parametrize("manual", [False, True])
def test_a_resumed_run_has_the_very_same_leakage(
    space: Space, certificate: SourceCertificate, tmp_path: Any, manual: bool
) -> None:
    floor = floor_after(certificate, 20.5)
    whole = space.module(manual)
    space.trainer(tmp_path, space.callback(certificate, floor)).fit(whole)

    checkpoints = importlib.import_module(f"{space.L.__name__}.callbacks").ModelCheckpoint(
        tmp_path, filename="at-{step}", every_n_train_steps=11, save_top_k=-1
    )
    first = space.module(manual)
    space.trainer(
        tmp_path, space.callback(certificate, floor), checkpoints, max_steps=11, enable_checkpointing=True
    ).fit(first)
    path = tmp_path / "at-step=11.ckpt"
    stored = torch.load(path, weights_only=True)["callbacks"]["ReconstructionBoundCallback"]
    assert stored["accountant"]["history"] == [(NOISE, RATE, 11)]

    second, callback = space.module(manual), space.callback(certificate, floor)
    space.trainer(tmp_path, callback).fit(second, ckpt_path=path, weights_only=True)
    assert second.updates == 9
    assert second.engine.accountant.leakage_bits == whole.engine.accountant.leakage_bits
    assert second.engine.accountant.history == whole.engine.accountant.history


def test_a_checkpoint_without_an_account_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    trainer = space.trainer(tmp_path, max_epochs=1)
    trainer.fit(space.module())
    trainer.save_checkpoint(tmp_path / "bare.ckpt")
    model = space.module()
    with pytest.raises(AccountingError, match="trained for 8 steps but holds no account"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model, ckpt_path=tmp_path / "bare.ckpt")
    assert model.updates == 0


def test_an_older_checkpoint_than_the_process_has_seen_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate)
    trainer = space.trainer(tmp_path, callback, max_epochs=1)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "early.ckpt")
    space.trainer(tmp_path, space.callback(certificate), max_epochs=2).fit(model)
    with pytest.raises(AccountingError, match="forget steps"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model, ckpt_path=tmp_path / "early.ckpt")


def test_fit_twice_adds_up(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    for epochs in (1, 2):
        space.trainer(tmp_path, space.callback(certificate), max_epochs=epochs).fit(model)
    assert model.updates == len(model.engine.accountant) == 24


def test_a_plain_loader_charged_as_poisson_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model = space.module()
    model.train_dataloader = lambda: DataLoader(DATA, batch_size=8)
    with pytest.raises(AccountingError, match=r"does not draw Poisson batches.*DPDataLoader"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)

    model = space.module()

    def configure() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(DATA, batch_size=8)
        return model.engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            wrap_model=False,
        )[1]

    model.train_dataloader = lambda: DataLoader(DATA, batch_size=8)
    model.configure_optimizers = configure
    with pytest.raises(AccountingError, match="charged as if it did"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)


def test_a_loader_that_samples_more_than_is_charged_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model = space.module()
    loaders = [DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=size)) for size in (8, 16)]
    inner = model.configure_optimizers

    def configure() -> Any:
        private = inner()
        private.step_hook.sample_rate = 0.1
        return private

    model.configure_optimizers = configure
    with pytest.raises(AccountingError, match=r"probability 0\.125, but optimizer 0 is charged for 0\.1"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model, loaders[0])


def test_an_optimizer_without_noise_is_refused(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(AccountingError, match="SGD, not a DPOptimizer"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_an_engine_without_our_accountant_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any, accountant: str
) -> None:
    model = space.module(engine=PrivacyEngine(accountant=accountant))
    with pytest.raises(AccountingError, match=r"rdp\+mi"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)


@pytest.mark.parametrize("mode", ["hooks_fsdp", "ghost_fsdp"])
def test_a_mode_for_fsdp_is_refused(space: Space, certificate: SourceCertificate, tmp_path: Any, mode: str) -> None:
    model = space.module()
    model.configure_optimizers = lambda: space.ours.private_optimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        engine=model.engine,
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    with pytest.raises(AccountingError, match=f"'{mode}' needs a module that FSDP has wrapped .*Use grad_sample_mode="):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert not hasattr(model.net.weight, "grad_sample")


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_replaced_step_hook_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any, when: str
) -> None:
    model = space.module()

    class Replace(space.L.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            if when == "before":
                trainer.optimizers[0].attach_step_hook(lambda _: None)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if when == "during" and trainer.global_step == 3:
                trainer.optimizers[0].attach_step_hook(lambda _: None)

    with pytest.raises(AccountingError, match="attach_step_hook"):
        space.trainer(tmp_path, Replace(), space.callback(certificate)).fit(model)
    assert model.updates == (0 if when == "before" else 3)


@pytest.mark.parametrize("how", ["uncharged", "twice"])
def test_the_audit_finds_updates_that_were_not_charged_once(
    space: Space, certificate: SourceCertificate, tmp_path: Any, how: str
) -> None:
    model = space.module()

    class Tamper(space.L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                if how == "uncharged":
                    trainer.optimizers[0].original_optimizer.step()
                else:
                    model.engine.accountant.step(noise_multiplier=NOISE, sample_rate=RATE)

    with pytest.raises(AccountingError, match=f"{0 if how == 'uncharged' else 2} steps were charged"):
        space.trainer(tmp_path, Tamper(), space.callback(certificate)).fit(model)
    assert model.updates == 3


def test_the_forecast(
    space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    model = space.module()
    callback = space.ours.ReconstructionBoundCallback(certificate, floor_after(certificate, 5.5))
    space.trainer(tmp_path, callback).fit(model)
    assert (callback.forecast.steps, callback.forecast.last_step) == (24, 5)
    printed = capsys.readouterr().out
    assert "at these settings training would end after 24 steps at ρ* =" in printed
    assert "is reached at step 5" in printed
    assert callback.forecast.last_epsilon.rdp == pytest.approx(callback.epsilon(), rel=1e-12)  # it stopped there
    assert callback.forecast.last_epsilon.rdp < callback.forecast.epsilon.rdp
    assert callback.forecast.epsilon.describe() in printed
    assert "Training was stopped: the next step would breach the floor" in printed


def test_a_floor_above_the_certificate_fails_at_once(space: Space, certificate: SourceCertificate) -> None:
    with pytest.raises(FloorUnreachableError, match=r"0\.948"):
        space.callback(certificate, 0.97)


def test_the_certificate_may_be_a_path(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    path = certificate.save(tmp_path / "c.json")
    assert space.callback(path, 0.5).certificate == certificate


def test_checkpoints_move_between_the_namespaces(certificate: SourceCertificate) -> None:
    keys = {
        importlib.import_module(f"opacus_reconbound.{name}").ReconstructionBoundCallback(certificate).state_key
        for name in ("lightning", "pytorch_lightning")
    }
    assert keys == {"ReconstructionBoundCallback"}


def test_the_last_logged_epsilon_is_that_of_the_whole_run(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    """ε is computed every fifty steps by default; the value that is left standing must not be an old one."""
    for floor, options, steps in (
        (None, {}, 24),
        (floor_after(certificate, 5.5), {}, 5),
        (None, {"max_steps": 11}, 11),
    ):
        model, callback = space.module(), space.callback(certificate, floor)
        trainer = space.trainer(tmp_path, callback, **options)
        trainer.fit(model)
        assert len(callback.accountant) == steps
        assert float(trainer.callback_metrics["privacy/epsilon"]) >= callback.epsilon()


def test_the_progress_bar_has_short_names_on_the_safe_side(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model)
    bar = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
    assert {"rho*", "bits", "left", "eps"} <= set(bar)
    assert callback.bound.rho - 0.0011 <= bar["rho*"] <= callback.bound.rho + 1e-7
    assert bar["bits"] >= callback.accountant.charged_bits - 1e-7
    assert bar["eps"] >= callback.epsilon() - 1e-6


def test_a_resume_below_the_floor_says_that_it_is_breached(
    space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    model = space.module()
    model.engine.accountant.history = [(NOISE, RATE, 9)]
    callback = space.ours.ReconstructionBoundCallback(certificate, floor_after(certificate, 5.5))
    space.trainer(tmp_path, callback).fit(model)
    assert model.updates == 0
    assert callback.forecast.breached
    assert "already breached by the 9 steps taken" in capsys.readouterr().out


def test_a_stricter_budget_that_is_armed_already_stays_and_is_told(
    space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    model = space.module()
    model.engine.accountant.set_floor(certificate, floor_after(certificate, 5.5))
    callback = space.ours.ReconstructionBoundCallback(certificate, floor_after(certificate, 9.5))
    space.trainer(tmp_path, callback).fit(model)
    assert model.updates == 5
    assert callback.forecast.last_step == 5
    assert "stricter budget" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"max_steps": 7}, {"max_epochs": -1, "max_steps": 7}])
def test_max_steps_instead_of_epochs(
    space: Space, certificate: SourceCertificate, tmp_path: Any, options: dict
) -> None:
    model = space.module()
    space.trainer(tmp_path, space.callback(certificate), **({"max_epochs": None} | options)).fit(model)
    assert model.updates == len(model.engine.accountant) == 7


def test_a_fit_after_an_exception_goes_on_with_the_same_account(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate)

    class Fail(space.L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("from elsewhere")

    with pytest.raises(RuntimeError, match="from elsewhere"):
        space.trainer(tmp_path, callback, Fail()).fit(model)
    space.trainer(tmp_path, callback, max_epochs=1).fit(model)
    assert model.updates == len(model.engine.accountant) == 11


@pytest.mark.parametrize("kind", ["plain", "larger"])
def test_a_loader_exchanged_during_training_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any, kind: str
) -> None:
    model = space.module()
    later = DataLoader(DATA, batch_size=64 if kind == "plain" else 32)
    if kind == "larger":
        later = DPDataLoader.from_data_loader(later)
    first = model.train_dataloader()
    model.train_dataloader = lambda: first if model.trainer.current_epoch == 0 else later
    with pytest.raises(AccountingError, match=r"does not draw Poisson batches|includes each record with probability"):
        space.trainer(tmp_path, space.callback(certificate), reload_dataloaders_every_n_epochs=1).fit(model)
    assert model.updates == len(model.engine.accountant) == 8


def test_two_steps_on_one_batch_are_refused(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """Steps that share a Poisson batch share the gate too, and reveal more than the sum of their charges."""
    model = space.module(manual=True)

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = model.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            model.manual_backward(torch.nn.functional.cross_entropy(model.net(batch[0]), batch[1]))
            optimizer.step()

    model.training_step = training_step
    with pytest.raises(AccountingError, match="second optimizer step is about to be taken on one batch"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.updates == len(model.engine.accountant) == 1


@pytest.mark.parametrize("replacement", [False, True])
def test_a_full_batch_counts_as_one_only_where_each_record_enters_once(
    space: Space, certificate: SourceCertificate, tmp_path: Any, replacement: bool
) -> None:
    model = space.module()
    loader = DataLoader(DATA, batch_size=64, sampler=RandomSampler(DATA, replacement=replacement))

    def configure() -> Any:
        private = model.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=20.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            wrap_model=False,
        )[1]
        private.original_optimizer.register_step_post_hook(model.count)
        return private

    model.train_dataloader, model.configure_optimizers = lambda: loader, configure
    trainer = space.trainer(tmp_path, space.callback(certificate))
    if replacement:
        with pytest.raises(AccountingError, match="does not draw Poisson batches"):
            trainer.fit(model)
    else:
        trainer.fit(model)
        assert model.engine.accountant.history == [(20.0, 1.0, 3)]


def test_the_floor_holds_for_all_runs_on_a_ledger(space: Any, tmp_path: Any, certificate: SourceCertificate) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", fingerprint="records")
    ledger.add([(NOISE, RATE, 10)], run="an earlier trial")
    floor = floor_after(certificate, 16.5)
    callback, module = space.callback(certificate, floor, ledger=ledger, run="b"), space.module()
    space.trainer(tmp_path, callback).fit(module)
    assert module.updates == 6
    assert callback.stopping_reason is not None
    assert callback.bound.leakage_bits == ledger.total_bits == pytest.approx(16 * BITS)
    again, module = space.callback(certificate, floor, ledger=ledger.path, run="c"), space.module()
    space.trainer(tmp_path, again).fit(module)
    assert module.updates == 0
    with pytest.raises(InvalidValueError, match="ledger and run go together"):
        space.callback(certificate, ledger=ledger)


def test_a_resumed_trainer_is_not_charged_twice(space: Any, tmp_path: Any, certificate: SourceCertificate) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", fingerprint="records")
    trainer = space.trainer(tmp_path, space.callback(certificate, ledger=ledger, run="a"), max_epochs=1)
    trainer.fit(space.module())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = space.callback(certificate, ledger=Ledger(ledger.path), run="a")
    trainer = space.trainer(tmp_path, resumed, max_epochs=2)
    trainer.fit(space.module(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert len(resumed.accountant) == ledger.schedule.steps == 2 * STEPS_PER_EPOCH
    assert ledger.total_bits == pytest.approx(2 * STEPS_PER_EPOCH * BITS)
    without = space.trainer(tmp_path, space.callback(certificate), max_epochs=3)
    with pytest.raises(AccountingError, match="use_ledger"):
        without.fit(space.module(), ckpt_path=tmp_path / "one.ckpt", weights_only=True)


# ---- plans of splits -------------------------------------------------------------------------------------------------


def planned(train: int, certificate: SourceCertificate) -> tuple[SplitPlan, SourceCertificate]:
    """A plan in which D_train lies within D_est, and a certificate of it."""
    records = torch.arange(400).reshape(200, 2)
    roles = {"reference": range(80), "estimation": range(80, 200), "train": range(100, 100 + train)}
    plan = SplitPlan.of(records, roles)  # type: ignore[arg-type]
    samples = {"reference": plan.samples["reference"], "estimation": plan.samples["estimation"]}
    return plan, replace(certificate, **samples)  # type: ignore[arg-type]


def test_a_run_that_fits_its_plan(space: Any, tmp_path: Any, certificate: SourceCertificate) -> None:
    plan, made = planned(64, certificate)
    plan.save(tmp_path / "plan.json")
    callback = space.callback(made, splits=tmp_path / "plan.json")
    space.trainer(tmp_path, callback, max_epochs=1).fit(space.module())
    assert callback.splits == plan
    assert len(callback.accountant) == STEPS_PER_EPOCH


def test_a_run_that_does_not_fit_its_plan(space: Any, tmp_path: Any, certificate: SourceCertificate) -> None:
    plan, made = planned(63, certificate)
    with pytest.raises(DataError, match="certificate's reference sample has 10 records, but the plan's D_perp has 80"):
        space.callback(certificate, splits=plan)
    model = space.module()
    with pytest.raises(DataError, match="data set has 64 records, but the plan's D_train has 63"):
        space.trainer(tmp_path, space.callback(made, splits=plan)).fit(model)
    assert model.updates == 0
