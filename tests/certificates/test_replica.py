"""The replica certificate, lemma by lemma, on discrete sources whose potentials and rates are known exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import blahut_arimoto, most_failures, mutual_information
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from opacus_reconbound.certificates import certify
from opacus_reconbound.certificates.kernel import KernelLadder, pair_sums
from opacus_reconbound.certificates.margins import upper_tail
from opacus_reconbound.certificates.replica import (
    DEFAULT_TEMPERATURES,
    ReferencePotential,
    ReplicaEstimate,
    fit_reference_potential,
    in_sample_value,
    replica_designs,
    replica_estimates,
)
from opacus_reconbound.representations import Pixels
from opacus_reconbound.units import nats_to_bits

Array = NDArray[np.float64]
temperatures = st.floats(0.05, 2.0)
seeds = st.integers(0, 10**6)


@dataclass(frozen=True)
class Source:
    """A law on finitely many points, centred and in unit scale; the points are exact in float32."""

    points: Array
    p: Array

    @classmethod
    def random(cls, seed: int, atoms: int | None = None, dimension: int | None = None) -> Source:
        rng = np.random.default_rng(seed)
        atoms = atoms or int(rng.integers(2, 13))
        dimension = dimension or int(rng.integers(1, 4))
        p = rng.dirichlet(np.full(atoms, float(rng.choice([0.3, 1.0, 5.0]))))
        p = (p + 1e-3) / (p + 1e-3).sum()
        points = rng.normal(size=(atoms, dimension)) * np.exp(rng.normal(size=(atoms, 1)))
        points -= p @ points
        points /= math.sqrt(float(p @ (points**2).sum(1)))
        return cls(points.astype(np.float32).astype(np.float64), p)

    @property
    def costs(self) -> Array:
        return ((self.points[:, None] - self.points[None]) ** 2).sum(2) / 2

    @property
    def trace(self) -> float:
        return float(self.p @ ((self.points - self.p @ self.points) ** 2).sum(1))

    def draw(self, rng: np.random.Generator, n: int) -> torch.Tensor:
        return torch.from_numpy(self.points[rng.choice(len(self.p), n, p=self.p)].astype(np.float32))

    def potential(self, epsilon: float) -> Array:
        """g_P: the fixed point of exp(−g/ε) = E exp(g'/ε) k, by averaged updates to the last digits."""
        kernel = np.exp(-self.costs / epsilon)
        h = np.zeros(len(self.p))
        for _ in range(20_000):
            update = -np.log(kernel @ (self.p * np.exp(h)))
            if np.abs(update - h).max() < 1e-14:
                break
            h = 0.5 * (h + update)
        assert np.abs(np.exp(h) * (kernel @ (self.p * np.exp(h))) - 1).max() < 1e-10
        return epsilon * h

    def intercept(self, epsilon: float) -> float:
        """2 E g_P: what the certificate bounds from below."""
        return 2.0 * float(self.p @ self.potential(epsilon))


# ---- the theorem -----------------------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 6))
def test_the_replica_pair_of_any_channel(seed: int, outputs: int) -> None:
    """E‖z − z'‖²/2 is the least error of any estimator, and the pair shares no more than the channel leaks."""
    source, rng = Source.random(seed), np.random.default_rng(seed)
    joint = source.p[:, None] * rng.dirichlet(np.full(outputs, 0.4), size=len(source.p))
    marginal = joint.sum(0)
    posterior = joint / np.maximum(marginal, 1e-300)
    pair = np.einsum("u,au,bu->ab", marginal, posterior, posterior)
    np.testing.assert_allclose(pair.sum(0), source.p, atol=1e-12)
    best = posterior.T @ source.points
    errors = ((source.points[:, None] - best[None]) ** 2).sum(2)
    assert (pair * source.costs).sum() == pytest.approx((joint * errors).sum(), abs=1e-9)
    assert mutual_information(pair) <= mutual_information(joint) + 1e-12


def random_coupling(p: Array, rng: np.random.Generator, costs: Array) -> Array:
    """A coupling of (P, P), from nearly independent to nearly deterministic."""
    pi = rng.gamma(0.5, size=costs.shape) * np.exp(-costs * rng.uniform(0, 8)) + 1e-9
    for _ in range(300):
        pi *= (p / pi.sum(1))[:, None]
        pi *= p / pi.sum(0)
    return pi / pi.sum()


@given(seeds, temperatures, st.floats(0, 3))
def test_donsker_varadhan_for_any_coupling_and_any_potential(seed: int, epsilon: float, size: float) -> None:
    source, rng = Source.random(seed), np.random.default_rng(seed)
    pi = random_coupling(source.p, rng, source.costs)
    np.testing.assert_allclose(pi.sum(1), source.p, atol=0.02)
    half_distance = float((pi * source.costs).sum())
    # where the scaling has not quite converged, the divergence from P × P is what the theorem needs
    information = float((pi * np.log(pi / np.outer(source.p, source.p))).sum())
    assert information == pytest.approx(mutual_information(pi), abs=0.02)
    for g in (size * rng.normal(size=len(source.p)), source.potential(epsilon)):
        theta = source.p @ np.exp((g[:, None] + g[None] - source.costs) / epsilon) @ source.p
        bound = float(pi.sum(0) @ g + pi.sum(1) @ g) - epsilon * math.log(theta) - epsilon * information
        assert half_distance >= bound - 1e-9


@given(seeds, temperatures)
def test_the_bound_is_attained_by_the_entropic_coupling(seed: int, epsilon: float) -> None:
    """Equality: no constant of the theorem could be better."""
    source = Source.random(seed)
    g = source.potential(epsilon)
    pi = np.outer(source.p, source.p) * np.exp((g[:, None] + g[None] - source.costs) / epsilon)
    np.testing.assert_allclose(pi.sum(1), source.p, atol=1e-9)
    bound = source.intercept(epsilon) - epsilon * mutual_information(pi)
    assert (pi * source.costs).sum() == pytest.approx(bound, abs=1e-8)


@pytest.mark.parametrize("seed", range(8))
def test_never_above_the_distortion_rate_function(seed: int) -> None:
    source = Source.random(seed, dimension=1 + seed % 2)
    low, high = source.points.min(0), source.points.max(0)
    if source.points.shape[1] == 1:
        reproduction = np.linspace(low, high, 160)
    else:
        axes = [np.linspace(a, b, 14) for a, b in zip(low, high, strict=True)]
        reproduction = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    reproduction = np.concatenate([reproduction, source.points])
    intercepts = {epsilon: source.intercept(epsilon) for epsilon in (*DEFAULT_TEMPERATURES, 0.02, 1.5)}
    gaps = []
    for slope in np.geomspace(0.03, 3.0, 9):
        rate, distortion = blahut_arimoto(source.points, source.p, reproduction, float(slope))
        bound = max(intercept - epsilon * rate for epsilon, intercept in intercepts.items())
        assert bound <= distortion + 1e-9
        gaps.append(distortion - bound)
    assert min(gaps) < 0.15  # the bound is of the size of the thing it bounds


def test_the_one_dimensional_gaussian() -> None:
    """The envelope is σ² (1 − √(1 − e^{−2γ})) on a fine grid, against the truth σ² e^{−2γ}."""
    points = np.linspace(-6, 6, 241)[:, None]
    p = np.exp(-(points[:, 0] ** 2) / 2)
    source = Source(points, p / p.sum())
    grid = np.geomspace(0.01, 40, 60)
    intercepts = np.array([source.intercept(float(epsilon)) for epsilon in grid])
    for gamma in (0.1, 0.3, 0.7, 1.5):
        envelope = float((intercepts - grid * gamma).max())
        expected = 1 - math.sqrt(1 - math.exp(-2 * gamma))
        assert envelope == pytest.approx(expected, abs=2e-3)
        assert envelope < math.exp(-2 * gamma)


# ---- Lemma 1 ---------------------------------------------------------------------------------------------------------


@given(seeds, temperatures, st.integers(1, 40), st.sampled_from([0.0, 0.1, 1.0, 5.0, -1.0]))
def test_lemma_1_for_any_reals(seed: int, epsilon: float, n: int, size: float) -> None:
    """Badly fitted values, the exact potential, and values fitted on the sample itself (size −1)."""
    source, rng = Source.random(seed), np.random.default_rng(seed + 1)
    g_exact = source.potential(epsilon)
    picks = rng.choice(len(source.p), n, p=source.p)
    kernel = np.exp(-source.costs[np.ix_(picks, picks)] / epsilon)
    g = g_exact[picks] + size * rng.normal(size=n)
    if size < 0:
        h = np.zeros(n)
        for _ in range(100):
            h = 0.5 * (h - np.log(kernel @ np.exp(h) / n))
        g = epsilon * h
    double_sum = np.exp(g / epsilon) @ kernel @ np.exp(g / epsilon) / n**2
    value = 2 * g.mean() - epsilon * math.log(double_sum)
    assert value <= 2 * g_exact[picks].mean() + 1e-9
    # the library's value of the same thing
    w = torch.from_numpy(np.exp(g / epsilon))[None].float()
    z = torch.from_numpy(source.points[picks].astype(np.float32))
    sums = pair_sums(z, w, KernelLadder.plan([epsilon]))
    found = in_sample_value(w, sums, torch.tensor([epsilon], dtype=torch.float64))
    assert float(found[0]) == pytest.approx(value, abs=epsilon * 1e-4 + 2e-5)


def test_lemma_1_needs_the_diagonal() -> None:
    """Without the self terms the same value does exceed the bound: the test above can fail."""
    source, rng, epsilon, n = Source.random(3, atoms=12), np.random.default_rng(0), 0.05, 10
    g_exact = source.potential(epsilon)
    above = 0
    for _ in range(100):
        picks = rng.choice(len(source.p), n, p=source.p)
        kernel = np.exp(-source.costs[np.ix_(picks, picks)] / epsilon)
        np.fill_diagonal(kernel, 0.0)
        g = g_exact[picks]
        double_sum = np.exp(g / epsilon) @ kernel @ np.exp(g / epsilon) / n**2
        above += 2 * g.mean() - epsilon * math.log(double_sum) > 2 * g.mean() + 1e-9
    assert above > 20


# ---- Lemma 2 ---------------------------------------------------------------------------------------------------------


@given(seeds, temperatures, st.integers(1, 30))
def test_lemma_2_for_any_reference_measure(seed: int, epsilon: float, n: int) -> None:
    """In float64, with atoms anywhere, in the support or not."""
    source, rng = Source.random(seed), np.random.default_rng(seed + 2)
    atoms = rng.normal(size=(n, source.points.shape[1])) * rng.choice([0.1, 1.0, 4.0])
    mass = rng.gamma(0.3, size=n) + 1e-12
    inner = np.exp(-((atoms[:, None] - atoms[None]) ** 2).sum(2) / (2 * epsilon))
    mass /= math.sqrt(mass @ inner @ mass)
    log_kernel = -((source.points[:, None] - atoms[None]) ** 2).sum(2) / (2 * epsilon)
    top = log_kernel.max(1)
    g0 = -epsilon * (top + np.log(np.exp(log_kernel - top[:, None]) @ mass))
    assert g0.min() >= -1e-9
    g_exact = source.potential(epsilon)
    assert g_exact.min() >= -1e-9
    x = (g_exact - g0) / epsilon
    assert source.p @ np.exp(x) <= 1 + 1e-9
    for clip in (0.5, 7.5, 30.0):
        x_clipped = np.maximum(x, -clip)
        assert source.p @ np.exp(x_clipped) <= 1 + math.exp(-clip) + 1e-9
        for cap in (clip * epsilon, 0.3 * clip * epsilon):  # any cap up to ε B
            right = source.p @ np.minimum(g0, cap) + epsilon * (source.p @ x_clipped)
            assert source.p @ g_exact >= right - 1e-9


@given(seeds, st.integers(2, 60), st.integers(0, 12))
def test_lemma_2_for_the_library(seed: int, n: int, rounds: int) -> None:
    """E exp((g_P − g_0)/ε) <= 1 for the computed g_0 itself, rounding included, converged or not."""
    source, rng = Source.random(seed), np.random.default_rng(seed + 3)
    reference = source.draw(rng, n)
    potential = fit_reference_potential(reference, (0.8, 0.4, 0.3, 0.07), rounds=rounds)
    points = torch.from_numpy(source.points.astype(np.float32))
    g0 = potential.evaluate(points).numpy()
    assert (g0 >= 0).all()
    for row, epsilon in zip(g0, potential.ladder.temperatures, strict=True):
        assert source.p @ np.exp((source.potential(epsilon) - row) / epsilon) <= 1 + 1e-12


def test_lemma_2_is_attained_by_the_exact_measure() -> None:
    """With μ_0 = μ_P there is nothing to lose: g_0 = g_P, so the normalisation is not too large either."""
    source, epsilon = Source.random(5, atoms=8), 0.3
    w = source.p * np.exp(source.potential(epsilon) / epsilon) * len(source.p)
    points = torch.from_numpy(source.points.astype(np.float32))
    potential = ReferencePotential(
        points=points,
        weights=torch.from_numpy(w)[None].float(),
        ladder=KernelLadder.plan([epsilon]),
        log_norms=torch.zeros(1, dtype=torch.float64),
        largest=torch.ones(1, dtype=torch.float64),
    )
    np.testing.assert_allclose(potential.evaluate(points)[0].numpy(), source.potential(epsilon), atol=2e-4)


@pytest.mark.parametrize("rounds", [0, 1, 3, 12])
def test_the_norm_of_the_reference_measure(rounds: int) -> None:
    """Own terms included, rounded up, and by very little."""
    source = Source.random(9, atoms=10, dimension=3)
    z = source.draw(np.random.default_rng(0), 700)
    potential = fit_reference_potential(z, (0.8, 0.3, 0.07), rounds=rounds)
    points = z.double().numpy()
    costs = ((points[:, None] - points[None]) ** 2).sum(2) / 2
    for g, epsilon in enumerate(potential.ladder.temperatures):
        w = potential.weights[g].double().numpy()
        exact = 0.5 * math.log(w @ np.exp(-costs / epsilon) @ w / len(w) ** 2)
        assert exact <= float(potential.log_norms[g]) <= exact + 1e-3
    if rounds == 0:
        assert (potential.log_norms < -0.05).all()  # so that this is about more than ln 1


def test_the_gap_is_that_of_the_potential_without_its_cap() -> None:
    """Lemma 2 is about g_0 itself; only the mean that is certified directly is capped."""
    rng = np.random.default_rng(4)
    reference = torch.from_numpy(rng.normal(size=(300, 3)).astype(np.float32)) / 2
    estimation = torch.from_numpy(rng.normal(size=(400, 3)).astype(np.float32)) / 2
    estimation[:5] *= 30.0
    potential = fit_reference_potential(reference, (0.4, 0.1))
    g0 = potential.evaluate(estimation).numpy()
    estimates = replica_estimates(reference, estimation, level=0.1, temperatures=(0.4, 0.1))
    for row, cap, e in zip(g0, potential.largest.tolist(), estimates, strict=True):
        assert row.mean() > np.minimum(row, cap).mean() + 0.1
        assert e.largest == cap
        assert e.reference_mean == pytest.approx(np.minimum(row, cap).mean(), rel=1e-9)
        assert e.observed_gap == pytest.approx((row.mean() - e.in_sample / 2) / e.temperature, rel=1e-9)


def test_a_record_on_the_only_reference_atom_has_no_negative_potential() -> None:
    potential = fit_reference_potential(torch.ones(20, 3), (0.4, 0.1))
    assert (potential.evaluate(torch.ones(2, 3)) >= 0).all()


@pytest.mark.parametrize("distance", [1e2, 1e4])
def test_far_records_have_a_finite_potential_and_a_capped_effect(distance: float) -> None:
    rng = np.random.default_rng(0)
    reference = torch.from_numpy(rng.normal(size=(200, 4)).astype(np.float32)) / 2
    estimation = torch.from_numpy(rng.normal(size=(300, 4)).astype(np.float32)) / 2
    near = replica_estimates(reference, estimation, level=0.1)
    estimation[7, 0] = distance
    for before, after in zip(near, replica_estimates(reference, estimation, level=0.1), strict=True):
        assert math.isfinite(after.intercept)
        assert after.reference_mean <= before.reference_mean + after.largest / 300 + 1e-9


# ---- Lemma 3 ---------------------------------------------------------------------------------------------------------


def shape(x: Array, rate: float = 1.0) -> Array:
    """e^{lx} − 1 − lx, without cancellation near zero."""
    t = rate * x
    return np.where(np.abs(t) < 1e-4, t * t / 2 + t**3 / 6, np.expm1(t) - t)


@pytest.mark.parametrize("rate", [0.004, 0.01, 0.03, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("clip", [0.1, 1.0, 7.5, 40.0, 700.0])
def test_lemma_3_ratio_decreases_and_the_inequality_holds(rate: float, clip: float) -> None:
    x = np.concatenate([np.linspace(-clip, -1e-3, 4000), np.linspace(1e-3, 60, 4000)])
    ratio = shape(x, rate) / shape(x)
    assert (np.diff(ratio) <= 1e-9 * ratio[:-1]).all()
    r = (math.exp(-rate * clip) - 1 + rate * clip) / (math.exp(-clip) - 1 + clip)
    assert (shape(x, rate) <= r * shape(x) * (1 + 1e-9)).all()
    assert rate**2 * (1 - 1e-6) <= r < rate


@given(st.lists(st.tuples(st.floats(-7.5, 3), st.floats(0.01, 1)), min_size=1, max_size=8), st.floats(0, 0.1))
def test_lemma_3_moment(values: list[tuple[float, float]], slack: float) -> None:
    """E e^{lX'} <= 1 − l y + r (y + slack) for laws shifted to E e^{X'} <= 1 + slack."""
    x, p = np.array(values).T
    p = p / p.sum()
    x = np.maximum(x - max(0.0, math.log(p @ np.exp(x))), -7.5)
    slack = max(slack, float(p @ np.exp(x)) - 1)
    y = -float(p @ x)
    for rate in (0.004, 0.01, 0.03, 0.1):
        r = float(shape(np.array(-7.5), rate) / shape(np.array(-7.5)))
        assert p @ np.exp(rate * x) <= 1 - rate * y + r * (y + slack) + 1e-12


@pytest.mark.parametrize("expected_count", [0.3, 1.0, 3.0])
def test_lemma_3_coverage_on_the_law_with_rare_large_losses(expected_count: float) -> None:
    """X is −B with a small chance and just above 0 otherwise: samples often miss what matters."""
    level, clip, n, repeats = 0.3, 7.5, 300, 2000
    chance = expected_count / n
    above = math.log((1 - chance * math.exp(-clip)) / (1 - chance))  # E e^X = 1
    y = chance * clip - (1 - chance) * above
    counts = np.random.default_rng(int(10 * expected_count)).binomial(n, chance, repeats)
    observed = (counts * clip - (n - counts) * above) / n
    bounds = np.array([upper_tail(float(v), clip=clip, slack=math.exp(-clip), n=n, level=level) for v in observed])
    assert (bounds < y).sum() <= most_failures(repeats, level)
    assert (observed < y).mean() > 0.3  # the observed value alone fails


# ---- the whole certificate -------------------------------------------------------------------------------------------

COVERAGE_TEMPERATURES = (0.56, 0.28, 0.14, 0.07)


@dataclass(frozen=True)
class Simulation:
    level: float
    repeats: int
    failures: int
    in_sample_above: NDArray[np.int64]
    mean_gap: Array


def simulate(source: Source, *, n_reference: int, n: int, level: float, repeats: int, seed: int) -> Simulation:
    exact = np.array([source.intercept(epsilon) for epsilon in COVERAGE_TEMPERATURES])
    rng = np.random.default_rng(seed)
    failures, above, gap = 0, np.zeros(len(exact), np.int64), np.zeros(len(exact))
    for _ in range(repeats):
        estimates: tuple[ReplicaEstimate, ...] = replica_estimates(
            source.draw(rng, n_reference), source.draw(rng, n), level=level, temperatures=COVERAGE_TEMPERATURES
        )
        assert [e.temperature for e in estimates] == list(COVERAGE_TEMPERATURES)
        intercepts = np.array([e.intercept for e in estimates])
        failures += bool((intercepts > exact).any())
        above += np.array([e.in_sample for e in estimates]) > exact
        gap += (exact - intercepts) / repeats
    return Simulation(level, repeats, failures, above, gap)


@pytest.mark.parametrize(
    ("seed", "atoms", "n_reference", "n", "level"),
    [(0, 6, 100, 400, 0.5), (1, 12, 50, 150, 0.5), (2, 3, 300, 300, 0.9), (7, 40, 200, 250, 0.05)],
)
def test_coverage(seed: int, atoms: int, n_reference: int, n: int, level: float) -> None:
    source = Source.random(seed, atoms=atoms)
    found = simulate(source, n_reference=n_reference, n=n, level=level, repeats=600, seed=seed)
    assert found.failures <= most_failures(found.repeats, level)
    # the value without margins is above the exact one in a good part of the samples: a margin is needed
    assert found.in_sample_above.max() > 0.2 * found.repeats


def test_coverage_of_a_source_with_rare_far_records() -> None:
    """The hard case: a few samples in a hundred miss the far atom altogether."""
    points = np.array([[0.0], [0.05], [0.1], [8.0]])
    p = np.array([0.4, 0.3, 0.29, 0.01])
    points = (points - p @ points) / math.sqrt(float(p @ (points - p @ points) ** 2 @ np.ones(1)))
    source = Source(points.astype(np.float32).astype(np.float64), p)
    found = simulate(source, n_reference=150, n=200, level=0.5, repeats=1000, seed=11)
    assert found.failures <= most_failures(found.repeats, found.level)
    assert found.in_sample_above.max() > 0.2 * found.repeats


def test_the_margins_close_with_more_records() -> None:
    source = Source.random(4, atoms=6)
    gaps = [simulate(source, n_reference=400, n=n, level=0.05, repeats=2, seed=n).mean_gap for n in (300, 3000, 30_000)]
    assert (gaps[0] > gaps[1]).all()
    assert (gaps[1] > gaps[2]).all()
    assert (gaps[2] < 0.02).all()


def test_the_estimate_adds_up() -> None:
    source, rng = Source.random(6), np.random.default_rng(6)
    reference, estimation = source.draw(rng, 120), source.draw(rng, 200)
    seen: list[tuple[int, int]] = []
    estimates = replica_estimates(
        reference, estimation, level=0.1, progress=lambda done, total: seen.append((done, total))
    )
    designs = replica_designs(reference, estimation, level=0.1)
    assert designs == tuple(e.design for e in estimates)
    assert [d.temperature for d in designs] == sorted(DEFAULT_TEMPERATURES, reverse=True)
    for e in estimates:
        assert e.intercept == e.design.intercept < e.in_sample
        assert e.certified_gap > e.observed_gap
        assert e.mean_margin > 0
        assert 0 <= e.reference_mean <= e.largest
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


def test_more_sweeps_and_a_smaller_level_go_the_right_way() -> None:
    source, rng = Source.random(8, atoms=12), np.random.default_rng(8)
    reference, estimation = source.draw(rng, 60), source.draw(rng, 400)
    one = replica_estimates(reference, estimation, level=0.1, sweeps=1)
    three = replica_estimates(reference, estimation, level=0.1, sweeps=3)
    strict = replica_estimates(reference, estimation, level=0.001, sweeps=3)
    for a, b, c in zip(one, three, strict, strict=True):
        assert a.in_sample <= b.in_sample == c.in_sample
        assert a.intercept <= b.intercept
        assert c.intercept < b.intercept


# ---- end to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "designs"), [(0, "fast"), (1, "fast"), (2, "all")])
def test_certificates_stay_below_the_true_distortion_rate_curve(seed: int, designs: str) -> None:
    rng = np.random.default_rng(seed)
    atoms = rng.integers(0, 256, size=(5, 2)).astype(np.uint8)
    p = rng.dirichlet(np.full(5, 2.0))
    points = atoms.astype(np.float64)
    axes = [np.linspace(points[:, i].min(), points[:, i].max(), 16) for i in range(2)]
    reproduction = np.concatenate([np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2), points])
    variance = float(p @ ((points - p @ points) ** 2).sum(1))
    curve = [blahut_arimoto(points, p, reproduction, float(slope) * variance) for slope in np.geomspace(0.05, 2.0, 8)]
    curve.append((0.0, variance))
    alpha, repeats, failures, heights = 0.3, 60, 0, []
    for _ in range(repeats):
        certificate = certify(
            atoms[rng.choice(5, 100, p=p)],
            atoms[rng.choice(5, 1000, p=p)],
            representation=Pixels(),
            designs=designs,  # type: ignore[arg-type]
            pairs=[(1, 0.2), (2, 0.4)],
            alpha=alpha,
            allow_repeats=True,
            progress=False,
        )
        bounds = [certificate.bound(nats_to_bits(rate)).mse for rate, _ in curve]
        failures += any(bound > distortion for bound, (_, distortion) in zip(bounds, curve, strict=True))
        heights.append(bounds[-1] / variance)
    assert failures <= most_failures(repeats, alpha)
    assert min(heights) > 0.3  # and they do say something
