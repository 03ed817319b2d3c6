"""Bits and nats: the only place where ``ln 2`` appears.

Information is in bits at every public boundary and in nats inside.
"""

from __future__ import annotations

import math

__all__ = ["bits_to_nats", "nats_to_bits"]

_NATS_PER_BIT = math.log(2.0)


def nats_to_bits(nats: float) -> float:
    """Convert information from nats to bits."""
    return nats / _NATS_PER_BIT


def bits_to_nats(bits: float) -> float:
    """Convert information from bits to nats."""
    return bits * _NATS_PER_BIT
