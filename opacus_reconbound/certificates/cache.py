"""Vectors of records on disk, so that they are computed once: a chunk to a file, named by all that it depends on.

An interrupted run goes on behind the last chunk that was finished. The files are as sensitive as the records.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from opacus_reconbound.errors import DataError

__all__ = ["FeatureCache"]

_VERSION = "opacus_reconbound/vectors/1"
_DIGEST_BYTES = 32


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
            content = (self._folder / f"{key}.vectors").read_bytes()
        except OSError:
            return None
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            return None
        array = np.load(io.BytesIO(body), allow_pickle=False)
        return torch.from_numpy(array) if array.shape == tuple(shape) else None

    def store(self, key: str, array: torch.Tensor) -> None:
        """Keep an array; a reader sees all of it or none.

        Raises:
            DataError: the disk is full, or the folder cannot be written to any more.
        """
        if self._folder is None:
            return
        buffer = io.BytesIO()
        np.save(buffer, array.detach().cpu().numpy(), allow_pickle=False)
        body = buffer.getvalue()
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=f".{key[:16]}.", suffix=".tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                file.write(hashlib.sha256(body).digest())
            os.replace(name, self._folder / f"{key}.vectors")
        except OSError as error:
            raise DataError(
                f"The cache folder {self._folder} cannot be written: {error.strerror}. Make room, or go on without it."
            ) from error
        finally:
            if name:
                Path(name).unlink(missing_ok=True)
