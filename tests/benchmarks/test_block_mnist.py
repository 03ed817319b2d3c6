"""MNIST at full size: the published block entropy, the published reconstruction ratios, and the time it takes.

Run with ``RECONBOUND_MNIST=mnist.npz python -m pytest tests/benchmarks/test_block_mnist.py -s``.
"""

from __future__ import annotations

import math
import os
import time

import numpy as np
import pytest
import torch
from helpers import GOLDEN

from opacus_reconbound.certificates.block import BlockEstimate, block_estimates, default_pairs, paper_draws
from opacus_reconbound.certificates.designs import BlockDesign
from opacus_reconbound.certificates.margins import cantelli_bits, monte_carlo_constant

PATH = os.environ.get("RECONBOUND_MNIST")
GRID = GOLDEN["mnist_pixel_block_certificate"]
BITS = (1.0, 2.0, 3.0, 5.0)

pytestmark = pytest.mark.skipif(not PATH, reason="RECONBOUND_MNIST names no npz file with x_train and x_test")


@pytest.fixture(scope="module")
def split() -> tuple[torch.Tensor, torch.Tensor]:
    """The paper's split, centred and scaled to tr Σ̂ = 1: 10,000 reference and 59,000 estimation records."""
    assert PATH is not None
    with np.load(PATH) as file:
        images = np.concatenate([file["x_train"], file["x_test"]]).reshape(70_000, 784)
    permutation = np.random.default_rng(42).permutation(70_000)
    reference = images[permutation[60_000:]].astype(np.float64)
    mean, trace = reference.mean(0), float(reference.var(0).sum())
    assert trace == pytest.approx(GOLDEN["paper_split_mnist"]["pixel_trace_ddof0"], rel=1e-7)
    estimation = images[permutation[:59_000]].astype(np.float32)
    scale = math.sqrt(trace)
    return (
        torch.from_numpy(((reference - mean) / scale).astype(np.float32)),
        torch.from_numpy((estimation - mean.astype(np.float32)) / np.float32(scale)),
    )


def ratio(designs: list[BlockDesign], bits: float) -> float:
    return math.sqrt(max(design.distortion(bits) for design in designs))


def with_paper_margins(estimate: BlockEstimate) -> BlockDesign:
    k = estimate.block_size
    constant = monte_carlo_constant(k, estimate.dither, GOLDEN["margins"]["mean_square_norm"])
    margin = cantelli_bits(constant=constant, blocks=784 // k, n=59_000, draws=paper_draws(k), level=0.025 / 48)
    entropy = estimate.entropy_bits - margin - estimate.sampling_margin_bits
    return BlockDesign(block_size=k, dither=estimate.dither, entropy_bits=entropy)


def test_published_entropy(split: tuple[torch.Tensor, torch.Tensor]) -> None:
    start = time.perf_counter()
    (found,) = block_estimates(*split, pairs=[(28, 1.6)], level=0.05, draws=200_000)
    print(f"\nh(28, 1.6) = {found.entropy_bits:.5f} bits, {time.perf_counter() - start:.1f} s")
    assert found.entropy_bits == pytest.approx(7.933, abs=0.05)


def test_published_ratios(split: tuple[torch.Tensor, torch.Tensor]) -> None:
    start = time.perf_counter()
    found = block_estimates(*split, pairs=default_pairs(784), level=0.05)
    print(f"\n48 pairs, 8000 draws each: {time.perf_counter() - start:.1f} s")
    own = [estimate.design for estimate in found]
    paper = [with_paper_margins(estimate) for estimate in found]
    for bits, published in zip(BITS, GOLDEN["mnist_pixel_rho_star"]["rho"], strict=True):
        print(f"{bits:g} bits: {ratio(own, bits):.4f}, paper's margins {ratio(paper, bits):.4f}, published {published}")
        assert ratio(paper, bits) == pytest.approx(published, abs=0.004)
        assert ratio(own, bits) > published
    for estimate, design in zip(found, paper, strict=True):
        published = GRID["h_lb"][str(estimate.block_size)][GRID["nu2"].index(estimate.dither)]
        assert design.entropy_bits == pytest.approx(published, abs=0.12)  # 8000 draws leave about .03 bits
