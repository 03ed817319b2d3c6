"""Fewer coordinates for a wide representation: the top principal ones of the reference sample.

Dropping coordinates of an orthonormal basis only lowers squared distances. For every attack ẑ on z and W with
‖W‖₂ <= 1, Wᵀẑ is an attack on Wᵀz with no larger error, so a lower bound for Wᵀz is one for z: designs made from Wᵀz
hold for the full representation, and ρ* stays relative to its full tr Σ. The variance that is dropped is lost from
the bound. W depends on D_perp alone.

Arithmetic. W is orthonormalised in float64 and shrunk by 2^-24. ‖WᵀW − 1‖ before that is measured, to
within m k 2^-53, and refused above 2^-25, so ‖W‖₂ <= 1. Products are float64: Wᵀz is off by at most m √k 2^-53 ‖z‖, and
is then stored in float32 as every vector is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from opacus_reconbound.certificates.cache import FeatureCache
from opacus_reconbound.certificates.devices import float64_device, rows_at_once, to_float64
from opacus_reconbound.errors import DataError
from opacus_reconbound.representations.base import tensor_digest

__all__ = ["AUTO_ABOVE", "AUTO_ABOVE_BYTES", "AUTO_COMPONENTS", "Reduction", "fit_reduction"]

AUTO_ABOVE = 4_096
"""Representations with more coordinates than this are reduced unless told otherwise,"""
AUTO_ABOVE_BYTES = 3 * 2**30
"""where all vectors together would take more memory than this."""
AUTO_COMPONENTS = 2_048
"""Coordinates that are kept then."""

_FITTED_ON = 5_000  # records: an eigenproblem of that order
_SHRINK = 2.0**-24


@dataclass(frozen=True, eq=False, kw_only=True)
class Reduction:
    """z ↦ Wᵀz, W of (nearly) orthonormal columns, ‖W‖₂ <= 1.

    Attributes:
        basis: W, float64 (m, k).
        fitted_on: reference records behind it.
        variance_kept: share of tr Σ̂ of the reference sample that remains.
    """

    basis: torch.Tensor
    fitted_on: int
    variance_kept: float

    @property
    def components(self) -> int:
        """k."""
        return int(self.basis.shape[1])

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Wᵀz as rows, float32 (n, k), on the device of ``z``; float64 inside, some rows at a time."""
        basis = self.basis.to(float64_device(z.device))
        out = z.new_empty((len(z), self.components), dtype=torch.float32)
        step = rows_at_once(z.shape[1], 256)
        for start in range(0, len(z), step):
            out[start : start + step] = (to_float64(z[start : start + step]) @ basis).to(torch.float32)
        return out

    def settings(self, seed: int) -> dict[str, Any]:
        """What the certificate states; the basis itself is not stored."""
        return {
            "kind": "principal coordinates of the reference sample",
            "components": self.components,
            "of": int(self.basis.shape[0]),
            "fitted_on": self.fitted_on,
            "variance_kept": round(self.variance_kept, 6),
            "seed": seed,
            "digest": tensor_digest({"basis": self.basis}),
        }


def fit_reduction(
    reference: torch.Tensor, components: int, *, seed: int, cache: FeatureCache, key: str
) -> tuple[Reduction, torch.Tensor]:
    """The top principal coordinates of the reference sample, from the Gram matrix of at most 5,000 of its records.

    Args:
        reference: D_perp, centred, float32 (n, m).
        components: k; at most one less than the records that it is fitted on.
        seed: of the choice among more records.
        cache: to keep the basis in.
        key: names the reference vectors there.

    Returns:
        The reduction, and the reduced reference sample, float32 (n, k).

    Raises:
        DataError: the reference sample is smaller than that many coordinates.
    """
    n, dimension = reference.shape
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:_FITTED_ON].sort().values
    if components >= len(chosen):
        raise DataError(
            f"reduction = {components} needs more than that many reference records, at most {_FITTED_ON} of which are "
            f"used. Found {n}. Ask for fewer coordinates, or give more records."
        )
    name = cache.key("reduction", key, str(components), str(seed))
    basis = cache.load(name, (dimension, components))
    if basis is None:
        basis = _principal(reference, chosen.to(reference.device), components)
        cache.store(name, basis)
    found = Reduction(basis=basis, fitted_on=len(chosen), variance_kept=1.0)
    reduced = found.apply(reference)
    share = min(1.0, _square_sum(reduced) / _square_sum(reference))
    return Reduction(basis=basis, fitted_on=len(chosen), variance_kept=share), reduced


def _square_sum(z: torch.Tensor) -> float:
    step = rows_at_once(z.shape[1])
    return math.fsum(float(to_float64(z[start : start + step]).square_().sum()) for start in range(0, len(z), step))


def _principal(reference: torch.Tensor, chosen: torch.Tensor, components: int) -> torch.Tensor:
    """Orthonormal columns that span the chosen records' top principal directions, largest variance first, shrunk.

    Single precision decides which directions these are; being orthonormal is a matter of float64.
    """
    home = float64_device(reference.device)
    dimension = reference.shape[1]
    gram = torch.zeros((len(chosen), len(chosen)), dtype=torch.float64, device=home)
    step = rows_at_once(len(chosen))
    for start in range(0, dimension, step):
        part = reference[:, start : start + step][chosen]
        gram += to_float64(part @ part.T)
    top = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :components].to(reference)
    del gram
    basis = torch.empty((dimension, components), dtype=torch.float64, device=home)
    for start in range(0, dimension, step):
        basis[start : start + step] = to_float64(reference[:, start : start + step][chosen].T @ top)
    basis /= basis.norm(dim=0).clamp(min=1e-300)
    if not _orthonormalise(basis):
        basis = torch.linalg.qr(basis).Q
    excess = _excess(basis)
    if not excess < 0.5 * _SHRINK:
        raise DataError(
            f"The principal coordinates could not be made orthonormal (off by {excess:.1e}). Ask for fewer coordinates "
            "with reduction=, or for none with reduction=None."
        )
    basis *= 1.0 - _SHRINK
    return basis


def _orthonormalise(basis: torch.Tensor) -> bool:
    """Cholesky's QR twice, in place, which needs no second copy; False where the columns are too nearly dependent.

    Twice gives orthonormal columns to a few units of rounding wherever the first Cholesky factor exists and is not
    too ill-conditioned (Yamamoto et al. 2015); the caller measures it.
    """
    step = rows_at_once(basis.shape[1])
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(basis.T @ basis)
        if int(failed) or float(factor.diagonal().min()) < 1e-5:
            return False
        for start in range(0, len(basis), step):
            rows = basis[start : start + step]
            rows.copy_(torch.linalg.solve_triangular(factor.T, rows, upper=True, left=False))
    return True


def _excess(basis: torch.Tensor) -> float:
    """‖WᵀW − 1‖_F."""
    gram = basis.T @ basis
    gram.diagonal().sub_(1.0)
    return float(gram.norm())
