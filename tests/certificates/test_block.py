"""Block entropies: a naive re-implementation, laws with known entropy, coverage, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import GOLDEN, most_failures, nats
from numpy.typing import NDArray

from opacus_reconbound.certificates import block as block_module
from opacus_reconbound.certificates.block import (
    BlockEstimate,
    block_designs,
    block_estimates,
    default_pairs,
    paper_draws,
)
from opacus_reconbound.certificates.margins import cantelli_bits, mcdiarmid_bits, monte_carlo_constant
from opacus_reconbound.certificates.rotation import Rotation
from opacus_reconbound.errors import DataError, InvalidValueError

SPECTRUM = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)


def gaussian(n: int, seed: int) -> torch.Tensor:
    """Records N(0, diag(SPECTRUM)), tr Σ = 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64) * SPECTRUM.sqrt()


def binary(n: int, seed: int) -> torch.Tensor:
    """Equally likely ±1, tr Σ = 1."""
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(2, (n, 1), generator=generator).double() - 1.0


def binary_entropy_bits(row: dict[str, float]) -> float:
    """h(±1 + N(0, s²)) in bits from the published information."""
    return row["information_bits"] + 0.5 * math.log2(2 * math.pi * math.e * row["s"] ** 2)


def stream(seed: int, *key: int) -> torch.Generator:
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def naive_log_density(y: NDArray[np.float64], centres: NDArray[np.float64], s2: float) -> float:
    """ln f̂(y) by a plain loop."""
    k = len(y)
    total = 0.0
    for centre in centres:
        square = sum((a - b) ** 2 for a, b in zip(y, centre, strict=True))
        total += math.exp(-square / (2 * s2)) / (2 * math.pi * s2) ** (k / 2)
    return math.log(total / len(centres))


def naive_blocks(reference: torch.Tensor, estimation: torch.Tensor, k: int) -> list[NDArray[np.float64]]:
    """Π_b z_j from the explicit orthogonal matrix."""
    rotation = Rotation.fit(reference)
    matrix = rotation.apply(torch.eye(reference.shape[1], dtype=torch.float64)).T.numpy()
    count = len(matrix) // k
    z = estimation.double().numpy()
    return [math.sqrt(count) * z @ matrix[b * k : (b + 1) * k].T for b in range(count)]


@pytest.mark.parametrize(("k", "nu2"), [(1, 0.4), (2, 0.8), (4, 3.2)])
def test_bernstein_against_a_plain_loop(k: int, nu2: float) -> None:
    reference, estimation, draws, level = gaussian(30, 1), gaussian(25, 2), 40, 0.1
    (found,) = block_estimates(reference, estimation, pairs=[(k, nu2)], level=level, draws=draws, seed=5)
    n, s2, blocks = 25, nu2 / k, naive_blocks(reference, estimation, k)
    generator = stream(5, 0)
    which = torch.rand(draws, generator=generator, dtype=torch.float64)
    index = torch.rand(draws, generator=generator, dtype=torch.float64)
    noise = torch.randn(draws, k, generator=generator, dtype=torch.float64).numpy()
    values = []
    for i in range(draws):
        centres = blocks[int(which[i] * len(blocks))]
        w = math.sqrt(s2) * noise[i]
        log_noise = -sum(w**2) / (2 * s2) - 0.5 * k * math.log(2 * math.pi * s2)
        values.append(max(-9.0, log_noise - naive_log_density(centres[int(index[i] * n)] + w, centres, s2)))
    a = level / 2
    variance = sum((v - sum(values) / draws) ** 2 for v in values) / (draws - 1)
    deviation = math.sqrt(2 * variance * math.log(2 / a) / draws)
    deviation += 7 * (math.log(n) + 9) * math.log(2 / a) / (3 * (draws - 1))
    entropy = sum(values) / draws + 0.5 * k * math.log(2 * math.pi * math.e * s2)
    assert nats(found.entropy_bits) == pytest.approx(entropy, abs=1e-9)
    assert nats(found.monte_carlo_margin_bits) == pytest.approx(deviation + math.exp(-10), abs=1e-9)
    assert found.sampling_margin_bits == mcdiarmid_bits(n, a)
    assert found.draws == draws
    assert 0.0 < found.arithmetic_margin_bits < 1e-9


@pytest.mark.parametrize(("k", "nu2", "rounds"), [(1, 0.4, None), (2, 0.8, 3), (4, 3.2, None)])
def test_paper_against_a_plain_loop(k: int, nu2: float, rounds: int | None) -> None:
    reference, estimation, level = gaussian(30, 1), gaussian(12, 2), 0.1
    (found,) = block_estimates(
        reference, estimation, pairs=[(k, nu2)], level=level, margins="paper", draws=rounds, seed=5
    )
    count = rounds or paper_draws(k)
    n, s2, blocks = 12, nu2 / k, naive_blocks(reference, estimation, k)
    total, constant = 0.0, 0.0
    for b, centres in enumerate(blocks):
        generator = stream(5, 0, b)
        constant += monte_carlo_constant(k, nu2, float((centres**2).sum(1).mean())) / len(blocks)
        for _ in range(count):
            noise = torch.randn(n, k, generator=generator, dtype=torch.float64).numpy()
            for j in range(n):
                total -= naive_log_density(centres[j] + math.sqrt(s2) * noise[j], centres, s2)
    assert nats(found.entropy_bits) == pytest.approx(total / (len(blocks) * count * n), abs=1e-9)
    expected = cantelli_bits(constant=constant, blocks=len(blocks), n=n, draws=count, level=level / 2)
    assert found.monte_carlo_margin_bits == pytest.approx(expected, rel=1e-10)
    assert found.sampling_margin_bits == mcdiarmid_bits(n, level / 2)
    assert found.draws == len(blocks) * count * n


@pytest.mark.parametrize("row", GOLDEN["binary_awgn"]["rows"], ids=lambda row: f"s={row['s']}")
@pytest.mark.parametrize("margins", ["bernstein", "paper"])
def test_binary_source(row: dict[str, float], margins: Any) -> None:
    """With half of the records at each point the plug-in entropy is the true one; only the draws vary."""
    estimation = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).repeat(300, 1)
    draws = {"bernstein": 60_000, "paper": 100}[margins]
    (found,) = block_estimates(
        binary(50, 1), estimation, pairs=[(1, row["s"] ** 2)], level=0.05, margins=margins, draws=draws
    )
    assert found.entropy_bits == pytest.approx(binary_entropy_bits(row), abs=0.02)  # over five deviations


@pytest.mark.parametrize(("k", "bias"), [(1, 0.02), (2, 0.06), (4, 0.4)])
@pytest.mark.parametrize("nu2", [0.8, 3.2])
def test_gaussian_source(k: int, bias: float, nu2: float) -> None:
    reference, estimation = gaussian(2000, 1), gaussian(4000, 2)
    (found,) = block_estimates(reference, estimation, pairs=[(k, nu2)], level=0.05, draws=20_000)
    matrix = Rotation.fit(reference).apply(torch.eye(4, dtype=torch.float64)).T
    covariance = matrix @ torch.diag(SPECTRUM) @ matrix.T * (4 / k)
    truth = 0.0
    for b in range(4 // k):
        part = covariance[b * k : (b + 1) * k, b * k : (b + 1) * k] + nu2 / k * torch.eye(k)
        truth += 0.5 * float(torch.logdet(2 * math.pi * math.e * part)) / math.log(2) / (4 // k)
    assert truth - bias - 0.04 < found.entropy_bits < truth + 0.04
    assert found.lower_bound_bits < truth


def test_the_sampling_margin_shares_the_level_among_the_grid() -> None:
    """Equation 35 at level α/(2|G|), with the published grid and with a small one."""
    found = mcdiarmid_bits(59_000, 0.05 / 2 / len(default_pairs(784)))
    assert found == pytest.approx(GOLDEN["margins"]["t_mcdiarmid_bits"][0]["value"], rel=1e-9)
    estimates = block_estimates(gaussian(20, 1), gaussian(30, 2), pairs=default_pairs(4)[:6], level=0.3, draws=10)
    assert {e.sampling_margin_bits for e in estimates} == {mcdiarmid_bits(30, 0.3 / 12)}


def test_coverage_of_the_lower_bound() -> None:
    row = GOLDEN["binary_awgn"]["rows"][1]
    truth, level, repeats = binary_entropy_bits(row), 0.5, 300
    failures, estimate_above = 0, 0
    for seed in range(repeats):
        (found,) = block_estimates(
            binary(10, 2 * seed),
            binary(40, 2 * seed + 1),
            pairs=[(1, row["s"] ** 2)],
            level=level,
            draws=400,
            seed=seed,
        )
        failures += found.lower_bound_bits > truth
        estimate_above += found.entropy_bits > truth
    assert failures <= most_failures(repeats, level)
    assert estimate_above > 0.2 * repeats  # without the margins the bound would fail often


@pytest.mark.parametrize(("margins", "draws"), [("bernstein", 500), ("paper", 3)])
def test_coverage_of_the_monte_carlo_margin(margins: Any, draws: int) -> None:
    """The sample is held fixed: its plug-in entropy is known, and only the draws vary."""
    row = GOLDEN["binary_awgn"]["rows"][2]
    estimation = torch.tensor([[-1.0], [1.0]], dtype=torch.float64).repeat(20, 1)
    level, repeats, failures, above = 0.9, 200, 0, 0
    for seed in range(repeats):
        (found,) = block_estimates(
            binary(10, 1),
            estimation,
            pairs=[(1, row["s"] ** 2)],
            level=level,
            margins=margins,
            draws=draws,
            seed=seed,
        )
        failures += found.entropy_bits - found.monte_carlo_margin_bits > binary_entropy_bits(row)
        above += found.entropy_bits > binary_entropy_bits(row)
    assert failures <= most_failures(repeats, level / 2)
    assert above > 0.3 * repeats


def estimates(**changes: Any) -> tuple[BlockEstimate, ...]:
    settings: dict[str, Any] = {
        "reference": gaussian(30, 1),
        "estimation": gaussian(200, 2).float(),
        "pairs": [(1, 0.4), (2, 0.4), (1, 1.6)],
        "level": 0.1,
        "draws": 300,
        "seed": 3,
    }
    settings.update(changes)
    return block_estimates(settings.pop("reference"), settings.pop("estimation"), **settings)


@pytest.mark.parametrize(("margins", "draws"), [("bernstein", 300), ("paper", 2)])
def test_results_repeat_and_the_chunk_changes_rounding_only(margins: Any, draws: int) -> None:
    first = estimates(margins=margins, draws=draws)
    assert estimates(margins=margins, draws=draws) == first
    for a, b in zip(first, estimates(margins=margins, draws=draws, chunk=64), strict=True):
        assert b.entropy_bits == pytest.approx(a.entropy_bits, abs=1e-6)
        assert b.monte_carlo_margin_bits == pytest.approx(a.monte_carlo_margin_bits, abs=1e-6)
    assert [e.entropy_bits for e in estimates(margins=margins, draws=draws, seed=4)] != [e.entropy_bits for e in first]


@pytest.mark.parametrize(("margins", "draws"), [("bernstein", 300), ("paper", 2)])
def test_the_number_of_threads_changes_nothing(margins: Any, draws: int) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(estimates(margins=margins, draws=draws))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert b.entropy_bits == pytest.approx(a.entropy_bits, abs=1e-6)


def test_single_precision_stays_within_its_stated_margin() -> None:
    sample = gaussian(200, 2).float()
    for single, double in zip(estimates(estimation=sample), estimates(estimation=sample.double()), strict=True):
        assert abs(single.entropy_bits - double.entropy_bits) <= single.arithmetic_margin_bits
        assert double.arithmetic_margin_bits < 1e-9
        assert 1e-5 < single.arithmetic_margin_bits < 1e-3


def test_pairs_come_back_in_order_with_their_designs() -> None:
    pairs = [(1, 0.4), (2, 0.4), (1, 1.6)]
    found = estimates()
    assert [(e.block_size, e.dither) for e in found] == pairs
    designs = block_designs(gaussian(30, 1), gaussian(200, 2).float(), pairs=pairs, level=0.1, draws=300, seed=3)
    for estimate, design in zip(found, designs, strict=True):
        assert design == estimate.design
        margins = estimate.monte_carlo_margin_bits + estimate.sampling_margin_bits + estimate.arithmetic_margin_bits
        assert min(estimate.monte_carlo_margin_bits, estimate.arithmetic_margin_bits) > 0.0
        assert design.entropy_bits == pytest.approx(estimate.entropy_bits - margins, rel=1e-12)


def test_padding_and_a_data_free_rotation() -> None:
    """Five coordinates become eight; four reference records are too few for a basis."""
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4000, 5, generator=generator, dtype=torch.float64) / math.sqrt(5)
    (found,) = block_estimates(z[:4], z[4:], pairs=[(8, 1.6)], level=0.05, draws=4000)
    expected = 2.5 * math.log2(2 * math.pi * math.e * 0.4) + 1.5 * math.log2(2 * math.pi * math.e * 0.2)
    assert found.lower_bound_bits < expected
    assert expected - 0.6 < found.entropy_bits < expected + 0.1


@pytest.mark.parametrize(("margins", "draws", "total"), [("bernstein", 50, 4 + 2), ("paper", 2, 8 + 4 + 8)])
def test_progress(margins: Any, draws: int, total: int) -> None:
    seen: list[tuple[int, int]] = []
    estimates(margins=margins, draws=draws, progress=lambda done, whole: seen.append((done, whole)))
    assert seen == [(i, total) for i in range(1, total + 1)]


def test_default_pairs() -> None:
    pairs = default_pairs(784)
    assert len(pairs) == len(set(pairs)) == GOLDEN["mnist_pixel_block_certificate"]["grid_size"]
    assert {k for k, _ in pairs} == {int(k) for k in GOLDEN["mnist_pixel_block_certificate"]["h_lb"]}
    assert sorted({nu2 for _, nu2 in pairs}) == GOLDEN["mnist_pixel_block_certificate"]["nu2"]
    assert {k for k, _ in default_pairs(32_768)} == {1, 2, 4, 8, 16, 32}
    assert {k for k, _ in default_pairs(3072)} == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}
    assert {k for k, _ in default_pairs(1)} == {1}


def test_paper_draws() -> None:
    assert [paper_draws(k) for k in (1, 2, 3, 4, 28)] == [2, 4, 4, 4, 28]


def test_equal_records_tell_nothing() -> None:
    """Every record equal: the information is zero and so is its estimate."""
    for found in estimates(estimation=torch.zeros(50, 4)):
        s2 = found.dither / found.block_size
        entropy = 0.5 * found.block_size * math.log2(2 * math.pi * math.e * s2)
        assert found.entropy_bits == pytest.approx(entropy, abs=1e-5)


def test_the_default_number_of_draws() -> None:
    (found,) = estimates(draws=None, pairs=[(4, 1.6)])
    assert found.draws == block_module.DRAWS == 8000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pairs": []}, "at least one pair"),
        ({"pairs": [(3, 0.4)]}, r"block sizes that divide 4, the dimension after padding. Found 3"),
        ({"pairs": [(8, 0.4)]}, "Found 8"),
        ({"pairs": [(0, 0.4)]}, "block_size"),
        ({"pairs": [(1, 0.0)]}, "dither"),
        ({"pairs": [(1, math.inf)]}, "dither"),
        ({"level": 0.0}, "level"),
        ({"level": 1.0}, "level"),
        ({"margins": "hoeffding"}, "'bernstein' or 'paper'"),
        ({"draws": 1}, "draws"),
        ({"draws": 0, "margins": "paper"}, "draws"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        estimates(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimation": torch.zeros(20)}, "estimation records as a floating-point matrix"),
        ({"reference": torch.zeros(20, 4, dtype=torch.long)}, "reference records as a floating-point matrix"),
        ({"estimation": torch.zeros(20, 5)}, "one width. Found 4 and 5"),
        ({"estimation": torch.zeros(1, 4)}, "at least 2 estimation records"),
        ({"estimation": torch.full((20, 4), math.nan)}, "finite estimation records"),
        ({"reference": torch.full((20, 4), math.inf)}, "finite reference records"),
    ],
)
def test_records_that_cannot_carry_a_certificate(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        estimates(**changes)
