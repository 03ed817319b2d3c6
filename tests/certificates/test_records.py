"""Records as streams: every container gives the same certificate, in chunks, and bad items are named."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.certificates.records import (
    ArrayRecords,
    DatasetRecords,
    RecordSource,
    SelectedRecords,
    as_source,
)
from opacus_reconbound.errors import DataError, OverlapError
from opacus_reconbound.representations import Pixels

DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:700]
PSI = Pixels(value_range=(0, 16))


class Items(Dataset[Any]):
    """What a function makes of each record, and which were asked for."""

    def __init__(self, make: Any = lambda index, record: (record, index), records: NDArray[Any] = DIGITS) -> None:
        self.make, self.records, self.read = make, records, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index, self.records[index])


def certificate(reference: Any, estimation: Any, **options: Any) -> SourceCertificate:
    return certify(reference, estimation, **({"representation": PSI, "progress": False} | options))


@pytest.fixture(scope="module")
def expected() -> SourceCertificate:
    return certificate(DIGITS[:200], DIGITS[200:])


# ---- every container -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda index, record: record,
        lambda index, record: (record, index),
        lambda index, record: [torch.from_numpy(record), {"label": index}],
        lambda index, record: (Image.fromarray(record), index),
        lambda index, record: (Image.fromarray(record).convert("LA"),),
        lambda index, record: (record.tolist(), 3),
    ],
    ids=["arrays", "pairs", "lists of tensors", "images", "images with alpha", "numbers"],
)
def test_items_of_every_kind(make: Any, expected: SourceCertificate) -> None:
    whole = Items(make)
    found = certificate(Subset(whole, range(200)), Subset(whole, range(200, 700)))
    assert found.designs == expected.designs
    assert found.trace == expected.trace
    if whole[0] is not None and DatasetRecords(whole).dtype == np.uint8:
        assert found.to_json() == expected.to_json()


def test_data_sets_of_torch(expected: SourceCertificate) -> None:
    tensors = torch.from_numpy(DIGITS)
    whole = ConcatDataset([TensorDataset(tensors[:300], torch.arange(300)), TensorDataset(tensors[300:])])
    found = certificate(Subset(whole, range(200)), Subset(whole, range(200, 700)))
    assert found.to_json() == expected.to_json()
    assert certificate(DIGITS[:200], Subset(whole, range(200, 700))).to_json() == expected.to_json()


def test_a_source_of_ones_own(expected: SourceCertificate) -> None:
    class Halves:
        record_shape = (8, 8)
        dtype = np.dtype(np.uint8)

        def __len__(self) -> int:
            return 500

        def chunks(self, size: int) -> Iterator[NDArray[Any]]:
            yield DIGITS[200:450]
            yield DIGITS[450:]

    assert isinstance(Halves(), RecordSource)
    assert certificate(DIGITS[:200], Halves()).to_json() == expected.to_json()
    Halves.__len__ = lambda self: 600  # type: ignore[method-assign]
    with pytest.raises(DataError, match="says that it has 600 records, but it gave 500"):
        certificate(DIGITS[:200], Halves())


def test_records_selected_from_files(tmp_path: Path, expected: SourceCertificate) -> None:
    np.save(tmp_path / "a.npy", DIGITS[:350])
    np.save(tmp_path / "b.npy", DIGITS[350:])
    arrays = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "ab"]
    found = certificate(SelectedRecords(arrays, np.arange(200)), SelectedRecords(arrays, np.arange(200, 700)))
    assert found.to_json() == expected.to_json()
    assert len(SelectedRecords(arrays)) == 700


@pytest.mark.parametrize("size", [1, 7, 700, 10_000])
def test_chunks_are_the_records_in_order(size: int) -> None:
    for source in (ArrayRecords(DIGITS), SelectedRecords([DIGITS[:9], DIGITS[9:]]), DatasetRecords(Items())):
        chunks = list(source.chunks(size))
        assert max(map(len, chunks)) <= size
        assert np.array_equal(np.concatenate(chunks), DIGITS)
        assert (len(source), source.record_shape, source.dtype) == (700, (8, 8), np.uint8)


def test_items_are_read_once_in_order_beyond_the_first_check() -> None:
    whole = Items()
    source = DatasetRecords(whole)
    checked = len(whole.read)
    assert checked < 20
    list(source.chunks(64))
    assert whole.read[checked:] == list(range(700))


def test_raw_records_are_never_all_in_memory() -> None:
    """Float64 records of 4,096 entries that are made when they are asked for: 98 MB raw, 49 MB as vectors."""

    class Wide(Dataset[Any]):
        def __init__(self, first: int) -> None:
            self.first = first

        def __len__(self) -> int:
            return 1500

        def __getitem__(self, index: int) -> Any:
            return np.random.default_rng(self.first + index).random(4096)

    raw = 1500 * 4096 * 8
    tracemalloc.start()
    try:
        found = as_source("reference", Wide(0), 1)
        assert sum(chunk.shape[0] for chunk in found.chunks(100)) == 1500
        assert tracemalloc.get_traced_memory()[1] < 0.3 * raw
        tracemalloc.reset_peak()
        certificate(Wide(0), Wide(10_000), representation=Pixels((0, 1)), max_reference=40, temperatures=[0.5])
        assert tracemalloc.get_traced_memory()[1] < 1.5 * raw  # numpy's share: a chunk and its copies
    finally:
        tracemalloc.stop()


# ---- refusals --------------------------------------------------------------------------------------------------------


def at(index: int, value: Any) -> Any:
    return lambda i, record: value if i == index else record


def failing(index: int, record: NDArray[Any]) -> Any:
    if index == 613:
        raise OSError("image file is truncated (3 bytes not processed)")
    return record


class Growing(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return DIGITS[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(DIGITS)


class Jittered(Dataset[Any]):
    def __len__(self) -> int:
        return 700

    def __getitem__(self, index: int) -> Any:
        return np.roll(DIGITS[index], np.random.randint(8), axis=1)  # noqa: NPY002 - as transforms do


REFUSALS: dict[str, tuple[Any, str]] = {
    "unreadable": (Items(failing), r"estimation\[613\] cannot be read: OSError: image file is truncated.*Repair"),
    "ragged": (
        Items(at(5, np.zeros((8, 9), np.uint8))),
        r"estimation\[5\] has shape \(8, 9\) and type uint8, but estimation\[0\] has shape \(8, 8\) and type uint8",
    ),
    "mixed types": (Items(at(699, np.zeros((8, 8)))), r"estimation\[699\] has shape \(8, 8\) and type float64, but"),
    "mixed channels": (Items(at(9, Image.new("RGB", (8, 8)))), r"estimation\[9\] has shape \(8, 8, 3\)"),
    "None": (Items(at(44, None)), r"estimation\[44\] is of type NoneType, which holds no real numbers\. Items must"),
    "dictionaries": (Items(lambda i, r: {"image": r}), r"estimation\[0\] is of type dict"),
    "text": (Items(lambda i, r: "seven"), r"estimation\[0\] is of type str"),
    "numbers": (Items(lambda i, r: (int(r[0, 2]), 3)), r"estimation\[0\] is a single number"),
    "nested ragged": (Items(at(3, [[1, 2], [3]])), r"estimation\[3\] is no record"),
    "deep images": (Items(at(4, Image.new("I;16", (8, 8)))), r"estimation\[4\] is no record: images of mode I;16"),
    "masks": (Items(lambda i, r: np.ma.masked_equal(r, 0)), r"estimation\[0\] is a masked array"),
    "empty": (Items(records=DIGITS[:0]), "estimation data set is empty"),
    "no length": (Growing(), r"estimation data set has no length.*__len__"),
    "random": (Jittered(), r"estimation\[\d+\] is another record each time.*random transforms"),
    "a stream": (Stream(), "IterableDataset, which has no fixed order.*map-style"),
    "a loader": (DataLoader(Items()), r"DataLoader, which may shuffle.*loader\.dataset"),
    "few": (Subset(Items(), range(99)), "estimation sample has 99 records; at least 100"),
    "another shape": (Items(lambda i, r: r[1:]), r"different shapes: reference \(8, 8\), estimation \(7, 8\)"),
    "another type": (Items(lambda i, r: r / 16), "different types: reference uint8, estimation float64"),
    "not finite": (
        Items(at(650, np.full((8, 8), np.nan)), records=DIGITS.astype(float)),
        r"estimation\[650\] holds NaN",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_item(case: str) -> None:
    estimation, message = REFUSALS[case]
    reference = (DIGITS[:200] + 100).astype(float if case == "not finite" else np.uint8)
    with pytest.raises(DataError, match=message) as caught:
        certificate(reference, estimation, representation=Pixels())
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_shared_records_are_found_across_containers() -> None:
    with pytest.raises(OverlapError, match=r"reference\[3\] = estimation\[0\]"):
        certificate(DIGITS[:200], Subset(Items(), [3, *range(200, 700)]))


def test_interruptions_and_memory_are_not_the_records_fault() -> None:
    for error in (KeyboardInterrupt, MemoryError):

        def make(index: int, record: NDArray[Any], error: type[BaseException] = error) -> Any:
            if index == 30:
                raise error
            return record

        with pytest.raises(error):
            certificate(Items(make), DIGITS)
