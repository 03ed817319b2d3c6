"""Finished kinds of designs on disk, so that an interrupted certificate goes on where it stopped.

The file is JSON. It names everything that its content depends on, and is refused where any of that is different.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from opacus_reconbound import _atomic
from opacus_reconbound.certificates.designs import BlockDesign, Design, ReplicaDesign
from opacus_reconbound.certificates.ranks import Ranks
from opacus_reconbound.errors import CertificateError, InvalidValueError

__all__ = ["Checkpoint", "differences"]

_FORMAT = "opacus_reconbound/unfinished-certificate/1"
_AFRESH = "Delete that file to start afresh"


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What two keys disagree about, in words; short values are shown, digests only named. Empty: nothing."""
    named = []
    for name in dict.fromkeys([*there, *here]):
        one, two = there.get(name), here.get(name)
        if one != two:
            shown = f"{json.dumps(one, ensure_ascii=False)} there, {json.dumps(two, ensure_ascii=False)} here"
            named.append(f"{name} ({shown})" if len(shown) < 70 else name)
    return ", ".join(named)


class Checkpoint:
    """Results by name, each written to the file as soon as it is there, by rank 0 alone.

    Args:
        path: the file; None keeps nothing.
        key: everything that the results depend on, in JSON values.
        ranks: the processes that share the work; all of them go on from what rank 0 finds.

    Raises:
        CertificateError: the file belongs to another certificate, is damaged or cannot be read.
    """

    def __init__(self, path: Path | None, key: Mapping[str, Any], ranks: Ranks) -> None:
        self._path, self._key, self._ranks = path, dict(key), ranks
        found: dict[str, Any] = {"finished": {}}
        if path is not None and ranks.rank == 0:
            try:
                found = {"finished": _read(path, self._key)}
            except CertificateError as error:
                found = {"error": str(error)}
        found = json.loads(ranks.first_text(json.dumps(found)))
        if "error" in found:
            raise CertificateError(found["error"])
        self._finished: dict[str, Any] = found["finished"]

    def get(self, name: str) -> Any:
        """What was finished under this name, or None."""
        return self._finished.get(name)

    def put(self, name: str, value: Any) -> Any:
        """Keep a JSON value; what rank 0 found is what every rank gets back.

        Raises:
            CertificateError: the file cannot be written.
        """
        value = json.loads(self._ranks.first_text(json.dumps(value, allow_nan=False)))
        self._finished[name] = value
        if self._path is not None and self._ranks.rank == 0:
            content = {"format": _FORMAT, "key": self._key, "finished": self._finished}
            text = json.dumps(content | {"digest": _digest(content)}, indent=1, allow_nan=False)
            try:
                _atomic.write_text(self._path, text + "\n")
            except OSError as error:
                raise CertificateError(
                    f"The finished designs could not be written to {self._path}: {error}. Choose a file that can be "
                    "written, or leave checkpoint out."
                ) from error
        return value


def pack_designs(designs: Sequence[Design], settings: Mapping[str, Any]) -> dict[str, Any]:
    """One kind's designs and settings as JSON values."""
    return {"designs": _adapter().dump_python(tuple(designs), mode="json"), "settings": dict(settings)}


def unpack_designs(packed: Mapping[str, Any]) -> tuple[tuple[Design, ...], dict[str, Any]]:
    """The inverse of ``pack_designs``, to the last bit."""
    return _adapter().validate_json(json.dumps(packed["designs"])), dict(packed["settings"])


def _read(path: Path, key: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error}. Name another checkpoint.") from error
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
        raise CertificateError(
            f"{path} is not whole: it is truncated, or not a file of finished designs. {_AFRESH}."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CertificateError(
            f"{path} is not a file of finished designs (no format {_FORMAT!r}). Name another checkpoint."
        )
    digest = content.pop("digest", None)
    if digest != _digest(content) or not isinstance(content["finished"], dict) or not isinstance(content["key"], dict):
        raise CertificateError(f"{path} was altered after it was written. {_AFRESH}.")
    different = differences(content["key"], key)
    if different:
        raise CertificateError(
            f"{path} holds finished designs of another certificate; different: {different}. {_AFRESH}, or repeat the "
            "call with the same records and options to go on from there."
        )
    finished: dict[str, Any] = content["finished"]
    for name, packed in finished.items():
        if isinstance(packed, dict):
            try:
                unpack_designs(packed)
            except (KeyError, ValidationError, InvalidValueError) as error:
                raise CertificateError(f"{path} holds no valid {name} designs. {_AFRESH}.") from error
    return finished


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[tuple[Design, ...]]:
    return TypeAdapter(tuple[Annotated[BlockDesign | ReplicaDesign, Field(discriminator="kind")], ...])
