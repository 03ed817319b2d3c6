"""Mixtures: against SciPy in float64, against laws with known information, and the stated arithmetic error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import GOLDEN, nats
from numpy.typing import NDArray
from scipy.special import logsumexp

from opacus_reconbound.certificates import mixture
from opacus_reconbound.certificates.mixture import information_density, log_mixture
from opacus_reconbound.errors import InvalidValueError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(draws: torch.Tensor, centres: torch.Tensor, scale: NDArray[np.float64] | float) -> NDArray[np.float64]:
    y, c = draws.double().numpy(), centres.double().numpy()
    square = ((y[:, None, :] - c[None, :, :]) ** 2).sum(2)
    s = np.broadcast_to(np.asarray(scale, dtype=np.float64), len(y))[:, None]
    return np.asarray(logsumexp(-square / (2.0 * s**2), axis=1) - math.log(len(c)))


@pytest.mark.parametrize("k", [1, 2, 7, 28])
@pytest.mark.parametrize("scale", [0.05, 0.4, 3.0])
@pytest.mark.parametrize(("dtype", "u"), [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_against_scipy_within_the_stated_error(k: int, scale: float, dtype: torch.dtype, u: float) -> None:
    centres = normal(700, k).to(dtype) + 3.0
    draws = normal(300, k, seed=1) + 3.0
    found = log_mixture(draws, centres, scale)
    assert found.dtype == torch.float64
    length = (draws - 3.0).norm(dim=1) + (centres.double() - 3.0).norm(dim=1).max() + 1.0
    bound = u * ((k + 6) * length**2 / (2 * scale**2) + 256)
    error = np.abs(found.numpy() - naive(draws, centres, scale))
    assert np.all(error <= bound.numpy())


@pytest.mark.parametrize("centre_count", [1, 5, 9000, 20_000])
@pytest.mark.parametrize("draw_count", [1, 300])
def test_sizes_around_the_tiles(centre_count: int, draw_count: int) -> None:
    centres, draws = normal(centre_count, 2), normal(draw_count, 2, seed=1)
    expected = naive(draws, centres, 0.3)
    assert log_mixture(draws, centres, 0.3).numpy() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 1000, 10**9])
def test_the_chunk_changes_rounding_only(chunk: int) -> None:
    centres, draws = normal(50, 3).float(), normal(20, 3, seed=1)
    found = log_mixture(draws, centres, 0.5, chunk=chunk)
    torch.testing.assert_close(found, log_mixture(draws, centres, 0.5), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("distance", [1e2, 1e4])
def test_draws_far_from_every_centre_stay_finite(distance: float) -> None:
    centres, draws = normal(60, 4), normal(10, 4, seed=1) + distance
    assert log_mixture(draws, centres, 0.1).numpy() == pytest.approx(naive(draws, centres, 0.1), rel=1e-9)


@pytest.mark.parametrize("offset", [-1e6, -3.0, 0.0, 1e6])
def test_a_bad_guess_costs_no_accuracy(offset: float) -> None:
    centres, draws = normal(60, 4), normal(10, 4, seed=1) + 50.0
    found = log_mixture(draws, centres, 0.5, offsets=torch.full((10,), offset))
    assert found.numpy() == pytest.approx(naive(draws, centres, 0.5), rel=1e-9)


def test_a_scale_for_each_draw() -> None:
    centres, draws, scale = normal(80, 3), normal(9, 3, seed=1), torch.linspace(0.1, 4.0, 9)
    expected = naive(draws, centres, scale.double().numpy())
    assert log_mixture(draws, centres, scale).numpy() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lower_precision_of_matrix_products_is_not_used(precision: str) -> None:
    centres, draws = normal(50, 3).float(), normal(20, 3, seed=1)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = log_mixture(draws, centres, 0.1)
    finally:
        torch.set_float32_matmul_precision(before)
    assert found.numpy() == pytest.approx(naive(draws, centres, 0.1), rel=1e-12)


def test_autocast_is_not_used() -> None:
    centres, draws = normal(50, 3).float(), normal(20, 3, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = log_mixture(draws, centres, 0.1)
    assert torch.equal(inside, log_mixture(draws, centres, 0.1))


@pytest.mark.parametrize(
    ("draws", "centres"), [((3, 2), (5, 3)), ((3,), (5, 3)), ((3, 2), (0, 2)), ((3, 2), (5, 2, 1))]
)
def test_shapes_that_do_not_fit(draws: tuple[int, ...], centres: tuple[int, ...]) -> None:
    with pytest.raises(InvalidValueError, match=r"draws of shape \(N, k\)"):
        log_mixture(torch.zeros(draws), torch.zeros(centres), 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan])
def test_scales_that_are_none(scale: float) -> None:
    with pytest.raises(InvalidValueError, match="Expected scale > 0"):
        log_mixture(torch.zeros(3, 2), torch.zeros(5, 2), scale)


def quadrature(nodes: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """Gauss-Hermite nodes and weights for a standard normal."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    return torch.from_numpy(x), torch.from_numpy(w / w.sum())


@pytest.mark.parametrize("row", GOLDEN["binary_awgn"]["rows"], ids=lambda row: f"s={row['s']}")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-7), (torch.float32, 1e-6)])
def test_binary_awgn(row: dict[str, float], dtype: torch.dtype, tolerance: float) -> None:
    x, w = quadrature()
    centres = torch.tensor([[-1.0], [1.0]], dtype=dtype)
    index = torch.arange(2).repeat_interleave(len(x))
    found = information_density(centres, index, x.repeat(2)[:, None], row["s"])
    weights = w.repeat(2) / 2
    assert float(weights @ found.nats) == pytest.approx(nats(row["information_bits"]), abs=tolerance)
    assert float(weights @ (-found.nats).exp()) == pytest.approx(1.0, abs=1e-6)  # E e^{-iota} = 1


def test_one_centre_tells_nothing_and_far_centres_tell_everything() -> None:
    noise = normal(50, 3)
    alone = information_density(torch.ones(1, 3, dtype=torch.float64), torch.zeros(50, dtype=torch.long), noise, 2.0)
    assert alone.nats.numpy() == pytest.approx(np.zeros(50), abs=1e-12)
    apart = 1000.0 * torch.arange(8.0, dtype=torch.float64)[:, None].expand(8, 3)
    sure = information_density(apart, torch.arange(50) % 8, noise, 1.0)
    assert bool(((sure.nats - math.log(8)).abs() <= sure.error_nats).all())
    assert float(sure.error_nats.max()) < 1e-6


@pytest.mark.parametrize("k", [1, 3, 14, 28])
@pytest.mark.parametrize("dither", [0.05, 0.4, 6.4])
def test_the_error_bound_holds_and_is_useful(k: int, dither: float) -> None:
    centres = (normal(900, k) / math.sqrt(k)).float()
    index, noise, scale = torch.arange(400), normal(400, k, seed=1), math.sqrt(dither / k)
    single = information_density(centres, index, noise, scale)
    exact = information_density(centres.double(), index, noise, scale)
    assert bool(((single.nats - exact.nats).abs() <= single.error_nats).all())
    assert float(exact.error_nats.max()) < 1e-9
    if dither >= 0.4:
        assert float(single.error_nats.mean()) < 2e-3
    assert float(single.nats.max()) <= math.log(900) + float(single.error_nats.max())


def test_information_against_the_definition() -> None:
    centres, index, noise, scale = normal(40, 2), torch.arange(30), normal(30, 2, seed=1), 0.7
    draws = centres[index] + scale * noise
    log_noise = -0.5 * noise.square().sum(1).numpy()
    expected = log_noise - naive(draws, centres, scale)
    assert information_density(centres, index, noise, scale).nats.numpy() == pytest.approx(expected, abs=1e-12)


def test_the_tiles_are_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    product = torch.mm

    def watched(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.append(out.numel())
        return product(left, right, out=out)

    monkeypatch.setattr(mixture.torch, "mm", watched)
    log_mixture(normal(500, 2), normal(3000, 2, seed=1), 0.5, chunk=4000)
    assert max(sizes) <= 4000
    assert sum(sizes) == 2 * 500 * 3000  # one sweep for the maximum and one for the sum
