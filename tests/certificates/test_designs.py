"""Converses: the published reconstruction ratios, inverses, monotonicity."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers import GOLDEN
from hypothesis import assume, given
from hypothesis import strategies as st

from opacus_reconbound.certificates.designs import BlockDesign, ReplicaDesign
from opacus_reconbound.errors import InvalidValueError

GRID = GOLDEN["mnist_pixel_block_certificate"]
RATIOS = GOLDEN["mnist_pixel_rho_star"]
PUBLISHED = [
    BlockDesign(block_size=int(k), dither=nu2, entropy_bits=entropy)
    for k, row in GRID["h_lb"].items()
    for nu2, entropy in zip(GRID["nu2"], row, strict=True)
]

blocks = st.builds(
    lambda k, nu2, share: BlockDesign(
        block_size=k, dither=nu2, entropy_bits=0.5 * k * math.log2(2 * math.pi * math.e * (share + nu2) / k)
    ),
    st.integers(1, 64),
    st.floats(0.05, 10),
    st.floats(0.05, 1),
)
replicas = st.builds(
    lambda eps, intercept, m: ReplicaDesign(temperature=eps, intercept=intercept, replicas=m),
    st.floats(0.01, 2),
    st.floats(0.05, 1),
    st.integers(2, 32),
)
designs = st.one_of(blocks, replicas)


def best(leakage_bits: float) -> BlockDesign:
    return max(PUBLISHED, key=lambda design: design.distortion(leakage_bits))


def test_the_published_grid_is_whole() -> None:
    assert len(PUBLISHED) == GRID["grid_size"] == 48


@pytest.mark.parametrize(("bits", "rho"), list(zip(RATIOS["gamma_bits"], RATIOS["rho"], strict=True)))
def test_published_ratios(bits: float, rho: float) -> None:
    assert math.sqrt(best(bits).distortion(bits)) == pytest.approx(rho, abs=5.1e-4)


@pytest.mark.parametrize("row", RATIOS["by_epsilon"], ids=lambda row: f"eps={row['eps']}")
def test_published_ratios_and_the_pair_that_gives_them(row: dict[str, Any]) -> None:
    design = best(row["gamma_bits"])
    assert (design.block_size, design.dither) == (row["k"], row["nu2"])
    assert math.sqrt(design.distortion(row["gamma_bits"])) == pytest.approx(row["rho"], abs=5.1e-4)


def test_the_equation_in_another_form() -> None:
    """k/(2πe) 2^{2h/k} is the variance of the Gaussian with that entropy: nothing leaks, everything is left."""
    variance, k, nu2 = 0.9, 4, 0.3
    entropy = 0.5 * k * math.log2(2 * math.pi * math.e * (variance + nu2) / k)
    design = BlockDesign(block_size=k, dither=nu2, entropy_bits=entropy)
    assert design.distortion(0.0) == pytest.approx(variance, rel=1e-12)
    assert design.distortion(k / 2) == pytest.approx((variance + nu2) / 2 - nu2, rel=1e-12)


def test_replica_equation() -> None:
    design = ReplicaDesign(temperature=0.1, intercept=0.8, replicas=3)
    assert design.slope == pytest.approx(0.2)
    assert design.distortion(1.0) == pytest.approx(0.8 - 0.2 * math.log(2), rel=1e-12)


@given(designs, st.floats(0, 50))
def test_leakage_inverts_distortion(design: BlockDesign | ReplicaDesign, bits: float) -> None:
    distortion = design.distortion(bits)
    assume(distortion > 1e-3)
    assert design.leakage_bits(distortion) == pytest.approx(bits, abs=1e-8)


@given(designs, st.floats(1e-3, 0.05))
def test_distortion_inverts_leakage(design: BlockDesign | ReplicaDesign, distortion: float) -> None:
    bits = design.leakage_bits(distortion)
    assume(bits >= 0.0)
    assert design.distortion(bits) == pytest.approx(distortion, rel=1e-6)


@given(designs, st.floats(0, 50), st.floats(0.01, 50))
def test_more_leakage_never_leaves_more(design: BlockDesign | ReplicaDesign, bits: float, more: float) -> None:
    first, second = design.distortion(bits), design.distortion(bits + more)
    assert 0.0 <= second <= first
    assert second < first or first == 0.0
    assert design.distortion(math.inf) == 0.0


@given(blocks, st.floats(0, 5), st.floats(0.01, 3))
def test_more_entropy_leaves_more(design: BlockDesign, bits: float, more: float) -> None:
    richer = BlockDesign(block_size=design.block_size, dither=design.dither, entropy_bits=design.entropy_bits + more)
    assert richer.distortion(bits) >= design.distortion(bits)
    assert richer.leakage_bits(0.1) == pytest.approx(design.leakage_bits(0.1) + more, abs=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        {"block_size": 0, "dither": 1.0, "entropy_bits": 1.0},
        {"block_size": 2.5, "dither": 1.0, "entropy_bits": 1.0},
        {"block_size": 2, "dither": 0.0, "entropy_bits": 1.0},
        {"block_size": 2, "dither": 1.0, "entropy_bits": math.nan},
        {"block_size": 2, "dither": 1.0, "entropy_bits": math.inf},
    ],
)
def test_block_designs_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="Expected"):
        BlockDesign(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0, "intercept": 1.0},
        {"temperature": 1.0, "intercept": math.nan},
        {"temperature": 1.0, "intercept": 1.0, "replicas": 1},
    ],
)
def test_replica_designs_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match="Expected"):
        ReplicaDesign(**values)
