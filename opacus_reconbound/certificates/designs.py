"""Converses: pure functions from leakage to the squared distortion that no attack can beat.

A design is one certified inequality. Distortions are in units of the certificate's reference scale
(``certificate.trace.scale``), so a distortion of 1 is the error of the best guess without the model. Every design
of a certificate holds at once, so the bound is the largest of them at each leakage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from opacus_reconbound import _validate
from opacus_reconbound.units import bits_to_nats, nats_to_bits

__all__ = ["BlockDesign", "Design", "ReplicaDesign"]

_MOST = 2**20  # coordinates in a block, or replicas


@dataclass(frozen=True, kw_only=True)
class BlockDesign:
    """The paper's blockwise Shannon lower bound (Corollary 3.7, equations 7 and 14).

    Attributes:
        block_size: k, the number of rotated coordinates in a block.
        dither: ν², the dither variance of a whole block in units of tr Σ.
        entropy_bits: h_LB, a lower bound on the block average of h(Π_b z + N(0, (ν²/k) I_k)) in bits, in the scale
            tr Σ = 1 per block.
    """

    block_size: int
    dither: float
    entropy_bits: float
    kind: Literal["block"] = "block"

    def __post_init__(self) -> None:
        _validate.integer("block_size", self.block_size, minimum=1, maximum=_MOST)
        _validate.positive("dither", self.dither)
        _validate.finite("entropy_bits", self.entropy_bits)

    def distortion(self, leakage_bits: float) -> float:
        """Return [k/(2πe) · 2^{2(h − γ)/k} − ν²]₊, ρ*² before the square root, in units of tr Σ.

        Args:
            leakage_bits: γ in bits, in [0, inf].
        """
        if math.isinf(leakage_bits):
            return 0.0
        exponent = 2.0 * (self.entropy_bits - leakage_bits) / self.block_size
        if exponent > 1000.0:  # only a corrupt entropy: a unit-trace block cannot have one
            return math.inf
        power = self.block_size / (2.0 * math.pi * math.e) * math.pow(2.0, exponent)
        return max(0.0, power - self.dither)

    def leakage_bits(self, distortion: float) -> float:
        """Return the leakage at which the bound falls to ``distortion`` > 0, in bits (may be negative)."""
        target = 2.0 * math.pi * math.e * (distortion + self.dither) / self.block_size
        return self.entropy_bits - 0.5 * self.block_size * math.log2(target)


@dataclass(frozen=True, kw_only=True)
class ReplicaDesign:
    """A replica converse: linear in the leakage, D ≥ intercept − (m − 1) ε γ with γ in nats.

    Attributes:
        temperature: ε in units of the reference scale.
        replicas: m, the number of conditionally independent posterior draws.
        intercept: the certified constant, in units of the reference scale.
    """

    temperature: float
    intercept: float
    replicas: int = 2
    kind: Literal["replica"] = "replica"

    def __post_init__(self) -> None:
        _validate.positive("temperature", self.temperature)
        _validate.finite("intercept", self.intercept)
        _validate.integer("replicas", self.replicas, minimum=2, maximum=_MOST)

    @property
    def slope(self) -> float:
        """The loss of distortion per nat of leakage, (m − 1) ε."""
        return (self.replicas - 1) * self.temperature

    def distortion(self, leakage_bits: float) -> float:
        """Return [intercept − (m − 1) ε γ]₊ in units of the reference scale.

        Args:
            leakage_bits: γ in bits, in [0, inf].
        """
        return max(0.0, self.intercept - self.slope * bits_to_nats(leakage_bits))

    def leakage_bits(self, distortion: float) -> float:
        """Return the leakage at which the bound falls to ``distortion`` > 0, in bits (may be negative)."""
        return nats_to_bits((self.intercept - distortion) / self.slope)


Design = BlockDesign | ReplicaDesign
