"""The least noise, the most steps and the largest batches within a leakage target; always on the safe side.

Each function returns a number at which the target is met as the accountant would charge it. How close that is to the
best one is said with each.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.optimize import brentq

from opacus_reconbound import _validate
from opacus_reconbound.errors import CalibrationError, InvalidValueError
from opacus_reconbound.leakage.exact import ExactSum
from opacus_reconbound.leakage.gaussian import realised_sample_rate, step_charge, step_leakage
from opacus_reconbound.leakage.schedule import Schedule, charged_total

__all__ = [
    "batch_size_for_leakage",
    "noise_for_leakage",
    "noise_scale_for_leakage",
    "sample_rate_for_leakage",
    "steps_for_leakage",
    "steps_per_epoch",
]

_GRID = 1 << 24  # rates that Opacus's sampler can realise


def noise_for_leakage(budget_bits: float, *, sample_rate: float, steps: int, relative_tolerance: float = 1e-6) -> float:
    """The smallest noise multiplier at which ``steps`` steps leak at most ``budget_bits``.

    Args:
        budget_bits: γ, the bits one record may leak in all; in [0, inf].
        sample_rate: q in [0, 1].
        steps: number of steps.
        relative_tolerance: σ is at most this much above the smallest that meets the target.

    Returns:
        σ in [0, inf): 0 where nothing has to be hidden.

    Raises:
        CalibrationError: no finite noise meets a budget of zero bits.
    """
    budget = _validate.non_negative("budget_bits", budget_bits)
    q = realised_sample_rate(_validate.sample_rate(sample_rate))
    steps = _validate.steps("steps", steps)
    tolerance = _validate.fraction("relative_tolerance", relative_tolerance)
    if q == 0 or steps == 0 or math.isinf(budget):
        return 0.0
    return _least(lambda sigma: total_bits(step_leakage(q, sigma), steps), budget, tolerance, "noise_multiplier")


def noise_scale_for_leakage(budget_bits: float, schedule: Schedule, *, relative_tolerance: float = 1e-6) -> float:
    """The smallest factor c on the noise of a whole schedule with which it leaks at most ``budget_bits``.

    Args:
        budget_bits: γ, the bits one record may leak in all; in [0, inf].
        schedule: sample rates, steps, and the shape of the noise: the result is for σ_t = c · (its noise multiplier).
        relative_tolerance: c is at most this much above the smallest that meets the target.

    Returns:
        c in [0, inf): ``schedule.scaled(c)`` meets the target; 0 where nothing has to be hidden.

    Raises:
        CalibrationError: no finite factor meets a budget of zero bits.
        InvalidValueError: a step that samples records has noise 0 or inf, which no factor changes.
    """
    budget = _validate.non_negative("budget_bits", budget_bits)
    tolerance = _validate.fraction("relative_tolerance", relative_tolerance)
    if not isinstance(schedule, Schedule):
        raise InvalidValueError(
            f"Expected a Schedule. Found {_validate.shown(schedule)}. Make one with "
            "Schedule.from_arrays(sample_rates=..., noise_multipliers=...)."
        )
    runs = [run for run in schedule if run.sample_rate > 0]
    for run in runs:
        if not 0 < run.noise_multiplier < math.inf:
            raise InvalidValueError(
                f"Expected noise multipliers in (0, inf) as the shape of a noise schedule. Found "
                f"{run.noise_multiplier!r}, which no factor changes. Leave such steps out."
            )
    if not runs or math.isinf(budget):
        return 0.0
    q = np.array([run.sample_rate for run in runs])
    shape = np.array([run.noise_multiplier for run in runs])
    steps = np.array([run.steps for run in runs], dtype=np.int64)

    def bits(factor: float) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return charged_total(q, factor * shape, steps)

    return _least(bits, budget, tolerance, "noise_scale")


def steps_for_leakage(budget_bits: float, *, sample_rate: float, noise_multiplier: float) -> int | None:
    """The most steps that leak at most ``budget_bits``: one more would leak more.

    Args:
        budget_bits: γ in bits, in [0, inf].
        sample_rate: q in [0, 1].
        noise_multiplier: σ in [0, inf].

    Returns:
        The number of steps, or None where any number is within the budget.
    """
    budget = _validate.non_negative("budget_bits", budget_bits)
    _, charge = step_charge(_validate.sample_rate(sample_rate), float(noise_multiplier))
    if charge == 0.0 or math.isinf(budget):
        return None
    if math.isinf(charge):
        return 0
    ratio = budget / charge
    if ratio > 2.0**62:
        return None
    steps = int(ratio) + 1
    while steps > 0 and total_bits(charge, steps) > budget:
        steps -= 1
    return steps


def sample_rate_for_leakage(budget_bits: float, *, noise_multiplier: float, steps: int) -> float:
    """The largest sample rate at which ``steps`` steps leak at most ``budget_bits``.

    Args:
        budget_bits: γ in bits, in [0, inf].
        noise_multiplier: σ in [0, inf].
        steps: number of steps.

    Returns:
        q in (0, 1], a multiple of 2⁻²⁴: Opacus's sampler realises no other rates, so any larger q leaks as much as the
        next multiple does.

    Raises:
        CalibrationError: even the smallest rate leaks more.
    """
    budget = _validate.non_negative("budget_bits", budget_bits)
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)
    steps = _validate.integer("steps", steps)

    def bits(rate: int) -> float:
        return total_bits(step_charge(rate / _GRID, sigma)[1], steps)

    return _most(bits, budget, _GRID, lambda rate: f"sample_rate = {rate / _GRID:.3g}", steps) / _GRID


def batch_size_for_leakage(
    budget_bits: float,
    *,
    records: int,
    noise_multiplier: float,
    epochs: int | None = None,
    steps: int | None = None,
) -> int:
    """The largest ``batch_size`` of a data loader with which training leaks at most ``budget_bits``.

    Opacus samples at one over the number of batches, ceil(records / batch_size). (With ``drop_last=True`` the number of
    batches is rounded down, and the rate is higher.)

    Args:
        budget_bits: γ in bits, in [0, inf].
        records: number of training records.
        noise_multiplier: σ in [0, inf].
        epochs: passes over the loader; or
        steps: number of steps, whatever the batch size.

    Returns:
        A batch size in [1, records]; the next larger one, if there is one, leaks more than the budget. (Where batches
        are less than about one record in ten thousand, a still larger one may fit, by the rounding of the rate to
        multiples of 2⁻²⁴.)

    Raises:
        CalibrationError: even batches of one record leak more.
        InvalidValueError: not exactly one of ``epochs`` and ``steps`` is given.
    """
    budget = _validate.non_negative("budget_bits", budget_bits)
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)
    records = _validate.integer("records", records, minimum=1)
    if (epochs is None) == (steps is None):
        raise InvalidValueError("Expected either epochs or steps: how long training goes on.")
    length = _validate.integer("steps", steps) if epochs is None else _validate.integer("epochs", epochs)

    def bits(batch_size: int) -> float:
        per_epoch = steps_per_epoch(-(-records // batch_size))
        return total_bits(step_charge(1 / per_epoch, sigma)[1], length * (1 if epochs is None else per_epoch))

    taken = length if epochs is None else length * steps_per_epoch(records)
    return _most(bits, budget, records, lambda size: f"batch_size = {size}", taken)


def steps_per_epoch(batches: int) -> int:
    """Steps that Opacus takes in an epoch of a loader with so many batches; it accounts at one over this number.

    It samples at the rate 1/batches, in int(1/(1/batches)) steps, which can be one fewer.
    """
    return max(1, int(1 / (1 / batches)))


def total_bits(bits: float, steps: int) -> float:
    """steps · bits as an accountant sums it: exact, rounded once."""
    total = ExactSum()
    total.add(bits, steps)
    return total.value


def _least(bits: Callable[[float], float], budget: float, tolerance: float, name: str) -> float:
    """The upper end of a bracket, of relative width ``tolerance``, of the least x with bits(x) <= budget.

    Args:
        bits: falls with x > 0, to 0.
        budget: in [0, inf).
        tolerance: in (0, 1).
        name: of x, for the error.
    """
    if budget == 0.0:
        raise CalibrationError(
            "No finite noise multiplier leaks zero bits. Choose a larger leakage budget or a lower min_rho.",
            least_bits=0.0,
            at=f"{name} = inf",
        )
    low, high = 0.5, 1.0
    while bits(high) > budget:
        low, high = high, high * 4.0
        if high > 1e150:
            raise CalibrationError(f"Nothing below 1e150, as {name}, meets budget_bits = {budget!r}.")
    while bits(low) <= budget:
        low, high = low / 4.0, low
        if low < 1e-150:
            return high

    def excess(log_x: float) -> float:
        value = bits(math.exp(log_x))
        return min(700.0, max(-700.0, math.log(value) - math.log(budget))) if value > 0 else -700.0

    root = math.exp(brentq(excess, math.log(low), math.log(high), xtol=tolerance / 16, disp=False))
    for guess in (root * (1.0 + tolerance / 3), root * (1.0 - tolerance / 3)):
        if low < guess < high:
            low, high = (low, guess) if bits(guess) <= budget else (guess, high)
    while high > low * (1.0 + tolerance):  # what is left, if anything
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break  # neighbouring numbers
        low, high = (low, middle) if bits(middle) <= budget else (middle, high)
    return high


def _most(bits: Callable[[int], float], budget: float, limit: int, describe: Callable[[int], str], steps: int) -> int:
    """A whole number in [1, limit] with bits(n) <= budget, of which the next has more; ``limit`` where all fit."""
    if bits(limit) <= budget:
        return limit
    least = bits(1)
    if least > budget:
        raise CalibrationError(
            f"Even {describe(1)} leaks {least:.6g} bits in {steps:,} steps, and {budget:.6g} are allowed. Use more "
            "noise or fewer steps, or choose a lower min_rho.",
            least_bits=least,
            at=describe(1),
        )
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        if bits(middle) <= budget:
            low = middle
        else:
            high = middle
    return low
