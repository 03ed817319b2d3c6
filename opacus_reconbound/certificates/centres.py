"""The reference potential of the m-replica certificate: a mixture of equal Gaussian bumps at chosen centres.

With φ_z(y) = exp(−‖z − y‖²/s), c = (m/(πs))^{d/2} and G = Σ_k a_k exp(−(m−1)‖y − c_k‖²/s), a_k >= 0, Σ a_k = 1, every
bump has norm 1 in L_{m'} (m' = m/(m−1)), so ‖G‖_{m'} <= 1 whatever the centres, and

    h_0(z) = c ∫ G φ_z = Σ_k a_k exp(−((m−1)/(m s)) ‖z − c_k‖²),      f_0 = −s ln h_0 >= 0.

No Monte Carlo and no confidence is spent on it. It is fitted on the reference sample by expectation maximisation, as a
Gaussian mixture with fixed variance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from opacus_reconbound.certificates.kernel import cost_error, costs, half_square_norms, strict_float32

__all__ = ["Centres", "fit_centres", "log_sum_kernel"]

_CHUNK = 2048
_CELLS = 1 << 22  # of a table in float64: 32 MiB
_ROUNDING = 1e-9  # of a log-sum-exp in float64 and its exponents, in nats


def log_sum_kernel(
    z: torch.Tensor, points: torch.Tensor, log_weights: torch.Tensor, rate: float, cells: int = _CELLS
) -> torch.Tensor:
    """Ln Σ_k exp(log_weights_k − rate ‖z − p_k‖²) for each record, float64, in the log domain.

    Args:
        z: (N, d) float32.
        points: (K, d) float32.
        log_weights: (K,) float64.
        rate: per squared unit.
        cells: of the table of records by points that is held at a time.
    """
    half_p = half_square_norms(points)
    chunk = max(1, cells // max(1, len(points)))
    parts = []
    with strict_float32():
        for start in range(0, len(z), chunk):
            x = z[start : start + chunk]
            parts.append(torch.logsumexp(_exponents(x, points, half_p, rate) + log_weights, dim=1))
    return torch.cat(parts)


def _exponents(x: torch.Tensor, points: torch.Tensor, half_p: torch.Tensor, rate: float) -> torch.Tensor:
    """−rate ‖x − p‖², float64, from float32 inner products."""
    return costs(x, points, half_square_norms(x), half_p).double() * (-2.0 * rate)


@dataclass(frozen=True, eq=False)
class Centres:
    """A fitted mixture.

    Attributes:
        points: c_k, float32 (K, d).
        log_weights: ln a_k, float64 (K,), Σ a_k <= 1.
        rate: (m − 1)/(m s).
        scale: s.
    """

    points: torch.Tensor
    log_weights: torch.Tensor
    rate: float
    scale: float

    def potential(self, z: torch.Tensor) -> torch.Tensor:
        """f_0 at records z, float64 (N,), never below zero.

        Rounded up by each record's own arithmetic error, so that E exp((f_P − f_0)/s) <= 1 for the values returned.
        """
        half = half_square_norms(z).double().clamp(min=float(half_square_norms(self.points).max()))
        errors = 2.0 * self.rate * cost_error(z.shape[1], 2.0) * half + _ROUNDING
        exact = log_sum_kernel(z, self.points, self.log_weights, self.rate)
        return (self.scale * (errors - exact)).clamp(min=0.0)


def fit_centres(
    reference: torch.Tensor, *, scale: float, replicas: int, count: int = 300, rounds: int = 25, seed: int = 0
) -> Centres:
    """Fit the mixture on the reference sample.

    Args:
        reference: D_perp in unit scale, float32 (n, d).
        scale: s.
        replicas: m.
        count: K, at most a tenth of the sample.
        rounds: of expectation maximisation.
        seed: of the first centres.
    """
    n = len(reference)
    count = max(1, min(count, n // 10))
    rate = (replicas - 1) / (replicas * scale)
    generator = torch.Generator().manual_seed(seed)
    points = reference[torch.randperm(n, generator=generator)[:count].to(reference.device)].clone()
    log_weights = torch.full((count,), -math.log(count), dtype=torch.float64, device=reference.device)
    with strict_float32():
        for _ in range(rounds):
            mass = torch.zeros(count, dtype=torch.float64, device=reference.device)
            moment = torch.zeros_like(points, dtype=torch.float64)
            half_p = half_square_norms(points)
            for start in range(0, n, _CHUNK):
                x = reference[start : start + _CHUNK]
                share = torch.softmax(_exponents(x, points, half_p, rate) + log_weights, dim=1).float()
                mass += share.double().sum(dim=0)
                moment += (share.T @ x).double()
            alive = mass > 1e-6
            points = torch.where(alive[:, None], moment / mass.clamp(min=1e-6)[:, None], points.double()).float()
            log_weights = (mass.clamp(min=1e-300) / n).log()
    # the weights must not add up to more than one, whatever the rounding
    log_weights -= torch.logsumexp(log_weights, dim=0) + 1e-12
    return Centres(points=points, log_weights=log_weights, rate=rate, scale=scale)
