"""Which design wins where: the ranges against the bound itself, closed forms, and a plain search."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from helpers import GOLDEN
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.designs import BlockDesign, Design, ReplicaDesign
from opacus_reconbound.certificates.envelope import Winner, winners

GRID = GOLDEN["mnist_pixel_block_certificate"]
PUBLISHED = [
    BlockDesign(block_size=int(k), dither=nu2, entropy_bits=entropy)
    for k, row in GRID["h_lb"].items()
    for nu2, entropy in zip(GRID["nu2"], row, strict=True)
]

blocks = st.builds(
    lambda k, nu2, value: BlockDesign(
        block_size=k, dither=nu2, entropy_bits=0.5 * k * math.log2(2 * math.pi * math.e * (value + nu2) / k)
    ),
    st.integers(1, 40),
    st.floats(0.05, 8.0),
    st.floats(-0.04, 1.0),
)
replicas = st.builds(
    lambda eps, intercept, m: ReplicaDesign(temperature=eps, intercept=intercept, replicas=m),
    st.floats(1e-3, 2.0),
    st.floats(-0.3, 1.1),
    st.integers(2, 32),
)
lists = st.lists(st.one_of(blocks, replicas), min_size=1, max_size=8)


def best(designs: list[Design], bits: float) -> float:
    return max(design.distortion(bits) for design in designs)


def check(designs: list[Design], found: tuple[Winner, ...]) -> None:
    """The ranges follow one another from zero to where the bound ends, and in each the winner is the highest."""
    if best(designs, 1e-12) == 0.0:
        assert len(found) <= 1  # rounding decides
        return
    assert found[0].start_bits == 0.0
    assert found[-1].stop_bits == max(d.leakage_bits(0.0) for d in designs if d.distortion(0.0) > 0.0)
    assert best(designs, found[-1].stop_bits * (1 + 1e-9) + 1e-9) == 0.0
    for one, next_one in pairwise(found):
        assert one.stop_bits == next_one.start_bits
        assert one.position != next_one.position
        switch = one.stop_bits
        assert one.design.distortion(switch) == pytest.approx(next_one.design.distortion(switch), abs=1e-9)
    for winner in found:
        assert winner.start_bits < winner.stop_bits
        assert designs[winner.position] is winner.design
        for share in (1e-6, 0.1, 0.5, 0.9, 1 - 1e-6):
            bits = winner.start_bits + share * (winner.stop_bits - winner.start_bits)
            assert winner.design.distortion(bits) == pytest.approx(best(designs, bits), rel=1e-9, abs=1e-12)


@given(lists)
def test_the_winner_is_the_bound_everywhere(designs: list[Design]) -> None:
    check(designs, winners(designs))


@given(lists)
def test_no_range_is_missed(designs: list[Design]) -> None:
    """A fine search finds no winner, by more than rounding, that the ranges do not name."""
    found = winners(designs)
    if not found:
        return
    for bits in np.linspace(0.0, found[-1].stop_bits, 301)[:-1]:
        (winner,) = [w for w in found if w.start_bits <= bits < w.stop_bits]
        assert winner.design.distortion(float(bits)) >= best(designs, float(bits)) - 1e-10


def test_two_lines_cross_where_they_should() -> None:
    steep, flat = ReplicaDesign(temperature=0.5, intercept=0.9), ReplicaDesign(temperature=0.1, intercept=0.6)
    first, second = winners([flat, steep])
    assert (first.design, first.position) == (steep, 1)
    assert first.stop_bits == pytest.approx(0.3 / 0.4 / math.log(2), rel=1e-14)
    assert second.design == flat
    assert second.stop_bits == pytest.approx(0.6 / 0.1 / math.log(2), rel=1e-14)


def test_a_line_between_two_stretches_of_a_block() -> None:
    """A convex curve and its chord cross twice: the block wins, then the line, then the block again."""
    block = BlockDesign(block_size=2, dither=0.05, entropy_bits=0.5 * 2 * math.log2(2 * math.pi * math.e * 1.0 / 2))
    low, high = 0.7, 2.5
    slope = (block.distortion(low) - block.distortion(high)) / ((high - low) * math.log(2))
    line = ReplicaDesign(temperature=slope, intercept=block.distortion(low) + slope * low * math.log(2))
    found = winners([line, block])
    assert [w.design for w in found] == [block, line, block]
    assert found[0].stop_bits == pytest.approx(low, abs=1e-10)
    assert found[1].stop_bits == pytest.approx(high, abs=1e-10)


def test_the_published_grid() -> None:
    found = winners(PUBLISHED)
    check(list(PUBLISHED), found)
    assert len(found) > 5
    sizes = [w.design.block_size for w in found if isinstance(w.design, BlockDesign)]
    assert sizes[0] < sizes[-1]


def test_equal_designs_and_designs_that_say_nothing() -> None:
    one = ReplicaDesign(temperature=0.4, intercept=0.8)
    assert [w.position for w in winners([one, one, one])] == [0]
    nothing = ReplicaDesign(temperature=0.4, intercept=-0.1)
    empty = BlockDesign(block_size=3, dither=1.0, entropy_bits=-5000.0)
    assert winners([nothing, empty]) == ()
    assert [w.position for w in winners([nothing, one, empty])] == [1]


@pytest.mark.parametrize(
    "design",
    [
        ReplicaDesign(temperature=1e-320, intercept=0.9),
        ReplicaDesign(temperature=1e300, intercept=0.9),
        ReplicaDesign(temperature=0.4, intercept=1e-300),
        BlockDesign(block_size=1, dither=0.1, entropy_bits=1e6),
        BlockDesign(block_size=2**20, dither=1e-300, entropy_bits=3.0),
    ],
)
def test_extreme_designs_are_answered(design: Design) -> None:
    others: list[Design] = [ReplicaDesign(temperature=0.4, intercept=0.8), PUBLISHED[0]]
    for designs in ([design], [design, *others], [*others, design]):
        found = winners(designs)
        assert found[0].start_bits == 0.0
        assert all(w.start_bits < w.stop_bits < math.inf for w in found)


def test_a_winner_is_frozen() -> None:
    (winner,) = winners([ReplicaDesign(temperature=0.4, intercept=0.8)])
    with pytest.raises(FrozenInstanceError):
        winner.start_bits = 1.0  # type: ignore[misc]
