"""Data in, certificate out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from opacus_reconbound import _validate
from opacus_reconbound.certificates.auto import choose_kinds, multi_designs
from opacus_reconbound.certificates.block import block_estimates, default_pairs
from opacus_reconbound.certificates.certificate import SourceCertificate
from opacus_reconbound.certificates.designs import Design
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics
from opacus_reconbound.certificates.parallel import Progress
from opacus_reconbound.certificates.replica import DEFAULT_TEMPERATURES, replica_estimates
from opacus_reconbound.certificates.rotation import hadamard_order
from opacus_reconbound.certificates.scale import TraceScale, trace_point, trace_upper
from opacus_reconbound.certificates.split import record_digests, refuse_overlap, summarise
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import Pixels, Representation

__all__ = ["ASSUMPTIONS", "certify", "library_version"]

ASSUMPTIONS = (
    "The training records are i.i.d. draws of the source that the reference and estimation samples were drawn from.",
    "The representation and all preprocessing are fixed independently of the training records.",
    "Every training step is a Poisson-subsampled Gaussian step with the recorded sample rate and noise multiplier.",
    "Every trajectory on the training records that an adversary may see is counted in the leakage.",
    "The bound is on the expected error over the source; a single record can be reconstructed better.",
)
_LEAST_REFERENCE = 32
_LEAST_ESTIMATION = 100
_CHUNK = 1024

Designs = Literal["fast", "auto", "replica", "multi", "block", "all"]
_KINDS: dict[str, tuple[str, ...]] = {
    "fast": ("replica",),
    "auto": ("auto",),
    "replica": ("replica",),
    "multi": ("multi",),
    "block": ("block",),
    "all": ("replica", "block"),
}


def certify(
    reference: Any,
    estimation: Any,
    *,
    representation: Representation | None = None,
    designs: Designs | Sequence[str] = "fast",
    alpha: float = 0.05,
    seed: int = 0,
    normaliser: Literal["point", "ucb"] | float = "point",
    trace_level: float = 0.05,
    temperatures: Sequence[float] = DEFAULT_TEMPERATURES,
    pairs: Sequence[tuple[int, float]] | None = None,
    margins: Literal["bernstein", "paper"] = "bernstein",
    max_reference: int = 10_000,
    allow_repeats: bool = False,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> SourceCertificate:
    """Certify how uncertain the records of a source are, from two disjoint samples of it.

    The reference sample (D_perp) fixes everything that is chosen: centre, scale, potentials, rotation. The estimation
    sample (D_est) is then measured once. The result holds with probability at least 1 − alpha over the samples, for
    every leakage at once.

    Args:
        reference: D_perp, records (n', ...): an array, a memory-mapped array or a tensor.
        estimation: D_est, records (n, ...), i.i.d. from the same source and disjoint from ``reference``. The more the
            tighter.
        representation: Ψ; ``Pixels()`` (8-bit raw values) unless given.
        designs: ``"fast"`` (two replicas), ``"auto"`` (the kinds that a pilot on the reference sample chooses, many
            replicas among them: the tightest, in minutes), ``"multi"`` (many replicas), ``"block"`` (the paper's),
            ``"all"`` (two replicas and blocks), or a sequence of kinds. α is shared equally among kinds.
        alpha: probability with which the certificate may fail.
        seed: of everything random.
        normaliser: what ρ* is relative to: ``"point"`` (tr Σ̂), ``"ucb"`` (an upper bound on tr Σ, at the joint
            confidence 1 − alpha − trace_level) or a declared tr Σ in squared data units.
        trace_level: δ of the upper bound on tr Σ.
        temperatures: of the replica designs, in units of tr Σ.
        pairs: (block size, ν²) of the block designs; the paper's grid unless given.
        margins: of the block designs: ``"bernstein"`` (fast, tighter) or ``"paper"`` (Cantelli, quadratic cost).
        max_reference: reference records beyond this number serve tr Σ only.
        allow_repeats: accept equal records in both samples, as independent draws of a source that repeats values.
        device: where to compute.
        progress: show progress bars (only on a terminal).

    Raises:
        InvalidValueError: an option is out of range.
        DataError: the records are empty, too few, not finite, constant, of the wrong shape or range.
        OverlapError: the two samples share records.
    """
    alpha = _validate.fraction("alpha", alpha)
    trace_level = _validate.fraction("trace_level", trace_level)
    seed = _validate.integer("seed", seed, maximum=2**63 - 1)
    max_reference = _validate.integer("max_reference", max_reference, minimum=_LEAST_REFERENCE)
    kinds = _chosen(designs)
    ladder = tuple(_validate.positive("temperatures", value) for value in temperatures)
    if "replica" in kinds and (not ladder or len(set(ladder)) != len(ladder)):
        raise InvalidValueError(f"Expected distinct temperatures. Found {list(temperatures)!r}.")
    psi = Pixels() if representation is None else representation
    raw_reference = _records("reference", reference, _LEAST_REFERENCE)
    raw_estimation = _records("estimation", estimation, _LEAST_ESTIMATION)
    if raw_reference.shape[1:] != raw_estimation.shape[1:]:
        raise DataError(
            f"The two samples have records of different shapes: reference {raw_reference.shape[1:]}, estimation "
            f"{raw_estimation.shape[1:]}."
        )
    if raw_reference.dtype != raw_estimation.dtype:
        raise DataError(
            f"The two samples have different types: reference {raw_reference.dtype}, estimation "
            f"{raw_estimation.dtype}. Store both in the same type, so that shared records can be recognised."
        )
    reference_digests, estimation_digests = record_digests(raw_reference), record_digests(raw_estimation)
    if not allow_repeats:
        refuse_overlap(reference_digests, estimation_digests)

    z_reference = _represent("reference", raw_reference, psi, device)
    z_estimation = _represent("estimation", raw_estimation, psi, device)
    descriptor = psi.describe(tuple(raw_reference.shape[1:]))
    centre, scale = trace_point(z_reference)
    upper, pair_count = trace_upper(
        z_reference, level=trace_level, squared_diameter=descriptor.squared_diameter, seed=seed
    )
    trace = TraceScale(
        scale=scale,
        upper=upper,
        level=trace_level,
        pairs=pair_count,
        squared_diameter=descriptor.squared_diameter,
        normaliser=normaliser if isinstance(normaliser, str) else "declared",
        declared=None if isinstance(normaliser, str) else _validate.positive("normaliser", normaliser),
    )
    for z in (z_reference, z_estimation):
        _normalise(z, centre, scale)

    z_reference = z_reference[:max_reference]
    grid = tuple(pairs) if pairs is not None else default_pairs(hadamard_order(descriptor.dimension))
    settings: dict[str, Any] = {"max_reference": max_reference}
    if kinds == ("auto",):
        with _bar("pilot on the reference sample", progress) as report:
            kinds = choose_kinds(z_reference, len(z_estimation), grid=grid, level=alpha, seed=seed, progress=report)
        settings["chosen"] = list(kinds)
    shares = _shares(kinds, alpha)
    found: list[Design] = []
    parts: list[DesignDiagnostics | None] = []
    for kind in kinds:
        with _bar(f"{kind} designs", progress) as report:
            if kind == "replica":
                settings["temperatures"] = list(ladder)
                replicas = replica_estimates(
                    z_reference, z_estimation, level=shares[kind], temperatures=ladder, progress=report
                )
                found += [estimate.design for estimate in replicas]
                parts += [estimate.diagnostics for estimate in replicas]
            elif kind == "multi":
                plan, designs_found = multi_designs(
                    z_reference,
                    z_estimation,
                    sampling_level=shares["multi"],
                    monte_carlo_level=shares["multi_monte_carlo"],
                    seed=seed,
                    progress=report,
                )
                settings["multi"] = [[s, m, list(trials)] for s, m, trials in plan]
                found += designs_found
                parts += [None] * len(designs_found)
            else:
                settings["pairs"] = [[k, nu2] for k, nu2 in grid]
                settings["margins"] = margins
                blocks = block_estimates(
                    z_reference,
                    z_estimation,
                    pairs=grid,
                    level=shares[kind],
                    margins=margins,
                    seed=seed,
                    device=device,
                    progress=report,
                )
                found += [estimate.design() for estimate in blocks]
                parts += [estimate.diagnostics for estimate in blocks]
    assumptions: tuple[str, ...] = ASSUMPTIONS
    if allow_repeats:
        assumptions += ("Equal records in the two samples are independent draws of a source that repeats values.",)
    return SourceCertificate(
        designs=tuple(found),
        diagnostics=tuple(parts),
        trace=trace,
        representation=descriptor,
        reference=summarise(reference_digests),
        estimation=summarise(estimation_digests),
        alpha=alpha,
        alpha_split=shares,
        seed=seed,
        settings=settings,
        assumptions=assumptions,
        library_version=library_version(),
    )


def _chosen(designs: str | Sequence[str]) -> tuple[str, ...]:
    names = _KINDS.get(designs) if isinstance(designs, str) else tuple(dict.fromkeys(designs))
    if not names or not (set(names) <= {"replica", "multi", "block"} or names == ("auto",)):
        raise InvalidValueError(
            f"Expected designs to be 'fast', 'auto', 'replica', 'multi', 'block', 'all' or a sequence of 'replica', "
            f"'multi' and 'block'. Found {designs!r}."
        )
    return names


def _shares(kinds: Sequence[str], alpha: float) -> dict[str, float]:
    """α in equal shares for the kinds; of the many-replica share a tenth of α at most goes to its Monte Carlo."""
    shares = dict.fromkeys(kinds, alpha / len(kinds))
    if "multi" in shares:
        monte_carlo = 0.1 * alpha / len(kinds)
        shares["multi"] -= monte_carlo
        shares["multi_monte_carlo"] = monte_carlo
    return shares


def _records(name: str, records: Any, least: int) -> NDArray[np.generic]:
    """Records as a numeric array with one record in each entry; nothing is copied where it can be helped."""
    if isinstance(records, np.ma.MaskedArray):
        raise DataError(f"The {name} records are a masked array, and masks are not read. Fill or drop masked records.")
    if isinstance(records, torch.Tensor):
        records = records.detach().cpu()
        records = (records.float() if records.dtype == torch.bfloat16 else records).numpy()
    try:
        array: NDArray[np.generic] = np.asanyarray(records)
    except ValueError as error:
        raise DataError(f"The {name} records do not form one array (n, ...): {error}.") from error
    if array.dtype.kind not in "uifb":
        raise DataError(f"Expected the {name} records to be real numbers. Found an array of type {array.dtype}.")
    if array.ndim < 2:
        raise DataError(
            f"Expected the {name} records as an array (n, ...), one record for each entry. Found shape {array.shape}."
        )
    if len(array) < least:
        raise DataError(
            f"The {name} sample has {len(array)} records; at least {least} are needed, and thousands for a useful "
            "bound."
        )
    if array[0].size == 0:
        raise DataError(f"The {name} records are empty: shape {array.shape}.")
    return array


def _represent(
    name: str, records: NDArray[np.generic], psi: Representation, device: str | torch.device
) -> torch.Tensor:
    """Ψ of all records, float32 (n, m) on the device, a chunk at a time; everything checked for finiteness."""
    psi = psi.to(device).eval()
    dimension = psi.describe(tuple(records.shape[1:])).dimension
    result = torch.empty((len(records), dimension), dtype=torch.float32, device=device)
    for start in range(0, len(records), _CHUNK):
        chunk = np.array(records[start : start + _CHUNK])
        if chunk.dtype.kind == "f":
            finite = np.isfinite(chunk.reshape(len(chunk), -1)).all(axis=1)
            if not finite.all():
                raise DataError(
                    f"{name}[{start + int(np.argmin(finite))}] holds NaN or infinite values. Remove or repair such "
                    "records before certifying."
                )
            if chunk.dtype.itemsize > 8 or not chunk.dtype.isnative:
                chunk = chunk.astype(np.float64)
        elif chunk.dtype.kind == "b":
            chunk = chunk.astype(np.uint8)
        elif chunk.dtype.kind in "ui" and chunk.dtype.itemsize > 1:
            chunk = chunk.astype(np.float64)
        batch = torch.from_numpy(chunk)
        psi.check(batch)
        with torch.no_grad():
            vectors = psi(batch.to(device))
        if vectors.shape != (len(chunk), dimension):
            raise DataError(
                f"The representation must map (n, ...) to (n, m), m = {dimension} by its description. It mapped "
                f"{tuple(batch.shape)} to {tuple(vectors.shape)}."
            )
        if not bool(torch.isfinite(vectors).all()):
            raise DataError(f"The representation is not finite on {name}[{start}:{start + len(chunk)}].")
        result[start : start + len(chunk)] = vectors
    return result


def _normalise(z: torch.Tensor, centre: torch.Tensor, scale: float) -> None:
    """Centre and scale in place, so that tr Σ̂ of the reference sample is 1."""
    for start in range(0, len(z), _CHUNK):
        rows = slice(start, start + _CHUNK)
        z[rows] = ((z[rows].double() - centre) / scale**0.5).to(torch.float32)


class _bar:  # noqa: N801 - used as a function
    """A progress bar as a context manager that hands out a ``Progress`` callback; silent off a terminal."""

    def __init__(self, title: str, show: bool) -> None:
        self._bar = tqdm(
            total=100,
            desc=title,
            disable=None if show else True,
            file=sys.stderr,
            bar_format="{l_bar}{bar}| [{elapsed}<{remaining}]",
        )

    def __enter__(self) -> Progress:
        def report(done: int, total: int) -> None:
            share = 100 * done // max(1, total)
            if share > self._bar.n:
                self._bar.update(share - self._bar.n)

        return report

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def library_version() -> str:
    """The installed version of this library."""
    try:
        return version("opacus-reconbound")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"
