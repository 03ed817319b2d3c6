"""Pixels: what it maps to, what it declares, what it refuses."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import Pixels, RepresentationDescriptor

shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
lows = st.floats(-1e3, 1e3)


@given(shapes, lows, st.floats(1e-3, 1e3), st.integers(0, 10**6))
def test_no_two_records_are_further_apart_than_declared(
    shape: tuple[int, ...], low: float, width: float, seed: int
) -> None:
    psi = Pixels(value_range=(low, low + width))
    descriptor = psi.describe(shape)
    generator = torch.Generator().manual_seed(seed)
    records = low + width * torch.rand((6, *shape), generator=generator, dtype=torch.float64)
    records[0], records[1] = low, low + width  # the extremes
    z = psi(records)
    assert z.dtype == torch.float32
    assert z.shape == (6, math.prod(shape)) == (6, descriptor.dimension)
    squared = ((z[:, None].double() - z[None].double()) ** 2).sum(2)
    largest = float(squared.max())
    assert largest <= descriptor.squared_diameter * (1 + 1e-6) + 1e-3
    assert largest >= descriptor.squared_diameter * (1 - 1e-2) - 1e-2


def test_the_identity_on_eight_bits() -> None:
    images = torch.arange(256, dtype=torch.uint8).reshape(2, 8, 16)
    assert Pixels()(images).tolist() == [list(map(float, range(128))), list(map(float, range(128, 256)))]


def test_description() -> None:
    found = Pixels(value_range=(0, 16)).describe((8, 8))
    assert found.name == "pixels"
    assert json.loads(found.parameters) == {"value_range": [0.0, 16.0]}
    assert found.record_shape == (8, 8)
    assert found.dimension == 64
    assert found.squared_diameter == 16.0**2 * 64
    assert found.peak == 16.0
    assert Pixels().describe((28, 28)).squared_diameter == 255.0**2 * 784


def test_the_digest_covers_everything() -> None:
    digests = {
        Pixels(value_range=value_range).describe(shape).digest
        for value_range in [(0, 255), (0, 1), (-1, 1), (0, 2)]
        for shape in [(4, 4), (16,), (2, 8), (4, 5)]
    }
    assert len(digests) == 16
    assert Pixels().describe((4, 4)) == Pixels(value_range=(0, 255)).describe((4, 4))
    fields = {
        "name": "x",
        "parameters": {"a": 1},
        "record_shape": (3,),
        "dimension": 3,
        "squared_diameter": 1.0,
        "peak": None,
    }
    changed = [
        fields | change
        for change in (
            {},
            {"name": "y"},
            {"parameters": {"a": 2}},
            {"dimension": 4},
            {"squared_diameter": 2.0},
            {"peak": 0.0},
        )
    ]
    assert len({RepresentationDescriptor.create(**f).digest for f in changed}) == len(changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value_range", "message"),
    [
        ((1.0, 1.0), r"\(low, high\) with low < high"),
        ((2.0, 1.0), r"\(low, high\) with low < high"),
        ((math.nan, 1.0), r"value_range\[0\]"),
        ((0.0, math.inf), r"value_range\[1\] to be finite"),
        (("a", 1.0), r"value_range\[0\]"),
    ],
)
def test_ranges_that_are_none(value_range: tuple, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Pixels(value_range=value_range)


@pytest.mark.parametrize("value", [-0.001, 1.001, 255.0])
def test_values_outside_the_declared_range(value: float) -> None:
    records = torch.full((3, 4), 0.5)
    Pixels(value_range=(0, 1)).check(records)
    records[1, 2] = value
    with pytest.raises(DataError, match=r"outside the declared value_range \(0, 1\).*Declare the range"):
        Pixels(value_range=(0, 1)).check(records)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_fractions_under_the_eight_bit_range(dtype: torch.dtype) -> None:
    records = torch.rand((3, 4)).to(dtype)
    with pytest.raises(DataError, match=r"Pixels\(value_range=\(0, 1\)\)"):
        Pixels().check(records)
    Pixels(value_range=(0, 1)).check(records)
    Pixels().check(records * 255)


def test_the_ends_of_the_range_and_binary_bytes_are_fine() -> None:
    Pixels().check(torch.tensor([[0, 255]], dtype=torch.uint8))
    Pixels().check(torch.tensor([[0, 1]], dtype=torch.uint8))
