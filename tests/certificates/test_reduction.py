"""Wide representations: distances never grow, what the certificate states, coverage; the cache of vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import most_failures
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.certificates.cache import FeatureCache
from opacus_reconbound.certificates.reduction import fit_reduction
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import LinearMap, Pixels

DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)]
NONE = FeatureCache(None)


def wide(rows: int = 5000) -> LinearMap:
    """Many coordinates, none of them exact in float32."""
    matrix = np.random.default_rng(0).normal(size=(rows, 64)) / np.sqrt(rows)
    return LinearMap(matrix, value_range=(0, 16))


def digits(**options: Any) -> SourceCertificate:
    return certify(DIGITS[:400], DIGITS[400:], **({"progress": False, "temperatures": (0.4, 0.2)} | options))


# ---- distances -------------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(st.integers(0, 10**6), st.integers(3, 60), st.integers(2, 80), st.floats(-6, 6))
def test_projected_distances_never_exceed_the_true_ones(seed: int, n: int, m: int, decay: float) -> None:
    rng = np.random.default_rng(seed)
    z = torch.from_numpy((rng.normal(size=(n, m)) * np.exp(-decay * np.arange(m) / m)).astype(np.float32))
    z -= z.mean(dim=0)
    found, _ = fit_reduction(z, min(n, m) - 1, seed=0, cache=NONE, key="")
    new = torch.from_numpy(rng.normal(size=(30, m)).astype(np.float32)) * float(z.abs().max())
    assert float(torch.linalg.matrix_norm(found.basis, 2)) <= 1.0
    for points in (z, new):
        full = torch.cdist(points.double(), points.double())
        reduced = torch.cdist(found.apply(points).double(), found.apply(points).double())
        slack = 4 * 2.0**-24 * float(points.norm(dim=1).max())  # storing float32
        assert bool((reduced <= full + slack).all())
    assert 0.0 < found.variance_kept <= 1.0


def test_the_top_principal_coordinates_are_kept() -> None:
    z = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 40)) @ np.diag(2.0 ** -np.arange(40))).float()
    z -= z.mean(dim=0)
    found, reduced = fit_reduction(z, 6, seed=0, cache=NONE, key="")
    assert torch.equal(reduced, found.apply(z))
    values, vectors = np.linalg.eigh(np.cov(z.numpy().astype(float).T, bias=True))
    share = values[::-1][:6].sum() / values.sum()
    assert found.variance_kept == pytest.approx(share, rel=1e-5)
    overlap = np.abs(vectors[:, ::-1][:, :6].T @ found.basis.numpy())
    np.testing.assert_allclose(overlap, np.eye(6), atol=1e-3)


def test_too_many_coordinates_for_the_sample() -> None:
    with pytest.raises(DataError, match=r"reduction = 400 needs more than that many reference records"):
        digits(representation=wide(), reduction=400)
    for value, message in ((0, "reduction"), (2.5, "whole number"), ("all", "reduction")):
        with pytest.raises(InvalidValueError, match=message):
            digits(reduction=value)


# ---- certificates ----------------------------------------------------------------------------------------------------


MODULE = sys.modules["opacus_reconbound.certificates.certify"]


def test_a_wide_representation_is_reduced_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    psi = wide()
    all_coordinates = digits(representation=psi, reduction=None)
    monkeypatch.setattr(MODULE, "AUTO_ABOVE_BYTES", 4 * 1797 * 5000)
    assert digits(representation=psi) == all_coordinates  # they just fit
    monkeypatch.setattr(MODULE, "AUTO_ABOVE_BYTES", 4 * 1797 * 5000 - 1)
    found = digits(representation=psi)
    stated = found.settings["reduction"]
    assert (stated["components"], stated["of"], stated["fitted_on"]) == (200, 5000, 400)
    assert 0.999 < stated["variance_kept"] <= 1.0  # the vectors vary in 64 directions
    assert len(stated["digest"]) == 64
    assert "reduction" not in all_coordinates.settings
    # scale, upper bound and range are those of the full representation
    assert found.trace == all_coordinates.trace
    assert found.trace.squared_diameter == psi.describe((8, 8)).squared_diameter
    assert found.representation == all_coordinates.representation == psi.describe((8, 8))
    assert found.representation.dimension == 5000
    for bits in (0.0, 1.0, 3.0):
        assert found.bound(bits).mse == pytest.approx(all_coordinates.bound(bits).mse, rel=2e-4)
    assert "200 principal coordinates of the reference sample (100.0% of its variance)" in found.explain()
    assert SourceCertificate.from_json(found.to_json()) == found


def test_what_is_dropped_is_lost_from_the_bound() -> None:
    psi = Pixels((0, 16))
    whole = digits(representation=psi)
    few, most = (digits(representation=psi, reduction=k).bound(0.5).rho for k in (2, 32))
    assert few < 0.7 * whole.bound(0.5).rho
    assert 0.97 * whole.bound(0.5).rho < most < whole.bound(0.5).rho
    assert digits(representation=psi, reduction=64) == whole


@pytest.mark.parametrize("designs", ["block", "all"])
def test_blocks_too(designs: str) -> None:
    """Blocks divide the reduced order: 3 divides 48, but not the order for 5,000 coordinates."""
    found = digits(representation=wide(), reduction=48, designs=designs, pairs=[(3, 1.6), (8, 1.6)])
    assert 0.5 < found.bound(0.5).rho < 1.0
    assert found.settings["pairs"] == [[3, 1.6], [8, 1.6]]


def test_coverage_at_zero_leakage() -> None:
    """Six uniform coordinates behind a map to thirty, three kept: never above the full variance too often."""
    level, repeats, failures = 0.5, 30, 0
    matrix = np.random.default_rng(1).normal(size=(30, 6)) / 5.0
    truth = float((matrix**2).sum()) / 12.0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        found = certify(
            rng.random((100, 6)).astype(np.float32),
            rng.random((300, 6)).astype(np.float32),
            representation=LinearMap(matrix, value_range=(0, 1)),
            reduction=5,
            alpha=level,
            temperatures=(0.8, 0.4),
            progress=False,
        )
        failures += found.bound(0.0).mse > truth
    assert failures <= most_failures(repeats, level)


def test_reference_vectors_beyond_memory_are_a_random_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "AUTO_ABOVE_BYTES", 0)
    monkeypatch.setattr(MODULE, "_REFERENCE_BYTES", 100 * 5000 * 4)
    found = digits(representation=wide())
    assert found.settings["reference_used"] == 100
    assert found.reference.n == 400
    assert found.trace.pairs == 50
    assert found.settings["reduction"]["components"] == 50
    assert found.bound(0.0).rho > 0.5


# ---- the cache -------------------------------------------------------------------------------------------------------


class Counted(Pixels):
    """Pixels that count their records and can break down."""

    def __init__(self, fail_after: int | None = None) -> None:
        super().__init__((0, 16))
        self.seen, self.fail_after = 0, fail_after

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        self.seen += len(records)
        if self.fail_after is not None and self.seen > self.fail_after:
            raise KeyboardInterrupt
        return super().forward(records)


@pytest.mark.parametrize("reduction", [None, 20])
def test_vectors_are_computed_once(tmp_path: Path, reduction: int | None) -> None:
    first, second = Counted(), Counted()
    plain = digits(representation=Pixels((0, 16)), reduction=reduction)
    one = digits(representation=first, reduction=reduction, cache=tmp_path / "vectors")
    two = digits(representation=second, reduction=reduction, cache=tmp_path / "vectors")
    assert one == two == plain
    assert first.seen >= 1797
    assert second.seen == 0
    other = Counted()
    digits(representation=other, reduction=reduction, cache=tmp_path / "elsewhere")
    assert other.seen == first.seen


def test_an_interrupted_run_goes_on_behind_its_last_chunk(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        digits(representation=Counted(fail_after=1800), cache=tmp_path)
    assert not list(tmp_path.glob(".*"))
    again = Counted()
    found = digits(representation=again, cache=tmp_path)
    assert 0 < again.seen < 700
    assert found == digits(representation=Pixels((0, 16)))


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    expected = digits(representation=Counted(), cache=tmp_path)
    files = sorted(tmp_path.iterdir())
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-100])
    again = Counted()
    assert digits(representation=again, cache=tmp_path) == expected
    assert again.seen > 0


def test_another_representation_or_record_is_another_entry(tmp_path: Path) -> None:
    digits(representation=Counted(), cache=tmp_path)
    scaled = digits(representation=LinearMap(np.eye(64) * 2, value_range=(0, 16)), cache=tmp_path)
    assert scaled.trace.scale == pytest.approx(4 * digits(representation=Pixels((0, 16))).trace.scale)
    changed = DIGITS.copy()
    changed[7, 0, 0] = 15
    again = Counted()
    certify(changed[:400], changed[400:], representation=again, cache=tmp_path, progress=False)
    assert 400 <= again.seen < 700  # the reference chunk alone, and its check


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cache folder .* cannot be used"):
        digits(cache=tmp_path / "file" / "inside")
