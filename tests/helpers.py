"""Shared by the tests."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import gammaln, logsumexp
from scipy.stats import binom

Array = NDArray[np.float64]
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())


def most_failures(repeats: int, level: float, *, chance: float = 1e-4) -> int:
    """The largest count of failures that a guarantee at ``level`` would exceed with probability below ``chance``."""
    return int(binom.ppf(1.0 - chance, repeats, level))


def nats(bits: float) -> float:
    return bits * math.log(2.0)


# ---- distortion-rate functions ---------------------------------------------------------------------------------------


def mutual_information(joint: Array) -> float:
    """Of two finite random variables, in nats, from their joint law."""
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    mask = joint > 1e-200
    return float((joint[mask] * np.log(joint[mask] / product[mask])).sum())


def blahut_arimoto(
    points: Array, p: Array, reproduction: Array, slope: float, rounds: int = 300
) -> tuple[float, float]:
    """An achievable (rate in nats, squared distortion): the best test channel onto these reproduction points.

    The updates of Blahut (1972) and Arimoto (1972) for exponents −distortion/slope. What is returned is achieved by a
    channel, so it lies on or above the distortion-rate function whatever the grid and the number of rounds.
    """
    distortion = ((points[:, None] - reproduction[None]) ** 2).sum(2)
    q = np.full(len(reproduction), 1.0 / len(reproduction))
    kernel = np.exp(-(distortion - distortion.min(1, keepdims=True)) / slope)
    for _ in range(rounds):
        channel = q * kernel
        channel /= channel.sum(1, keepdims=True)
        q = p @ channel
    joint = p[:, None] * channel
    return mutual_information(joint), float((joint * distortion).sum())


def gaussian_distortion_rate(variances: Array, rate: float) -> float:
    """D(R) of independent Gaussian coordinates, R in nats: reverse water-filling (Cover and Thomas 2006, 10.3.3).

    D = Σ min(v, θ) at the water level θ with Σ ½ ln(v/θ)₊ = R, which is found exactly: with the k largest variances
    above the level, ln θ = (Σ ln v − 2R)/k.
    """
    ordered = np.sort(np.asarray(variances, dtype=np.float64))[::-1]
    for k in range(1, len(ordered) + 1):
        level = math.exp((np.log(ordered[:k]).sum() - 2.0 * rate) / k)
        if k == len(ordered) or level >= ordered[k]:
            break
    return float(np.minimum(ordered, level).sum())


def gaussian_intercept(variances: Array, scale: float, m: int) -> float:
    """The best constant of m replicas at s = ε(m − 1) for independent Gaussian coordinates: what certificates bound.

    The least of E cost + ε × total correlation over exchangeable couplings is attained by Gaussian ones. With
    correlation r a coordinate contributes v(1 − r) − (ε/2) [(m − 1) ln(1 − r) + ln(1 + (m − 1) r)].
    """
    total = 0.0
    for v in np.asarray(variances, dtype=np.float64).tolist():

        def value(r: float, v: float = v) -> float:
            return v * (1.0 - r) - scale / 2.0 * (math.log1p(-r) + math.log1p((m - 1) * r) / (m - 1))

        total += float(
            minimize_scalar(value, bounds=(0.0, 1.0 - 1e-12), method="bounded", options={"xatol": 1e-12}).fun
        )
    return total


def mixture_entropy(points: Array, p: Array, deviation: float) -> float:
    """h(z + N(0, s²)) in nats for a discrete z on the line, by the trapezoidal rule on a fine grid."""
    x = np.arange(points.min() - 12.0 * deviation, points.max() + 12.0 * deviation, deviation / 40.0)
    logs = -((x[:, None] - points[None]) ** 2) / (2.0 * deviation**2) - 0.5 * math.log(2.0 * math.pi * deviation**2)
    log_density = logsumexp(logs, b=p[None], axis=1)
    return float(-(np.exp(log_density) * log_density).sum() * (x[1] - x[0]))


# ---- several replicas, by enumeration --------------------------------------------------------------------------------


@cache
def multiplicities(atoms: int, m: int) -> Array:
    """How often each atom occurs, for every multiset of m of them: one row each."""
    bars = np.array(list(itertools.combinations(range(m + atoms - 1), atoms - 1)), dtype=np.int64)
    bars = bars.reshape(math.comb(m + atoms - 1, m), atoms - 1)
    edges = np.concatenate(
        [np.full((len(bars), 1), -1), bars, np.full((len(bars), 1), m + atoms - 1)], axis=1, dtype=np.int64
    )
    return (np.diff(edges, axis=1) - 1).astype(np.float64)


def log_orderings(counts: Array) -> Array:
    """Ln of the number of tuples behind each row of multiplicities."""
    return np.asarray(gammaln(counts.sum(1) + 1) - gammaln(counts + 1).sum(1))


def scatter(points: Array, counts: Array) -> Array:
    """Σ ‖z − mean‖² over the tuple of each row of multiplicities."""
    centred = points - points.mean(0)
    total = counts @ (centred**2).sum(1) - ((counts @ centred) ** 2).sum(1) / counts.sum(1)
    return np.asarray(np.maximum(total, 0.0))


def log_v(points: Array, mass: Array, scale: float, m: int) -> float:
    """ln V_m of masses at points: ln Σ over m-tuples Π mass · exp(−Σ ‖z − mean‖²/s)."""
    points, mass = points[mass > 0], mass[mass > 0]
    counts = multiplicities(len(points), m)
    return float(logsumexp(log_orderings(counts) + counts @ np.log(mass) - scatter(points, counts) / scale))


@dataclass(frozen=True)
class DiscreteSource:
    """A law on few points, centred and in unit scale; the points are exact in float32."""

    points: Array
    p: Array

    @classmethod
    def random(cls, seed: int, atoms: int = 5, dimension: int = 3) -> DiscreteSource:
        rng = np.random.default_rng(seed)
        p = rng.dirichlet(np.full(atoms, 2.0)) + 0.02
        points = rng.normal(size=(atoms, dimension)) * np.exp(0.5 * rng.normal(size=(atoms, 1)))
        return cls.scaled(points, p / p.sum())

    @classmethod
    def scaled(cls, points: Array, p: Array) -> DiscreteSource:
        points = points - p @ points
        points = points / math.sqrt(float(p @ (points**2).sum(1)))
        return cls(points.astype(np.float32).astype(np.float64), p)

    @property
    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.points.astype(np.float32))

    @property
    def trace(self) -> float:
        return float(self.p @ ((self.points - self.p @ self.points) ** 2).sum(1))

    def draw(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        return np.asarray(rng.choice(len(self.p), n, p=self.p))

    def potential(self, scale: float, m: int) -> Array:
        """f_P: with q the law of m-tuples it is where every atom has its own probability under q (Newton's method)."""
        counts = multiplicities(len(self.p), m)
        base = log_orderings(counts) - scatter(self.points, counts) / scale

        def law(logs: Array) -> tuple[float, Array]:
            exponent = base + counts @ logs
            top = float(logsumexp(exponent))
            return top, np.exp(exponent - top)

        x = np.log(self.p) / m  # exact where all atoms are far apart
        for _ in range(500):
            value, q = law(x)
            mean = q @ counts
            slope = mean / m - self.p
            if np.abs(slope).max() < 1e-14:
                break
            covariance = (counts - mean).T @ ((counts - mean) * q[:, None]) / m
            step = np.linalg.lstsq(covariance, slope, rcond=1e-13)[0]
            size = min(1.0, 3.0 / np.abs(step).max())
            while (
                size > 1e-6
                and law(x - size * step)[0] / m - self.p @ (x - size * step)
                > value / m - self.p @ x - 0.1 * size * (slope @ step) + 1e-12
            ):
                size *= 0.5
            x = x - size * step
        x = x - law(x)[0] / m
        assert np.abs(law(x)[1] @ counts / m - self.p).max() < 1e-10
        return np.asarray(scale * (x - np.log(self.p)))

    def intercept(self, scale: float, m: int) -> float:
        """(m/(m−1)) E f_P: what the certificate of m replicas bounds from below."""
        return m / (m - 1) * float(self.p @ self.potential(scale, m))

    def distortion_rate(self, slope: float, *, side: int = 160, rounds: int = 300) -> tuple[float, float]:
        """An achievable (rate in nats, squared distortion), by Blahut and Arimoto's updates on a grid."""
        low, high = self.points.min(0), self.points.max(0)
        axes = [np.linspace(a, b, side) for a, b in zip(low, high, strict=True)]
        grid = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, len(low))
        reproduction = np.concatenate([grid, self.points])
        return blahut_arimoto(self.points, self.p, reproduction, slope, rounds)
