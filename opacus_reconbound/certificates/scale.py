"""The reference scale tr Σ: its point estimate, and an upper bound with stated confidence (theory, section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from opacus_reconbound import _validate
from opacus_reconbound.certificates.devices import float64_device, rows_at_once, to_float64
from opacus_reconbound.certificates.margins import empirical_bernstein
from opacus_reconbound.errors import DataError, InvalidValueError

__all__ = ["Normaliser", "TraceScale", "check_resolution", "trace_point", "trace_upper"]

Normaliser = Literal["point", "ucb", "declared"]


@dataclass(frozen=True, kw_only=True)
class TraceScale:
    """What the certificate's distortions are measured in, and what ρ* is relative to.

    Attributes:
        scale: the unit of the designs: tr Σ̂ of the reference sample. Squared error = scale × distortion.
        upper: an upper bound on tr Σ that holds with probability 1 − level.
        level: δ.
        pairs: disjoint pairs of reference records behind ``upper``.
        squared_diameter: B, the largest possible squared distance of two records.
        normaliser: which value ρ*² is relative to.
        declared: that value, where the user declared it.
    """

    scale: float
    upper: float
    level: float
    pairs: int
    squared_diameter: float
    normaliser: Normaliser = "point"
    declared: float | None = None

    def __post_init__(self) -> None:
        _validate.positive("trace.scale", self.scale)
        _validate.positive("trace.upper", self.upper)
        _validate.fraction("trace.level", self.level)
        _validate.positive("trace.squared_diameter", self.squared_diameter)
        if self.normaliser not in ("point", "ucb", "declared"):
            raise InvalidValueError(
                f"Expected normaliser to be 'point', 'ucb' or a declared tr Σ in squared data units. "
                f"Found {self.normaliser!r}."
            )
        if (self.declared is not None) != (self.normaliser == "declared"):
            raise InvalidValueError(
                f"A declared normaliser needs its value, and only it has one. Found normaliser={self.normaliser!r}, "
                f"declared={self.declared!r}."
            )
        if self.declared is not None:
            _validate.positive("trace.declared", self.declared)

    @property
    def reference(self) -> float:
        """The squared error that ρ* = 1 stands for."""
        if self.declared is not None:
            return self.declared
        return self.upper if self.normaliser == "ucb" else self.scale

    @property
    def label(self) -> str:
        """What ρ* is relative to, in words."""
        if self.normaliser == "ucb":
            return f"an upper bound on tr Σ (confidence {1 - self.level:g})"
        return "the declared tr Σ" if self.normaliser == "declared" else "the estimated tr Σ"


def trace_point(reference: torch.Tensor, chunk: int | None = None) -> tuple[torch.Tensor, float]:
    """Mean and trace of the covariance of a sample (normalised by n), in float64, one chunk at a time.

    Args:
        reference: (n, m), any floating dtype.
        chunk: records at a time; by default as many as fit into about 8 MiB.

    Returns:
        The mean (m,) in float64, on the host where the device has none, and tr Σ̂.

    Raises:
        DataError: the sample is constant.
    """
    rows = chunk or rows_at_once(reference.shape[1])
    parts = [reference[start : start + rows] for start in range(0, len(reference), rows)]
    total = to_float64(parts[0]).sum(dim=0)
    for part in parts[1:]:
        total += to_float64(part).sum(dim=0)
    mean = total / len(reference)
    trace = math.fsum(float((to_float64(part) - mean).square_().sum()) for part in parts) / len(reference)
    largest = max(abs(float(reference.max())), abs(float(reference.min())))
    if not trace > 0.0:
        raise DataError(
            "The reference records are all alike in this representation (tr Σ̂ is zero), so there is nothing to "
            "reconstruct. Check that the file holds the records that you mean."
        )
    check_resolution(trace, largest, reference.shape[1])
    return mean, trace


def check_resolution(trace: float, largest: float, dimension: int) -> None:
    """Raise ``DataError`` where float32 does not resolve a spread of tr Σ around values up to ``largest``."""
    rounding = dimension * (2.0**-24 * largest) ** 2  # of float32, in all coordinates
    if not trace > 1e8 * rounding:
        raise DataError(
            f"The records vary by {math.sqrt(trace):.3g} in all around values as large as {largest:.3g}, less than "
            "single precision resolves. Subtract a constant that is fixed in advance, or check that the file holds the "
            "records that you mean."
        )


def trace_upper(reference: torch.Tensor, *, level: float, squared_diameter: float, seed: int) -> tuple[float, int]:
    """Upper bound on tr Σ with probability at least 1 − level, from random disjoint pairs of the reference sample.

    Y = ‖z − z'‖²/2 has mean tr Σ and range [0, B/2]; the margin is the empirical Bernstein inequality (Maurer and
    Pontil 2009, Theorem 4).

    Args:
        reference: (n, m).
        level: δ.
        squared_diameter: B.
        seed: of the pairing.

    Returns:
        The bound, never above B/2, and the number of pairs.

    Raises:
        DataError: two records are further apart than B allows.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(reference), generator=generator).to(reference.device)
    pairs = len(reference) // 2
    rows = rows_at_once(reference.shape[1])
    y = torch.empty(pairs, dtype=torch.float64, device=float64_device(reference.device))
    for start in range(0, pairs, rows):
        stop = min(start + rows, pairs)
        difference = to_float64(reference[order[start:stop]])
        difference -= to_float64(reference[order[pairs + start : pairs + stop]])
        y[start:stop] = 0.5 * difference.square_().sum(dim=1)
    if float(y.max()) > 0.5 * squared_diameter * (1.0 + 1e-5):
        raise DataError(
            f"Two reference records have a squared distance of {2.0 * float(y.max()):.6g}, more than the "
            f"representation's range B = {squared_diameter:.6g} allows. Declare a true range."
        )
    margin = empirical_bernstein(
        variance=float(y.var(correction=1)), value_range=0.5 * squared_diameter, n=pairs, level=level
    )
    return min(float(y.mean()) + margin, 0.5 * squared_diameter) * (1.0 + 1e-12), pairs
