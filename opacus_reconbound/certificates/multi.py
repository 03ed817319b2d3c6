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

import torch
from scipy.stats import beta

from opacus_reconbound import _validate
from opacus_reconbound.certificates.centres import Centres, fit_centres, log_sum_kernel
from opacus_reconbound.certificates.designs import ReplicaDesign
from opacus_reconbound.certificates.kernel import (
    SUM_ERROR,
    KernelLadder,
    cost_error,
    half_square_norms,
    log_kernel_means,
)
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.certificates.parallel import Progress, part
from opacus_reconbound.certificates.tuples import PairJob, Pool, double, draw_pairs, stream_seed
from opacus_reconbound.errors import InvalidValueError

__all__ = [
    "MultiEstimate",
    "MultiPotential",
    "clopper_pearson_upper",
    "finite_pool_inverse",
    "fit_multi_potentials",
    "log_v_upper",
    "multi_estimates",
    "plan_trials",
    "principal_axes",
]

_LEAST_CLIP = 7.5
# the Monte Carlo's random numbers are to be independent of all that f depends on, whatever the callers' seeds
_FIT_PAIRS, _FIT_TRIALS, _FIT_DRAWS, _PAIRS, _TRIALS = range(5)


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


def principal_axes(reference: torch.Tensor) -> torch.Tensor:
    """The reference sample's principal axes as columns, largest variance first; float64 (d, d)."""
    covariance = reference.double().T @ reference.double() / len(reference)
    vectors: torch.Tensor = torch.linalg.eigh(covariance).eigenvectors
    return vectors.flip(1)


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
        acceptances: P_4, P_8, … on the reference sample, to plan the trials by.
        log_pair_weights: ln w on the reference sample, to predict pair masses by.
        reference: the reference records.
        replicas: m.
    """

    centres: Centres
    tuple_means: torch.Tensor
    log_shares: torch.Tensor
    step: float
    shift: float
    largest: float
    acceptances: tuple[float, ...]
    log_pair_weights: torch.Tensor
    reference: torch.Tensor
    replicas: int

    @property
    def scale(self) -> float:
        """s."""
        return self.centres.scale

    def evaluate(self, z: torch.Tensor, f0: torch.Tensor | None = None) -> torch.Tensor:
        """f at records z, float64 (N,)."""
        f0 = self.centres.potential(z) if f0 is None else f0
        if len(self.tuple_means) == 0:
            return f0 + self.shift
        log_h = log_sum_kernel(z, self.tuple_means, self.log_shares, self.centres.rate)
        return (1.0 - self.step) * f0 - self.step * self.scale * log_h + self.shift


def fit_multi_potentials(
    reference: torch.Tensor,
    pairs: Sequence[tuple[float, int]],
    *,
    seed: int,
    centres: int = 300,
    draws: int = 800,
    step: float | None = None,
    trials: int = 3_000_000,
    progress: Progress | None = None,
) -> tuple[MultiPotential, ...]:
    """Fit f_0 and f for several (s, m) on the reference sample.

    Args:
        reference: D_perp on its principal axes, unit scale, float32 (n, d).
        pairs: (s, m), m a power of two.
        seed: of everything random.
        centres: of f_0.
        draws: M, draws of q_m behind f.
        step: how far f goes from f_0 towards −s ln h; by default a choice for each (s, m).
        trials: for each doubling on the reference sample.
        progress: told (done, in all), in hundredths.
    """
    n = len(reference)
    mixtures, jobs = [], []
    for number, (scale, replicas) in enumerate(pairs):
        mixtures.append(fit_centres(reference, scale=scale, replicas=replicas, count=centres, seed=seed))
        log_w = (mixtures[-1].potential(reference) / scale).clamp(max=math.log(n) - 1.0)
        jobs.append(
            PairJob(log_w.exp(), scale, torch.full((n,), 20, dtype=torch.int64), stream_seed(seed, _FIT_PAIRS, number))
        )
        if progress is not None:
            progress(50 * (number + 1) // len(pairs), 100)
    found = []
    drawn = draw_pairs(reference, jobs, repeats=False)
    for number, ((scale, replicas), mixture, job, (log_v, pool)) in enumerate(
        zip(pairs, mixtures, jobs, drawn, strict=True)
    ):
        log_w, acceptances = job.weights.log(), []
        while pool.size < replicas and log_v > -math.inf:
            accepted, merged = double(
                reference, pool, scale, trials, seed=stream_seed(seed, _FIT_TRIALS, number), repeats=False
            )
            if accepted < 50:
                break
            acceptances.append(accepted / trials)
            log_v = 2.0 * log_v + math.log(accepted / trials)
            pool = merged
        means, shares = reference.new_empty((0, reference.shape[1])), torch.empty(0, dtype=torch.float64)
        shift = 0.0
        if pool.size == replicas and log_v > -math.inf:
            chosen = _first_draws(pool, draws, stream_seed(seed, _FIT_DRAWS, number))[:, : replicas - 1].long()
            means = reference[chosen].double().mean(dim=1).float()
            log_f = log_sum_kernel(means, reference, log_w - math.log(n), mixture.rate)
            shares = -(log_f + math.log(len(means)))
            shift = -scale / replicas * log_v
        found.append(
            MultiPotential(
                centres=mixture,
                tuple_means=means,
                log_shares=shares,
                step=_step(scale, replicas) if step is None else step,
                shift=shift,
                largest=max(float(mixture.potential(reference).max()), 1e-3),
                acceptances=tuple(acceptances),
                log_pair_weights=log_w,
                reference=reference,
                replicas=replicas,
            )
        )
        if progress is not None:
            progress(50 + 50 * (number + 1) // len(pairs), 100)
    return tuple(found)


def _step(scale: float, replicas: int) -> float:
    """How far f goes from f_0: a short way where tuples are large, farther where few records share a tuple."""
    return 0.4 if scale < 0.2 and replicas <= 8 else 0.15


def _first_draws(pool: Pool, count: int, seed: int) -> torch.Tensor:
    """Members of some independent draws of the pool's law: accepted tuples come in any order, pairs row by row."""
    if pool.rows is None or pool.starts is None:
        return pool.members[:count]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(pool.rows, count, replacement=True, generator=generator)
    return pool.members[pool.starts[rows]]


def plan_trials(
    potential: MultiPotential,
    n: int,
    *,
    targets: Sequence[int] = (1_000_000, 500_000, 100_000, 100_000),
    most: int = 100_000_000,
) -> tuple[int, ...] | None:
    """Trial counts T_4, …, T_m from the acceptances on the reference sample; None where too few would be accepted.

    The sampling margin falls like n^-1/2 and the Monte Carlo's like the accepted tuples' number, so the targets,
    meant for 59,000 records, shrink with n.

    Args:
        potential: with its chain on the reference sample.
        n: estimation records.
        targets: tuples to accept at each level; the last one again at any further.
        most: trials at one level.
    """
    levels = int(math.log2(potential.replicas)) - 1
    if len(potential.acceptances) < levels:
        return None
    share = min(1.0, n / 59_000)
    counts = []
    for level, rate in enumerate(potential.acceptances[:levels]):
        wanted = max(20_000, int(targets[min(level, len(targets) - 1)] * share))
        counts.append(int(min(most * max(share, 0.02), wanted / rate)))
        if counts[-1] * rate < 2_000:
            return None
    return tuple(counts)


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """What the Monte Carlo gave: ln V_m as estimated and as bounded, and the counts behind it."""

    estimate: float
    upper: float
    trials: tuple[int, ...]
    accepted: tuple[int, ...]
    pair_points: float


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
    progress: Progress | None = None,
) -> Doubling:
    """Ln V_m from above with probability at least 1 − level over the Monte Carlo, the arithmetic not yet charged.

    Args:
        z: records on principal axes, float32 (n, d).
        log_v2: ln V_2, exact.
        pairs: draws of q_2.
        scale: s.
        replicas: m, a power of two, at least 2.
        trials: T_4, T_8, …, T_m, fixed beforehand.
        level: probability of failure.
        seed: of the trials.
        progress: told (trials done, trials in all).
    """
    levels = int(math.log2(replicas)) - 1
    if len(trials) != levels or 2 ** (levels + 1) != replicas:
        raise InvalidValueError(f"{replicas} replicas need {levels} trial counts. Found {list(trials)}.")
    pool, pair_points = pairs, 1.0 / pairs.largest_weight
    points, accepted, probabilities = [pair_points], [], []
    estimate, done = log_v2, 0
    for count in trials:
        merged, pool = double(z, pool, scale, count, seed=seed, progress=_after(progress, done, sum(trials)))
        done += count
        accepted.append(merged)
        points.append(float(max(1, merged)))
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
        pair_points=pair_points,
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
    monte_carlo: Doubling

    @property
    def design(self) -> ReplicaDesign:
        """The converse for the certificate."""
        return ReplicaDesign(
            temperature=self.scale / (self.replicas - 1), intercept=self.intercept, replicas=self.replicas
        )


def multi_estimates(
    potentials: Sequence[MultiPotential],
    estimation: torch.Tensor,
    *,
    trials: Sequence[Sequence[int]],
    sampling_level: float,
    monte_carlo_level: float,
    seed: int,
    pairs: int = 5_000_000,
    progress: Progress | None = None,
) -> tuple[MultiEstimate, ...]:
    """Certify several (s, m), all fitted and planned on D_perp alone; one sweep over the pairs serves all.

    Args:
        potentials: from ``fit_multi_potentials``.
        estimation: D_est on D_perp's principal axes, unit scale, float32 (n, d).
        trials: for each potential T_4, …, T_m.
        sampling_level: α for the sampling of each design, both its events together.
        monte_carlo_level: α for the Monte Carlo of each design.
        seed: of the draws.
        pairs: about how many pairs to draw for each.
        progress: told (done, in all), in hundredths.
    """
    n = len(estimation)
    values, jobs = [], []
    for number, potential in enumerate(potentials):
        s = potential.scale
        f0 = potential.centres.potential(estimation)
        f = potential.evaluate(estimation, f0).clamp(max=s * (math.log(n) - 1.0))
        # pairs go where the reference sample says that their mass is
        inner = log_kernel_means(
            estimation, potential.reference, potential.log_pair_weights.exp().float()[None], KernelLadder.plan([s])
        )[0]
        predicted = f / s + torch.logaddexp(inner, f / s - math.log(n))
        counts = (torch.softmax(predicted, dim=0) * pairs).ceil().clamp(min=1).long()
        values.append((f0, f))
        jobs.append(PairJob((f / s).exp(), s, counts, stream_seed(seed, _PAIRS, number)))
    stages = len(potentials) + 2
    drawn = draw_pairs(estimation, jobs, progress=part(progress, 0, stages, width=2))
    largest = 2.0 * float(half_square_norms(estimation).max())
    results = []
    for number, (potential, (f0, f), (log_v2, pool), counts_of_trials) in enumerate(
        zip(potentials, values, drawn, trials, strict=True)
    ):
        found = log_v_upper(
            estimation,
            log_v2,
            pool,
            scale=potential.scale,
            replicas=potential.replicas,
            trials=counts_of_trials,
            level=monte_carlo_level,
            seed=stream_seed(seed, _TRIALS, number),
            progress=part(progress, 2 + number, stages),
        )
        results.append(_assemble(potential, f0, f, found, largest, level=sampling_level))
    return tuple(results)


def _assemble(
    potential: MultiPotential, f0: torch.Tensor, f: torch.Tensor, found: Doubling, largest: float, *, level: float
) -> MultiEstimate:
    """Lemmas 1 to 3 for one design, the arithmetic charged; ``largest`` is the largest squared norm in D_est."""
    s, m, n = potential.scale, potential.replicas, len(f0)
    norm = max(
        largest, *(2.0 * float(half_square_norms(z).max()) for z in (potential.reference, potential.centres.points))
    )
    # F_n^2 <= e^eta V_2 F_q everywhere, for the V_2 computed and the law q drawn from; twice as much again for the
    # draw in two stages and for tuple means in float32
    eta = cost_error(potential.reference.shape[1], norm) / s + SUM_ERROR
    mean_f = float(f.mean())
    in_sample = mean_f - s / m * (found.upper + 1.5 * m * eta)
    clipped = f0.clamp(max=potential.largest)
    margin = empirical_bernstein(
        variance=float(clipped.var(correction=1)), value_range=potential.largest, n=n, level=0.5 * level
    )
    clip = max(potential.largest / s, _LEAST_CLIP)
    observed = (float(f0.mean()) - in_sample) / s
    gap = upper_tail(observed, clip=clip, slack=math.exp(-clip), n=n, level=0.5 * level)
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
        monte_carlo=found,
    )
