"""Entropy certificates of rotated blocks (paper, Proposition 5.1, Corollary 3.7, Appendix E).

Lower confidence bounds on h̄(k) = mean over blocks b of h(Π_b z + N(0, s² I_k)), k s² = ν², from the plug-in
mixture f̂_b = (1/n) Σ_j N(Π_b z_j, s² I) of an estimation sample. The plug-in is biased downward,
E h(f̂) ≤ h, so two margins suffice: one for the Monte Carlo integral and one for the sample. With |G| pairs
(k, ν²) fixed beforehand and level α, each margin holds at level α/(2|G|) a pair and every bound holds at once with
probability ≥ 1 − α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from opacus_reconbound import _validate
from opacus_reconbound.certificates import margins as _margins
from opacus_reconbound.certificates.designs import BlockDesign
from opacus_reconbound.certificates.devices import rows_at_once, to_float64
from opacus_reconbound.certificates.mixture import CHUNK, information_density
from opacus_reconbound.certificates.parallel import Counter, in_order, one_tensor_thread, shared_out
from opacus_reconbound.certificates.rotation import Rotation
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.units import nats_to_bits

__all__ = ["BlockEstimate", "block_designs", "block_estimates", "default_pairs", "paper_draws"]

Margins = Literal["bernstein", "paper"]

DITHERS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""ν² of the default grid, in units of tr Σ."""

DRAWS = 8000
"""Default number of independent Monte Carlo draws for a pair."""

_CLIP = 9.0  # L: the information density is clipped from below at −L nats


@dataclass(frozen=True, kw_only=True)
class BlockEstimate:
    """The entropy estimate of one pair (k, ν²) and its margins, in bits, in the scale tr Σ = 1 per block.

    Attributes:
        block_size: k.
        dither: ν², in units of tr Σ.
        entropy_bits: ĥ, the Monte Carlo value of the mixture's entropy, averaged over the blocks.
        monte_carlo_margin_bits: t_MC, for the Monte Carlo integral at level α/(2|G|).
        sampling_margin_bits: t_n, for the estimation sample at level α/(2|G|) (equation 35).
        arithmetic_margin_bits: bound on what floating-point arithmetic can have added.
        draws: Monte Carlo draws in all.
    """

    block_size: int
    dither: float
    entropy_bits: float
    monte_carlo_margin_bits: float
    sampling_margin_bits: float
    arithmetic_margin_bits: float
    draws: int

    @property
    def lower_bound_bits(self) -> float:
        """h_LB = ĥ − t_MC − t_n − arithmetic, in bits."""
        margin = self.monte_carlo_margin_bits + self.sampling_margin_bits + self.arithmetic_margin_bits
        return self.entropy_bits - margin

    def design(self) -> BlockDesign:
        """The converse that this entropy certifies."""
        return BlockDesign(block_size=self.block_size, dither=self.dither, entropy_bits=self.lower_bound_bits)


def default_pairs(order: int) -> tuple[tuple[int, float], ...]:
    """The default grid G: block sizes up to 32 that divide M, times ν² in (.2, .4, .8, 1.6, 3.2, 6.4).

    Args:
        order: M, the dimension after padding (:func:`~opacus_reconbound.certificates.rotation.hadamard_order`).

    Returns:
        The pairs (k, ν²): for 784 the 48 of the paper.
    """
    order = _validate.integer("order", order, minimum=1)
    sizes = [k for k in range(1, min(order, 32) + 1) if order % k == 0]
    return tuple((k, dither) for k in sizes for dither in DITHERS)


def paper_draws(block_size: int) -> int:
    """n_MC of the paper, dither draws for each centre and block: k, but 4 at k = 2 and 3 and 2 at k = 1."""
    return {1: 2, 2: 4, 3: 4}.get(block_size, block_size)


def block_designs(
    reference: torch.Tensor,
    estimation: torch.Tensor,
    *,
    pairs: Sequence[tuple[int, float]],
    level: float,
    margins: Margins = "bernstein",
    draws: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[BlockDesign, ...]:
    """Certify one :class:`BlockDesign` for each pair; all of them hold at once with probability ≥ 1 − level.

    Arguments and errors are those of :func:`block_estimates`.
    """
    estimates = block_estimates(
        reference,
        estimation,
        pairs=pairs,
        level=level,
        margins=margins,
        draws=draws,
        seed=seed,
        device=device,
        chunk=chunk,
        progress=progress,
    )
    return tuple(estimate.design() for estimate in estimates)


def block_estimates(
    reference: torch.Tensor,
    estimation: torch.Tensor,
    *,
    pairs: Sequence[tuple[int, float]],
    level: float,
    margins: Margins = "bernstein",
    draws: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[BlockEstimate, ...]:
    """Estimate the block entropies of a grid from below, simultaneously.

    ``margins="bernstein"``: with I_n = h(f̂) − h(W) = E ι, ι ≤ ln n and E e^{−ι} = 1, N independent draws
    (block, J, w) give, in nats and with probability ≥ 1 − a,

        I_n ≥ mean(ι_L) − e^{−L−1} − sqrt(2 V ln(2/a)/N) − 7 (ln n + L) ln(2/a) / (3 (N − 1)),

    where ι_L = max(ι, −L) and L = 9.

    ``margins="paper"``: n_MC draws for every centre and every block, n² n_MC exponentials for each block, with
    Cantelli's inequality (equation 34).

    Both subtract McDiarmid's margin for the sample (equation 35) and the arithmetic's error bound.

    Args:
        reference: D_perp, shape (n', m), floating point; fixes the rotation alone. Centred and scaled so that its
            tr Σ is 1: the unit of ν² and of the designs.
        estimation: D_est, shape (n, m), disjoint from it, in the same scale; float64 records are computed in float64.
        pairs: (k, ν²), chosen without looking at ``estimation``; k divides the dimension after padding.
        level: α, the probability that any bound of the grid fails.
        margins: which Monte Carlo margin.
        draws: N for each pair ("bernstein", default 8000) or n_MC ("paper", default :func:`paper_draws`).
        seed: of the Monte Carlo draws and of a data-free rotation. Each pair has its own stream.
        device: where to compute; default the device of ``estimation``.
        chunk: exponents in memory at once, for each CPU thread; it does not change the draws.
        progress: called with (done, total) as the work goes on.

    Returns:
        One estimate for each pair, in order.

    Raises:
        DataError: if the records are not finite matrices of one width.
        InvalidValueError: if a pair, the level, the margins or the draws lie outside their range.
    """
    level = _validate.fraction("level", level)
    if margins not in ("bernstein", "paper"):
        raise InvalidValueError(f"Expected margins to be 'bernstein' or 'paper'. Found {margins!r}.")
    if draws is not None:
        draws = _validate.integer("draws", draws, minimum=2 if margins == "bernstein" else 1)
    _check_records(reference, estimation)
    place = torch.device(device) if device is not None else estimation.device
    with torch.no_grad(), one_tensor_thread():
        rotation = Rotation.fit(reference.to(place), seed=seed)
        grid = _check_pairs(pairs, rotation.order)
        coordinates = _rotated(rotation, estimation, place)
        share = level / (2.0 * len(grid))
        if margins == "paper":
            rounds = [draws or paper_draws(k) for k, _ in grid]
            total = sum(rotation.order // k * count for (k, _), count in zip(grid, rounds, strict=True))
            work = _Work(coordinates, share, seed, chunk, Counter(progress, total))
            return tuple(work.paper(i, k, nu2, rounds[i]) for i, (k, nu2) in enumerate(grid))
        sizes = list(dict.fromkeys(k for k, _ in grid))
        total = sum(rotation.order // k for k in sizes)
        work = _Work(coordinates, share, seed, chunk, Counter(progress, total))
        found: dict[int, BlockEstimate] = {}
        for k in sizes:
            members = {i: nu2 for i, (size, nu2) in enumerate(grid) if size == k}
            found.update(work.bernstein(k, members, draws or DRAWS))
        return tuple(found[i] for i in range(len(grid)))


class _Work:
    """The rotated sample and what all pairs share."""

    def __init__(self, coordinates: torch.Tensor, level: float, seed: int, chunk: int, counter: Counter) -> None:
        self._coordinates = coordinates  # (M, n): the rows of a block are contiguous
        self._order, self._n = coordinates.shape
        self._level, self._seed, self._chunk, self._counter = level, seed, chunk, counter
        self._mean_square = math.fsum(float(to_float64(row).square().sum()) for row in coordinates) / self._n

    def bernstein(self, k: int, dithers: dict[int, float], draws: int) -> dict[int, BlockEstimate]:
        """All pairs of one block size: each block is prepared once and meets the draws of all its dithers."""
        blocks = self._order // k
        parts = []
        for i, nu2 in dithers.items():
            stream = self._stream(i)
            block, index = _uniform(blocks, draws, stream), _uniform(self._n, draws, stream)
            noise = torch.randn(draws, k, generator=stream, dtype=torch.float64)
            parts.append((block, index, noise, torch.full((draws,), math.sqrt(nu2 / k), dtype=torch.float64)))
        block, index, noise, scale = (torch.cat(column) for column in zip(*parts, strict=True))
        order, sizes = torch.argsort(block, stable=True), torch.bincount(block, minlength=blocks).tolist()
        members = torch.split(order, sizes)
        density, error = (
            torch.zeros(len(block), dtype=torch.float64),
            torch.zeros(len(block), dtype=torch.float64),
        )

        def measure(b: int) -> None:
            rows = members[b]
            if len(rows):
                found = information_density(
                    self._centres(b, k), index[rows], noise[rows], scale[rows], chunk=self._chunk
                )
                density[rows], error[rows] = found.nats.cpu(), found.error_nats.cpu()
            self._counter.add()

        self._each(measure, blocks)
        clipped = density.clamp(-_CLIP, math.log(self._n)).reshape(len(dithers), draws)
        errors = error.reshape(len(dithers), draws)
        return {
            i: self._bernstein_estimate(k, nu2, clipped[row], errors[row])
            for row, (i, nu2) in enumerate(dithers.items())
        }

    def _bernstein_estimate(self, k: int, nu2: float, clipped: torch.Tensor, errors: torch.Tensor) -> BlockEstimate:
        deviation = _margins.empirical_bernstein(
            variance=float(clipped.var(correction=1)),
            value_range=math.log(self._n) + _CLIP,
            n=len(clipped),
            level=self._level,
        )
        return self._estimate(
            k,
            nu2,
            entropy_nats=_dither_entropy_nats(k, nu2) + float(clipped.mean()),
            monte_carlo_bits=nats_to_bits(deviation + math.exp(-_CLIP - 1.0)),
            error_nats=float(errors.mean()),
            draws=len(clipped),
        )

    def paper(self, i: int, k: int, nu2: float, draws: int) -> BlockEstimate:
        """One pair with n_MC = ``draws`` dither draws around every centre of every block."""
        blocks, scale = self._order // k, math.sqrt(nu2 / k)
        everyone = torch.arange(self._n)
        negative_log, error, constant = [0.0] * blocks, [0.0] * blocks, [0.0] * blocks

        def measure(b: int) -> None:
            centres, stream = self._centres(b, k), self._stream(i, b)
            mean_square = float(to_float64(centres).square().sum(1).mean())
            constant[b] = _margins.monte_carlo_constant(k, nu2, mean_square)
            for _ in range(draws):
                noise = torch.randn(self._n, k, generator=stream, dtype=torch.float64)
                found = information_density(centres, everyone, noise, scale, chunk=self._chunk)
                negative_log[b] += float(found.nats.mean() + 0.5 * noise.square().sum(1).mean()) / draws
                error[b] += float(found.error_nats.mean()) / draws
                self._counter.add()

        self._each(measure, blocks)
        return self._estimate(
            k,
            nu2,
            entropy_nats=0.5 * k * math.log(2.0 * math.pi * nu2 / k) + math.fsum(negative_log) / blocks,
            monte_carlo_bits=_margins.cantelli_bits(
                constant=math.fsum(constant) / blocks,
                blocks=blocks,
                n=self._n,
                draws=draws,
                level=self._level,
            ),
            error_nats=math.fsum(error) / blocks,
            draws=blocks * draws * self._n,
        )

    def _estimate(
        self,
        k: int,
        nu2: float,
        *,
        entropy_nats: float,
        monte_carlo_bits: float,
        error_nats: float,
        draws: int,
    ) -> BlockEstimate:
        # Storing U z moves it by at most u‖z‖, hence the bound's square root by e = u sqrt(E‖z‖²), D by 2e sqrt(D);
        # relative to D + ν² that is at most 2e/ν, and k e/ν nats of entropy pay for it. Twice that is subtracted.
        stored = 0.5 * torch.finfo(self._coordinates.dtype).eps * math.sqrt(self._mean_square)
        return BlockEstimate(
            block_size=k,
            dither=nu2,
            entropy_bits=nats_to_bits(entropy_nats),
            monte_carlo_margin_bits=monte_carlo_bits,
            sampling_margin_bits=_margins.mcdiarmid_bits(self._n, self._level),
            arithmetic_margin_bits=nats_to_bits(error_nats + 2.0 * k * stored / math.sqrt(nu2)),
            draws=draws,
        )

    def _each(self, measure: Callable[[int], None], blocks: int) -> None:
        for _ in in_order(measure, range(blocks), self._coordinates.device, self._counter):
            pass

    def _centres(self, b: int, k: int) -> torch.Tensor:
        """Π_b z_j = sqrt(M/k) times the coordinates of block b, shape (n, k)."""
        return (self._coordinates[b * k : (b + 1) * k] * math.sqrt(self._order / k)).T

    def _stream(self, *key: int) -> torch.Generator:
        """The random numbers of a pair (and a block), whatever the other pairs, the device and the chunk."""
        state = np.random.SeedSequence(self._seed, spawn_key=key).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(state[0]))


def _uniform(n: int, size: int, stream: torch.Generator) -> torch.Tensor:
    """Uniform integers below n (53 random bits each: no modulo bias to speak of)."""
    unit = torch.rand(size, generator=stream, dtype=torch.float64)
    return (unit * n).long().clamp(max=n - 1)


def _dither_entropy_nats(k: int, nu2: float) -> float:
    """h(W) = (k/2) ln(2πe s²), k s² = ν²."""
    return 0.5 * k * math.log(2.0 * math.pi * math.e * nu2 / k)


def _rotated(rotation: Rotation, records: torch.Tensor, device: torch.device) -> torch.Tensor:
    """U z_i as columns, shape (M, n), on the device; a slice of the records at a time."""
    dtype = torch.float64 if records.dtype == torch.float64 else torch.float32
    out = torch.empty(rotation.order, len(records), dtype=dtype, device=device)
    rows = rows_at_once(rotation.order)

    def rotate(starts: Sequence[int]) -> None:
        for start in starts:
            part = records[start : start + rows].to(device=device, dtype=dtype)
            out[:, start : start + rows] = rotation.apply(part).T

    shared_out(rotate, range(0, len(records), rows), device)
    return out


def _check_pairs(pairs: Sequence[tuple[int, float]], order: int) -> list[tuple[int, float]]:
    grid = [(_validate.integer("block_size", k, minimum=1), _validate.positive("dither", nu2)) for k, nu2 in pairs]
    if not grid:
        raise InvalidValueError("Expected at least one pair (k, nu2). Found none.")
    for k, _ in grid:
        if order % k:
            raise InvalidValueError(
                f"Expected block sizes that divide {order}, the dimension after padding. Found {k}. "
                f"default_pairs({order}) lists those up to 32."
            )
    return grid


def _check_records(reference: torch.Tensor, estimation: torch.Tensor) -> None:
    for name, records in (("reference", reference), ("estimation", estimation)):
        if records.ndim != 2 or not records.is_floating_point():
            raise DataError(
                f"Expected {name} records as a floating-point matrix (n, m). "
                f"Found {records.dtype} of shape {tuple(records.shape)}."
            )
        rows = rows_at_once(records.shape[1])
        if not all(bool(torch.isfinite(records[i : i + rows]).all()) for i in range(0, len(records), rows)):
            raise DataError(f"Expected finite {name} records. Found NaN or infinity; remove those records.")
    if reference.shape[1] != estimation.shape[1]:
        raise DataError(
            "Expected reference and estimation records of one width. "
            f"Found {reference.shape[1]} and {estimation.shape[1]}."
        )
    if len(estimation) < 2:
        raise DataError(f"Expected at least 2 estimation records. Found {len(estimation)}.")
