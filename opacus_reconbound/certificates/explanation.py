"""A certificate in words: what it guarantees, which design wins where, what limits it, what more data would bring."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from opacus_reconbound._rounding import down3
from opacus_reconbound.certificates.designs import BlockDesign, Design
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics, diagonal_loss
from opacus_reconbound.certificates.envelope import Winner

if TYPE_CHECKING:
    from opacus_reconbound.certificates.certificate import SourceCertificate

__all__ = ["describe", "limits"]

_BITS = (0.0, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0)
_FACTORS = (2, 4)
_MOST_RANGES = 8
_LITTLE = 0.005  # of tr Σ: less is not what limits a design
_NEGLIGIBLE = 0.0005


def limits(design: Design, diagnostics: DesignDiagnostics) -> tuple[tuple[str, float], ...]:
    """What the design loses to what, largest first: (name, distortion in units of tr Σ at zero leakage).

    Names: "margins" (of the sample's means), "diagonal" (sums of records with themselves; left out where it was not
    measured), "Monte Carlo" (many replicas and blocks) or "rounding" (two replicas).
    """
    exact = not isinstance(design, BlockDesign) and design.replicas == 2
    losses = {
        "margins": diagnostics.sampling_margin + diagnostics.gap_margin + diagnostics.cap_loss,
        "rounding" if exact else "Monte Carlo": diagnostics.monte_carlo_loss,
    }
    diagonal = diagonal_loss(design, diagnostics)
    if diagonal is not None:
        losses["diagonal"] = diagonal
    return tuple(sorted(losses.items(), key=lambda item: -item[1]))


def describe(certificate: SourceCertificate) -> str:
    """``SourceCertificate.explain``: about ten lines, figures rounded to the safe side."""
    representation, ranges = certificate.representation, certificate.winners()
    lines = [
        f"Representation {representation.name} {representation.parameters}, {representation.dimension} coordinates.",
        f"{certificate.reference.n:,} reference and {certificate.estimation.n:,} estimation records; "
        f"confidence {certificate.confidence:g}; ρ* is relative to {certificate.trace.label}.",
    ]
    reduction = certificate.settings.get("reduction")
    if isinstance(reduction, Mapping):
        lines.append(
            f"The designs use {reduction.get('components')} principal coordinates of the reference sample "
            f"({float(reduction.get('variance_kept', 0.0)):.1%} of its variance); the bound is on all coordinates."
        )
    if not ranges:
        return "\n".join([*lines, "Nothing is guaranteed at any leakage (ρ* = 0): more estimation records are needed."])
    lines.append(_guarantee(certificate, ranges[-1].stop_bits))
    lines.append("Which design gives the bound, and what limits that design (losses in units of tr Σ):")
    shown = sorted(ranges, key=lambda winner: winner.start_bits - winner.stop_bits)[:_MOST_RANGES]
    for winner in sorted(shown, key=lambda winner: winner.start_bits):
        parts = certificate.diagnostics[winner.position] if certificate.diagnostics else None
        lines.append(f"  {_span(winner)}: {_name(winner.design)}; {_limit(winner, parts)}.")
    if len(ranges) > len(shown):
        lines.append(f"  {len(ranges) - len(shown)} narrower ranges are left out; `winners()` has them all.")
    lines.append(_more_data(certificate))
    return "\n".join(lines)


def _guarantee(certificate: SourceCertificate, end: float) -> str:
    values = [f"{down3(certificate.bound(bits).rho)} at {bits:g}" for bits in _BITS if bits < end]
    values[0] += " bits of leakage"
    listed = ", ".join(values[:-1]) + f" and {values[-1]}" if len(values) > 1 else values[0]
    return f"ρ* is at least {listed}; from {_bits(end)} bits on nothing is guaranteed."


def _more_data(certificate: SourceCertificate) -> str:
    if not any(certificate.diagnostics):
        return (
            "The certificate holds no diagnostics, so what limits it and what more data would bring is not known; "
            "make it again to have them."
        )
    leakages = [bits for bits in (1.0, 3.0) if certificate.bound(bits).rho > 0.0] or [0.0]
    sentences = []
    for bits in leakages:
        guesses = [certificate.rho_with_more_records(bits, factor) for factor in _FACTORS]
        about = " and ".join(
            f"{down3(guess or 0.0)} with {factor * certificate.estimation.n:,}"
            for factor, guess in zip(_FACTORS, guesses, strict=True)
        )
        now, unit = down3(certificate.bound(bits).rho), "bit" if bits == 1.0 else "bits"
        sentences.append(f"at {bits:g} {unit} {now} would become about {about}")
    return f"More estimation records, an estimate and not a bound: {'; '.join(sentences)}."


def _limit(winner: Winner, parts: DesignDiagnostics | None) -> str:
    if parts is None:
        return "what limits it was not recorded"
    design, here = winner.design, 1.0
    if isinstance(design, BlockDesign):  # its losses shrink with the leakage
        here = 2.0 ** (-2.0 * winner.start_bits / design.block_size)
    losses = [(name, here * loss) for name, loss in limits(design, parts)]
    name, largest = losses[0]
    if math.isinf(largest):
        return "limited by the sample size: on this scale every record is alone (the diagonal is everything)"
    told = ", ".join(f"{what} {_ceil(loss)}" for what, loss in losses if loss >= _NEGLIGIBLE or what == name)
    if largest < _LITTLE:
        return f"limited by the inequality itself, hardly by the sample ({told})"
    return f"limited by {name if name == 'rounding' else 'the ' + name} ({told})"


def _name(design: Design) -> str:
    if isinstance(design, BlockDesign):
        return f"block design, k = {design.block_size}, ν² = {design.dither:g}"
    return f"replica design, m = {design.replicas}, temperature {design.temperature:.3g}"


def _span(winner: Winner) -> str:
    return f"{_bits(winner.start_bits)} to {_bits(winner.stop_bits)} bits"


def _bits(value: float) -> str:
    return f"{value:.4g}" if value >= 1e4 or 0.0 < value < 0.01 else f"{value:.2f}"


def _ceil(value: float) -> str:
    return f"{math.ceil(value * 1e3) / 1e3:.3f}" if value < 1e6 else f"{value:.0e}"
