"""Given the exact law, every design lies below the true curve: replicas by exact potentials, blocks by quadrature.

Discrete sources with several replicas are in ``certificates/test_replica.py`` (two) and ``certificates/test_multi.py``
(two, four and eight); here are Gaussian vectors against reverse water-filling, and blocks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import (
    Array,
    DiscreteSource,
    gaussian_distortion_rate,
    gaussian_intercept,
    mixture_entropy,
)
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.block import DITHERS
from opacus_reconbound.certificates.designs import BlockDesign, ReplicaDesign
from opacus_reconbound.certificates.rotation import Rotation
from opacus_reconbound.units import nats_to_bits

SCALES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
RATES = np.array([0.0, 0.1, 0.3, 0.7, 1.2, 2.0, 3.5])


def unit(values: Array) -> Array:
    return np.asarray(values / values.sum())


# ---- Gaussian vectors ------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.02, 1.0), min_size=1, max_size=8).map(np.array), st.sampled_from([2, 4, 8, 32]))
def test_replicas_of_gaussian_vectors(values: Array, m: int) -> None:
    variances = unit(values)
    intercepts = {scale: gaussian_intercept(variances, scale, m) for scale in SCALES}
    for scale, intercept in intercepts.items():
        design = ReplicaDesign(temperature=scale / (m - 1), intercept=intercept, replicas=m)
        for rate in RATES.tolist():
            assert design.distortion(nats_to_bits(rate)) <= gaussian_distortion_rate(variances, rate) + 1e-9
        assert intercept <= gaussian_intercept(variances, scale, 2 * m) + 1e-9


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 0.25, 0.1]])
def test_infinitely_many_replicas_reach_the_curve(values: list[float]) -> None:
    """So the test above could fail: at m = 10^7 nothing is left between the envelope and D(γ)."""
    variances = unit(np.array(values))
    for rate in (0.2, 0.7, 1.5):
        truth = gaussian_distortion_rate(variances, rate)
        step = 1e-4
        slope = (
            gaussian_distortion_rate(variances, rate - step) - gaussian_distortion_rate(variances, rate + step)
        ) / (2 * step)
        reached = gaussian_intercept(variances, slope, 10**7) - slope * rate
        assert reached == pytest.approx(truth, abs=1e-4)
        assert reached <= truth + 1e-7
        assert gaussian_intercept(variances, slope, 2) - slope * rate < truth - 0.03


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0, 1.0], [1.0, 0.5, 0.25, 0.1]])
def test_blocks_of_gaussian_vectors(k: int, values: list[float]) -> None:
    """The library's rotation of a sample, and the exact entropies of the blocks that it makes."""
    variances = unit(np.array(values))
    sample = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rotation = Rotation.fit(sample * torch.from_numpy(variances).sqrt())
    matrix = rotation.apply(torch.eye(4, dtype=torch.float64)).T.numpy()
    covariance = matrix @ np.diag(variances) @ matrix.T * (4 / k)
    gaps = []
    for dither in DITHERS:
        entropies = [
            0.5 * np.linalg.slogdet(2 * math.pi * math.e * (part + dither / k * np.eye(k)))[1]
            for part in (covariance[b * k : (b + 1) * k, b * k : (b + 1) * k] for b in range(4 // k))
        ]
        design = BlockDesign(block_size=k, dither=dither, entropy_bits=nats_to_bits(float(np.mean(entropies))))
        for rate in RATES.tolist():
            gap = gaussian_distortion_rate(variances, rate) - design.distortion(nats_to_bits(rate))
            assert gap >= -1e-9
            gaps.append(gap)
    if k == 4 and values[-1] == 1.0:
        assert min(gaps) < 1e-6  # Shannon's bound is the truth at zero rate
    assert min(gaps) < 0.15


# ---- discrete sources ------------------------------------------------------------------------------------------------


def line_source(seed: int) -> DiscreteSource:
    return DiscreteSource.random(seed, atoms=2 + seed % 5, dimension=1)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_discrete_sources(seed: int) -> None:
    source = line_source(seed)
    designs = []
    for dither in (0.01, 0.05, *DITHERS):
        entropy = mixture_entropy(source.points[:, 0], source.p, math.sqrt(dither))
        designs.append(BlockDesign(block_size=1, dither=dither, entropy_bits=nats_to_bits(entropy)))
    gaps = []
    for slope in np.geomspace(0.05, 3.0, 8):
        rate, distortion = source.distortion_rate(float(slope), side=400)
        best = max(design.distortion(nats_to_bits(rate)) for design in designs)
        assert best <= distortion + 1e-9
        gaps.append(distortion - best)
    assert min(gaps) < 0.05  # and it is of the size of the thing it bounds


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("m", [2, 4, 8])
def test_replicas_of_discrete_sources_at_every_slope(seed: int, m: int) -> None:
    """The line's slope is the curve's: where the bound comes closest."""
    source = DiscreteSource.random(seed, atoms=4, dimension=1)
    gaps = []
    for scale in (0.1, 0.2, 0.4, 0.8):
        rate, distortion = source.distortion_rate(scale, side=400)
        gap = distortion + scale * rate - source.intercept(scale, m)
        assert gap >= -1e-9
        gaps.append(gap)
    assert min(gaps) < 0.2 / m
