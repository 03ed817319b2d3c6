"""Where records come from: arrays, files, folders of images, data sets; read in order, a chunk at a time.

A further kind of source needs a class with the four members of ``RecordSource`` and nothing else: ``certify`` takes it
as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from opacus_reconbound._files import Stored, open_records, refuse_repeats
from opacus_reconbound._images import is_image, plain_image
from opacus_reconbound.errors import DataError

__all__ = ["ArrayRecords", "DatasetRecords", "RecordSource", "Records", "SelectedRecords", "as_source", "select"]

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


class SupportsTraining(Protocol):
    """A Lightning data module, of either namespace."""

    def train_dataloader(self) -> Any:
        """The training loader."""
        ...


Records: TypeAlias = (
    NDArray[Any]
    | torch.Tensor
    | str
    | os.PathLike[str]
    | Dataset[Any]
    | SupportsTraining
    | RecordSource
    | Sequence[Any]
)


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

    def __init__(self, arrays: Sequence[Stored], indices: NDArray[np.intp] | None = None) -> None:
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


class _PickedRecords:
    """Some records of a source that can only be read in order.

    Args:
        source: is read whole.
        indices: ascending positions.
    """

    def __init__(self, source: RecordSource, indices: NDArray[np.intp]) -> None:
        self._source, self._indices = source, indices
        self.record_shape, self.dtype = source.record_shape, source.dtype

    def __len__(self) -> int:
        return len(self._indices)

    def chunks(self, size: int) -> Iterator[NDArray[np.generic]]:
        """At most ``size`` records at a time."""
        start = 0
        for chunk in self._source.chunks(size):
            inside = self._indices[(self._indices >= start) & (self._indices < start + len(chunk))]
            if len(inside):
                yield chunk[inside - start]
            start += len(chunk)


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

    def __init__(self, dataset: Dataset[Any] | Sequence[Any], name: str = "records") -> None:
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
    return isinstance(value, (torch.Tensor, np.ndarray)) or is_image(value)


def _plain(record: Any) -> Any:
    """Something that numpy reads without a guess."""
    if isinstance(record, torch.Tensor):
        record = record.detach().cpu()
        return (record.float() if record.dtype == torch.bfloat16 else record).numpy()
    return plain_image(record) if is_image(record) else record


def as_source(name: str, records: Any, least: int = 1) -> RecordSource:
    """The records behind whatever the user gave; nothing is read ahead and nothing copied where it can be helped.

    Args:
        name: of the sample, for messages.
        records: an array, a tensor, nested lists, the path of a file or folder (or several), a map-style data set, a
            Lightning data module (its training records), or a source.
        least: records needed.

    Raises:
        DataError: these are no records, or too few.
    """
    found = _found(name, records)
    source: RecordSource
    if isinstance(found, _Arrays):
        source = (
            ArrayRecords(found[0]) if isinstance(found[0], np.ndarray) and len(found) == 1 else SelectedRecords(found)
        )
    elif isinstance(found, RecordSource):
        source = found
    else:
        source = DatasetRecords(found, name)
    _refuse_type(name, source.dtype)
    if len(source) < least:
        raise DataError(
            f"The {name} sample has {len(source)} records; at least {least} are needed, and thousands for a useful "
            "bound."
        )
    if 0 in source.record_shape:
        raise DataError(f"The {name} records are empty: shape {(len(source), *source.record_shape)}.")
    return source


def select(name: str, records: Any, indices: NDArray[np.intp]) -> RecordSource | Subset[Any]:
    """Some of the records behind whatever the user gave; read when they are used.

    Args:
        name: of the records, for messages.
        records: as ``as_source`` takes them.
        indices: ascending positions.

    Returns:
        A ``Subset`` where the records are items of a data set or a list, with all that belongs to them; else a source.
    """
    found = _found(name, records)
    if isinstance(found, _Arrays):
        return SelectedRecords(found, indices)
    if isinstance(found, RecordSource):
        return _PickedRecords(found, indices)
    return Subset(found, indices.tolist())


class _Arrays(list[Stored]):
    """Arrays to be read one after another."""


def _found(name: str, records: Any) -> _Arrays | RecordSource | Dataset[Any]:
    """What holds the records: arrays, a source, or something with one record an item."""
    if _is_data_module(records):
        records = _of_data_module(name, records)
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
    if isinstance(records, (Dataset, RecordSource)):
        return records
    several = records if isinstance(records, (list, tuple)) and records else [records]
    if all(isinstance(record, (str, os.PathLike)) for record in several):
        paths = [os.fspath(path) for path in several]
        refuse_repeats(paths)
        return _Arrays(open_records(paths))
    first = several[0]
    if several is records and (
        _holds_numbers(first) or (isinstance(first, tuple) and first and _holds_numbers(first[0]))
    ):
        return records  # type: ignore[return-value]  # a list is read as a data set is, an item at a time
    return _Arrays([_array(name, records)])


def _is_data_module(value: object) -> bool:
    """Of ``lightning.pytorch`` or ``pytorch_lightning``, neither of which is imported for this."""
    return any(base.__name__ == "LightningDataModule" for base in type(value).__mro__)


def _of_data_module(name: str, module: Any) -> Any:
    """The data set behind a data module's training loader, after the calls that a trainer makes before ``fit``."""
    kind = type(module).__name__
    try:
        module.prepare_data()
        module.setup("fit")
        loader = module.train_dataloader()
    except MemoryError:
        raise
    except Exception as error:  # a data module may raise anything
        raise DataError(
            f"The data module {kind} of the {name} records gives no training loader: "
            f"{type(error).__name__}{_reason(error)}. Repair it, or give a data set of it."
        ) from error
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"The data module {kind} of the {name} records gives a {type(loader).__name__} to train on, not one "
            "DataLoader. Give one of its data sets."
        )
    return loader.dataset


def _array(name: str, records: Any) -> NDArray[np.generic]:
    if isinstance(records, np.ma.MaskedArray):
        raise DataError(f"The {name} records are a masked array, and masks are not read. Fill or drop masked records.")
    try:
        array: NDArray[np.generic] = np.asanyarray(_plain(records))
    except ValueError as error:
        index = _first_unlike(records)
        where = "" if index is None else f" {name}[{index}] is not shaped like {name}[0]."
        raise DataError(f"The {name} records do not form one array (n, ...){_reason(error)}.{where}") from error
    _refuse_type(name, array.dtype)
    if array.ndim < 2:
        raise DataError(
            f"Expected the {name} records as an array (n, ...), one record for each entry. Found shape {array.shape}."
        )
    return array


def _first_unlike(records: Any) -> int | None:
    """The first record that has no shape, or another than the first record."""
    shapes: list[tuple[int, ...] | None] = []
    for index, record in enumerate(records):
        try:
            shapes = [*shapes[:1], np.shape(record)]
        except ValueError:  # ragged in itself
            return index
        if shapes[-1] != shapes[0]:
            return index
    return None


def _refuse_type(name: str, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "uifb":
        raise DataError(f"Expected the {name} records to be real numbers. Found an array of type {dtype}.")
