"""Records that are vectors already: tabular rows, embeddings."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations.base import Representation, RepresentationDescriptor, double, tensor_digest

__all__ = ["Vectors"]

_MOST_LISTED = 256  # columns whose numbers are written out in the descriptor; beyond, their digest


class Vectors(Representation):
    """z = s ∘ (x − c), a weight s for each column, and then a clip to a ball where one is declared.

    One of ``ranges`` and ``clip_radius`` has to be given: the range must be known before any record is seen.

    Args:
        ranges: (low, high) of every column, or one pair for all; B = Σ_j s_j² (high_j − low_j)².
        clip_radius: R; scaled vectors of larger norm are scaled back to norm R, as a part of Ψ, and B = (2R)².
        scale: a weight for each column, declared, with c = 0; or ``"reference"``: one over the column's standard
            deviation in the reference sample, and c its mean there, so that columns of different units count alike.
            None: as they are.

    Raises:
        InvalidValueError: the range is not declared, or weights are not positive.
        DataError: at use, values outside the ranges; a column that is constant in the reference sample.

    Example:
        >>> Vectors(ranges=[(0, 100), (0, 1)], scale=[0.01, 1.0]).describe((2,)).squared_diameter
        2.0
    """

    kind = "vectors"
    scale: torch.Tensor | None
    centre: torch.Tensor | None

    def __init__(
        self,
        *,
        ranges: Sequence[tuple[float, float]] | tuple[float, float] | None = None,
        clip_radius: float | None = None,
        scale: ArrayLike | Literal["reference"] | None = None,
    ) -> None:
        super().__init__()
        if ranges is None and clip_radius is None:
            raise InvalidValueError(
                "Declare the range of the vectors: ranges=[(low, high), ...] for each column, or clip_radius=R, to "
                "which longer ones are scaled back."
            )
        self.clip_radius = None if clip_radius is None else _validate.positive("clip_radius", clip_radius)
        self._ranges = None if ranges is None else _checked_ranges(ranges)
        if self._ranges is not None and len(self._ranges) == 1:
            low, high = self._ranges[0].tolist()
            self.value_range = (low, high)
        self._fit_scale = isinstance(scale, str)
        self._origin = "none" if scale is None else "declared"
        if isinstance(scale, str):
            if scale != "reference":
                raise InvalidValueError(f"Expected scale to be 'reference', numbers or None. Found {scale!r}.")
            self._origin = "reference"
        self.register_buffer("scale", None if scale is None or isinstance(scale, str) else _checked_scale(scale))
        self.register_buffer("centre", None)

    @property
    def needs_fit(self) -> bool:
        """Whether the scale is still to be taken from a reference sample."""
        return self._fit_scale and self.scale is None

    def fit(self, reference: Iterable[torch.Tensor]) -> Vectors:
        """The same with scale and centre fixed: each column's standard deviation and mean in the reference sample.

        Raises:
            DataError: a column is constant there.
        """
        if not self.needs_fit:
            return self
        count = 0
        origin = total = squares = torch.zeros(1, dtype=torch.float64)
        for chunk in reference:
            rows = double(chunk.reshape(len(chunk), -1)).cpu()
            origin = rows.mean(dim=0) if count == 0 else origin
            rows = rows - origin
            count += len(rows)
            total, squares = total + rows.sum(dim=0), squares + rows.square().sum(dim=0)
        if count == 0:
            raise DataError("There are no reference records to take the columns' scale from.")
        deviation = (squares / count - (total / count).square()).clamp(min=0.0).sqrt()
        # a spread that float64 cannot tell from rounding is none
        flat = deviation <= 1e-12 * origin.abs() + 1e-300
        if bool(flat.any()):
            raise DataError(
                f"Column {int(flat.nonzero()[0])} is constant in the reference sample, so it has no scale. Declare the "
                "scale of every column, or leave that column out."
            )
        fitted = copy.copy(self)
        fitted._buffers = dict(self._buffers)
        fitted.scale, fitted.centre = 1.0 / deviation, origin + total / count
        return fitted

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """The scaled and clipped vectors, float32 (n, m)."""
        vectors = double(records.reshape(len(records), -1))
        if self.centre is not None:
            vectors = vectors - self.centre.to(vectors)
        if self.scale is not None:
            vectors = vectors * self.scale.to(vectors)
        if self.clip_radius is not None:
            norms = vectors.square().sum(dim=1, keepdim=True).sqrt()
            vectors = vectors * (self.clip_radius * (1.0 - 1e-6) / norms.clamp(min=1e-300)).clamp(max=1.0)
        return vectors.to(torch.float32)

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape.

        Raises:
            InvalidValueError: the scale has not been fixed yet.
        """
        dimension = math.prod(record_shape)
        if self.needs_fit:
            raise InvalidValueError(
                "The scale of these vectors is taken from a reference sample: call fit(reference) first. certify does."
            )
        for name, numbers in (("ranges", self._ranges), ("scale", self.scale)):
            if numbers is not None and len(numbers) not in (1, dimension):
                raise DataError(f"There are {len(numbers)} {name}, but records have {dimension} entries.")
        parameters: dict[str, Any] = {"clip_radius": self.clip_radius, "scaling": self._origin}
        parameters["ranges"] = _listed(self._ranges)
        parameters["scale"] = _listed(self.scale)
        parameters["centre"] = _listed(self.centre)
        return RepresentationDescriptor.create(
            name=self.kind,
            parameters=parameters,
            record_shape=tuple(record_shape),
            dimension=dimension,
            squared_diameter=self._squared_diameter(dimension),
            peak=None,
        )

    def _squared_diameter(self, dimension: int) -> float:
        found = []
        if self.clip_radius is not None:
            found.append(4.0 * self.clip_radius**2)
        if self._ranges is not None:
            widths = (self._ranges[:, 1] - self._ranges[:, 0]).expand(dimension)
            weights = torch.ones(1) if self.scale is None else self.scale.cpu()
            found.append(float((widths * weights).square().sum()))
        return min(found)

    def check(self, records: torch.Tensor) -> None:
        """Refuse values outside the declared ranges."""
        if self._ranges is None:
            return
        flat = double(records.reshape(len(records), -1)).cpu()
        low, high = self._ranges[:, 0], self._ranges[:, 1]
        outside = ((flat < low) | (flat > high)).any(dim=0)
        if bool(outside.any()):
            column = int(outside.nonzero()[0])
            bounds = self._ranges[column if len(self._ranges) > 1 else 0].tolist()
            raise DataError(
                f"Column {column} holds values from {float(flat[:, column].min()):g} to "
                f"{float(flat[:, column].max()):g}, outside the declared range ({bounds[0]:g}, {bounds[1]:g}). Declare "
                "the range that values can take in advance, or a clip_radius."
            )

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float] | None:
        """± R, or the interval that holds every scaled entry."""
        if self.clip_radius is not None:
            return -self.clip_radius, self.clip_radius
        if self._ranges is None:
            return None
        ends = self._ranges - (0.0 if self.centre is None else self.centre.cpu()[:, None])
        ends = ends * (1.0 if self.scale is None else self.scale.cpu()[:, None])
        slack = 1e-6 * float(ends.abs().max())
        return float(ends.min()) - slack, float(ends.max()) + slack

    def operator_norm(self, record_shape: tuple[int, ...]) -> float | None:
        """The largest weight; a clip to a ball brings no two vectors further apart."""
        return 1.0 if self.scale is None else float(self.scale.max())


def _checked_ranges(ranges: Any) -> torch.Tensor:
    try:
        array = np.array(ranges, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.shape == (2,):
        array = array[None]
    if array.ndim != 2 or array.shape[1] != 2 or len(array) == 0:
        raise InvalidValueError("Expected ranges to be (low, high), or a sequence of them, one for each column.")
    for column, (low, high) in enumerate(array.tolist()):
        _validate.finite(f"ranges[{column}]", low)
        _validate.finite(f"ranges[{column}]", high)
        if not low < high:
            raise InvalidValueError(f"Expected ranges[{column}] to be (low, high) with low < high. Found {low, high}.")
    return torch.from_numpy(array)


def _checked_scale(scale: Any) -> torch.Tensor:
    array = np.atleast_1d(np.array(scale, dtype=np.float64))
    if array.ndim != 1 or len(array) == 0:
        raise InvalidValueError(f"Expected scale to be a weight for each column. Found shape {array.shape}.")
    for column, weight in enumerate(array.tolist()):
        _validate.positive(f"scale[{column}]", weight)
    return torch.from_numpy(array)


def _listed(numbers: torch.Tensor | None) -> Any:
    if numbers is None:
        return None
    return numbers.tolist() if len(numbers) <= _MOST_LISTED else tensor_digest({"numbers": numbers})
