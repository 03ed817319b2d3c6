"""Images as 8-bit arrays: Pillow's, and files that stay on disk until they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from opacus_reconbound.errors import DataError

__all__ = ["SUFFIXES", "ImageFiles", "is_image", "plain_image"]

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}

# 8-bit grey for one channel, 8-bit RGB for the rest; an alpha channel is dropped
_PLAIN = dict.fromkeys(("L", "1", "LA", "La"), "L") | dict.fromkeys(
    ("RGB", "P", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "PA"), "RGB"
)


def is_image(value: object) -> bool:
    """Whether this is a Pillow image."""
    from PIL import Image

    return isinstance(value, Image.Image)


def _plain_mode(mode: str) -> str:
    if mode not in _PLAIN:
        raise ValueError(f"images of mode {mode} do not fit the 8-bit grid; convert them first")
    return _PLAIN[mode]


def plain_image(image: Any) -> NDArray[np.uint8]:
    """A Pillow image as (height, width) or (height, width, 3).

    Raises:
        ValueError: its mode has more than 8 bits.
    """
    mode = _plain_mode(image.mode)
    return np.asarray(image if image.mode == mode else image.convert(mode))


class ImageFiles:
    """All images below a folder, in the order of their paths, as an array that is read where it is indexed.

    Sizes and modes are read from all headers at once; what lies behind a header, when it is asked for. Hidden files
    and folders are left out.

    Args:
        folder: may hold folders.

    Raises:
        DataError: there is no image, a header cannot be read, or two images differ in size or number of channels.
    """

    dtype: ClassVar[np.dtype[np.uint8]] = np.dtype(np.uint8)

    def __init__(self, folder: Path) -> None:
        self.files = sorted(
            file
            for file in folder.rglob("*")
            if file.suffix.lower() in SUFFIXES
            and not any(part.startswith(".") for part in file.relative_to(folder).parts)  # previews, caches, ._copies
            and file.is_file()
        )
        if not self.files:
            raise DataError(f"The folder {folder} holds no images ({', '.join(sorted(SUFFIXES))}).")
        self._record_shape = _opened(self.files[0], _shape)
        for file in self.files[1:]:
            self._refuse_unlike(file, _opened(file, _shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, height, width) or (n, height, width, 3)."""
        return (len(self.files), *self._record_shape)

    @property
    def ndim(self) -> int:
        """3 or 4."""
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: Any) -> NDArray[np.uint8]:
        """The images at these positions, as an array.

        Raises:
            DataError: one of them cannot be read.
        """
        wanted = np.arange(len(self.files))[indices]
        if wanted.ndim == 0:
            return self._read(self.files[int(wanted)])
        result = np.empty((len(wanted), *self._record_shape), dtype=self.dtype)
        for row, index in zip(result, wanted, strict=True):
            row[...] = self._read(self.files[index])
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of them in memory."""
        return self[:] if dtype is None else self[:].astype(dtype)

    def _read(self, file: Path) -> NDArray[np.uint8]:
        pixels: NDArray[np.uint8] = _opened(file, plain_image)
        self._refuse_unlike(file, pixels.shape)
        return pixels

    def _refuse_unlike(self, file: Path, shape: tuple[int, ...]) -> None:
        if shape != self._record_shape:
            raise DataError(
                f"{file} has the shape {shape}, but {self.files[0]} has {self._record_shape}. Bring all images to one "
                "size and one number of channels first."
            )


def _shape(image: Any) -> tuple[int, ...]:
    """Of the array that ``plain_image`` makes, from the header alone."""
    width, height = image.size
    return (height, width) if _plain_mode(image.mode) == "L" else (height, width, 3)


def _opened(file: Path, use: Any) -> Any:
    from PIL import Image

    try:
        with Image.open(file) as image:
            return use(image)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(f"{file} cannot be read as an image: {reason}. Repair it or take it out.") from error
