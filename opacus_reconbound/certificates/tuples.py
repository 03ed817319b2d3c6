"""Exact draws of tuples of records, and how often two tuples merge: the doubling by rejection.

For weights w and a scale s let q_r be the law on r-tuples of the sample proportional to
Π w_i · exp(−Σ ‖z_i − u‖²/s), u the tuple's mean, with normaliser V_r. For two tuples the sum over all 2r points splits
into both sums within and (r/2)‖u − v‖², hence

    V_2r = V_r² P_2r,      P_2r = E_{u, v ~ q_r × q_r} exp(−r ‖u − v‖²/(2s))  in (0, 1],

and an independent pair accepted with that probability is an exact draw from q_2r. So P is the frequency of a coin, and
nothing is weighted. Pairs (r = 2) come from one exact sweep over all pairs of records.

Records are to be given in a basis whose first coordinates carry most of the distance (the reference sample's principal
axes): a trial that fails on the first coordinates reads no others, which does not change its law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from opacus_reconbound.certificates.kernel import costs, half_square_norms, strict_float32
from opacus_reconbound.certificates.parallel import Counter, Progress, shared_out
from opacus_reconbound.units import nats_to_bits

__all__ = ["PairJob", "Pool", "double", "draw_pairs", "stream_seed"]

_HEADS = (12, 48)
_TRIALS = 1 << 16
_BLOCK = 256
_DRAWS = 8192
# a distance, of the first coordinates or of all, is reduced by this before it may reject: in spite of float32 the
# chance of acceptance is never below the exact one, and a larger kernel makes every norm larger
_HEAD_SAFETY = 1.0 - 1e-4


@dataclass(frozen=True, eq=False)
class Pool:
    """Tuples to draw from, with replacement.

    Attributes:
        members: record numbers, int32 (N, r).
        rows: for weighted pools: probability of each row of the first member, float64 (n,); else None.
        starts: for weighted pools: where each row's tuples begin, int64 (n + 1,).
        largest_weight: of one tuple; 1/N for an unweighted pool.
    """

    members: torch.Tensor
    largest_weight: float
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """r, the members of a tuple."""
        return int(self.members.shape[1])


@dataclass(frozen=True, eq=False)
class PairJob:
    """What to draw pairs for.

    Attributes:
        weights: w > 0, float64 (n,).
        scale: s.
        counts: partners to draw for each record, int64 (n,), at least 1.
        seed: of the draws.
    """

    weights: torch.Tensor
    scale: float
    counts: torch.Tensor
    seed: int


def draw_pairs(
    z: torch.Tensor,
    jobs: Sequence[PairJob],
    *,
    repeats: bool = True,
    progress: Progress | None = None,
    chunk: int = 128,
) -> list[tuple[float, Pool]]:
    """ln V_2 and a pool of exact draws of q_2, stratified by the first record; one sweep over all pairs for all jobs.

    Without repeats V_2 may be nought where all records are far apart; the pool then means nothing.

    A partner is drawn in two stages, a block of columns by the blocks' sums and a column within it, so that no running
    sum over a whole row is needed.

    Args:
        z: records, float32 (n, d).
        jobs: weights, scale and counts of each.
        repeats: whether a record may be its own partner (it may, in V_2; not where a population is imitated).
        progress: told (records done, records in all).
        chunk: records at a time.
    """
    n = len(z)
    blocks = -(-n // _BLOCK)
    half = half_square_norms(z)
    starts, partners, sums, weights = [], [], [], []
    for job in jobs:
        start = torch.zeros(n + 1, dtype=torch.int64)
        start[1:] = job.counts.cumsum(dim=0)
        starts.append(start)
        partners.append(torch.empty(int(start[-1]), dtype=torch.int32))
        sums.append(torch.empty(n, dtype=torch.float64))
        weights.append(job.weights.float())
    counter = Counter(progress, n)

    def sweep(firsts: Sequence[int]) -> None:
        kernel = torch.zeros((chunk, blocks * _BLOCK), dtype=torch.float32)
        for first in firsts:
            last = min(first + chunk, n)
            rows = last - first
            cost = costs(z[first:last], z, half[first:last], half)
            diagonal = torch.arange(first, last)
            cost[diagonal - first, diagonal] = 0.0 if repeats else math.inf
            for number, job in enumerate(jobs):
                live = kernel[:rows, :n]
                torch.mul(cost, -nats_to_bits(1.0) / job.scale, out=live)
                live.exp2_().mul_(weights[number])
                table = kernel[:rows].view(rows * blocks, _BLOCK)
                running = table.sum(dim=1).view(rows, blocks).double().cumsum_(dim=1)
                totals = running[:, -1]
                sums[number][first:last] = totals / n
                row = torch.repeat_interleave(torch.arange(rows), job.counts[first:last])
                generator = torch.Generator().manual_seed(stream_seed(job.seed, first))
                target = torch.rand(len(row), generator=generator, dtype=torch.float64) * totals[row]
                block = _search(running, row, target)
                below = torch.where(block > 0, running[row, (block - 1).clamp(min=0)], 0.0)
                share = ((target - below) / (running[row, block] - below)).clamp_(0.0, 1.0)
                place = starts[number][first]
                for part in range(0, len(row), _DRAWS):
                    some = slice(part, part + _DRAWS)
                    within = table[row[some] * blocks + block[some]].double().cumsum_(dim=1)
                    aim = share[some, None] * within[:, -1:]
                    column = torch.searchsorted(within, aim, right=True)[:, 0].clamp_(max=_BLOCK - 1)
                    found = (block[some] * _BLOCK + column).clamp_(max=n - 1)
                    partners[number][place + part : place + part + len(found)] = found.to(torch.int32)
            counter.add(rows)

    with strict_float32():
        shared_out(sweep, list(range(0, n, chunk)), z.device)
    results = []
    for number, job in enumerate(jobs):
        mass = job.weights * sums[number]
        total = float(mass.sum())
        probability = mass / total if total > 0.0 else torch.full_like(mass, 1.0 / n)
        first_member = torch.repeat_interleave(torch.arange(n, dtype=torch.int32), job.counts)
        pool = Pool(
            members=torch.stack([first_member, partners[number]], dim=1),
            largest_weight=float((probability / job.counts).max()),
            rows=probability,
            starts=starts[number],
        )
        results.append((math.log(total / n) if total > 0.0 else -math.inf, pool))
    return results


def _search(running: torch.Tensor, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For each target the first column of its row at which the running sum exceeds it."""
    counts = torch.bincount(row, minlength=len(running))
    table = torch.zeros((len(running), int(counts.max())), dtype=torch.float64)
    offset = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    table[row, offset] = target
    return torch.searchsorted(running, table, right=True)[row, offset].clamp(max=running.shape[1] - 1)


def stream_seed(seed: int, *parts: int) -> int:
    """A 63-bit seed from several numbers (splitmix64 steps), so that neighbouring numbers give unrelated streams."""
    state = seed & 0xFFFFFFFFFFFFFFFF
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 * (part + 1)) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def _below(count: int, number: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers below ``number``, all equally likely: ``torch.randint`` takes 32 bits modulo ``number``."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return uniform.mul_(number).long().clamp_(max=number - 1)


class _Alias:
    """Draws from fixed probabilities in constant time (Walker's alias table)."""

    def __init__(self, probability: torch.Tensor) -> None:
        n = len(probability)
        scaled = (probability * n).tolist()
        keep, other = [1.0] * n, list(range(n))
        small = [i for i, p in enumerate(scaled) if p < 1.0]
        large = [i for i, p in enumerate(scaled) if p >= 1.0]
        while small and large:
            low, high = small.pop(), large.pop()
            keep[low], other[low] = scaled[low], high
            scaled[high] -= 1.0 - scaled[low]
            (small if scaled[high] < 1.0 else large).append(high)
        self.keep = torch.tensor(keep, dtype=torch.float64)
        self.other = torch.tensor(other, dtype=torch.int64)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        place = _below(count, len(self.keep), generator)
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return torch.where(uniform < self.keep[place], place, self.other[place])


def double(
    z: torch.Tensor,
    pool: Pool,
    scale: float,
    trials: int,
    *,
    seed: int,
    repeats: bool = True,
    progress: Progress | None = None,
) -> tuple[int, Pool]:
    """Try to merge independent pairs of tuples; return how many of the trials were accepted, and these as a pool.

    A trial accepts with probability exp(−r‖u − v‖²/(2s)); with E exponential, that is r‖u − v‖²/(2s) <= E.

    Args:
        z: records, float32 (n, d), distance mostly in the first coordinates.
        pool: r-tuples.
        scale: s.
        trials: T, fixed beforehand.
        seed: of the trials.
        repeats: whether both tuples may share records.
        progress: told (trials done, trials in all).
    """
    r, width = pool.size, z.shape[1]
    bounds = [min(head, width) for head in _HEADS]
    factor = r / (2.0 * scale)
    members = pool.members.long()
    if r == 2:
        heads = [z[:, : bounds[0]].contiguous(), z[:, : bounds[1]].contiguous()]
    else:
        heads = [_means(z[:, : bounds[0]].contiguous(), members), _means(z[:, : bounds[1]].contiguous(), members)]
    alias = None if pool.rows is None else _Alias(pool.rows)
    counter = Counter(progress, trials)

    def pick(count: int, generator: torch.Generator) -> torch.Tensor:
        if alias is None or pool.starts is None:
            return _below(count, len(members), generator)
        row = alias.draw(count, generator)
        first = pool.starts[row]
        own = (pool.starts[row + 1] - first).double()
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return first + torch.minimum((uniform * own).long(), own.long() - 1)

    def head_distance(level: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        table = heads[level]
        if r == 2:
            x, y = members[a], members[b]
            difference = table[x[:, 0]] + table[x[:, 1]]
            difference -= table[y[:, 0]]
            difference -= table[y[:, 1]]
            return difference.square_().sum(dim=1).mul_(0.25)
        return (table[a] - table[b]).square_().sum(dim=1)

    def run(chunks: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        found = []
        for index in chunks:
            count = min(_TRIALS, trials - index * _TRIALS)
            generator = torch.Generator().manual_seed(stream_seed(seed, r, index))
            a, b = pick(count, generator), pick(count, generator)
            uniform = torch.rand(count, generator=generator, dtype=torch.float64)
            limit = uniform.neg_().log1p_().neg_() / factor  # an exponential variable, to the last bit
            for level in range(len(bounds)):
                alive = (head_distance(level, a, b).double() * _HEAD_SAFETY <= limit).nonzero()[:, 0]
                a, b, limit = a[alive], b[alive], limit[alive]
            if len(a):
                distance = torch.cat(
                    [
                        (_means(z, members[a[i : i + 4096]]).double() - _means(z, members[b[i : i + 4096]]).double())
                        .square()
                        .sum(dim=1)
                        for i in range(0, len(a), 4096)
                    ]
                )
                alive = (distance * _HEAD_SAFETY <= limit).nonzero()[:, 0]
                merged = torch.cat([pool.members[a[alive]], pool.members[b[alive]]], dim=1)
                if not repeats and len(merged):
                    ordered = merged.sort(dim=1).values
                    merged = merged[(ordered[:, 1:] != ordered[:, :-1]).all(dim=1)]
                found.append((index, merged))
            counter.add(count)
        return found

    parts = [item for hand in shared_out(run, list(range(-(-trials // _TRIALS))), z.device) for item in hand]
    parts.sort(key=lambda item: item[0])
    accepted = torch.cat([merged for _, merged in parts]) if parts else pool.members.new_empty((0, 2 * r))
    return len(accepted), Pool(members=accepted, largest_weight=1.0 / max(1, len(accepted)))


def _means(z: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Means of tuples of rows, (N, d)."""
    result = z[members[:, 0]].clone()
    for column in range(1, members.shape[1]):
        result += z[members[:, column]]
    return result.div_(members.shape[1])
