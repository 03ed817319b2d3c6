"""Wirings that would go wrong in silence are refused before the first step, and those that are documented work."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.schedulers import ExponentialNoise
from spaces import DATA, NOISE, RATE, Space, floor_after
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from opacus_reconbound import keep_empty_batches
from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import AccountingError, InvalidValueError

VALIDATION = DataLoader(DATA, batch_size=64)


def data_module(space: Space, loader: Any = None, **hooks: Any) -> Any:
    class Data(space.L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []
            for name, hook in hooks.items():
                setattr(self, name, hook)

        def setup(self, stage: Any) -> None:
            self.calls.append(f"setup {stage.value} {self.trainer is not None}")

        def train_dataloader(self) -> Any:
            return DataLoader(DATA, batch_size=8, shuffle=True) if loader is None else loader

    return Data()


# ---- PrivateDataModule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["module", "loader"])
def test_data_become_poisson(space: Space, certificate: SourceCertificate, tmp_path: Any, kind: str) -> None:
    """A data module, and a plain loader; both without a validation loader."""
    inner = data_module(space) if kind == "module" else DataLoader(DATA, batch_size=8, shuffle=True)
    model, callback = space.module(), space.callback(certificate)
    del type(model).val_dataloader, type(model).validation_step
    sizes: list[int] = []
    step = model.training_step
    model.training_step = lambda batch, batch_idx: (sizes.append(len(batch[0])), step(batch, batch_idx))[1]
    space.trainer(tmp_path, callback, max_epochs=6).fit(model, datamodule=space.ours.PrivateDataModule(inner))
    assert model.engine.accountant.history == [(NOISE, RATE, 48)]
    assert len(set(sizes)) > 3
    assert 5.5 < sum(sizes) / 48 < 10.5
    if kind == "module":
        assert inner.calls == ["setup fit True"]


def test_everything_but_the_training_loader_is_passed_on(space: Space, tmp_path: Any) -> None:
    validation = DataLoader(DATA, batch_size=32)
    moved: list[int] = []

    def on_after_batch_transfer(batch: Any, dataloader_idx: int) -> Any:
        moved.append(dataloader_idx)
        return batch

    class Data(type(data_module(space))):  # type: ignore[misc]
        def val_dataloader(self) -> Any:
            return validation

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return on_after_batch_transfer(batch, dataloader_idx)

        def state_dict(self) -> dict:
            return {"seen": 3}

    model, data = space.module(), space.ours.PrivateDataModule(Data())
    del type(model).val_dataloader
    trainer = space.trainer(tmp_path, max_epochs=1)
    trainer.fit(model, datamodule=data)
    assert trainer.val_dataloaders is validation
    assert model.validations == 2
    assert len(moved) == 8 + 2
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["PrivateDataModule"] == {"seen": 3}
    model = space.module()
    del type(model).val_dataloader
    data = space.ours.PrivateDataModule(DataLoader(DATA, batch_size=8), val=validation, test=validation)
    space.trainer(tmp_path, max_epochs=1).fit(model, datamodule=data)
    assert model.validations == 2


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_a_data_module_of_the_other_namespace(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    import lightning.pytorch
    import pytorch_lightning

    other = pytorch_lightning if space.L is lightning.pytorch else lightning.pytorch
    inner = other.LightningDataModule.from_datasets(train_dataset=DATA, val_dataset=DATA, batch_size=8)
    model = space.module()
    space.trainer(tmp_path, space.callback(certificate), max_epochs=1).fit(
        model, datamodule=space.ours.PrivateDataModule(inner)
    )
    assert model.engine.accountant.history == [(NOISE, RATE, 8)]
    assert model.validations == 8


def test_the_generator_decides_the_batches_and_goes_on(space: Space) -> None:
    numbers = TensorDataset(torch.arange(64.0))

    def batches(data: Any) -> list[list[int]]:
        return [x.int().tolist() for (x,) in data.train_dataloader()]

    first, second = (
        space.ours.PrivateDataModule(DataLoader(numbers, batch_size=8), generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    torch.manual_seed(1)
    one = batches(first)
    torch.manual_seed(2)
    assert batches(second) == one  # the global generator plays no part
    assert batches(first) != one  # a second pass, a second loader: new batches
    own = DataLoader(numbers, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))
    assert batches(space.ours.PrivateDataModule(own)) == one


def test_a_first_batch_that_is_empty_has_the_structure_of_the_others(space: Space) -> None:
    class Named(torch.utils.data.Dataset):
        def __getitem__(self, index: int) -> dict:
            return {"x": torch.ones(3) * index, "y": index}

        def __len__(self) -> int:
            return 3

    torch.manual_seed(0)
    data = space.ours.PrivateDataModule(DataLoader(Named(), batch_size=1))
    found = [batch for _ in range(30) for batch in [next(iter(data.train_dataloader()))] if len(batch["y"]) == 0]
    assert found
    assert found[0]["x"].shape == (0, 3)
    assert found[0]["y"].dtype == torch.int64


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DATA)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler([1.0] * 64, 64)), "by a WeightedRandomSampler"),
        (DataLoader(DATA, batch_size=8, sampler=torch.utils.data.SubsetRandomSampler(range(8))), "whole data set"),
        (DataLoader(DATA, batch_size=None), "by a NoneType"),
        (DataLoader(Endless(), batch_size=8), "is iterable"),
        ([DataLoader(DATA, batch_size=8)] * 2, "one training DataLoader. Found list"),
        (DataLoader(Subset(DATA, range(4)), batch_size=8, drop_last=True), "no batches"),
    ],
)
def test_data_that_cannot_be_drawn_by_poisson(space: Space, loader: Any, message: str) -> None:
    data = space.ours.PrivateDataModule(data_module(space, loader))
    with pytest.raises(AccountingError, match=message):
        data.train_dataloader()


def test_what_is_no_data(space: Space) -> None:
    with pytest.raises(InvalidValueError, match="Found TensorDataset"):
        space.ours.PrivateDataModule(DATA)
    with pytest.raises(InvalidValueError, match="leave val, test and predict out"):
        space.ours.PrivateDataModule(data_module(space), val=DataLoader(DATA))


def test_a_poisson_loader_stays(space: Space) -> None:
    loader = DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=8))
    assert space.ours.PrivateDataModule(loader).train_dataloader() is loader
    assert keep_empty_batches(loader) is loader


# ---- private_optimizer -----------------------------------------------------------------------------------------------


def test_without_the_callback_a_module_can_be_fit_again(space: Space, tmp_path: Any) -> None:
    model = space.module()
    for epochs in (1, 1):
        space.trainer(tmp_path, max_epochs=epochs).fit(model)
    assert model.updates == len(model.engine.accountant) == 16


def test_after_fit_the_module_is_as_it_was(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module()
    keys, hooks = list(model.state_dict()), len(model.net._forward_hooks)
    space.trainer(tmp_path, space.callback(certificate), max_epochs=1).fit(model)
    assert list(model.state_dict()) == keys
    assert len(model.net._forward_hooks) == hooks
    clone = copy.deepcopy(model.net)
    loss = clone(DATA.tensors[0]).sum()
    loss.backward()
    assert not hasattr(clone.weight, "grad_sample")


def test_wrapping_is_not_offered(space: Space, tmp_path: Any) -> None:
    with pytest.raises(InvalidValueError, match="leave wrap_model out"):
        space.trainer(tmp_path).fit(space.module(wrap_model=True))


@pytest.mark.parametrize("manual", [False, True])
def test_ghost_clipping(space: Space, certificate: SourceCertificate, tmp_path: Any, manual: bool) -> None:
    """The loss is an ordinary scalar that can be logged and returned, and the step is that of per-sample gradients."""
    final = []
    for mode in ("hooks", "ghost"):
        torch.manual_seed(0)
        model = space.module(
            manual,
            grad_sample_mode=mode,
            noise_generator=torch.Generator().manual_seed(1),
            **({"criterion": torch.nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        )
        data = space.ours.PrivateDataModule(
            DataLoader(DATA, batch_size=8), val=VALIDATION, generator=torch.Generator().manual_seed(2)
        )
        callback = space.callback(certificate, floor_after(certificate, 5.5))
        trainer = space.trainer(tmp_path, callback)
        trainer.fit(model, datamodule=data)
        assert model.updates == len(model.engine.accountant) == 5
        assert float(trainer.callback_metrics["loss"]) > 0
        final.append(model.net.weight.detach().clone())
    assert torch.allclose(final[0], final[1], atol=1e-5)


def test_ghost_clipping_of_a_plain_or_scaled_loss_is_refused(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    for factor, message in ((None, "were not clipped"), (0.5, "multiplied by 0.5")):
        model = space.module(grad_sample_mode="ghost", criterion=torch.nn.CrossEntropyLoss())

        def training_step(batch: Any, _: int, model: Any = model, factor: Any = factor) -> Any:
            if factor is None:
                return torch.nn.functional.cross_entropy(model.net(batch[0]), batch[1])
            return factor * model.optimizers().criterion(model.net(batch[0]), batch[1])

        model.training_step = training_step
        with pytest.raises(AccountingError, match=message):
            space.trainer(tmp_path, space.callback(certificate)).fit(model)
        assert model.updates == 0


def test_clipping_by_layers(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module(clipping="per_layer", max_grad_norm=[1.0, 1.0])
    space.trainer(tmp_path, space.callback(certificate), max_epochs=1).fit(model)
    assert model.updates == len(model.engine.accountant) == 8


@pytest.mark.parametrize("form", ["dict", "nested dict", "lists", "list", "sequential"])
def test_schedulers_follow_the_private_optimizer(
    space: Space, certificate: SourceCertificate, tmp_path: Any, form: str
) -> None:
    """What ``configure_optimizers`` returned before, built on the original optimizer, goes in as it is."""
    from torch.optim import lr_scheduler

    model = space.module()

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        halves = lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if form == "sequential":
            halves = lr_scheduler.SequentialLR(
                optimizer, [lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for _ in range(2)], [2]
            )
        given = {
            "dict": {"optimizer": optimizer, "lr_scheduler": halves},
            "nested dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": halves, "interval": "epoch"}},
            "lists": ([optimizer], [halves]),
            "list": [optimizer],
            "sequential": {"optimizer": optimizer, "lr_scheduler": halves},
        }[form]
        made = space.ours.private_optimizer(
            model, given, engine=model.engine, noise_multiplier=NOISE, max_grad_norm=1.0
        )
        assert type(made) is type(given)
        return made

    model.configure_optimizers = configure_optimizers
    trainer = space.trainer(tmp_path, space.callback(certificate))
    trainer.fit(model)
    assert len(model.engine.accountant) == 24
    expected = {"list": 0.1, "sequential": 0.05}.get(form, 0.1 / 8)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)
    assert trainer.optimizers[0].original_optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_several_optimizers_are_not_made_private_at_once(space: Space, tmp_path: Any) -> None:
    model = space.module()
    model.configure_optimizers = lambda: space.ours.private_optimizer(
        model,
        [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)],
        engine=model.engine,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(InvalidValueError, match="Found list of 2"):
        space.trainer(tmp_path).fit(model)


# ---- wrong in silence, were it not refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("ours_first", [False, True])
def test_made_private_when_training_starts(
    space: Space, certificate: SourceCertificate, tmp_path: Any, ours_first: bool
) -> None:
    """The loader is built by then: it draws fixed batches, and Poisson batches are charged."""
    model = space.module()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    model.train_dataloader = lambda: DataLoader(DATA, batch_size=8)
    engine = PrivacyEngine(accountant="rdp+mi")

    class Late(space.L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            _, private, _ = engine.make_private(
                module=module,
                optimizer=trainer.optimizers[0],
                data_loader=trainer.train_dataloader,
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                wrap_model=False,
            )
            trainer.strategy.optimizers = [private]

    callbacks = [Late(), space.callback(certificate)]
    with pytest.raises(AccountingError, match="not a DPOptimizer" if ours_first else "does not draw Poisson batches"):
        space.trainer(tmp_path, *(callbacks[::-1] if ours_first else callbacks)).fit(model)
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("what", ["noise", "scheduler", "hook"])
def test_settings_that_land_on_lightnings_wrapper(
    space: Space, certificate: SourceCertificate, tmp_path: Any, what: str
) -> None:
    model = space.module(manual=True)

    def on_fit_start() -> None:
        wrapper = model.optimizers()
        if what == "noise":
            wrapper.noise_multiplier = 50.0
            assert model.optimizers(use_pl_optimizer=False).noise_multiplier == NOISE  # swallowed
        elif what == "scheduler":
            ExponentialNoise(wrapper, gamma=0.5).step()
        else:
            wrapper.attach_step_hook(lambda _: None)

    model.on_fit_start = on_fit_start
    with pytest.raises(AccountingError, match="set on Lightning's wrapper of optimizer 0"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.updates == 0


def test_the_same_in_the_middle_of_training(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    model = space.module(manual=True)

    def on_train_batch_start(batch: Any, index: int) -> None:
        if index == 3:
            model.optimizers().noise_multiplier = 50.0

    model.on_train_batch_start = on_train_batch_start
    with pytest.raises(AccountingError, match="noise_multiplier was set on Lightning's wrapper"):
        space.trainer(tmp_path, space.callback(certificate)).fit(model)
    assert model.updates == len(model.engine.accountant) == 3


def test_what_private_optimizer_refuses_it_refuses_without_the_callback(space: Space, tmp_path: Any) -> None:
    model = space.module()
    model.train_dataloader = lambda: DataLoader(DATA, batch_size=8)
    with warnings.catch_warnings(), pytest.raises(AccountingError, match=r"Pass PrivateDataModule\(loader\) to fit"):
        warnings.simplefilter("ignore")
        space.trainer(tmp_path).fit(model)
