"""Where records come from: arrays, memory-mapped files, data sets; read in order, a chunk at a time.

A further kind of source needs a class with the four members of ``RecordSource`` and nothing else: ``certify`` takes it
as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset

from opacus_reconbound.errors import DataError

__all__ = ["ArrayRecords", "DatasetRecords", "RecordSource", "SelectedRecords", "as_source"]

_READ_TWICE = 8  # items of a data set that are read twice, to notice random transforms


@runtime_checkable
class RecordSource(Protocol):
    """Records of one shape and one type, in a fixed order; ``len`` is their number."""

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of one record, at least one axis."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a record's entries: real numbers."""
        ...

    def __len__(self) -> int: ...

    def chunks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """All records in order, ``size`` at a time (the last chunk may be smaller), as arrays (k, *record_shape)."""
        ...


class ArrayRecords:
    """The entries of an array along its first axis; a memory-mapped array stays on disk.

    Args:
        array: (n, ...).
    """

    def __init__(self, array: NDArray[np.generic]) -> None:
        self._array = array

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of one record."""
        return tuple(self._array.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the entries."""
        return self._array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def chunks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """Copies of ``size`` records at a time."""
        for start in range(0, len(self), size):
            yield np.array(self._array[start : start + size])


class SelectedRecords:
    """Some records of several arrays in a row, such as one part of a split; read from the files they lie in.

    Args:
        arrays: of one record shape and type; their concatenation is what ``indices`` count in.
        indices: ascending positions; all of them unless given.
    """

    def __init__(self, arrays: Sequence[NDArray[np.generic]], indices: NDArray[np.intp] | None = None) -> None:
        self._arrays = arrays
        self._indices = np.arange(sum(len(array) for array in arrays)) if indices is None else indices

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of one record."""
        return tuple(self._arrays[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the entries."""
        return self._arrays[0].dtype

    def __len__(self) -> int:
        return len(self._indices)

    def chunks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """Copies of ``size`` records at a time."""
        for start in range(0, len(self), size):
            wanted = self._indices[start : start + size]
            chunk = np.empty((len(wanted), *self.record_shape), dtype=self.dtype)
            first = 0
            for array in self._arrays:
                inside = (wanted >= first) & (wanted < first + len(array))
                chunk[inside] = array[wanted[inside] - first]
                first += len(array)
            yield chunk


class DatasetRecords:
    """The items of a map-style data set, in order, one read of each for all that is computed.

    An item is a record, or a tuple that begins with one, such as (image, label). A record is a tensor, an array, a
    Pillow image (8-bit grey or RGB, channels last) or a list of numbers.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        name: for messages.

    Raises:
        DataError: it is empty, its first item is no record, or it gives another record when it is read again.
    """

    def __init__(self, dataset: Dataset[Any], name: str = "records") -> None:
        self._dataset, self._name = dataset, name
        try:
            self._length = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError) as error:
            raise DataError(
                f"The {name} data set has no length. Give a map-style data set, with __len__ and __getitem__."
            ) from error
        if self._length < 1:
            raise DataError(f"The {name} data set is empty.")
        self._first = self._item(0)
        for index in sorted({self._length * k // _READ_TWICE for k in range(_READ_TWICE)}):
            one, two = self._item(index), self._item(index)
            if one.shape != two.shape or one.tobytes() != two.tobytes():
                raise DataError(
                    f"{name}[{index}] is another record each time it is read, so equal records of the two samples "
                    "could not be recognised. Leave out random transforms."
                )

    @property
    def record_shape(self) -> tuple[int, ...]:
        """Of the first record; all others must have it."""
        return tuple(self._first.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the first record's entries; all others must have it."""
        return self._first.dtype

    def __len__(self) -> int:
        return self._length

    def chunks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """``size`` items at a time.

        Raises:
            DataError: an item cannot be read, is no record, or has another shape or type than the first.
        """
        for start in range(0, self._length, size):
            stop = min(start + size, self._length)
            chunk = np.empty((stop - start, *self.record_shape), dtype=self.dtype)
            for index in range(start, stop):
                record = self._item(index)
                if record.shape != self._first.shape or record.dtype != self._first.dtype:
                    raise DataError(
                        f"{self._name}[{index}] has shape {record.shape} and type {record.dtype}, but "
                        f"{self._name}[0] has shape {self._first.shape} and type {self._first.dtype}. Bring all "
                        "records to one shape and type."
                    )
                chunk[index - start] = record
            yield chunk

    def _item(self, index: int) -> NDArray[np.generic]:
        where = f"{self._name}[{index}]"
        try:
            item = self._dataset[index]
        except MemoryError:
            raise
        except Exception as error:  # a data set may raise anything
            raise DataError(
                f"{where} cannot be read: {type(error).__name__}{_reason(error)}. Repair that record or leave it out."
            ) from error
        record = item[0] if isinstance(item, tuple) and item else item
        if isinstance(record, list) and record and _holds_numbers(record[0]):
            record = record[0]
        if isinstance(record, np.ma.MaskedArray):
            raise DataError(f"{where} is a masked array, and masks are not read. Fill the masked entries.")
        try:
            array = np.asarray(_plain(record))
        except ValueError as error:
            raise DataError(f"{where} is no record{_reason(error)}. {_ITEMS}") from error
        if array.dtype.kind not in "uifb":
            raise DataError(f"{where} is of type {type(record).__name__}, which holds no real numbers. {_ITEMS}")
        if array.ndim == 0:
            raise DataError(f"{where} is a single number; a record has at least one axis. {_ITEMS}")
        return array


_ITEMS = "Items must be records (tensors, arrays, 8-bit images), or tuples that begin with one."


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:120].rstrip(".")
    return f": {text}" if text else ""


def _holds_numbers(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) or _is_image(value)


def _is_image(value: object) -> bool:
    from PIL import Image

    return isinstance(value, Image.Image)


def _plain(record: Any) -> Any:
    """Something that numpy reads without a guess."""
    if isinstance(record, torch.Tensor):
        record = record.detach().cpu()
        return (record.float() if record.dtype == torch.bfloat16 else record).numpy()
    if _is_image(record):
        if record.mode in ("L", "RGB"):
            return record
        if record.mode in ("1", "LA", "La"):
            return record.convert("L")
        if record.mode in ("P", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "PA"):
            return record.convert("RGB")
        raise ValueError(f"images of mode {record.mode} do not fit the 8-bit grid")
    return record


def as_source(name: str, records: Any, least: int) -> RecordSource:
    """The records behind whatever the user gave; nothing is read ahead and nothing copied where it can be helped.

    Args:
        name: of the sample, for messages.
        records: an array, a tensor, nested lists, a map-style data set, or a source.
        least: records needed.

    Raises:
        DataError: these are no records, or too few.
    """
    if isinstance(records, IterableDataset):
        raise DataError(
            f"The {name} records are an IterableDataset, which has no fixed order and length. Give a map-style data "
            "set, with __len__ and __getitem__, or an array."
        )
    if isinstance(records, DataLoader):
        raise DataError(
            f"The {name} records are a DataLoader, which may shuffle, repeat or drop records. Give its data set, "
            "loader.dataset."
        )
    source: RecordSource
    if isinstance(records, Dataset):
        source = DatasetRecords(records, name)
    elif isinstance(records, RecordSource):
        source = records
    else:
        source = ArrayRecords(_array(name, records))
    _refuse_type(name, source.dtype)
    if len(source) < least:
        raise DataError(
            f"The {name} sample has {len(source)} records; at least {least} are needed, and thousands for a useful "
            "bound."
        )
    if 0 in source.record_shape:
        raise DataError(f"The {name} records are empty: shape {(len(source), *source.record_shape)}.")
    return source


def _array(name: str, records: Any) -> NDArray[np.generic]:
    if isinstance(records, np.ma.MaskedArray):
        raise DataError(f"The {name} records are a masked array, and masks are not read. Fill or drop masked records.")
    try:
        array: NDArray[np.generic] = np.asanyarray(_plain(records))
    except ValueError as error:
        raise DataError(f"The {name} records do not form one array (n, ...): {error}.") from error
    _refuse_type(name, array.dtype)
    if array.ndim < 2:
        raise DataError(
            f"Expected the {name} records as an array (n, ...), one record for each entry. Found shape {array.shape}."
        )
    return array


def _refuse_type(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "uifb":
        raise DataError(f"Expected the {name} records to be real numbers. Found an array of type {dtype}.")
