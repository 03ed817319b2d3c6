"""The certificate of m replicas, lemma by lemma, on sources whose potentials, norms and rates are known exactly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
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

from opacus_reconbound.certificates import multi
from opacus_reconbound.certificates.centres import fit_centres
from opacus_reconbound.certificates.kernel import KernelLadder, pair_sums
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.certificates.multi import (
    MultiEstimate,
    MultiPotential,
    clopper_pearson_upper,
    finite_pool_inverse,
    fit_multi_potentials,
    log_v_upper,
    multi_estimates,
    plan_trials,
    principal_axes,
)
from opacus_reconbound.certificates.replica import in_sample_value, replica_estimates
from opacus_reconbound.certificates.tuples import PairJob, Pool, double, draw_pairs
from opacus_reconbound.errors import InvalidValueError

Trials = Sequence[Sequence[int]]
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
        ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.from_numpy(w), scale, torch.full((n,), 40), seed)])
        found = log_v_upper(z, log_v2, pool, scale=scale, replicas=m, trials=trials, level=level, seed=seed + 5000)
        uppers[seed], estimates[seed] = found.upper, found.estimate
        assert found.trials == trials
        assert len(found.accepted) <= len(trials)
        assert found.pair_points == 1 / pool.largest_weight
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
        one = PairJob(torch.ones(n).double(), scale, torch.full((n,), 100 * size), 3)
        ((log_v2, pool),) = draw_pairs(z, [one])
        found = log_v_upper(
            z, log_v2, pool, scale=scale, replicas=m, trials=(20_000 * size, 8000 * size), level=0.01, seed=1
        )
        gaps.append(found.upper - exact)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.1


def far_apart(n: int) -> tuple[torch.Tensor, float, Pool]:
    z = torch.from_numpy(10.0 * np.random.default_rng(0).normal(size=(n, 5)).astype(np.float32))
    ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.1, torch.full((n,), 2), 0)])
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
    nu = finite_pool_inverse(math.sqrt(p), points=found.pair_points, level=0.05 / (2 * levels))
    assert found.upper == pytest.approx(0.5 * m * (log_v2 + math.log(nu)))


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
    ((log_v2, pool),) = draw_pairs(z, [PairJob(torch.ones(n).double(), 0.4, torch.full((n,), 4), 0)])
    monkeypatch.setattr(multi, "clopper_pearson_upper", clopper)
    monkeypatch.setattr(multi, "finite_pool_inverse", inverse)
    found = log_v_upper(z, log_v2, pool, scale=0.4, replicas=16, trials=(300, 200, 100), level=0.06, seed=0)
    assert sum(spent) == pytest.approx(0.06)
    assert sizes == [pytest.approx(200.0), 300.0, 200.0][::-1]
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


@pytest.mark.parametrize("m", [2, 4, 8])
def test_the_fitted_f_is_better_than_the_centres(m: int) -> None:
    """On a discrete source, where the in-sample value of any f is known: one step gains, and normalises V."""
    source, scale = DiscreteSource.random(1, atoms=6), 0.3
    reference = source.tensor[source.draw(np.random.default_rng(0), 1500)]
    (potential,) = fit_multi_potentials(reference, [(scale, m)], seed=0, centres=4, trials=200_000)
    assert potential.scale == scale
    assert len(potential.tuple_means) == 800
    assert len(potential.acceptances) == round(math.log2(m)) - 1
    f0 = potential.centres.potential(source.tensor).numpy()
    f = potential.evaluate(source.tensor).numpy()
    assert potential.largest == pytest.approx(f0.max())

    def value(g: Array) -> float:
        return float(source.p @ g) - scale / m * log_v(source.points, source.p * np.exp(g / scale), scale, m)

    best = source.intercept(scale, m) * (m - 1) / m
    assert value(f0) < value(f) <= best + 1e-9


def test_a_reference_sample_that_nothing_merges_on() -> None:
    """Too few acceptances: f is f_0 and no trials are planned."""
    reference = 50.0 * gaussians(0, 100)
    (potential,) = fit_multi_potentials(reference, [(0.1, 8)], seed=0, trials=2000)
    assert len(potential.tuple_means) == 0
    assert potential.acceptances == ()
    z = 50.0 * gaussians(1, 10)
    assert torch.equal(potential.evaluate(z), potential.centres.potential(z))
    assert plan_trials(potential, 50_000) is None
    assert plan_trials(dataclasses.replace(potential, replicas=2), 50_000) == ()


def planned(*acceptances: float, m: int) -> MultiPotential:
    z = torch.zeros(20, 1)
    return MultiPotential(
        centres=fit_centres(z, scale=0.1, replicas=m),
        tuple_means=z[:0],
        log_shares=torch.empty(0).double(),
        step=0.0,
        shift=0.0,
        largest=1.0,
        acceptances=acceptances,
        log_pair_weights=torch.zeros(20).double(),
        reference=z,
        replicas=m,
    )


def test_plan_trials() -> None:
    assert plan_trials(planned(0.05, 0.1, m=8), 59_000) == (20_000_000, 5_000_000)
    assert plan_trials(planned(0.05, 0.1, m=8), 1_000_000) == (20_000_000, 5_000_000)
    assert plan_trials(planned(0.05, 0.1, m=8), 5_900) == (2_000_000, 500_000)
    assert plan_trials(planned(0.05, 0.1, m=8), 590) == (400_000, 200_000)  # never fewer than 20,000 accepted
    assert plan_trials(planned(0.05, m=8), 59_000) is None
    assert plan_trials(planned(1e-4, 0.1, m=8), 59_000) == (100_000_000, 5_000_000)  # the most
    assert plan_trials(planned(1e-6, 0.1, m=8), 59_000) is None
    assert plan_trials(planned(*[0.5] * 6, m=128), 59_000) == (2_000_000, 1_000_000, *[200_000] * 4)
    assert plan_trials(planned(m=2), 1000) == ()


def test_all_streams_of_random_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """f depends on the fit's draws, so the Monte Carlo on D_est must not reuse them; nor one design another's."""
    used: list[tuple[str, int]] = []

    def pairs(z: torch.Tensor, jobs: Sequence[PairJob], **rest: Any) -> list[tuple[float, Pool]]:
        used.extend(("pairs", job.seed) for job in jobs)
        return draw_pairs(z, jobs, **rest)

    def doubled(z: torch.Tensor, pool: Pool, scale: float, trials: int, *, seed: int, **rest: Any) -> tuple[int, Pool]:
        used.append((f"double {pool.size}", seed))
        return double(z, pool, scale, trials, seed=seed, **rest)

    monkeypatch.setattr(multi, "draw_pairs", pairs)
    monkeypatch.setattr(multi, "double", doubled)
    potentials = fit_multi_potentials(gaussians(0, 200), [(0.8, 8), (0.5, 8), (0.8, 4)], seed=7, trials=20_000)
    multi_estimates(
        potentials,
        gaussians(1, 300),
        trials=[(2000, 2000), (2000, 2000), (2000,)],
        sampling_level=0.05,
        monte_carlo_level=0.01,
        seed=7,
        pairs=5000,
    )
    assert len(used) == len(set(used)) == 2 * (3 + 5)
    low = {(name, seed & 0xFFFFFFFF) for name, seed in used}
    assert len(low) == len(used)


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
    trials: Trials,
    *,
    n_reference: int,
    n: int,
    seed: int,
    level: float,
    monte_carlo: float,
    pairs: int = 4000,
    exact: bool = False,
) -> tuple[tuple[MultiEstimate, ...], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    reference, picks = source.tensor[source.draw(rng, n_reference)], source.draw(rng, n)
    potentials = fit_multi_potentials(reference, designs, seed=seed, draws=100, trials=3000)
    if exact:
        potentials = tuple(ExactPotential(**vars(p), source=source) for p in potentials)
    estimates = multi_estimates(
        potentials,
        source.tensor[picks],
        trials=trials,
        sampling_level=level,
        monte_carlo_level=monte_carlo,
        seed=seed,
        pairs=pairs,
    )
    return estimates, picks


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize(
    ("seed", "atoms", "n_reference", "n", "level", "monte_carlo"),
    [(0, 5, 100, 300, 0.4, 0.2), (1, 6, 60, 200, 0.4, 0.2), (2, 3, 200, 400, 0.6, 0.3)],
)
def test_coverage(
    seed: int, atoms: int, n_reference: int, n: int, level: float, monte_carlo: float, best: bool
) -> None:
    """m = 4 and 8 with the Monte Carlo in the loop, at levels where failures would show."""
    source = DiscreteSource.random(seed, atoms=atoms)
    designs, trials = [(0.5, 4), (0.3, 4), (0.4, 8)], [(4000,), (4000,), (4000, 2000)]
    exact = np.array([source.intercept(s, m) for s, m in designs])
    potentials = [source.potential(s, m) for s, m in designs]
    repeats, failures, above, broken = 120, np.zeros(3, int), np.zeros(3, int), np.zeros(3, int)
    gap = np.zeros(3)
    for repeat in range(repeats):
        estimates, picks = certify_source(
            source,
            designs,
            trials,
            n_reference=n_reference,
            n=n,
            seed=1000 * seed + repeat,
            level=level,
            monte_carlo=monte_carlo,
            exact=best,
        )
        intercepts = np.array([e.intercept for e in estimates])
        failures += intercepts > exact
        above += np.array([e.point for e in estimates]) > exact
        gap += (exact - intercepts) / repeats
        # Lemma 1 with the bound on V, for this very sample: only the Monte Carlo can break it
        lemma = [m / (m - 1) * f[picks].mean() for (_, m), f in zip(designs, potentials, strict=True)]
        broken += np.array([e.in_sample for e in estimates]) > np.array(lemma)
    assert failures.max() <= most_failures(repeats, level + monte_carlo)
    assert broken.max() <= most_failures(repeats, monte_carlo)
    if best:
        assert (above > 0.1 * repeats).all()  # the value without margins fails
        assert above.max() > 0.25 * repeats
        assert (gap < exact).all()  # and the certificates say something


def test_coverage_of_a_source_with_a_rare_far_atom() -> None:
    """A few samples in a hundred miss it altogether."""
    points = np.array([[0.0], [0.05], [0.1], [8.0]])
    source = DiscreteSource.scaled(points, np.array([0.4, 0.3, 0.29, 0.01]))
    level, monte_carlo, repeats, failures, above = 0.4, 0.1, 150, 0, 0
    exact = source.intercept(0.4, 4)
    for repeat in range(repeats):
        ((estimate,), _) = certify_source(
            source,
            [(0.4, 4)],
            [(3000,)],
            n_reference=150,
            n=200,
            seed=repeat,
            level=level,
            monte_carlo=monte_carlo,
            exact=True,
        )
        failures += estimate.intercept > exact
        above += estimate.point > exact
    assert failures <= most_failures(repeats, level + monte_carlo)
    assert above > 0.2 * repeats


def test_the_margins_close_with_more_records() -> None:
    source, gaps = DiscreteSource.random(4), []
    for n in (300, 3000, 30_000):
        ((estimate,), _) = certify_source(
            source,
            [(0.4, 8)],
            [(30 * n, 10 * n)],
            n_reference=400,
            n=n,
            seed=0,
            level=0.045,
            monte_carlo=0.005,
            pairs=20 * n,
        )
        gaps.append(source.intercept(0.4, 8) - estimate.intercept)
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.03


@pytest.mark.parametrize("seed", range(3))
def test_certificates_stay_below_the_true_distortion_rate_curve(seed: int) -> None:
    source = DiscreteSource.random(seed, atoms=5, dimension=2)
    curve = [source.distortion_rate(float(slope), side=16) for slope in np.geomspace(0.05, 2.0, 8)]
    designs, trials = [(0.56, 4), (0.28, 8), (0.14, 4)], [(20_000,), (20_000, 10_000), (20_000,)]
    level, monte_carlo, repeats, failures, heights = 0.1, 0.02, 12, 0, []
    for repeat in range(repeats):
        estimates, _ = certify_source(
            source,
            designs,
            trials,
            n_reference=200,
            n=2000,
            seed=100 * seed + repeat,
            level=level / 3,
            monte_carlo=monte_carlo / 3,
            pairs=40_000,
        )
        bounds = [max(e.design.intercept - e.scale * rate for e in estimates) for rate, _ in curve]
        failures += any(bound > distortion for bound, (_, distortion) in zip(bounds, curve, strict=True))
        heights.append(max(e.intercept for e in estimates))
    assert failures <= most_failures(repeats, level + monte_carlo)
    assert min(heights) > 0.2


@pytest.mark.parametrize("m", [2, 4, 8])
def test_the_estimate_adds_up(m: int) -> None:
    """By hand, from theory: the potentials, the in-sample value, the margins, the arithmetic's allowance."""
    reference, estimation, s = gaussians(0, 300), gaussians(1, 400), 0.6
    trials = {2: (), 4: (20_000,), 8: (20_000, 10_000)}[m]
    potentials = fit_multi_potentials(reference, [(s, m)], seed=1, trials=100_000)
    seen: list[tuple[int, int]] = []
    (found,) = multi_estimates(
        potentials,
        estimation,
        trials=[trials],
        sampling_level=0.04,
        monte_carlo_level=0.01,
        seed=2,
        pairs=20_000,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] <= seen[-1][1]
    (p,) = potentials
    f0 = p.centres.potential(estimation).numpy()
    f = np.minimum(p.evaluate(estimation).numpy(), s * (math.log(400) - 1))
    factor, doubling = m / (m - 1), found.monte_carlo
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
    (found,) = multi_estimates(
        potentials, estimation, trials=[()], sampling_level=0.05, monte_carlo_level=0.01, seed=2, pairs=1000
    )
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
    potentials = fit_multi_potentials(reference, [(0.6, 4)], seed=1, trials=50_000)
    (found,) = multi_estimates(
        potentials, estimation, trials=[(20_000,)], sampling_level=0.04, monte_carlo_level=0.01, seed=2, pairs=20_000
    )
    assert math.isfinite(found.intercept)
    assert found.intercept < found.in_sample


def test_more_replicas_certify_more() -> None:
    """At the same s, on a continuous source with many records."""
    reference, estimation, s = gaussians(0, 1500), gaussians(1, 12_000), 0.4
    axes = principal_axes(reference).float()
    reference, estimation = reference @ axes, estimation @ axes
    designs = [(s, 2), (s, 4), (s, 8)]
    potentials = fit_multi_potentials(reference, designs, seed=0, centres=100, trials=200_000)
    trials = [(), (1_500_000,), (1_500_000, 500_000)]
    two, four, eight = multi_estimates(
        potentials, estimation, trials=trials, sampling_level=0.045, monte_carlo_level=0.005, seed=0, pairs=400_000
    )
    assert two.intercept + 0.005 < four.intercept
    assert four.intercept < eight.intercept
    (theory,) = replica_estimates(reference, estimation, level=0.05, temperatures=(s,))
    assert theory.intercept < eight.intercept
    assert 0.3 < eight.intercept < 1.0
