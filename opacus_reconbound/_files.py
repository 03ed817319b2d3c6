"""Records from files: ``.npy``, ``FILE.npz:KEY``, a folder of images; never a pickle."""

from __future__ import annotations

import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from opacus_reconbound._images import ImageFiles
from opacus_reconbound.errors import DataError, InvalidValueError

__all__ = ["Stored", "check_writable", "open_records", "open_source", "read_numbers", "refuse_repeats", "split_key"]

Stored: TypeAlias = NDArray[np.generic] | ImageFiles


def open_records(sources: Sequence[str]) -> list[Stored]:
    """Open every source; all must hold records of one shape and type.

    ``.npy`` files and uncompressed ``.npz`` members are memory-mapped, images are read where they are indexed.
    """
    if not sources:
        raise DataError("No data was given. Name a .npy file, FILE.npz:KEY or a folder of images.")
    arrays = [open_source(source) for source in sources]
    first = arrays[0]
    for source, array in zip(sources, arrays, strict=True):
        if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            raise DataError(
                f"{source} holds records of shape {array.shape[1:]} and type {array.dtype}, but {sources[0]} of shape "
                f"{first.shape[1:]} and type {first.dtype}. Sources are concatenated, so they must agree."
            )
    return arrays


def open_source(source: str) -> Stored:
    """Open one source.

    Raises:
        DataError: it is missing, empty, damaged, of an unknown kind, or an archive of several arrays without a key.
    """
    path, key = split_key(source)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    if path.is_dir():
        return ImageFiles(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty. Give a .npy file, FILE.npz:KEY or a folder of images.")
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz"):
        raise DataError(f"{path} is of a kind that is not read. Give a .npy file, FILE.npz:KEY or a folder of images.")
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False) if suffix == ".npy" else _open_archive(path, key)
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes numpy and zipfile raise nearly anything
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        if "pickle" in reason or "Python objects" in reason:
            reason = "it is damaged, or holds Python objects, which are never opened because that can run code"
        raise DataError(
            f"{source} cannot be read as an array of numbers: {reason}. Save the records with numpy.save or "
            "numpy.savez."
        ) from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is not what its name says: it is no {suffix} array. Save it with numpy.save.")
    if array.dtype.hasobject:
        raise DataError(f"{source} holds Python objects, not numbers. Save the records as a plain array.")
    if array.ndim < 2 or len(array) == 0:
        raise DataError(
            f"{source} holds an array of shape {array.shape}; expected (records, ...), one record for each entry."
        )
    return array


def read_numbers(path: Path) -> NDArray[np.float64]:
    """One number after another: of a ``.npy`` file, or of a text, apart by spaces, commas or lines.

    Raises:
        DataError: it is missing, or holds something else.
    """
    try:
        numbers: Any
        if path.suffix.lower() == ".npy":
            numbers = np.load(path, allow_pickle=False)
        else:
            numbers = path.read_text(encoding="utf-8").replace(",", " ").split()
        if len(numbers) == 0:
            raise ValueError("it holds none")
        return np.asarray(numbers, dtype=np.float64).ravel()
    except (OSError, ValueError, TypeError, EOFError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"{path} cannot be read as numbers: {reason}. Give a .npy file, or a text of numbers apart by spaces, "
            "commas or lines."
        ) from error


def refuse_repeats(sources: Sequence[str]) -> None:
    """Refuse a source that is given twice: a record counted twice makes the certificate false."""
    seen: dict[tuple[Path, str | None], str] = {}
    for source in sources:
        path, key = split_key(source)
        path = path.resolve()
        for (other, other_key), first in seen.items():
            same = other == path and (key == other_key or key is None or other_key is None)
            nested = path.is_dir() and (other in path.parents or path in other.parents) and other.is_dir()
            if same or nested:
                raise DataError(
                    f"{source} is given twice{'' if source == first else f', the first time as {first} or inside it'}: "
                    "its records would count double or lie in both samples. Name every source once."
                )
        seen[path, key] = source


def check_writable(path: Path, wanted: str) -> None:
    """Refuse, before anything is computed, a path at which no file can be made; missing folders are fine."""
    if path.is_dir():
        raise InvalidValueError(f"{path} is a folder. Name {wanted}, in it or elsewhere.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise NotADirectoryError(20, f"{folder} is a file")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidValueError(
            f"{path} cannot be written: {error.strerror}. Choose a folder that can be written to."
        ) from error


def split_key(source: str) -> tuple[Path, str | None]:
    """``FILE.npz:KEY`` in two; a path and None where no key is given."""
    end = source.lower().find(".npz:")
    if end < 0:
        return Path(source), None
    return Path(source[: end + 4]), source[end + 5 :]


def _open_archive(path: Path, key: str | None) -> Any:
    archive = np.load(path, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise DataError(f"{path} is a single array, not an archive. Rename it to {path.with_suffix('.npy').name}.")
    with archive:
        keys = list(archive.keys())
        if key is None:
            if len(keys) != 1:
                listed = ", ".join(f"{path.name}:{name}" for name in keys) or "nothing"
                raise DataError(f"{path} holds several arrays; say which: {listed}.")
            key = keys[0]
        if key not in keys:
            raise DataError(f"{path} has no array {key!r}. It has: {', '.join(keys) or 'nothing'}.")
        array = _mapped(path, f"{key}.npy")
        if array is None:
            array = archive[key]
        if not isinstance(array, np.ndarray):
            raise DataError(f"{path}:{key} is not an array. Make the archive with numpy.savez.")
        return array


def _mapped(path: Path, name: str) -> NDArray[np.generic] | None:
    """A member memory-mapped, after its checksum was compared; None where it is compressed or has to be looked at."""
    with zipfile.ZipFile(path) as archive:
        if name not in archive.namelist() or archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
            return None
        member = archive.getinfo(name)
        with archive.open(member) as stream:
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            read_header = readers.get(np.lib.format.read_magic(stream))
            if read_header is None:
                return None
            shape, fortran, dtype = read_header(stream)
            start = stream.tell()
            while stream.read(2**20):
                pass  # the end of the stream compares the checksum
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if dtype.hasobject or size == 0 or size != member.file_size - start:
        return None
    with path.open("rb") as file:
        file.seek(member.header_offset + 26)
        start += member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))  # of its name and extra fields
    return np.memmap(path, dtype=dtype, mode="r", offset=start, shape=shape, order="F" if fortran else "C")
