"""MNIST pixels, 10,000 + 59,000 records: time, memory, and the published reconstruction ratios to beat."""

from __future__ import annotations

import os
import resource
import sys
import time

import numpy as np
import pytest
from helpers import GOLDEN

from opacus_reconbound.certificates import certify

PUBLISHED = dict(zip(GOLDEN["mnist_pixel_rho_star"]["gamma_bits"], GOLDEN["mnist_pixel_rho_star"]["rho"], strict=True))


@pytest.mark.skipif("RECONBOUND_MNIST" not in os.environ, reason="set RECONBOUND_MNIST to an mnist.npz to run it")
def test_mnist_certificate_beats_the_published_one(capsys: pytest.CaptureFixture[str]) -> None:
    with np.load(os.environ["RECONBOUND_MNIST"]) as file:
        images = np.concatenate([file["x_train"], file["x_test"]])
    order = np.random.default_rng(42).permutation(70_000)
    started = time.perf_counter()
    certificate = certify(images[order[60_000:]], images[order[:59_000]], progress=False)
    seconds = time.perf_counter() - started
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9
    with capsys.disabled():
        print(f"\n{seconds:.0f} s, peak memory {gigabytes:.2f} GB\n bits  published  certified  design")
        for bits in (0.048, 0.169, 0.57, 1, 1.785, 2, 3, 4, 5, 6, 7, 8):
            found = certificate.bound(bits)
            published = f"{PUBLISHED[bits]:.3f}" if bits in PUBLISHED else ""
            print(f"{bits:5g}  {published:>9}  {found.rho:9.4f}  ε = {getattr(found.design, 'temperature', '-')}")
    for bits, published in PUBLISHED.items():
        assert certificate.bound(bits).rho > published
    assert gigabytes < 6.0
    assert seconds < 300.0
