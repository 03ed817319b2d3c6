"""Lightning's command line: module, data, callback, floor and certificate come from a YAML file.

Data: scikit-learn's 1,797 handwritten digits (8 × 8 pixels, grey levels 0 to 16), nothing is downloaded.
Run: python examples/05_lightning_cli.py    (needs jsonargparse: pip install "jsonargparse[signatures]")
In a project of your own the last lines are LightningCLI(), and one runs: python main.py fit --config config.yaml
"""

import os
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as L
import numpy as np
import torch
from lightning.pytorch.cli import LightningCLI
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, certify
from opacus_reconbound.lightning import private_optimizer

warnings.filterwarnings("ignore")  # Opacus and Lightning, on every run

CONFIG = Path(__file__).resolve().with_suffix(".yaml")
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
perp, est, train = order[:250], order[250:1150], order[1150:]


class Digits(L.LightningModule):
    def __init__(self, noise_multiplier: float = 1.0, lr: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(64, 10)
        self.engine = PrivacyEngine(accountant="rdp+mi")

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return private_optimizer(
            self, optimizer, engine=self.engine, noise_multiplier=self.hparams.noise_multiplier, max_grad_norm=1.0
        )


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        data = TensorDataset(torch.tensor(images[train] / 16).float(), torch.tensor(labels[train]))
        return DataLoader(data, batch_size=self.batch_size, shuffle=True)


def raw_records(batch):
    """What the certificate is about: grey levels from 0 to 16."""
    return batch[0] * 16


if __name__ == "__main__":
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        certify(images[perp], images[est], representation=Pixels(value_range=(0, 16))).save("digits.json")
        cli = LightningCLI(args=["fit", "--config", str(CONFIG), "--trainer.max_epochs", "30"])
        os.chdir(here)
    callback = next(
        each for each in cli.trainer.callbacks if hasattr(each, "stopping_reason") and hasattr(each, "bound")
    )
    print(f"{callback.stopping_reason}: {len(callback.accountant)} steps, ρ* = {callback.bound.rho:.4f}")
    assert callback.bound.rho >= callback.min_rho
