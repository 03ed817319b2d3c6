"""Hadamard orders and transforms; the rotation keeps every distance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from opacus_reconbound.certificates.rotation import Rotation, fast_hadamard, hadamard_order
from opacus_reconbound.errors import DataError, InvalidValueError

DOCUMENTED = sorted({base << a for base in (1, 12, 28, 144, 336, 784) for a in range(24)})


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("m", "order"),
    [
        *((1, 1), (2, 2), (3, 4), (9, 12), (13, 16), (25, 28), (64, 64), (784, 784), (785, 896)),
        *((3072, 3072), (12_288, 12_288), (49_152, 49_152), (31_872, 32_768)),
    ],
)
def test_orders_of_the_paper(m: int, order: int) -> None:
    assert hadamard_order(m) == order


@given(st.integers(1, 200_000))
def test_the_order_is_the_least_documented_one(m: int) -> None:
    assert hadamard_order(m) == next(order for order in DOCUMENTED if order >= m)


@pytest.mark.parametrize("m", [0, -3, 2.5, math.nan, True])
def test_dimensions_that_are_none(m: float) -> None:
    with pytest.raises(InvalidValueError, match="Expected m to be"):
        hadamard_order(m)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [order for order in DOCUMENTED if order <= 1024])
def test_rows_are_signs_and_orthogonal(order: int) -> None:
    rows = fast_hadamard(torch.eye(order, dtype=torch.float64))  # row i is H e_i, so this is the transpose of H
    assert torch.equal(rows.abs(), torch.ones(order, order, dtype=torch.float64))
    assert torch.equal(rows @ rows.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [2**a for a in range(12)])
def test_powers_of_two_are_sylvester(order: int) -> None:
    x = normal(3, order)
    expected = x @ torch.from_numpy(hadamard(order)).to(torch.float64).T
    torch.testing.assert_close(fast_hadamard(x), expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("order", [12, 28, 336, 784, 896])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_fast_equals_dense(order: int, dtype: torch.dtype, tolerance: float) -> None:
    dense = fast_hadamard(torch.eye(order, dtype=torch.float64)).T
    x = normal(5, order)
    fast = fast_hadamard(x.to(dtype))
    assert fast.dtype == dtype
    torch.testing.assert_close(fast.double(), x @ dense.T, rtol=tolerance, atol=tolerance * math.sqrt(order))


@pytest.mark.parametrize("order", [12_288, 49_152])
def test_large_orders_keep_lengths(order: int) -> None:
    x = normal(2, order)
    y = fast_hadamard(x)
    torch.testing.assert_close(y @ y.T, order * (x @ x.T), rtol=1e-11, atol=1e-6)


@pytest.mark.parametrize("order", [3, 20, 783, 12**3])
def test_orders_without_a_matrix_are_refused(order: int) -> None:
    with pytest.raises(InvalidValueError, match=rf"Pad with zero coordinates to hadamard_order\({order}\)"):
        fast_hadamard(torch.zeros(1, order))


def test_a_vector_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"shape \(n, M\)"):
        fast_hadamard(torch.zeros(4))


@pytest.mark.parametrize(("records", "fitted"), [(200, True), (13, True), (12, False), (1, False)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rotation_and_padding_keep_inner_products(
    records: int, fitted: bool, dtype: torch.dtype, tolerance: float
) -> None:
    rotation = Rotation.fit(normal(records, 13))
    assert (rotation.basis is not None, rotation.signs is not None) == (fitted, not fitted)
    z = normal(40, 13, seed=1, dtype=dtype)
    y = rotation.apply(z)
    assert y.shape == (40, 16)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double() @ y.double().T, z.double() @ z.double().T, rtol=0, atol=20 * tolerance)


def test_every_coordinate_carries_the_same_variance() -> None:
    reference = normal(400, 12) @ normal(12, 12, seed=2) + 5.0
    rotated = Rotation.fit(reference).apply(reference)
    total = float(reference.var(0, correction=0).sum())
    assert rotated.var(0, correction=0).tolist() == pytest.approx([total / 12] * 12, rel=1e-10)


def test_a_data_free_rotation_depends_on_the_seed_alone() -> None:
    z = normal(4, 30)
    few, others = Rotation.fit(normal(5, 30), seed=3), Rotation.fit(normal(9, 30, seed=8), seed=3)
    assert torch.equal(few.apply(z), others.apply(z))
    assert torch.equal(few.apply(z), Rotation.data_free(30, seed=3).apply(z))
    assert not torch.equal(few.apply(z), Rotation.data_free(30, seed=4).apply(z))


def test_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, z = normal(50, 7), normal(33, 7, seed=1)
    whole = Rotation.fit(reference).apply(z)
    monkeypatch.setattr("opacus_reconbound.certificates.rotation._WORK_ELEMENTS", 40)
    torch.testing.assert_close(Rotation.fit(reference).apply(z), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(5, 0)])
def test_a_reference_of_the_wrong_shape(bad: torch.Tensor) -> None:
    with pytest.raises(DataError, match=r"shape \(n, d\)"):
        Rotation.fit(bad)


def test_a_reference_that_is_not_finite() -> None:
    bad = normal(20, 3)
    bad[4, 1] = math.nan
    with pytest.raises(DataError, match="NaN or infinity"):
        Rotation.fit(bad)


def test_records_of_another_dimension() -> None:
    with pytest.raises(InvalidValueError, match=r"shape \(n, 3\), as fitted"):
        Rotation.data_free(3).apply(torch.zeros(2, 4))
