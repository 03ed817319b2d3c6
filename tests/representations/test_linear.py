"""Linear representations: against naive versions, their range B against enumeration, their refusals."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.fft import dct, dctn

from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import (
    Channels,
    Coordinates,
    Crop,
    Downsample,
    LinearMap,
    LowFrequencies,
    Mask,
    Representation,
)


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size=shape).astype(np.uint8))


def matrix_of(psi: Representation, shape: tuple[int, ...]) -> np.ndarray:
    """A, a column for each entry of a record."""
    basis = torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)
    return psi.transform(basis).reshape(len(basis), -1).double().numpy().T


# ---- against naive versions ------------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_crop_is_slicing(top: int, left: int, height: int, width: int, seed: int) -> None:
    psi = Crop(top, left, height, width)
    for shape, box in (
        ((8, 7), (slice(None), slice(top, top + height), slice(left, left + width))),
        ((3, 8, 7), (slice(None), slice(None), slice(top, top + height), slice(left, left + width))),
        ((8, 7, 3), (slice(None), slice(top, top + height), slice(left, left + width))),
    ):
        x = images(5, *shape, seed=seed)
        expected = x[box]
        assert torch.equal(psi.transform(x), expected)
        assert psi.output_shape(shape) == tuple(expected.shape[1:])
        assert torch.equal(psi(x), expected.reshape(5, -1).float())


def test_channels() -> None:
    x = images(4, 3, 6, 5)
    assert torch.equal(Channels(2, 0).transform(x), x[:, [2, 0]])
    assert torch.equal(Channels(1).transform(x.movedim(1, -1)), x.movedim(1, -1)[..., [1]])
    assert Channels(1).describe((3, 6, 5)).dimension == 30


def test_coordinates_and_masks_agree() -> None:
    x = images(4, 3, 6, 5)
    mask = np.random.default_rng(1).random((3, 6, 5)) < 0.3
    kept = np.flatnonzero(mask).tolist()
    assert torch.equal(Mask(mask)(x), Coordinates(kept)(x))
    assert Mask(mask).describe((3, 6, 5)).dimension == len(kept)
    flat = np.random.default_rng(2).random((6, 5)) < 0.5
    assert torch.equal(Mask(flat)(x), Mask(np.broadcast_to(flat, (3, 6, 5)))(x))
    last = x.movedim(1, -1)
    assert Mask(flat)(last).shape == (4, 3 * flat.sum())
    assert torch.equal(Mask(flat)(last).sum(1), Mask(flat)(x).sum(1))


@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 99))
def test_downsample_is_the_mean_of_areas(rows: int, columns: int, seed: int) -> None:
    x = images(3, 7, 9, seed=seed)
    found = Downsample((rows, columns)).transform(x).numpy()
    for i, j in itertools.product(range(rows), range(columns)):
        top, bottom = i * 7 // rows, -(-(i + 1) * 7 // rows)
        left, right = j * 9 // columns, -(-(j + 1) * 9 // columns)
        expected = x[:, top:bottom, left:right].double().mean(dim=(1, 2)).numpy()
        np.testing.assert_allclose(found[:, i, j], expected, rtol=1e-12)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 99))
def test_low_frequencies_are_scipys(rows: int, columns: int, seed: int) -> None:
    x = images(3, 2, 6, 8, seed=seed)
    expected = dctn(x.numpy().astype(float), axes=(2, 3), norm="ortho")[:, :, :rows, :columns]
    psi = LowFrequencies((rows, columns))
    np.testing.assert_allclose(psi.transform(x).numpy(), expected, atol=1e-9)
    last = psi.transform(x.movedim(1, -1)).numpy()
    np.testing.assert_allclose(last, np.moveaxis(expected, 1, -1), atol=1e-9)
    vectors = x.reshape(3, -1)
    np.testing.assert_allclose(
        LowFrequencies(rows)(vectors).numpy(), dct(vectors.numpy().astype(float), norm="ortho")[:, :rows], rtol=1e-5
    )


def test_a_matrix() -> None:
    matrix = np.random.default_rng(0).normal(size=(4, 42))
    x = images(5, 6, 7)
    np.testing.assert_allclose(LinearMap(matrix)(x).numpy(), x.reshape(5, -1).numpy() @ matrix.T, rtol=1e-5)
    assert LinearMap(torch.from_numpy(matrix)).describe((6, 7)) == LinearMap(matrix).describe((6, 7))


# ---- the range B -----------------------------------------------------------------------------------------------------

SMALL: dict[str, tuple[Representation, tuple[int, ...], bool]] = {
    "crop": (Crop(0, 1, 2, 2), (3, 3), True),
    "channels": (Channels(1, channels="first"), (2, 2, 2), True),
    "mask": (Mask([[1, 0, 1], [0, 1, 0]]), (2, 3), True),
    "coordinates": (Coordinates([0, 5, 3]), (2, 3), True),
    "downsample": (Downsample((1, 2)), (2, 4), True),
    "downsample, overlapping": (Downsample(2), (3, 3), True),
    "dct": (LowFrequencies(2), (3, 3), True),
    "dct of vectors": (LowFrequencies(3), (8,), True),
    "matrix": (LinearMap(np.random.default_rng(3).normal(size=(3, 8))), (8,), False),
    "tall matrix": (LinearMap(np.random.default_rng(4).normal(size=(12, 6))), (6,), False),
    "diagonal matrix": (LinearMap(np.diag([1.0, 2.0, 0.5])), (3,), True),
}


@pytest.mark.parametrize("name", SMALL)
def test_no_two_records_are_further_apart_than_b(name: str) -> None:
    psi, shape, attained = SMALL[name]
    signs = np.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=math.prod(shape)))) * 255.0
    largest = float(((signs @ matrix_of(psi, shape).T) ** 2).sum(1).max())  # of every difference of two vertices
    found = psi.describe(shape).squared_diameter
    assert found >= largest * (1 - 1e-12)
    if attained:
        assert found == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_the_operator_norm_is_an_upper_bound(name: str) -> None:
    psi, shape, _ = SMALL[name]
    norm = psi.operator_norm(shape)
    exact = np.linalg.norm(matrix_of(psi, shape), 2)
    assert norm is not None
    assert norm >= exact * (1 - 1e-12)
    if name != "downsample, overlapping":
        assert norm == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_outputs_stay_in_the_stated_range(name: str) -> None:
    psi, shape, _ = SMALL[name]
    corners = torch.from_numpy(np.array(list(itertools.product((0.0, 255.0), repeat=math.prod(shape)))))
    found = psi.transform(corners.reshape(-1, *shape))
    interval = psi.output_range(shape)
    assert interval is not None
    assert interval[0] <= float(found.min())
    assert float(found.max()) <= interval[1]


def test_declared_ranges_scale_b_and_peaks() -> None:
    found = Crop(0, 0, 2, 3, value_range=(-1, 1)).describe((4, 4))
    assert found.squared_diameter == 4.0 * 6
    assert found.peak == 2.0
    assert LowFrequencies(2, value_range=(-1, 1)).describe((4, 4)).peak is None
    assert Downsample(2, value_range=(0, 1)).describe((4, 4)).peak == 1.0


# ---- descriptors -----------------------------------------------------------------------------------------------------


def test_the_digest_covers_every_setting() -> None:
    eye = np.eye(16)
    made = [
        Crop(0, 0, 2, 2), Crop(0, 0, 2, 3), Crop(1, 0, 2, 2), Crop(0, 0, 2, 2, value_range=(0, 256)),
        Downsample(2), Downsample((2, 1)), LowFrequencies(2), LowFrequencies((2, 1)),
        Mask(np.eye(4)), Mask(np.eye(4)[::-1]), Coordinates([1, 2]), Coordinates([2, 1]), LinearMap(eye[:4]),
        LinearMap(eye[:4] * 2), LinearMap(eye[:5]),
    ]  # fmt: skip
    assert len({psi.describe((4, 4)).digest for psi in made}) == len(made)
    assert len({Channels(i).describe((3, 8, 8)).digest for i in range(3)}) == 3


def test_long_settings_are_digests() -> None:
    many = Coordinates(range(1000)).describe((40, 40))
    assert len(many.parameters) < 300
    assert json.loads(many.parameters)["count"] == 1000


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("psi", "shape", "message"),
    [
        (Crop(8, 8, 12, 12), (16, 28), r"rows 8 to 19 and columns 8 to 19 lies outside images of 16 × 28"),
        (Crop(0, 27, 1, 2), (28, 28), "outside images of 28 × 28"),
        (Crop(0, 0, 2, 2), (784,), r"crop needs images.*\(784,\).*Reshape"),
        (Crop(0, 0, 2, 2), (3, 28, 3), "channels='first' or channels='last'"),
        (Crop(0, 0, 2, 2), (28, 28, 28), "channels='first' or channels='last'"),
        (Downsample(29), (28, 28), "29 × 29 is not within images of 28 × 28"),
        (LowFrequencies(29), (28, 28), "Choose fewer"),
        (LowFrequencies(9), (8,), "Choose fewer"),
        (Channels(3), (3, 8, 8), "no channel 3"),
        (Coordinates([64]), (8, 8), "no entry 64. Positions are counted from 0"),
        (Mask(np.ones((7, 8))), (8, 8), r"mask has shape \(7, 8\), but records have \(8, 8\)"),
        (LinearMap(np.ones((2, 63))), (8, 8), "63 columns, but records of shape .* have 64 entries"),
    ],
)
def test_records_that_do_not_fit(psi: Representation, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        psi.describe(shape)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Crop(-1, 0, 2, 2), "top"),
        (lambda: Crop(0, 0, 0, 2), "height"),
        (lambda: Crop(0, 0, 2, 2.5), "width to be a whole number"),
        (lambda: Crop(0, 0, 2, 2, channels="middle"), "'auto', 'first' or 'last'"),
        (lambda: Crop(0, 0, 2, 2, value_range=(1, 0)), "low < high"),
        (lambda: Crop(0, 0, 2, 2, value_range=3), r"\(low, high\)"),
        (lambda: Channels(), "at least one"),
        (lambda: Channels(1, 1), "distinct"),
        (lambda: Coordinates([]), "at least one"),
        (lambda: Coordinates([0, -1]), "indices"),
        (lambda: Mask(np.zeros((3, 3))), "keeps nothing"),
        (lambda: Mask([[0.5, 1.0]]), "mask of booleans"),
        (lambda: Downsample(0), "size"),
        (lambda: Downsample((1, 2, 3)), "one or two"),
        (lambda: LinearMap(np.ones(3)), r"matrix \(m, d\)"),
        (lambda: LinearMap([[math.nan]]), "finite matrix"),
        (lambda: LinearMap(np.zeros((2, 2))), "zero"),
        (lambda: LinearMap([["a"]]), "of numbers"),
    ],
)
def test_settings_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


def test_values_outside_the_range() -> None:
    with pytest.raises(DataError, match=r"outside the declared value_range \(0, 1\).*Crop\(\.\.\., value_range"):
        Crop(0, 0, 2, 2, value_range=(0, 1)).check(images(2, 4, 4))
    with pytest.raises(DataError, match=r"floating-point numbers in \[0, 1\].*Downsample"):
        Downsample(2).check(torch.rand(2, 4, 4))
