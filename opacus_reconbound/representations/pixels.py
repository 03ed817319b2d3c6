"""Raw values: squared error over the pixels (or any other raw coordinates) of a record."""

from __future__ import annotations

import math

import torch

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations.base import Representation, RepresentationDescriptor

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

    def __init__(self, value_range: tuple[float, float] = (0.0, 255.0)) -> None:
        super().__init__()
        low = _validate.finite("value_range[0]", value_range[0])
        high = _validate.finite("value_range[1]", value_range[1])
        if not low < high:
            raise InvalidValueError(f"Expected value_range to be (low, high) with low < high. Found {value_range!r}.")
        self.value_range = (low, high)

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
        low, high = self.value_range
        least, largest = float(records.min()), float(records.max())
        if least < low or largest > high:
            raise DataError(
                f"The records hold values from {least:g} to {largest:g}, outside the declared value_range "
                f"({low:g}, {high:g}). Declare the range that values can take in advance, as in "
                "Pixels(value_range=(0, 1)), or pass the raw 8-bit images."
            )
        if records.is_floating_point() and self.value_range == (0.0, 255.0) and largest <= 1.0:
            raise DataError(
                "The records are floating-point numbers in [0, 1], but the declared value_range is (0, 255). "
                "Say Pixels(value_range=(0, 1)), or pass the raw 8-bit images."
            )
