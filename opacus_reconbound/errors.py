"""The library's exceptions. Each message says what is wrong, which value it was, and what to do."""

from __future__ import annotations

__all__ = [
    "ReconboundError",
    "InvalidValueError",
    "DataError",
    "OverlapError",
    "CertificateError",
    "FloorUnreachableError",
    "CalibrationError",
    "AccountingError",
    "LedgerError",
    "ReconstructionBudgetExceeded",
]


class ReconboundError(Exception):
    """Base class of everything this library raises on purpose."""


class InvalidValueError(ReconboundError, ValueError):
    """An argument lies outside the range in which the mathematics holds."""


class DataError(ReconboundError, ValueError):
    """The records cannot carry a certificate: not finite, constant, too few, of the wrong shape or range."""


class OverlapError(DataError):
    """The reference sample and the estimation sample share records, so the certificate would not hold."""


class CertificateError(ReconboundError, ValueError):
    """A certificate file is missing, truncated, altered, too new, or about something else."""


class FloorUnreachableError(ReconboundError, ValueError):
    """The requested ρ* is above what the certificate supports even when training reveals nothing."""


class CalibrationError(ReconboundError, ValueError):
    """No noise, number of steps or batch size meets the target.

    Attributes:
        least_bits: the least leakage that can be had, in bits, or None where that is not known.
        at: where it is had, such as "batch_size = 1".
    """

    def __init__(self, message: str, *, least_bits: float | None = None, at: str = "") -> None:
        super().__init__(message)
        self.least_bits = least_bits
        self.at = at


class AccountingError(ReconboundError, RuntimeError):
    """What runs is not what is accounted; the leakage figure would be wrong."""


class LedgerError(ReconboundError, RuntimeError):
    """A ledger file is missing, damaged, too new, of other records, or not the one that a checkpoint remembers."""


class ReconstructionBudgetExceeded(ReconboundError, RuntimeError):  # noqa: N818 - a public name others rely on
    """The next step would take the leakage above the budget. The step was not applied and not charged.

    Attributes:
        leakage_bits: the bits charged so far.
        next_bits: what they would have become, had the step been taken.
        budget_bits: the limit.
    """

    def __init__(self, message: str, *, leakage_bits: float, next_bits: float, budget_bits: float) -> None:
        super().__init__(message)
        self.leakage_bits = leakage_bits
        self.next_bits = next_bits
        self.budget_bits = budget_bits
