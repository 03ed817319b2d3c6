"""Linear representations: parts of a record, coarse versions of it, any matrix. Each knows its range B exactly.

With records in [low, high]^d, w = high − low, and z = A x, the largest squared distance is B <= w² min(‖A‖₂² d,
Σ_i ‖a_i‖₁²), a_i the rows. For selections and area means it is w² m, for the orthonormal cosine transform w² d, and
both are attained.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations.base import (
    Representation,
    RepresentationDescriptor,
    check_range,
    checked_range,
    double,
    tensor_digest,
)
from opacus_reconbound.representations.images import Where, checked_where, image_layout

__all__ = ["Channels", "Coordinates", "Crop", "Downsample", "LinearMap", "LowFrequencies", "Mask"]

_ROUND_UP = 1.0 + 1e-9


class _Linear(Representation):
    """What the linear representations share; a subclass names itself, transforms, and states its sizes."""

    kind: str
    uses_range = True

    def __init__(self, value_range: tuple[float, float] | None) -> None:
        super().__init__()
        self.value_range = checked_range(value_range)

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the map depends on, apart from the range."""

    @abstractmethod
    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """A x in the record's own layout."""

    @abstractmethod
    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of A x."""

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """A x as float32 vectors (n, m)."""
        return self.transform(records).reshape(len(records), -1).to(torch.float32)

    def squared_diameter(self, record_shape: tuple[int, ...]) -> float:
        """B = w² m, for selections and means."""
        return self._width**2 * math.prod(self.output_shape(record_shape))

    def operator_norm(self, record_shape: tuple[int, ...]) -> float | None:
        """1, for selections, means of disjoint areas and rows of an orthogonal matrix."""
        return 1.0

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape; its peak is that of one value where values are kept."""
        shape = tuple(record_shape)
        return RepresentationDescriptor.create(
            name=self.kind,
            parameters=self.settings() | {"value_range": list(self.range_or_default)},
            record_shape=shape,
            dimension=math.prod(self.output_shape(shape)),
            squared_diameter=self.squared_diameter(shape),
            peak=self._width if self.keeps_values else None,
        )

    def check(self, records: torch.Tensor) -> None:
        """Refuse values outside the declared range, and fractions in [0, 1] under the 8-bit range."""
        check_range(records, self.range_or_default, f"{type(self).__name__}(..., value_range=(0, 1))")

    @property
    def _width(self) -> float:
        low, high = self.range_or_default
        return high - low


class Crop(_Linear):
    """A box of an image.

    Args:
        top: first row of the box.
        left: first column.
        height: rows.
        width: columns.
        channels: the channel axis of records with three axes: ``"first"``, ``"last"``, or ``"auto"``.
        value_range: least and largest value of an entry, known in advance; the 8-bit grid, or in a composition that
            of the next stage, unless given.

    Example:
        >>> Crop(8, 8, 12, 12).describe((28, 28)).dimension
        144
    """

    kind = "crop"
    keeps_values = True

    def __init__(
        self,
        top: int,
        left: int,
        height: int,
        width: int,
        *,
        channels: Where = "auto",
        value_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(value_range)
        self.top, self.left = _validate.integer("top", top), _validate.integer("left", left)
        self.height = _validate.integer("height", height, minimum=1)
        self.width = _validate.integer("width", width, minimum=1)
        self.channels = checked_where(channels)

    def settings(self) -> dict[str, Any]:
        """The box and the channel axis."""
        return {"box": [self.top, self.left, self.height, self.width], "channels": self.channels}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The record's layout with the box's sizes; refuses a box that does not lie inside."""
        layout = image_layout("crop", record_shape, self.channels)
        if self.top + self.height > layout.height or self.left + self.width > layout.width:
            raise DataError(
                f"The crop of rows {self.top} to {self.top + self.height - 1} and columns {self.left} to "
                f"{self.left + self.width - 1} lies outside images of {layout.height} × {layout.width}. Choose top, "
                "left, height, width inside them."
            )
        return layout.shape(layout.channels, self.height, self.width)

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The box as an image."""
        layout = image_layout("crop", tuple(records.shape[1:]), self.channels)
        rows, columns = slice(self.top, self.top + self.height), slice(self.left, self.left + self.width)
        return layout.records(layout.planes(records)[:, :, rows, columns])


class Channels(_Linear):
    """Some channels of an image.

    Args:
        indices: which channels, in order.
        channels: the channel axis: ``"first"``, ``"last"``, or ``"auto"``.
        value_range: see ``Crop``.
    """

    kind = "channels"
    keeps_values = True

    def __init__(self, *indices: int, channels: Where = "auto", value_range: tuple[float, float] | None = None) -> None:
        super().__init__(value_range)
        self.indices = _distinct("channels", indices)
        self.channels = checked_where(channels)

    def settings(self) -> dict[str, Any]:
        """The channels and their axis."""
        return {"indices": list(self.indices), "channels": self.channels}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The record's layout with fewer channels."""
        layout = image_layout("channels", record_shape, self.channels)
        if max(self.indices) >= layout.channels:
            raise DataError(f"Images of shape {tuple(record_shape)} have no channel {max(self.indices)}.")
        return layout.shape(len(self.indices), layout.height, layout.width)

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The image with these channels."""
        layout = image_layout("channels", tuple(records.shape[1:]), self.channels)
        return layout.records(layout.planes(records)[:, list(self.indices)])


class Coordinates(_Linear):
    """Some entries of a record, by their position in the flattened record.

    Args:
        indices: distinct positions, counted from 0.
        value_range: see ``Crop``.
    """

    kind = "coordinates"
    keeps_values = True
    positions: torch.Tensor

    def __init__(self, indices: Sequence[int], *, value_range: tuple[float, float] | None = None) -> None:
        super().__init__(value_range)
        self.indices = _distinct("indices", indices)
        self.register_buffer("positions", torch.tensor(self.indices, dtype=torch.int64))

    def settings(self) -> dict[str, Any]:
        """The positions, or their digest where they are many."""
        if len(self.indices) <= 256:
            return {"indices": list(self.indices)}
        return {"count": len(self.indices), "indices": tensor_digest({"indices": torch.tensor(self.indices)})}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(number of positions,)."""
        if max(self.indices) >= math.prod(record_shape):
            raise DataError(
                f"Records of shape {tuple(record_shape)} have {math.prod(record_shape)} entries; there is no entry "
                f"{max(self.indices)}. Positions are counted from 0."
            )
        return (len(self.indices),)

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The chosen entries, (n, m)."""
        return records.reshape(len(records), -1)[:, self.positions]


class Mask(_Linear):
    """A region: the entries of a record where a mask is true.

    Args:
        mask: booleans (or 0 and 1) in the shape of a record, or (height, width) for all channels of an image alike.
        channels: the channel axis, where the mask has none: ``"first"``, ``"last"``, or ``"auto"``.
        value_range: see ``Crop``.
    """

    kind = "mask"
    keeps_values = True
    mask: torch.Tensor

    def __init__(
        self, mask: ArrayLike, *, channels: Where = "auto", value_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__(value_range)
        array = np.array(mask)
        if array.ndim == 0 or array.dtype.kind not in "buif" or not np.isin(array, (0, 1)).all():
            raise InvalidValueError(
                f"Expected a mask of booleans in the shape of a record. Found {array.dtype} of shape {array.shape}."
            )
        if not array.any():
            raise InvalidValueError("The mask keeps nothing: it is false everywhere.")
        self.register_buffer("mask", torch.from_numpy(array.astype(bool)))
        self.channels = checked_where(channels)

    def settings(self) -> dict[str, Any]:
        """The mask's shape, size and digest."""
        return {
            "mask": tensor_digest({"mask": self.mask}),
            "shape": list(self.mask.shape),
            "kept": int(self.mask.sum()),
            "channels": self.channels,
        }

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(number of entries kept,)."""
        return (int(self._full(tuple(record_shape)).sum()),)

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The entries kept, (n, m)."""
        return records[:, self._full(tuple(records.shape[1:]))]

    def _full(self, record_shape: tuple[int, ...]) -> torch.Tensor:
        mask = self.mask
        if tuple(mask.shape) == record_shape:
            return mask
        if mask.ndim == 2 and len(record_shape) == 3:
            layout = image_layout("mask", record_shape, self.channels)
            if tuple(mask.shape) == (layout.height, layout.width):
                planes = mask.expand(1, layout.channels, layout.height, layout.width)
                return layout.records(planes)[0]
        raise DataError(f"The mask has shape {tuple(mask.shape)}, but records have {record_shape}. They must agree.")


class Downsample(_Linear):
    """A coarse image: each pixel the mean of an area.

    The areas are those of ``torch.nn.functional.adaptive_avg_pool2d``: disjoint where the size divides the image's,
    else overlapping by at most one row or column.

    Args:
        size: rows and columns of the coarse image; one number for both.
        channels: the channel axis of records with three axes: ``"first"``, ``"last"``, or ``"auto"``.
        value_range: see ``Crop``.
    """

    kind = "downsample"
    keeps_values = True

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        channels: Where = "auto",
        value_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(value_range)
        self.size = _two("size", size)
        self.channels = checked_where(channels)

    def settings(self) -> dict[str, Any]:
        """The size and the channel axis."""
        return {"size": list(self.size), "channels": self.channels}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The record's layout with the coarse sizes."""
        layout = image_layout("downsample", record_shape, self.channels)
        if self.size[0] > layout.height or self.size[1] > layout.width:
            raise DataError(
                f"downsample makes images smaller: {self.size[0]} × {self.size[1]} is not within images of "
                f"{layout.height} × {layout.width}."
            )
        return layout.shape(layout.channels, *self.size)

    def operator_norm(self, record_shape: tuple[int, ...]) -> float | None:
        """‖A‖₂² <= ‖A‖_∞ ‖A‖₁: rows sum to 1, columns to (areas that share a pixel, at most 2)/(least size)."""
        layout = image_layout("downsample", record_shape, self.channels)
        norm = 1.0
        for size, full in zip(self.size, (layout.height, layout.width), strict=True):
            norm *= (1.0 if full % size == 0 else 2.0) / (full // size)
        return math.sqrt(norm) * _ROUND_UP

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The coarse image, float64."""
        layout = image_layout("downsample", tuple(records.shape[1:]), self.channels)
        planes = double(layout.planes(records))
        return layout.records(torch.nn.functional.adaptive_avg_pool2d(planes, self.size))


class LowFrequencies(_Linear):
    """The lowest frequencies of the orthonormal discrete cosine transform (DCT-II).

    Args:
        count: frequencies kept in each direction, one number for both; for records with one axis that many in all.
        channels: the channel axis of records with three axes: ``"first"``, ``"last"``, or ``"auto"``.
        value_range: see ``Crop``.
    """

    kind = "dct"

    def __init__(
        self,
        count: int | tuple[int, int],
        *,
        channels: Where = "auto",
        value_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__(value_range)
        self.count = _two("count", count)
        self.channels = checked_where(channels)

    def settings(self) -> dict[str, Any]:
        """The number of frequencies and the channel axis."""
        return {"count": list(self.count), "channels": self.channels}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The record's layout with that many frequencies."""
        if len(record_shape) == 1:
            self._check_count(record_shape[0], record_shape[0])
            return (self.count[0],)
        layout = image_layout("dct", record_shape, self.channels)
        self._check_count(layout.height, layout.width)
        return layout.shape(layout.channels, *self.count)

    def squared_diameter(self, record_shape: tuple[int, ...]) -> float:
        """B = w² d: the transform keeps distances, and two constant records differ in the lowest frequency alone."""
        return self._width**2 * math.prod(record_shape) * _ROUND_UP

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float]:
        """± the largest norm of a record."""
        largest = max(map(abs, self.range_or_default)) * math.sqrt(math.prod(record_shape)) * _ROUND_UP
        return -largest, largest

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """The coefficients, float64, lowest first."""
        if records.ndim == 2:
            return double(records) @ _cosines(records.shape[1], self.count[0], records.device).T
        layout = image_layout("dct", tuple(records.shape[1:]), self.channels)
        rows = _cosines(layout.height, self.count[0], records.device)
        columns = _cosines(layout.width, self.count[1], records.device)
        return layout.records(rows @ double(layout.planes(records)) @ columns.T)

    def _check_count(self, height: int, width: int) -> None:
        if self.count[0] > height or self.count[1] > width:
            raise DataError(
                f"dct keeps {self.count[0]} × {self.count[1]} frequencies, but records of {height} × {width} have no "
                "more than their size. Choose fewer."
            )


class LinearMap(_Linear):
    """z = A x for any matrix, x the flattened record.

    Args:
        matrix: A, (m, d), fixed independently of the protected records.
        value_range: see ``Crop``.
    """

    kind = "linear"
    matrix: torch.Tensor

    def __init__(self, matrix: ArrayLike, *, value_range: tuple[float, float] | None = None) -> None:
        super().__init__(value_range)
        array = matrix.detach().cpu().numpy() if isinstance(matrix, torch.Tensor) else np.array(matrix)
        if array.dtype.kind not in "buif" or array.ndim != 2 or array.size == 0:
            raise InvalidValueError(f"Expected a matrix (m, d) of numbers. Found {array.dtype} of shape {array.shape}.")
        if not np.isfinite(array).all():
            raise InvalidValueError("Expected a finite matrix. Found NaN or infinity in it.")
        if not array.any():
            raise InvalidValueError("The matrix is zero: nothing is left of a record.")
        self.register_buffer("matrix", torch.from_numpy(array.astype(np.float64)))

    def settings(self) -> dict[str, Any]:
        """The matrix' shape and digest."""
        return {"matrix": tensor_digest({"matrix": self.matrix}), "shape": list(self.matrix.shape)}

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(m,)."""
        matrix = self.matrix
        if math.prod(record_shape) != matrix.shape[1]:
            raise DataError(
                f"The matrix has {matrix.shape[1]} columns, but records of shape {tuple(record_shape)} have "
                f"{math.prod(record_shape)} entries."
            )
        return (int(matrix.shape[0]),)

    def operator_norm(self, record_shape: tuple[int, ...]) -> float:
        """The largest singular value."""
        return float(torch.linalg.matrix_norm(self.matrix.cpu(), 2)) * _ROUND_UP

    def squared_diameter(self, record_shape: tuple[int, ...]) -> float:
        """w² min(‖A‖₂² d, Σ ‖a_i‖₁²), rounded up."""
        matrix = self.matrix.cpu()
        by_norm = self.operator_norm(record_shape) ** 2 * matrix.shape[1]
        by_rows = float(matrix.abs().sum(dim=1).square().sum())
        return self._width**2 * min(by_norm, by_rows) * _ROUND_UP

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float]:
        """The interval that holds every entry of A x."""
        low, high = self.range_or_default
        matrix = self.matrix.cpu()
        up, down = matrix.clamp(min=0.0).sum(dim=1), matrix.clamp(max=0.0).sum(dim=1)
        least, largest = float((low * up + high * down).min()), float((high * up + low * down).max())
        slack = 1e-9 * max(abs(least), abs(largest))
        return least - slack, largest + slack

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """A x, float64 (n, m)."""
        flat = double(records.reshape(len(records), -1))
        return flat @ self.matrix.to(flat.dtype).T


def _two(name: str, value: int | tuple[int, int]) -> tuple[int, int]:
    values = (value, value) if isinstance(value, int) else tuple(value)
    if len(values) != 2:
        raise InvalidValueError(f"Expected {name} to be one or two whole numbers. Found {value!r}.")
    return _validate.integer(name, values[0], minimum=1), _validate.integer(name, values[1], minimum=1)


def _distinct(name: str, indices: Sequence[int]) -> tuple[int, ...]:
    found = tuple(_validate.integer(name, index) for index in indices)
    if not found or len(set(found)) != len(found):
        raise InvalidValueError(f"Expected {name} to be distinct whole numbers, at least one. Found {list(indices)!r}.")
    return found


def _cosines(size: int, count: int, device: torch.device) -> torch.Tensor:
    """The first rows of the orthonormal DCT-II matrix, (count, size)."""
    frequency = torch.arange(count, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64)[None]
    matrix = torch.cos(math.pi / size * (position + 0.5) * frequency) * math.sqrt(2.0 / size)
    matrix[0] = math.sqrt(1.0 / size)
    return double(matrix.to(device)) if device.type != "mps" else matrix.float().to(device)
