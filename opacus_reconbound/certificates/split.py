"""Roles of records: fingerprints that show whether two samples share any, and random splits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from opacus_reconbound import _validate
from opacus_reconbound.errors import InvalidValueError, OverlapError

__all__ = [
    "DIGEST_BYTES",
    "SampleSummary",
    "record_digests",
    "refuse_overlap",
    "refuse_repeats",
    "split_indices",
    "summarise",
]

DIGEST_BYTES = 16
_MOST_COPIES = 0.01


@dataclass(frozen=True, kw_only=True)
class SampleSummary:
    """A sample as the certificate remembers it.

    Attributes:
        n: number of records.
        fingerprint: SHA-256 over the sorted digests of its records; does not depend on their order.
    """

    n: int
    fingerprint: str


def record_digests(records: NDArray[np.generic]) -> list[bytes]:
    """One digest for each record's raw values, (n, ...) any dtype; memory-mapped arrays are read once.

    The two zeros of floating-point numbers count as one value.
    """
    header = f"{records.dtype.str}{records.shape[1:]}".encode()
    flat = records.reshape(len(records), -1)
    rows = (np.where(row == 0, np.zeros_like(row), row) for row in flat) if flat.dtype.kind == "f" else iter(flat)
    return [
        hashlib.blake2b(np.ascontiguousarray(row).tobytes(), digest_size=DIGEST_BYTES, key=header[:64]).digest()
        for row in rows
    ]


def summarise(digests: Sequence[bytes]) -> SampleSummary:
    """The summary of a sample with these record digests."""
    whole = hashlib.sha256(b"".join(sorted(digests))).hexdigest()
    return SampleSummary(n=len(digests), fingerprint=whole)


def refuse_overlap(reference: Sequence[bytes], estimation: Sequence[bytes]) -> None:
    """Raise ``OverlapError`` where the two samples share a record (paper, Appendix F, requirements 3 and 4)."""
    positions = {digest: index for index, digest in enumerate(reference)}
    shared = [(positions[digest], index) for index, digest in enumerate(estimation) if digest in positions]
    if shared:
        first = ", ".join(f"reference[{i}] = estimation[{j}]" for i, j in shared[:3])
        raise OverlapError(
            f"The reference sample and the estimation sample share {len(shared)} record(s): {first}"
            f"{', …' if len(shared) > 3 else ''}. The certificate needs disjoint samples: split the records without "
            "repetition, or remove duplicates before splitting. Where the source itself repeats values and these are "
            "independent draws of it, say so with allow_repeats=True (--allow-repeats)."
        )


def refuse_repeats(name: str, digests: Sequence[bytes]) -> None:
    """Raise ``OverlapError`` where more than one in a hundred records of a sample is a copy of another one in it.

    Copies are not independent draws, but every margin counts them as such, and tr Σ̂ of copies is too small. Fewer do
    not matter: they change the number of records by one per cent at most.
    """
    copies = len(digests) - len(set(digests))
    if copies > _MOST_COPIES * len(digests):
        raise OverlapError(
            f"Of the {len(digests)} records of the {name} sample only {len(digests) - copies} are distinct. Copies, "
            "such as those of resampling, are not independent draws, and the certificate would promise too much: keep "
            "each record once. Where the source itself repeats values and these are independent draws of it, say so "
            "with allow_repeats=True (--allow-repeats)."
        )


def split_indices(total: int, sizes: Sequence[int], *, seed: int | Sequence[int]) -> tuple[NDArray[np.intp], ...]:
    """Disjoint random index sets of the given sizes, in one permutation of ``range(total)``.

    Args:
        total: number of records.
        sizes: how many for each role, in order.
        seed: of the permutation (numpy PCG64).

    Raises:
        InvalidValueError: the sizes do not fit.
    """
    sizes = [_validate.integer("size", size) for size in sizes]
    if sum(sizes) > total:
        raise InvalidValueError(f"The split asks for {sum(sizes)} records, but there are {total}.")
    order = np.random.default_rng(seed).permutation(total)
    ends = np.cumsum([0, *sizes])
    return tuple(np.sort(order[a:b]) for a, b in pairwise(ends))
