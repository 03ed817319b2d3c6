"""The certificate of m replicas, lemma by lemma, on sources whose potentials, norms and rates are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Array, DiscreteSource, log_orderings, log_v, most_failures, multiplicities, scatter
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

from opacus_reconbound.certificates import multi, tuples
from opacus_reconbound.certificates.kernel import KernelLadder, pair_sums
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.certificates.multi import (
    Doubling,
    MultiEstimate,
    MultiPotential,
    clopper_pearson_upper,
    finite_pool_inverse,
    fit_multi_potentials,
    log_v_upper,
    multi_estimates,
    plan_trials,
    principal_axes,
    project,
)
from opacus_reconbound.certificates.replica import in_sample_value, replica_estimates
from opacus_reconbound.certificates.tuples import PairJob, Pool, double, draw_pairs, random_stream
from opacus_reconbound.errors import InvalidValueError

seeds = st.integers(0, 10**6)
scales = st.floats(0.05, 2.0)


def small_source(seed: int) -> DiscreteSource:
    rng = np.random.default_rng(seed)
    return DiscreteSource.random(seed, atoms=int(rng.integers(2, 6)), dimension=int(rng.integers(1, 4)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads that wait for one another would take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few tuples as will do for small samples, where f and the plan are made."""
    for name, value in {
        "_PILOT_TRIALS": 5_000,
        "_MERGED": 1_000,
        "_MOST_TRIALS": 50_000,
        "_IMITATED": 300,
        "_REFINE_NUMBER": 10_000,
    }.items():
        monkeypatch.setattr(multi, name, value)


# ---- the population's potential --------------------------------------------------------------------------------------


@given(seeds, st.sampled_from([2, 3, 4, 8]), scales)
def test_the_population_potential(seed: int, m: int, scale: float) -> None:
    """Stationary, h = V/w with V = 1, and h_P <= 1 everywhere, so f_P >= 0."""
    source, rng = small_source(seed), np.random.default_rng(seed)
    f = source.potential(scale, m)
    mass = source.p * np.exp(f / scale)
    assert log_v(source.points, mass, scale, m) == pytest.approx(0.0, abs=1e-9)
    counts = multiplicities(len(mass), m - 1)
    logs = log_orderings(counts) + counts @ np.log(mass) - scatter(source.points, counts) / scale
    means = counts @ source.points / (m - 1)

    def h(z: Array) -> Array:
        squares = ((z[:, None] - means[None]) ** 2).sum(2)
        return np.asarray(np.exp(logs - (m - 1) / (m * scale) * squares).sum(1))

    np.testing.assert_allclose(h(source.points) * np.exp(f / scale), 1.0, atol=1e-6)
    assert f.min() >= -1e-9
    assert (h(rng.normal(size=(50, source.points.shape[1]))) <= 1 + 1e-9).all()
    assert (h(means) <= 1 + 1e-9).all()


@given(seeds, st.sampled_from([4, 8]), scales, st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0, 5.0, -1.0]))
def test_lemma_1_for_any_reals(seed: int, m: int, scale: float, n: int, size: float) -> None:
    """Badly fitted values, the exact potential, and the best values for the sample itself (size −1)."""
    source, rng = small_source(seed), np.random.default_rng(seed + 1)
    exact, picks = source.potential(scale, m), source.draw(rng, n)
    f = exact[picks] + size * scale * rng.normal(size=n)
    if size < 0:
        atoms, inverse = np.unique(picks, return_inverse=True)
        empirical = DiscreteSource(source.points[atoms], np.bincount(inverse) / n)
        f = empirical.potential(scale, m)[inverse] if len(atoms) > 1 else np.zeros(n)
    mass = np.bincount(picks, weights=np.exp(f / scale), minlength=len(exact)) / n
    value = f.mean() - scale / m * log_v(source.points, mass, scale, m)
    assert value <= exact[picks].mean() + 1e-9
    if size == 0 and n == 1:
        assert value == pytest.approx(0.0, abs=1e-9)  # one record: V = w^m


@pytest.mark.parametrize("m", [4, 8])
def test_lemma_1_needs_the_repeated_tuples(m: int) -> None:
    """With the norm of the population in place of the sample's, the value does exceed the bound on fitted reals."""
    source, scale, n = DiscreteSource.random(2), 0.2, 10
    exact, above = source.potential(scale, m), 0
    for seed in range(50):
        picks = source.draw(np.random.default_rng(seed), n)
        f = exact[picks] + 0.3 * scale * np.random.default_rng(seed + 99).normal(size=n)
        mass = np.bincount(picks, weights=np.exp(f / scale), minlength=5) / n
        value = f.mean() - scale / m * log_v(source.points, mass, scale, m)
        assert value <= exact[picks].mean() + 1e-9
        above += f.mean() > exact[picks].mean() + 1e-9
    assert above > 10


@pytest.mark.parametrize("seed", range(6))
def test_the_line_lies_below_the_distortion_rate_function_and_rises_with_m(seed: int) -> None:
    source = DiscreteSource.random(seed, atoms=5, dimension=1 + seed % 2)
    lines = {(s, m): source.intercept(s, m) for s in (0.05, 0.14, 0.28, 0.56, 1.2) for m in (2, 4, 8)}
    # at one s per replica, ε = s/(m−1), more replicas mean a smaller ε: compare the best line at each rate
    for slope in np.geomspace(0.05, 2.0, 6):
        rate, distortion = source.distortion_rate(float(slope), side=160 if source.points.shape[1] == 1 else 15)
        best = {m: max(value - s * rate for (s, other), value in lines.items() if other == m) for m in (2, 4, 8)}
        assert best[8] <= distortion + 1e-9
    for s in (0.05, 0.14, 0.28, 0.56, 1.2):
        assert lines[s, 2] <= lines[s, 4] + 1e-9
        assert lines[s, 4] <= lines[s, 8] + 1e-9


# ---- Lemma 4 ---------------------------------------------------------------------------------------------------------


def norm(points: Array, law: Array, scale: float, r: int, p: int) -> float:
    """‖F_q‖_p of bumps exp(−r‖u − y‖²/s)."""
    return math.exp(log_v(points, law, scale / r, p) / p)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("level", [0.05, 0.5])
def test_lemma_4(p: int, spread: float, level: float) -> None:
    """Fifty draws; without the term the norm is often above what the pool shows."""
    rng = np.random.default_rng(p)
    points, law = spread * rng.normal(size=(9, 2)), rng.dirichlet(np.full(9, 0.7))
    nu = norm(points, law, 0.5, 2, p)
    repeats, draws, failures, below = 500, 50, 0, 0
    for counts in rng.multinomial(draws, law, size=repeats):
        seen = norm(points, counts / draws, 0.5, 2, p)
        below += seen < nu
        failures += finite_pool_inverse(seen, points=draws, level=level) < nu
    assert failures <= most_failures(repeats, level)
    assert below > 0.2 * repeats


@pytest.mark.parametrize("p", [2, 4])
def test_lemma_4_for_a_weighted_pool(p: int) -> None:
    """Strata of given probabilities, few draws each, in numbers that have nothing to do with them."""
    rng = np.random.default_rng(10 + p)
    atoms, strata, level, repeats = 8, 12, 0.3, 600
    points = rng.normal(size=(atoms, 2))
    conditional = rng.dirichlet(np.full(atoms, 0.3), size=strata)
    omega, counts = rng.dirichlet(np.full(strata, 0.6)), rng.integers(1, 9, size=strata)
    nu = norm(points, omega @ conditional, 0.5, 2, p)
    effective = 1 / (omega / counts).max()
    failures = below = 0
    for _ in range(repeats):
        drawn = np.stack([rng.multinomial(c, row) / c for c, row in zip(counts, conditional, strict=True)])
        seen = norm(points, omega @ drawn, 0.5, 2, p)
        below += seen < nu
        failures += finite_pool_inverse(seen, points=effective, level=level) < nu
    assert failures <= most_failures(repeats, level)
    assert below > 0.15 * repeats


@given(st.floats(0.0, 1.0), st.floats(1.0, 1e7), st.floats(1e-6, 0.9))
def test_finite_pool_inverse_inverts(observed: float, points: float, level: float) -> None:
    nu = finite_pool_inverse(observed, points=points, level=level)
    assert observed - 1e-12 <= nu <= 1.0
    if nu < 1.0:
        assert nu - math.sqrt(2 * nu * math.log(1 / level) / points) == pytest.approx(observed, abs=1e-9)
    else:
        assert 1.0 - math.sqrt(2 * math.log(1 / level) / points) <= observed + 1e-9
    assert finite_pool_inverse(min(1.0, observed + 0.1), points=points, level=level) >= nu
    assert finite_pool_inverse(observed, points=2 * points, level=level) <= nu
    assert finite_pool_inverse(observed, points=points, level=level / 2) >= nu


# ---- Clopper and Pearson ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "level"), [(0, 10, 0.05), (1, 20, 0.025), (7, 9, 0.2), (40, 1000, 1e-4)]
)
def test_clopper_pearson_is_scipys(successes: int, trials: int, level: float) -> None:
    expected = binomtest(successes, trials).proportion_ci(confidence_level=1 - 2 * level, method="exact").high
    assert clopper_pearson_upper(successes, trials, level) == pytest.approx(expected, rel=1e-9)


def test_clopper_pearson_known_values() -> None:
    assert clopper_pearson_upper(0, 100, 0.05) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert clopper_pearson_upper(5, 5, 0.05) == 1.0
    assert clopper_pearson_upper(1, 1, 0.9) == 1.0
    assert clopper_pearson_upper(10**6, 10**8, 0.0025) == pytest.approx(0.01 + 2.807 * 0.995**0.5 * 1e-5, rel=1e-5)
    with pytest.raises(InvalidValueError):
        clopper_pearson_upper(0, 0, 0.05)
    with pytest.raises(InvalidValueError):
        clopper_pearson_upper(0, 10, 0.0)


@pytest.mark.parametrize("trials", [1, 5, 30, 200])
@pytest.mark.parametrize("level", [0.01, 0.3])
def test_clopper_pearson_coverage_by_enumeration(trials: int, level: float) -> None:
    uppers = np.array([clopper_pearson_upper(k, trials, level) for k in range(trials + 1)])
    assert (np.diff(uppers) > -1e-15).all()
    for p in np.linspace(0.001, 0.999, 200):
        assert binom.pmf(np.arange(trials + 1), trials, p)[uppers < p].sum() <= level + 1e-9


# ---- V from above ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "atoms", "m", "scale", "trials"),
    [
        (8, 8, 8, 0.5, (3000, 1500)),
        (30, 30, 4, 0.3, (3000,)),
        (30, 6, 8, 0.3, (3000, 1500)),
        (12, 5, 16, 0.5, (3000, 1500, 1000)),
        (30, 30, 4, 0.1, (60,)),
        (20, 6, 8, 0.1, (200, 20)),
    ],
)
def test_log_v_upper_against_the_exact_value(n: int, atoms: int, m: int, scale: float, trials: tuple[int, ...]) -> None:
    rng = np.random.default_rng(n + m)
    points = (rng.normal(size=(atoms, 4)) / 2).astype(np.float32)
    picks = np.arange(n) % atoms
    w = np.exp(0.5 * rng.normal(size=n))
    exact = log_v(points.astype(float), np.bincount(picks, weights=w) / n, scale, m)
    z = torch.from_numpy(points[picks])
    level, repeats = 0.5, 300
    uppers, estimates = np.empty(repeats), np.empty(repeats)
    for seed in range(repeats):
        ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.from_numpy(w), scale, 40 * n, seed)])
        found = log_v_upper(z, log_v2, pool, scale=scale, replicas=m, trials=trials, level=level, seed=seed + 5000)
        uppers[seed], estimates[seed] = found.upper, found.estimate
        assert found.trials == trials
        assert len(found.accepted) <= len(trials)
        assert found.pairs == len(pool)
        assert found.upper <= 0.5 * m * log_v2 + 1e-9  # ν <= 1
    assert (uppers < exact).sum() <= most_failures(repeats, level)
    assert (estimates < exact).mean() > 0.2  # the estimate alone fails
    assert uppers.mean() > exact
    if min(trials) >= 1000:
        assert np.median(estimates) == pytest.approx(exact, abs=0.1)
        assert uppers.mean() < exact + 0.35 * m


def test_more_trials_close_the_gap() -> None:
    rng = np.random.default_rng(0)
    points, n, m, scale = (rng.normal(size=(6, 3)) / 2).astype(np.float32), 60, 8, 0.3
    picks = np.arange(n) % 6
    exact = log_v(points.astype(float), np.bincount(picks) / n, scale, m)
    z = torch.from_numpy(points[picks])
    gaps = []
    for size in (1, 10, 100):
        one = PairJob(torch.ones(n).double(), scale, 100 * size * n, 3)
        ((log_v2, pool),) = draw_pairs(z, [one])
        found = log_v_upper(
            z, log_v2, pool, scale=scale, replicas=m, trials=(20_000 * size, 8000 * size), level=0.01, seed=1
        )
        gaps.append(found.upper - exact)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.1


def far_apart(n: int) -> tuple[torch.Tensor, float, Pool]:
    z = torch.from_numpy(10.0 * np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32))
    ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.1, 2 * n, 0)])
    return z, log_v2, pool


@pytest.mark.parametrize(("m", "trials"), [(4, (3,)), (8, (3, 3)), (16, (2, 5, 9))])
def test_a_chain_that_breaks_off_still_bounds(m: int, trials: tuple[int, ...]) -> None:
    """Nothing merges: ν is 1 from there on. Here V_m = n^(1−m) exactly."""
    z, log_v2, pool = far_apart(300)
    exact = (1 - m) * math.log(300)
    assert log_v2 == pytest.approx(-math.log(300), abs=1e-4)
    found = log_v_upper(z, log_v2, pool, scale=0.1, replicas=m, trials=trials, level=0.05, seed=0)
    assert found.accepted == (0,)
    assert exact < found.upper <= 0.5 * m * log_v2
    # by hand
    levels = len(trials)
    p = clopper_pearson_upper(0, trials[0], 0.05 / (2 * levels))
    nu = finite_pool_inverse(math.sqrt(p), points=found.pairs, level=0.05 / (2 * levels))
    assert found.upper == pytest.approx(0.5 * m * (log_v2 + math.log(nu)))


def test_a_chain_that_breaks_off_midway() -> None:
    """Pairs merge, four-tuples of the few trials do not: ν_4 is bounded by the rate and ν_8 = 1."""
    z, log_v2, pool = far_apart(300)
    found = log_v_upper(z, log_v2, pool, scale=0.1, replicas=16, trials=(60_000, 3, 10**6), level=0.05, seed=0)
    assert found.accepted[0] > 0
    assert found.accepted[1:] == (0,)
    four = finite_pool_inverse(
        math.sqrt(clopper_pearson_upper(0, 3, 0.05 / 6)), points=found.accepted[0], level=0.05 / 6
    )
    rate = clopper_pearson_upper(found.accepted[0], 60_000, 0.05 / 6)
    two = finite_pool_inverse(math.sqrt(rate * four), points=found.pairs, level=0.05 / 6)
    assert found.upper == pytest.approx(8 * (log_v2 + math.log(two)))
    assert -15 * math.log(300) < found.upper < 8 * log_v2


@pytest.mark.parametrize("level", [0.05, 0.9])
def test_no_pairs_at_all(level: float) -> None:
    """ν_2 <= 1 is all that is known then."""
    z, log_v2, _ = far_apart(30)
    nothing = Pool(torch.empty((0, 2), dtype=torch.int32))
    found = log_v_upper(z, log_v2, nothing, scale=0.1, replicas=8, trials=(100, 100), level=level, seed=0)
    assert found.accepted == (0,)
    assert found.pairs == 0
    assert found.upper == 4 * log_v2


def test_the_level_is_shared_by_all_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three acceptances and three pools: six levels that add up, and every pool with its own size."""
    spent: list[float] = []
    sizes: list[float] = []

    def clopper(successes: int, trials: int, level: float) -> float:
        spent.append(level)
        return successes / trials

    def inverse(observed: float, *, points: float, level: float) -> float:
        spent.append(level)
        sizes.append(points)
        return observed

    z, n = torch.zeros(50, 3), 50
    ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.4, 200, 0)])
    monkeypatch.setattr(multi, "clopper_pearson_upper", clopper)
    monkeypatch.setattr(multi, "finite_pool_inverse", inverse)
    found = log_v_upper(z, log_v2, pool, scale=0.4, replicas=16, trials=(300, 200, 100), level=0.06, seed=0)
    assert sum(spent) == pytest.approx(0.06)
    assert sizes == [200, 300, len(pool)]
    assert found.pairs == len(pool)
    assert found.accepted == (300, 200, 100)
    assert found.upper == pytest.approx(found.estimate, abs=1e-4)


def test_two_replicas_need_no_trials() -> None:
    z, log_v2, pool = far_apart(20)
    found = log_v_upper(z, log_v2, pool, scale=0.1, replicas=2, trials=(), level=0.05, seed=0)
    assert found.upper == found.estimate == log_v2
    assert found.accepted == ()


@pytest.mark.parametrize(("m", "trials"), [(4, ()), (4, (1, 1)), (8, (10,)), (6, (10,)), (2, (5,))])
def test_the_number_of_trial_counts(m: int, trials: tuple[int, ...]) -> None:
    z, log_v2, pool = far_apart(20)
    with pytest.raises(InvalidValueError, match="trial counts"):
        log_v_upper(z, log_v2, pool, scale=0.1, replicas=m, trials=trials, level=0.05, seed=0)


# ---- the fit ---------------------------------------------------------------------------------------------------------


def gaussians(seed: int, n: int, dimension: int = 8, modes: int = 10) -> torch.Tensor:
    """A mixture of Gaussians in unit scale; the mixture is the same for every seed."""
    centres = np.random.default_rng(12345).normal(size=(modes, dimension))
    rng = np.random.default_rng(seed)
    x = centres[rng.integers(0, modes, n)] + 0.5 * rng.normal(size=(n, dimension))
    return torch.from_numpy((x / math.sqrt(1.25 * dimension)).astype(np.float32))


def test_principal_axes() -> None:
    z = gaussians(0, 500, 6) * torch.tensor([1.0, 5.0, 0.1, 2.0, 1.0, 3.0])
    axes = principal_axes(z)
    assert axes.dtype == torch.float64
    np.testing.assert_allclose((axes.T @ axes).numpy(), np.eye(6), atol=1e-12)
    spread = (z.double() @ axes).square().mean(dim=0)
    assert (spread.diff() <= 1e-12).all()
    np.testing.assert_allclose(principal_axes(z, 2).abs().numpy(), axes[:, :2].abs().numpy())


def test_principal_axes_of_many_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The randomised ones are orthonormal, and hold nearly as much of the spread."""
    z = gaussians(0, 1500, 60) * torch.linspace(3.0, 0.01, 60)
    exact = (z.double() @ principal_axes(z, 10)).square().sum()
    monkeypatch.setattr(multi, "_LARGEST_EXACT", 59)
    axes = principal_axes(z, 10)
    assert axes.shape == (60, 10)
    np.testing.assert_allclose((axes.T @ axes).numpy(), np.eye(10), atol=1e-12)
    assert 0.98 * exact < (z.double() @ axes).square().sum() <= exact


def test_projections_enlarge_no_distance() -> None:
    z = gaussians(0, 70, 20)
    heads = project(z, principal_axes(z, 5), chunk=16)
    assert heads.shape == (70, 5)
    assert heads.dtype == torch.float32
    np.testing.assert_allclose(heads.numpy(), (z.double() @ principal_axes(z, 5)).numpy(), atol=1e-6)
    assert (torch.cdist(heads.double(), heads.double()) <= torch.cdist(z.double(), z.double()) + 1e-6).all()


def atoms_and_weights(seed: int, atoms: int, n: int) -> tuple[Array, NDArray[np.int64], torch.Tensor]:
    """Points, which of them each record is, and weights by record."""
    rng = np.random.default_rng(seed)
    points = (rng.normal(size=(atoms, 3)) / 2).astype(np.float32).astype(float)
    return points, np.arange(n) % atoms, torch.from_numpy(np.exp(0.5 * rng.normal(size=n)))


@pytest.mark.parametrize(("m", "scale"), [(2, 0.3), (4, 0.3), (16, 0.5)])
def test_a_chain_estimates_every_v(m: int, scale: float) -> None:
    points, picks, w = atoms_and_weights(0, 5, 40)
    z = torch.from_numpy(points[picks].astype(np.float32))
    ((log_v2, pairs),) = draw_pairs(z, [PairJob(w, scale, 400_000, 0)])
    pool, found = multi._chain(
        z, z, pairs, log_v2, scale=scale, replicas=m, most=1_000_000, seed=1, repeats=True
    )  # fmt: skip
    assert pool.size == m
    assert len(found) == round(math.log2(m))
    mass = np.bincount(picks, weights=w.numpy()) / 40
    for level, value in enumerate(found):
        assert value == pytest.approx(log_v(points, mass, scale, 2 ** (level + 1)), abs=0.01 * 2 ** (level + 1))


def test_a_chain_takes_more_trials_where_few_tuples_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi, "_PILOT_TRIALS", 2_000)
    monkeypatch.setattr(multi, "_MERGED", 4_000)
    points, picks, w = atoms_and_weights(1, 30, 60)
    z = torch.from_numpy(points[picks].astype(np.float32))
    asked: list[int] = []

    def doubled(z: torch.Tensor, pool: Pool, scale: float, trials: int, **rest: Any) -> tuple[int, Pool]:
        asked.append(trials)
        return double(z, pool, scale, trials, **rest)

    monkeypatch.setattr(multi, "double", doubled)

    def chain(most: int, seed: int = 1) -> tuple[Pool, tuple[float, ...]]:
        ((log_v2, pairs),) = draw_pairs(z, [PairJob(w, 0.05, 20_000, 0)])
        asked.clear()
        return multi._chain(z, z, pairs, log_v2, scale=0.05, replicas=8, most=most, seed=seed, repeats=True)

    pool, found = chain(10**7)
    assert pool.size == 8
    assert len(found) == 3
    assert asked[::2] == [2_000, 2_000]
    assert min(asked[1::2]) > 2_000
    assert len(pool) == pytest.approx(4_000, rel=0.5)
    chain(3_000)
    assert max(asked) == 3_000
    monkeypatch.setattr(multi, "_LEAST_MERGED", 10**6)  # none is enough: the chain ends at the pairs
    pool, found = chain(10**7)
    assert (pool.size, len(found)) == (2, 1)
    ((log_v2, nothing),) = draw_pairs(z[:5], [PairJob(w[:5], 1e-6, 100, 0)], repeats=False)
    assert multi._chain(z, z, nothing, log_v2, scale=1e-6, replicas=8, most=9, seed=0, repeats=False)[1] == ()


@pytest.mark.parametrize("m", [2, 4])
def test_h_is_imitated_whatever_the_order_of_the_records(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """Sorted records: of the two in a pair the earlier one comes first, so no fixed member may be left out."""
    monkeypatch.setattr(tuples, "_TILE", 16)
    monkeypatch.setattr(multi, "_IMITATED", 10_000)
    scale, n = 0.4, 200
    z = torch.linspace(-1.5, 1.5, n)[:, None]
    points, w = z.double().numpy(), torch.from_numpy(np.exp(np.random.default_rng(0).normal(size=n)))
    ((log_v2, pool),) = draw_pairs(z, [PairJob(w, scale, 100_000, 0)])
    pool, logs = multi._chain(z, z, pool, log_v2, scale=scale, replicas=m, most=10**6, seed=1, repeats=True)
    rate = (m - 1) / (m * scale)
    means, shares = multi._imitate(z, w.log(), pool, rate)
    assert means.shape == (10_000, 1)
    at = points[::20]
    found = np.exp(shares.numpy() - rate * (at - means.double().numpy()[:, 0]) ** 2).sum(1)
    # h = c ∫ F^{m−1} φ_z over one coordinate, normalised by V_m
    y = np.linspace(-6, 6, 4001)
    bumps = np.exp(-((points - y) ** 2) / scale)
    f = w.numpy() @ bumps / n
    c = math.sqrt(m / (math.pi * scale)) * (y[1] - y[0])
    exact = c * np.exp(-((at - y) ** 2) / scale) @ f ** (m - 1)
    v = c * (f**m).sum()
    assert logs[-1] == pytest.approx(math.log(v), abs=0.02)
    np.testing.assert_allclose(found, exact / v, rtol=0.08)


def test_torchs_default_type_does_not_matter() -> None:
    z = gaussians(0, 200)
    w = torch.ones(len(z), dtype=torch.float64)
    ((_, pool),) = draw_pairs(z, [PairJob(w, 0.4, 1_000, 0)])
    expected = multi._imitate(z, w.log(), pool, 1.0)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = multi._imitate(z, w.log(), pool, 1.0)
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("m", [2, 4, 8])
def test_the_fitted_f_is_better_than_the_centres(m: int) -> None:
    """On a discrete source, where the in-sample value of any f is known: one step gains, and normalises V."""
    source, scale = DiscreteSource.random(1, atoms=6), 0.3
    picks = source.draw(np.random.default_rng(0), 1500)
    (potential,) = fit_multi_potentials(source.tensor[picks], [(scale, m)], seed=0, centres=12, most=200_000)
    assert potential.scale == scale
    assert potential.complete
    assert len(potential.tuple_means) == multi._IMITATED
    f0 = potential.centres.potential(source.tensor).numpy()
    f = potential.evaluate(source.tensor).numpy()
    assert potential.largest == pytest.approx(f0.max())
    mass = np.bincount(picks, weights=np.exp(f0 / scale)[picks]) / 1500
    for level, value in enumerate(potential.log_v):  # without repeats, which 1,500 records hardly notice
        assert value == pytest.approx(log_v(source.points, mass, scale, 2 ** (level + 1)), abs=0.05 * 2**level)

    def value(g: Array) -> float:
        return float(source.p @ g) - scale / m * log_v(source.points, source.p * np.exp(g / scale), scale, m)

    best = source.intercept(scale, m) * (m - 1) / m
    assert value(f0) < value(f) <= best + 1e-9
    assert abs(log_v(source.points, source.p * np.exp(f / scale), scale, m)) < 0.1 * m


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize("m", [2, 4, 8])
def test_a_reference_sample_that_nothing_merges_on(m: int) -> None:
    """Too few acceptances: f is f_0, and nothing is certified."""
    reference = 50.0 * gaussians(0, 100)
    (potential,) = fit_multi_potentials(reference, [(0.1, m)], seed=0, most=2000)
    assert len(potential.tuple_means) == 0
    assert potential.log_v == ()
    assert not potential.complete
    z = 50.0 * gaussians(1, 10)
    assert torch.equal(potential.evaluate(z), potential.centres.potential(z))
    with pytest.raises(InvalidValueError, match="too few tuples merged"):
        multi_estimates([potential], z, sampling_level=0.05, monte_carlo_level=0.01, seed=0)


@given(
    st.lists(st.floats(-8.0, -0.1), min_size=3, max_size=3),
    st.floats(-3.0, 3.0),
    st.floats(0.05, 1.0),
    st.floats(1e-4, 0.1),
)
def test_plan_trials(log_rates: list[float], shift: float, scale: float, level: float) -> None:
    """As many as lose what is wanted, by the formula of Lemma 4; not changed by adding a constant to f."""
    m, loss, log_v = 16, 0.002, [-0.7]
    for log_rate in log_rates:
        log_v.append(2 * log_v[-1] + log_rate)
    most = 10**12
    pairs, trials = plan_trials(log_v, scale=scale, replicas=m, loss=loss, most=most, level=level)
    assert len(trials) == 3
    numbers = [pairs, *(count * math.exp(log_rate) for count, log_rate in zip(trials, log_rates, strict=True))]
    for k, (number, value) in enumerate(zip(numbers, log_v, strict=True)):
        r = 2 ** (k + 1)
        nu = math.exp(r / m * log_v[-1] - value)  # V_m = V_r^{m/r} ν^{m/r}
        cost = scale / r * math.sqrt(2 * math.log(1 / level) / (number * nu))
        if number > 20_001:
            assert (
                cost == pytest.approx(loss, rel=1e-3)
                or max(number / math.exp(x) for x in (0.0, *log_rates)) > most / 30
            )
        else:
            assert number == pytest.approx(20_000, abs=2)
            assert cost <= loss * 1.001
    moved = [value + shift * 2 ** (k + 1) for k, value in enumerate(log_v)]
    again = plan_trials(moved, scale=scale, replicas=m, loss=loss, most=most, level=level)
    assert again[0] == pytest.approx(pairs, rel=1e-6)
    assert again[1] == pytest.approx(trials, rel=1e-6)


def test_plan_trials_never_exceeds_the_most() -> None:
    log_v = (-1.0, -12.0, -40.0)
    assert plan_trials(log_v, scale=0.2, replicas=8, loss=1e-5, most=250_000, level=0.01) == (
        10_000,
        (250_000, 250_000),
    )
    assert plan_trials((-1.0,), scale=0.2, replicas=2, loss=0.01, most=10**9, level=0.01) == (20_000, ())


@pytest.mark.usefixtures("short_chains")
def test_all_streams_of_random_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """f and the plan depend on the fit's and the refinement's draws: the Monte Carlo must reuse none of them.

    Nor one design, level, tile or chunk another's. And all is planned before the Monte Carlo begins.
    """
    streams: list[int] = []
    events: list[str] = []

    def stream(seed: int) -> np.random.Generator:
        streams.append(seed)
        return random_stream(seed)

    def pairs(z: torch.Tensor, jobs: Sequence[PairJob], **rest: Any) -> list[tuple[float, Pool]]:
        events.extend("pairs" for _ in jobs)
        return draw_pairs(z, jobs, **rest)

    def doubled(z: torch.Tensor, pool: Pool, *rest: Any, **more: Any) -> tuple[int, Pool]:
        events.append(f"double {pool.size}")
        return double(z, pool, *rest, **more)

    def planned(*rest: Any, **more: Any) -> tuple[int, tuple[int, ...]]:
        events.append("plan")
        return plan_trials(*rest, **more)

    monkeypatch.setattr(tuples, "random_stream", stream)
    monkeypatch.setattr(tuples, "trial_kernel", lambda: None)
    monkeypatch.setattr(tuples, "_TRIALS", 2_000)
    monkeypatch.setattr(tuples, "_TILE", 64)
    monkeypatch.setattr(multi, "draw_pairs", pairs)
    monkeypatch.setattr(multi, "double", doubled)
    monkeypatch.setattr(multi, "plan_trials", planned)
    designs = [(0.8, 8), (0.5, 8), (0.8, 4)]
    potentials = fit_multi_potentials(gaussians(0, 200), designs, seed=7, most=20_000)
    fitted = len(streams)
    multi_estimates(potentials, gaussians(1, 300), sampling_level=0.05, monte_carlo_level=0.01, seed=7, most=30_000)
    assert fitted > 3 * 10 + 5
    # two refinements over 5 × 5 tiles, then the Monte Carlo over 15; at least one chunk for each doubling
    assert len(streams) - fitted > 3 * (2 * 25 + 15) + 5 * 3
    assert len(streams) == len(set(streams))
    last_plan = len(events) - 1 - events[::-1].index("plan")
    assert events.count("plan") == 3 * 3
    # after the last plan: the pairs, and each design's doublings once
    assert events[last_plan + 1 :] == ["pairs"] * 3 + ["double 2", "double 4"] * 2 + ["double 2"]


# ---- the whole certificate -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactPotential(MultiPotential):
    """f = f_P, the hardest case: the value without margins is too large as often as not."""

    source: DiscreteSource

    def evaluate(self, z: torch.Tensor, f0: torch.Tensor | None = None) -> torch.Tensor:
        atom = torch.cdist(z, self.source.tensor).argmin(dim=1)
        return torch.from_numpy(self.source.potential(self.scale, self.replicas))[atom]


def certify_source(
    source: DiscreteSource,
    designs: Sequence[tuple[float, int]],
    *,
    n_reference: int,
    n: int,
    seed: int,
    level: float,
    monte_carlo: float,
    most: int = 40_000,
    exact: bool = False,
    turns: int = 2,
) -> tuple[tuple[MultiEstimate, ...], NDArray[np.int64]]:
    """``most`` trials at a level and a twenty-fifth as many pairs."""
    rng = np.random.default_rng(seed)
    reference, picks = source.tensor[source.draw(rng, n_reference)], source.draw(rng, n)
    potentials = fit_multi_potentials(reference, designs, seed=seed, most=20_000)
    assert all(p.complete for p in potentials)
    if exact:
        potentials = tuple(ExactPotential(**vars(p), source=source) for p in potentials)
    estimates = multi_estimates(
        potentials,
        source.tensor[picks],
        sampling_level=level,
        monte_carlo_level=monte_carlo,
        seed=seed,
        most=most,
        turns=turns,
    )
    return estimates, picks


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Doubling]]:
    """f as it was certified, and the bound on its V_m, of every estimate made."""
    seen: list[tuple[torch.Tensor, Doubling]] = []
    whole: Callable[..., MultiEstimate] = multi._assemble

    def assemble(
        potential: MultiPotential, f0: torch.Tensor, f: torch.Tensor, found: Doubling, *rest: Any, **more: Any
    ) -> MultiEstimate:
        seen.append((f, found))
        return whole(potential, f0, f, found, *rest, **more)

    monkeypatch.setattr(multi, "_assemble", assemble)
    return seen


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize(("exact", "turns"), [(True, 0), (True, 2), (False, 2)])
@pytest.mark.parametrize(
    ("seed", "atoms", "n_reference", "n", "level", "monte_carlo"),
    [(0, 5, 100, 300, 0.4, 0.2), (1, 6, 60, 200, 0.4, 0.2), (2, 3, 200, 400, 0.6, 0.3)],
)
def test_coverage(
    assembled: list[tuple[torch.Tensor, Doubling]],
    seed: int,
    atoms: int,
    n_reference: int,
    n: int,
    level: float,
    monte_carlo: float,
    exact: bool,
    turns: int,
) -> None:
    """m = 4 and 8, f improved in the sample and the Monte Carlo in the loop, at levels where failures would show."""
    source = DiscreteSource.random(seed, atoms=atoms)
    designs = [(0.5, 4), (0.3, 4), (0.4, 8)]
    truth = np.array([source.intercept(s, m) for s, m in designs])
    potentials = [source.potential(s, m) for s, m in designs]
    repeats, gap = 40, np.zeros(3)
    failures, above, broken, missed, low = (np.zeros(3, int) for _ in range(5))
    for repeat in range(repeats):
        estimates, picks = certify_source(
            source,
            designs,
            n_reference=n_reference,
            n=n,
            seed=1000 * seed + repeat,
            level=level,
            monte_carlo=monte_carlo,
            exact=exact,
            turns=turns,
        )
        intercepts = np.array([e.intercept for e in estimates])
        failures += intercepts > truth
        above += np.array([e.point for e in estimates]) > truth
        gap += (truth - intercepts) / repeats
        # Lemma 1 with the bound on V, for this very sample: only the Monte Carlo can break it
        lemma = [m / (m - 1) * f[picks].mean() for (_, m), f in zip(designs, potentials, strict=True)]
        broken += np.array([e.in_sample for e in estimates]) > np.array(lemma)
        # and the bound on V itself, for the f that was certified, whatever tuples it was made from
        for index, (s, m) in enumerate(designs):
            f, found = assembled[-3 + index]
            mass = np.bincount(picks, weights=(f / s).exp().numpy(), minlength=atoms) / n
            exact_log_v = log_v(source.points, mass, s, m)
            missed[index] += found.upper < exact_log_v - 1e-6
            low[index] += found.estimate < exact_log_v
    assert failures.max() <= most_failures(repeats, level + monte_carlo)
    assert broken.max() <= most_failures(repeats, monte_carlo)
    assert missed.max() <= most_failures(repeats, monte_carlo)
    assert low.min() > 0.2 * repeats  # the estimate without its margin fails as often as not
    if exact or turns:
        assert (above > 0.1 * repeats).all()  # the value without margins fails
        assert above.max() > 0.25 * repeats
        assert (gap < truth).all()  # and the certificates say something


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize("seed", range(1000, 1004))
def test_f_is_improved_in_the_sample(assembled: list[tuple[torch.Tensor, Doubling]], seed: int) -> None:
    """The exact in-sample value, on few atoms far apart, where steps may overshoot: two turns lead near its maximum."""
    source, designs, n = DiscreteSource.random(1, atoms=6), [(0.3, 4), (0.4, 8)], 200
    values = np.empty((4, 2))
    for turns in range(4):
        _, picks = certify_source(
            source, designs, n_reference=60, n=n, seed=seed, level=0.05, monte_carlo=0.01, turns=turns
        )
        empirical = DiscreteSource(source.points, np.bincount(picks, minlength=6) / n)
        for index, (s, m) in enumerate(designs):
            f = assembled[-2 + index][0]
            mass = np.bincount(picks, weights=(f / s).exp().numpy()) / n
            values[turns, index] = float(f.mean()) - s / m * log_v(source.points, mass, s, m)
    best = np.array([empirical.intercept(s, m) * (m - 1) / m for s, m in designs])
    assert (values <= best + 1e-6).all()
    assert (values[1] > values[0]).all()
    assert (values[2] > values[0]).all()
    assert (values[2:] > 0.93 * best).all()


@pytest.mark.parametrize("m", [2, 4, 8])
def test_a_step_is_the_best_of_some_and_never_a_leap(m: int) -> None:
    """By enumeration, records far apart: V_m = Σ w^m, the way is −(m − 1) f up to a constant, and 1/m all of it."""
    scale, n = 0.3, 6
    f = torch.tensor([0.0, 0.3, -0.2, 0.1, 0.05, -0.1], dtype=torch.float64) * 2 / m
    share = torch.softmax(m * f / scale, dim=0)
    rng = np.random.default_rng(0)
    one = torch.from_numpy(rng.choice(n, size=200_000, p=share.numpy()).astype(np.int32))
    pool = Pool(one[:, None].expand(-1, m))
    way = -scale * (share * n).log()

    def log_v_of(g: torch.Tensor) -> float:
        return float(torch.logsumexp(m * g / scale, dim=0))

    step, change = multi._best_step(pool, way, scale, 2.0 / m, 10**9)
    assert step == 1.0 / m
    assert change == pytest.approx(log_v_of(f + step * way) - log_v_of(f), abs=0.05)
    # away from the maximum no step is better than none
    assert multi._best_step(pool, f - f.mean(), scale, 2.0 / m, 10**9) == (0.0, 0.0)
    # a record in no tuple is not raised beyond what so many tuples can tell
    way[0] = 1e6
    move = multi._move(way, 1.0 / m, scale, m, 1000)
    assert float((m * move[0] / scale).exp()) == pytest.approx(1000.0)
    assert torch.equal(move[1:], way[1:] / m)


@pytest.mark.usefixtures("short_chains")
def test_coverage_of_a_source_with_a_rare_far_atom() -> None:
    """A few samples in a hundred miss it altogether."""
    points = np.array([[0.0], [0.05], [0.1], [8.0]])
    source = DiscreteSource.scaled(points, np.array([0.4, 0.3, 0.29, 0.01]))
    level, monte_carlo, repeats, failures, above = 0.4, 0.1, 150, 0, 0
    exact = source.intercept(0.4, 4)
    for repeat in range(repeats):
        ((estimate,), _) = certify_source(
            source, [(0.4, 4)], n_reference=150, n=200, seed=repeat, level=level, monte_carlo=monte_carlo, exact=True
        )
        failures += estimate.intercept > exact
        above += estimate.point > exact
    assert failures <= most_failures(repeats, level + monte_carlo)
    assert above > 0.2 * repeats


@pytest.mark.usefixtures("short_chains")
def test_the_margins_close_with_more_records() -> None:
    source, gaps = DiscreteSource.random(4), []
    for n in (300, 3000, 20_000):
        ((estimate,), _) = certify_source(
            source, [(0.4, 8)], n_reference=400, n=n, seed=0, level=0.045, monte_carlo=0.005, most=500 * n
        )
        gaps.append(source.intercept(0.4, 8) - estimate.intercept)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.03


@pytest.mark.usefixtures("short_chains")
@pytest.mark.parametrize("seed", range(3))
def test_certificates_stay_below_the_true_distortion_rate_curve(seed: int) -> None:
    source = DiscreteSource.random(seed, atoms=5, dimension=2)
    curve = [source.distortion_rate(float(slope), side=16) for slope in np.geomspace(0.05, 2.0, 8)]
    designs = [(0.56, 4), (0.28, 8), (0.14, 4)]
    level, monte_carlo, repeats, failures, heights = 0.1, 0.02, 12, 0, []
    for repeat in range(repeats):
        estimates, _ = certify_source(
            source,
            designs,
            n_reference=200,
            n=2000,
            seed=100 * seed + repeat,
            level=level / 3,
            monte_carlo=monte_carlo / 3,
            most=1_000_000,
        )
        bounds = [max(e.design.intercept - e.scale * rate for e in estimates) for rate, _ in curve]
        failures += any(bound > distortion for bound, (_, distortion) in zip(bounds, curve, strict=True))
        heights.append(max(e.intercept for e in estimates))
    assert failures <= most_failures(repeats, level + monte_carlo)
    assert min(heights) > 0.2


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("m", [2, 4, 8])
def test_the_estimate_adds_up(assembled: list[tuple[torch.Tensor, Doubling]], m: int, turns: int) -> None:
    """By hand, from theory: the potentials, the in-sample value, the margins, the arithmetic's allowance."""
    reference, estimation, s = gaussians(0, 300), gaussians(1, 400), 0.6
    potentials = fit_multi_potentials(reference, [(s, m)], seed=1, most=100_000)
    seen: list[tuple[int, int]] = []
    (found,) = multi_estimates(
        potentials,
        estimation,
        sampling_level=0.04,
        monte_carlo_level=0.01,
        seed=2,
        most=500_000,
        turns=turns,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == ((seen[0][1],) * 2 if m > 2 else (100 * (2 * turns + 2), 100 * (2 * turns + 3)))
    (p,) = potentials
    f0 = p.centres.potential(estimation).numpy()
    f = assembled[0][0].numpy()
    assert f.max() <= s * (math.log(400) - 1)
    if turns == 0:
        np.testing.assert_array_equal(f, np.minimum(p.evaluate(estimation).numpy(), s * (math.log(400) - 1)))
    factor, doubling = m / (m - 1), found.monte_carlo
    assert doubling.pairs == pytest.approx(20_000, abs=1000)
    assert found.point == pytest.approx(factor * (f.mean() - s / m * doubling.estimate), rel=1e-12)
    loose = factor * (f.mean() - s / m * doubling.upper)
    assert loose - factor * s * 0.002 < found.in_sample < loose
    observed = (f0.mean() - found.in_sample / factor) / s
    assert found.observed_gap == pytest.approx(observed, rel=1e-9)
    clip = max(p.largest / s, 7.5)
    gap = upper_tail(found.observed_gap, clip=clip, slack=math.exp(-clip), n=400, level=0.02)
    assert found.certified_gap == gap
    capped = np.minimum(f0, p.largest)
    margin = empirical_bernstein(variance=float(capped.var(ddof=1)), value_range=p.largest, n=400, level=0.02)
    assert found.mean_margin == pytest.approx(margin, rel=1e-9)
    assert found.intercept == pytest.approx(factor * (capped.mean() - margin - s * gap), rel=1e-9)
    design = found.design
    assert (design.temperature, design.replicas, design.intercept) == (s / (m - 1), m, found.intercept)
    assert found.intercept < found.in_sample <= found.point + factor * s * 1e-3 * (m == 2)


def test_two_replicas_agree_with_the_pair_sums() -> None:
    """m = 2 of this page is the certificate of two replicas with another reference potential."""
    reference, estimation, s = gaussians(0, 300), gaussians(1, 500), 0.5
    potentials = fit_multi_potentials(reference, [(s, 2)], seed=1)
    (found,) = multi_estimates(potentials, estimation, sampling_level=0.05, monte_carlo_level=0.01, seed=2, turns=0)
    f = potentials[0].evaluate(estimation).clamp(max=s * (math.log(500) - 1))
    w = (f / s).exp().float()[None]
    sums = pair_sums(estimation, w, KernelLadder.plan([s]))
    value = float(in_sample_value(w, sums, torch.tensor([s], dtype=torch.float64))[0])
    assert found.point == pytest.approx(value, abs=1e-4)
    assert found.monte_carlo.upper == found.monte_carlo.estimate
    assert found.design.temperature == s


def test_estimation_records_far_from_the_reference_sample() -> None:
    """They cost something, but nothing becomes infinite; the weight of one record is capped."""
    reference, estimation = gaussians(0, 300), gaussians(1, 400)
    estimation[0] = 30.0
    potentials = fit_multi_potentials(reference, [(0.6, 4)], seed=1, most=50_000)
    (found,) = multi_estimates(
        potentials, estimation, sampling_level=0.04, monte_carlo_level=0.01, seed=2, most=500_000
    )
    assert math.isfinite(found.intercept)
    assert found.intercept < found.in_sample


def test_more_replicas_certify_more() -> None:
    """At the same s, on a continuous source with many records."""
    reference, estimation, s = gaussians(0, 1500), gaussians(1, 12_000), 0.4
    axes = principal_axes(reference)
    designs = [(s, 2), (s, 4), (s, 8)]
    potentials = fit_multi_potentials(reference, designs, seed=0, centres=100, most=200_000, axes=axes)
    two, four, eight = multi_estimates(
        potentials, estimation, sampling_level=0.045, monte_carlo_level=0.005, seed=0, most=10_000_000, axes=axes
    )
    assert two.intercept + 0.005 < four.intercept
    assert four.intercept < eight.intercept
    (theory,) = replica_estimates(reference, estimation, level=0.05, temperatures=(s,))
    assert theory.intercept < eight.intercept
    assert 0.3 < eight.intercept < 1.0
