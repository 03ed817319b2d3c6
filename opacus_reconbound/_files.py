"""Records from files: ``.npy``, ``FILE.npz:KEY``, a folder of images; never a pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opacus_reconbound.errors import DataError

__all__ = ["gather", "open_records", "open_source"]

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}


def open_records(sources: Sequence[str]) -> list[NDArray[np.generic]]:
    """Open every source; all must hold records of one shape and type. ``.npy`` files are memory-mapped."""
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


def gather(arrays: Sequence[NDArray[np.generic]], indices: NDArray[np.intp]) -> NDArray[np.generic]:
    """The records at these positions of the concatenation, read from the files they lie in; indices ascending."""
    result = np.empty((len(indices), *arrays[0].shape[1:]), dtype=arrays[0].dtype)
    start = 0
    for array in arrays:
        inside = (indices >= start) & (indices < start + len(array))
        result[inside] = array[indices[inside] - start]
        start += len(array)
    return result


def open_source(source: str) -> NDArray[np.generic]:
    """Open one source.

    Raises:
        DataError: it is missing, empty, damaged, of an unknown kind, or an archive of several arrays without a key.
    """
    path, key = _split_key(source)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    if path.is_dir():
        return _open_images(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty.")
    suffix = path.suffix.lower()
    try:
        if suffix == ".npy":
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        elif suffix == ".npz":
            array = _open_archive(path, key)
        else:
            raise DataError(
                f"{path} is of a kind that is not read. Give a .npy file, FILE.npz:KEY or a folder of images."
            )
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path} cannot be read as an array of numbers: {error}. Files of Python objects are never opened."
        ) from error
    if array.ndim < 2 or len(array) == 0:
        raise DataError(
            f"{source} holds an array of shape {array.shape}; expected (records, ...), one record for each entry."
        )
    return np.asanyarray(array)


def _split_key(source: str) -> tuple[Path, str | None]:
    head, separator, tail = source.rpartition(":")
    if separator and head.lower().endswith(".npz"):
        return Path(head), tail
    return Path(source), None


def _open_archive(path: Path, key: str | None) -> Any:
    with np.load(path, allow_pickle=False) as archive:
        keys = list(archive.keys())
        if key is None:
            if len(keys) != 1:
                listed = ", ".join(f"{path.name}:{name}" for name in keys) or "nothing"
                raise DataError(f"{path} holds several arrays; say which: {listed}.")
            key = keys[0]
        if key not in keys:
            raise DataError(f"{path} has no array {key!r}. It has: {', '.join(keys) or 'nothing'}.")
        return archive[key]


def _open_images(folder: Path) -> NDArray[np.generic]:
    from PIL import Image, UnidentifiedImageError

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in _IMAGES and file.is_file())
    if not files:
        raise DataError(f"The folder {folder} holds no images ({', '.join(sorted(_IMAGES))}).")
    result: NDArray[np.generic] | None = None
    first = ""
    for index, file in enumerate(files):
        try:
            with Image.open(file) as image:
                mode = image.mode
                pixels = np.asarray(image if mode in ("L", "RGB") else image.convert(_plain_mode(mode)))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
            raise DataError(f"{file} cannot be read as an image: {error}.") from error
        description = f"{pixels.shape} ({pixels.dtype})"
        if result is None:
            result = np.empty((len(files), *pixels.shape), dtype=pixels.dtype)
            first = description
        elif pixels.shape != result.shape[1:] or pixels.dtype != result.dtype:
            raise DataError(
                f"{file} has the shape {description}, but {files[0].name} has {first}. Bring all images to one size "
                "and one number of channels first."
            )
        result[index] = pixels
    assert result is not None  # noqa: S101 - there is at least one file
    return result


def _plain_mode(mode: str) -> str:
    """8-bit grey for one channel, 8-bit RGB for the rest; an alpha channel is dropped."""
    if mode in ("1", "LA", "La"):
        return "L"
    if mode in ("P", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "PA"):
        return "RGB"
    raise ValueError(f"images of mode {mode} do not fit the 8-bit grid; convert them first")
