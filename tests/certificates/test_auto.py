"""designs="auto": what the pilot chooses, how α is spent, and that the union is worth it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from opacus_reconbound import Pixels, certify
from opacus_reconbound.certificates import auto
from opacus_reconbound.errors import DataError


def clusters(n: int) -> np.ndarray:
    """A mixture of forty Gaussians in eight dimensions, kept inside a known range."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(40, 8)) * 2
    return np.clip(centres[generator.integers(40, size=n)] + 0.4 * generator.normal(size=(n, 8)), -10, 10)


def make(reference: int, estimation: int, **kwargs: Any) -> Any:
    records = clusters(reference + estimation)
    return certify(records[:reference], records[reference:], representation=Pixels((-10, 10)), **kwargs)


def test_many_replicas_take_part_and_pay_where_there_are_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MULTI_GRID", ((0.4, 8), (0.28, 8)))
    best, fast = make(1000, 8000, designs="auto"), make(1000, 8000)
    assert best.settings["chosen"][:2] == ["replica", "multi"]
    assert {design.replicas for design in best.designs if design.kind == "replica"} == {2, 8}
    assert [(s, m) for s, m, _ in best.settings["multi"]] == [(0.4, 8), (0.28, 8)]
    assert all(len(trials) == 2 for _, _, trials in best.settings["multi"])
    assert math.fsum(best.alpha_split.values()) == pytest.approx(best.alpha)
    assert best.bound(1.0).rho > fast.bound(1.0).rho + 0.02
    # two replicas keep a share of α, so what they alone certify hardly suffers
    assert best.bound(5.0).rho > fast.bound(5.0).rho - 0.01


def test_small_samples_get_two_replicas_only() -> None:
    certificate = make(150, 600, designs="auto")
    assert certificate.settings["chosen"] == ["replica"]
    assert certificate.designs == make(150, 600).designs


def test_many_replicas_from_too_few_records_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MULTI_GRID", ((0.01, 8),))
    generator = np.random.default_rng(1)
    records = generator.uniform(0, 1, size=(500, 400))  # far from each other: no tuple is ever accepted
    with pytest.raises(DataError, match=r"too small for designs with many replicas.*designs='fast'"):
        certify(records[:200], records[200:], representation=Pixels((0, 1)), designs="multi")


def test_blocks_take_part_where_they_win() -> None:
    """Four independent Gaussian coordinates are the block bound's own ground."""
    generator = np.random.default_rng(2)
    records = np.clip(generator.normal(size=(4000, 4)), -8, 8)
    certificate = certify(records[:2000], records[2000:], representation=Pixels((-8, 8)), designs="auto")
    assert certificate.settings["chosen"] == ["replica", "block"]
    assert {certificate.bound(bits).design.kind for bits in (0.5, 1.0, 2.0, 3.0)} & {"block"}
