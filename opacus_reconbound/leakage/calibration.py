"""The smallest noise and the most steps that keep the leakage within a target; always on the safe side."""

from __future__ import annotations

import math

from opacus_reconbound import _validate
from opacus_reconbound.errors import CalibrationError
from opacus_reconbound.leakage.exact import ExactSum
from opacus_reconbound.leakage.gaussian import realised_sample_rate, step_charge, step_leakage

__all__ = ["noise_for_leakage", "steps_for_leakage"]


def noise_for_leakage(budget_bits: float, *, sample_rate: float, steps: int, relative_tolerance: float = 1e-6) -> float:
    """The smallest noise multiplier at which ``steps`` steps leak at most ``budget_bits``.

    Bisection in log σ on the charged leakage, which falls with σ. The upper end of the bracket is returned: the
    target is met, and σ is at most ``relative_tolerance`` above the smallest that meets it.

    Args:
        budget_bits: γ, the bits one record may leak in all; in [0, inf].
        sample_rate: q in [0, 1].
        steps: number of steps.
        relative_tolerance: of σ.

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

    def meets(sigma: float) -> bool:
        return total_bits(step_leakage(q, sigma), steps) <= budget

    if budget == 0.0:
        raise CalibrationError(
            "No finite noise multiplier leaks zero bits. Choose a larger leakage budget or a lower min_rho."
        )
    low, high = 0.5, 1.0
    while not meets(high):
        low, high = high, high * 4.0
        if high > 1e150:
            raise CalibrationError(f"No noise multiplier below 1e150 meets budget_bits={budget!r}.")
    while meets(low):
        low, high = low / 4.0, low
        if low < 1e-150:
            return high
    while high > low * (1.0 + tolerance):
        middle = math.sqrt(low * high)
        if meets(middle):
            high = middle
        else:
            low = middle
    return high


def steps_for_leakage(budget_bits: float, *, sample_rate: float, noise_multiplier: float) -> int | None:
    """The most steps that leak at most ``budget_bits``.

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


def total_bits(bits: float, steps: int) -> float:
    """steps · bits as an accountant sums it: exact, rounded once."""
    total = ExactSum()
    total.add(bits, steps)
    return total.value
