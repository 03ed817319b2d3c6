"""Vectors of records on disk, so that they are computed once: a chunk to a file, named by all that it depends on.

An interrupted run goes on behind the last chunk that was finished. The files are as sensitive as the records.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import torch

from opacus_reconbound.errors import DataError

__all__ = ["FeatureCache"]

_VERSION = "opacus_reconbound/vectors/1"
_DIGEST_BYTES = 32
_PIECE = 2**20


class _Hashed:
    """A file to write to that keeps a digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.whole = file, hashlib.sha256()

    def write(self, piece: bytes) -> int:
        """Write and count."""
        self.whole.update(piece)
        return self._file.write(piece)


class FeatureCache:
    """A folder of arrays; a file that is damaged counts as missing.

    Args:
        folder: made where it does not exist; None keeps nothing.

    Raises:
        DataError: it cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self._folder):
                    pass
            except OSError as error:
                raise DataError(
                    f"The cache folder {self._folder} cannot be used: {error.strerror}. Choose a folder that can be "
                    "written to."
                ) from error

    def key(self, *parts: str | bytes) -> str:
        """A name for what depends on these parts."""
        whole = hashlib.sha256(f"{_VERSION};torch {torch.__version__};".encode())
        for part in parts:
            piece = part.encode() if isinstance(part, str) else part
            whole.update(len(piece).to_bytes(8, "little") + piece)
        return whole.hexdigest()

    def load(self, key: str, shape: Sequence[int]) -> torch.Tensor | None:
        """The array under this name, where it is there, whole and of this shape."""
        if self._folder is None:
            return None
        try:
            with (self._folder / f"{key}.vectors").open("rb") as file:
                left, whole = file.seek(0, os.SEEK_END) - _DIGEST_BYTES, hashlib.sha256()
                file.seek(0)
                while left > 0:
                    piece = file.read(min(left, _PIECE))
                    whole.update(piece)
                    left -= len(piece)
                if file.read() != whole.digest():
                    return None
                file.seek(0)
                array = np.load(file, allow_pickle=False)
        except OSError:
            return None
        return torch.from_numpy(array) if array.shape == tuple(shape) else None

    def store(self, key: str, array: torch.Tensor) -> None:
        """Keep an array; a reader sees all of it or none.

        Raises:
            DataError: the disk is full, or the folder cannot be written to any more.
        """
        if self._folder is None:
            return
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=f".{key[:16]}.", suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                hashed = _Hashed(file)
                np.save(hashed, array.detach().cpu().numpy(), allow_pickle=False)
                file.write(hashed.whole.digest())
            os.replace(name, self._folder / f"{key}.vectors")
        except OSError as error:
            raise DataError(
                f"The cache folder {self._folder} cannot be written: {error.strerror}. Make room, or go on without it."
            ) from error
        finally:
            if name:
                Path(name).unlink(missing_ok=True)
