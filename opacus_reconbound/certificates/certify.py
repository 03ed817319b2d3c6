"""Data in, certificate out."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from opacus_reconbound import _validate
from opacus_reconbound.certificates.auto import choose_kinds, multi_designs
from opacus_reconbound.certificates.block import block_estimates, default_pairs
from opacus_reconbound.certificates.cache import FeatureCache
from opacus_reconbound.certificates.certificate import SourceCertificate
from opacus_reconbound.certificates.checkpoint import Checkpoint, Finished, differences
from opacus_reconbound.certificates.designs import Design
from opacus_reconbound.certificates.devices import (
    float64_device,
    host_by_default,
    rows_at_once,
    to_device,
    to_float64,
    usable_device,
)
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics
from opacus_reconbound.certificates.parallel import Progress, one_tensor_thread
from opacus_reconbound.certificates.plan import Role, SplitPlan
from opacus_reconbound.certificates.ranks import Ranks, shared_among
from opacus_reconbound.certificates.records import ArrayRecords, Records, RecordSource, as_source
from opacus_reconbound.certificates.reduction import (
    AUTO_ABOVE,
    AUTO_ABOVE_BYTES,
    AUTO_COMPONENTS,
    Reduction,
    fit_reduction,
)
from opacus_reconbound.certificates.replica import DEFAULT_TEMPERATURES, replica_estimates
from opacus_reconbound.certificates.rotation import hadamard_order
from opacus_reconbound.certificates.scale import TraceScale, check_resolution, trace_point, trace_upper
from opacus_reconbound.certificates.split import record_digests, refuse_overlap, refuse_repeats, summarise
from opacus_reconbound.certificates.stability import PROBE, check_stable
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import Pixels, Representation
from opacus_reconbound.representations.base import tensor_digest

__all__ = ["ASSUMPTIONS", "certify", "library_version"]

ASSUMPTIONS = (
    "The training records are i.i.d. draws of the source that the reference and estimation samples were drawn from.",
    "The representation and all preprocessing are fixed independently of the training records.",
    "Every training step is a Poisson-subsampled Gaussian step with the recorded sample rate and noise multiplier.",
    "Every trajectory on the training records that an adversary may see is counted in the leakage.",
    "The bound is on the expected error over the source; a single record can be reconstructed better.",
)
_ELSEWHERE = ("The reference records are public or synthetic, and independent of the estimation records.",)
_DECLARED = ("The declared tr Σ is at least that of the source; ρ* is relative to it.",)
_LEAST_REFERENCE = 32
_LEAST_ESTIMATION = 100
_MODERATE = (1e-9, 1e9)  # temperatures and ν²
_FARTHEST = 1e12  # a coordinate, in units of the root of tr Σ
_CHUNK = 1024  # raw records at a time, at most
_VECTORS = 2**25  # numbers in one chunk's vectors, at most
_REFERENCE_BYTES = 2**31  # of wide reference vectors in memory

Designs = Literal["fast", "auto", "replica", "multi", "block", "all"]
_KINDS: dict[str, tuple[str, ...]] = {
    "fast": ("replica",),
    "auto": ("auto",),
    "replica": ("replica",),
    "multi": ("multi",),
    "block": ("block",),
    "all": ("replica", "block"),
}


@host_by_default()
def certify(
    reference: Records | None,
    estimation: Records,
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
    reference_from: Literal["source", "elsewhere"] = "source",
    reduction: Literal["auto"] | int | None = "auto",
    cache: str | os.PathLike[str] | None = None,
    allow_repeats: bool = False,
    splits: SplitPlan | str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    distributed: bool = True,
) -> SourceCertificate:
    """Certify how uncertain the records of a source are, from two disjoint samples of it.

    The reference sample (D_perp) fixes everything that is chosen: centre, scale, potentials, rotation. The estimation
    sample (D_est) is then measured once. The result holds with probability at least 1 − alpha over the samples, for
    every leakage at once.

    Args:
        reference: D_perp, records (n', ...): an array, a memory-mapped array, a tensor, the path of a ``.npy``, an
            ``.npz`` or a folder of images (or several paths), a map-style data set or a list whose items are records
            (tensors, arrays, 8-bit images) or tuples that begin with one, or a Lightning data module, whose training
            records are meant. Read once, in order, a chunk at a time. None, where there are no records to spare for
            it: then ``normaliser`` has to be declared and ``designs="block"``, with a rotation that looks at no data.
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
        reference_from: ``"elsewhere"``: the reference records are public or synthetic, not draws of the source. Every
            bound on the squared error holds all the same (what is chosen on them is only chosen worse), but they tell
            nothing about tr Σ: ``normaliser`` has to be declared.
        reduction: how many principal coordinates of the reference sample the designs use; the bound is on the full
            representation. ``"auto"``: 2,048 where it has more than 4,096 coordinates and all vectors together would
            take more than 3 GiB, else all. None: all.
        cache: a folder for the vectors of the representation, so that an interrupted or repeated run does not compute
            them again. It is as sensitive as the records.
        allow_repeats: accept equal records, in both samples or within one, as independent draws of a source that
            repeats values.
        splits: the plan that the samples were taken from, or its file. Samples that are not its D_perp and D_est are
            refused, and the certificate names it in its settings.
        device: where to compute.
        progress: show progress bars (only on a terminal).
        checkpoint: a file for the kinds of designs that are finished. The same call with the same file goes on from
            there, and gives the same certificate to the last bit. It stays when the certificate is done; delete it
            then.
        distributed: where ``torch.distributed`` is initialised, share the work of the replica designs among the ranks
            of the default group; every rank then has to make this call with the same records, and returns the same
            certificate. False: this process works alone.

    Raises:
        CertificateError: ``checkpoint`` belongs to another certificate, is damaged or cannot be written.
        InvalidValueError: an option is out of range.
        DataError: the records are empty, too few, not finite, constant, of the wrong shape or range.
        OverlapError: the two samples share records, or the plan's do, or one of them holds copies of its own.
    """
    alpha = _validate.fraction("alpha", alpha)
    trace_level = _validate.fraction("trace_level", trace_level)
    seed = _validate.integer("seed", seed, maximum=2**63 - 1)
    max_reference = _validate.integer("max_reference", max_reference, minimum=_LEAST_REFERENCE)
    kinds = _chosen(designs)
    ladder = tuple(_moderate("temperatures", value) for value in temperatures)
    if "replica" in kinds and (not ladder or len(set(ladder)) != len(ladder)):
        raise InvalidValueError(f"Expected distinct temperatures. Found {list(temperatures)!r}.")
    chosen_pairs = tuple((k, _moderate("pairs", nu2)) for k, nu2 in pairs or ())
    declared = None if isinstance(normaliser, str) else _validate.positive("normaliser", normaliser)
    if reduction is not None and reduction != "auto":
        reduction = _validate.integer("reduction", reduction, minimum=1)
    _check_origin(reference_from, reference is None, declared, kinds)
    psi = Pixels() if representation is None else representation
    plan = splits if splits is None or isinstance(splits, SplitPlan) else SplitPlan.load(splits)
    planned: tuple[Role, ...] = () if plan is None else ("estimation",)
    if plan is not None and reference is not None and reference_from == "source":
        plan.check_certificate(allow_repeats=allow_repeats)
        planned = ("reference", "estimation")
    source = as_source("estimation", estimation, _LEAST_ESTIMATION)
    nothing = ArrayRecords(np.empty((0, *source.record_shape), dtype=source.dtype))
    sources = (nothing if reference is None else as_source("reference", reference, _LEAST_REFERENCE), source)
    if sources[0].record_shape != sources[1].record_shape:
        raise DataError(
            f"The two samples have records of different shapes: reference {sources[0].record_shape}, estimation "
            f"{sources[1].record_shape}."
        )
    if sources[0].dtype != sources[1].dtype:
        raise DataError(
            f"The two samples have different types: reference {sources[0].dtype}, estimation "
            f"{sources[1].dtype}. Store both in the same type, so that shared records can be recognised."
        )
    for role in planned:
        assert plan is not None  # noqa: S101 - else nothing is planned
        plan.check_size(role, len(sources[role == "estimation"]))
    ranks = Ranks.of_default_group() if distributed else Ranks()
    show = progress and ranks.rank == 0
    place = usable_device("device", device)
    if psi.needs_fit:
        if reference is None:
            raise InvalidValueError("This representation takes its scale from the reference sample, and there is none.")
        psi = psi.fit(_Chunks("reference", sources[0]))
    features = FeatureCache(cache)
    descriptor = psi.describe(sources[0].record_shape)
    keep = _held(len(sources[0]), descriptor.dimension, seed)
    held = len(sources[0]) if keep is None else len(keep)
    components = _components(reduction, descriptor.dimension, held, held + len(sources[1]))
    keep = None if components is None else keep
    with _bar("reference records", show) as report:
        perp = _read("reference", sources[0], psi, place, report, cache=features, keep=keep)
    perp_summary = summarise(perp.digests)
    if plan is not None and "reference" in planned:
        plan.check_sample("reference", perp_summary)
    if reference is None or reference_from == "elsewhere":
        assert declared is not None  # noqa: S101 - checked above
        zeros = torch.zeros(descriptor.dimension, dtype=torch.float64, device=float64_device(place))
        centre = zeros if reference is None else trace_point(perp.vectors)[0]
        scale, upper, pair_count = declared, 0.5 * descriptor.squared_diameter, 0
    else:
        with one_tensor_thread():
            centre, scale = trace_point(perp.vectors)
            upper, pair_count = trace_upper(
                perp.vectors, level=trace_level, squared_diameter=descriptor.squared_diameter, seed=seed
            )
    trace = TraceScale(
        scale=scale,
        upper=upper,
        level=trace_level,
        pairs=pair_count,
        squared_diameter=descriptor.squared_diameter,
        normaliser=normaliser if isinstance(normaliser, str) else "declared",
        declared=declared,
    )
    z_reference = perp.vectors if len(perp.vectors) <= max_reference else perp.vectors[:max_reference].clone()
    perp.vectors = z_reference  # the others are not needed any more
    _normalise(z_reference, centre, scale)
    reduced: Reduction | None = None
    if components is not None:
        reduced, z_reference = fit_reduction(
            z_reference,
            components,
            seed=seed,
            cache=features,
            key=f"{descriptor.digest} {perp.fingerprint} {max_reference}",
        )
        perp.vectors = z_reference
    with _bar("estimation records", show) as report:
        est = _read(
            "estimation",
            sources[1],
            psi,
            place,
            report,
            cache=features,
            then=lambda z: _normalise(z, centre, scale),
            reduction=reduced,
            tag="" if reduced is None else f"{tensor_digest({'basis': reduced.basis, 'centre': centre})} {scale!r}",
        )
    est_summary = summarise(est.digests)
    if plan is not None:
        plan.check_sample("estimation", est_summary)
    z_estimation = est.vectors
    if reference is None:
        largest = max(abs(float(z_estimation.max())), abs(float(z_estimation.min()))) * scale**0.5
        check_resolution(scale, largest, descriptor.dimension)
    if declared is not None:
        _check_declared(declared, z_reference, z_estimation)
    if not allow_repeats:
        refuse_overlap(perp.digests, est.digests)
        refuse_repeats("reference", perp.digests)
        refuse_repeats("estimation", est.digests)

    grid = default_pairs(hadamard_order(z_estimation.shape[1])) if pairs is None else chosen_pairs
    key: dict[str, Any] = {
        "reference records": perp.fingerprint,
        "estimation records": est.fingerprint,
        "representation": descriptor.digest,
        "reduction": None if reduced is None else reduced.settings(seed),
        "reference from": reference_from,
        "designs": list(kinds),
        "alpha": alpha,
        "seed": seed,
        "max_reference": max_reference,
        "temperatures": list(ladder),
        "pairs": [[k, nu2] for k, nu2 in grid],
        "margins": margins,
        "device": place.type,
        "library version": library_version(),
        "torch version": torch.__version__,
    }
    others: dict[str, Any] = {"normaliser": normaliser, "trace_level": trace_level, "allow_repeats": allow_repeats}
    others["splits"] = None if plan is None else plan.digest
    _refuse_other_ranks(ranks, key | others, trace, z_reference, z_estimation)
    finished = Checkpoint(None if checkpoint is None else Path(checkpoint), key, ranks)
    settings: dict[str, Any] = {"max_reference": max_reference}
    if plan is not None:
        settings["splits"] = plan.digest
    if reduced is not None:
        settings["reduction"] = key["reduction"]
    if keep is not None and len(keep) < len(sources[0]):
        settings["reference_used"] = len(keep)
    if reference_from == "elsewhere":
        settings["reference_from"] = reference_from
    if kinds == ("auto",):
        chosen = finished.get("chosen")
        if chosen is None:
            with _bar("pilot on the reference sample", show) as report:
                picked = choose_kinds(
                    z_reference, len(z_estimation), grid=grid, level=alpha, seed=seed, progress=report
                )
            chosen = finished.put("chosen", list(picked))
        kinds = tuple(chosen)
        settings["chosen"] = list(kinds)
    shares = _shares(kinds, alpha)

    def compute(kind: str, report: Progress) -> Finished:
        if kind == "replica":
            with shared_among(ranks):
                replicas = replica_estimates(
                    z_reference, z_estimation, level=shares[kind], temperatures=ladder, progress=report
                )
            return Finished.of(replicas, {"temperatures": list(ladder)})
        if kind == "multi":
            many = multi_designs(
                z_reference,
                z_estimation,
                sampling_level=shares["multi"],
                monte_carlo_level=shares["multi_monte_carlo"],
                seed=seed,
                progress=report,
            )
            plan = [[e.scale, e.replicas, list(e.monte_carlo.trials)] for e in many]
            return Finished.of(many, {"multi": plan})
        blocks = block_estimates(
            z_reference,
            z_estimation,
            pairs=grid,
            level=shares[kind],
            margins=margins,
            seed=seed,
            device=place,
            progress=report,
        )
        return Finished.of(blocks, {"pairs": key["pairs"], "margins": margins})

    found: list[Design] = []
    parts: list[DesignDiagnostics | None] = []
    for kind in kinds:
        packed = finished.get(kind)
        if packed is None:
            with _bar(f"{kind} designs", show) as report:
                packed = finished.put(kind, compute(kind, report).pack())
        done = Finished.unpack(packed)
        found += done.designs
        parts += done.diagnostics
        settings |= done.settings
    assumptions: tuple[str, ...] = ASSUMPTIONS
    if allow_repeats:
        assumptions += ("Equal records in the two samples are independent draws of a source that repeats values.",)
    if reference_from == "elsewhere":
        assumptions += _ELSEWHERE
    if reference is None or reference_from == "elsewhere":
        assumptions += _DECLARED
    return SourceCertificate(
        designs=tuple(found),
        diagnostics=tuple(parts),
        trace=trace,
        representation=descriptor,
        reference=perp_summary,
        estimation=est_summary,
        alpha=alpha,
        alpha_split=shares,
        seed=seed,
        settings=settings,
        assumptions=assumptions,
        library_version=library_version(),
    )


def _chosen(designs: str | Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(designs, Iterable) and not isinstance(designs, str)
    names = tuple(dict.fromkeys(map(str, designs))) if listed else _KINDS.get(str(designs))
    if not names or not (set(names) <= {"replica", "multi", "block"} or names == ("auto",)):
        raise InvalidValueError(
            f"Expected designs to be 'fast', 'auto', 'replica', 'multi', 'block', 'all' or a sequence of 'replica', "
            f"'multi' and 'block'. Found {designs!r}."
        )
    return names


def _moderate(name: str, value: object) -> float:
    """A scale in units of tr Σ; far from 1 it means nothing, and float32 cannot hold what depends on it."""
    number = _validate.positive(name, value)
    if not _MODERATE[0] <= number <= _MODERATE[1]:
        raise InvalidValueError(
            f"Expected {name} in units of tr Σ, between {_MODERATE[0]:g} and {_MODERATE[1]:g}. Found {number:g}."
        )
    return number


def _check_declared(declared: float, *vectors: torch.Tensor) -> None:
    """Refuse a declared tr Σ in whose unit float32 cannot hold the squared distances."""
    largest = max((max(abs(float(z.max())), abs(float(z.min()))) for z in vectors if len(z)), default=0.0)
    if not largest <= _FARTHEST:
        raise InvalidValueError(
            f"normaliser = {declared:g} is too small: records lie more than {_FARTHEST:g} times its root away from the "
            "centre. Declare tr Σ in squared data units."
        )


def _shares(kinds: Sequence[str], alpha: float) -> dict[str, float]:
    """α in equal shares for the kinds; of the many-replica share a tenth of α at most goes to its Monte Carlo."""
    shares = dict.fromkeys(kinds, alpha / len(kinds))
    if "multi" in shares:
        monte_carlo = 0.1 * alpha / len(kinds)
        shares["multi"] -= monte_carlo
        shares["multi_monte_carlo"] = monte_carlo
    return shares


def _check_origin(origin: str, absent: bool, declared: float | None, kinds: Sequence[str]) -> None:
    """What has to be declared where the reference records are not of the source, or there are none."""
    if origin not in ("source", "elsewhere"):
        raise InvalidValueError(f"Expected reference_from to be 'source' or 'elsewhere'. Found {origin!r}.")
    if (absent or origin == "elsewhere") and declared is None:
        raise InvalidValueError(
            "Without reference records of the source nothing tells how large tr Σ is. Declare it: normaliser = a "
            "number, in squared data units."
        )
    if absent and tuple(kinds) != ("block",):
        raise InvalidValueError(
            "Without reference records only designs='block' can be made. The others need some: public or synthetic "
            "ones will do, with reference_from='elsewhere'."
        )


def _components(reduction: str | int | None, dimension: int, n_reference: int, n: int) -> int | None:
    """How many principal coordinates to keep; None for all coordinates as they are."""
    if reduction == "auto":
        wide = dimension > AUTO_ABOVE and 4 * n * dimension > AUTO_ABOVE_BYTES and n_reference > 0
        return min(AUTO_COMPONENTS, n_reference // 2) if wide else None
    return None if reduction is None or int(reduction) >= dimension else int(reduction)


def _held(n: int, dimension: int, seed: int) -> NDArray[np.intp] | None:
    """Which wide reference vectors to hold in memory: all, or a random choice within two GiB."""
    most = max(_LEAST_REFERENCE, _REFERENCE_BYTES // (4 * dimension))
    return None if n <= most else np.sort(np.random.default_rng(seed).permutation(n)[:most])


class _Chunks:
    """Raw records of a source as tensors, a chunk at a time, as often as they are asked for."""

    def __init__(self, name: str, source: RecordSource) -> None:
        self._name, self._source = name, source

    def __iter__(self) -> Iterator[torch.Tensor]:
        start = 0
        for raw in self._source.chunks(rows_at_once(math.prod(self._source.record_shape) // 4, _CHUNK)):
            yield torch.from_numpy(_plain_numbers(self._name, start, raw))
            start += len(raw)


@dataclass
class _Sample:
    """A sample as read: Ψ of its records and their digests, in order."""

    vectors: torch.Tensor
    digests: list[bytes]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digests in their order, which the arithmetic depends on."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


def _read(
    name: str,
    source: RecordSource,
    psi: Representation,
    device: torch.device,
    progress: Progress,
    *,
    cache: FeatureCache,
    keep: NDArray[np.intp] | None = None,
    then: Callable[[torch.Tensor], None] | None = None,
    reduction: Reduction | None = None,
    tag: str = "",
) -> _Sample:
    """Ψ of all records, float32 (n, m) on the device, and their digests, in one pass, a chunk at a time.

    Everything is checked for finiteness, and Ψ for being one map of single records. ``keep`` are the positions to hold,
    ascending; ``then`` changes each chunk's vectors in place; ``reduction`` follows, and what it gives is kept in the
    cache under ``tag``.
    """
    psi = psi.to(device).eval()
    descriptor = psi.describe(source.record_shape)
    width = descriptor.dimension if reduction is None else reduction.components
    result = torch.empty((len(source) if keep is None else len(keep), width), dtype=torch.float32, device=device)
    digests: list[bytes] = []
    start = filled = 0
    # raw records are small beside float64, and networks like larger batches
    most = max(PROBE, min(_CHUNK, _VECTORS // descriptor.dimension))
    for raw in source.chunks(rows_at_once(math.prod(source.record_shape) // 4, most)):
        own = record_digests(raw)
        digests += own
        batch = torch.from_numpy(_plain_numbers(name, start, raw))
        psi.check(batch)
        key = cache.key(descriptor.digest, str(device), tag, b"".join(own))
        vectors = cache.load(key, (len(raw), width))
        if vectors is None:
            vectors = _vectors(name, start, to_device(batch, device), psi, descriptor.dimension)
            if reduction is not None:
                vectors = vectors.clone()  # may be the source's own memory
                if then is not None:
                    then(vectors)
                vectors = reduction.apply(vectors)
            cache.store(key, vectors)
        vectors = to_device(vectors, device)
        if keep is not None:
            inside = keep[(keep >= start) & (keep < start + len(raw))] - start
            vectors = vectors[torch.from_numpy(inside).to(device)]
        rows = result[filled : filled + len(vectors)]
        rows.copy_(vectors)
        if then is not None and reduction is None:
            then(rows)
        filled += len(rows)
        start += len(raw)
        progress(start, len(source))
    if start != len(source):
        raise DataError(f"The {name} source says that it has {len(source)} records, but it gave {start}.")
    return _Sample(result, digests)


def _vectors(name: str, start: int, batch: torch.Tensor, psi: Representation, dimension: int) -> torch.Tensor:
    """Ψ of one chunk, checked; ``start`` is the index of its first record."""
    with torch.no_grad(), batch.device:
        vectors: torch.Tensor = psi(batch)
    if vectors.shape != (len(batch), dimension):
        raise DataError(
            f"The representation must map (n, ...) to (n, m), m = {dimension} by its description. It mapped "
            f"{tuple(batch.shape)} to {tuple(vectors.shape)}."
        )
    finite = torch.isfinite(vectors).all(dim=1)
    if not bool(finite.all()):
        raise DataError(
            f"The representation is not finite on {name}[{start + int(finite.int().argmin())}]. Repair it, or leave "
            "such records out."
        )
    if start == 0:
        check_stable(psi, batch[:PROBE], vectors[:PROBE])
    return vectors.to(torch.float32)


def _plain_numbers(name: str, start: int, chunk: NDArray[np.generic]) -> NDArray[np.generic]:
    """The chunk in a type that torch has; ``start`` is the index of its first record."""
    if chunk.dtype.kind == "f":
        finite = np.isfinite(chunk.reshape(len(chunk), -1)).all(axis=1)
        if not finite.all():
            raise DataError(
                f"{name}[{start + int(np.argmin(finite))}] holds NaN or infinite values. Remove or repair such "
                "records before certifying."
            )
        return chunk.astype(np.float64) if chunk.dtype.itemsize > 8 or not chunk.dtype.isnative else chunk
    if chunk.dtype.kind == "b":
        return chunk.astype(np.uint8)
    return chunk.astype(np.float64) if chunk.dtype.itemsize > 1 else chunk


def _normalise(z: torch.Tensor, centre: torch.Tensor, scale: float) -> None:
    """Centre and scale in place, so that tr Σ̂ of the reference sample is 1."""
    step = rows_at_once(z.shape[1])
    for start in range(0, len(z), step):
        rows = z[start : start + step]
        rows.copy_(((to_float64(rows) - centre) / scale**0.5).to(torch.float32))


def _refuse_other_ranks(ranks: Ranks, key: Mapping[str, Any], trace: TraceScale, *vectors: torch.Tensor) -> None:
    """Raise ``DataError`` on every rank where one of them has other records, options or vectors than rank 0."""
    if ranks.size == 1:
        return
    whole = hashlib.blake2b(repr(trace).encode())
    for z in vectors:
        step = rows_at_once(z.shape[1])
        for start in range(0, len(z), step):
            whole.update(z[start : start + step].cpu().numpy().data)
    given, vectors_of = ranks.texts(json.dumps(key)), ranks.texts(whole.hexdigest())
    for rank in range(ranks.size):
        different = differences(json.loads(given[0]), json.loads(given[rank]))
        if different:
            raise DataError(
                f"Rank {rank} does not certify what rank 0 does; different: {different}. Every rank has to call "
                "certify with the same records in the same order and the same options; distributed=False makes a "
                "process work alone."
            )
        if vectors_of[rank] != vectors_of[0]:
            raise DataError(
                f"Rank {rank} maps the same records to other vectors than rank 0. Use one kind of device and the same "
                "weights on every rank, or distributed=False."
            )


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
