"""Roles of records: digests, overlaps, splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.split import record_digests, refuse_overlap, split_indices, summarise
from opacus_reconbound.errors import InvalidValueError, OverlapError


@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 30))
def test_splits_are_disjoint_and_of_the_sizes_asked_for(seed: int, sizes: list[int], spare: int) -> None:
    total = sum(sizes) + spare
    parts = split_indices(total, sizes, seed=seed)
    assert [len(part) for part in parts] == sizes
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    assert ((everything >= 0) & (everything < total)).all()
    for part in parts:
        assert (np.diff(part) > 0).all()
    again = split_indices(total, sizes, seed=seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_splits_are_random() -> None:
    firsts = [split_indices(1000, [500, 500], seed=seed)[0] for seed in range(20)]
    assert len({tuple(first) for first in firsts}) == 20
    # every index lands in the first half about half the time
    counts = np.bincount(np.concatenate([split_indices(50, [25], seed=seed)[0] for seed in range(400)]), minlength=50)
    assert (np.abs(counts - 200) < 60).all()  # six standard deviations


@pytest.mark.parametrize(
    ("total", "sizes", "message"),
    [(10, [6, 5], "asks for 11 records, but there are 10"), (10, [-1], "size"), (10, [1.5], "whole number")],
)
def test_splits_that_do_not_fit(total: int, sizes: list, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        split_indices(total, sizes, seed=0)


def test_equal_records_have_equal_digests_wherever_they_are() -> None:
    records = np.random.default_rng(0).integers(0, 3, size=(200, 2, 2)).astype(np.uint8)
    digests = record_digests(records)
    for i in range(0, 200, 7):
        for j in range(200):
            assert (digests[i] == digests[j]) == np.array_equal(records[i], records[j])


def test_digests_know_type_and_shape() -> None:
    zeros = np.zeros((1, 8), np.uint8)
    found = [
        record_digests(array)[0]
        for array in (zeros, zeros.reshape(1, 2, 4), zeros.reshape(1, 4, 2), zeros.view(np.float64), zeros[:, :4])
    ]
    assert len(set(found)) == len(found)


def test_digests_do_not_depend_on_the_memory_layout(tmp_path: Path) -> None:
    records = np.random.default_rng(1).normal(size=(30, 4, 5))
    expected = record_digests(records)
    assert record_digests(np.asfortranarray(records)) == expected
    assert record_digests(np.repeat(records, 2, axis=0)[::2]) == expected
    np.save(tmp_path / "records.npy", records)
    assert record_digests(np.load(tmp_path / "records.npy", mmap_mode="r")) == expected


@given(st.permutations(list(range(12))))
def test_the_fingerprint_does_not_depend_on_the_order(order: list[int]) -> None:
    records = np.arange(24, dtype=np.int16).reshape(12, 2)
    assert summarise(record_digests(records[order])) == summarise(record_digests(records))
    assert summarise(record_digests(records[order[:11]])) != summarise(record_digests(records))


def test_the_fingerprint_counts_repeats() -> None:
    records = np.arange(6).reshape(3, 2)
    twice = summarise(record_digests(np.concatenate([records, records[:1]])))
    assert twice.n == 4
    assert twice.fingerprint != summarise(record_digests(records)).fingerprint


def test_overlap_names_the_records_and_the_remedy() -> None:
    a = np.arange(40).reshape(20, 2)
    b = np.concatenate([a[[17]], 100 + a[:5], a[[3]]])
    with pytest.raises(OverlapError) as caught:
        refuse_overlap(record_digests(a), record_digests(b))
    message = str(caught.value)
    assert "share 2 record(s): reference[17] = estimation[0], reference[3] = estimation[6]." in message
    assert "allow_repeats=True" in message
    refuse_overlap(record_digests(a), record_digests(b[1:6]))


def test_a_large_overlap_is_shortened() -> None:
    a = record_digests(np.arange(40).reshape(20, 2))
    with pytest.raises(OverlapError, match=r"share 20 record\(s\).*, …\."):
        refuse_overlap(a, a)
