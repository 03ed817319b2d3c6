"""Where the channels of an image record are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from opacus_reconbound.errors import DataError, InvalidValueError

__all__ = ["Layout", "Where", "checked_where", "image_layout"]

Where = Literal["auto", "first", "last"]
_COUNTS = (1, 2, 3, 4)  # of channels that an axis can be recognised by


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The axes of an image record.

    Attributes:
        channels: their number; 1 for a record without that axis.
        height: rows.
        width: columns.
        where: the channel axis: before the rows, after the columns, or none.
    """

    channels: int
    height: int
    width: int
    where: Literal["first", "last", "none"]

    def planes(self, records: torch.Tensor) -> torch.Tensor:
        """Records (n, ...) as (n, channels, height, width)."""
        if self.where == "none":
            return records[:, None]
        return records.movedim(-1, 1) if self.where == "last" else records

    def records(self, planes: torch.Tensor) -> torch.Tensor:
        """The inverse of ``planes``, for any number of channels, rows and columns."""
        if self.where == "none":
            return planes[:, 0]
        return planes.movedim(1, -1) if self.where == "last" else planes

    def shape(self, channels: int, height: int, width: int) -> tuple[int, ...]:
        """The shape of one record in this layout with these sizes."""
        if self.where == "none":
            return height, width
        return (height, width, channels) if self.where == "last" else (channels, height, width)


def checked_where(channels: str) -> Where:
    """``channels`` as given to a representation of images."""
    if channels not in ("auto", "first", "last"):
        raise InvalidValueError(f"Expected channels to be 'auto', 'first' or 'last'. Found {channels!r}.")
    return channels  # type: ignore[return-value]


def image_layout(name: str, record_shape: tuple[int, ...], where: Where = "auto") -> Layout:
    """The layout of image records (height, width), (channels, height, width) or (height, width, channels).

    Args:
        name: of the representation, for the message.
        record_shape: the shape of one record.
        where: the channel axis. ``"auto"`` takes the one outer axis that is at most 4 long.

    Raises:
        DataError: these are no images, or both outer axes could be the channels.
    """
    if len(record_shape) == 2:
        return Layout(channels=1, height=record_shape[0], width=record_shape[1], where="none")
    if len(record_shape) != 3:
        raise DataError(
            f"{name} needs images: records of shape (height, width), with channels first or last. Found records of "
            f"shape {tuple(record_shape)}. Reshape them."
        )
    if where == "auto":
        first, last = record_shape[0] in _COUNTS, record_shape[2] in _COUNTS
        if first == last:
            raise DataError(
                f"{name} cannot tell which axis of records of shape {tuple(record_shape)} holds the channels. Say "
                "channels='first' or channels='last'."
            )
        where = "first" if first else "last"
    if where == "first":
        return Layout(channels=record_shape[0], height=record_shape[1], width=record_shape[2], where="first")
    return Layout(channels=record_shape[2], height=record_shape[0], width=record_shape[1], where="last")
