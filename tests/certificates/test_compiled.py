"""The compiled trials: their random numbers against an independent implementation, and what happens without numba."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare

from opacus_reconbound.certificates import compiled
from opacus_reconbound.certificates.tuples import Pool, double

CHANCE = 1e-5
MASK = (1 << 64) - 1


@pytest.fixture
def kernel() -> Callable[..., int]:
    pytest.importorskip("numba")
    found = compiled.trial_kernel()
    assert found is not None
    return found


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing numba fails, as where it is not installed."""
    compiled.trial_kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    yield
    monkeypatch.undo()
    compiled.trial_kernel.cache_clear()


def splitmix(seed: int) -> list[int]:
    """Four words of splitmix64, after the authors' public code."""
    found = []
    for _ in range(4):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        x = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        found.append(x ^ (x >> 31))
    return found


def xoshiro(state: list[int]) -> Iterator[int]:
    """xoshiro256**, likewise."""

    def rotate(x: int, k: int) -> int:
        return ((x << k) | (x >> (64 - k))) & MASK

    while True:
        yield (rotate((state[1] * 5) & MASK, 7) * 9) & MASK
        t = (state[1] << 17) & MASK
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= t
        state[3] = rotate(state[3], 45)


def trials(seed: int, number: int, count: int) -> list[tuple[int, int, float]]:
    """What each trial draws: two whole numbers below ``number`` and a uniform variable."""
    stream, found = xoshiro(splitmix(seed)), []
    unfair = ((1 << 32) - number) % number
    while len(found) < count:
        word = next(stream)
        one, two = (word >> 32) * number, (word & 0xFFFFFFFF) * number
        if min(one & 0xFFFFFFFF, two & 0xFFFFFFFF) >= unfair:
            found.append((one >> 32, two >> 32, ((next(stream) >> 11) + 1) / 2**53))
    return found


def test_the_independent_implementation_has_the_published_values() -> None:
    assert splitmix(1234567) == [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    stream = xoshiro([1, 2, 3, 4])
    assert [next(stream) for _ in range(4)] == [11520, 0, 1509978240, 1215971899390074240]


@pytest.mark.parametrize("r", [2, 4])
@pytest.mark.parametrize("number", [1, 37, 3_000])
def test_the_trials_are_those_of_an_independent_implementation(kernel: Callable[..., int], r: int, number: int) -> None:
    """Draws, exponential variables, distances and the order of what is found; also the last, short batch."""
    count, seed, factor = 1_111, 2**63 - 12345, 0.8
    rng = np.random.default_rng(number)
    records = rng.normal(size=(50, 130)).astype(np.float32) / np.float32(8.0)
    members = rng.integers(50, size=(number, r)).astype(np.int32)
    means = records[members].mean(1, dtype=np.float64)
    table = (records if r == 2 else means.astype(np.float32)) * np.float32(1 - 1e-6)
    found = np.full((count, 2), -1, dtype=np.int64)
    near, far = np.ascontiguousarray(table[:, :8]), np.ascontiguousarray(table[:, 8:40])
    accepted = kernel(near, far, records, members, factor, count, np.uint64(seed), found)
    expected, close = [], 0
    for a, b, uniform in trials(seed, number, count):
        gap = factor * float(((means[a] - means[b]) ** 2).sum()) + math.log(uniform)
        close += abs(gap) < 1e-9
        if gap <= 0:
            expected.append((a, b))
    assert close <= 1  # of the last bits nothing is claimed
    assert accepted == len(expected)
    assert found[:accepted].tolist() == [list(pair) for pair in expected]
    assert (found[accepted:] == -1).all()
    assert number == 1 or 0.02 * count < accepted < 0.98 * count


def test_numbers_of_a_very_large_pool_are_equally_likely(kernel: Callable[..., int]) -> None:
    """Three quarters of 2^32 tuples: whole numbers made without rejection would favour one in three by a half."""
    number, count = 3 << 30, 300_000
    nothing = np.zeros((1, 4), dtype=np.float32)
    members = np.broadcast_to(np.zeros((1, 4), dtype=np.int32), (number, 4))
    table = np.broadcast_to(nothing[:, :1], (number, 1))
    found = np.empty((count, 2), dtype=np.int64)
    assert kernel(table, table, nothing, members, 1.0, count, np.uint64(5), found) == count
    assert found.min() >= 0
    assert found.max() < number
    for column in found.T:
        for parts in (np.bincount(column >> 30, minlength=3), np.bincount(column % 3), np.bincount(column % 64)):
            assert chisquare(parts).pvalue > CHANCE
    # both members of a trial, and members of neighbouring trials, are independent
    for one, two in ((found[:, 0], found[:, 1]), (found[:-1, 1], found[1:, 0])):
        assert chisquare(np.bincount((one >> 28) * 12 + (two >> 28), minlength=144)).pvalue > CHANCE


def test_streams_of_neighbouring_seeds_differ(kernel: Callable[..., int]) -> None:
    z, members = np.zeros((1, 3), dtype=np.float32), np.zeros((1000, 2), dtype=np.int32)
    found = np.empty((64, 2), dtype=np.int64)
    streams = set()
    for seed in (*range(40), 2**62, 2**62 + 1):
        kernel(z[:, :1].copy(), z[:, 1:].copy(), z, members, 1.0, 64, np.uint64(seed), found)
        streams.add(tuple(found.ravel().tolist()))
    assert len(streams) == 42


@pytest.mark.usefixtures("no_numba")
def test_without_numba_the_plain_trials_are_taken() -> None:
    """To the bit; their law is tested in ``test_tuples``."""
    assert compiled.trial_kernel() is None
    z = torch.randn(20, 60, generator=torch.Generator().manual_seed(0)) / 8
    for r in (2, 4):
        pool = Pool(torch.randint(20, (500, r), generator=torch.Generator().manual_seed(r)).int())
        asked, plain = (double(z, pool, 0.5, 20_000, seed=1, compiled=wanted) for wanted in (True, False))
        assert 500 < asked[0] == plain[0]
        assert torch.equal(asked[1].members, plain[1].members)


def test_both_paths_have_one_law_and_other_numbers(kernel: Callable[..., int]) -> None:
    z = torch.randn(20, 60, generator=torch.Generator().manual_seed(0)) / 8
    pool = Pool(torch.randint(20, (500, 4), generator=torch.Generator().manual_seed(2)).int())
    one, two = (double(z, pool, 0.5, 400_000, seed=1, compiled=wanted) for wanted in (True, False))
    assert not torch.equal(one[1].members[:100], two[1].members[:100])
    total = one[0] + two[0]
    assert binom.ppf(CHANCE, total, 0.5) <= one[0] <= binom.ppf(1 - CHANCE, total, 0.5)


def test_the_loop_is_compiled_once() -> None:
    assert compiled.trial_kernel() is compiled.trial_kernel()
