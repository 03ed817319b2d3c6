"""The table of comparisons: what each row says, which rows there are, and that ours is the certificate's."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from opacus_reconbound import Pixels, Schedule, SourceCertificate
from opacus_reconbound.certificates import BlockDesign, ReplicaDesign
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.comparisons import (
    Comparison,
    compare,
    exact_recovery,
    fisher_information,
    largest_success,
    unbiased_error_by_rdp,
    van_trees_error,
)
from opacus_reconbound.errors import InvalidValueError

CERTIFICATE = SourceCertificate(
    designs=(ReplicaDesign(temperature=0.2, intercept=0.85), BlockDesign(block_size=4, dither=1.6, entropy_bits=1.9)),
    trace=TraceScale(scale=2.0, upper=2.5, level=0.05, pairs=10, squared_diameter=16.0),
    representation=Pixels((0, 1)).describe((4, 4)),
    reference=SampleSummary(n=100, fingerprint="a"),
    estimation=SampleSummary(n=600, fingerprint="b"),
    alpha=0.05,
    alpha_split={"replica": 0.05},
    seed=0,
)
SCHEDULE = Schedule.constant(sample_rate=0.02, noise_multiplier=1.1, steps=1000)
JACOBIAN = 0.5 * np.eye(16)


def everything() -> dict[str, Comparison]:
    rows = compare(SCHEDULE, CERTIFICATE, prior_success=0.01, candidates=1000, entropy_bits=9.0, jacobian=JACOBIAN)
    return {row.name: row for row in rows}


def test_every_row_is_its_function() -> None:
    rows = everything()
    assert list(rows) == [
        "certificate (this library)",
        "unbiased, by RDP of order 2",
        "midpoint of the box, an attack",
        "Fisher information leakage",
        "van Trees, a point estimate",
        "reconstruction robustness",
        "exact recovery, by Fano",
    ]
    ours = CERTIFICATE.bound(SCHEDULE.charged_bits)
    unit = math.sqrt(2.0 / 16)
    information = fisher_information(SCHEDULE, JACOBIAN)
    values = [row.value for row in rows.values()]
    assert values == [
        ours.rmse_per_coordinate,
        math.sqrt(unbiased_error_by_rdp(SCHEDULE, 1.0)),
        0.5,
        math.sqrt(information.unbiased_error),
        math.sqrt(van_trees_error(information, 16**2 / 2.0)),
        largest_success(SCHEDULE, 0.01),
        exact_recovery(SCHEDULE.charged_bits, 1000, 9.0),
    ]
    assert rows["certificate (this library)"].ratio == ours.rho
    for row in list(rows.values())[:5]:
        assert row.ratio == pytest.approx(row.value / unit)
        assert row.unit == "RMSE per coordinate, data units"
    for row in list(rows.values())[5:]:
        assert row.ratio is None
        assert row.unit == "probability"
        assert 0 < row.value < 1


def test_what_each_assumes() -> None:
    rows = everything()
    assert {name for name, row in rows.items() if row.attacks == "unbiased"} == {
        "unbiased, by RDP of order 2",
        "Fisher information leakage",
    }
    confidence = {name: row.confidence for name, row in rows.items()}
    assert confidence["certificate (this library)"] == 0.95
    assert [name for name, value in confidence.items() if value is None] == [
        "Fisher information leakage",
        "van Trees, a point estimate",
        "reconstruction robustness",
    ]
    for row in rows.values():
        assert all(getattr(row, field.name) not in ("", ()) for field in fields(row))
    with pytest.raises(FrozenInstanceError):
        row.value = 0.0  # type: ignore[misc]


def test_an_attack_that_ignores_the_model_shows_what_unbiased_leaves_out() -> None:
    rows = {row.name: row for row in compare(SCHEDULE.scaled(5.0), CERTIFICATE)}
    attained = rows["midpoint of the box, an attack"]
    assert rows["unbiased, by RDP of order 2"].value > attained.value > rows["certificate (this library)"].value


def test_only_what_can_be_had_without_a_certificate() -> None:
    assert [row.name for row in compare(SCHEDULE, peak=1.0)] == [
        "unbiased, by RDP of order 2",
        "midpoint of the box, an attack",
    ]
    assert [row.name for row in compare(SCHEDULE, jacobian=JACOBIAN)] == ["Fisher information leakage"]
    assert len(compare(SCHEDULE, jacobian=JACOBIAN, prior_information=3.0)) == 2
    (only,) = compare(SCHEDULE, candidates=10)
    assert only.ratio is None
    (only,) = compare(SCHEDULE, prior_success=0.1, prv=True)
    assert only.value < largest_success(SCHEDULE, 0.1)


def test_nothing_revealed() -> None:
    rows = {row.name: row for row in compare(Schedule(), CERTIFICATE, prior_success=0.1, jacobian=JACOBIAN)}
    assert rows["certificate (this library)"].ratio == CERTIFICATE.highest_rho
    assert rows["unbiased, by RDP of order 2"].value == math.inf
    assert rows["van Trees, a point estimate"].ratio == pytest.approx(1.0)
    assert rows["reconstruction robustness"].value == 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "Nothing to compare"),
        ({"entropy_bits": 3.0}, "entropy_bits needs candidates"),
        ({"prior_information": 3.0}, "prior_information needs jacobian"),
        ({"peak": -1.0}, "peak > 0"),
        ({"prior_success": 2.0}, "prior_success"),
        ({"certificate": CERTIFICATE, "jacobian": np.eye(3)}, "16 columns"),
    ],
)
def test_bad_input(arguments: dict, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        compare(SCHEDULE, **arguments)
