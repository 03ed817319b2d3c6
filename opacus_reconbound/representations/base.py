"""Representations Ψ: what counts as a reconstruction.

A representation maps a record to a vector; the bound is on the squared distance between vectors. It must be fixed
independently of the protected records and of the training run. Its descriptor goes into every certificate, so that a
certificate says exactly what it is about. Representations compose: ``Crop(8, 8, 12, 12) | Downsample(6)``.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from opacus_reconbound.representations.composition import Composition

__all__ = [
    "EIGHT_BIT",
    "Representation",
    "RepresentationDescriptor",
    "check_range",
    "checked_range",
    "double",
    "tensor_digest",
]

EIGHT_BIT = (0.0, 255.0)


@dataclass(frozen=True, kw_only=True)
class RepresentationDescriptor:
    """What a certificate says about its representation.

    Attributes:
        name: the kind of representation, such as ``"pixels"``.
        parameters: its settings, as canonical JSON text.
        record_shape: the shape of one raw record.
        dimension: m, the number of coordinates of the vector.
        squared_diameter: B, an upper bound on the squared distance of two vectors, known in advance.
        peak: the largest difference within one coordinate, for PSNR; None where PSNR has no meaning.
        digest: SHA-256 over all of the above.
    """

    name: str
    parameters: str
    record_shape: tuple[int, ...]
    dimension: int
    squared_diameter: float
    peak: float | None
    digest: str

    @staticmethod
    def digest_of(
        *,
        name: str,
        parameters: str,
        record_shape: tuple[int, ...],
        dimension: int,
        squared_diameter: float,
        peak: float | None,
    ) -> str:
        """The digest of a descriptor with these fields."""
        fields = [name, parameters, list(record_shape), dimension, squared_diameter, peak]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    @classmethod
    def create(
        cls,
        *,
        name: str,
        parameters: dict[str, Any],
        record_shape: tuple[int, ...],
        dimension: int,
        squared_diameter: float,
        peak: float | None,
    ) -> RepresentationDescriptor:
        """A descriptor with its digest filled in."""
        text = json.dumps(parameters, sort_keys=True)
        digest = cls.digest_of(
            name=name,
            parameters=text,
            record_shape=record_shape,
            dimension=dimension,
            squared_diameter=squared_diameter,
            peak=peak,
        )
        return cls(
            name=name,
            parameters=text,
            record_shape=record_shape,
            dimension=dimension,
            squared_diameter=squared_diameter,
            peak=peak,
            digest=digest,
        )


class Representation(torch.nn.Module, ABC):
    """A fixed map from a batch of raw records to a batch of vectors.

    A subclass implements ``forward``, ``describe`` and ``check``. The rest has defaults that serve composition: what a
    following stage receives, and what is known of it in advance.

    Attributes:
        value_range: least and largest value that an entry of a record can take; None where it is not declared.
        keeps_values: whether the output's entries are entries of the record, or means of them, and so in its range.
        uses_range: whether the map or its range B depends on ``value_range``.
    """

    value_range: tuple[float, float] | None = None
    keeps_values: bool = False
    uses_range: bool = False

    @abstractmethod
    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """Map records (n, *record_shape) to float32 vectors (n, m), one record at a time in effect."""

    @abstractmethod
    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape."""

    @abstractmethod
    def check(self, records: torch.Tensor) -> None:
        """Raise ``DataError`` where these records are not what the representation is declared for."""

    def __or__(self, other: Representation) -> Composition:
        """First this representation, then ``other``."""
        from opacus_reconbound.representations.composition import Composition

        return Composition(self, other)

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """What the next stage of a composition receives, (n, *output_shape)."""
        vectors: torch.Tensor = self(records)
        return vectors

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one transformed record."""
        return (self.describe(record_shape).dimension,)

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float] | None:
        """An interval that holds every entry of the output; None where none is known."""
        return self.range_or_default if self.keeps_values else None

    def operator_norm(self, record_shape: tuple[int, ...]) -> float | None:
        """An L with ‖Ψ(x) − Ψ(y)‖ <= L ‖x − y‖ for all records; None where none is known."""
        return None

    @property
    def range_or_default(self) -> tuple[float, float]:
        """The declared range of a record's entries, or the 8-bit grid."""
        return EIGHT_BIT if self.value_range is None else self.value_range

    @property
    def needs_fit(self) -> bool:
        """Whether something has to be fixed on the reference sample first (``fit``)."""
        return False

    def fit(self, reference: Iterable[torch.Tensor]) -> Representation:
        """This representation with everything fixed that was left to the reference sample D_perp.

        Args:
            reference: chunks of raw records of D_perp; iterated once for each stage that needs it.
        """
        return self


def checked_range(value_range: tuple[float, float] | None) -> tuple[float, float] | None:
    """A declared (low, high) with low < high, or None."""
    if value_range is None:
        return None
    try:
        first, second = value_range
    except (TypeError, ValueError):
        raise InvalidValueError(f"Expected value_range to be (low, high). Found {value_range!r}.") from None
    low, high = _validate.finite("value_range[0]", first), _validate.finite("value_range[1]", second)
    if not low < high:
        raise InvalidValueError(f"Expected value_range to be (low, high) with low < high. Found {value_range!r}.")
    return low, high


def check_range(records: torch.Tensor, value_range: tuple[float, float], example: str) -> None:
    """Refuse values outside the declared range, and fractions in [0, 1] under the 8-bit range.

    Args:
        records: raw records.
        value_range: as declared.
        example: how to declare another one, for the message.
    """
    low, high = value_range
    least, largest = float(records.min()), float(records.max())
    if least < low or largest > high:
        raise DataError(
            f"The records hold values from {least:g} to {largest:g}, outside the declared value_range "
            f"({low:g}, {high:g}). Declare the range that values can take in advance, as in "
            f"{example}, or pass the raw 8-bit images."
        )
    if records.is_floating_point() and value_range == EIGHT_BIT and largest <= 1.0:
        raise DataError(
            "The records are floating-point numbers in [0, 1], but the declared value_range is (0, 255). "
            f"Say {example}, or pass the raw 8-bit images."
        )


def double(records: torch.Tensor) -> torch.Tensor:
    """The records in float64, or in float32 on a device without it."""
    return records.to(torch.float32 if records.device.type == "mps" else torch.float64)


def tensor_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over named tensors: names, types, shapes and values; the order does not matter."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        whole.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()
