"""Errors of an attack, target by target, and their mean with a bootstrap standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError

__all__ = ["AttackErrors", "bootstrap_errors", "rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttackErrors:
    """What an attack achieved, in squared units of the representation.

    Attributes:
        squared: (n,), the squared error on each target, summed over the coordinates.
        variance: tr Σ, which ρ is relative to.
        mse: the mean of ``squared``; it is compared with ``ReconstructionBound.mse``.
        mse_standard_error: of ``mse``, by the bootstrap over targets.
        rho: √(mse/tr Σ).
        rho_standard_error: of ``rho``, by the same bootstrap.
    """

    squared: NDArray[np.float64]
    variance: float
    mse: float
    mse_standard_error: float
    rho: float
    rho_standard_error: float

    @property
    def rho_per_target(self) -> NDArray[np.float64]:
        """(n,), √(squared/tr Σ): single targets may lie below a bound, which is about their mean."""
        return np.sqrt(self.squared / self.variance)


def bootstrap_errors(
    squared_errors: ArrayLike, variance: float, *, resamples: int = 1000, seed: int = 0
) -> AttackErrors:
    """Mean error over independent targets, and its standard error by resampling them.

    Args:
        squared_errors: one for each target, at least two.
        variance: tr Σ of the representation.
        resamples: bootstrap samples.
        seed: of the bootstrap.

    Raises:
        DataError: fewer than two targets, or errors that are negative or not finite.
    """
    squared = np.array(squared_errors, dtype=np.float64)
    variance = _validate.positive("variance", variance)
    resamples = _validate.integer("resamples", resamples, minimum=2)
    if squared.ndim != 1 or len(squared) < 2:
        raise DataError(f"A standard error needs two targets or more, in one row. Found shape {squared.shape}.")
    if not (np.isfinite(squared) & (squared >= 0)).all():
        raise DataError("A squared error is negative or not finite. Repair the targets or the estimates.")
    rng = np.random.default_rng(_validate.integer("seed", seed))
    means = np.array([rng.choice(squared, len(squared)).mean() for _ in range(resamples)])
    squared.setflags(write=False)
    return AttackErrors(
        squared=squared,
        variance=variance,
        mse=float(squared.mean()),
        mse_standard_error=float(means.std(ddof=1)),
        rho=math.sqrt(squared.mean() / variance),
        rho_standard_error=float(np.sqrt(means / variance).std(ddof=1)),
    )


def rows(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """As finite float64 (n, d), n and d at least one."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim < 2 or array.size == 0:
        raise DataError(f"Expected {name} to be an array (n, ...) of one or more. Found shape {array.shape}.")
    array = array.reshape(len(array), -1)
    if not np.isfinite(array).all():
        raise DataError(f"{name} holds NaN or infinite values. Remove or repair such records.")
    return array
