"""Exact draws of tuples: the doubling identity by enumeration, and the drawn laws against the exact ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from helpers import Array, log_v, multiplicities, scatter
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chi2, chisquare, poisson

from opacus_reconbound.certificates import tuples
from opacus_reconbound.certificates.tuples import PairJob, Pool, double, draw_pairs, random_stream, stream_seed
from opacus_reconbound.errors import DataError

CHANCE = 1e-5  # of each statistical test to fail where nothing is wrong; all seeds are fixed


def records(seed: int, n: int, dimension: int = 3, size: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((size * rng.normal(size=(n, dimension)) / math.sqrt(dimension)).astype(np.float32))


def weights(seed: int, n: int) -> torch.Tensor:
    return torch.from_numpy(np.exp(np.random.default_rng(seed + 77).normal(size=n)))


def intensity(z: torch.Tensor, one: PairJob, *, repeats: bool = True) -> Array:
    """w_i w_j exp(−‖z_i − z_j‖²/(2s)) for ordered pairs."""
    x, w = z.double().numpy(), one.weights.numpy()
    k = np.exp(-((x[:, None] - x[None]) ** 2).sum(2) / (2 * one.scale))
    if not repeats:
        np.fill_diagonal(k, 0.0)
    return np.asarray(w[:, None] * k * w)


def job(seed: int, n: int, scale: float = 0.4, pairs: int = 1000) -> PairJob:
    return PairJob(weights(seed, n), scale, pairs, seed)


def unordered(table: Array) -> Array:
    """Cells (i, j) and (j, i) put together."""
    return np.asarray(np.triu(table) + np.tril(table, -1).T)


def cells(pool: Pool, n: int) -> Array:
    """How often each ordered pair was drawn."""
    code = pool.members[:, 0].long().numpy() * n + pool.members[:, 1].long().numpy()
    return np.bincount(code, minlength=n * n).reshape(n, n).astype(float)


def fits(observed: Array, expected: Array) -> bool:
    """A chi-square test with the cells of small expectation put together."""
    observed, expected = observed.ravel(), expected.ravel()
    assert observed[expected <= 0].sum() == 0
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    small = expected.cumsum() < 40
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    return int(keep.sum()) == 1 or bool(
        chisquare(observed[keep], expected[keep] * observed.sum() / expected.sum()).pvalue > CHANCE
    )


def within(successes: int, trials: int, chance: float) -> bool:
    return bool(binom.ppf(CHANCE, trials, chance) <= successes <= binom.ppf(1 - CHANCE, trials, chance))


def poisson_within(count: int, mean: float) -> bool:
    return bool(poisson.ppf(CHANCE, mean) <= count <= poisson.ppf(1 - CHANCE, mean))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads that wait for one another would take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 10 × 10 in blocks of 4, the last one of 2: both stages of the draw and all kinds of tiles matter."""
    monkeypatch.setattr(tuples, "_TILE", 10)
    monkeypatch.setattr(tuples, "_BLOCK", 4)


# ---- the identity ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(5, 7), st.sampled_from([1, 2, 3]), st.floats(0.05, 2.0))
def test_doubling_identity(seed: int, atoms: int, r: int, scale: float) -> None:
    """V_2r = V_r² P_2r, and accepted pairs have the law q_2r."""
    rng = np.random.default_rng(seed)
    points, mass = rng.normal(size=(atoms, 2)), rng.gamma(1.0, size=atoms) / atoms + 1e-6
    tuples_r = np.array(list(itertools.product(range(atoms), repeat=r)))
    occurs = np.stack([(tuples_r == a).sum(1) for a in range(atoms)], axis=1).astype(float)
    q = np.exp(occurs @ np.log(mass) - scatter(points, occurs) / scale)
    v_r = q.sum()
    assert math.log(v_r) == pytest.approx(log_v(points, mass, scale, r), abs=1e-10)
    means = occurs @ points / r
    accept = np.exp(-r * ((means[:, None] - means[None]) ** 2).sum(2) / (2 * scale))
    p = q @ accept @ q / v_r**2
    assert 0 < p <= 1
    v_2r = math.exp(log_v(points, mass, scale, 2 * r))
    assert v_r**2 * p == pytest.approx(v_2r, rel=1e-9)
    both = (occurs[:, None] + occurs[None]).reshape(-1, atoms)
    exact = np.exp(both @ np.log(mass) - scatter(points, both) / scale) / v_2r
    np.testing.assert_allclose((np.outer(q, q) * accept).ravel() / (v_r**2 * p), exact, atol=1e-12)


# ---- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "dimension", "repeats"),
    [(1, 1, True), *itertools.product((6, 257), (3, 300), (True, False)), (512, 2, True), (1100, 20, False)],
)
def test_log_v2_is_the_double_sum(n: int, dimension: int, repeats: bool) -> None:
    """n not a multiple of a block or of a tile; several jobs in one sweep, two of them at one scale."""
    z, jobs = records(n, n, dimension), [job(0, n, 0.5), job(1, n, 0.1, 3), job(2, n, 2.0), job(3, n, 0.5)]
    found = draw_pairs(z, jobs, repeats=repeats)
    for one, (value, pool) in zip(jobs, found, strict=True):
        exact = intensity(z, one, repeats=repeats).sum() / n**2
        assert value == pytest.approx(math.log(exact), abs=1e-6)
        assert pool.size == 2
        assert pool.members.dtype == torch.int32
        if len(pool):
            assert int(pool.members.min()) >= 0
            assert int(pool.members.max()) < n
        assert repeats or bool((pool.members[:, 0] != pool.members[:, 1]).all())
        if n <= 257:  # where the pilot sees nearly every row
            assert poisson_within(len(pool), one.pairs) or n == 257
            assert len(pool) == pytest.approx(one.pairs, rel=0.2, abs=8)


def test_jobs_together_are_jobs_alone_on_any_number_of_threads() -> None:
    """Scales that are not twice one another: otherwise kernels are squares, the same within rounding."""
    z, jobs = records(0, 1300, 5), [job(0, 1300, 0.5), job(1, 1300, 0.1, 7000), job(2, 1300, 2.1)]
    together = draw_pairs(z, jobs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen: list[tuple[int, int]] = []
        threaded = draw_pairs(z, jobs, progress=lambda done, total: seen.append((done, total)))
    finally:
        torch.set_num_threads(before)
    assert [done for done, _ in seen] == list(range(1, 7))
    assert {total for _, total in seen} == {6}
    for one, (value, pool), (value_3, pool_3) in zip(jobs, together, threaded, strict=True):
        ((value_1, pool_1),) = draw_pairs(z, [one])
        assert value == value_1 == value_3
        assert torch.equal(pool.members, pool_1.members)
        assert torch.equal(pool.members, pool_3.members)
    other = draw_pairs(z, [PairJob(jobs[1].weights, 0.1, 7000, 99)])
    assert other[0][0] == together[1][0]
    assert len(other[0][1]) != len(together[1][1])


@pytest.mark.parametrize("n", [300, 700])
def test_one_row_of_tiles_on_any_number_of_threads(n: int) -> None:
    z, one = records(4, n, 300), job(4, n, 0.3, 100_000)
    ((value, pool),) = draw_pairs(z, [one])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        ((value_4, pool_4),) = draw_pairs(z, [one])
    finally:
        torch.set_num_threads(before)
    assert value == value_4
    assert torch.equal(pool.members, pool_4.members)


def test_scales_that_are_twice_one_another() -> None:
    z, jobs = records(0, 600, 5), [job(0, 600, 0.4), job(1, 600, 0.2), job(2, 600, 0.1)]
    for one, (value, pool) in zip(jobs, draw_pairs(z, jobs), strict=True):
        ((alone, _),) = draw_pairs(z, [one])
        assert value == pytest.approx(alone, abs=1e-6)
        assert len(pool) > 500


@pytest.mark.parametrize(("n", "repeats"), [(6, True), (6, False), (40, True), (40, False)])
def test_the_law_of_the_pairs(n: int, repeats: bool) -> None:
    z, one = records(n, n, 3), job(n, n, 0.5, 300_000)
    ((_, pool),) = draw_pairs(z, [one], repeats=repeats)
    mass = intensity(z, one, repeats=repeats)
    assert poisson_within(len(pool), 300_000)
    assert fits(cells(pool, n), 300_000 * mass / mass.sum())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("repeats", [True, False])
def test_the_law_of_the_pairs_across_tiles(repeats: bool) -> None:
    """A pair of two tiles stands for both orders."""
    n, expected = 38, 400_000
    z, one = records(1, n, 2), job(1, n, 0.3, expected)
    ((value, pool),) = draw_pairs(z, [one], repeats=repeats)
    mass = intensity(z, one, repeats=repeats)
    assert value == pytest.approx(math.log(mass.sum() / n**2), abs=1e-6)
    assert poisson_within(len(pool), expected)
    counted = cells(pool, n)
    tile = np.arange(n) // 10
    assert counted[tile[:, None] > tile[None]].sum() == 0
    assert fits(unordered(counted), expected * unordered(mass) / mass.sum())
    # and the ordered ones within a tile
    inside = tile[:, None] == tile[None]
    assert fits(counted[inside], expected * mass[inside] / mass.sum())


def test_pairs_of_several_tiles_of_the_usual_size() -> None:
    """1,100 records, three tiles: the law of both members over tiles, blocks and the classes of the weights."""
    n, expected = 1100, 300_000
    z, one = records(2, n, 4), job(2, n, 0.5, expected)
    ((_, pool),) = draw_pairs(z, [one])
    mass = intensity(z, one)
    first, second = pool.members.long().numpy().T
    ranks = np.argsort(np.argsort(one.weights.numpy()))
    for label in (np.arange(n) // 512, np.arange(n) // 64, ranks * 9 // n, np.arange(n) % 13):
        k = label.max() + 1
        indicator = np.eye(k)[label]
        table = unordered(indicator.T @ mass @ indicator)
        observed = np.bincount(label[first] * k + label[second], minlength=k * k).reshape(k, k).astype(float)
        assert fits(unordered(observed), table)


@pytest.mark.usefixtures("small_tiles")
def test_the_pairs_are_a_poisson_process() -> None:
    """Their number has Poisson's law, and so have those in any set of cells, independent of the rest."""
    n, expected, repeats = 25, 60, 4000
    z, w = records(3, n, 2), weights(3, n)
    mass = unordered(intensity(z, PairJob(w, 0.3, 1, 0)))
    chosen = np.random.default_rng(1).random((n, n)) < 0.5
    share = float(mass[chosen].sum() / mass.sum())
    assert 0.3 < share < 0.7
    counts = np.empty((repeats, 2))
    for seed in range(repeats):
        counted = unordered(cells(draw_pairs(z, [PairJob(w, 0.3, expected, seed)])[0][1], n))
        counts[seed] = counted[chosen].sum(), counted[~chosen].sum()
    for values, mean in ((counts.sum(1), expected), (counts[:, 0], expected * share)):
        law = repeats * poisson.pmf(np.arange(400), mean)
        assert fits(np.bincount(values.astype(int), minlength=400).astype(float), law)
        # the variance is the mean: N draws of fixed number would have half of it in half of the cells
        dispersion = ((values - mean) ** 2).sum() / mean
        assert chi2.ppf(CHANCE, repeats) < dispersion < chi2.ppf(1 - CHANCE, repeats)
    assert abs(np.corrcoef(counts.T)[0, 1]) < 4.5 / math.sqrt(repeats)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("repeats", [True, False])
def test_given_rows_stand_for_all(repeats: bool) -> None:
    """Parts that make up the whole: their mean is V_2 exactly, and each pair comes as often from them as from all."""
    n, expected = 36, 100_000
    z, one = records(8, n, 2), job(8, n, 0.3, expected)
    mass = intensity(z, one, repeats=repeats)
    parts = torch.randperm(n, generator=torch.Generator().manual_seed(0)).view(4, 9)
    values, counted = [], np.zeros((n, n))
    for index, rows in enumerate(parts):
        ordered = rows.sort().values
        job_of_part = PairJob(one.weights, one.scale, expected, index)
        ((value, pool),) = draw_pairs(z, [job_of_part], repeats=repeats, rows=ordered)
        values.append(math.exp(value))
        assert set(pool.members[:, 0].tolist()) == set(ordered.tolist())
        part_mass = mass[ordered.numpy()].sum() * 4
        assert value == pytest.approx(math.log(part_mass / n**2), abs=1e-6)
        assert poisson_within(len(pool), expected * part_mass / mass.sum())
        counted += cells(pool, n)
    assert np.mean(values) == pytest.approx(mass.sum() / n**2, rel=1e-6)
    assert np.std(values) > 0.01 * np.mean(values)
    assert fits(counted, 4 * expected * mass / mass.sum())


def test_identical_records() -> None:
    """Every distance is nought: all pairs alike, every trial accepted."""
    n = 20
    z = torch.ones(n, 5)
    ((value, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.1, 40_000, 1)])
    assert value == pytest.approx(0.0, abs=1e-6)
    assert fits(cells(pool, n), np.full((n, n), 100.0))
    for compiled in (True, False):
        accepted, merged = double(z, pool, 0.1, 1000, seed=0, compiled=compiled)
        assert accepted == 1000
        assert merged.members.shape == (1000, 4)


def test_records_that_nothing_is_near() -> None:
    """Without repeats there is no pair at all; with them each record is its own partner, in proportion to w²."""
    z, w = 1e3 * records(0, 30), weights(0, 30)
    one = PairJob(w, 0.1, 50_000, 0)
    ((value, pool),) = draw_pairs(z, [one], repeats=False)
    assert value == -math.inf
    assert pool.members.shape == (0, 2)
    assert len(pool) == 0
    ((value, pool),) = draw_pairs(z, [one])
    assert value == pytest.approx(math.log(float(w.square().sum()) / 900), abs=1e-6)
    assert fits(cells(pool, 30), np.diag(w.square().numpy()))


def test_no_pairs_wanted() -> None:
    ((value, pool),) = draw_pairs(records(0, 30), [job(0, 30, pairs=0)])
    assert math.isfinite(value)
    assert len(pool) == 0


def test_mass_that_a_few_records_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heavy copies that the pilot missed: refused before their pairs fill the memory."""
    monkeypatch.setattr(tuples, "_PILOT", 1)
    z, w = records(0, 50), torch.ones(50).double()
    z[41], w[40:42] = z[40], 1e6
    heavy = PairJob(w, 0.4, 10_000, 1)
    with pytest.raises(DataError, match=r"A few records hold most of the sample's mass: about .*e\+\d+ pairs.*duplic"):
        draw_pairs(z, [heavy], repeats=False)
    monkeypatch.setattr(tuples, "_PILOT", 50)
    ((_, pool),) = draw_pairs(z, [heavy], repeats=False)
    assert poisson_within(len(pool), 10_000)
    with pytest.raises(DataError, match="A few records hold"):
        draw_pairs(z, [job(0, 50, pairs=10**9)])


# ---- doubling --------------------------------------------------------------------------------------------------------

both_paths = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])


def some_pool(n: int, r: int) -> tuple[Pool, Array]:
    """Distinct r-tuples, each one to three times over: any law will do. The law is over the tuples in order of code."""
    rng = np.random.default_rng(r)
    every = np.array(list(itertools.combinations_with_replacement(range(n), r)))
    chosen = every[np.sort(rng.permutation(len(every))[:40])]
    times = rng.integers(1, 4, size=len(chosen))
    members = rng.permutation(np.repeat(chosen, times, axis=0))
    return Pool(torch.from_numpy(members.astype(np.int32))), times / times.sum()


def codes(members: torch.Tensor, r: int, n: int) -> Array:
    """A number for each r-tuple, in the order of ``some_pool``."""
    return np.asarray(members.long().numpy().reshape(len(members), -1, r) @ n ** np.arange(r)[::-1])


def merged_law(z: torch.Tensor, pool: Pool, law: Array, scale: float) -> tuple[float, Array]:
    """P_2r of a pool, and the law of the ordered accepted pair of its distinct tuples."""
    n, r = len(z), pool.size
    distinct = np.unique(codes(pool.members, r, n))
    digits = distinct[:, None] // n ** np.arange(r)[::-1] % n
    means = z.double().numpy()[digits].mean(1)
    accept = np.exp(-r * ((means[:, None] - means[None]) ** 2).sum(2) / (2 * scale))
    joint = np.outer(law, law) * accept
    return float(joint.sum()), joint / joint.sum()


def merged_counts(merged: Pool, pool: Pool, n: int) -> Array:
    """How often each ordered pair of distinct tuples of the pool was merged."""
    distinct = np.unique(codes(pool.members, pool.size, n))
    which = np.searchsorted(distinct, codes(merged.members, pool.size, n))
    k = len(distinct)
    return np.bincount(which[:, 0] * k + which[:, 1], minlength=k * k).reshape(k, k).astype(float)


def heads_of(z: torch.Tensor, width: int | None) -> torch.Tensor | None:
    """The first coordinates after a rotation."""
    if width is None:
        return None
    axes = np.linalg.qr(np.random.default_rng(width).normal(size=(z.shape[1], z.shape[1])))[0][:, :width]
    return (z.double() @ torch.from_numpy(axes)).float()


@both_paths
@pytest.mark.parametrize("width", [None, 0, 1, 3, 9, 12])
@pytest.mark.parametrize("r", [2, 4])
def test_acceptances_and_merged_tuples(width: int | None, r: int, compiled: bool) -> None:
    """The rate is P and the law of what is accepted is exact, however many coordinates are looked at first."""
    n, scale, trials = 6, 0.5, 150_000
    z = records(5, n, 12)
    pool, law = some_pool(n, r)
    p, joint = merged_law(z, pool, law, scale)
    assert 0.02 < p < 0.9
    accepted, merged = double(z, pool, scale, trials, seed=3, heads=heads_of(z, width), compiled=compiled)
    assert accepted == len(merged)
    assert within(accepted, trials, p)
    assert merged.size == 2 * r
    assert merged.members.dtype == torch.int32
    assert fits(merged_counts(merged, pool, n), accepted * joint)


@both_paths
@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_the_head_distances_reject_nothing_else(r: int, compiled: bool) -> None:
    """The same seed gives the same tuples whatever is read first."""
    z = records(6, 50, 100, 2.0)
    pool = Pool(torch.randint(50, (3000, r), generator=torch.Generator().manual_seed(r)).int())
    heads = [None, z[:, :0], z[:, :5], z, heads_of(z, 20), heads_of(z, 100)]
    results = [double(z, pool, 0.5, 100_000, seed=1, heads=h, compiled=compiled) for h in heads]
    assert results[0][0] > 100
    for accepted, merged in results[1:]:
        assert accepted == results[0][0]
        assert torch.equal(merged.members, results[0][1].members)


@both_paths
@pytest.mark.parametrize("n", [5, 6])
def test_eight_tuples_from_pairs(n: int, compiled: bool) -> None:
    """The whole chain, 2 to 4 to 8: which multisets occur, against q_8 up to the pools' own randomness."""
    z, w, scale, m = records(n, n, 3), weights(n, n), 0.6, 8
    ((_, pool),) = draw_pairs(z, [PairJob(w, scale, 600_000, 0)])
    for trials in (800_000, 200_000):
        _, pool = double(z, pool, scale, trials, seed=9, compiled=compiled)
    occurs = multiplicities(n, m)
    points, mass = z.double().numpy(), w.numpy() / n
    exponent = occurs @ np.log(mass) - scatter(points, occurs) / scale - log_v(points, mass, scale, m)
    orderings = np.array([math.factorial(m) / math.prod(math.factorial(int(k)) for k in row) for row in occurs])
    exact = orderings * np.exp(exponent)
    assert exact.sum() == pytest.approx(1.0, abs=1e-9)
    found = torch.nn.functional.one_hot(pool.members.long(), n).sum(1).double().numpy()
    expected_mean, spread = exact @ occurs, np.sqrt(exact @ occurs**2 - (exact @ occurs) ** 2)
    # the last pool is drawn from a pool of four-tuples: allow for both
    error = spread * math.sqrt(1 / len(found) + 4 / 100_000)
    assert (np.abs(found.mean(0) - expected_mean) < 5 * error).all()
    second = np.einsum("ka,kb->ab", found, found) / len(found)
    np.testing.assert_allclose(second, (occurs * exact[:, None]).T @ occurs, atol=0.15)
    likeliest = int(exact.argmax())
    share = float((found == occurs[likeliest]).all(1).mean())
    assert share == pytest.approx(float(exact[likeliest]), rel=0.1)


@both_paths
@pytest.mark.parametrize("r", [2, 4])
def test_the_same_seed_gives_the_same_tuples_on_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, r: int, compiled: bool
) -> None:
    monkeypatch.setattr(tuples, "_TRIALS", 1000)
    z = records(0, 30, 4)
    pool = Pool(torch.randint(30, (500, r), generator=torch.Generator().manual_seed(0)).int())
    accepted, merged = double(z, pool, 0.4, 9_500, seed=2, compiled=compiled)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen: list[tuple[int, int]] = []
        again, merged_again = double(
            z, pool, 0.4, 9_500, seed=2, compiled=compiled, progress=lambda done, total: seen.append((done, total))
        )
    finally:
        torch.set_num_threads(before)
    assert accepted == again
    assert torch.equal(merged.members, merged_again.members)
    assert seen == sorted(seen)
    assert seen[-1] == (9_500, 9_500)
    _, other = double(z, pool, 0.4, 9_500, seed=3, compiled=compiled)
    assert not torch.equal(other.members[:50], merged.members[:50])


@both_paths
def test_chunks_of_trials_are_independent(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Acceptances of many small chunks scatter as a binomial does, and are no copies of one another."""
    monkeypatch.setattr(tuples, "_TRIALS", 64)
    z = records(1, 12, 3)
    pool, law = some_pool(12, 2)
    p, _ = merged_law(z, pool, law, 0.5)
    counts = [double(z, pool, 0.5, 64 * 20, seed=seed, compiled=compiled)[0] for seed in range(300)]
    assert within(sum(counts), 300 * 64 * 20, p)
    ratio = np.var(counts, ddof=1) / (64 * 20 * p * (1 - p))
    assert 0.65 < ratio < 1.45


@both_paths
def test_without_repeats_no_record_occurs_twice(compiled: bool) -> None:
    n, scale = 20, 0.5
    z = records(3, n, 3, 0.4)
    ((_, pool),) = draw_pairs(z, [job(3, n, scale, 4000)], repeats=False)
    while pool.size < 8:
        _, pool = double(z, pool, scale, 40_000, seed=1, repeats=False, compiled=compiled)
        ordered = pool.members.sort(dim=1).values
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
        assert len(pool) > 500


@both_paths
def test_the_law_without_repeats(compiled: bool) -> None:
    """That of merged pairs, given that no record occurs twice."""
    n, scale, trials = 6, 0.5, 150_000
    z = records(5, n, 6)
    pool, law = some_pool(n, 2)
    p, joint = merged_law(z, pool, law, scale)
    members = np.unique(pool.members.numpy(), axis=0).tolist()
    distinct = np.array([[len({*a, *b}) == 4 for b in members] for a in members])
    accepted, merged = double(z, pool, scale, trials, seed=8, repeats=False, compiled=compiled)
    assert within(accepted, trials, p * float(joint[distinct].sum()))
    expected = np.where(distinct, joint, 0.0)
    assert fits(merged_counts(merged, pool, n), accepted * expected / expected.sum())


@both_paths
def test_nothing_accepted(compiled: bool) -> None:
    z = torch.tensor([[0.0], [1e3]])
    one = Pool(torch.tensor([[0, 1]], dtype=torch.int32))
    assert double(z, one, 0.1, 10, seed=0, compiled=compiled)[0] == 10  # a tuple always merges with itself
    accepted, merged = double(z, one, 0.1, 500, seed=0, repeats=False, compiled=compiled)
    assert accepted == 0
    assert merged.members.shape == (0, 4)
    apart = Pool(torch.tensor([[0, 0], [1, 1]], dtype=torch.int32))
    accepted, merged = double(z, apart, 0.1, 500, seed=0, compiled=compiled)
    assert within(accepted, 500, 0.5)
    assert (merged.members[:, :2] == merged.members[:, 2:]).all()


@both_paths
@pytest.mark.parametrize("r", [2, 4])
def test_an_empty_pool(r: int, compiled: bool) -> None:
    accepted, merged = double(
        records(0, 5), Pool(torch.empty((0, r), dtype=torch.int32)), 0.5, 1000, seed=0, compiled=compiled
    )
    assert accepted == 0
    assert merged.members.shape == (0, 2 * r)
    assert double(records(0, 5), merged, 0.5, 1000, seed=0, compiled=compiled)[1].members.shape == (0, 4 * r)


@both_paths
def test_a_trial_that_rarely_succeeds(compiled: bool) -> None:
    """The tail of the exponential variable is exact far out."""
    distance2 = 2 * math.log(1e4)  # exp(−r d²/(2s)), r = 2, s = 2
    z = torch.tensor([[0.0], [math.sqrt(distance2)]])
    pool = Pool(torch.tensor([[0, 0], [1, 1]], dtype=torch.int32))
    accepted, merged = double(z, pool, 2.0, 4_000_000, seed=0, compiled=compiled)
    mixed = int((merged.members[:, 0] != merged.members[:, 2]).sum())
    # a distance is reduced by 1e-4, which makes this 0.1% likelier
    assert within(mixed, 4_000_000, 0.5e-4)
    assert within(accepted, 4_000_000, 0.5 + 0.5e-4)


@both_paths
@pytest.mark.parametrize("width", [None, 1])
def test_distances_are_rounded_towards_acceptance(
    monkeypatch: pytest.MonkeyPatch, width: int | None, compiled: bool
) -> None:
    """By the factor of the safety, which is small."""
    assert 1 - 2e-4 < tuples._HEAD_SAFETY < 1
    z = records(7, 6, 5)
    pool, law = some_pool(6, 2)
    monkeypatch.setattr(tuples, "_HEAD_SAFETY", 0.5)
    accepted, _ = double(z, pool, 0.3, 100_000, seed=0, heads=heads_of(z, width), compiled=compiled)
    assert within(accepted, 100_000, merged_law(z, pool, law, 0.6)[0])
    assert merged_law(z, pool, law, 0.6)[0] > merged_law(z, pool, law, 0.3)[0] + 0.05


@both_paths
@pytest.mark.parametrize("r", [2, 4])
def test_tuples_closer_than_the_rounding_of_large_coordinates(r: int, compiled: bool) -> None:
    """Far from the origin heads are coarse; what the trials lose by it is within what ``multi`` charges, and tiny."""
    z = torch.full((4, 3), 100.0) + 0.1 * records(0, 4)
    pool = Pool(torch.arange(4 * r, dtype=torch.int32).view(4, r) % 4)
    scale, trials = 0.01, 200_000
    alone, _ = double(z, pool, scale, trials, seed=0, heads=z[:, :0], compiled=compiled)
    looked, _ = double(z, pool, scale, trials, seed=0, heads=heads_of(z, 3), compiled=compiled)
    allowed = 1e4 * (r + 4) ** 2 * 2.0**-48 * float(z.square().sum(1).max()) * r / (2 * scale)
    assert 0 <= alone - looked <= allowed * trials + 4 * math.sqrt(allowed * trials) + 1


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_seeds_of_streams_differ() -> None:
    made = [stream_seed(s, a, b) for s in range(8) for a in range(8) for b in range(64)]
    assert len(set(made)) == len(made)
    assert stream_seed(3, 1) != stream_seed(4, 0)
    assert stream_seed(0, 1, 2) != stream_seed(0, 2, 1)
    assert 0 <= stream_seed(-1, 5) < 2**63


def test_every_bit_of_a_seed_counts() -> None:
    """Not the lowest 32 alone, by which two in some ten thousands of streams would be copies."""
    firsts = [random_stream(1 << bit).random() for bit in range(63)] + [random_stream(0).random()]
    assert len(set(firsts)) == 64
    assert random_stream(7).random() == random_stream(7).random()
