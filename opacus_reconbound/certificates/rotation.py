"""The orthogonal map in front of the blocks: a Hadamard matrix over the held-out eigenbasis.

U = M^{−1/2} H_M Vᵀ (paper, Section 3 and Remark C.1), V the eigenvectors of the reference covariance, so that every
rotated coordinate mixes all eigendirections equally and every block carries the same variance. A dimension without
a Hadamard matrix at hand is padded with zero coordinates, which changes no squared error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from opacus_reconbound import _validate
from opacus_reconbound.certificates.devices import float64_device, to_float64
from opacus_reconbound.errors import DataError, InvalidValueError

__all__ = ["Rotation", "fast_hadamard", "hadamard_order"]

_PALEY = (28, 12)  # orders that Sylvester's construction lacks, in the order of the Kronecker product
_MOST_PALEY = 2  # factors of them in one order
_SYLVESTER = 64  # the largest power of two multiplied as one dense factor
_WORK_ELEMENTS = 2**22  # float64 numbers of one piece of the rotation


def hadamard_order(m: int) -> int:
    """Return the least order M ≥ m of a Hadamard matrix that this module builds.

    The orders are 2^a, 12·2^a, 28·2^a, 144·2^a, 336·2^a and 784·2^a: Sylvester's matrices, Paley's first
    construction (p = 11) of order 12 and his second (p = 13) of order 28, and Kronecker products of them with at
    most two Paley factors. More factors would give closer orders (32,256 = 12·12·28·8 for 31,872), but these
    are the documented ones: 784, 3072, 12,288 and 49,152 themselves, and 32,768 for the 31,872 features of LPIPS.

    Args:
        m: the dimension, at least 1.

    Returns:
        M, the dimension after padding with zero coordinates.
    """
    m = _validate.integer("m", m, minimum=1)
    bases = [1, *_PALEY, *(a * b for a in _PALEY for b in _PALEY)]
    return min(base << max(0, math.ceil(m / base) - 1).bit_length() for base in bases)


def fast_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply each row by H_M, in O(M log M) operations a row.

    H_M is a Kronecker product of matrices of order at most 64; each is applied along its own axis.

    Args:
        x: records, shape (n, M), M one of the orders of :func:`hadamard_order`, floating point.

    Returns:
        H_M x_i for each row x_i, shape (n, M), in the dtype and on the device of ``x``.

    Raises:
        InvalidValueError: if this module builds no Hadamard matrix of order M.
    """
    if x.ndim != 2:
        raise InvalidValueError(f"Expected records of shape (n, M). Found shape {tuple(x.shape)}.")
    for factor in reversed(_factors(x.shape[1])):
        matrix = factor.to(device=x.device, dtype=x.dtype)
        product = x.reshape(x.shape[0], -1, len(factor)) @ matrix.T
        x = product.transpose(1, 2).reshape(x.shape)  # the finished axis goes first; all of them come round
    return x


@dataclass(frozen=True, eq=False, kw_only=True)
class Rotation:
    """z ↦ U z with U of orthonormal columns, ‖U z‖ = ‖z‖.

    Attributes:
        dimension: d, the coordinates of a record.
        order: M ≥ d, the coordinates after padding.
        basis: V, the eigenvectors of the reference covariance as columns, shape (d, d), float64; None if data-free.
        signs: the random signs of a data-free rotation, shape (M,), float64; None with a basis.
    """

    dimension: int
    order: int
    basis: torch.Tensor | None = None
    signs: torch.Tensor | None = None

    @classmethod
    def fit(cls, reference: torch.Tensor, *, seed: int = 0) -> Rotation:
        """Fit U = M^{−1/2} H_M Vᵀ on held-out records, or U = M^{−1/2} H_M diag(signs) if they are fewer than d.

        Args:
            reference: records disjoint from the estimation sample, shape (n, d).
            seed: of the signs, where they are used.

        Returns:
            The rotation, on the device of ``reference``.

        Raises:
            DataError: if the records are not finite or not a matrix.
        """
        if reference.ndim != 2 or reference.shape[1] < 1:
            raise DataError(f"Expected reference records of shape (n, d). Found shape {tuple(reference.shape)}.")
        n, d = reference.shape
        if n < d or n < 2:
            return cls.data_free(d, seed=seed)
        covariance = _covariance(reference)
        if not bool(torch.isfinite(covariance).all()):
            raise DataError("Expected finite reference records. Found NaN or infinity; remove those records.")
        basis: torch.Tensor = torch.linalg.eigh(covariance).eigenvectors.flip(1)  # largest variance first
        largest = basis.abs().argmax(0, keepdim=True)
        return cls(dimension=d, order=hadamard_order(d), basis=basis * basis.gather(0, largest).sign())

    @classmethod
    def data_free(cls, dimension: int, *, seed: int = 0) -> Rotation:
        """U = M^{−1/2} H_M diag(signs), which looks at no record.

        Args:
            dimension: d, the coordinates of a record.
            seed: of the signs.
        """
        order = hadamard_order(dimension)
        generator = torch.Generator().manual_seed(seed)
        signs = 1.0 - 2.0 * torch.randint(2, (order,), generator=generator).to(torch.float64)
        return cls(dimension=dimension, order=order, signs=signs)

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Rotate records, in float64 inside and in bounded memory.

        Args:
            z: records, shape (n, d), floating point.

        Returns:
            U z_i as rows, shape (n, M), in the dtype and on the device of ``z``.

        Raises:
            InvalidValueError: if the records have another dimension.
        """
        if z.ndim != 2 or z.shape[1] != self.dimension:
            raise InvalidValueError(
                f"Expected records of shape (n, {self.dimension}), as fitted. Found shape {tuple(z.shape)}."
            )
        home = float64_device(z.device)
        basis = None if self.basis is None else self.basis.to(home)
        signs = None if self.signs is None else self.signs.to(home)
        out = z.new_empty(z.shape[0], self.order)
        rows = max(1, _WORK_ELEMENTS // self.order)
        for start in range(0, z.shape[0], rows):
            part = to_float64(z[start : start + rows])
            if basis is not None:
                part = part @ basis
            part = torch.nn.functional.pad(part, (0, self.order - self.dimension))
            if signs is not None:
                part = part * signs
            out[start : start + rows] = fast_hadamard(part) / math.sqrt(self.order)
        return out


def _covariance(records: torch.Tensor) -> torch.Tensor:
    """The sample covariance in float64, shape (d, d), a slice of the records at a time."""
    home = float64_device(records.device)
    n, d = records.shape
    rows = max(1, _WORK_ELEMENTS // d)
    slices = [records[start : start + rows] for start in range(0, n, rows)]
    mean = torch.stack([to_float64(part).sum(0) for part in slices]).sum(0) / n
    total = torch.zeros(d, d, dtype=torch.float64, device=home)
    for part in slices:
        centred = to_float64(part) - mean
        total += centred.T @ centred
    return total / n


def _factors(order: int) -> list[torch.Tensor]:
    """The Kronecker factors of H_M, left to right."""
    factors: list[torch.Tensor] = []
    rest = order
    for paley in _PALEY:
        while rest % paley == 0 and len(factors) < _MOST_PALEY:
            factors.append(_paley(paley))
            rest //= paley
    if rest < 1 or rest & (rest - 1):
        raise InvalidValueError(
            f"Expected an order of the form 2^a times at most two of 12 and 28. Found {order}. "
            f"Pad with zero coordinates to hadamard_order({order})."
        )
    while rest > 1:
        power = min(rest, _SYLVESTER)
        factors.append(_sylvester(power))
        rest //= power
    return factors


@lru_cache
def _sylvester(order: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(matrix, two)
    return matrix


@lru_cache
def _paley(order: int) -> torch.Tensor:
    """Paley's matrices of order 12 (first construction, p = 11) and 28 (second, p = 13)."""
    p = {12: 11, 28: 13}[order]
    squares = {i * i % p for i in range(1, p)}
    character = [0.0] + [1.0 if i in squares else -1.0 for i in range(1, p)]
    conference = torch.ones(p + 1, p + 1, dtype=torch.float64)
    conference[0, 0] = 0.0
    for i in range(p):
        for j in range(p):
            conference[i + 1, j + 1] = character[(i - j) % p]
    identity = torch.eye(p + 1, dtype=torch.float64)
    if p % 4 == 3:
        conference[1:, 0] = -1.0
        return identity + conference
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(conference, plus) + torch.kron(identity, minus)
