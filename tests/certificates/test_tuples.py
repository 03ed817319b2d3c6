"""Exact draws of tuples: the doubling identity by enumeration, and the drawn laws against the exact ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from helpers import Array, log_v, multiplicities, scatter
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, chisquare

from opacus_reconbound.certificates import tuples
from opacus_reconbound.certificates.tuples import PairJob, Pool, double, draw_pairs, stream_seed

CHANCE = 1e-5  # of each statistical test to fail where nothing is wrong; all seeds are fixed


def records(seed: int, n: int, dimension: int = 3, size: float = 1.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy((size * rng.normal(size=(n, dimension)) / math.sqrt(dimension)).astype(np.float32))


def weights(seed: int, n: int) -> torch.Tensor:
    return torch.from_numpy(np.exp(np.random.default_rng(seed + 77).normal(size=n)))


def kernel(z: torch.Tensor, scale: float, *, repeats: bool = True) -> Array:
    """exp(−‖z_i − z_j‖²/(2s))."""
    x = z.double().numpy()
    k = np.exp(-((x[:, None] - x[None]) ** 2).sum(2) / (2 * scale))
    if not repeats:
        np.fill_diagonal(k, 0.0)
    return np.asarray(k)


def job(seed: int, n: int, scale: float = 0.4, draws: int = 1) -> PairJob:
    return PairJob(weights(seed, n), scale, torch.full((n,), draws, dtype=torch.int64), seed)


def fits(observed: Array, expected: Array) -> bool:
    """A chi-square test with the cells of small expectation put together."""
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads that wait for one another would take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    [(1, 1, True), *itertools.product((6, 257), (3, 300), (True, False)), (255, 2, True), (700, 20, False)],
)
def test_log_v2_is_the_double_sum(n: int, dimension: int, repeats: bool) -> None:
    """n not a multiple of a block or of a chunk; several jobs in one sweep."""
    z, jobs = records(n, n, dimension), [job(0, n, 0.5), job(1, n, 0.1, 3), job(2, n, 2.0)]
    found = draw_pairs(z, jobs, repeats=repeats)
    for one, (value, pool) in zip(jobs, found, strict=True):
        w, k = one.weights.numpy(), kernel(z, one.scale, repeats=repeats)
        assert value == pytest.approx(math.log(w @ k @ w / n**2), abs=1e-4)
        assert pool.rows is not None
        assert pool.starts is not None
        mass = w * (k @ w)
        np.testing.assert_allclose(pool.rows.numpy(), mass / mass.sum(), rtol=2e-4)
        assert pool.largest_weight == pytest.approx(float((pool.rows / one.counts).max()))
        assert pool.size == 2
        assert pool.starts.tolist() == [0, *one.counts.cumsum(0).tolist()]
        assert pool.members[:, 0].tolist() == torch.repeat_interleave(torch.arange(n), one.counts).tolist()
        assert int(pool.members.min()) >= 0
        assert int(pool.members.max()) < n


def test_jobs_together_are_jobs_alone_on_any_number_of_threads() -> None:
    z, jobs = records(0, 400, 5), [job(0, 400, 0.5, 2), job(1, 400, 0.1, 7), job(2, 400, 2.0)]
    together = draw_pairs(z, jobs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        threaded = draw_pairs(z, jobs)
    finally:
        torch.set_num_threads(before)
    for one, (value, pool), (value_3, pool_3) in zip(jobs, together, threaded, strict=True):
        ((value_1, pool_1),) = draw_pairs(z, [one])
        assert value == value_1 == pytest.approx(value_3, abs=1e-7)
        assert torch.equal(pool.members, pool_1.members)
        assert torch.equal(pool.members, pool_3.members)
    other = draw_pairs(z, [PairJob(jobs[1].weights, 0.1, jobs[1].counts, 99)])
    assert not torch.equal(other[0][1].members, together[1][1].members)


@pytest.mark.parametrize(("n", "repeats"), [(6, True), (6, False), (40, True), (40, False)])
def test_the_law_of_the_partners(n: int, repeats: bool) -> None:
    z, one = records(n, n, 3), job(n, n, 0.5, 20_000)
    ((_, pool),) = draw_pairs(z, [one], repeats=repeats)
    conditional = kernel(z, 0.5, repeats=repeats) * one.weights.numpy()
    conditional /= conditional.sum(1, keepdims=True)
    counts = np.bincount(pool.members[:, 0].long().numpy() * n + pool.members[:, 1].long().numpy(), minlength=n * n)
    observed, expected = counts.reshape(n, n).astype(float), 20_000 * conditional
    assert fits(observed.ravel(), expected.ravel())
    assert all(fits(observed[i], expected[i]) for i in range(n))


def test_the_law_of_the_partners_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 columns, the last one of 2: the first of the two stages of the draw matters."""
    monkeypatch.setattr(tuples, "_BLOCK", 4)
    monkeypatch.setattr(tuples, "_DRAWS", 1000)  # rows in several pieces
    n, draws = 30, torch.arange(30, dtype=torch.int64) * 500 + 5000
    z, w = records(1, n, 2), weights(1, n)
    value, pool = draw_pairs(z, [PairJob(w, 0.3, draws, 4)], chunk=7)[0]
    k = kernel(z, 0.3)
    assert value == pytest.approx(math.log(w.numpy() @ k @ w.numpy() / n**2), abs=1e-4)
    conditional = k * w.numpy()
    conditional /= conditional.sum(1, keepdims=True)
    cells = pool.members[:, 0].long().numpy() * n + pool.members[:, 1].long().numpy()
    observed = np.bincount(cells, minlength=n * n).astype(float)
    assert fits(observed, (draws.numpy()[:, None] * conditional).ravel())


def test_partners_of_several_blocks_of_the_usual_size() -> None:
    """700 records, three blocks: the law of each row over the blocks, and over the classes of the weights."""
    n, draws = 700, 400
    z, w = records(2, n, 4), weights(2, n)
    ((_, pool),) = draw_pairs(z, [PairJob(w, 0.5, torch.full((n,), draws, dtype=torch.int64), 0)])
    conditional = kernel(z, 0.5) * w.numpy()
    conditional /= conditional.sum(1, keepdims=True)
    partner = pool.members[:, 1].long().numpy().reshape(n, draws)
    for label in (np.arange(n) // 256, (np.argsort(np.argsort(w.numpy())) * 7) // n, np.arange(n) % 13):
        total = np.bincount(label[partner].ravel(), minlength=label.max() + 1).astype(float)
        expected = draws * np.array([conditional[:, label == c].sum() for c in range(label.max() + 1)])
        assert fits(total, expected)


def test_identical_records() -> None:
    """Every distance is nought: all pairs alike, every trial accepted."""
    n = 20
    z = torch.ones(n, 5)
    ((value, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.1, torch.full((n,), 2000), 1)])
    assert value == pytest.approx(0.0, abs=1e-5)
    observed = np.bincount(pool.members[:, 1].long().numpy(), minlength=n).astype(float)
    assert fits(observed, np.full(n, 2000.0))
    accepted, merged = double(z, pool, 0.1, 1000, seed=0)
    assert accepted == 1000
    assert merged.members.shape == (1000, 4)
    assert merged.largest_weight == pytest.approx(1e-3)


# ---- doubling --------------------------------------------------------------------------------------------------------


def exact_pair_pool(z: torch.Tensor, w: torch.Tensor, scale: float) -> tuple[Pool, Array]:
    """All pairs, once each, as a stratified pool with rows of different lengths; and the law that it stands for.

    Row i holds the pairs (i, j) with j >= i: any law will do.
    """
    n = len(z)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    starts = np.cumsum([0] + [n - i for i in range(n)])
    rows = (w / w.sum()).numpy()
    law = np.concatenate([np.full(n - i, rows[i] / (n - i)) for i in range(n)])
    pool = Pool(
        members=torch.tensor(pairs, dtype=torch.int32),
        largest_weight=float(law.max()),
        rows=w / w.sum(),
        starts=torch.from_numpy(starts),
    )
    return pool, law


def merged_law(z: torch.Tensor, pool: Pool, law: Array, scale: float) -> tuple[float, Array]:
    """P_2r of a pool, and the law of the ordered accepted pair of its tuples."""
    r = pool.size
    means = z.double().numpy()[pool.members.long().numpy()].mean(1)
    accept = np.exp(-r * ((means[:, None] - means[None]) ** 2).sum(2) / (2 * scale))
    joint = np.outer(law, law) * accept
    return float(joint.sum()), joint / joint.sum()


def tuple_numbers(members: torch.Tensor, pool: Pool, n: int) -> Array:
    """Which two tuples of the pool were merged (its tuples being distinct)."""
    base = n ** np.arange(pool.size)
    codes = pool.members.long().numpy() @ base
    order = np.argsort(codes)
    halves = members.long().numpy().reshape(len(members), 2, pool.size) @ base
    return np.asarray(order[np.searchsorted(codes[order], halves)])


@contextmanager
def heads_of(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(tuples, "_HEADS", heads)
        yield


@pytest.mark.parametrize("heads", [(12, 48), (1, 2), (6, 6)])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("r", [2, 4])
def test_acceptances_and_merged_tuples(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], weighted: bool, r: int
) -> None:
    """The rate is P and the law of what is accepted is exact, however many coordinates are looked at first."""
    n, scale, trials = 6, 0.5, 150_000
    z, w = records(5, n, 6), weights(5, n)
    pool, law = exact_pair_pool(z, w, scale)
    if r == 4:
        chosen = np.random.default_rng(0).permutation(len(pool.members) ** 2)[:40]
        a, b = np.divmod(chosen, len(pool.members))
        members = torch.cat([pool.members[a], pool.members[b]], dim=1)
        rows = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(10)))
        pool = Pool(members, float(rows.max() / 4), rows, torch.arange(11) * 4)
        law = np.repeat(rows.numpy() / 4, 4)
    if not weighted:
        pool = Pool(members=pool.members, largest_weight=1 / len(pool.members))
        law = np.full(len(pool.members), 1 / len(pool.members))
    p, joint = merged_law(z, pool, law, scale)
    assert 0.02 < p < 0.9
    with heads_of(monkeypatch, heads):
        accepted, merged = double(z, pool, scale, trials, seed=3)
    assert accepted == len(merged.members)
    assert within(accepted, trials, p)
    assert merged.rows is None
    assert merged.starts is None
    assert merged.size == 2 * r
    assert merged.largest_weight == 1 / accepted
    which = tuple_numbers(merged.members, pool, n)
    observed = np.bincount(which[:, 0] * len(law) + which[:, 1], minlength=len(law) ** 2).astype(float)
    assert fits(observed, accepted * joint.ravel())


def test_the_head_distances_reject_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seed gives the same tuples whatever is read first."""
    z, w = records(6, 50, 100, 2.0), weights(6, 50)
    pools = [Pool(members=torch.randint(50, (3000, r), generator=torch.Generator().manual_seed(r)).int(),
                  largest_weight=1 / 3000) for r in (2, 4, 8)]  # fmt: skip
    pools.append(draw_pairs(z, [PairJob(w, 0.5, torch.full((50,), 30), 0)])[0][1])
    for pool in pools:
        results = []
        for heads in ((12, 48), (1, 3), (100, 100), (10_000, 10_000)):
            with heads_of(monkeypatch, heads):
                results.append(double(z, pool, 0.5, 100_000, seed=1))
        assert results[0][0] > 100
        for accepted, merged in results[1:]:
            assert accepted == results[0][0]
            assert torch.equal(merged.members, results[0][1].members)


@pytest.mark.parametrize("n", [5, 6])
def test_eight_tuples_from_pairs(n: int) -> None:
    """The whole chain, 2 to 4 to 8: which multisets occur, against q_8 up to the pools' own randomness."""
    z, w, scale, m = records(n, n, 3), weights(n, n), 0.6, 8
    ((_, pool),) = draw_pairs(z, [PairJob(w, scale, torch.full((n,), 100_000), 0)])
    for trials in (800_000, 200_000):
        _, pool = double(z, pool, scale, trials, seed=9)
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


@pytest.mark.parametrize("r", [2, 4])
def test_the_same_seed_gives_the_same_tuples_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch, r: int) -> None:
    monkeypatch.setattr(tuples, "_TRIALS", 1000)
    z = records(0, 30, 4)
    members = torch.randint(30, (500, r), generator=torch.Generator().manual_seed(0)).int()
    pool = Pool(members=members, largest_weight=1 / 500)
    accepted, merged = double(z, pool, 0.4, 9_500, seed=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        seen: list[tuple[int, int]] = []
        again, merged_again = double(
            z, pool, 0.4, 9_500, seed=2, progress=lambda done, total: seen.append((done, total))
        )
    finally:
        torch.set_num_threads(before)
    assert accepted == again
    assert torch.equal(merged.members, merged_again.members)
    assert seen == sorted(seen)
    assert seen[-1] == (9_500, 9_500)
    _, other = double(z, pool, 0.4, 9_500, seed=3)
    assert not torch.equal(other.members[:50], merged.members[:50])


def test_chunks_of_trials_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptances of many small chunks scatter as a binomial does, and are no copies of one another."""
    monkeypatch.setattr(tuples, "_TRIALS", 64)
    z = records(1, 12, 3)
    pool, law = exact_pair_pool(z, weights(1, 12), 0.5)
    p, _ = merged_law(z, pool, law, 0.5)
    counts = [double(z, pool, 0.5, 64 * 20, seed=seed)[0] for seed in range(300)]
    assert within(sum(counts), 300 * 64 * 20, p)
    ratio = np.var(counts, ddof=1) / (64 * 20 * p * (1 - p))
    assert 0.65 < ratio < 1.45


def test_without_repeats_no_record_occurs_twice() -> None:
    n, scale = 20, 0.5
    z = records(3, n, 3, 0.4)
    ((_, pool),) = draw_pairs(z, [job(3, n, scale, 200)], repeats=False)
    assert (pool.members[:, 0] != pool.members[:, 1]).all()
    while pool.size < 8:
        _, pool = double(z, pool, scale, 40_000, seed=1, repeats=False)
        ordered = pool.members.sort(dim=1).values
        assert (ordered[:, 1:] != ordered[:, :-1]).all()
        assert len(pool.members) > 500


def test_the_law_without_repeats() -> None:
    """That of merged pairs, given that no record occurs twice."""
    n, scale, trials = 6, 0.5, 150_000
    z = records(5, n, 6)
    pool, law = exact_pair_pool(z, weights(5, n), scale)
    p, joint = merged_law(z, pool, law, scale)
    members = pool.members.numpy()
    distinct = np.array([[len({*a, *b}) == 4 for b in members.tolist()] for a in members.tolist()])
    accepted, merged = double(z, pool, scale, trials, seed=8, repeats=False)
    assert within(accepted, trials, p * float(joint[distinct].sum()))
    which = tuple_numbers(merged.members, pool, n)
    observed = np.bincount(which[:, 0] * len(law) + which[:, 1], minlength=len(law) ** 2).astype(float)
    expected = np.where(distinct, joint, 0.0).ravel()
    assert fits(observed, accepted * expected / expected.sum())


def test_nothing_accepted() -> None:
    z = torch.tensor([[0.0], [1e3]])
    pool = Pool(members=torch.tensor([[0, 0], [1, 1]], dtype=torch.int32), largest_weight=0.5)
    apart = Pool(pool.members, 1.0, torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 1, 2]))
    accepted, merged = double(z, apart, 0.1, 500, seed=0)
    assert accepted == 500  # only the first row has any weight
    far = Pool(members=torch.tensor([[0, 1]], dtype=torch.int32), largest_weight=1.0)
    assert double(z, far, 0.1, 10, seed=0)[0] == 10  # a tuple always merges with itself
    accepted, merged = double(z, far, 0.1, 500, seed=0, repeats=False)
    assert accepted == 0
    assert merged.members.shape == (0, 4)
    assert merged.largest_weight == 1.0


def test_a_trial_that_rarely_succeeds() -> None:
    """The tail of the exponential variable is exact far out."""
    distance2 = 2 * math.log(1e4)  # exp(−r d²/(2s)), r = 2, s = 2
    z = torch.tensor([[0.0], [math.sqrt(distance2)]])
    pool = Pool(members=torch.tensor([[0, 0], [1, 1]], dtype=torch.int32), largest_weight=0.5)
    accepted, merged = double(z, pool, 2.0, 4_000_000, seed=0)
    mixed = int((merged.members[:, 0] != merged.members[:, 2]).sum())
    # a distance is reduced by 1e-4, which makes this 0.1% likelier
    assert within(mixed, 4_000_000, 0.5e-4)
    assert within(accepted, 4_000_000, 0.5 + 0.5e-4)


@pytest.mark.parametrize("heads", [(12, 48), (1, 2)])
def test_distances_are_rounded_towards_acceptance(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """By the factor of the safety, which is small."""
    assert 1 - 2e-4 < tuples._HEAD_SAFETY < 1
    z = records(7, 6, 5)
    pool, law = exact_pair_pool(z, weights(7, 6), 0.3)
    monkeypatch.setattr(tuples, "_HEADS", heads)
    monkeypatch.setattr(tuples, "_HEAD_SAFETY", 0.5)
    accepted, _ = double(z, pool, 0.3, 100_000, seed=0)
    assert within(accepted, 100_000, merged_law(z, pool, law, 0.6)[0])
    assert merged_law(z, pool, law, 0.6)[0] > merged_law(z, pool, law, 0.3)[0] + 0.05


# ---- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [[1.0], [0.5, 0.5], [0.0, 1.0, 0.0], [0.7, 0.1, 0.05, 0.15], None])
def test_alias(probability: list[float] | None) -> None:
    p = torch.tensor(probability or np.random.default_rng(0).dirichlet(np.full(200, 0.3)).tolist()).double()
    p /= p.sum()
    alias = tuples._Alias(p)
    # the table itself stands for p
    law = alias.keep / len(p)
    law.index_add_(0, alias.other, (1 - alias.keep) / len(p))
    np.testing.assert_allclose(law.numpy(), p.numpy(), atol=1e-14)
    draws = alias.draw(200_000, torch.Generator().manual_seed(1))
    assert fits(np.bincount(draws.numpy(), minlength=len(p)).astype(float), 200_000 * p.numpy())


def test_whole_numbers_below_a_large_number_are_equally_likely() -> None:
    """Not 32 bits modulo the number, by which the lower ones would be likelier by a fortieth here."""
    number = 200_000_000
    drawn = tuples._below(2_000_000, number, torch.Generator().manual_seed(0))
    low = 2**32 % number
    assert within(int((drawn < low).sum()), 2_000_000, low / number)
    assert int(drawn.max()) < number
    few = tuples._below(70_000, 7, torch.Generator().manual_seed(0))
    assert fits(np.bincount(few.numpy(), minlength=7).astype(float), np.full(7, 10_000.0))


def test_seeds_of_streams_differ() -> None:
    """In the 32 bits that torch's generator takes."""
    made = [stream_seed(s, a, b) & 0xFFFFFFFF for s in range(8) for a in range(8) for b in range(64)]
    assert len(set(made)) == len(made)
    assert stream_seed(3, 1) != stream_seed(4, 0)
    assert stream_seed(0, 1, 2) != stream_seed(0, 2, 1)
    assert 0 <= stream_seed(-1, 5) < 2**63
