"""Reference records that are not of the source, or none; certificates that are about something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import most_failures
from sklearn.datasets import load_digits

from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.errors import CertificateError, DataError, InvalidValueError
from opacus_reconbound.representations import Crop, Downsample, Pixels

DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)]
PSI = Pixels((0, 16))
TRACE = 1300.0


def made(reference: Any, **options: Any) -> SourceCertificate:
    return certify(reference, DIGITS[400:], **({"representation": PSI, "progress": False} | options))


def synthetic(n: int = 400) -> np.ndarray:
    """Images that look a little like digits: digits turned upside down and shifted."""
    return np.roll(DIGITS[:n, ::-1], 1, axis=2).copy()


def test_synthetic_reference_records() -> None:
    found = made(synthetic(), reference_from="elsewhere", normaliser=TRACE)
    trace = found.trace
    assert (trace.scale, trace.declared, trace.normaliser, trace.pairs) == (TRACE, TRACE, "declared", 0)
    assert trace.upper >= 0.5 * trace.squared_diameter
    assert found.settings["reference_from"] == "elsewhere"
    assert "public or synthetic" in found.assumptions[-2]
    assert "declared tr Σ is at least" in found.assumptions[-1]
    own = made(DIGITS[:400], normaliser=TRACE)
    assert 0.3 * own.bound(0.5).mse < found.bound(0.5).mse < own.bound(0.5).mse
    assert SourceCertificate.from_json(found.to_json()) == found
    assert "declared tr Σ" in found.explain()


def test_no_reference_records_at_all() -> None:
    found = made(None, designs="block", normaliser=TRACE, pairs=[(8, 1.6), (4, 1.6)])
    own = made(DIGITS[:400], designs="block", pairs=[(8, 1.6), (4, 1.6)])
    assert found.reference.n == 0
    assert found.trace.scale == TRACE
    assert 0.5 * own.bound(0.5).mse < found.bound(0.5).mse < own.bound(0.5).mse * 1.05
    assert SourceCertificate.from_json(found.to_json()) == found
    wide = made(None, designs="block", normaliser=TRACE, pairs=[(8, 1.6)], representation=Downsample(4) | Pixels())
    assert wide.representation.dimension == 16


@pytest.mark.parametrize("origin", ["elsewhere", "none"])
def test_coverage_at_zero_leakage(origin: str) -> None:
    level, repeats, failures = 0.5, 30, 0
    truth = 4 / 12.0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        found = certify(
            None if origin == "none" else rng.beta(0.5, 0.5, size=(100, 4)).astype(np.float32),
            rng.random((400, 4)).astype(np.float32),
            representation=Pixels((0, 1)),
            reference_from="source" if origin == "none" else "elsewhere",
            normaliser=truth,
            designs="block" if origin == "none" else "fast",
            pairs=[(4, 0.4)],
            temperatures=(0.8, 0.4),
            alpha=level,
            seed=seed,
            progress=False,
        )
        failures += found.bound(0.0).mse > truth
        assert found.bound(0.0).rho > 0.3
    assert failures <= most_failures(repeats, level)


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        (None, {"designs": "block"}, r"nothing tells how large tr Σ is\. Declare it: normaliser"),
        (None, {"designs": "block", "normaliser": "ucb"}, "Declare it"),
        (None, {"normaliser": TRACE}, r"only designs='block'.*reference_from='elsewhere'"),
        (None, {"normaliser": TRACE, "designs": "all"}, "only designs='block'"),
        (DIGITS[:400], {"reference_from": "elsewhere"}, "Declare it"),
        (DIGITS[:400], {"reference_from": "public"}, "'source' or 'elsewhere'. Found 'public'"),
    ],
)
def test_what_has_to_be_declared(reference: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        made(reference, **options)


def test_without_reference_records_single_precision_still_has_to_do() -> None:
    records = 1e6 + 0.025 * np.random.default_rng(0).standard_normal((600, 30))
    with pytest.raises(DataError, match="single precision"):
        certify(
            None, records, representation=Pixels((0, 2e6)), designs="block", normaliser=0.02, pairs=[(4, 1.6)],
            progress=False,
        )  # fmt: skip


# ---- about something else --------------------------------------------------------------------------------------------


def test_a_representation_that_is_not_the_certificates() -> None:
    found = made(DIGITS[:400], representation=Crop(2, 2, 4, 4, value_range=(0, 16)))
    found.check_representation(Crop(2, 2, 4, 4, value_range=(0, 16)))
    for other in (
        Crop(2, 2, 4, 3, value_range=(0, 16)),
        Crop(2, 2, 4, 4, value_range=(0, 17)),
        Crop(2, 2, 4, 4, value_range=(0, 16), channels="first"),
        Crop(2, 2, 4, 4) | Pixels((0, 16)),
        PSI,
    ):
        with pytest.raises(CertificateError, match=r"The certificate is about crop .*, not about"):
            found.check_representation(other)
    with pytest.raises(CertificateError, match="does not take: The crop of rows 8"):
        found.check_representation(Crop(8, 8, 12, 12))


# ---- bad records -----------------------------------------------------------------------------------------------------


def test_all_black_images() -> None:
    black = np.zeros((600, 8, 8), np.uint8)
    for psi in (PSI, Crop(0, 0, 4, 4, value_range=(0, 16)), Downsample(2, value_range=(0, 16))):
        with pytest.raises(DataError, match="all alike in this representation"):
            certify(black[:200], black[200:], representation=psi, allow_repeats=True, progress=False)
    # a corner that is black in all images, while the images differ
    corner = DIGITS.copy()
    corner[:, :2, :2] = 0
    with pytest.raises(DataError, match="all alike in this representation"):
        certify(
            corner[:400], corner[400:], representation=Crop(0, 0, 2, 2, value_range=(0, 16)), progress=False,
        )  # fmt: skip


def test_images_of_two_sizes() -> None:
    with pytest.raises(DataError, match=r"different shapes: reference \(8, 8\), estimation \(9, 8\)"):
        certify(DIGITS[:400], np.zeros((400, 9, 8), np.uint8), representation=Downsample(4), progress=False)
    ragged = [np.zeros((8, 8), np.uint8)] * 100 + [np.zeros((9, 8), np.uint8)] * 100
    with pytest.raises(DataError):
        certify(ragged, DIGITS[400:], representation=Downsample(4), progress=False)


def test_a_crop_outside_the_images_is_refused_before_anything_is_computed() -> None:
    with pytest.raises(DataError, match="lies outside images of 8 × 8"):
        made(DIGITS[:400], representation=Crop(8, 8, 12, 12))


def test_a_range_that_records_break() -> None:
    class Narrow(Pixels):
        def check(self, records: Any) -> None:
            pass

    with pytest.raises(DataError, match=r"squared distance of .* more than the representation's range B = 64 allows"):
        made(DIGITS[:400], representation=Narrow((0, 1)))
