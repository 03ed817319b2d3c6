"""A training set's fingerprint: the same records have the same one, in whatever order they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from opacus_reconbound.errors import DataError

__all__ = ["fingerprint"]

_DIGEST_BYTES = 16


def fingerprint(dataset: Any) -> str:
    """SHA-256 over the sorted digests of all records; every record is read once.

    Args:
        dataset: a map-style torch data set, a tensor or array with one record a row, a list of records, or a loader
            of one of these. Records are tensors, arrays, images, numbers and texts, and tuples and dictionaries of
            them.

    Returns:
        64 hexadecimal digits.

    Raises:
        DataError: the data set has no records, a record changes from one reading to the next, or is of an unknown kind.

    Example:
        >>> fingerprint([1, 2, 3]) == fingerprint([3, 1, 2]) != fingerprint([1, 2])
        True
    """
    records = dataset if hasattr(dataset, "__getitem__") else getattr(dataset, "dataset", None)
    if records is None or not hasattr(records, "__len__"):
        raise DataError(
            f"A {type(dataset).__name__} has no fingerprint: its records cannot be counted and read again. Name it "
            "yourself, as in Ledger(path, fingerprint='customers of May')."
        )
    count = len(records)
    if count == 0:
        raise DataError("The data set is empty, so it has no fingerprint.")
    digests = [_digest(records[index], index) for index in range(count)]
    if any(_digest(records[index], index) != digests[index] for index in {0, count // 2, count - 1}):
        raise DataError(
            "The records change from one reading to the next, such as by random augmentation. Take the fingerprint of "
            "the data set without it."
        )
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()


def _digest(record: Any, index: int) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, record, index)
    return digest.digest()


def _feed(digest: Any, value: Any, index: int) -> None:
    if isinstance(value, (tuple, list)):
        digest.update(b"(%d" % len(value))
        for part in value:
            _feed(digest, part, index)
        return
    if isinstance(value, Mapping):
        _feed(digest, sorted(value.items()), index)
        return
    if isinstance(value, (str, bytes)):
        _update(digest, type(value).__name__, value.encode() if isinstance(value, str) else value)
        return
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise _unknown(value, index) from error
    if array.dtype.hasobject or array.dtype.kind not in "biufc":
        raise _unknown(value, index)
    _update(digest, f"{array.dtype.str}{array.shape}", array.tobytes())


def _update(digest: Any, kind: str, content: bytes) -> None:
    digest.update(f"{kind}:{len(content)}:".encode() + content)


def _unknown(value: Any, index: int) -> DataError:
    return DataError(
        f"Record {index} holds a {type(value).__name__}, of which no fingerprint is known. Name the data set yourself, "
        "as in Ledger(path, fingerprint='customers of May')."
    )
