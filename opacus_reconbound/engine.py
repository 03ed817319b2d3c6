"""From a floor on ρ* to noise, budgets and forecasts, and onto an Opacus engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from opacus import PrivacyEngine

from opacus_reconbound import _validate
from opacus_reconbound._mechanism import is_ghost
from opacus_reconbound.accountants import MutualInformationAccountant, require_certificate
from opacus_reconbound.certificates.certificate import SourceCertificate
from opacus_reconbound.errors import AccountingError, CalibrationError, InvalidValueError
from opacus_reconbound.leakage import noise_for_leakage, step_charge, steps_for_leakage
from opacus_reconbound.leakage.calibration import total_bits

__all__ = ["Forecast", "calibrate_noise", "forecast", "make_private_with_rho", "require_accountant"]


_OUTCOMES = {
    "stop": ("training will stop there", "no further step will be taken"),
    "raise": ("the next step will raise an error", "the next step will raise an error"),
    "warn": ("training will go on with a warning", "training goes on"),
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What training will come to at constant (q, σ), before it starts.

    Attributes:
        steps: steps planned, all told; None where training has no end.
        leakage_bits: charged bits after the planned steps; None where training has no end.
        rho: ρ* after the planned steps; None where training has no end.
        min_rho: the floor, or None.
        budget_bits: the leakage at which ρ* meets the floor, or None.
        last_step: the last step that keeps the floor, where that is before the planned end; else None.
        highest_rho: ρ* at zero leakage.
        breached: the floor is breached already, by the steps taken so far.
    """

    steps: int | None
    leakage_bits: float | None
    rho: float | None
    min_rho: float | None
    budget_bits: float | None
    last_step: int | None
    highest_rho: float
    breached: bool = False

    def describe(self, *, on_breach: Literal["stop", "raise", "warn"] = "stop") -> str:
        """One or two sentences, ρ* rounded down.

        Args:
            on_breach: what happens there.
        """
        then, next_step = _OUTCOMES[on_breach]
        if self.steps is None or self.rho is None or self.leakage_bits is None:
            text = "training has no planned end"
        else:
            text = (
                f"at these settings training would end after {self.steps:,} steps at ρ* = {_floor(self.rho)} "
                f"({_ceil(self.leakage_bits)} bits)"
            )
        if self.min_rho is None:
            return f"Forecast: {text}."
        if self.breached:
            return (
                f"Forecast: the floor of {self.min_rho:g} is already breached by the {self.last_step or 0:,} steps "
                f"taken; {next_step}."
            )
        if self.last_step is not None:
            return f"Forecast: {text}; the floor of {self.min_rho:g} is reached at step {self.last_step:,}, and {then}."
        return f"Forecast: {text}; the floor of {self.min_rho:g} is not reached."


def forecast(
    certificate: SourceCertificate,
    *,
    sample_rate: float,
    noise_multiplier: float,
    steps: int | None,
    min_rho: float | None = None,
    steps_taken: int = 0,
    bits_taken: float = 0.0,
    budget_bits: float | None = None,
) -> Forecast:
    """Forecast a run at constant (q, σ), from scratch or from where it stands.

    Args:
        certificate: of the source.
        sample_rate: q in [0, 1].
        noise_multiplier: σ in [0, inf].
        steps: steps planned, all told, or None for no end.
        min_rho: the floor.
        steps_taken: steps already taken.
        bits_taken: bits already charged.
        budget_bits: a budget in force beside the floor's own; the stricter one counts.
    """
    require_certificate(certificate)
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)
    _, charge = step_charge(_validate.sample_rate(sample_rate), sigma)
    budget = None if min_rho is None else certificate.leakage_budget(min_rho)
    breached = budget is not None and bits_taken > budget
    if budget is not None and budget_bits is not None:
        budget = min(budget, budget_bits)
    bits = None if steps is None else bits_taken + total_bits(charge, max(0, steps - steps_taken))
    last_step = None
    if budget is not None:
        left = steps_for_leakage(
            max(0.0, budget - bits_taken), sample_rate=sample_rate, noise_multiplier=noise_multiplier
        )
        if left is not None and (breached or steps is None or steps_taken + left < steps):
            last_step = steps_taken + left
    return Forecast(
        steps=steps,
        leakage_bits=bits,
        rho=None if bits is None else certificate.bound(bits).rho,
        min_rho=min_rho,
        budget_bits=budget,
        last_step=last_step,
        highest_rho=certificate.highest_rho,
        breached=breached,
    )


def calibrate_noise(
    certificate: SourceCertificate,
    *,
    min_rho: float,
    sample_rate: float,
    steps: int,
    relative_tolerance: float = 1e-6,
) -> float:
    """The smallest noise multiplier at which ``steps`` steps keep ρ* at or above ``min_rho``; on the safe side.

    Args:
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        sample_rate: q in [0, 1].
        steps: number of steps.
        relative_tolerance: σ is at most this much above the smallest.

    Raises:
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
        CalibrationError: only infinite noise would do.
    """
    require_certificate(certificate)
    budget = certificate.leakage_budget(min_rho)
    sigma = noise_for_leakage(budget, sample_rate=sample_rate, steps=steps, relative_tolerance=relative_tolerance)
    if certificate.bound(total_bits(step_charge(sample_rate, sigma)[1], steps)).rho < min_rho:
        raise CalibrationError(  # cannot happen while budget and bound are inverse to each other
            f"The calibrated noise multiplier {sigma!r} misses min_rho = {min_rho!r}. Please report this."
        )
    return sigma


def require_accountant(engine: PrivacyEngine) -> MutualInformationAccountant:
    """The engine's accountant, where it is one of this library's.

    Raises:
        AccountingError: the engine keeps no account of the leakage.
    """
    accountant = engine.accountant
    if not isinstance(accountant, MutualInformationAccountant):
        raise AccountingError(
            f"The engine's accountant is {type(accountant).__name__}, which keeps no account of the leakage. Make it "
            "with PrivacyEngine(accountant='rdp+mi') or 'prv+mi'."
        )
    return accountant


def make_private_with_rho(
    engine: PrivacyEngine,
    *,
    module: Any,
    optimizer: Any,
    data_loader: Any,
    certificate: SourceCertificate,
    min_rho: float,
    epochs: int,
    max_grad_norm: float | list[float],
    **kwargs: Any,
) -> Any:
    """As ``PrivacyEngine.make_private``, with the least noise that keeps ρ* at or above a floor for all epochs.

    The noise is calibrated to the loader that will really run, and the floor is armed: a step beyond it raises
    ``ReconstructionBudgetExceeded`` before anything is applied.

    Args:
        engine: ``PrivacyEngine(accountant="rdp+mi")`` or ``"prv+mi"``; steps already on its account count.
        module: as in ``make_private``.
        optimizer: as in ``make_private``.
        data_loader: as in ``make_private``.
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        epochs: passes over the loader.
        max_grad_norm: as in ``make_private``.
        **kwargs: for ``make_private``; Poisson sampling only.

    Returns:
        What ``make_private`` returns. The noise multiplier is on the optimizer.

    Raises:
        AccountingError: the engine does not account for the leakage, or its loader does not sample by Poisson.
        CalibrationError: the account has too little left for the epochs.
        FloorUnreachableError: the certificate does not support the floor.
    """
    accountant = require_accountant(engine)
    require_certificate(certificate)
    epochs = _validate.integer("epochs", epochs, minimum=1)
    if not kwargs.get("poisson_sampling", True):
        raise AccountingError(
            "make_private_with_rho needs poisson_sampling=True: the leakage of fixed batches is not amplified by "
            "sampling, and calibrating as if it were would report a bound that does not hold."
        )
    if "noise_multiplier" in kwargs:
        raise InvalidValueError("make_private_with_rho chooses noise_multiplier; leave it out, or use make_private.")
    budget = certificate.leakage_budget(min_rho)
    if accountant.budget_bits is not None:
        budget = min(budget, accountant.budget_bits)  # a floor that is armed already stays
    left = budget - accountant.charged_bits
    try:
        batches = len(data_loader)
    except TypeError as error:
        raise AccountingError(
            "The data loader has no length, so its records cannot be sampled by Poisson. Use a map-style dataset."
        ) from error
    if batches == 0:
        raise InvalidValueError("The data loader has no batches: fewer records than batch_size, with drop_last=True.")
    # Opacus samples at 1/batches in int(1/(1/batches)) steps, which can be one fewer, and accounts at one over those
    steps_per_epoch = max(1, int(1 / (1 / batches)))
    if not left > 0.0:
        raise CalibrationError(
            f"The account stands at {accountant.charged_bits:.6g} bits and {budget:.6g} are allowed (min_rho = "
            f"{min_rho:g}): nothing is left for further training. Choose a lower floor."
        )
    sigma = noise_for_leakage(left * (1.0 - 1e-12), sample_rate=1 / steps_per_epoch, steps=epochs * steps_per_epoch)
    made = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=data_loader,
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        **kwargs,
    )
    if len(made[-1]) != steps_per_epoch:  # cannot happen with the supported versions of Opacus
        raise AccountingError(
            f"The private loader has {len(made[-1])} steps in an epoch where {steps_per_epoch} were calibrated for. "
            "Please report this, with the version of Opacus."
        )
    if is_ghost(made[1]):
        made[1].step_hook.watch_clipping(made[0])
    accountant.budget_bits = budget
    return made


def _floor(rho: float) -> str:
    return f"{math.floor(rho * 1e3) / 1e3:.3f}"


def _ceil(bits: float) -> str:
    return f"{bits * 1.001:.4g}" if bits > 1e12 else f"{math.ceil(bits * 1e3) / 1e3:.3f}"
