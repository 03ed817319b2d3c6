"""Finite-sample margins: one inequality, one function.

Every function is exact for any sample size; none is asymptotic. Levels are the probability that the inequality
fails. Nats or bits as each name says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from opacus_reconbound import _validate
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = [
    "binary_entropy_bits",
    "cantelli_bits",
    "empirical_bernstein",
    "mcdiarmid_bits",
    "monte_carlo_constant",
    "upper_tail",
]


def binary_entropy_bits(p: float) -> float:
    """H_b(p) = −p log2 p − (1−p) log2(1−p), in bits, accurate for small p."""
    if not 0.0 <= p <= 1.0:
        raise InvalidValueError(f"Expected a probability in [0, 1]. Found {p!r}.")
    if p in (0.0, 1.0):
        return 0.0
    return nats_to_bits(-p * math.log(p) - (1.0 - p) * math.log1p(-p))


def mcdiarmid_bits(n: int, level: float) -> float:
    """Sampling margin of the plug-in entropy, t_n = H_b(1/n) sqrt((n/2) ln(1/level)), in bits.

    Moving one of n records moves the entropy of their mixture by at most H_b(1/n) (paper, Corollary E.3), so
    McDiarmid's inequality gives the margin (paper, equation 35, level = α₂/|G|).

    Args:
        n: records in the estimation sample.
        level: probability of failure for this grid pair.
    """
    n = _validate.integer("n", n, minimum=2)
    level = _validate.fraction("level", level)
    return binary_entropy_bits(1.0 / n) * math.sqrt(0.5 * n * math.log(1.0 / level))


def monte_carlo_constant(block_size: int, dither: float, mean_square_norm: float) -> float:
    """c_MC of the entropy integrator (Goldfeld et al. 2020, Theorem 5; paper, Lemma E.4), in nats².

    c_MC = [9 k s² + 8 (2 + s √k) μ + 3 (11 s √k + 1) √μ] / s² with k s² = ν².

    Args:
        block_size: k.
        dither: ν², in the scale tr Σ = 1.
        mean_square_norm: μ, the mean squared norm of the mixture's centres in that scale.
    """
    k = _validate.integer("block_size", block_size, minimum=1)
    nu2 = _validate.positive("dither", dither)
    mu = _validate.non_negative("mean_square_norm", mean_square_norm)
    s2, nu = nu2 / k, math.sqrt(nu2)
    return (9.0 * nu2 + 8.0 * (2.0 + nu) * mu + 3.0 * (11.0 * nu + 1.0) * math.sqrt(mu)) / s2


def cantelli_bits(*, constant: float, blocks: int, n: int, draws: int, level: float) -> float:
    """Monte Carlo margin, t_MC = σ_MC sqrt((1−a)/a), σ_MC² = c̄_MC / (N_k n n_MC ln²2) (paper, equation 34), in bits.

    Args:
        constant: mean over the blocks of c_MC, in nats².
        blocks: N_k, the number of blocks.
        n: mixture centres.
        draws: n_MC, dither draws for each centre and block.
        level: a = α₁/|G|.
    """
    level = _validate.fraction("level", level)
    sigma_bits = nats_to_bits(math.sqrt(constant / (blocks * n * draws)))
    return sigma_bits * math.sqrt((1.0 - level) / level)


def empirical_bernstein(*, variance: float, value_range: float, n: int, level: float) -> float:
    """One-sided deviation of a mean of n i.i.d. bounded values (Maurer and Pontil 2009, Theorem 4).

    With probability at least 1 − level the mean of the law differs from the sample mean, on the chosen side, by at
    most sqrt(2 V ln(2/level)/n) + 7 R ln(2/level) / (3 (n − 1)).

    Args:
        variance: V, the unbiased (ddof = 1) sample variance.
        value_range: R, the length of an interval fixed in advance that holds every value.
        n: number of values, at least 2.
        level: probability of failure.

    Returns:
        The deviation, in the unit of the values.
    """
    n = _validate.integer("n", n, minimum=2)
    level = _validate.fraction("level", level)
    variance = _validate.non_negative("variance", variance)
    log_term = math.log(2.0 / level)
    return math.sqrt(2.0 * variance * log_term / n) + 7.0 * value_range * log_term / (3.0 * (n - 1))


def upper_tail(
    observed: float,
    *,
    clip: float,
    slack: float,
    n: int,
    level: float,
    rates: Sequence[float] = (0.004, 0.01, 0.03, 0.1),
) -> float:
    """Lemma 3 of the replica certificate: an upper bound on y = −E X' from the observed value ȳ.

    X' = max(X, −B) with E exp(X') ≤ 1 + slack. With r(l) = (e^{−lB} − 1 + lB) / (e^{−B} − 1 + B),

        y ≤ (ȳ + slack + ln(1/a)/(n l)) / (1 − r(l)/l),

    for each l of ``rates`` at level a = level / len(rates), hence for the least of them with probability ≥ 1 − level.
    The rates are fixed in advance.

    Args:
        observed: ȳ, at least −(sample mean of X').
        clip: B > 0.
        slack: how far E exp(X') may exceed 1: e^{−B} plus the arithmetic's allowance.
        n: records in the estimation sample.
        level: probability of failure, all rates together.
        rates: the values of l, in (0, 1).

    Returns:
        The bound on y, in units of X (nats of potential).
    """
    B = _validate.positive("clip", clip)
    n = _validate.integer("n", n, minimum=1)
    level = _validate.fraction("level", level)
    log_term = math.log(len(rates) / level)
    best = math.inf
    denominator = math.expm1(-B) + B
    for rate in rates:
        rate = _validate.fraction("rate", rate)
        ratio = (math.expm1(-rate * B) + rate * B) / denominator / rate
        if ratio >= 1.0:
            continue
        numerator = observed + slack + log_term / (n * rate)
        best = min(best, numerator / (1.0 - ratio))
    return best
