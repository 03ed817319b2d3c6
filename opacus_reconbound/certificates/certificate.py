"""The certificate: how uncertain the records are, once and for all runs; a frozen, validated JSON file.

Contract. A certificate documents everything that its numbers depend on. Fields are never given another meaning; a
change of meaning raises ``schema_version``, and a reader refuses versions that it does not know. A field that only
explains (``diagnostics``) may be empty; then it is part neither of the file nor of the digest, so that files made
without it stay what they are.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from opacus_reconbound import _atomic, _validate
from opacus_reconbound.certificates.designs import BlockDesign, Design, ReplicaDesign
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics, predicted, value_at_zero
from opacus_reconbound.certificates.envelope import Winner, winners
from opacus_reconbound.certificates.explanation import describe
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.errors import CertificateError, FloorUnreachableError, InvalidValueError, ReconboundError
from opacus_reconbound.representations.base import Representation, RepresentationDescriptor

__all__ = ["SCHEMA_VERSION", "ReconstructionBound", "SourceCertificate"]

SCHEMA_VERSION = 1
_FORMAT = "opacus_reconbound.certificate"
_REMEDY = "Make it again with `reconbound certify`."


@dataclass(frozen=True, kw_only=True)
class ReconstructionBound:
    """What no attack can beat, on average over the source, at a given leakage.

    Attributes:
        leakage_bits: γ, the bits that the training trajectory carries about one record.
        rho: ρ*, a lower bound on RMSE(attack)/RMSE(best guess without the model), in [0, 1].
        mse: a lower bound on the expected squared error summed over the coordinates, in squared data units.
        dimension: number of coordinates of the representation.
        design: the converse that gives the bound.
        confidence: probability, over the certificate's samples, that the bound holds.
        normaliser: what ρ* is relative to, in words.
        representation: the name of Ψ.
        peak: the range of one coordinate, for PSNR.
    """

    leakage_bits: float
    rho: float
    mse: float
    dimension: int
    design: Design | None
    confidence: float
    normaliser: str
    representation: str
    peak: float | None = None

    @property
    def rmse(self) -> float:
        """√mse: a lower bound on the root of the expected squared error, all coordinates together."""
        return math.sqrt(self.mse)

    @property
    def rmse_per_coordinate(self) -> float:
        """√(mse/m): the same for one coordinate (one pixel) on average."""
        return math.sqrt(self.mse / self.dimension)

    @property
    def psnr(self) -> float | None:
        """10 log10(peak² m/mse) in dB, an upper bound on any attack's PSNR; None unless Ψ is pixels."""
        if self.peak is None:
            return None
        if self.mse <= 0.0:
            return math.inf
        return 20.0 * math.log10(self.peak) + 10.0 * (math.log10(self.dimension) - math.log10(self.mse))

    def explain(self) -> str:
        """The bound as a sentence, figures rounded to the safe side."""
        rho = math.floor(self.rho * 1000.0) / 1000.0
        bits = "infinitely many" if math.isinf(self.leakage_bits) else f"{_up(self.leakage_bits):g}"
        if self.design is None or rho == 0.0:
            return (
                f"At {bits} bits of leakage this certificate guarantees nothing: a reconstruction of the "
                f"{self.representation} may be as exact as one likes (ρ* = 0)."
            )
        text = (
            f"With confidence {self.confidence:g}, every attack on the {self.representation} of a training record, at "
            f"{bits} bits of leakage, has a root mean squared error of at least {rho:.3f} times that of the best guess "
            f"without the model (ρ* relative to {self.normaliser}); that is at least "
            f"{_down(self.rmse_per_coordinate):g} per coordinate"
        )
        if self.psnr is not None:
            text += f", a PSNR of at most {math.ceil(self.psnr * 100) / 100:g} dB"
        return text + ". It is an average over the source: a single record can be reconstructed better."


def _up(value: float, digits: int = 4) -> float:
    """Round up to a number of significant digits."""
    return _round(value, digits, math.ceil)


def _down(value: float, digits: int = 4) -> float:
    """Round down to a number of significant digits."""
    return _round(value, digits, math.floor)


def _round(value: float, digits: int, towards: Any) -> float:
    if value == 0.0 or not math.isfinite(value):
        return value
    places = digits - 1 - math.floor(math.log10(abs(value)))
    if abs(places) > 300:  # the power of ten would overflow
        return value
    return float(towards(value * 10.0**places) / 10.0**places)


@dataclass(frozen=True, kw_only=True)
class SourceCertificate:
    """How uncertain the records are in a representation: certified converses and all they depend on.

    All designs hold simultaneously with probability at least 1 − α over the two samples.

    Attributes:
        designs: the converses; the bound is the largest at each leakage.
        trace: the reference scale.
        representation: what the certificate is about.
        reference: D_perp, the sample that fixed everything chosen.
        estimation: D_est, the disjoint sample that was measured.
        alpha: probability that some design is above the truth.
        alpha_split: how α is divided over kinds of designs.
        seed: of everything random.
        settings: the options that produced the designs, for the record.
        assumptions: what the guarantee rests on.
        library_version: that made the file.
        diagnostics: what each design's value is made of, in the order of ``designs``; None where a design has none,
            empty where no design has. They explain, and no bound depends on them.
        schema_version: of the file's meaning.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    designs: tuple[Annotated[BlockDesign | ReplicaDesign, Field(discriminator="kind")], ...]
    trace: TraceScale
    representation: RepresentationDescriptor
    reference: SampleSummary
    estimation: SampleSummary
    alpha: float
    alpha_split: Mapping[str, float]
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    library_version: str = ""
    diagnostics: tuple[DesignDiagnostics | None, ...] = ()
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        _validate.fraction("alpha", self.alpha)
        if not self.designs:
            raise InvalidValueError("A certificate needs at least one design.")
        if math.fsum(self.alpha_split.values()) > self.alpha * (1.0 + 1e-12):
            raise InvalidValueError(f"alpha_split {dict(self.alpha_split)} spends more than alpha = {self.alpha:g}.")
        if not self.alpha_split or min(self.alpha_split.values()) <= 0.0:
            raise InvalidValueError(f"alpha_split must name positive shares. Found {dict(self.alpha_split)}.")
        for name, sample, least in (("reference", self.reference, 0), ("estimation", self.estimation, 1)):
            _validate.integer(f"{name}.n", sample.n, minimum=least)
        descriptor = self.representation
        _validate.integer("representation.dimension", descriptor.dimension, minimum=1)
        _validate.positive("representation.squared_diameter", descriptor.squared_diameter)
        if self.confidence <= 0.0:
            raise InvalidValueError(
                f"The confidence would be {self.confidence:g}: alpha and, with normaliser='ucb', trace_level must add "
                "up to less than 1."
            )
        digest = RepresentationDescriptor.digest_of(
            **{f.name: getattr(descriptor, f.name) for f in fields(descriptor) if f.name != "digest"}
        )
        if digest != descriptor.digest:
            raise InvalidValueError("The representation's digest does not fit its description.")
        self._check_possible()
        if self.diagnostics:
            self._check_diagnostics()

    def _check_possible(self) -> None:
        """Guessing E z errs by tr Σ = E‖z − z'‖²/2 <= B/2: a converse above that is false, whatever the data."""
        most = 0.5 * min(self.representation.squared_diameter, self.trace.squared_diameter)
        for position, design in enumerate(self.designs):
            error = self.trace.scale * design.distortion(0.0)
            if not error <= most * (1.0 + 1e-6):
                raise InvalidValueError(
                    f"designs.{position} promises a squared error of {error:.6g} at zero leakage, but the best guess "
                    f"without the model errs by at most half the representation's squared diameter, {most:.6g}. Either "
                    "the declared range is not true of the records, or the file was made up."
                )

    def _check_diagnostics(self) -> None:
        if len(self.diagnostics) != len(self.designs):
            raise InvalidValueError(
                f"Expected diagnostics for each of the {len(self.designs)} designs, or none at all. "
                f"Found {len(self.diagnostics)}."
            )
        for position, (design, parts) in enumerate(zip(self.designs, self.diagnostics, strict=True)):
            if parts is None:
                continue
            value = value_at_zero(design)
            if not math.isclose(parts.certified, value, rel_tol=1e-9, abs_tol=1e-12):
                raise InvalidValueError(
                    f"diagnostics.{position} are of another design: they certify {parts.certified!r} at zero leakage, "
                    f"designs.{position} {value!r}."
                )
            if parts.n != self.estimation.n:
                raise InvalidValueError(
                    f"diagnostics.{position} are of another sample: n = {parts.n}, estimation.n = {self.estimation.n}."
                )

    @property
    def confidence(self) -> float:
        """Probability that every ρ* of this certificate holds: 1 − α, less δ where tr Σ is replaced by its bound."""
        spent = self.alpha + (self.trace.level if self.trace.normaliser == "ucb" else 0.0)
        return round(1.0 - spent, 12)

    @property
    def highest_rho(self) -> float:
        """ρ* at zero leakage: the highest floor that this certificate can support."""
        return self.bound(0.0).rho

    def bound(self, leakage_bits: float) -> ReconstructionBound:
        """The reconstruction bound at a leakage γ.

        Args:
            leakage_bits: γ in bits, in [0, inf].

        Raises:
            InvalidValueError: γ is negative or NaN.
        """
        if not leakage_bits >= 0.0:
            _validate.non_negative("leakage_bits", leakage_bits)
        best, winner = 0.0, None
        for design in self.designs:
            distortion = design.distortion(leakage_bits)
            if distortion > best:
                best, winner = distortion, design
        trace = self.trace
        ratio = best * trace.scale / trace.reference
        return ReconstructionBound(
            leakage_bits=leakage_bits,
            rho=min(1.0, math.sqrt(ratio)),
            mse=trace.scale * best,
            dimension=self.representation.dimension,
            design=winner,
            confidence=self.confidence,
            normaliser=trace.label,
            representation=self.representation.name,
            peak=self.representation.peak,
        )

    def leakage_budget(self, min_rho: float) -> float:
        """The largest leakage at which ρ* is still at least ``min_rho``, in bits; exact inverse on the safe side.

        Args:
            min_rho: the floor, in (0, 1].

        Raises:
            InvalidValueError: ``min_rho`` outside (0, 1].
            FloorUnreachableError: ρ* is below the floor even at zero leakage.
        """
        floor = _validate.positive("min_rho", min_rho)
        if floor > 1.0:
            raise InvalidValueError(f"Expected min_rho in (0, 1]. Found {min_rho!r}.")
        highest = self.bound(0.0).rho
        if highest < floor:
            raise FloorUnreachableError(
                f"min_rho = {min_rho:g} is above what this certificate supports: ρ* at zero leakage is "
                f"{math.floor(highest * 1e4) / 1e4:g}. Choose a floor below that, or make a certificate from more "
                "estimation records."
            )
        distortion = floor * floor * self.trace.reference / self.trace.scale
        budget = min(1e300, max(0.0, max(design.leakage_bits(distortion) for design in self.designs)))
        step = 2.0**-52
        while budget > 0.0 and self.bound(budget).rho < floor:
            budget = max(0.0, budget * (1.0 - step) - 5e-324)
            step = min(2.0 * step, 0.5)
        return budget

    def winners(self) -> tuple[Winner, ...]:
        """Which design gives the bound in which range of leakage: ranges from 0 on, without a gap, in bits.

        The last one ends where nothing is guaranteed any more; empty if nothing is guaranteed at any leakage.
        """
        return winners(self.designs)

    def rho_with_more_records(self, leakage_bits: float, factor: float = 2.0) -> float | None:
        """About the ρ* that ``factor`` times as many estimation records would certify: an estimate, never a bound.

        Margins are scaled by their rates in n, and so is the loss to sums of records with themselves; the source's
        chance and all else stay as they are. Designs without diagnostics count as they are.

        Args:
            leakage_bits: γ in bits, in [0, inf].
            factor: how many times as many estimation records, at least 1.

        Returns:
            The estimate, or None where no design has diagnostics.

        Raises:
            InvalidValueError: ``factor`` is below 1, or γ is negative or NaN.
        """
        if not any(self.diagnostics):
            return None
        designs = tuple(
            design if parts is None else predicted(design, parts, factor)
            for design, parts in zip(self.designs, self.diagnostics, strict=True)
        )
        return replace(self, designs=designs, diagnostics=()).bound(leakage_bits).rho

    def check_representation(self, representation: Representation) -> None:
        """Refuse a representation that is not the one this certificate is about.

        Args:
            representation: such as the one in which an attack's error is measured.

        Raises:
            CertificateError: its digest differs: another kind, other settings, other weights or another range.
        """
        try:
            found = representation.describe(self.representation.record_shape)
        except ReconboundError as error:
            raise CertificateError(
                f"The certificate is about {self.representation.name} of records of shape "
                f"{self.representation.record_shape}, which this representation does not take: {error}"
            ) from error
        if found.digest == self.representation.digest:
            return
        raise CertificateError(
            f"The certificate is about {self.representation.name} {self.representation.parameters}, not about "
            f"{found.name} {found.parameters}. Use the same representation, or make a certificate for this one."
        )

    @property
    def digest(self) -> str:
        """SHA-256 over the content."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return _without_empty(content)

    def to_json(self) -> str:
        """The file's text."""
        content = self._content()
        return json.dumps(
            {"format": _FORMAT, "digest": _digest(content), **content}, indent=1, sort_keys=False, allow_nan=False
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the certificate; a reader sees the old file or the whole new one, whatever happens.

        Returns:
            The path.
        """
        target = Path(path)
        text = self.to_json()
        try:
            _atomic.write_text(target, text + "\n")
        except OSError as error:
            raise CertificateError(
                f"The certificate could not be written to {target}: {error}. Choose a folder that can be written to."
            ) from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SourceCertificate:
        """Read and validate a certificate; nothing in the file is executed.

        Raises:
            CertificateError: the file is missing, not a certificate, truncated, altered or too new.
        """
        source = Path(path)
        try:
            text = source.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise CertificateError(
                f"There is no certificate at {source}. Make one with `reconbound certify`."
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise CertificateError(
                f"{source} cannot be read as a certificate: {error}. Give the path of a JSON file made by "
                "`reconbound certify`."
            ) from error
        return cls.from_json(text, name=str(source))

    @classmethod
    def from_json(cls, text: str, *, name: str = "The text") -> SourceCertificate:
        """Validate a certificate's text; ``name`` is used in the messages."""

        def refuse_constant(constant: str) -> None:
            raise ValueError(f"it holds {constant}")

        def refuse_overflow(digits: str) -> float:
            number = float(digits)
            if math.isinf(number):
                raise ValueError(f"it holds {digits[:20]}, beyond any number")
            return number

        def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(pairs)
            if len(result) != len(pairs):
                raise ValueError("a key occurs twice")
            return result

        try:
            content = json.loads(
                text,
                parse_constant=refuse_constant,
                parse_float=refuse_overflow,
                object_pairs_hook=refuse_duplicates,
            )
            _digest(content)  # deep nesting may only fail here
        except (ValueError, RecursionError) as error:
            what = "is empty" if not text.strip() else f"is not whole JSON ({error})"
            raise CertificateError(f"{name} {what}: it is truncated or not a certificate. {_REMEDY}") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise CertificateError(
                f"{name} is not a reconstruction certificate (no format {_FORMAT!r}). Give the path of a file made by "
                "`reconbound certify`."
            )
        version = content.get("schema_version")
        if isinstance(version, bool) or not isinstance(version, int):
            raise CertificateError(
                f"{name} is not a valid certificate: schema_version is {version!r}, not a whole number. {_REMEDY}"
            )
        if version > SCHEMA_VERSION:
            raise CertificateError(
                f"{name} has schema version {version}; this library reads up to {SCHEMA_VERSION}. "
                "Update opacus_reconbound."
            )
        recorded = content.pop("digest", None)
        if recorded != _digest(_without_empty(content)):
            raise CertificateError(
                f"{name} was altered after it was made (its digest does not fit its content). {_REMEDY}"
            )
        try:
            # JSON has one kind of sequence and of number; strictness is about everything else
            return _adapter().validate_json(json.dumps(content))
        except (ValidationError, InvalidValueError, OverflowError) as error:
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in first["loc"]) or "the file"
                reason = f"{where}: {first['msg']}"
            else:
                reason = str(error)
            raise CertificateError(f"{name} is not a valid certificate: {reason.rstrip('.')}. {_REMEDY}") from error

    def explain(self) -> str:
        """The certificate in about ten lines, figures rounded to the safe side.

        ρ* at some leakages, which design gives the bound where, what limits that design (margins, the diagonal, the
        Monte Carlo), and about what more estimation records would bring.
        """
        return describe(self)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[SourceCertificate]:
    return TypeAdapter(SourceCertificate)


def _without_empty(content: dict[str, Any]) -> dict[str, Any]:
    """The content without optional fields that are empty: what is written and signed."""
    return {name: value for name, value in content.items() if name != "diagnostics" or value}


def _digest(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
