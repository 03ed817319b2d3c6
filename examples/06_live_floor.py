"""Watch a plain Opacus loop and end it before a floor is breached: progress, a CSV file, and a function of one's own.

Data: scikit-learn's 1,797 handwritten digits (8 × 8 pixels, grey levels 0 to 16), nothing is downloaded.
Run: python examples/06_live_floor.py
"""

import csv
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, attach, certify

MIN_RHO, EPOCHS = 0.7, 40

for note in ("Secure RNG turned off", "Full backward hook is firing", "Optimal order is the"):
    warnings.filterwarnings("ignore", message=note)  # Opacus, on every run

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))  # the file is not in random order: shuffle before splitting
perp, est, train = order[:250], order[250:1150], order[1150:]
certificate = certify(images[perp], images[est], representation=Pixels(value_range=(0, 16)))

data = TensorDataset(torch.tensor(images[train] / 16).float(), torch.tensor(labels[train]))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
engine = PrivacyEngine(accountant="rdp+mi")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    data_loader=DataLoader(data, batch_size=64),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)


def every_fiftieth(values, step):
    if step % 50 == 0:
        print(f"step {step}: ρ* {values['reconstruction/rho_star']:.3f}")


with tempfile.TemporaryDirectory() as folder:
    table = Path(folder) / "floor.csv"
    with attach(
        engine,
        certificate,
        model=model,
        optimizer=optimizer,
        min_rho=MIN_RHO,
        epochs=EPOCHS,
        delta=1e-4,
        log=[table, every_fiftieth],  # a TensorBoard SummaryWriter would do as well
    ) as floor:
        batches = floor.guard(loader)
        for _epoch in range(EPOCHS):
            for x, y in batches:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            if floor.stopped:
                break
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

print(f"{len(rows)} rows in the table; the last one: {rows[-1]}")
assert floor.stopped
assert floor.bound.rho >= MIN_RHO
assert len(rows) == len(engine.accountant) == floor.forecast.last_step
