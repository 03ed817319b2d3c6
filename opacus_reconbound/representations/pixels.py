"""Raw values: squared error over the pixels (or any other raw coordinates) of a record."""

from __future__ import annotations

import math

import torch

from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.representations.base import (
    EIGHT_BIT,
    Representation,
    RepresentationDescriptor,
    check_range,
    checked_range,
)

__all__ = ["Pixels"]


class Pixels(Representation):
    """The identity: a record is its raw values.

    Args:
        value_range: the least and the largest value that a record's entry can take, known in advance. The default
            is the 8-bit grid. For images scaled to [0, 1] say ``Pixels(value_range=(0, 1))``.

    Example:
        >>> Pixels().describe((28, 28)).squared_diameter
        50979600.0
    """

    value_range: tuple[float, float]
    keeps_values = True
    uses_range = True

    def __init__(self, value_range: tuple[float, float] = EIGHT_BIT) -> None:
        super().__init__()
        checked = checked_range(value_range)
        if checked is None:
            raise InvalidValueError("Expected value_range to be (low, high). Found None.")
        self.value_range = checked

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """Flatten to float32 (n, d)."""
        return records.reshape(len(records), -1).to(torch.float32)

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape; B = (high − low)² d."""
        dimension = math.prod(record_shape)
        low, high = self.value_range
        return RepresentationDescriptor.create(
            name="pixels",
            parameters={"value_range": [low, high]},
            record_shape=tuple(record_shape),
            dimension=dimension,
            squared_diameter=(high - low) ** 2 * dimension,
            peak=high - low,
        )

    def check(self, records: torch.Tensor) -> None:
        """Refuse values outside the declared range, and fractions in [0, 1] under the 8-bit range."""
        check_range(records, self.value_range, "Pixels(value_range=(0, 1))")

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The records as they are."""
        return records

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a record."""
        return tuple(record_shape)

    def operator_norm(self, record_shape: tuple[int, ...]) -> float:
        """1: distances are kept."""
        return 1.0
