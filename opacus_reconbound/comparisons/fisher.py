"""Fisher information about a record: the Cramér-Rao bound for unbiased attacks, and van Trees for a smooth prior.

For one step, with J the Jacobian of the clipped gradient over the clipping norm with respect to the record (p × d, in
inverse data units), the noisy sum holds the gradient with probability q. Telling the adversary whether it does only
adds information, so the Fisher information about the record is at most (q/σ²) JᵀJ, and equal to it at q = 1. Steps
add up:

    I = (Σ q_t/σ_t²) JᵀJ        for a Jacobian that does not change along the trajectory.

Hannun et al. 2021: the Fisher information leakage is η = √λ_max(I), and every
unbiased attack has Cov >= I⁻¹ >= η⁻² (Cramér and Rao). Guo et al. 2022: its MSE per coordinate is at least
tr(I⁻¹)/d >= d / tr I. Van Trees (Maeng et al. 2023 use it): any attack, biased or not, on a record with
a smooth density of Fisher information J_π that vanishes at the edge of its support has

    MSE per coordinate >= tr( (E I + J_π)⁻¹ )/d >= d / (tr E I + tr J_π).

The Jacobian is that of a given state of the model, and J_π that of an assumed or fitted law: both are point estimates,
not bounds with a confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError
from opacus_reconbound.leakage import Schedule, realised_sample_rate

__all__ = ["FisherInformation", "fisher_information", "gaussian_prior_information", "van_trees_error"]

_ROUNDING = 1e-9
_LEAST_NOISE = 1e-100  # below it sums of 1/σ² overflow


@dataclass(frozen=True, kw_only=True)
class FisherInformation:
    """What a schedule reveals about a record near one value of it.

    Attributes:
        trace: tr I, an upper bound, inverse squared data units.
        largest: λ_max(I), an upper bound, inverse squared data units.
        dimension: d, the record's coordinates.
    """

    trace: float
    largest: float
    dimension: int

    @property
    def leakage(self) -> float:
        """η = √λ_max(I) of Hannun et al. 2021, inverse data units."""
        return math.sqrt(self.largest)

    @property
    def unbiased_error(self) -> float:
        """d/tr I: a lower bound on the mean squared error per coordinate of unbiased attacks, squared data units."""
        if self.trace == 0.0:
            return math.inf
        return self.dimension / self.trace * (1.0 - _ROUNDING)


def fisher_information(schedule: Schedule, jacobian: ArrayLike) -> FisherInformation:
    """The Fisher information of a schedule about a record, for a Jacobian that stays what it is.

    Charged at the inclusion probability that Opacus's sampler realises.

    Args:
        schedule: the steps.
        jacobian: (p, d), derivative of the clipped gradient over the clipping norm with respect to the record.

    Returns:
        Upper bounds on its trace and largest eigenvalue.
    """
    try:
        matrix = np.asarray(jacobian, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"Expected jacobian to be an array of numbers of shape (p, d). {error}") from error
    if matrix.ndim != 2 or matrix.size == 0:
        raise DataError(
            f"Expected jacobian of shape (p, d): gradient's entries times record's entries. Found {matrix.shape}."
        )
    if not np.isfinite(matrix).all():
        raise DataError("Expected jacobian to be finite. Found NaN or infinity.")
    weight = math.fsum(
        run.steps * realised_sample_rate(run.sample_rate) / run.noise_multiplier / run.noise_multiplier
        if run.noise_multiplier > _LEAST_NOISE
        else math.inf
        for run in schedule
        if run.sample_rate > 0.0
    )
    with np.errstate(over="ignore"):
        trace, largest = float((matrix**2).sum()), float(np.square(np.linalg.norm(matrix, 2)))
    return FisherInformation(
        trace=weight * trace * (1.0 + _ROUNDING) if weight and trace else 0.0,
        largest=weight * largest * (1.0 + _ROUNDING) if weight and largest else 0.0,
        dimension=matrix.shape[1],
    )


def gaussian_prior_information(variances: ArrayLike) -> float:
    """tr J_π of a Gaussian prior with independent coordinates: Σ 1/variance, inverse squared data units.

    Of all Gaussian priors with the same total variance, equal variances give the least information, that is, the
    largest van Trees bound.
    """
    values = np.asarray(variances, dtype=np.float64).ravel()
    if values.size == 0 or not (values > 0).all() or not np.isfinite(values).all():
        raise DataError(f"Expected variances > 0 and finite, one a coordinate. Found {_validate.shown(variances)}.")
    return math.fsum((1.0 / values).tolist())


def van_trees_error(information: FisherInformation, prior_information: float) -> float:
    """d/(tr E I + tr J_π): the van Trees bound on the mean squared error per coordinate of any attack.

    Args:
        information: averaged over the prior; that of one Jacobian stands in for it.
        prior_information: tr J_π > 0, inverse squared data units.

    Returns:
        Squared data units, rounded down: a point estimate where either argument is one.
    """
    prior = _validate.positive("prior_information", prior_information)
    return information.dimension / (information.trace + prior) * (1.0 - _ROUNDING)
