"""Exact summation: the leakage of a history is one correctly rounded sum, whatever the order and the grouping.

A resumed run, a merged history and a history read in one go then agree to the last bit.
"""

from __future__ import annotations

import math

__all__ = ["ExactSum"]

_SHIFT = 1074  # every finite double is a whole multiple of 2**-1074
_ONE = 1 << _SHIFT


class ExactSum:
    """The exact sum of count · value over non-negative doubles, rounded once, on reading.

    ``math.fsum`` gives the same number for a list; this one can be added to, in constant time.
    """

    __slots__ = ("_infinite", "_units")

    def __init__(self) -> None:
        self._units = 0
        self._infinite = False

    def add(self, value: float, count: int = 1) -> None:
        """Add ``count`` times ``value``, a double in [0, inf]."""
        if count == 0:
            return
        if value == math.inf:
            self._infinite = True
            return
        numerator, denominator = value.as_integer_ratio()
        self._units += (numerator * count) << (_SHIFT - denominator.bit_length() + 1)

    @property
    def value(self) -> float:
        """The correctly rounded sum; inf where a summand is, or where it exceeds the largest double."""
        if self._infinite:
            return math.inf
        try:
            return self._units / _ONE
        except OverflowError:
            return math.inf

    def after(self, value: float, count: int = 1) -> float:
        """The sum that adding ``count`` times ``value`` would give; changes nothing."""
        result = self.copy()
        result.add(value, count)
        return result.value

    def include(self, other: ExactSum) -> None:
        """Add another sum, exactly."""
        self._units += other._units
        self._infinite = self._infinite or other._infinite

    def copy(self) -> ExactSum:
        """An independent copy."""
        result = ExactSum()
        result._units, result._infinite = self._units, self._infinite
        return result
