"""Codebook releases: what a leakage of γ bits can be worth where all of it serves the reconstruction (paper, 6).

The release at R bits is the index, among 2^R, of the cell that a record lies in: I(record; index) = H(index) <= R.
Below one bit it is one index of two, flipped with probability p, which reveals at most 1 − h(p) bits. An attack answers
with the mean of what the index can stand for. Every such release obeys the bound at γ = R: what lies between the bound
and ρ_cb is all that a better converse, on γ alone, could win.

Cells are those of k-means by scikit-learn, or, balanced, of about equal probability, so that the index uses all of its
R bits: cell j is where ‖z − c_j‖² − λ_j is least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import entr

from opacus_reconbound import _validate
from opacus_reconbound.attacks.results import AttackErrors, bootstrap_errors, rows
from opacus_reconbound.errors import DataError, InvalidValueError

__all__ = ["Codebook", "CodebookAttack", "attack_codebook", "fit_codebook", "flip_probability"]

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_MOST_BITS = 10
_ROUNDS = 3  # of balancing and taking means
_SWEEPS = 20  # of one balancing, at each temperature
_COLDEST = 0.03  # temperature, in units of the median squared distance to the nearest centre
_COOLING = 0.3


@dataclass(frozen=True, kw_only=True, eq=False)
class Codebook:
    """2^R cells and what an attack answers for each; fixed before a record is released.

    Attributes:
        centres: (K, m), which say with ``offsets`` where a vector belongs.
        offsets: (K,), λ; zero for plain k-means.
        means: (K, m), the mean of the sample's vectors in each cell: the answer of least squared error.
        shares: (K,), the part of the sample in each cell.
    """

    centres: Array
    offsets: Array
    means: Array
    shares: Array

    @property
    def entropy_bits(self) -> float:
        """H(index) on the sample, at most log2 K."""
        return float(entr(self.shares).sum() / math.log(2))

    def index(self, vectors: ArrayLike) -> Indices:
        """What is released of each vector: the index of its cell, (n,)."""
        return np.asarray(np.argmin(_distances(rows("vectors", vectors), self.centres) - self.offsets, axis=1))


@dataclass(frozen=True, kw_only=True, eq=False)
class CodebookAttack:
    """How well one does who sees a codebook's release.

    Attributes:
        rate_bits: R, an upper bound on what the release reveals of one record.
        errors: on the targets; below one bit, expected over the flip.
        codebook: the cells.
        flip: p, with which the one bit is flipped; 0 at whole rates.
    """

    rate_bits: float
    errors: AttackErrors
    codebook: Codebook
    flip: float


def flip_probability(leakage_bits: float) -> float:
    """The least p in [0, 1/2] with 1 − h(p) <= γ: one bit flipped with it reveals at most γ bits.

    Args:
        leakage_bits: γ in [0, 1].

    Returns:
        p, rounded up.
    """
    bits = _validate.non_negative("leakage_bits", leakage_bits)
    if bits > 1:
        raise InvalidValueError(f"Expected leakage_bits in [0, 1] of one bit. Found {bits:g}.")
    if bits in (0.0, 1.0):
        return 0.5 * (1.0 - bits)

    def revealed(e: float) -> float:  # 1 − h(p) of p = (1 − e)/2, without cancellation
        return (2.0 * e * math.atanh(e) + math.log1p(-e * e)) / (2.0 * math.log(2))

    most = 1.0 - 1e-15
    e = most if revealed(most) <= bits else float(brentq(lambda e: revealed(e) - bits, 0.0, most, xtol=1e-200))
    return min(0.5, math.nextafter(0.5 * (1.0 - e * (1.0 - 1e-9)), 1.0))


def fit_codebook(sample: ArrayLike, rate_bits: int, *, balanced: bool = True, seed: int = 0) -> Codebook:
    """A codebook of 2^R cells by k-means.

    Args:
        sample: (n, m), vectors of records that are not attacked, at least 2^R.
        rate_bits: R in [0, 10], whole.
        balanced: cells of about equal probability; else the nearest centre.
        seed: of k-means.

    Raises:
        DataError: there are fewer vectors, or fewer different ones, than cells.
        InvalidValueError: scikit-learn is not installed, or R is out of range.
    """
    vectors = rows("sample", sample)
    count = 2 ** _validate.integer("rate_bits", rate_bits, maximum=_MOST_BITS)
    seed = _validate.integer("seed", seed, maximum=2**32 - 1)
    if len({vector.tobytes() for vector in vectors}) < count:
        raise DataError(f"A codebook of {count} cells needs as many different vectors. Lower rate_bits, or give more.")
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise InvalidValueError(
            "Codebooks need scikit-learn. Install it with: pip install 'opacus-reconbound[attacks]'"
        ) from error
    centres = np.asarray(KMeans(count, n_init=3, random_state=seed).fit(vectors).cluster_centers_, dtype=np.float64)
    offsets = np.zeros(count)
    if balanced and count > 1:
        for _ in range(_ROUNDS):
            distances = _distances(vectors, centres)
            offsets = _balance(distances, offsets)
            centres = _means(vectors, np.argmin(distances - offsets, axis=1), centres)
        offsets = _balance(_distances(vectors, centres), offsets)
    cells = np.argmin(_distances(vectors, centres) - offsets, axis=1)
    return Codebook(
        centres=centres,
        offsets=offsets,
        means=_means(vectors, cells, centres),
        shares=np.bincount(cells, minlength=count) / len(vectors),
    )


def attack_codebook(
    targets: ArrayLike,
    sample: ArrayLike,
    *,
    rate_bits: float,
    variance: float,
    balanced: bool = True,
    resamples: int = 1000,
    seed: int = 0,
) -> CodebookAttack:
    """Release each target through a codebook of that rate, answer with the posterior mean, and measure the error.

    Args:
        targets: (k, m), vectors of the targets.
        sample: (n, m), vectors of other records, which fix the codebook and its answers.
        rate_bits: R: a whole number of bits in [1, 10], or any number in (0, 1).
        variance: tr Σ of the representation.
        balanced: as in ``fit_codebook``.
        resamples: of the bootstrap.
        seed: of k-means and the bootstrap.
    """
    rate = _validate.positive("rate_bits", rate_bits)
    if rate > 1 and rate != int(rate):
        raise InvalidValueError(f"Expected rate_bits to be a whole number, or below 1. Found {rate:g}.")
    z = rows("targets", targets)
    codebook = fit_codebook(sample, max(1, int(rate)), balanced=balanced, seed=seed)
    if z.shape[1] != codebook.means.shape[1]:
        raise DataError(f"Targets have {z.shape[1]} entries, but the sample {codebook.means.shape[1]}.")
    flip = flip_probability(rate) if rate < 1 else 0.0
    index = codebook.index(z)
    if flip == 0.0:
        squared = np.square(z - codebook.means[index]).sum(axis=1)
    else:  # P(cell | released) by Bayes, and the mean over cells; then the expectation over the flip
        channel = np.array([[1.0 - flip, flip], [flip, 1.0 - flip]])
        joint = codebook.shares[:, None] * channel
        answers = (joint / joint.sum(axis=0)).T @ codebook.means
        squared = (channel[index] * _distances(z, answers)).sum(axis=1)
    return CodebookAttack(
        rate_bits=rate,
        errors=bootstrap_errors(squared, variance, resamples=resamples, seed=seed),
        codebook=codebook,
        flip=flip,
    )


def _distances(vectors: Array, centres: Array) -> Array:
    """Squared distances (n, K), not below zero."""
    cross = vectors @ centres.T
    found = np.square(vectors).sum(axis=1)[:, None] + np.square(centres).sum(axis=1) - 2.0 * cross
    return np.asarray(np.maximum(found, 0.0))


def _means(vectors: Array, cells: Indices, centres: Array) -> Array:
    """The mean of every cell; its centre where it is empty."""
    means = centres.copy()
    order = np.argsort(cells, kind="stable")
    occupied, starts = np.unique(cells[order], return_index=True)
    counts = np.bincount(cells, minlength=len(centres))[occupied]
    means[occupied] = np.add.reduceat(vectors[order], starts, axis=0) / counts[:, None]
    return means


def _balance(distances: Array, offsets: Array) -> Array:
    """λ with cells {‖z − c_j‖² − λ_j least} of about equal size: Sinkhorn's updates at falling temperatures."""
    n, count = distances.shape
    nearest = distances.min(axis=1)
    if not nearest.any():
        return offsets
    coldest = _COLDEST * float(np.median(nearest[nearest > 0]))
    for power in range(max(1, math.ceil(math.log(coldest / float(distances.mean()), _COOLING))), -1, -1):
        temperature = coldest / _COOLING**power
        scores = (offsets - distances) / temperature
        kernel = np.exp(scores - scores.max(axis=1, keepdims=True))
        factors = np.ones(count)
        for _ in range(_SWEEPS):
            sizes = factors * (kernel.T @ (1.0 / (kernel @ factors)))
            factors = np.clip(factors * (n / count) / np.maximum(sizes, 1e-30), 1e-30, 1e30)
        offsets = offsets + temperature * np.log(factors)
        offsets = offsets - offsets.mean()
    return offsets
