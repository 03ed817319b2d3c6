"""One place that checks arguments: each check names the argument, its value and the admissible range."""

from __future__ import annotations

import math
import reprlib

from opacus_reconbound.errors import InvalidValueError

__all__ = ["MOST_STEPS", "finite", "fraction", "integer", "non_negative", "positive", "sample_rate", "shown", "steps"]


MOST_STEPS = 2**53  # of one kind; sums of their leakage are exact up to here
_LETTERS = 200
_BRIEF = reprlib.Repr()  # few levels and items: a few lines of YAML can stand for billions of them
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxlong, _BRIEF.maxother = 3, _LETTERS, _LETTERS, _LETTERS


def shown(value: object) -> str:
    """``repr`` for a message: one line of a few hundred letters, also of what Python refuses to write out."""
    try:
        brief = isinstance(value, (list, tuple, dict, set, frozenset))
        text = " ".join((_BRIEF.repr(value) if brief else repr(value)).split())
    except Exception:  # a whole number of thousands of digits, or a faulty class
        return f"a value of type {type(value).__name__} that cannot be written out"
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]}…"


def _number(name: str, value: object) -> float:
    if isinstance(value, bool):
        raise InvalidValueError(f"Expected {name} to be a number. Found {shown(value)}.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(f"Expected {name} to be a number. Found {shown(value)}.") from error
    if math.isnan(number):
        raise InvalidValueError(f"Expected {name} to be a number. Found NaN.")
    return number


def finite(name: str, value: object) -> float:
    """A finite number."""
    number = _number(name, value)
    if math.isinf(number):
        raise InvalidValueError(f"Expected {name} to be finite. Found {shown(value)}.")
    return number


def non_negative(name: str, value: object) -> float:
    """A number in [0, inf]."""
    number = _number(name, value)
    if number < 0:
        raise InvalidValueError(f"Expected {name} >= 0. Found {shown(value)}.")
    return number


def positive(name: str, value: object) -> float:
    """A number in (0, inf)."""
    number = finite(name, value)
    if number <= 0:
        raise InvalidValueError(f"Expected {name} > 0. Found {shown(value)}.")
    return number


def fraction(name: str, value: object) -> float:
    """A number in the open interval (0, 1), such as a confidence level."""
    number = _number(name, value)
    if not 0 < number < 1:
        raise InvalidValueError(f"Expected {name} in (0, 1). Found {shown(value)}.")
    return number


def sample_rate(value: object, name: str = "sample_rate") -> float:
    """An inclusion probability in [0, 1]."""
    number = _number(name, value)
    if not 0 <= number <= 1:
        raise InvalidValueError(
            f"Expected {name} in [0, 1], the probability that one record enters a step. Found {shown(value)}. "
            "A batch size has to be divided by the number of records first."
        )
    return number


def steps(name: str, value: object, *, minimum: int = 0) -> int:
    """A number of steps, at most 2**53."""
    return integer(name, value, minimum=minimum, maximum=MOST_STEPS)


def integer(name: str, value: object, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A whole number of at least ``minimum`` and, where it is given, at most ``maximum``."""
    if isinstance(value, int) and not isinstance(value, bool):
        whole = value  # exact beyond 2**53 too
    else:
        number = finite(name, value)
        whole = int(number)
        if number != whole:
            raise InvalidValueError(f"Expected {name} to be a whole number >= {minimum}. Found {shown(value)}.")
    if whole < minimum:
        raise InvalidValueError(f"Expected {name} to be a whole number >= {minimum}. Found {shown(value)}.")
    if maximum is not None and whole > maximum:
        raise InvalidValueError(f"Expected {name} to be a whole number <= {maximum}. Found {shown(value)}.")
    return whole
