"""Exact draws of tuples of records, and how often two tuples merge: the doubling by rejection.

For weights w and a scale s let q_r be the law on r-tuples of the sample proportional to
Π w_i · exp(−Σ ‖z_i − u‖²/s), u the tuple's mean, with normaliser V_r. For two tuples the sum over all 2r points splits
into both sums within and (r/2)‖u − v‖², hence

    V_2r = V_r² P_2r,      P_2r = E_{u, v ~ q_r × q_r} exp(−r ‖u − v‖²/(2s))  in (0, 1],

and an independent pair accepted with that probability is an exact draw from q_2r. So P is the frequency of a coin, and
nothing is weighted.

Pairs (r = 2) come from one exact sweep over all pairs of records, as a Poisson process: a pair (i, j) occurs
Poisson(λ w_i w_j k_ij) times, so whatever the number N of pairs comes out as, they are N independent draws of q_2.

A trial that fails on a few leading coordinates (``heads``: the projections of the records on the reference sample's
first principal axes) reads no others, which does not change its law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opacus_reconbound.certificates.compiled import trial_kernel
from opacus_reconbound.certificates.kernel import KernelLadder, costs, half_square_norms, strict_float32
from opacus_reconbound.certificates.parallel import Counter, Progress, in_order, one_tensor_thread
from opacus_reconbound.errors import DataError

__all__ = ["HEADS", "PairJob", "Pool", "double", "draw_pairs", "random_stream", "stream_seed", "tuple_means"]

HEADS = 48
_NEAR = 8
_TRIALS = 1 << 18
_TILE = 512
_BLOCK = 64
_PILOT = 256
_MEANS = 1 << 15  # tuple means made at a time
_MOST_PAIRS = 200_000_000
# a distance, of the first coordinates or of all, is reduced by this before it may reject: in spite of float32 the
# chance of acceptance is never below the exact one, and a larger kernel makes every norm larger. Only between means so
# close that the rounding u of coordinates shows is it below, by less than 1e4 (r + 4)² u² max ‖z‖² · r/(2s); ``multi``
# charges that
_HEAD_SAFETY = 1.0 - 1e-4


@dataclass(frozen=True, eq=False)
class Pool:
    """Independent draws of a law on r-tuples, to draw from with replacement.

    Attributes:
        members: record numbers, int32 (N, r).
    """

    members: torch.Tensor

    @property
    def size(self) -> int:
        """r, the members of a tuple."""
        return int(self.members.shape[1])

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True, eq=False)
class PairJob:
    """What to draw pairs for.

    Attributes:
        weights: w > 0, float64 (n,).
        scale: s.
        pairs: how many to expect, about.
        seed: of the draws.
    """

    weights: torch.Tensor
    scale: float
    pairs: int
    seed: int


def draw_pairs(
    z: torch.Tensor,
    jobs: Sequence[PairJob],
    *,
    repeats: bool = True,
    rows: torch.Tensor | None = None,
    progress: Progress | None = None,
) -> list[tuple[float, Pool]]:
    """ln V_2 and independent draws of q_2, all jobs in one sweep over tiles; the same bits on any number of threads.

    V_2 may be nought where nothing is near and repeats are excluded; the pool is empty then.

    Args:
        z: records, float32 (n, d).
        jobs: weights, scale, number and seed of each.
        repeats: whether a record may be its own partner (it may, in V_2; not where a population is imitated).
        rows: only pairs with their first record among these, int64 (k,): a cheaper sweep where an imitation of q_2 and
            an estimate of V_2 will do. All pairs by default, and then both are exact.
        progress: told (tiles done, tiles in all).
    """
    n = len(z)
    half = half_square_norms(z)
    ladder = KernelLadder.plan([job.scale for job in jobs])
    users = [[j for j, job in enumerate(jobs) if job.scale == scale] for scale in ladder.temperatures]
    weights = [job.weights.float() for job in jobs]

    with strict_float32(), one_tensor_thread():
        pilots = [_pilot_mass(z, half, job, repeats) for job in jobs]
    rates = [job.pairs / mass if mass > 0.0 else 0.0 for job, mass in zip(jobs, pilots, strict=True)]
    chosen = torch.arange(n) if rows is None else rows
    starts = list(range(0, len(chosen), _TILE))
    tiles = [(a, b) for a in starts for b in range(a if rows is None else 0, n, _TILE)]
    number = {tile: index for index, tile in enumerate(tiles)}
    # a part of the rows stands for all
    share = 1.0 if rows is None else len(chosen) / n
    masses = torch.zeros((len(jobs), len(tiles)), dtype=torch.float64)
    counter = Counter(progress, len(tiles))

    def sweep(a: int) -> list[torch.Tensor]:
        first = chosen[a : a + _TILE]
        x, half_x = z[first], half[first]
        drawn: list[list[torch.Tensor]] = [[] for _ in jobs]
        for b in range(a if rows is None else 0, n, _TILE):
            second = torch.arange(b, min(b + _TILE, n))
            cost = costs(x, z[b : b + _TILE], half_x, half[b : b + _TILE])
            same = first[:, None] == second[None, :]
            if bool(same.any()):
                cost[same] = 0.0 if repeats else math.inf
            both = 2.0 if rows is None and b > a else 1.0  # (i, j) stands for (j, i), whose mean is the same
            for g, kernel in ladder.kernels(cost):
                for j in users[g]:
                    mass, pairs = _draw_tile(
                        kernel,
                        weights[j][first],
                        weights[j][b : b + _TILE],
                        both * rates[j] / share,
                        stream_seed(jobs[j].seed, a, b),
                    )
                    masses[j, number[a, b]] = both * mass
                    drawn[j].append(torch.stack([first[pairs[0]], second[pairs[1]]], dim=1).to(torch.int32))
            counter.add(1)
        return [torch.cat(parts) for parts in drawn]

    pools = [_Rows(job.pairs) for job in jobs]
    with strict_float32():
        for found in in_order(sweep, starts, z.device, counter):
            for pool, some in zip(pools, found, strict=True):
                pool.add(some)
    results = []
    for job_masses, pool in zip(masses, pools, strict=True):
        total = math.fsum(job_masses.tolist()) / (share * n * n)
        results.append((math.log(total) if total > 0.0 else -math.inf, Pool(pool.all())))
    return results


class _Rows:
    """Pairs of record numbers in one piece of memory, which grows when it must.

    Many small results kept between large temporaries would fragment the heap.
    """

    def __init__(self, expected: int) -> None:
        self._memory = torch.empty((int(1.1 * expected) + 1_000, 2), dtype=torch.int32)  # untouched, it costs nothing
        self._count = 0

    def add(self, rows: torch.Tensor) -> None:
        end = self._count + len(rows)
        if end > len(self._memory):
            larger = torch.empty((end + end // 4, 2), dtype=torch.int32)
            larger[: self._count] = self._memory[: self._count]
            self._memory = larger
        self._memory[self._count : end] = rows
        self._count = end

    def all(self) -> torch.Tensor:
        return self._memory[: self._count]


def _pilot_mass(z: torch.Tensor, half: torch.Tensor, job: PairJob, repeats: bool) -> float:
    """About Σ_ij w_i w_j k_ij: every record's own term, and the others' from some rows."""
    n = len(z)
    generator = torch.Generator().manual_seed(stream_seed(job.seed, n))
    some = torch.randperm(n, generator=generator)[:_PILOT]
    total = 0.0
    for b in range(0, n, 4096):
        kernel = torch.exp(costs(z[some], z[b : b + 4096], half[some], half[b : b + 4096]).double() / -job.scale)
        kernel[some[:, None] == torch.arange(b, b + kernel.shape[1])[None, :]] = 0.0
        total += float(job.weights[some] @ (kernel @ job.weights[b : b + 4096]))
    return total * n / len(some) + (float(job.weights.square().sum()) if repeats else 0.0)


def _draw_tile(
    kernel: torch.Tensor, w_rows: torch.Tensor, w_columns: torch.Tensor, rate: float, seed: int
) -> tuple[float, tuple[torch.Tensor, torch.Tensor]]:
    """A tile's mass Σ w_i w_j k_ij, and the cells of a Poisson process of that intensity times ``rate``.

    A cell is found in two stages: a block of columns in a row by the blocks' sums, and a column within it.
    """
    table = kernel * w_columns
    if table.shape[1] % _BLOCK:
        table = torch.nn.functional.pad(table, (0, -table.shape[1] % _BLOCK))
    blocks = table.shape[1] // _BLOCK
    table = table.view(-1, _BLOCK)
    sums = (table.sum(dim=1).view(-1, blocks) * w_rows[:, None]).double().view(-1)
    running = sums.cumsum(dim=0)
    mass = float(running[-1])
    generator = random_stream(seed)
    expected = rate * mass
    if not expected < _MOST_PAIRS:
        raise DataError(
            f"A few records hold most of the sample's mass: about {expected:.3g} pairs would be drawn from one tile. "
            "Look for duplicates or extreme values among the estimation records."
        )
    count = int(generator.poisson(expected))
    if count == 0:
        nothing = torch.empty(0, dtype=torch.int64)
        return mass, (nothing, nothing)
    target = torch.from_numpy(generator.random(count)).mul_(mass)
    block = torch.searchsorted(running, target, right=True)
    block.clamp_(max=int((sums > 0.0).nonzero()[-1]))
    within = table[block].double().cumsum_(dim=1)
    aim = torch.from_numpy(generator.random((count, 1))).mul_(within[:, -1:])
    column = torch.searchsorted(within, aim, right=True)[:, 0].clamp_(max=_BLOCK - 1)
    row = torch.div(block, blocks, rounding_mode="floor")
    column += (block - row * blocks) * _BLOCK
    return mass, (row, column.clamp_(max=kernel.shape[1] - 1))


def stream_seed(seed: int, *parts: int) -> int:
    """A 63-bit seed from several numbers (splitmix64 steps), so that neighbouring numbers give unrelated streams."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 * (part + 1)) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def random_stream(seed: int) -> np.random.Generator:
    """Philox with this key: other seeds give other streams, where torch's generator keeps 32 bits of a seed."""
    return np.random.Generator(np.random.Philox(key=seed))


def double(
    z: torch.Tensor,
    pool: Pool,
    scale: float,
    trials: int,
    *,
    seed: int,
    heads: torch.Tensor | None = None,
    repeats: bool = True,
    compiled: bool = True,
    progress: Progress | None = None,
) -> tuple[int, Pool]:
    """Try to merge independent pairs of tuples; return how many of the trials were accepted, and these as a pool.

    A trial accepts with probability exp(−r‖u − v‖²/(2s)); with E exponential, that is r‖u − v‖²/(2s) <= E.

    Args:
        z: records, float32 (n, d).
        pool: r-tuples, fewer than 2^32 of them.
        scale: s.
        trials: T, fixed beforehand.
        seed: of the trials.
        heads: leading coordinates, float32 (n, h): a map of the records that enlarges no distance. The first ones of
            ``z`` by default.
        repeats: whether both tuples may share records.
        compiled: use machine code where numba is installed. Its random numbers are others, their law is the same.
        progress: told (trials done, trials in all).
    """
    r, near = pool.size, _NEAR
    heads = z[:, :HEADS] if heads is None else heads
    if len(pool) == 0:
        return 0, Pool(pool.members.new_empty((0, 2 * r)))
    factor = _HEAD_SAFETY * r / (2.0 * scale)
    if r == 2:
        first, second = heads[:, :near].contiguous(), heads[:, near:].contiguous()
    else:
        first, second = tuple_means(heads[:, :near], pool.members), tuple_means(heads[:, near:], pool.members)
    kernel = trial_kernel() if compiled else None
    counter = Counter(progress, trials)

    def run(index: int) -> torch.Tensor:
        count, stream = min(_TRIALS, trials - index * _TRIALS), stream_seed(seed, r, index)
        if kernel is None:
            pairs = _plain_trials(z, pool.members, (first, second), factor, count, stream)
        else:
            arrays = (array.numpy() for array in (first, second, z, pool.members))
            buffer = np.empty((count, 2), dtype=np.int64)
            accepted = kernel(*arrays, factor, count, np.uint64(stream), buffer)
            pairs = torch.from_numpy(buffer[:accepted].copy())
        merged = torch.cat([pool.members[pairs[:, 0]], pool.members[pairs[:, 1]]], dim=1)
        if not repeats and len(merged):
            ordered = merged.sort(dim=1).values
            merged = merged[(ordered[:, 1:] != ordered[:, :-1]).all(dim=1)]
        counter.add(count)
        return merged

    chunks = range(-(-trials // _TRIALS))
    merged = torch.cat([pool.members.new_empty((0, 2 * r)), *in_order(run, chunks, z.device, counter)])
    return len(merged), Pool(merged)


def _plain_trials(
    z: torch.Tensor,
    members: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    factor: float,
    count: int,
    seed: int,
) -> torch.Tensor:
    """Numbers of the tuples that merged, int64 (accepted, 2), in torch alone."""
    generator = random_stream(seed)
    pairs = torch.from_numpy(generator.integers(len(members), size=(count, 2)))
    uniform = torch.from_numpy(generator.random(count))
    limit = uniform.neg_().log1p_().neg_() / factor  # an exponential variable, to the last bit
    partial = torch.zeros(count, dtype=torch.float64)
    for table in tables:
        partial += _gap(table, members, pairs)
        alive = (partial <= limit).nonzero()[:, 0]
        pairs, limit, partial = pairs[alive], limit[alive], partial[alive]
    kept = []
    for start in range(0, len(pairs), 4096):
        some = pairs[start : start + 4096]
        u, v = tuple_means(z, members[some[:, 0]], torch.float64), tuple_means(z, members[some[:, 1]], torch.float64)
        kept.append(some[(u - v).square().sum(dim=1) <= limit[start : start + 4096]])
    return torch.cat(kept) if kept else pairs


def _gap(table: torch.Tensor, members: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Squared distances of tuple means in a table's coordinates: the records' for pairs, the means' otherwise."""
    if members.shape[1] != 2:
        return (table[pairs[:, 0]] - table[pairs[:, 1]]).square_().sum(dim=1).double()
    x, y = members[pairs[:, 0]].long(), members[pairs[:, 1]].long()
    gap = (table[x[:, 0]] + table[x[:, 1]]) - (table[y[:, 0]] + table[y[:, 1]])
    return gap.square_().sum(dim=1).double().mul_(0.25)


def tuple_means(z: torch.Tensor, members: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Means of tuples of rows, (N, d)."""
    means = torch.empty((len(members), z.shape[1]), dtype=dtype, device=z.device)
    for start in range(0, len(members), _MEANS):
        some = members[start : start + _MEANS].long()
        total = z[some[:, 0]].to(dtype)
        for column in range(1, members.shape[1]):
            total += z[some[:, column]]
        means[start : start + _MEANS] = total.div_(members.shape[1])
    return means
