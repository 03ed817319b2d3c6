"""What the callback costs a training step, against the whole of a small DP-SGD step under the same Trainer.

Run with ``pytest tests/benchmarks -s``.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import defaultdict
from typing import Any

import lightning.pytorch as L
import torch
from opacus import PrivacyEngine
from spaces import CERTIFICATE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.lightning import PrivateDataModule, ReconstructionBoundCallback, private_optimizer

SHARE = 0.01
WARM = 20
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "_audit")


class Timed(ReconstructionBoundCallback):
    """Adds up the seconds that each hook takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        for name in HOOKS:
            setattr(self, name, self.timed(name, getattr(self, name)))

    def timed(self, name: str, hook: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return hook(*args, **kwargs)
            finally:
                self.seconds[name].append(time.perf_counter() - start)

        return run


class Small(L.LightningModule):
    """The convolutional network of Opacus's MNIST example, 26,010 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.ReLU(),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
        self.engine = PrivacyEngine(accountant="rdp+mi")
        self.starts: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.starts.append(time.perf_counter())
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return private_optimizer(self, optimizer, engine=self.engine, noise_multiplier=1.0, max_grad_norm=1.0)


def test_share_of_a_step(tmp_path: Any) -> None:
    data = TensorDataset(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))
    model, callback = Small(), Timed(CERTIFICATE, 0.1, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L.Trainer(
            max_steps=170,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=[callback],
        ).fit(model, datamodule=PrivateDataModule(DataLoader(data, batch_size=256)))
    step = (model.starts[-1] - model.starts[WARM]) / (len(model.starts) - 1 - WARM)
    # means, for what is done every fifty steps counts too
    parts = {name: statistics.fmean(seconds[WARM:]) for name, seconds in callback.seconds.items()}
    ours = sum(parts.values())
    print(f"\na step {step * 1e3:.1f} ms; the callback {ours * 1e6:.0f} us of it, {ours / step:.2%}")
    print(", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in parts.items()))
    assert set(parts) == set(HOOKS)
    assert ours / step < SHARE
