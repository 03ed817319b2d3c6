"""Lightning's features beside the callback."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from opacus.schedulers import ExponentialNoise, StepNoise
from opacus.utils.batch_memory_manager import wrap_data_loader
from spaces import BITS, DATA, NOISE, RATE, Space, floor_after
from torch.utils.data import DataLoader

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import AccountingError, InvalidValueError, ReconstructionBudgetExceeded
from opacus_reconbound.leakage import step_charge
from opacus_reconbound.leakage.ledger import Ledger


def sub(space: Space, name: str) -> Any:
    return importlib.import_module(f"{space.L.__name__}.{name}")


# ---- precision, clipping, accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precision(space: Space, certificate: SourceCertificate, tmp_path: Any, precision: str, manual: bool) -> None:
    model, callback = space.module(manual), space.callback(certificate, floor_after(certificate, 11.5))
    if precision == "64-true":
        model.double()
    space.trainer(tmp_path, callback, precision=precision).fit(model)
    assert model.updates == len(model.engine.accountant) == 11
    assert all(p.isfinite().all() for p in model.parameters())
    assert model.net.weight.dtype == {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(
        precision, torch.float32
    )


def test_gradient_scaling_is_refused(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    plugin = sub(space, "plugins").MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
    model = space.module()
    with pytest.raises(AccountingError, match="precision='16-mixed' scales gradients"):
        space.trainer(tmp_path, space.callback(certificate), plugins=[plugin]).fit(model)
    assert model.updates == 0


def test_accumulation_is_refused(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    with pytest.raises(AccountingError, match="accumulate_grad_batches=4 combines several batches"):
        space.trainer(tmp_path, space.callback(certificate), accumulate_grad_batches=4).fit(model)
    assert model.updates == 0
    later = sub(space, "callbacks").GradientAccumulationScheduler({0: 1, 1: 2})
    with pytest.raises(ValueError, match="not compatible with grad accumulation"):
        space.trainer(tmp_path, space.callback(certificate), later).fit(model)
    assert model.updates == len(model.engine.accountant) == 8


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_gradient_clip_val_is_warned_of(space: Space, certificate: SourceCertificate, tmp_path: Any, mode: str) -> None:
    ghost = {"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}
    weights = []
    for clip in (None, 1e-9):
        torch.manual_seed(0)
        model = space.module(grad_sample_mode=mode, noise_generator=torch.Generator().manual_seed(1), **ghost)
        loader = space.ours.PrivateDataModule(
            DataLoader(DATA, batch_size=8), generator=torch.Generator().manual_seed(2)
        ).train_dataloader()
        trainer = space.trainer(tmp_path, space.callback(certificate), max_epochs=1, gradient_clip_val=clip)
        if clip is None:
            trainer.fit(model, loader)
        else:
            with pytest.warns(UserWarning, match="has nothing to do with the clipping that privacy"):
                trainer.fit(model, loader)
        weights.append(model.net.weight.detach().clone())
    assert torch.equal(*weights) == (mode == "hooks")


def test_batch_memory_manager_is_refused(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    plain, configure = model.train_dataloader(), model.configure_optimizers

    def train_dataloader() -> Any:
        made = model.trainer.strategy.optimizers
        return wrap_data_loader(data_loader=plain, max_batch_size=3, optimizer=made[0]) if made else plain

    def configure_optimizers() -> Any:
        made = configure()
        model.trainer.fit_loop._combined_loader = None  # have the trainer ask for its loader again
        return made

    model.train_dataloader, model.configure_optimizers = train_dataloader, configure_optimizers
    with pytest.raises(AccountingError, match="BatchMemoryManager"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.updates == 0


# ---- schedulers and averages -----------------------------------------------------------------------------------------


def test_a_noise_scheduler(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """Every step is charged at the noise it used, and the last one that the floor allows is the last one taken."""
    model = space.module(noise_multiplier=2.0)
    budget = certificate.leakage_budget(floor := floor_after(certificate, 9.5))

    def on_train_start() -> None:
        model.scheduler = ExponentialNoise(model.trainer.optimizers[0], gamma=0.9)

    def on_train_batch_end(*_: Any) -> None:
        model.scheduler.step()

    model.on_train_start, model.on_train_batch_end = on_train_start, on_train_batch_end
    callback = space.callback(certificate, floor)
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model)
    expected, steps = 0.0, 0
    while expected + step_charge(RATE, 2.0 * 0.9**steps)[1] <= budget:
        expected += step_charge(RATE, 2.0 * 0.9**steps)[1]
        steps += 1
    assert model.updates == len(model.engine.accountant) == steps
    assert callback.accountant.charged_bits == pytest.approx(expected, rel=1e-9)
    assert trainer.state.status.value == "finished"


def test_a_noise_scheduler_that_steps_with_the_epochs(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model = space.module()
    made: list[Any] = []
    model.on_train_start = lambda: made.append(StepNoise(model.trainer.optimizers[0], step_size=1, gamma=0.5))
    model.on_train_epoch_end = lambda: made[0].step()
    space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.engine.accountant.history == [(1.0, RATE, 8), (0.5, RATE, 8), (0.25, RATE, 8)]


def test_a_learning_rate_scheduler(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    configure = model.configure_optimizers

    def configure_optimizers() -> Any:
        made = configure()
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)]

    model.configure_optimizers = configure_optimizers
    space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    assert model.updates == len(model.engine.accountant) == 24


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averages_of_weights(space: Space, certificate: SourceCertificate, tmp_path: Any, kind: str) -> None:
    callbacks = sub(space, "callbacks")
    average = (
        callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
        if kind == "swa"
        else callbacks.EMAWeightAveraging()
    )
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 20.5))
    space.trainer(tmp_path, average, callback).fit(model)
    assert model.updates == len(model.engine.accountant) == 20
    # a second fit copies the module again, which must not hold a DPOptimizer
    again = space.callback(certificate, floor_after(certificate, 22.5))
    model.engine.accountant.budget_bits = None
    space.trainer(tmp_path, again).fit(model)
    assert model.updates == len(model.engine.accountant) == 22


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_monitors_rho(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """It sees the current value, with a name without its slash; ρ* falls, so the best one is the first."""
    checkpoints = sub(space, "callbacks").ModelCheckpoint(
        tmp_path,
        monitor="reconstruction/rho_star",
        mode="max",
        every_n_train_steps=3,
        save_top_k=-1,
        filename="{step}-{reconstruction/rho_star:.4f}",
        auto_insert_metric_name=False,
    )
    model = space.module()
    space.trainer(tmp_path, checkpoints, space.callback(certificate), max_epochs=1, enable_checkpointing=True).fit(
        model
    )
    names = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert names == [f"{step}-{certificate.bound(BITS * step).rho:.4f}.ckpt" for step in (3, 6)]
    assert checkpoints.best_model_path.endswith(names[0])


def test_weights_loaded_without_their_account(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """``load_from_checkpoint`` brings the weights; ``continue_from`` what their training revealed."""
    first = space.module()
    trainer = space.trainer(tmp_path, space.callback(certificate), max_epochs=1)
    trainer.fit(first)
    trainer.save_checkpoint(path := tmp_path / "first.ckpt")
    floor = floor_after(certificate, 13.5)

    second = space.module()
    second.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    callback = space.callback(certificate, floor, continue_from=path)
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(second)
    assert second.updates == 5
    assert second.engine.accountant.history == [(NOISE, RATE, 13)]
    assert second.engine.accountant.leakage_bits == pytest.approx(13 * BITS)

    trainer.save_checkpoint(tmp_path / "second.ckpt")
    third = space.module()
    callback = space.callback(certificate, floor_after(certificate, 15.5), continue_from=path)
    space.trainer(tmp_path, callback, max_epochs=9).fit(third, ckpt_path=tmp_path / "second.ckpt", weights_only=True)
    assert third.engine.accountant.history == [(NOISE, RATE, 15)]  # what is resumed holds the first already

    with pytest.raises(AccountingError, match="holds 15 steps already"):
        space.trainer(tmp_path, space.callback(certificate, continue_from=path)).fit(third)
    with pytest.raises(InvalidValueError, match="There is no checkpoint"):
        space.callback(certificate, continue_from=tmp_path / "none.ckpt")
    (tmp_path / "bad.ckpt").write_bytes(b"PK bad")
    with pytest.raises(InvalidValueError, match="cannot be read"):
        space.callback(certificate, continue_from=tmp_path / "bad.ckpt")
    torch.save({"callbacks": {}}, tmp_path / "bare.ckpt")
    with pytest.raises(AccountingError, match="holds no account"):
        space.callback(certificate, continue_from=tmp_path / "bare.ckpt")


def test_load_from_checkpoint(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    trainer = space.trainer(tmp_path, space.callback(certificate), max_epochs=1)
    model = space.module()
    trainer.fit(model)
    trainer.save_checkpoint(path := tmp_path / "first.ckpt")
    loaded = type(model).load_from_checkpoint(path, weights_only=True)
    assert torch.equal(loaded.net.weight, model.net.weight)
    space.trainer(tmp_path, space.callback(certificate, continue_from=path), max_epochs=1).fit(loaded)
    assert len(loaded.engine.accountant) == 16


def test_an_older_checkpoint_adds_up_on_a_ledger(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """A run goes on from before its end; the steps that were given up were seen, and the ledger holds them."""
    path = tmp_path / "ledger.jsonl"
    Ledger(path, fingerprint="records")
    checkpoints = sub(space, "callbacks").ModelCheckpoint(
        tmp_path / "steps", filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    callback = space.callback(certificate, ledger=path, run="a")
    trainer = space.trainer(tmp_path, callback, checkpoints, max_epochs=1, enable_checkpointing=True)
    trainer.fit(space.module())
    assert Ledger(path).total_bits == pytest.approx(8 * BITS)
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 14.5), ledger=path, run="a")
    trainer = space.trainer(tmp_path, callback)
    trainer.fit(model, ckpt_path=tmp_path / "steps" / "step=5.ckpt", weights_only=True)
    assert model.updates == 6
    assert len(model.engine.accountant) == 11  # of this trajectory
    assert callback.bound.leakage_bits == Ledger(path).total_bits == pytest.approx(14 * BITS)


# ---- the tuner -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*checkpoint")
def test_the_tuner_is_charged_and_fit_follows(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """The tuner leaves our callback out while it trains: the account that the engine keeps counts all the same."""
    model = space.module()
    model.lr = 0.1
    trainer = space.trainer(tmp_path, space.callback(certificate), enable_checkpointing=True, max_epochs=2)
    sub(space, "tuner").Tuner(trainer).lr_find(model, num_training=6)
    tried = model.updates
    assert tried == len(model.engine.accountant) >= 6
    trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == tried + 16


def test_the_tuner_is_stopped(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """Where the account is armed before, with the floor."""
    model = space.module()
    model.lr = 0.1
    model.engine.accountant.set_floor(certificate, floor := floor_after(certificate, 4.5))
    trainer = space.trainer(tmp_path, space.callback(certificate, floor), enable_checkpointing=True)
    with pytest.raises(ReconstructionBudgetExceeded, match="the floor"):
        sub(space, "tuner").Tuner(trainer).lr_find(model, num_training=20)
    assert model.updates == len(model.engine.accountant) == 4


def test_warnings_of_the_loop_are_shown_once(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    class Warns(space.L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            warnings.warn("of my own", stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        callback = space.callback(certificate, epsilon_every_n_steps=1)
        space.trainer(tmp_path, callback, Warns(), max_epochs=1).fit(space.module())
    assert len(callback.accountant) == 8
    # the first ε may still set a filter
    assert sum(str(each.message) == "of my own" for each in shown) <= 2
