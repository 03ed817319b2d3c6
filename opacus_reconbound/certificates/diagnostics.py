"""What a design is made of: its value without margins, what each margin costs, and what more records would bring.

All values are squared distortions at zero leakage in units of tr Σ, before the positive part is taken: the intercept
of a replica design, k/(2πe) 2^{2h/k} − ν² of a block design. None of them enters the bound; they explain it.

The diagonal. In-sample values count every record, or tuple of records, with itself. In a sample of k times as many
records that share σ of the double sum shrinks to about σ/k, so that the value rises by about −ε ln(1 − σ + σ/k) for a
replica design; the entropy of a block's mixture rises by about half of −ln(1 − σ + σ/k), to first order in σ/k
(h(f) − E h(f̂) ~ (E φ/f̂ − 1)/(2n), and σ = E φ/(n f̂) is the share of a draw's density that its own centre makes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from opacus_reconbound import _validate
from opacus_reconbound.certificates.designs import BlockDesign, Design
from opacus_reconbound.certificates.margins import binary_entropy_bits
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = [
    "DesignDiagnostics",
    "diagonal_loss",
    "gap_exponent",
    "predicted",
    "repeated_share",
    "value_at_zero",
]

_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class DesignDiagnostics:
    """The parts of one certified value, in units of tr Σ at zero leakage.

    Attributes:
        n: estimation records.
        point: the value without any margin.
        in_sample: the same after the Monte Carlo's margin, if there is one, and the arithmetic's allowance.
        certified: the value of the design, all margins subtracted. By chance it can exceed ``in_sample``, where the
            reference potential beats the one fitted on the sample.
        sampling_margin: what the margin of a sample mean costs (t; for blocks McDiarmid's).
        range_margin: the part of ``sampling_margin`` that falls like 1/n instead of 1/√n.
        gap_margin: what Lemma 3 costs, y* − ȳ; 0 for blocks.
        gap_exponent: ``gap_margin`` falls about like n to the minus this; between 1 where ȳ is small and less than 1/2.
        diagonal_share: the share of the in-sample sum that records make with themselves, in [0, 1]; None where it was
            not measured.
    """

    n: int
    point: float
    in_sample: float
    certified: float
    sampling_margin: float
    range_margin: float = 0.0
    gap_margin: float = 0.0
    gap_exponent: float = 0.5
    diagonal_share: float | None = None

    def __post_init__(self) -> None:
        _validate.integer("diagnostics.n", self.n, minimum=1)
        for name in ("point", "in_sample", "certified"):
            _validate.finite(f"diagnostics.{name}", getattr(self, name))
        for name in ("sampling_margin", "range_margin", "gap_margin", "gap_exponent"):
            _validate.finite(f"diagnostics.{name}", _validate.non_negative(f"diagnostics.{name}", getattr(self, name)))
        if not self.in_sample <= self.point + _TOLERANCE:
            raise InvalidValueError(
                f"Expected diagnostics with in_sample <= point. Found {self.in_sample!r} and {self.point!r}."
            )
        if self.range_margin > self.sampling_margin + _TOLERANCE:
            raise InvalidValueError(
                f"Expected diagnostics.range_margin to be a part of sampling_margin = {self.sampling_margin!r}. "
                f"Found {self.range_margin!r}."
            )
        if self.diagonal_share is not None and not 0.0 <= self.diagonal_share <= 1.0:
            raise InvalidValueError(f"Expected diagnostics.diagonal_share in [0, 1]. Found {self.diagonal_share!r}.")

    @property
    def monte_carlo_loss(self) -> float:
        """Point − in-sample value: the Monte Carlo's margin and the arithmetic's allowance."""
        return max(0.0, self.point - self.in_sample)

    @property
    def cap_loss(self) -> float:
        """What remains: the cap on the reference potential, which cuts off outermost records."""
        return max(0.0, self.in_sample - self.certified - self.sampling_margin - self.gap_margin)


def value_at_zero(design: Design) -> float:
    """The distortion at zero leakage before its positive part is taken, in units of tr Σ."""
    if isinstance(design, BlockDesign):
        return _power(design.block_size, design.entropy_bits) - design.dither
    return design.intercept


def diagonal_loss(design: Design, diagnostics: DesignDiagnostics) -> float | None:
    """About what the records' sums with themselves cost, in units of tr Σ.

    Inf where they are the whole sum, None where their share was not measured.
    """
    share = diagnostics.diagonal_share
    if share is None:
        return None
    if share >= 1.0:
        return math.inf
    if isinstance(design, BlockDesign):
        return _raised(design, diagnostics.point, -0.5 * math.log1p(-share))
    return -design.temperature * math.log1p(-share)


def predicted(design: Design, diagnostics: DesignDiagnostics, factor: float) -> Design:
    """About the design that ``factor`` times as many estimation records would give. An estimate, never a bound.

    The margins are scaled by their rates, the diagonal's share is divided by the factor, and the Monte Carlo's margin,
    the arithmetic's allowance and the cap stay as they are. Chance is left out.

    Args:
        design: the design.
        diagnostics: its parts.
        factor: how many times as many records, at least 1.

    Raises:
        InvalidValueError: ``factor`` is below 1.
    """
    if not _validate.finite("factor", factor) >= 1.0:
        raise InvalidValueError(f"Expected factor >= 1, how many times as many records. Found {factor!r}.")
    share = diagnostics.diagonal_share or 0.0
    gain = -math.log1p(share / factor - share)
    if isinstance(design, BlockDesign):
        n = diagnostics.n
        margin = max(
            0.0, _entropy(design, diagnostics.in_sample) - design.entropy_bits
        )  # McDiarmid's, falls like H_b(1/n) √n
        smaller = margin * math.sqrt(factor) * binary_entropy_bits(1.0 / (factor * n)) / binary_entropy_bits(1.0 / n)
        entropy = design.entropy_bits + margin - smaller + nats_to_bits(0.5 * gain)
        most = _entropy(design, 1.0)  # a Gaussian block's: no value at zero leakage is above tr Σ
        return replace(design, entropy_bits=max(design.entropy_bits, min(entropy, most)))
    root = diagnostics.sampling_margin - diagnostics.range_margin
    saved = root * (1.0 - factor**-0.5) + diagnostics.range_margin * (1.0 - 1.0 / factor)
    saved += diagnostics.gap_margin * (1.0 - factor**-diagnostics.gap_exponent)
    intercept = design.intercept + saved + design.temperature * gain
    return replace(design, intercept=max(design.intercept, min(intercept, 1.0)))


def repeated_share(members: torch.Tensor, most: int = 20_000) -> float | None:
    """The share of tuples in which some record occurs twice: what many replicas have for a diagonal.

    Args:
        members: record numbers of independent draws from the law of m-tuples, integers (N, m).
        most: tuples to look at.
    """
    if len(members) == 0:
        return None
    ordered = members[:most].sort(dim=1).values
    return float((ordered[:, 1:] == ordered[:, :-1]).any(dim=1).double().mean())


def gap_exponent(observed: float, bound: float, bound_at_twice: float) -> float:
    """How y* − ȳ falls with n: log2 of its ratio to that with twice as many records, all else equal; in [0, 1]."""
    if not bound >= bound_at_twice > observed:
        return 0.5
    return min(1.0, math.log2((bound - observed) / (bound_at_twice - observed)))


def _power(block_size: int, entropy_bits: float) -> float:
    """k/(2πe) 2^{2h/k}."""
    return block_size / (2.0 * math.pi * math.e) * math.pow(2.0, min(2.0 * entropy_bits / block_size, 1000.0))


def _entropy(design: BlockDesign, value: float) -> float:
    """The entropy in bits with which the block design would have this value at zero leakage; −inf where none would."""
    power = 2.0 * math.pi * math.e * (value + design.dither) / design.block_size
    return 0.5 * design.block_size * math.log2(power) if power > 0.0 else -math.inf


def _raised(design: BlockDesign, value: float, nats: float) -> float:
    """How much the value grows with the entropy."""
    return (value + design.dither) * math.expm1(2.0 * nats / design.block_size)
