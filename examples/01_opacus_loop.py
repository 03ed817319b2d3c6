"""Train in a plain Opacus loop until the reconstruction floor is reached, then say what the run guarantees.

Data: scikit-learn's 1,797 handwritten digits (8 × 8 pixels, grey levels 0 to 16), nothing is downloaded.
Run: python examples/01_opacus_loop.py
"""

import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, ReconstructionBudgetExceeded, certify

MIN_RHO = 0.7

for note in ("Secure RNG turned off", "Full backward hook is firing", "Optimal order is the"):
    warnings.filterwarnings("ignore", message=note)  # Opacus, on every run

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))  # the file is not in random order: shuffle before splitting
perp, est, train = order[:250], order[250:1150], order[1150:]

# What the source hides: once, from two disjoint samples.
certificate = certify(images[perp], images[est], representation=Pixels(value_range=(0, 16)))
print(f"The floor {MIN_RHO:g} allows {certificate.leakage_budget(MIN_RHO):.3f} bits about any one record.")

# What training reveals: an ordinary private loop, with this library's accountant and a floor.
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
engine.accountant.set_floor(certificate, min_rho=MIN_RHO)
try:
    for _epoch in range(100):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
except ReconstructionBudgetExceeded as stop:  # nothing of that step was applied or charged
    print(f"Stopped: the next step would have made it {stop.next_bits:.3f} bits.")

bound = engine.accountant.bound(certificate)
print(f"{len(engine.accountant)} steps, {bound.leakage_bits:.3f} bits, ε = {engine.get_epsilon(1e-4):.2f} at δ = 1e-4.")
print(bound.explain())
assert bound.rho >= MIN_RHO
