"""Other published bounds beside ours, for one schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from numpy.typing import ArrayLike

from opacus_reconbound import _validate
from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.comparisons.fano import exact_recovery
from opacus_reconbound.comparisons.fisher import fisher_information, van_trees_error
from opacus_reconbound.comparisons.robustness import largest_success
from opacus_reconbound.comparisons.unbiased import unbiased_error_by_rdp
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.leakage import Schedule

__all__ = ["Comparison", "compare"]

_SAMPLING = "Poisson sampling; the adversary sees every noisy step and knows all other records"
_ERROR = "RMSE per coordinate, data units"
_PROBABILITY = "probability"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one bound says about a schedule, and what it rests on.

    Attributes:
        name: of the bound.
        value: in ``unit``; an error is rounded down and a success up.
        unit: ``"RMSE per coordinate, data units"`` or ``"probability"``.
        bounds: whether the value is the least error, the largest success, or what a given attack attains.
        attacks: which attacks it speaks of, ``"any"`` or ``"unbiased"``; an unbiased attack's guess is on average the
            record, for every record of the box.
        prior: what must be known or assumed of the source.
        confidence: probability that the value holds, 1 for a theorem without an estimate; None where it rests on an
            estimate without confidence.
        assumptions: what it rests on besides.
        source: publication.
        ratio: an error over that of the best guess without the model (√(tr Σ/m) of the certificate), the axis of ρ*; an
            attack with a ratio above 1 is worse than no attack. None without a certificate, and for probabilities.
    """

    name: str
    value: float
    unit: str
    bounds: Literal["least error", "largest success", "attained error"]
    attacks: Literal["any", "unbiased"]
    prior: str
    confidence: float | None
    assumptions: tuple[str, ...]
    source: str
    ratio: float | None = None


def compare(
    schedule: Schedule,
    certificate: SourceCertificate | None = None,
    *,
    prior_success: float | None = None,
    candidates: int | None = None,
    entropy_bits: float | None = None,
    jacobian: ArrayLike | None = None,
    prior_information: float | None = None,
    peak: float | None = None,
    prv: bool = False,
) -> tuple[Comparison, ...]:
    """All bounds that can be had from what is given, ours first.

    Args:
        schedule: the steps.
        certificate: of the source; gives our bound, the common axis, and ``peak`` where its representation has one.
        prior_success: κ, with which the best guess without the model comes within the distance η that is meant; gives
            reconstruction robustness. ``comparisons.prior_success`` estimates it.
        candidates: how many values a record can take; gives Fano's bound on exact recovery.
        entropy_bits: the record's Shannon entropy, for that; all values equally likely unless given.
        jacobian: (p, d), of the clipped gradient over the clipping norm with respect to the record in data units; gives
            Fisher information leakage and, with a prior, van Trees.
        prior_information: tr J_π of a smooth prior, for van Trees; that of a Gaussian with equal variances of the
            certificate's tr Σ̂ unless given.
        peak: the range of each coordinate; gives the bound on unbiased attacks by RDP.
        prv: use Opacus's PRV accountant too for reconstruction robustness, in seconds.

    Raises:
        InvalidValueError: nothing to compare, or arguments that do not fit each other.
    """
    if entropy_bits is not None and candidates is None:
        raise InvalidValueError("entropy_bits needs candidates, the number of values that a record can take.")
    if prior_information is not None and jacobian is None:
        raise InvalidValueError("prior_information needs jacobian: without it there is no Fisher information.")
    unit: float | None = None  # the best guess's error per coordinate
    rows: list[Comparison] = []
    if certificate is not None:
        descriptor = certificate.representation
        unit = math.sqrt(certificate.trace.reference / descriptor.dimension)
        peak = descriptor.peak if peak is None else peak
        rows.append(_ours(schedule, certificate))
    if peak is not None:
        rows += _by_rdp(schedule, _validate.positive("peak", peak), unit)
    if jacobian is not None:
        if certificate is not None and prior_information is None:
            prior_information = certificate.representation.dimension**2 / certificate.trace.scale
        rows += _by_fisher(schedule, jacobian, prior_information, certificate, unit)
    if prior_success is not None:
        rows.append(_robustness(schedule, prior_success, prv=prv))
    if candidates is not None:
        rows.append(_fano(schedule, candidates, entropy_bits))
    if not rows:
        raise InvalidValueError(
            "Nothing to compare: give a certificate, peak, prior_success, candidates or jacobian, each of which brings "
            "its bound."
        )
    return tuple(rows)


def _ratio(error: float, unit: float | None) -> float | None:
    return None if unit is None else error / unit


def _ours(schedule: Schedule, certificate: SourceCertificate) -> Comparison:
    found = certificate.bound(schedule.charged_bits)
    return Comparison(
        name="certificate (this library)",
        value=found.rmse_per_coordinate,
        unit=_ERROR,
        bounds="least error",
        attacks="any",
        prior="i.i.d. records; two held-out samples",
        confidence=found.confidence,
        assumptions=(
            _SAMPLING,
            f"error in the representation {found.representation}",
            f"ratio to {found.normaliser}",
            "an average over the source",
        ),
        source="paper, Theorem 3.6; replica bounds of this library",
        ratio=found.rho,
    )


def _by_rdp(schedule: Schedule, peak: float, unit: float | None) -> list[Comparison]:
    error = math.sqrt(unbiased_error_by_rdp(schedule, peak))
    half = 0.5 * peak
    bound = Comparison(
        name="unbiased, by RDP of order 2",
        value=error,
        unit=_ERROR,
        bounds="least error",
        attacks="unbiased",
        prior=f"none; a box of side {peak:g}",
        confidence=1.0,
        assumptions=(_SAMPLING, "replacing the record; unbiased on the whole box"),
        source="Guo et al. 2022",
        ratio=_ratio(error, unit),
    )
    midpoint = Comparison(
        name="midpoint of the box, an attack",
        value=half,
        unit=_ERROR,
        bounds="attained error",
        attacks="any",
        prior="none",
        confidence=1.0,
        assumptions=("ignores the model; its error is at most this",),
        source="paper, Appendix A",
        ratio=_ratio(half, unit),
    )
    return [bound, midpoint]


def _by_fisher(
    schedule: Schedule,
    jacobian: ArrayLike,
    prior_information: float | None,
    certificate: SourceCertificate | None,
    unit: float | None,
) -> list[Comparison]:
    found = fisher_information(schedule, jacobian)
    if certificate is not None and found.dimension != certificate.representation.dimension:
        raise InvalidValueError(
            f"Expected a jacobian of {certificate.representation.dimension} columns, as the certificate's "
            f"representation has. Found {found.dimension}."
        )
    assumptions = (_SAMPLING, "the Jacobian given holds at every step, and for this record")
    error = math.sqrt(found.unbiased_error)
    rows = [
        Comparison(
            name="Fisher information leakage",
            value=error,
            unit=_ERROR,
            bounds="least error",
            attacks="unbiased",
            prior="none",
            confidence=None,
            assumptions=assumptions,
            source="Hannun et al. 2021; Guo et al. 2022",
            ratio=_ratio(error, unit),
        )
    ]
    if prior_information is not None:
        error = math.sqrt(van_trees_error(found, prior_information))
        rows.append(
            Comparison(
                name="van Trees, a point estimate",
                value=error,
                unit=_ERROR,
                bounds="least error",
                attacks="any",
                prior="smooth density of known Fisher information; Gaussian unless given",
                confidence=None,
                assumptions=(*assumptions, "its trace is the average over the prior"),
                source="Maeng et al. 2023",
                ratio=_ratio(error, unit),
            )
        )
    return rows


def _robustness(schedule: Schedule, prior_success: float, *, prv: bool) -> Comparison:
    return Comparison(
        name="reconstruction robustness",
        value=largest_success(schedule, prior_success, prv=prv),
        unit=_PROBABILITY,
        bounds="largest success",
        attacks="any",
        prior=f"κ = {prior_success:g} for the distance that is meant",
        confidence=None,
        assumptions=(_SAMPLING, "κ is what it is said to be; estimated from data it is uncertified"),
        source="Balle et al. 2022; Hayes et al. 2023; Kaissis et al. 2023",
    )


def _fano(schedule: Schedule, candidates: int, entropy_bits: float | None) -> Comparison:
    entropy = "uniform" if entropy_bits is None else f"entropy {entropy_bits:g} bits"
    return Comparison(
        name="exact recovery, by Fano",
        value=exact_recovery(schedule.charged_bits, candidates, entropy_bits),
        unit=_PROBABILITY,
        bounds="largest success",
        attacks="any",
        prior=f"{candidates:,} candidates, {entropy}",
        confidence=1.0,
        assumptions=(_SAMPLING, "the number of candidates and the entropy are what they are said to be"),
        source="Guo et al. 2023, in Fano's classical form",
    )
