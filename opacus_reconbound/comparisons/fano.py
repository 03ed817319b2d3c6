"""Fano's inequality: how probable exact recovery of a record from finitely many candidates is.

Guo et al. 2023 bound exact recovery by a generalised Fano inequality from a Rényi
mutual information; here it is the classical one (Cover and Thomas 2006, theorem 2.10.1), from γ. For a record x with M
possible values and Shannon entropy H (bits), and a trajectory with I(x; trajectory) <= γ, every attack succeeds with a
probability s that satisfies

    H − γ <= h(s) + (1 − s) log2(M − 1),        h the binary entropy.

The right side falls in s from log2 M at s = 1/M to 0 at s = 1, so the largest such s is the bound.
"""

from __future__ import annotations

import math

from opacus_reconbound import _validate
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = ["exact_recovery"]

_SLACK = 1e-12  # bits


def exact_recovery(leakage_bits: float, candidates: int, entropy_bits: float | None = None) -> float:
    """An upper bound on the probability that any attack names the record exactly.

    It assumes that the record has at most so many possible values and at least that entropy.

    Args:
        leakage_bits: γ in [0, inf], such as ``schedule.charged_bits``.
        candidates: M >= 2, how many values the record can take.
        entropy_bits: H in [0, log2 M]; log2 M, all values equally likely, unless given.

    Returns:
        A probability, rounded up.
    """
    gamma = _validate.non_negative("leakage_bits", leakage_bits)
    count = _validate.integer("candidates", candidates, minimum=2, maximum=2**1000)
    most = math.log2(count)
    entropy = most if entropy_bits is None else _validate.non_negative("entropy_bits", entropy_bits)
    if entropy > most * (1.0 + 1e-12):
        raise InvalidValueError(
            f"Expected entropy_bits <= log2(candidates) = {most:g}. Found {entropy_bits!r}: that needs more of them."
        )
    needed = entropy - gamma - _SLACK
    if needed <= 0.0:
        return 1.0
    others = math.log2(count - 1)

    def uncertainty(s: float) -> float:
        h = nats_to_bits(-s * math.log(s) - (1.0 - s) * math.log1p(-s)) if s < 1.0 else 0.0
        return h + (1.0 - s) * others

    low, high = math.log(1.0 / count), 0.0  # of ln s
    for _ in range(200):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if uncertainty(math.exp(middle)) >= needed:
            low = middle
        else:
            high = middle
    return min(1.0, math.exp(high) * (1.0 + 1e-12))
