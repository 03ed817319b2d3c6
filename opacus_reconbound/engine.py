"""From a floor on ρ* to noise, budgets and forecasts, and onto an Opacus engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from opacus import PrivacyEngine

from opacus_reconbound import _validate
from opacus_reconbound._mechanism import is_ghost
from opacus_reconbound._rounding import down3, up3
from opacus_reconbound.accountants import (
    MutualInformationAccountant,
    PRVMutualInformationAccountant,
    RDPMutualInformationAccountant,
    require_certificate,
    without_advice,
)
from opacus_reconbound.certificates.certificate import SourceCertificate
from opacus_reconbound.errors import AccountingError, CalibrationError, InvalidValueError
from opacus_reconbound.leakage import (
    Schedule,
    batch_size_for_leakage,
    noise_for_leakage,
    noise_scale_for_leakage,
    sample_rate_for_leakage,
    step_charge,
    steps_for_leakage,
)
from opacus_reconbound.leakage.calibration import steps_per_epoch as steps_of_an_epoch
from opacus_reconbound.leakage.calibration import total_bits

__all__ = [
    "Epsilon",
    "Forecast",
    "calibrate_batch_size",
    "calibrate_noise",
    "calibrate_noise_scale",
    "calibrate_sample_rate",
    "calibrate_steps",
    "epsilon_of",
    "forecast",
    "make_private_with_rho",
    "require_accountant",
    "stricter_budget",
]

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Epsilon:
    """What a run comes to in differential privacy, for comparison.

    Attributes:
        delta: δ.
        rdp: ε by Opacus's RDP accountant.
        prv: ε by its PRV accountant, which is tighter and slower; None where it was not asked for, or failed.
    """

    delta: float
    rdp: float
    prv: float | None = None

    def describe(self) -> str:
        """Such as ``ε <= 2.100 by RDP, 1.800 by PRV, at δ = 1e-05``; rounded up."""
        prv = "" if self.prv is None else f", {up3(self.prv)} by PRV,"
        return f"ε <= {up3(self.rdp)} by RDP{prv} at δ = {self.delta:g}"


def epsilon_of(history: Iterable[tuple[float, float, int]], delta: float, *, prv: bool = False) -> Epsilon:
    """ε of a history.

    Args:
        history: entries (noise_multiplier, sample_rate, num_steps), as in an Opacus accountant.
        delta: δ in (0, 1).
        prv: by the PRV accountant too, which takes about a second, and longer where ε is large.
    """
    delta = _validate.fraction("delta", delta)
    entries = list(history)

    def by(accountant: MutualInformationAccountant) -> float:
        accountant.history = entries
        with without_advice():
            return accountant.get_epsilon(delta)

    tighter = None
    if prv:
        try:
            tighter = by(PRVMutualInformationAccountant())
        except (ArithmeticError, MemoryError, RuntimeError, ValueError):
            tighter = None  # its discretisation fails at some extremes; RDP does not
    return Epsilon(delta=delta, rdp=by(RDPMutualInformationAccountant()), prv=tighter)


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
        budget_bits: the leakage at which ρ* meets the floor, or a stricter budget in force; None for neither.
        last_step: the last step within that budget, where that is before the planned end; else None.
        highest_rho: ρ* at zero leakage.
        breached: the floor is breached already, by the steps taken so far.
        stricter: ``budget_bits`` is a budget in force that is stricter than the floor, or stands without one.
        epsilon: ε after the planned steps; None without a δ, or where training has no end.
        last_epsilon: ε after ``last_step``; None without a δ, or where there is no such step.
    """

    steps: int | None
    leakage_bits: float | None
    rho: float | None
    min_rho: float | None
    budget_bits: float | None
    last_step: int | None
    highest_rho: float
    breached: bool = False
    stricter: bool = False
    epsilon: Epsilon | None = None
    last_epsilon: Epsilon | None = None

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
                f"at these settings training would end after {self.steps:,} steps at ρ* = {down3(self.rho)} "
                f"({up3(self.leakage_bits)} bits{'' if self.epsilon is None else f'; {self.epsilon.describe()}'})"
            )
        if self.budget_bits is None:
            return f"Forecast: {text}."
        floor = "" if self.min_rho is None else f"the floor of {self.min_rho:g}"
        if self.breached:
            return f"Forecast: {floor} is already breached by the {self.last_step or 0:,} steps taken; {next_step}."
        limit = floor
        if self.stricter:
            limit, then = f"the budget of {self.budget_bits:.6g} bits in force", "no step will go beyond it"
        if self.last_step is not None:
            epsilon = "" if self.last_epsilon is None else f" ({self.last_epsilon.describe()})"
            return f"Forecast: {text}; {limit} is reached at step {self.last_step:,}{epsilon}, and {then}."
        return f"Forecast: {text}; {limit} is not reached."


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
    delta: float | None = None,
    prv: bool = False,
    history: Iterable[tuple[float, float, int]] = (),
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
        budget_bits: a budget in force, also without a floor; the stricter one counts.
        delta: δ at which to compare with ε; None for no comparison.
        prv: ε by the PRV accountant too, which takes seconds.
        history: the steps already taken, entries (noise_multiplier, sample_rate, num_steps); for ε alone.

    Raises:
        InvalidValueError: an argument is out of range, or ε is asked for and ``history`` is not the steps taken.
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
    """
    require_certificate(certificate)
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)
    _, charge = step_charge(_validate.sample_rate(sample_rate), sigma)
    budget = None if min_rho is None else certificate.leakage_budget(min_rho)
    breached = budget is not None and bits_taken > budget
    stricter = budget_bits is not None and (budget is None or budget_bits < budget)
    if stricter:
        budget = budget_bits
    bits = None if steps is None else bits_taken + total_bits(charge, max(0, steps - steps_taken))
    last_step = None
    if budget is not None:
        left = steps_for_leakage(
            max(0.0, budget - bits_taken), sample_rate=sample_rate, noise_multiplier=noise_multiplier
        )
        if left is not None and (breached or steps is None or steps_taken + left < steps):
            last_step = steps_taken + left

    def epsilon_after(step: int | None) -> Epsilon | None:
        if delta is None or step is None:
            return None
        return epsilon_of([*before, (sigma, sample_rate, max(0, step - steps_taken))], delta, prv=prv)

    before = list(history)
    if delta is not None and sum(entry[2] for entry in before) != steps_taken:
        raise InvalidValueError(
            f"Expected history to hold the {steps_taken} steps taken, for ε. Found {sum(e[2] for e in before)} steps."
        )
    return Forecast(
        steps=steps,
        leakage_bits=bits,
        rho=None if bits is None else certificate.bound(bits).rho,
        min_rho=min_rho,
        budget_bits=budget,
        last_step=last_step,
        highest_rho=certificate.highest_rho,
        breached=breached,
        stricter=stricter,
        epsilon=epsilon_after(steps),
        last_epsilon=epsilon_after(last_step),
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
    sigma = _within_reach(
        certificate,
        lambda: noise_for_leakage(budget, sample_rate=sample_rate, steps=steps, relative_tolerance=relative_tolerance),
    )
    if certificate.bound(total_bits(step_charge(sample_rate, sigma)[1], steps)).rho < min_rho:
        raise CalibrationError(  # cannot happen while budget and bound are inverse to each other
            f"The calibrated noise multiplier {sigma!r} misses min_rho = {min_rho!r}. Please report this."
        )
    return sigma


def calibrate_noise_scale(
    certificate: SourceCertificate, *, min_rho: float, schedule: Schedule, relative_tolerance: float = 1e-6
) -> float:
    """The smallest factor on the noise of a schedule that keeps ρ* at or above ``min_rho``; on the safe side.

    Args:
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        schedule: sample rates, steps, and the shape of the noise, such as
            ``Schedule.from_arrays(sample_rates=0.01, noise_multipliers=shape)``.
        relative_tolerance: the factor is at most this much above the smallest.

    Returns:
        c: ``schedule.scaled(c)`` keeps the floor.

    Raises:
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
        CalibrationError: only infinite noise would do.
        InvalidValueError: a step of the schedule has noise 0 or inf.
    """
    budget = require_certificate(certificate).leakage_budget(min_rho)
    return _within_reach(
        certificate, lambda: noise_scale_for_leakage(budget, schedule, relative_tolerance=relative_tolerance)
    )


def calibrate_steps(
    certificate: SourceCertificate, *, min_rho: float, sample_rate: float, noise_multiplier: float
) -> int | None:
    """The most steps that keep ρ* at or above ``min_rho``; one more would not.

    Args:
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        sample_rate: q in [0, 1].
        noise_multiplier: σ in [0, inf].

    Returns:
        The number of steps, at least 1; None where any number keeps the floor.

    Raises:
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
        CalibrationError: a single step does not keep the floor.
    """
    budget = require_certificate(certificate).leakage_budget(min_rho)
    sigma = _validate.non_negative("noise_multiplier", noise_multiplier)

    def most() -> int | None:
        steps = steps_for_leakage(budget, sample_rate=sample_rate, noise_multiplier=sigma)
        if steps == 0:
            least = step_charge(sample_rate, sigma)[1]
            raise CalibrationError(
                f"A single step at sample_rate = {sample_rate:g}, noise_multiplier = {sigma:g} leaks {least:.6g} bits, "
                f"and {budget:.6g} are allowed. Use more noise or smaller batches, or choose a lower min_rho.",
                least_bits=least,
                at="1 step",
            )
        return steps

    return _within_reach(certificate, most)


def calibrate_sample_rate(
    certificate: SourceCertificate, *, min_rho: float, noise_multiplier: float, steps: int
) -> float:
    """The largest sample rate at which ``steps`` steps keep ρ* at or above ``min_rho``.

    Args:
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        noise_multiplier: σ in [0, inf].
        steps: number of steps.

    Returns:
        q in (0, 1], a multiple of 2⁻²⁴, as Opacus's sampler realises; the next multiple does not keep the floor.

    Raises:
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
        CalibrationError: even the smallest rate does not keep the floor.
    """
    budget = require_certificate(certificate).leakage_budget(min_rho)
    return _within_reach(
        certificate, lambda: sample_rate_for_leakage(budget, noise_multiplier=noise_multiplier, steps=steps)
    )


def calibrate_batch_size(
    certificate: SourceCertificate,
    *,
    min_rho: float,
    records: int,
    noise_multiplier: float,
    epochs: int | None = None,
    steps: int | None = None,
) -> int:
    """The largest ``batch_size`` of a data loader with which training keeps ρ* at or above ``min_rho``.

    Args:
        certificate: of the source.
        min_rho: the floor, in (0, 1].
        records: number of training records.
        noise_multiplier: σ in [0, inf].
        epochs: passes over the loader; or
        steps: number of steps, whatever the batch size.

    Returns:
        A batch size in [1, records]; the next larger one does not keep the floor. It is for a loader that keeps its
        last batch: with ``drop_last=True`` there may be one batch fewer, and then Opacus samples at a higher rate.

    Raises:
        FloorUnreachableError: the certificate does not support the floor even at zero leakage.
        CalibrationError: even batches of one record do not keep the floor.
        InvalidValueError: not exactly one of ``epochs`` and ``steps`` is given.
    """
    budget = require_certificate(certificate).leakage_budget(min_rho)
    return _within_reach(
        certificate,
        lambda: batch_size_for_leakage(
            budget, records=records, noise_multiplier=noise_multiplier, epochs=epochs, steps=steps
        ),
    )


def _within_reach(certificate: SourceCertificate, calibrate: Callable[[], Found]) -> Found:
    """What a calibration finds; where it finds nothing, its error says which ρ* can be had instead."""
    try:
        return calibrate()
    except CalibrationError as error:
        if error.least_bits is None:
            raise
        best = math.floor(certificate.bound(error.least_bits).rho * 1e4) / 1e4
        raise CalibrationError(
            f"{error} The largest ρ* attainable is {best:g}, at {error.at}.", least_bits=error.least_bits, at=error.at
        ) from error


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


def stricter_budget(accountant: MutualInformationAccountant, budget_bits: float) -> float:
    """A budget in bits, or the one that the account is armed with where that is less."""
    armed = accountant.budget_bits
    return budget_bits if armed is None else min(budget_bits, armed)


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
    budget = stricter_budget(accountant, certificate.leakage_budget(min_rho))  # a floor that is armed already stays
    left = budget - accountant.charged_bits
    try:
        batches = len(data_loader)
    except TypeError as error:
        raise AccountingError(
            "The data loader has no length, so its records cannot be sampled by Poisson. Use a map-style dataset."
        ) from error
    if batches == 0:
        raise InvalidValueError("The data loader has no batches: fewer records than batch_size, with drop_last=True.")
    steps_per_epoch = steps_of_an_epoch(batches)
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
