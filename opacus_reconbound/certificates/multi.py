"""The certificate with m = 4, 8, 16, … replicas: the tightest one here.

With m conditionally independent posterior draws the total correlation is at most (m − 1) γ, and the mean over pairs
of ‖z_i − z_j‖²/2 is still the least mean squared error. With s = ε (m − 1), φ_z(y) = exp(−‖z − y‖²/s),
c = (m/(πs))^{d/2}, ‖F‖_p^p = c ∫ F^p and F_n = (1/n) Σ e^{f_i/s} φ_{z_i}, the bound is D >= (m/(m−1)) E f_P − s γ,
where f_P is the population's potential, and

Lemma 1. For any reals f_i on the estimation sample: mean f_i − (s/m) ln V_m <= mean f_P(z_i), with V_m = ‖F_n‖_m^m
    the sum over m-tuples with repetition. An upper bound on V_m in its place stays valid.
Lemma 2. With f_0 of ``centres`` and X = (f_P − f_0)/s: E e^X <= 1.
Lemma 3. ``margins.upper_tail``, from ȳ = (mean f_0 − [mean f − (s/m) ln V_m])/s.

V_m from above: V_2 is one exact sweep; each doubling is a Bernoulli frequency (``tuples``). With A_r a pool of
r-tuples, q the law that its merged pairs have, and ν_r = ‖F_q(A_r)‖_{m/r}:

    ν_r <= inv( sqrt(P_2r ν_2r) ),   ν_m = 1,    ln V_m <= (m/2)(ln V_2 + ln ν_2),

P_2r by its Clopper–Pearson upper limit, and inv from

Lemma 4. For N independent points of a law q and ν̂ the norm of their average, ν − sqrt(2 ν L/N) <= ν̂ with probability
    at least 1 − e^{−L}.  (g = c ∫ φ_u G*, G* the dual function, lies in [0, 1]; E g = ν, E g² <= ν; mean g <= ν̂.)

These events are over the Monte Carlo alone, conditional on the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.stats import beta

from opacus_reconbound import _validate
from opacus_reconbound.certificates.centres import Centres, fit_centres, log_sum_kernel
from opacus_reconbound.certificates.designs import ReplicaDesign
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics, gap_exponent, repeated_share
from opacus_reconbound.certificates.kernel import SUM_ERROR, cost_error, half_square_norms
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.certificates.parallel import Progress, part
from opacus_reconbound.certificates.tuples import HEADS, PairJob, Pool, double, draw_pairs, stream_seed, tuple_means
from opacus_reconbound.errors import InvalidValueError

__all__ = [
    "Doubling",
    "MultiEstimate",
    "MultiPotential",
    "clopper_pearson_upper",
    "finite_pool_inverse",
    "fit_multi_potentials",
    "log_v_upper",
    "multi_estimates",
    "plan_trials",
    "principal_axes",
    "project",
]

_LEAST_CLIP = 7.5
_LARGEST_EXACT = 4_096
_MERGED = 20_000  # tuples wanted at each level of a chain that only fits or plans
_LEAST_MERGED = 50
_PILOT_TRIALS = 400_000
_MOST_TRIALS = 30_000_000  # for one of its doublings
_IMITATED = 2_000  # tuples behind −s ln h
_ROWS = 12_000  # records whose pairs a chain on the estimation sample is made of
_REFINE_NUMBER = 2_000_000  # of these pairs
# the Monte Carlo's random numbers are to be independent of all that f depends on, whatever the callers' seeds
_FIT_PAIRS, _FIT_TRIALS, _PAIRS, _TRIALS, _REFINE_PAIRS, _REFINE_TRIALS = range(6)


def clopper_pearson_upper(successes: int, trials: int, level: float) -> float:
    """Upper confidence limit of a Bernoulli probability, exact (Clopper and Pearson 1934)."""
    trials = _validate.integer("trials", trials, minimum=1)
    level = _validate.fraction("level", level)
    return 1.0 if successes >= trials else float(beta.ppf(1.0 - level, successes + 1, trials - successes))


def finite_pool_inverse(observed: float, *, points: float, level: float) -> float:
    """Lemma 4: the largest ν with ν − sqrt(2 ν L/N) <= ν̂, L = ln(1/level); never above 1.

    Args:
        observed: ν̂, the norm of the pool's average, or a bound on it.
        points: N, or 1/(largest weight) of a weighted pool.
        level: probability of failure.
    """
    b = math.sqrt(2.0 * math.log(1.0 / level) / points)
    return min(1.0, (0.5 * (b + math.sqrt(b * b + 4.0 * observed))) ** 2)


def principal_axes(reference: torch.Tensor, count: int = HEADS) -> torch.Tensor:
    """The reference sample's first principal axes as orthonormal columns, float64 (d, count).

    Exact up to 4,096 coordinates; a randomised factorisation beyond, for which any orthonormal columns are valid.
    """
    d = reference.shape[1]
    count = min(count, d)
    if d <= _LARGEST_EXACT:
        covariance = reference.double().T @ reference.double() / len(reference)
        vectors: torch.Tensor = torch.linalg.eigh(covariance).eigenvectors
        return vectors.flip(1)[:, :count]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((d, count), generator=generator, dtype=torch.float64)
    for _ in range(3):  # subspace iteration (Halko, Martinsson and Tropp 2011), a chunk of records at a time
        image = torch.zeros_like(probe)
        for start in range(0, len(reference), 1024):
            x = reference[start : start + 1024].double()
            image += x.T @ (x @ probe)
        probe = torch.linalg.qr(image).Q
    return probe


def project(z: torch.Tensor, axes: torch.Tensor, chunk: int = 1024) -> torch.Tensor:
    """Coordinates on orthonormal axes, float32 (n, h); no distance grows by it."""
    return torch.cat([(z[start : start + chunk].double() @ axes).float() for start in range(0, len(z), chunk)])


@dataclass(frozen=True, eq=False)
class MultiPotential:
    """f_0 and f for one (s, m), functions of the reference sample alone.

    Attributes:
        centres: f_0.
        tuple_means: means of m − 1 members of draws of q_m on the reference sample, float32 (M, d); may be empty.
        log_shares: −ln of M F(mean), float64 (M,).
        step: how far f goes from f_0 towards −s ln h.
        shift: added to f, so that ln V_m is near zero.
        largest: f_max, the cap on f_0.
        log_v: ln V_2, ln V_4, … on the reference sample without repeats, as far as tuples merged.
        replicas: m.
    """

    centres: Centres
    tuple_means: torch.Tensor
    log_shares: torch.Tensor
    step: float
    shift: float
    largest: float
    log_v: tuple[float, ...]
    replicas: int

    @property
    def scale(self) -> float:
        """s."""
        return self.centres.scale

    @property
    def complete(self) -> bool:
        """Whether m-tuples merged on the reference sample: otherwise there is little hope elsewhere."""
        return 1 << len(self.log_v) == self.replicas

    def evaluate(self, z: torch.Tensor, f0: torch.Tensor | None = None) -> torch.Tensor:
        """f at records z, float64 (N,)."""
        f0 = self.centres.potential(z) if f0 is None else f0
        if len(self.tuple_means) == 0:
            return f0 + self.shift
        log_h = log_sum_kernel(z, self.tuple_means, self.log_shares, self.centres.rate)
        way = -self.scale * log_h - f0
        return f0 + _move(way, self.step, self.scale, self.replicas, len(self.tuple_means)) + self.shift


def fit_multi_potentials(
    reference: torch.Tensor,
    pairs: Sequence[tuple[float, int]],
    *,
    seed: int,
    axes: torch.Tensor | None = None,
    centres: int = 300,
    step: float | None = None,
    most: int = _MOST_TRIALS,
    progress: Progress | None = None,
) -> tuple[MultiPotential, ...]:
    """Fit f_0 and f for several (s, m) on the reference sample.

    Args:
        reference: D_perp, unit scale, float32 (n, d).
        pairs: (s, m), m a power of two.
        seed: of everything random.
        axes: ``principal_axes`` of the reference sample, made here if not given.
        centres: of f_0.
        step: how far f goes at most from f_0 towards −s ln h; 2/m unless given.
        most: trials for a doubling.
        progress: told (done, in all), in hundredths.
    """
    n = len(reference)
    heads = project(reference, principal_axes(reference) if axes is None else axes)
    mixtures, jobs = [], []
    for number, (scale, replicas) in enumerate(pairs):
        mixtures.append(fit_centres(reference, scale=scale, replicas=replicas, count=centres, seed=seed))
        log_w = (mixtures[-1].potential(reference) / scale).clamp(max=math.log(n) - 1.0)
        jobs.append(PairJob(log_w.exp(), scale, 50 * n, stream_seed(seed, _FIT_PAIRS, number)))
        if progress is not None:
            progress(60 * (number + 1) // len(pairs), 100)
    found = []
    drawn = draw_pairs(reference, jobs, repeats=False)
    for number, ((scale, replicas), mixture, job, (log_v2, pool)) in enumerate(
        zip(pairs, mixtures, jobs, drawn, strict=True)
    ):
        pool, log_v = _chain(
            reference,
            heads,
            pool,
            log_v2,
            scale=scale,
            replicas=replicas,
            most=most,
            seed=stream_seed(seed, _FIT_TRIALS, number),
            repeats=False,
        )
        means, shares = reference.new_empty((0, reference.shape[1])), torch.empty(0, dtype=torch.float64)
        taken, shift = 0.0, 0.0
        if pool.size == replicas and len(pool):
            means, shares = _imitate(reference, job.weights.log(), pool, mixture.rate)
            way = -scale * log_sum_kernel(reference, means, shares, mixture.rate) - mixture.potential(reference)
            longest = _longest_step(replicas) if step is None else step
            taken, change = _best_step(pool, way, scale, longest, len(means))
            shift = -scale / replicas * (log_v[-1] + change)
        found.append(
            MultiPotential(
                centres=mixture,
                tuple_means=means,
                log_shares=shares,
                step=taken,
                shift=shift,
                largest=max(float(mixture.potential(reference).max()), 1e-3),
                log_v=log_v,
                replicas=replicas,
            )
        )
        if progress is not None:
            progress(60 + 40 * (number + 1) // len(pairs), 100)
    return tuple(found)


def _chain(
    z: torch.Tensor,
    heads: torch.Tensor,
    pool: Pool,
    log_v2: float,
    *,
    scale: float,
    replicas: int,
    most: int,
    seed: int,
    repeats: bool,
) -> tuple[Pool, tuple[float, ...]]:
    """Doublings with as many trials as it takes, for fitting and planning only: no bound comes from them.

    Returns:
        The last pool and ln V_2, ln V_4, …, as far as tuples merged.
    """
    if len(pool) == 0:
        return pool, ()
    log_v = [log_v2]
    while pool.size < replicas:
        pilot, merged = double(z, pool, scale, _PILOT_TRIALS, heads=heads, seed=stream_seed(seed, 0), repeats=repeats)
        trials = _PILOT_TRIALS
        if pilot < _MERGED:
            trials = int(min(most, _PILOT_TRIALS * _MERGED / max(pilot, 1)))
            _, merged = double(z, pool, scale, trials, heads=heads, seed=stream_seed(seed, 1), repeats=repeats)
        if len(merged) < _LEAST_MERGED:
            break
        log_v.append(2.0 * log_v[-1] + math.log(len(merged) / trials))
        pool = merged
    return pool, tuple(log_v)


def _imitate(z: torch.Tensor, log_w: torch.Tensor, pool: Pool, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
    """h = c ∫ F^{m−1} φ as a mixture: means of m − 1 members of draws of q_m, and −ln of M F(mean).

    The draws have the density F^{m−1} φ_{z_m} at the mean; dividing by F, the sum over z_m, leaves F^{m−1}.
    """
    # pairs come tile by tile, the record in the earlier tile first: take any tuples, and leave any member out
    generator = torch.Generator().manual_seed(len(pool))
    members = pool.members[torch.randperm(len(pool), generator=generator)[:_IMITATED]]
    shuffled = members.gather(1, torch.rand(members.shape, generator=generator, dtype=torch.float32).argsort(dim=1))
    means = tuple_means(z, shuffled[:, :-1], torch.float64).float()
    log_f = log_sum_kernel(means, z, log_w - math.log(len(z)), rate)
    return means, -(log_f + math.log(len(means)))


def _longest_step(replicas: int) -> float:
    """2/m: where a record shares its tuples with none but its copies, h goes as e^{(m−1)f/s} and 1/m is all the way."""
    return 2.0 / max(replicas, 4)


def _move(way: torch.Tensor, step: float, scale: float, replicas: int, drawn: int) -> torch.Tensor:
    """A step along ``way`` = −s ln h − f. No record's share of q_m is raised more than M-fold, M the tuples behind h.

    A record that is in none of them, and is no neighbour of any, has a share of about 1/M at most.
    """
    return (step * way).clamp(max=scale / replicas * math.log(drawn))


def _best_step(pool: Pool, way: torch.Tensor, scale: float, longest: float, drawn: int) -> tuple[float, float]:
    """How far to go from f along ``way``, and what that adds to ln V_m: by draws of q_m, ln E e^{Σ move/s}.

    Too long a step can leave f worse than it was.
    """
    best = (0.0, 0.0, 0.0)
    for step in (longest, longest / 2.0, longest / 4.0):
        move = _move(way, step, scale, pool.size, drawn)
        sums = move[pool.members.long()].sum(dim=1) / scale
        change = float(torch.logsumexp(sums, dim=0)) - math.log(len(pool))
        best = max(best, (float(move.mean()) - scale / pool.size * change, step, change))
    return best[1], best[2]


def plan_trials(
    log_v: Sequence[float], *, scale: float, replicas: int, loss: float, most: int, level: float
) -> tuple[int, tuple[int, ...]]:
    """Pairs and trials T_4, …, T_m such that every level of pools costs about ``loss`` of D, as far as ``most`` allows.

    A pool of N r-tuples costs about (s/r) sqrt(2 L/(N ν_r)), ν_r = V_m^{r/m}/V_r (Lemma 4), L = ln(1/level).

    Args:
        log_v: ln V_2, …, ln V_m as estimated beforehand, by other random numbers.
        scale: s.
        replicas: m.
        loss: in units of tr Σ, for each level.
        most: trials at one level, and pairs.
        level: probability of failure of one event.
    """
    sizes = [2 ** (k + 1) for k in range(len(log_v))]
    wanted = [
        2.0 * math.log(1.0 / level) * math.exp(v - r / replicas * log_v[-1]) * (scale / (r * loss)) ** 2
        for r, v in zip(sizes, log_v, strict=True)
    ]
    wanted = [max(20_000.0, number) for number in wanted]
    rates = [math.exp(after - 2.0 * before) for before, after in pairwise(log_v)]
    trials = tuple(int(min(most, number / rate)) for number, rate in zip(wanted[1:], rates, strict=True))
    return int(min(most // 25, wanted[0])), trials


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """What the Monte Carlo gave: ln V_m as estimated and bounded, counts, and the tuples' share that repeat records."""

    estimate: float
    upper: float
    trials: tuple[int, ...]
    accepted: tuple[int, ...]
    pairs: int
    repeated_share: float | None


def log_v_upper(
    z: torch.Tensor,
    log_v2: float,
    pairs: Pool,
    *,
    scale: float,
    replicas: int,
    trials: Sequence[int],
    level: float,
    seed: int,
    heads: torch.Tensor | None = None,
    progress: Progress | None = None,
) -> Doubling:
    """Ln V_m from above with probability at least 1 − level over the Monte Carlo, the arithmetic not yet charged.

    Args:
        z: records, float32 (n, d).
        log_v2: ln V_2, exact.
        pairs: draws of q_2.
        scale: s.
        replicas: m, a power of two, at least 2.
        trials: T_4, T_8, …, T_m, fixed beforehand.
        level: probability of failure.
        seed: of the trials.
        heads: leading coordinates, see ``tuples.double``.
        progress: told (trials done, trials in all).
    """
    levels = int(math.log2(replicas)) - 1
    if len(trials) != levels or 2 ** (levels + 1) != replicas:
        raise InvalidValueError(f"{replicas} replicas need {levels} trial counts. Found {list(trials)}.")
    pool, pair_points = pairs, len(pairs)
    points, accepted, probabilities = [max(1, pair_points)], [], []
    estimate, done = log_v2, 0
    for count in trials:
        merged, pool = double(
            z, pool, scale, count, seed=seed, heads=heads, progress=_after(progress, done, sum(trials))
        )
        done += count
        accepted.append(merged)
        points.append(max(1, merged))
        probabilities.append(clopper_pearson_upper(merged, count, level / (2 * levels)))
        estimate = 2.0 * estimate + math.log(max(merged, 1) / count)
        if merged == 0:
            break
    norm = 1.0  # ν at the level above; 1 also where the chain broke off
    for probability, size in zip(reversed(probabilities), reversed(points[: len(probabilities)]), strict=True):
        norm = finite_pool_inverse(math.sqrt(probability * norm), points=size, level=level / (2 * levels))
    return Doubling(
        estimate=estimate,
        upper=0.5 * replicas * (log_v2 + math.log(norm)),
        trials=tuple(trials),
        accepted=tuple(accepted),
        pairs=pair_points,
        repeated_share=repeated_share(pool.members),
    )


def _after(progress: Progress | None, done: int, total: int) -> Progress | None:
    return None if progress is None else lambda now, _: progress(done + now, total)


@dataclass(frozen=True, kw_only=True)
class MultiEstimate:
    """One design's certificate and what it is made of; in units of tr Σ unless said.

    Attributes:
        scale: s.
        replicas: m.
        point: (m/(m−1)) times Lemma 1's value with the estimated V_m: no margin at all.
        in_sample: the same with the bound on V_m and the arithmetic's allowance.
        intercept: the certified value of D + s γ.
        observed_gap: ȳ, in nats.
        certified_gap: y*, in nats.
        mean_margin: t.
        range_margin: the part of ``mean_margin`` that falls like 1/n.
        gap_at_twice: y* with as much observed in twice as many records.
        records: n.
        monte_carlo: the counts.
    """

    scale: float
    replicas: int
    point: float
    in_sample: float
    intercept: float
    observed_gap: float
    certified_gap: float
    mean_margin: float
    range_margin: float
    gap_at_twice: float
    records: int
    monte_carlo: Doubling

    @property
    def design(self) -> ReplicaDesign:
        """The converse for the certificate."""
        return ReplicaDesign(
            temperature=self.scale / (self.replicas - 1), intercept=self.intercept, replicas=self.replicas
        )

    @property
    def diagnostics(self) -> DesignDiagnostics:
        """What the certified value is made of."""
        factor = self.replicas / (self.replicas - 1)
        return DesignDiagnostics(
            n=self.records,
            point=self.point,
            in_sample=self.in_sample,
            certified=self.intercept,
            sampling_margin=factor * self.mean_margin,
            range_margin=factor * self.range_margin,
            gap_margin=factor * self.scale * max(0.0, self.certified_gap - self.observed_gap),
            gap_exponent=gap_exponent(self.observed_gap, self.certified_gap, self.gap_at_twice),
            diagonal_share=self.monte_carlo.repeated_share,
        )


def multi_estimates(
    potentials: Sequence[MultiPotential],
    estimation: torch.Tensor,
    *,
    sampling_level: float,
    monte_carlo_level: float,
    seed: int,
    axes: torch.Tensor | None = None,
    turns: int = 2,
    loss: float = 0.0015,
    most: int = 500_000_000,
    progress: Progress | None = None,
) -> tuple[MultiEstimate, ...]:
    """Certify several (s, m), all fitted on D_perp; each sweep over the pairs serves all.

    First f is improved on the estimation sample itself, which Lemma 1 allows, with tuples from a part of its pairs;
    they also serve to plan the numbers of pairs and trials of the Monte Carlo, whose random numbers are others.

    Args:
        potentials: from ``fit_multi_potentials``, complete.
        estimation: D_est, unit scale, float32 (n, d).
        sampling_level: α for the sampling of each design, both its events together.
        monte_carlo_level: α for the Monte Carlo of each design.
        seed: of the draws.
        axes: orthonormal columns (d, h) on which distances are looked at first.
        turns: how often f is improved on the estimation sample.
        loss: of D to the Monte Carlo at each level, in units of tr Σ, to aim at.
        most: trials at one level.
        progress: told (done, in all), in hundredths.
    """
    if not all(potential.complete for potential in potentials):
        raise InvalidValueError(
            "Found a potential on whose reference sample too few tuples merged. Certify only potentials that are "
            "complete."
        )
    n = len(estimation)
    heads = project(estimation, torch.eye(estimation.shape[1], HEADS, dtype=torch.float64) if axes is None else axes)
    stages = 2 * turns + 2 + len(potentials)
    f0s = [potential.centres.potential(estimation) for potential in potentials]
    fs = [
        potential.evaluate(estimation, f0).clamp(max=potential.scale * (math.log(n) - 1.0))
        for potential, f0 in zip(potentials, f0s, strict=True)
    ]

    def sweep(
        numbers: Sequence[int], stream: int, rows: torch.Tensor | None, report: Progress | None
    ) -> list[tuple[float, Pool]]:
        jobs = [
            PairJob((f / potential.scale).exp(), potential.scale, number, stream_seed(seed, stream, index))
            for index, (potential, f, number) in enumerate(zip(potentials, fs, numbers, strict=True))
        ]
        return draw_pairs(estimation, jobs, rows=rows, progress=report)

    def plan(potential: MultiPotential, log_v: Sequence[float]) -> tuple[int, tuple[int, ...]]:
        level = monte_carlo_level / (2 * max(1, len(log_v) - 1))
        return plan_trials(log_v, scale=potential.scale, replicas=potential.replicas, loss=loss, most=most, level=level)

    plans = [plan(potential, potential.log_v) for potential in potentials]
    for turn in range(turns):
        rows = torch.randperm(n, generator=torch.Generator().manual_seed(stream_seed(seed, n, turn)))[:_ROWS]
        drawn = sweep(
            [_REFINE_NUMBER] * len(fs), _REFINE_PAIRS + 2 * turn, rows.sort().values, part(progress, 2 * turn, stages)
        )
        for index, (potential, (log_v2, pool)) in enumerate(zip(potentials, drawn, strict=True)):
            s, m = potential.scale, potential.replicas
            pool, log_v = _chain(
                estimation,
                heads,
                pool,
                log_v2,
                scale=s,
                replicas=m,
                most=_MOST_TRIALS,
                seed=stream_seed(seed, _REFINE_TRIALS + 2 * turn, index),
                repeats=True,
            )
            if log_v and pool.size == m:
                means, shares = _imitate(estimation, fs[index] / s, pool, potential.centres.rate)
                log_h = log_sum_kernel(estimation, means, shares, potential.centres.rate)
                way = -s * log_h - fs[index]
                step, change = _best_step(pool, way, s, _longest_step(m), len(means))
                refined = fs[index] + _move(way, step, s, m, len(means)) - s / m * (log_v[-1] + change)
                fs[index] = refined.clamp(max=s * (math.log(n) - 1.0))
                plans[index] = plan(potential, log_v)
            if progress is not None:
                progress(100 * (2 * turn + 1) + 100 * (index + 1) // len(potentials), 100 * stages)
    drawn = sweep([pairs for pairs, _ in plans], _PAIRS, None, part(progress, 2 * turns, stages, width=2))
    largest = 2.0 * float(half_square_norms(estimation).max())
    results = []
    for index, (potential, (_, trials)) in enumerate(zip(potentials, plans, strict=True)):
        found = log_v_upper(
            estimation,
            *drawn.pop(0),  # the pairs are not needed any more
            scale=potential.scale,
            replicas=potential.replicas,
            trials=trials,
            level=monte_carlo_level,
            seed=stream_seed(seed, _TRIALS, index),
            heads=heads,
            progress=part(progress, 2 * turns + 2 + index, stages),
        )
        results.append(_assemble(potential, f0s[index], fs[index], found, largest, level=sampling_level))
    return tuple(results)


def _assemble(
    potential: MultiPotential, f0: torch.Tensor, f: torch.Tensor, found: Doubling, largest: float, *, level: float
) -> MultiEstimate:
    """Lemmas 1 to 3 for one design, the arithmetic charged; ``largest`` is the largest squared norm in D_est."""
    s, m, n = potential.scale, potential.replicas, len(f0)
    # F_n^2 <= e^eta V_2 F_q everywhere, for the V_2 computed and the law q drawn from; twice as much again for the
    # draw in two stages and for tuple means in float32
    eta = cost_error(potential.centres.points.shape[1], largest) / s + SUM_ERROR
    mean_f = float(f.mean())
    in_sample = mean_f - s / m * (found.upper + 1.5 * m * eta)
    clipped = f0.clamp(max=potential.largest)
    margin, least = (
        empirical_bernstein(variance=variance, value_range=potential.largest, n=n, level=0.5 * level)
        for variance in (float(clipped.var(correction=1)), 0.0)
    )
    clip = max(potential.largest / s, _LEAST_CLIP)
    observed = (float(f0.mean()) - in_sample) / s
    gap, at_twice = (
        upper_tail(observed, clip=clip, slack=math.exp(-clip), n=size, level=0.5 * level) for size in (n, 2 * n)
    )
    factor = m / (m - 1)
    return MultiEstimate(
        scale=s,
        replicas=m,
        point=factor * (mean_f - s / m * found.estimate),
        in_sample=factor * in_sample,
        intercept=factor * (float(clipped.mean()) - margin - s * gap),
        observed_gap=observed,
        certified_gap=gap,
        mean_margin=margin,
        range_margin=least,
        gap_at_twice=at_twice,
        records=n,
        monte_carlo=found,
    )
