"""One place that checks arguments: each check names the argument, its value and the admissible range."""

from __future__ import annotations

import math

from opacus_reconbound.errors import InvalidValueError

__all__ = ["finite", "fraction", "integer", "non_negative", "positive", "sample_rate"]


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        raise InvalidValueError(f"Expected {name} to be a number. Found {value!r}.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(f"Expected {name} to be a number. Found {value!r}.") from error
    if math.isnan(number):
        raise InvalidValueError(f"Expected {name} to be a number. Found NaN.")
    return number


def finite(name: str, value: object) -> float:
    """A finite number."""
    number = _number(name, value)
    if math.isinf(number):
        raise InvalidValueError(f"Expected {name} to be finite. Found {value!r}.")
    return number


def non_negative(name: str, value: object) -> float:
    """A number in [0, inf]."""
    number = _number(name, value)
    if number < 0:
        raise InvalidValueError(f"Expected {name} >= 0. Found {value!r}.")
    return number


def positive(name: str, value: object) -> float:
    """A number in (0, inf)."""
    number = finite(name, value)
    if number <= 0:
        raise InvalidValueError(f"Expected {name} > 0. Found {value!r}.")
    return number


def fraction(name: str, value: object) -> float:
    """A number in the open interval (0, 1), such as a confidence level."""
    number = _number(name, value)
    if not 0 < number < 1:
        raise InvalidValueError(f"Expected {name} in (0, 1). Found {value!r}.")
    return number


def sample_rate(value: object, name: str = "sample_rate") -> float:
    """An inclusion probability in [0, 1]."""
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise InvalidValueError(
            f"Expected {name} in [0, 1], the probability that one record enters a step. Found {value!r}. "
            "A batch size has to be divided by the number of records first."
        )
    return number


def integer(name: str, value: object, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A whole number of at least ``minimum`` and, where it is given, at most ``maximum``."""
    if isinstance(value, int) and not isinstance(value, bool):
        whole = value  # exact beyond 2**53 too
    else:
        number = finite(name, value)
        whole = int(number)
        if number != whole:
            raise InvalidValueError(f"Expected {name} to be a whole number >= {minimum}. Found {value!r}.")
    if whole < minimum:
        raise InvalidValueError(f"Expected {name} to be a whole number >= {minimum}. Found {value!r}.")
    if maximum is not None and whole > maximum:
        raise InvalidValueError(f"Expected {name} to be a whole number <= {maximum}. Found {value!r}.")
    return whole
