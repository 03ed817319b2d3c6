"""The replica certificate: a bound on reconstruction from squared distances between held-out records alone.

Theorem. Let U be everything the adversary sees, γ >= I(z; U) in nats, and z, z' two conditionally independent draws of
the record given U. Then E‖z − z'‖²/2 is the least mean squared error of any attack, and I(z; z') <= γ. By Donsker and
Varadhan, for every ε > 0 and bounded g

    E‖z − ẑ‖²  >=  2 E g(z) − ε ln E exp((g(z) + g(z') − ‖z − z'‖²/2)/ε) − ε γ,        z, z' independent.

The best g solves exp(−g(z)/ε) = E exp(g(z')/ε) k(z, z') with k = exp(−‖z − z'‖²/(2ε)); call it g_P. Then
D >= 2 E g_P − ε γ and g_P >= 0. The certificate bounds E g_P from below with two disjoint samples:

Lemma 1. For the estimation sample and any reals g_i:
    A_n = (2/n) Σ g_i − ε ln[(1/n²) Σ_ij exp((g_i + g_j − ‖z_i − z_j‖²/2)/ε)]  <=  (2/n) Σ g_P(z_i).
Lemma 2. With μ_0 a positive measure on the reference sample, ‖μ_0‖_k <= 1, and g_0 = −ε ln⟨k_z, μ_0⟩ >= 0, the variable
    X = (g_P − g_0)/ε has E e^X <= 1. With X' = max(X, −B):  E g_P >= E min(g_0, εB) + ε E X'.
Lemma 3. ``margins.upper_tail``: y = −E X' is at most y* with high probability, from ȳ = (mean g_0 − A_n/2)/ε.

So D >= 2 (mean g_c − t) − 2 ε y* − ε γ for all γ at once, where g_c = min(g_0, g_max) and t is an empirical Bernstein
margin. Everything here is in the scale in which the reference sample's tr Σ is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opacus_reconbound.certificates.designs import ReplicaDesign
from opacus_reconbound.certificates.devices import float64_device, to_float64
from opacus_reconbound.certificates.kernel import (
    SUM_ERROR,
    KernelLadder,
    cost_error,
    half_square_norms,
    log_kernel_means,
    pair_sums,
)
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.certificates.parallel import Progress, one_tensor_thread, part

__all__ = [
    "DEFAULT_TEMPERATURES",
    "ReferencePotential",
    "ReplicaEstimate",
    "fit_reference_potential",
    "in_sample_value",
    "replica_designs",
    "replica_estimates",
]

DEFAULT_TEMPERATURES = (0.8, 0.56, 0.4, 0.28, 0.2, 0.14, 0.1, 0.085, 0.07)
_LEAST_CLIP = 7.5
_LARGEST_CLIP = 40.0
_CAP_QUANTILE = 0.999
_DAMPING = 0.75


@dataclass(frozen=True, eq=False)
class ReferencePotential:
    """g_0 for every temperature, a function of the reference sample alone.

    Attributes:
        points: the reference records, float32 (n, m).
        weights: w = exp(g/ε) at the points, float32 (G, n).
        ladder: the temperatures.
        log_norms: ln ‖μ_raw‖_k, rounded up by the arithmetic's error; float64 (G,).
        largest: g_max, the cap on g_0, in units of tr Σ; float64 (G,).
    """

    points: torch.Tensor
    weights: torch.Tensor
    ladder: KernelLadder
    log_norms: torch.Tensor
    largest: torch.Tensor

    def evaluate(self, z: torch.Tensor, progress: Progress | None = None) -> torch.Tensor:
        """g_0 at records z, float64 (G, N), in units of tr Σ; finite however far a record lies from the reference.

        Rounded up by each record's own arithmetic error, so that E exp((g_P − g_0)/ε) <= 1 for the values returned.
        """
        log_means = log_kernel_means(z, self.points, self.weights, self.ladder, progress)
        temperatures = torch.tensor(self.ladder.temperatures, dtype=torch.float64, device=log_means.device)[:, None]
        half_norms = to_float64(half_square_norms(z)).clamp(min=float(half_square_norms(self.points).max()))
        distance_errors = cost_error(z.shape[1], 2.0) * half_norms
        g0 = temperatures * (self.log_norms[:, None] + SUM_ERROR - log_means) + distance_errors
        return g0.clamp(min=0.0)


def fit_reference_potential(
    reference: torch.Tensor,
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES,
    *,
    rounds: int = 12,
    progress: Progress | None = None,
) -> ReferencePotential:
    """Symmetric Sinkhorn potentials on the reference sample: off-diagonal averages, averaged updates, log domain.

    Any positive weights give a valid μ_0 once it is normalised, so convergence only matters for tightness.

    Args:
        reference: D_perp, centred and in unit scale, float32 (n, m).
        temperatures: ε in units of tr Σ.
        rounds: sweeps over the pairs.
        progress: told (sweeps done, sweeps in all), in hundredths.
    """
    ladder = KernelLadder.plan(temperatures)
    n = len(reference)
    limit = 0.5 * math.log(n)  # where a weight's own term in ‖μ‖² reaches 1
    home = float64_device(reference.device)
    log_weights = torch.zeros((len(ladder.temperatures), n), dtype=torch.float64, device=home)
    for sweep in range(rounds):
        inner = part(progress, sweep, rounds + 1)
        sums = pair_sums(reference, log_weights.exp().float(), ladder, inner)
        update = (-sums.log()).clamp(max=limit)
        log_weights = update if sweep == 0 else 0.5 * (log_weights + update)
    weights = log_weights.exp().float()
    sums = pair_sums(reference, weights, ladder, part(progress, rounds, rounds + 1))
    own = to_float64(weights)
    square_norms = (own * (sums + own / n)).mean(dim=1)
    scale = torch.tensor(ladder.temperatures, dtype=torch.float64, device=home)
    distance_error = cost_error(reference.shape[1], 2.0 * float(half_square_norms(reference).max()))
    log_norms = 0.5 * (square_norms.log() + distance_error / scale + SUM_ERROR)
    # g_0 of each reference record without its own term: the cap cuts the outermost records of a new sample only
    unseen = (log_norms[:, None] - sums.log()).clamp(min=0.0, max=_LARGEST_CLIP)
    largest = scale * unseen.kthvalue(math.ceil(_CAP_QUANTILE * n), dim=1).values
    return ReferencePotential(
        points=reference,
        weights=weights,
        ladder=ladder,
        log_norms=log_norms,
        largest=largest.clamp(min=1e-3),
    )


def in_sample_value(weights: torch.Tensor, sums: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """A_n of Lemma 1 for the potentials g = ε ln w, whatever they are; float64 (G,), arithmetic not yet charged.

    Args:
        weights: w > 0 exactly as used in the sums, (G, n).
        sums: S_i = (1/n) Σ_{j≠i} w_j k_ij, float64 (G, n).
        temperatures: ε, float64 (G,).
    """
    w = to_float64(weights)
    n = w.shape[1]
    double_sum = (w * (sums + w / n)).mean(dim=1)
    return temperatures * (2.0 * w.log().mean(dim=1) - double_sum.log())


@dataclass(frozen=True, kw_only=True)
class ReplicaEstimate:
    """One temperature's certificate and what it is made of; all in units of tr Σ unless said.

    Attributes:
        temperature: ε.
        in_sample: A_n after the arithmetic's allowance: the value without any margin.
        reference_mean: mean of g_c on the estimation sample.
        mean_margin: t, the empirical Bernstein margin of that mean.
        observed_gap: ȳ, in nats of potential.
        certified_gap: y*, in nats of potential.
        largest: g_max.
    """

    temperature: float
    in_sample: float
    reference_mean: float
    mean_margin: float
    observed_gap: float
    certified_gap: float
    largest: float

    @property
    def intercept(self) -> float:
        """2 (mean g_c − t) − 2 ε y*: the certified value of D + ε γ."""
        return 2.0 * (self.reference_mean - self.mean_margin) - 2.0 * self.temperature * self.certified_gap

    @property
    def design(self) -> ReplicaDesign:
        """The converse for the certificate."""
        return ReplicaDesign(temperature=self.temperature, intercept=self.intercept, replicas=2)


@one_tensor_thread()
def replica_estimates(
    reference: torch.Tensor,
    estimation: torch.Tensor,
    *,
    level: float,
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES,
    sweeps: int = 3,
    progress: Progress | None = None,
) -> tuple[ReplicaEstimate, ...]:
    """The replica certificate, simultaneously for all temperatures with probability at least 1 − level.

    Args:
        reference: D_perp, float32 (n', m), centred and scaled so that its tr Σ is 1.
        estimation: D_est, float32 (n, m), by the same centre and scale; disjoint from D_perp.
        level: α for all temperatures together.
        temperatures: ε, fixed before D_est is seen.
        sweeps: sweeps over the pairs of D_est; the first is at g_0, each later one improves g.
        progress: told (done, in all), in hundredths of a sweep.
    """
    ladder = KernelLadder.plan(temperatures)
    n, dimension = estimation.shape
    phases = sweeps + 2
    potential = fit_reference_potential(reference, ladder.temperatures, progress=part(progress, 0, phases))
    g0 = potential.evaluate(estimation, part(progress, 1, phases))
    epsilon = torch.tensor(ladder.temperatures, dtype=torch.float64, device=g0.device)

    log_weights = torch.minimum(
        g0 / epsilon[:, None], torch.tensor(0.5 * math.log(n), dtype=torch.float64, device=g0.device)
    )
    values = torch.full_like(epsilon, -math.inf)
    for sweep in range(sweeps):
        weights = log_weights.exp().float()
        sums = pair_sums(estimation, weights, ladder, part(progress, 2 + sweep, phases))
        values = torch.maximum(values, in_sample_value(weights, sums, epsilon))
        # w (S + w/n) = 1, the self term solved exactly; damped in the log
        solved = math.log(2.0) - (sums + (sums.square() + 4.0 / n).sqrt()).log()
        log_weights = to_float64(weights).log()
        log_weights += _DAMPING * (solved - log_weights)

    distance_error = cost_error(dimension, 2.0 * float(half_square_norms(estimation).max()))
    count = len(ladder.temperatures)
    results = []
    for g, temperature in enumerate(ladder.temperatures):
        # the double sum may be too small by both errors, which raises A_n by as much; g_0 is rounded up already
        in_sample = float(values[g]) - distance_error - temperature * SUM_ERROR
        largest = float(potential.largest[g])
        clipped = g0[g].clamp(max=largest)
        variance = float(clipped.var(correction=1))
        clip = max(largest / temperature, _LEAST_CLIP)
        observed = (float(g0[g].mean()) - 0.5 * in_sample) / temperature
        results.append(
            ReplicaEstimate(
                temperature=temperature,
                in_sample=in_sample,
                reference_mean=float(clipped.mean()),
                mean_margin=empirical_bernstein(
                    variance=variance, value_range=largest, n=n, level=level / (2.0 * count)
                ),
                observed_gap=observed,
                certified_gap=upper_tail(observed, clip=clip, slack=math.exp(-clip), n=n, level=level / (2.0 * count)),
                largest=largest,
            )
        )
    return tuple(results)


def replica_designs(
    reference: torch.Tensor,
    estimation: torch.Tensor,
    *,
    level: float,
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES,
    progress: Progress | None = None,
) -> tuple[ReplicaDesign, ...]:
    """The designs of ``replica_estimates``."""
    estimates = replica_estimates(reference, estimation, level=level, temperatures=temperatures, progress=progress)
    return tuple(estimate.design for estimate in estimates)
