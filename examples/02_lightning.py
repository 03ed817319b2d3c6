"""The same with Lightning: a callback logs ρ* and stops training before the step that would breach the floor.

Data: scikit-learn's 1,797 handwritten digits (8 × 8 pixels, grey levels 0 to 16), nothing is downloaded.
Run: python examples/02_lightning.py
"""

import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.loggers import CSVLogger
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, certify
from opacus_reconbound.lightning import PrivateDataModule, ReconstructionBoundCallback, private_optimizer

MIN_RHO = 0.7

warnings.filterwarnings("ignore")  # Opacus and Lightning, on every run


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
        self.engine = PrivacyEngine(accountant="rdp+mi")  # one engine for the module's life: every fit adds up

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return private_optimizer(self, optimizer, engine=self.engine, noise_multiplier=1.0, max_grad_norm=1.0)


images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))  # the file is not in random order: shuffle before splitting
perp, est, train = order[:250], order[250:1150], order[1150:]
certificate = certify(images[perp], images[est], representation=Pixels(value_range=(0, 16)))

data = TensorDataset(torch.tensor(images[train] / 16).float(), torch.tensor(labels[train]))
private_data = PrivateDataModule(DataLoader(data, batch_size=64, shuffle=True))  # draws Poisson batches
callback = ReconstructionBoundCallback(certificate, min_rho=MIN_RHO)
with tempfile.TemporaryDirectory() as folder:
    trainer = L.Trainer(
        max_epochs=100,
        accelerator="cpu",
        callbacks=[callback],
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), datamodule=private_data)
    log = (Path(folder) / "metrics.csv").read_text().splitlines()
print(f"The log holds {len(log) - 1} rows of: {log[0]}")
print(f"{callback.stopping_reason}: {len(callback.accountant)} steps, ρ* = {callback.bound.rho:.4f}")
assert callback.bound.rho >= MIN_RHO
