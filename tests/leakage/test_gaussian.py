"""K(q, σ): published values, an independent 40-digit quadrature, identities, limits, errors."""

from __future__ import annotations

import math
import time

import mpmath
import numpy as np
import pytest
from helpers import GOLDEN, nats
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.leakage import realised_sample_rate, step_charge, step_leakage
from opacus_reconbound.leakage.gaussian import step_kl_nats

rates = st.one_of(
    st.floats(0, 1), st.floats(-10, 0).map(lambda e: 10.0**e), st.floats(-14, -1).map(lambda e: 1.0 - 10.0**e)
)
noises = st.one_of(st.floats(0.02, 20), st.floats(-1.7, 8).map(lambda e: 10.0**e))


def reference_nats(q: float, sigma: float) -> mpmath.mpf:
    """The same expectation by a fine trapezoidal sum in 40-digit arithmetic, written from the definition."""
    with mpmath.workdps(40):
        q, sigma = mpmath.mpf(q), mpmath.mpf(sigma)
        if q == 1:
            return 1 / (2 * sigma**2)
        kink = sigma * (mpmath.log1p(-q) - mpmath.log(q)) + 1 / (2 * sigma)
        low, high = mpmath.mpf(-12), max(1 / sigma, min(2 / sigma, kink)) + 12
        step = min(mpmath.mpf(1) / 6, sigma / 5)
        total = mpmath.mpf(0)
        for i in range(int((high - low) / step) + 1):
            t = low + i * step
            u = q * mpmath.expm1(t / sigma - 1 / (2 * sigma**2))
            if abs(u) < mpmath.mpf("1e-9"):
                value = u**2 / 2 - u**3 / 6 + u**4 / 12
            else:
                value = (1 + u) * mpmath.log1p(u) - u
            total += value * mpmath.exp(-t * t / 2)
        return total * step / mpmath.sqrt(2 * mpmath.pi)


@pytest.mark.parametrize(("q", "sigma", "expected"), GOLDEN["step_kl_forward_nats"]["rows"])
def test_forty_digit_values(q: float, sigma: float, expected: float) -> None:
    assert nats(step_leakage(q, sigma)) == pytest.approx(expected, rel=1e-10)
    assert nats(step_leakage(q, sigma)) >= expected * (1 - 2e-16)


@pytest.mark.parametrize("sigma", [0.05, 0.09, 0.2, 0.6, 1.1, 4.0, 1e3, 1e8])
@pytest.mark.parametrize("q", [1e-10, 1e-5, 1e-2, 0.3, 0.9, 1 - 1e-9, 1.0])
def test_against_an_independent_quadrature(q: float, sigma: float) -> None:
    expected = reference_nats(q, sigma)
    value, error = step_kl_nats(q, sigma)
    assert abs(float((mpmath.mpf(float(value)) - expected) / expected)) < 2e-14
    assert float(error) <= 1e-10 * float(value)
    assert mpmath.mpf(step_leakage(q, sigma)) * mpmath.log(2) >= expected


@pytest.mark.parametrize(("q", "sigma"), [(1e-300, 0.03), (1e-300, 0.025), (1e-200, 0.04), (1e-100, 0.06)])
def test_rates_far_below_any_practice(q: float, sigma: float) -> None:
    expected = reference_nats(q, sigma)
    assert mpmath.mpf(step_leakage(q, sigma)) * mpmath.log(2) >= expected
    assert abs(float(mpmath.mpf(step_leakage(q, sigma)) * mpmath.log(2) / expected - 1)) < 1e-10


def test_the_other_direction_is_not_what_is_computed() -> None:
    """KL(Gaussian || mixture) is smaller here: a swap of the arguments would under-report."""
    q, sigma = 0.5, 0.3
    with mpmath.workdps(30):
        reverse = mpmath.quad(
            lambda t: -mpmath.log1p(q * mpmath.expm1(t / sigma - 1 / (2 * sigma**2))) * mpmath.npdf(t),
            [-12, -6, -2, 0, 2, 6, 12],
        )
    assert nats(step_leakage(q, sigma)) > 2 * float(reverse)


@given(q=rates, sigma=noises)
def test_envelopes(q: float, sigma: float) -> None:
    value = nats(step_leakage(q, sigma))
    assert 0 <= value <= q / (2 * sigma**2) * (1 + 1e-12) + 1e-320
    if sigma > 0.05:
        assert value <= math.log1p(q * q * math.expm1(1 / sigma**2)) * (1 + 1e-12) + 1e-320


@given(q=rates, sigma=noises, factor=st.floats(1.0, 3.0))
def test_grows_with_the_rate_and_falls_with_the_noise(q: float, sigma: float, factor: float) -> None:
    value = step_leakage(q, sigma)
    assert step_leakage(min(1.0, q * factor), sigma) >= value * (1 - 1e-11)
    assert step_leakage(q, sigma * factor) <= value * (1 + 1e-11)


@given(q=st.lists(rates, min_size=1, max_size=6), sigma=noises)
def test_an_array_gives_the_very_bits_of_its_scalars(q: list[float], sigma: float) -> None:
    array = step_leakage(np.array(q), sigma)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [step_leakage(x, sigma) for x in q]


def test_full_batch_is_exact() -> None:
    sigma = np.array([0.1, 0.5, 1.0, 3.0, 1e6])
    np.testing.assert_allclose(np.asarray(step_leakage(1.0, sigma)) * math.log(2), 0.5 / sigma**2, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("q", "sigma", "expected"),
    [
        (0.0, 0.0, 0.0),
        (0.0, 1.0, 0.0),
        (0.5, math.inf, 0.0),
        (0.5, 0.0, math.inf),
        (1e-300, 0.0, math.inf),
        (1.0, 1e-200, math.inf),
        (0.5, 1e-300, math.inf),
    ],
)
def test_limits(q: float, sigma: float, expected: float) -> None:
    assert step_leakage(q, sigma) == expected


@pytest.mark.parametrize("sigma", [5e-324, 1e-310, 5.562684646268e-309, 1e-308])
@pytest.mark.parametrize("q", [0.01, 1e-30, 1.0 - 2.0**-53, 1.0])
def test_noise_so_small_that_its_inverse_overflows(q: float, sigma: float) -> None:
    assert step_leakage(q, sigma) == math.inf


@pytest.mark.parametrize(("q", "sigma"), [(1e-10, 1e300), (5e-324, 1.0), (1e-200, 5.0)])
def test_what_leaks_is_never_reported_as_zero(q: float, sigma: float) -> None:
    assert 0 < step_leakage(q, sigma) < 1e-300


def test_small_noise_separates_the_components() -> None:
    """σ -> 0: the observer sees the gate and, where open, the whole record: q/(2σ²) minus the gate's entropy."""
    q, sigma = 0.2, 0.001
    gate = -q * math.log(q) - (1 - q) * math.log(1 - q)
    assert nats(step_leakage(q, sigma)) == pytest.approx(q / (2 * sigma**2) - gate, rel=1e-12)


@pytest.mark.parametrize("q", [-0.1, 1.2, math.nan, math.inf])
def test_bad_rates(q: float) -> None:
    with pytest.raises(InvalidValueError, match=r"sample_rate in \[0, 1\]"):
        step_leakage(q, 1.0)


@pytest.mark.parametrize("sigma", [-1.0, math.nan, -math.inf])
def test_bad_noise(sigma: float) -> None:
    with pytest.raises(InvalidValueError, match="noise_multiplier >= 0"):
        step_leakage(0.1, sigma)


def test_bad_types_and_shapes() -> None:
    with pytest.raises(InvalidValueError, match="numbers or arrays"):
        step_leakage("a lot", 1.0)  # type: ignore[call-overload]
    with pytest.raises(InvalidValueError, match="one shape"):
        step_leakage(np.full(3, 0.1), np.ones(4))


@given(q=st.floats(0, 1))
def test_the_sampler_grid(q: float) -> None:
    realised = realised_sample_rate(q)
    assert q <= realised <= min(1.0, q + 2.0**-24)
    assert realised * 2**24 == int(realised * 2**24)


@pytest.mark.parametrize("q", [1e-7, 1e-6, 1e-5, 0.1, 1 / 3])
def test_the_sampler_grid_is_what_torch_does(q: float) -> None:
    """Every float32 that torch.rand can return below q lies on k 2⁻²⁴, and there are q' 2²⁴ of them."""
    torch = pytest.importorskip("torch")
    below = int(math.ceil(q * 2**24))
    grid = torch.arange(max(0, below - 3), below + 3, dtype=torch.float64).mul(2.0**-24).to(torch.float32)
    admitted = int((grid < q).sum()) + max(0, below - 3)
    assert admitted / 2**24 == realised_sample_rate(q)


def test_charge_is_cached_and_ordered() -> None:
    recorded, charged = step_charge(1e-6, 1.0)
    assert charged > recorded
    assert step_charge(0.25, 1.0)[0] == step_charge(0.25, 1.0)[1]


def test_a_hundred_thousand_pairs_take_seconds() -> None:
    generator = np.random.default_rng(0)
    q, sigma = generator.uniform(0, 1, 100_000), generator.uniform(0.05, 5, 100_000)
    start = time.perf_counter()
    step_leakage(q, sigma)
    assert time.perf_counter() - start < 10
