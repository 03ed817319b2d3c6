"""Which kinds of designs to spend α on, decided on the reference sample alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from opacus_reconbound.certificates.block import block_designs
from opacus_reconbound.certificates.multi import (
    MultiEstimate,
    fit_multi_potentials,
    multi_estimates,
    principal_axes,
)
from opacus_reconbound.certificates.parallel import Progress, part
from opacus_reconbound.certificates.replica import replica_designs
from opacus_reconbound.errors import DataError

__all__ = ["MULTI_GRID", "choose_kinds", "multi_designs"]

# (s, m) in units of tr Σ; fixed in advance of any data
MULTI_GRID: tuple[tuple[float, int], ...] = (
    (0.4, 32),
    (0.28, 16),
    (0.2, 16),
    (0.14, 8),
    (0.14, 16),
    (0.1, 8),
)
# fewer records leave nothing of what more replicas gain over two
_LEAST_ESTIMATION, _LEAST_REFERENCE = 8_000, 1_000
_PILOT = 5_000
_LARGEST_BLOCK_DIMENSION = 4_096
_BITS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)


def choose_kinds(
    reference: torch.Tensor,
    n_estimation: int,
    *,
    grid: Sequence[tuple[int, float]],
    level: float,
    seed: int,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """The kinds of designs that pay, from D_perp and the size of D_est.

    Two replicas always take part. More replicas do where there are enough records. The paper's blocks do where, fitted
    on one half of D_perp and estimated on the other, they beat two replicas at some leakage.

    Args:
        reference: D_perp in unit scale, float32 (n', m).
        n_estimation: records in D_est.
        grid: (block size, ν²) of the block designs.
        level: α.
        seed: of the block designs.
        progress: told (done, in all).
    """
    kinds = ["replica"]
    if n_estimation >= _LEAST_ESTIMATION and len(reference) >= _LEAST_REFERENCE:
        kinds.append("multi")
    if reference.shape[1] <= _LARGEST_BLOCK_DIMENSION and len(reference) >= 200:
        sample = reference[: 2 * _PILOT]
        first, second = sample[::2], sample[1::2]
        replicas = replica_designs(first, second, level=level, progress=part(progress, 0, 2))
        blocks = block_designs(
            first, second, pairs=grid, level=level, draws=2_000, seed=seed, progress=part(progress, 1, 2)
        )
        if any(
            max(design.distortion(bits) for design in blocks) > max(design.distortion(bits) for design in replicas)
            for bits in _BITS
        ):
            kinds.append("block")
    return tuple(kinds)


def multi_designs(
    reference: torch.Tensor,
    estimation: torch.Tensor,
    *,
    sampling_level: float,
    monte_carlo_level: float,
    seed: int,
    grid: Sequence[tuple[float, int]] | None = None,
    progress: Progress | None = None,
) -> tuple[MultiEstimate, ...]:
    """The m-replica designs of the grid that D_perp can be expected to feed.

    Args:
        reference: D_perp in unit scale, float32 (n', d).
        estimation: D_est, likewise.
        sampling_level: α for all designs' sampling.
        monte_carlo_level: α for all designs' Monte Carlo.
        seed: of everything random.
        grid: (s, m); ``MULTI_GRID`` unless given.
        progress: told (done, in all), in hundredths.

    Raises:
        DataError: no design of the grid is within reach.
    """
    reference, estimation = reference.cpu(), estimation.cpu()  # trials are random access; no device gains by them
    axes = principal_axes(reference)
    potentials = fit_multi_potentials(
        reference, MULTI_GRID if grid is None else grid, seed=seed, axes=axes, progress=part(progress, 0, 4)
    )
    kept = [potential for potential in potentials if potential.complete]
    if not kept:
        raise DataError(
            "The samples are too small for designs with many replicas: too few tuples of records would be accepted. "
            "Use designs='fast', or more records."
        )
    return multi_estimates(
        kept,
        estimation,
        sampling_level=sampling_level / len(kept),
        monte_carlo_level=monte_carlo_level / len(kept),
        seed=seed,
        axes=axes,
        progress=part(progress, 1, 4, width=3),
    )
