"""Numbers as they are shown: always rounded to the safe side."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["down3", "float32_above", "float32_below", "three_digits", "up3"]


def up3(value: float) -> str:
    """Three decimals, not below the value; four digits where it is huge."""
    return f"{value * 1.001:.4g}" if value > 1e12 else f"{math.ceil(value * 1e3) / 1e3:.3f}"


def down3(value: float) -> str:
    """Three decimals, not above the value."""
    return f"{math.floor(value * 1e3) / 1e3:.3f}"


def three_digits(value: float, *, down: bool) -> float:
    """Three significant digits, on the safe side; a progress bar would round to the nearest."""
    if value == 0.0 or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
    return (math.floor(value / unit) if down else math.ceil(value / unit)) * unit


def float32_below(value: float) -> float:
    """The largest float32 not above a number: loggers keep float32, and a logged bound must not round up."""
    nearest = np.float32(value)
    return float(np.nextafter(nearest, np.float32(-np.inf)) if float(nearest) > value else nearest)


def float32_above(value: float) -> float:
    """The smallest float32 not below a number."""
    return -float32_below(-value)
