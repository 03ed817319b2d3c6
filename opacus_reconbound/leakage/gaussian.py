"""One step of DP-SGD: the information that a Poisson-subsampled Gaussian step carries about one record.

Theorem 4.1 of the paper charges a step with inclusion probability q and noise multiplier σ

    K(q, σ) = KL( (1−q) N(0, σ²) + q N(1, σ²)  ||  N(0, σ²) )   nats,

mixture first (the other direction is not a bound). With u(t) = q expm1(t/σ − 1/(2σ²)) and t ~ N(0, 1)

    K = E[ f(u) ],   f(u) = (1 + u) log1p(u) − u >= 0.

How it is computed. f(u(t)) φ(t) is analytic in the strip |Im t| < πσ (the branch points of the logarithm) and decays
like a Gaussian, so the trapezoidal rule on the line converges like exp(−2π·πσ/h), and like exp(−2π²/h²) where the
Gaussian is what limits it. The spacing h is chosen so that already the rule with spacing 2h is accurate to about
1e-12; the difference between the two is the error estimate, and is added. Two tilted forms keep every term free of
overflow and cancellation:

    small ℓ:  φ(t) f(u)
    large ℓ:  [(1−q) φ(t) + q φ(t − 1/σ)] L − q φ(t − 1/σ) + q φ(t),   L = log((1−q) + q e^ℓ),  ℓ = t/σ − 1/(2σ²)

using φ(t) e^ℓ = φ(t − 1/σ). Where the two Gaussians no longer overlap, K = q/(2σ²) + q log q + (1−q) log(1−q).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = [
    "realised_sample_rate",
    "realised_sample_rates",
    "step_ceiling",
    "step_charge",
    "step_charges",
    "step_kl_nats",
    "step_leakage",
]

Floats = NDArray[np.float64]

_SAMPLER_GRID = 2.0**24
# Rounding in the terms, the exponentials' arguments and the sum: measured below 2e-14, charged five times over.
_ROUNDING = 1e-13
_REACH = 9.5  # standard deviations covered beyond each mass; the rest is below 1e-19 of it
_SEPARATION = 10.5  # standard deviations between the kink of the logarithm and either mass
_CHUNK_ELEMENTS = 1 << 15  # of float64: what fits into the cache of one core
_BATCH = 32  # from here on one vectorised evaluation is cheaper than cached single ones
_CELLS = 16  # of the grid of ``step_ceiling``, between two powers of two
_SUBNORMAL = 1e-320  # bits; some thousand roundings of numbers below 2e-308
_NOISE = 1e-9  # relative; the quadrature's error estimates, which a charge includes, are a hundredth of it at most


def realised_sample_rate(sample_rate: float) -> float:
    """Return ceil(q 2²⁴)/2²⁴, an upper bound on the inclusion probability of Opacus's float32 sampler.

    ``torch.rand(float32) < q`` draws from a grid of 2⁻²⁴, so a record enters with probability ceil(q 2²⁴)/2²⁴ >= q.
    """
    return float(realised_sample_rates(np.float64(sample_rate)))


def realised_sample_rates(sample_rates: ArrayLike) -> Floats:
    """The same for an array of rates."""
    return np.asarray(np.minimum(1.0, np.ceil(np.asarray(sample_rates) * _SAMPLER_GRID) / _SAMPLER_GRID))


def _validated(sample_rate: ArrayLike, noise_multiplier: ArrayLike) -> tuple[Floats, Floats]:
    try:
        q = np.asarray(sample_rate, dtype=np.float64)
        sigma = np.asarray(noise_multiplier, dtype=np.float64)
        q, sigma = np.broadcast_arrays(q, sigma)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"sample_rate and noise_multiplier must be numbers or arrays of one shape: {error}."
        ) from error
    bad = ~((q >= 0) & (q <= 1))
    if bad.any():
        raise InvalidValueError(
            "Expected sample_rate in [0, 1], the probability that one record enters a step. "
            f"Found {float(q[bad].flat[0])!r}. A batch size has to be divided by the number of records first."
        )
    bad = ~(sigma >= 0)
    if bad.any():
        raise InvalidValueError(f"Expected noise_multiplier >= 0 (inf allowed). Found {float(sigma[bad].flat[0])!r}.")
    return q, sigma


def _excess(u: Floats) -> Floats:
    """f(u) = (1 + u) log1p(u) − u without cancellation: its Taylor series for |u| < 0.02."""
    small = np.abs(u) < 0.02
    v = np.where(small, u, 0.0)
    # sum_{k>=2} (-1)^k v^k / (k (k-1)); the first omitted term is below 2e-17 of the first
    series = np.zeros_like(v)
    for k in range(12, 1, -1):
        series = (1.0 if k % 2 == 0 else -1.0) / (k * (k - 1)) + v * series
    series *= v * v
    w = np.where(small, 1.0, u)
    with np.errstate(divide="ignore", invalid="ignore"):
        direct = (1.0 + w) * np.log1p(w) - w
    direct = np.where(w <= -1.0, 1.0, direct)
    return np.where(small, series, direct)


def _density(x: Floats) -> Floats:
    return np.exp(-0.5 * x * x) * (1.0 / math.sqrt(2.0 * math.pi))


def _integrand(t: Floats, q: Floats, sigma: Floats) -> Floats:
    """φ(t) f(u(t)) without overflow, of the nodes t (two-dimensional) of each row's q and σ (columns)."""
    log_ratio = (t - 0.5 / sigma) / sigma
    base = _density(t)
    # at l >= 1 and tiny q the terms of the second form nearly cancel: u is small there, so the first one serves
    u = q * np.expm1(np.minimum(log_ratio, 700.0))
    small = (log_ratio < 1.0) | (u < 1.0)
    result = base * _excess(np.where(small, u, 0.0))
    row, column = np.nonzero(~small)
    q, t, sigma, far = q[row, 0], t[row, column], sigma[row, 0], log_ratio[row, column]
    base, shifted = base[row, column], _density(t - 1.0 / sigma)
    # L = log((1-q) + q e^l) = l + log(q + (1-q) e^-l) for l >= 1
    lift = far + np.log(q + (1.0 - q) * np.exp(-far))
    result[row, column] = ((1.0 - q) * base + q * shifted) * lift - q * shifted + q * base
    return result


def _kink(q: Floats, sigma: Floats) -> Floats:
    """t* at which both components of the mixture are equally likely; there log1p(u) turns from flat to linear."""
    return np.asarray(sigma * (np.log1p(-q) - np.log(q)) + 0.5 / sigma)


def _separated(q: Floats, sigma: Floats) -> Floats:
    """K when the kink is far from both masses: q/(2σ²) − (entropy of the gate in nats), to 1e-20 relative."""
    with np.errstate(over="ignore"):
        energy = 0.5 / sigma / sigma
    return q * (energy + np.log(q)) + (1.0 - q) * np.log1p(-q)


def _envelope(q: Floats, sigma: Floats) -> Floats:
    """Two proven upper bounds on K: q/(2σ²) (convexity) and log1p(q² expm1(1/σ²)) (Rényi order 2), the smaller."""
    with np.errstate(over="ignore", under="ignore"):
        convex = 0.5 * q / sigma / sigma
        growth = 1.0 / sigma / sigma
        # q² alone could underflow where q² expm1(1/σ²) does not
        order_two = np.log1p(np.square(q * np.sqrt(np.expm1(np.minimum(growth, 700.0)))))
        order_two = np.where(growth < 700.0, order_two, np.inf)
    return np.minimum(convex, order_two) * (1.0 + 2e-15) + 5e-324


def _trapezoid(q: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    """K and its error estimate for one-dimensional q in (0, 1) and σ of moderate size."""
    shift = 1.0 / sigma
    upper = np.maximum(shift, np.minimum(2.0 * shift, _kink(q, sigma))) + _REACH
    lower = np.full_like(upper, -_REACH)
    spacing = np.minimum(0.33, 0.3 * sigma)
    needed = (upper - lower) / spacing
    # The node count is a function of the pair alone, so that a pair gives the same bits alone and in an array:
    # the next even number on a ladder of ratio 1.1, which also makes large groups that share one array.
    rung = np.ceil(np.log(np.maximum(needed, 32.0) / 32.0) / math.log(1.1) - 1e-9)
    count = 2 * np.ceil(16.0 * 1.1**rung).astype(np.int64)
    value = np.empty_like(q)
    error = np.empty_like(q)
    order = np.argsort(count, kind="stable")
    start = 0
    while start < len(order):
        nodes = int(count[order[start]])
        stop = int(np.searchsorted(count[order], nodes, side="right"))
        stop = min(stop, start + max(1, _CHUNK_ELEMENTS // nodes))
        rows = order[start:stop]
        start = stop
        t = lower[rows, None] + spacing[rows, None] * np.arange(nodes + 1)
        with np.errstate(under="ignore"):
            terms = _integrand(t, q[rows, None], sigma[rows, None])
        fine = terms.sum(axis=1) * spacing[rows]
        coarse = terms[:, ::2].sum(axis=1) * (2.0 * spacing[rows])
        value[rows] = fine
        error[rows] = np.abs(fine - coarse)
    return value, error


def _step_kl_flat(q: Floats, sigma: Floats) -> tuple[Floats, Floats]:
    value = np.zeros_like(q)
    error = np.zeros_like(q)
    active = (q > 0) & (sigma < np.inf)
    silent = active & (sigma == 0)
    value[silent] = np.inf
    whole = active & (sigma > 0) & (q == 1)
    with np.errstate(over="ignore", under="ignore"):
        value[whole] = 0.5 / sigma[whole] / sigma[whole]
    rest = np.flatnonzero(active & (sigma > 0) & (q < 1))
    if rest.size:
        r, s = q[rest], sigma[rest]
        with np.errstate(over="ignore", invalid="ignore"):
            kink, shift = _kink(r, s), 1.0 / s
            apart = np.isinf(shift) | ((kink > _SEPARATION) & (shift - kink > _SEPARATION))
        far, near = rest[apart], rest[~apart]
        if far.size:
            with np.errstate(over="ignore"):
                value[far] = _separated(q[far], sigma[far])
        if near.size:
            # past 1e8 only the leading term of the Taylor series, E[u²]/2 = q²/(2σ²), remains in double precision
            wide = near[sigma[near] > 1e8]
            with np.errstate(under="ignore"):
                value[wide] = 0.5 * np.square(q[wide] / sigma[wide])
            near = near[sigma[near] <= 1e8]
            if near.size:
                value[near], error[near] = _trapezoid(q[near], sigma[near])
    return value, error


def step_kl_nats(sample_rate: ArrayLike, noise_multiplier: ArrayLike) -> tuple[Floats, Floats]:
    """K(q, σ) in nats and an estimate of its error, not yet rounded up (paper, Theorem 4.1).

    Args:
        sample_rate: q in [0, 1], scalar or array.
        noise_multiplier: σ in [0, inf], scalar or array; the two are broadcast.

    Returns:
        ``(value, error)``, float64 arrays of the broadcast shape. σ = 0 with q > 0 gives inf.

    Raises:
        InvalidValueError: q outside [0, 1], σ negative, or NaN.
    """
    q, sigma = _validated(sample_rate, noise_multiplier)
    value, error = _step_kl_flat(q.ravel(), sigma.ravel())
    return value.reshape(q.shape), error.reshape(q.shape)


@overload
def step_leakage(sample_rate: float, noise_multiplier: float) -> float: ...
@overload
def step_leakage(sample_rate: ArrayLike, noise_multiplier: ArrayLike) -> float | Floats: ...
def step_leakage(sample_rate: ArrayLike, noise_multiplier: ArrayLike) -> float | Floats:
    """Upper bound on the information one step reveals about one record, in bits (paper, Theorem 4.1).

    The value is K(q, σ)/ln 2 rounded up by its own error estimate, and never above the envelopes q/(2σ²) and
    log1p(q² expm1(1/σ²)). It grows with q and falls with σ; steps and runs add up.

    Args:
        sample_rate: q in [0, 1], the probability that a record enters the step; scalar or array.
        noise_multiplier: σ in [0, inf], noise standard deviation over the clipping norm; scalar or array.

    Returns:
        Bits: a float for scalars, else a float64 array of the broadcast shape.

    Raises:
        InvalidValueError: q outside [0, 1], σ negative, or NaN.

    Example:
        >>> round(step_leakage(0.01, 1.0) * 1e4, 6)
        1.209155
        >>> step_leakage(0.01, 0.0)
        inf
    """
    q, sigma = _validated(sample_rate, noise_multiplier)
    flat_q, flat_sigma = q.ravel(), sigma.ravel()
    if flat_q.size > 1:
        pairs = np.empty(flat_q.size, dtype=np.complex128)  # numpy sorts these ten times as fast as rows
        pairs.real, pairs.imag = flat_q, flat_sigma
        pairs, inverse = np.unique(pairs, return_inverse=True)
        bits = _rounded_up_bits(pairs.real, pairs.imag)[inverse]
    else:
        bits = _rounded_up_bits(flat_q, flat_sigma)
    if q.ndim == 0:
        return float(bits[0])
    return bits.reshape(q.shape)


def _rounded_up_bits(q: Floats, sigma: Floats) -> Floats:
    value, error = _step_kl_flat(q, sigma)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        upper = value + error + _ROUNDING * value
        live = (q > 0) & (sigma > 0) & (sigma < np.inf)
        upper[live] = np.minimum(upper[live], _envelope(q[live], sigma[live]))
        # never zero where something is revealed: a subnormal result is rounded up to the next number
        return np.where(upper > 0, np.nextafter(nats_to_bits(1.0) * upper, np.inf), np.where(live, 5e-324, 0.0))


@lru_cache(maxsize=1 << 17)
def step_charge(sample_rate: float, noise_multiplier: float) -> tuple[float, float]:
    """Bits of one step at the recorded rate, and at the rate that Opacus's sampler realises; cached.

    Args:
        sample_rate: q in [0, 1].
        noise_multiplier: σ in [0, inf].

    Returns:
        ``(K(q, σ), K(ceil(q 2²⁴)/2²⁴, σ))`` in bits. The second is what bounds and budgets use.
    """
    q, sigma = _validated(sample_rate, noise_multiplier)
    rates = np.array([q, realised_sample_rates(q)])
    recorded, charged = _rounded_up_bits(rates, np.full(2, sigma)).tolist()
    return recorded, max(recorded, charged)


def step_ceiling(sample_rate: float, noise_multiplier: float) -> float:
    """An upper bound on the charge of one step, which costs a microsecond where ``step_charge`` costs hundreds.

    The charge grows with q and falls with σ, so that it is at most the charge at the next larger q and the next
    smaller σ of a grid with 16 cells an octave, which is kept: for q and σ of practice about a tenth more.

    Args:
        sample_rate: q in [0, 1].
        noise_multiplier: σ in [0, inf].

    Returns:
        Bits, not below ``step_charge(sample_rate, noise_multiplier)[1]``.
    """
    if sample_rate == 0.0 or noise_multiplier == math.inf:
        return 0.0
    mantissa, exponent = math.frexp(sample_rate)
    q = math.ldexp(math.ceil(2 * _CELLS * mantissa) / (2 * _CELLS), exponent)
    mantissa, exponent = math.frexp(noise_multiplier)
    sigma = math.ldexp(math.floor(2 * _CELLS * mantissa) / (2 * _CELLS), exponent)
    return step_charge(min(1.0, q), sigma)[1] * (1.0 + _NOISE) + _SUBNORMAL


def step_charges(sample_rates: Sequence[float], noise_multipliers: Sequence[float]) -> Iterable[tuple[float, float]]:
    """``step_charge`` of many steps: the same numbers, in one vectorised evaluation where that is cheaper.

    Args:
        sample_rates: q in [0, 1].
        noise_multipliers: σ in [0, inf], as many.
    """
    if len(sample_rates) < _BATCH:
        return [step_charge(q, sigma) for q, sigma in zip(sample_rates, noise_multipliers, strict=True)]
    rates, sigmas = np.asarray(sample_rates, dtype=np.float64), np.asarray(noise_multipliers, dtype=np.float64)
    recorded = np.asarray(step_leakage(rates, sigmas))
    charged = np.maximum(recorded, step_leakage(realised_sample_rates(rates), sigmas))
    return zip(recorded.tolist(), charged.tolist(), strict=True)
