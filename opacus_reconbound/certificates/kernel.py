"""Sums of Gaussian kernels over all pairs of records, in tiles: the hot loop of the replica certificate.

For temperatures ε the kernels are k_ε(x, y) = exp(−c(x, y)/ε) with c = ‖x − y‖²/2. Distances are computed once for
all temperatures; where 2ε is a temperature too, k_ε is the square of k_2ε. Nothing grows as the number of pairs.

Arithmetic. Distances are float32 with inner products summed in pieces of at most 256 terms, so that each cost is
within ``cost_error`` of the exact one; kernels and sums of up to 512 terms are float32, longer sums float64, together
within a relative ``SUM_ERROR``.

Order. Sums over tiles come in groups of rows of tiles that depend on n alone, and are added in a fixed order, so
neither the number of threads nor that of processes changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from opacus_reconbound.certificates.devices import float64_device, rows_at_once, to_float64
from opacus_reconbound.certificates.parallel import Counter, Progress, in_order
from opacus_reconbound.certificates.ranks import current_ranks
from opacus_reconbound.units import nats_to_bits

__all__ = ["SUM_ERROR", "KernelLadder", "cost_error", "costs", "log_kernel_means", "pair_sums", "strict_float32"]

# exp and its argument (87 + 16) u, at most five squarings 32·2 u, a tile's sum 512 u, the weights u; u = 2^-24
SUM_ERROR = 1e-4
_UNIT_ROUNDOFF = 2.0**-24
_LOG2_E = nats_to_bits(1.0)
_PIECE = 256
_TILE = 512
_GROUPS = 24  # of rows of tiles: equal shares for 2, 3, 4, 6, 8, 12 and 24 processes


@contextmanager
def strict_float32() -> Iterator[None]:
    """Full float32 products, whatever is set around (TF32, bfloat16 and autocast would break the bound)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with ExitStack() as stack:
            for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def cost_error(dimension: int, largest_square_norm: float) -> float:
    """Upper bound on |computed c − exact c| for vectors of at most this squared norm (Higham 2002, section 3.1).

    A piece of p terms is within p u ‖x‖‖y‖; a partial sum is at most 2 max ‖x‖², so adding each piece costs two units;
    the half norms, the subtraction of the nearest and the rounding of the vectors themselves to float32 a few more.
    """
    pieces = -(-dimension // _PIECE)
    terms = min(dimension, _PIECE) + 2 * pieces + 16
    return 1.01 * terms * _UNIT_ROUNDOFF * largest_square_norm


@dataclass(frozen=True)
class KernelLadder:
    """How to get the kernels of all temperatures from few exponentials.

    Attributes:
        temperatures: ε, distinct, in decreasing order.
        parents: for each, the position of 2ε whose square it is, or None for an exponential of its own.
    """

    temperatures: tuple[float, ...]
    parents: tuple[int | None, ...]

    @classmethod
    def plan(cls, temperatures: Sequence[float]) -> KernelLadder:
        """Order the temperatures and find the halvings; chains have at most five squarings."""
        ordered = tuple(sorted(set(temperatures), reverse=True))
        parents: list[int | None] = []
        depth: list[int] = []
        for epsilon in ordered:
            twice = [
                i
                for i, other in enumerate(ordered)
                if abs(other / (2.0 * epsilon) - 1.0) < 1e-14 and i not in parents  # a parent has one child
            ]
            parent = twice[0] if twice and depth[twice[0]] < 5 else None
            parents.append(parent)
            depth.append(0 if parent is None else depth[parent] + 1)
        return cls(ordered, tuple(parents))

    def kernels(self, cost: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, kernel) chain by chain; a yielded tensor is overwritten when the next one is asked for."""
        children = {parent: i for i, parent in enumerate(self.parents) if parent is not None}
        buffer = torch.empty_like(cost)
        for root, parent in enumerate(self.parents):
            if parent is not None:
                continue
            # base 2: on a CPU exp2 takes a quarter of the time of exp, and far less where the result underflows
            torch.mul(cost, -_LOG2_E / self.temperatures[root], out=buffer)
            buffer.exp2_()
            yield root, buffer
            position = root
            while position in children:
                position = children[position]
                buffer.square_()
                yield position, buffer


def costs(x: torch.Tensor, y: torch.Tensor, half_x: torch.Tensor, half_y: torch.Tensor) -> torch.Tensor:
    """‖x − y‖²/2 for all pairs, float32, never negative; ``cost_error`` is about this arithmetic."""
    out = half_x[:, None] + half_y[None, :]
    for start in range(0, x.shape[1], _PIECE):
        out.addmm_(x[:, start : start + _PIECE], y[:, start : start + _PIECE].T, beta=1.0, alpha=-1.0)
    return out.clamp_(min=0.0)


def half_square_norms(z: torch.Tensor) -> torch.Tensor:
    """‖z‖²/2 per row, in float64 arithmetic, rounded to float32."""
    rows = rows_at_once(z.shape[1])
    # filled in place: small results kept between large temporaries would fragment the heap
    result = torch.empty(len(z), dtype=torch.float64, device=float64_device(z.device))
    for start in range(0, len(z), rows):
        result[start : start + rows] = to_float64(z[start : start + rows]).square().sum(dim=1)
    return (0.5 * result).to(torch.float32).to(z.device)


def pair_sums(
    z: torch.Tensor, weights: torch.Tensor, ladder: KernelLadder, progress: Progress | None = None
) -> torch.Tensor:
    """S_gi = (1/n) Σ_{j≠i} w_gj exp(−‖z_i − z_j‖²/(2 ε_g)) for all temperatures in one sweep over tiles.

    Args:
        z: records, float32 (n, m).
        weights: w >= 0, float32 (G, n), in the order of ``ladder.temperatures``.
        ladder: the temperatures.
        progress: told (tiles done, tiles in all), of this process.

    Returns:
        S, float64 (G, n), on the device or, where that has no float64, on the host.
    """
    n, home, ranks = len(z), float64_device(z.device), current_ranks()
    half, weights = half_square_norms(z), weights.to(z.device)
    tiles = -(-n // _TILE)
    groups = _groups(tiles)
    mine = [(k, row) for k, rows in enumerate(groups) if ranks.owns(k) for row in rows]
    counter = Counter(progress, sum(tiles - row for _, row in mine))

    def row_of_tiles(item: tuple[int, int]) -> torch.Tensor:
        """What the tiles from the diagonal to the right add to the sums, from their first record on."""
        first = item[1] * _TILE
        rows = slice(first, first + _TILE)
        x, half_x, w_x = z[rows], half[rows], weights[:, rows]
        sums = torch.zeros((len(weights), n - first), dtype=torch.float64, device=home)
        for j in range(first, n, _TILE):
            columns = slice(j, j + _TILE)
            cost = costs(x, z[columns], half_x, half[columns])
            if j == first:
                cost.fill_diagonal_(torch.inf)
            across = torch.empty_like(w_x)
            down = torch.empty_like(weights[:, columns])
            for g, kernel in ladder.kernels(cost):
                across[g] = torch.mv(kernel, weights[g, columns])
                if j != first:
                    down[g] = torch.mv(kernel.T, w_x[g])
            sums[:, : len(x)] += to_float64(across)
            if j != first:
                sums[:, j - first : j - first + down.shape[1]] += to_float64(down)
            counter.add()
        return sums

    total = torch.zeros(weights.shape, dtype=torch.float64, device=home)
    found: dict[int, torch.Tensor] = {}
    with strict_float32():
        for (k, row), sums in zip(mine, in_order(row_of_tiles, mine, z.device, counter), strict=True):
            group = found.setdefault(k, torch.zeros_like(total))
            group[:, row * _TILE :] += sums
            if ranks.size == 1 and row == groups[k][-1]:
                total += found.pop(k)
    if ranks.size > 1:
        for k in range(len(groups)):
            group = found.pop(k) if k in found else torch.zeros_like(total)
            ranks.broadcast(group, k % ranks.size)
            total += group
    return total / n


def _groups(tiles: int) -> list[list[int]]:
    """Rows of tiles in groups of about equally many tiles, the long rows with the short ones; none is empty."""
    groups: list[list[int]] = [[] for _ in range(_GROUPS)]
    for row in range(tiles):
        groups[min(row, tiles - 1 - row) % _GROUPS].append(row)
    return [group for group in groups if group]


def log_kernel_means(
    z: torch.Tensor,
    points: torch.Tensor,
    weights: torch.Tensor,
    ladder: KernelLadder,
    progress: Progress | None = None,
    chunk: int = 256,
) -> torch.Tensor:
    """Ln (1/n) Σ_k w_gk exp(−‖z − p_k‖²/(2 ε_g)), in the log domain: finite however far z is from every point.

    Args:
        z: records, float32 (N, m).
        points: p, float32 (n, m).
        weights: w > 0, float32 (G, n).
        ladder: the temperatures.
        progress: told (records done, records in all), of this process.
        chunk: records at a time.

    Returns:
        float64 (G, N), on the device or, where that has no float64, on the host.
    """
    home, ranks = float64_device(z.device), current_ranks()
    half_z, half_p, weights = half_square_norms(z), half_square_norms(points), weights.to(z.device)
    result = torch.zeros((len(ladder.temperatures), len(z)), dtype=torch.float64, device=home)
    mine = list(range(0, len(z), chunk))[ranks.rank :: ranks.size]
    counter = Counter(progress, sum(len(z[start : start + chunk]) for start in mine))

    def evaluate(start: int) -> None:
        rows = slice(start, start + chunk)
        cost = costs(z[rows], points, half_z[rows], half_p)
        nearest = cost.min(dim=1, keepdim=True).values
        cost -= nearest
        for g, kernel in ladder.kernels(cost):
            total = torch.zeros(len(cost), dtype=torch.float64, device=home)
            for first in range(0, len(points), _TILE):
                piece = slice(first, first + _TILE)
                total += to_float64(torch.mv(kernel[:, piece], weights[g, piece]))
            result[g, rows] = (total / len(points)).log() - to_float64(nearest[:, 0]) / ladder.temperatures[g]
        counter.add(len(cost))

    with strict_float32():
        for _ in in_order(evaluate, mine, z.device, counter):
            pass
    ranks.add_up(result)
    return result
