"""What a private training says of itself while it runs: shared by the Lightning callback and by ``attach``."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

from opacus_reconbound._rounding import down3, float32_above, float32_below, three_digits
from opacus_reconbound.accountants import RDP_ADVICE, MutualInformationAccountant, StepHook
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.engine import Forecast, forecast
from opacus_reconbound.errors import AccountingError

__all__ = [
    "BITS",
    "EPSILON",
    "LEFT",
    "RHO",
    "account_of",
    "breaches",
    "describe_outcome",
    "epsilon_of",
    "forecast_run",
    "measure",
    "shorten",
    "stricter_budget_in_force",
]

Found = list[tuple[Any, StepHook]]  # private optimizers with the hooks that charge their steps

RHO, BITS, LEFT, EPSILON = (
    "reconstruction/rho_star",
    "reconstruction/leakage_bits",
    "reconstruction/steps_left",
    "privacy/epsilon",
)
# a progress bar has little room
_SHORT = {RHO: "rho*", BITS: "bits", LEFT: "left", EPSILON: "eps"}


def account_of(found: Found) -> MutualInformationAccountant:
    """The one account that all these optimizers are charged to.

    Raises:
        AccountingError: they are charged to several.
    """
    accountants = {id(hook.accountant): hook.accountant for _, hook in found}
    if len(accountants) != 1:
        raise AccountingError(
            f"The optimizers are charged to {len(accountants)} accounts. Make all of them private with one engine: "
            "what they reveal adds up."
        )
    return next(iter(accountants.values()))


def breaches(found: Found) -> bool:
    """Whether a step of some optimizer, at its present noise, would go beyond the budget."""
    return any(
        hook.accountant.budget_bits is not None
        and hook.accountant.would_exceed(
            noise_multiplier=hook.noise_multiplier(optimizer), sample_rate=hook.sample_rate
        )
        for optimizer, hook in found
    )


def epsilon_of(accountant: MutualInformationAccountant, delta: float) -> float:
    """ε at ``delta`` so far, without RDP's advice to widen its orders: a looser ε is still an upper bound.

    The advice is filtered out once and for all. ``catch_warnings`` at every step would make Python forget which
    warnings it has shown, and show each of them again.
    """
    deciding = (
        action
        for action, message, category, module, _ in warnings.filters
        if module is None and issubclass(UserWarning, category) and (message is None or re.match(message, RDP_ADVICE))
    )
    if next(deciding, None) != "ignore":
        warnings.filterwarnings("ignore", message=RDP_ADVICE, category=UserWarning)
    return float(accountant.get_epsilon(delta))


def _steps_left(found: Found) -> float:
    left = [
        hook.accountant.steps_left(noise_multiplier=hook.noise_multiplier(optimizer), sample_rate=hook.sample_rate)
        for optimizer, hook in found
    ]
    return min(math.inf if each is None else float(each) for each in left)


def measure(
    certificate: SourceCertificate, found: Found, *, with_steps_left: bool, epsilon: float | None = None
) -> dict[str, float]:
    """The logged figures, by their names; float32 on the safe side, for that is what loggers keep.

    Args:
        certificate: of the source.
        found: the optimizers, all of one account.
        with_steps_left: there is a budget to have steps left of.
        epsilon: ε, where it is to be logged.
    """
    bound = found[0][1].accountant.bound(certificate)
    values = {RHO: float32_below(bound.rho), BITS: float32_above(bound.leakage_bits)}
    if with_steps_left:
        values[LEFT] = _steps_left(found)
    if epsilon is not None:
        values[EPSILON] = float32_above(epsilon)
    return values


def shorten(values: dict[str, float]) -> dict[str, float]:
    """The same for a progress bar: short names, three digits on the safe side."""
    return {_SHORT[name]: three_digits(value, down=name == RHO) for name, value in values.items()}


def forecast_run(
    certificate: SourceCertificate,
    found: Found,
    *,
    steps: int | None,
    min_rho: float | None,
    delta: float | None = None,
) -> Forecast:
    """What the run of the first optimizer will come to from where its account stands.

    Args:
        certificate: of the source.
        found: the optimizers, all of one account.
        steps: steps planned, all told; None for no end.
        min_rho: the floor, or None.
        delta: δ at which to compare with ε; None for no comparison.
    """
    optimizer, hook = found[0]
    accountant = hook.accountant
    return forecast(
        certificate,
        sample_rate=hook.sample_rate,
        noise_multiplier=hook.noise_multiplier(optimizer),
        steps=steps,
        min_rho=min_rho,
        steps_taken=len(accountant),
        bits_taken=accountant.charged_bits,
        budget_bits=accountant.budget_bits,
        delta=delta,
        history=accountant.history,
    )


def stricter_budget_in_force(
    certificate: SourceCertificate, accountant: MutualInformationAccountant, budget_bits: float | None, *, before: str
) -> str | None:
    """A sentence about a budget on the account that is stricter than the floor's, or None.

    Args:
        certificate: of the source.
        accountant: the account.
        budget_bits: the floor's own budget, or None.
        before: what has to come after giving it up, such as ``"fit()"``.
    """
    armed = accountant.budget_bits
    if armed is None or (budget_bits is not None and armed >= budget_bits):
        return None
    return (
        f"The account is still armed with a stricter budget of {armed:.6g} bits (ρ* >= "
        f"{down3(certificate.bound(armed).rho)}), which stays in force. To give it up, set accountant.budget_bits = "
        f"None before {before}."
    )


def describe_outcome(steps: int, bound: ReconstructionBound, *, stopped: str | None, min_rho: float | None) -> str:
    """How a training ended."""
    outcome = f"{steps:,} steps were taken. {bound.explain()}"
    if stopped is None:
        return outcome
    limit = "" if min_rho is None else f" (min_rho = {min_rho:g})"
    return f"Training was stopped: {stopped}{limit}. {outcome}"
