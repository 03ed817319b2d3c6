"""Vectors: scaling declared or fixed on the reference sample, ranges, clipping."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer

from opacus_reconbound.certificates import certify
from opacus_reconbound.errors import CertificateError, DataError, InvalidValueError
from opacus_reconbound.representations import Coordinates, Downsample, Vectors

TABLE = np.random.default_rng(0).permutation(load_breast_cancer().data)  # 569 rows, 30 columns of different units


def test_scale_and_range() -> None:
    psi = Vectors(ranges=[(0, 100), (-1, 1)], scale=[0.1, 2.0])
    x = torch.tensor([[0.0, -1.0], [100.0, 1.0]])
    z = psi(x)
    assert z.tolist() == [[0.0, -2.0], [10.0, 2.0]]
    found = psi.describe((2,))
    assert found.squared_diameter == pytest.approx(float((z[0] - z[1]).square().sum()))
    assert (found.name, found.dimension, found.peak) == ("vectors", 2, None)
    assert json.loads(found.parameters)["scale"] == [0.1, 2.0]
    assert psi.operator_norm((2,)) == 2.0


def test_clipping() -> None:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)) * 3
    z = Vectors(clip_radius=5.0)(x)
    assert float(z.double().norm(dim=1).max()) <= 5.0
    short = x.norm(dim=1) < 4.99
    assert torch.allclose(z[short], x[short])
    assert bool((~short).any())
    assert Vectors(clip_radius=5.0).describe((7,)).squared_diameter == 100.0
    assert Vectors(clip_radius=5.0, ranges=(-1, 1)).describe((7,)).squared_diameter == 28.0


@pytest.mark.parametrize("chunk", [7, 100, 569])
def test_the_reference_sample_fixes_the_scale(chunk: int) -> None:
    psi = Vectors(clip_radius=30.0, scale="reference")
    assert psi.needs_fit
    chunks = [torch.from_numpy(TABLE[start : start + chunk]) for start in range(0, len(TABLE), chunk)]
    fitted = psi.fit(chunks)
    assert psi.needs_fit
    assert not fitted.needs_fit
    assert fitted.scale is not None
    np.testing.assert_allclose(fitted.scale.numpy(), 1.0 / TABLE.std(axis=0), rtol=1e-9)
    standardised = (TABLE - TABLE.mean(axis=0)) / TABLE.std(axis=0)
    short = np.linalg.norm(standardised, axis=1) < 29.9
    np.testing.assert_allclose(fitted(torch.from_numpy(TABLE))[short].numpy(), standardised[short], atol=1e-5)
    assert fitted.fit(chunks) is fitted
    with pytest.raises(InvalidValueError, match="call fit"):
        psi.describe((30,))


def test_certify_fits_on_the_reference_sample_alone() -> None:
    psi = Vectors(clip_radius=30.0, scale="reference")
    certificate = certify(TABLE[:200], TABLE[200:], representation=psi, progress=False)
    fitted = psi.fit([torch.from_numpy(TABLE[:200])])
    certificate.check_representation(fitted)
    assert certificate.trace.scale < 30.0 * 1.0001  # unit variance in each column, less what is clipped
    assert certificate.trace.scale > 25.0
    assert 0.05 < certificate.bound(0.0).rho < 1.0
    with pytest.raises(CertificateError, match="not about vectors"):
        certificate.check_representation(psi.fit([torch.from_numpy(TABLE[200:])]))


def test_fitted_behind_another_stage() -> None:
    psi = Coordinates([0, 3], value_range=(0, 1e4)) | Vectors(clip_radius=9.0, scale="reference")
    fitted = psi.fit([torch.from_numpy(TABLE[:100]), torch.from_numpy(TABLE[100:])])
    two = TABLE[:, [0, 3]]
    expected = (two - two.mean(axis=0)) / two.std(axis=0)
    short = np.linalg.norm(expected, axis=1) < 8.9
    np.testing.assert_allclose(fitted(torch.from_numpy(TABLE))[short].numpy(), expected[short], atol=1e-5)
    assert (Downsample(2) | psi).needs_fit


def test_a_column_that_is_constant_has_no_scale() -> None:
    table = TABLE.copy()
    table[:, 4] = 0.1
    with pytest.raises(DataError, match=r"Column 4 is constant in the reference sample"):
        certify(table[:200], table[200:], representation=Vectors(clip_radius=9.0, scale="reference"), progress=False)
    with pytest.raises(DataError, match="no reference records"):
        Vectors(clip_radius=9.0, scale="reference").fit([])


def test_values_outside_the_ranges() -> None:
    psi = Vectors(ranges=[(0, 1), (0, 5)])
    psi.check(torch.tensor([[0.0, 5.0]]))
    with pytest.raises(DataError, match=r"Column 1 holds values from 0 to 6, outside the declared range \(0, 5\)"):
        psi.check(torch.tensor([[0.0, 0.0], [1.0, 6.0]]))
    with pytest.raises(DataError, match="2 ranges, but records have 3 entries"):
        psi.describe((3,))
    with pytest.raises(DataError, match="4 scale, but records have 3 entries"):
        Vectors(clip_radius=1.0, scale=[1, 1, 1, 1]).describe((3,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Declare the range of the vectors"),
        ({"clip_radius": -1}, "clip_radius > 0"),
        ({"ranges": [(0, 1), (1, 0)]}, r"ranges\[1\] to be \(low, high\)"),
        ({"ranges": [(0, float("nan"))]}, r"ranges\[0\]"),
        ({"ranges": [(0, 1, 2)]}, "sequence of them"),
        ({"ranges": "wide"}, "sequence of them"),
        ({"clip_radius": 1, "scale": "unit"}, "'reference', numbers or None"),
        ({"clip_radius": 1, "scale": [1.0, 0.0]}, r"scale\[1\] > 0"),
        ({"clip_radius": 1, "scale": [[1.0]]}, "weight for each column"),
    ],
)
def test_declarations_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Vectors(**options)


def test_many_columns_are_digests() -> None:
    wide = Vectors(clip_radius=1.0, scale=np.ones(5000)).describe((5000,))
    assert len(wide.parameters) < 300
    assert wide.digest != Vectors(clip_radius=1.0, scale=np.full(5000, 2.0)).describe((5000,)).digest
