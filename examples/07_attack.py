"""Train with Opacus, attack records of the training set with all that the guarantee allows, and see the bound below.

The model is linear in its weights, so that a record's gradient is the record itself, centred and clipped. The adversary
sees every noisy update, knows all other records and the batches that they were in, and holds 1,000 more of the source.

Data: scikit-learn's 1,797 handwritten digits (8 × 8 pixels, grey levels 0 to 16), nothing is downloaded.
Run: python examples/07_attack.py [--picture attack.png]
"""

import argparse
import math
import warnings

import numpy as np
import torch
from opacus import PrivacyEngine
from scipy.special import softmax
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, SplitPlan, certify
from opacus_reconbound.attacks import Threat, attack_codebook, directions, log_likelihoods
from opacus_reconbound.leakage import noise_for_leakage

RUNS, TARGETS = 8, 60  # independent runs, and how many records each attacks
BITS = (0.72, 2.89, 8.01)

for note in ("Secure RNG turned off", "Full backward hook is firing"):
    warnings.filterwarnings("ignore", message=note)  # Opacus, on every run
options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--picture", help="draw some reconstructions, as .png, .svg or .pdf")
given = options.parse_args()
torch.set_num_threads(1)  # many small steps

images, _ = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
plan = SplitPlan.of(
    images,
    {
        "reference": order[:300],
        "estimation": order[300:1300],
        "shadow": order[300:1300],  # the attack's candidates may be D_est
        "train": order[1300:],
        "targets": order[1300 : 1300 + RUNS * TARGETS],
    },
)
plan.check_attack()
perp, est = plan.select(images, "reference"), plan.select(images, "estimation")
certificate = certify(perp, est, representation=Pixels(value_range=(0, 16)), designs="all", splits=plan)
variance = certificate.trace.reference

train, pool = images[plan.indices("train")], images[plan.indices("shadow")]
centre = pool.mean(axis=0)  # fixed on records that are not trained on
u, candidates = directions(train, centre), directions(pool, centre)
inputs = TensorDataset(torch.tensor(train - centre).float(), torch.arange(len(train)))
attacked = np.flatnonzero(np.isin(plan.indices("train"), plan.indices("targets")))
groups = np.random.default_rng(1).permutation(attacked).reshape(RUNS, TARGETS)


def release(sample_rate: float, steps: int, sigma: float) -> tuple[np.ndarray, np.ndarray, float]:
    """A private run: the sum of clipped gradients and noise that each step released, and who was in it."""
    model = torch.nn.Linear(64, 1, bias=False)
    engine = PrivacyEngine(accountant="rdp+mi")
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(inputs, batch_size=math.ceil(len(train) * sample_rate)),
        noise_multiplier=sigma,
        max_grad_norm=1.0,
    )
    sums, members = [], []
    while len(sums) < steps:
        for x, who in loader:
            before = model.weight.detach().clone()
            optimizer.zero_grad()
            (-private(x)).mean().backward()
            optimizer.step()
            sums.append((model.weight.detach() - before).double().numpy().ravel() * optimizer.expected_batch_size)
            members.append(np.isin(np.arange(len(train)), who.numpy()))
    return np.stack(sums), np.stack(members), engine.accountant.leakage_bits


def attack(target: int, sums: np.ndarray, members: np.ndarray, q: float, sigma: float) -> np.ndarray:
    """Subtract all other records from every step; the posterior mean over the candidates."""
    others = members.copy()
    others[:, target] = False
    residuals = sums - others.astype(float) @ u
    return softmax(log_likelihoods(residuals, candidates, sample_rate=q, noise_multiplier=sigma)) @ pool


print("Root mean squared errors, relative to that of the best guess without the model: ρ* and ρ.")
print(f"{'release':>22}  {'bits':>5}  {'sigma':>5}  {'bound':>6}  {'attack':>6}")
torch.manual_seed(0)
pictures = {"original": list(train[groups[0, :8]])}
for threat in (Threat(1.0, 1), Threat(0.02, 100)):
    for bits in BITS:
        sigma = noise_for_leakage(bits, sample_rate=threat.sample_rate, steps=threat.steps)
        means = []
        for group in groups:
            sums, members, charged = release(threat.sample_rate, threat.steps, sigma)
            assert charged <= bits
            guesses = [attack(target, sums, members, threat.sample_rate, sigma) for target in group]
            means.append(np.square(train[group] - np.stack(guesses)).sum(axis=1).mean())
            if len(means) == 1:
                pictures[f"q = {threat.sample_rate:g}, {bits:g} bits"] = guesses[:8]
        mse, error = np.mean(means), np.std(means, ddof=1) / math.sqrt(RUNS)  # runs share neither noise nor targets
        bound = certificate.bound(bits)
        assert mse >= bound.mse - 3 * error
        name = f"q = {threat.sample_rate:g}, {threat.steps} step(s)"
        print(f"{name:>22}  {bits:5.2f}  {sigma:5.2f}  {bound.rho:6.3f}  {math.sqrt(mse / variance):6.3f}")

targets = images[plan.indices("targets")]
for rate in (0.5, 1, 2, 4):
    errors = attack_codebook(targets, pool, rate_bits=rate, variance=variance).errors
    bound = certificate.bound(rate)
    assert errors.mse >= bound.mse - 3 * errors.mse_standard_error
    print(f"{'codebook':>22}  {rate:5.2f}  {'':5}  {bound.rho:6.3f}  {errors.rho:6.3f}")

if given.picture:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    for line, (label, row) in zip(figure.subplots(len(pictures), 8), pictures.items(), strict=True):
        line[0].set_ylabel(label, rotation=0, horizontalalignment="right", verticalalignment="center")
        for cell, picture in zip(line, row, strict=True):
            cell.imshow(picture.reshape(8, 8), cmap="gray", vmin=0, vmax=16)
            cell.set(xticks=[], yticks=[])
    figure.savefig(given.picture, dpi=110)
    print(f"Wrote {given.picture}.")
