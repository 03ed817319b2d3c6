"""Representations as one line of text, for the command line: ``crop:8,8,12,12|lpips:alex@64``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations.base import Representation
from opacus_reconbound.representations.composition import Composition
from opacus_reconbound.representations.linear import (
    Channels,
    Coordinates,
    Crop,
    Downsample,
    LinearMap,
    LowFrequencies,
    Mask,
)
from opacus_reconbound.representations.lpips import LPIPS
from opacus_reconbound.representations.pixels import Pixels
from opacus_reconbound.representations.vectors import Vectors

__all__ = ["KINDS", "parse"]

KINDS: dict[str, str] = {
    "pixels": "raw values",
    "crop:TOP,LEFT,HEIGHT,WIDTH": "a box of an image",
    "channels:I,J,...": "some channels",
    "coordinates:I,J-K,...": "some entries of the flattened record",
    "mask:FILE.npy": "the entries where a boolean array is true",
    "downsample:SIZE": "a coarse image of SIZE × SIZE means (or ROWS,COLUMNS)",
    "dct:COUNT": "the COUNT × COUNT lowest frequencies (or ROWS,COLUMNS)",
    "linear:FILE.npy": "z = A x for a matrix A",
    "lpips:NET@SIZE": "perceptual distance; NET alex, vgg or squeeze; SIZE 64 unless given, or 'full'",
    "vectors:RADIUS": "tabular rows or embeddings, clipped to a ball ('vectors' alone needs --value-range)",
    "standardised:RADIUS": "the same, columns standardised on the reference sample first",
}
"""What can be written, and what it is."""

Range = tuple[float, float] | None


def parse(text: str, *, value_range: Range = None, weights: str | Path | None = None) -> Representation:
    """Read a representation; stages are joined by ``|``.

    Args:
        text: such as ``"crop:8,8,12,12|pixels"``; see ``KINDS``.
        value_range: least and largest value of an entry of a raw record.
        weights: a file with the backbone's weights for lpips.

    Raises:
        InvalidValueError: not one of ``KINDS``, or arguments that are none.
        DataError: a file that is missing or cannot be read.
    """
    parts = [part.strip() for part in text.split("|")]
    if not all(parts):
        raise InvalidValueError(f"Expected a representation, or several joined by |. Found {text!r}.")
    stages: list[Representation] = []
    for part in parts:
        name, _, argument = part.partition(":")
        maker = _MAKERS.get(name.strip().lower())
        if maker is None:
            known = ", ".join(kind.partition(":")[0] for kind in KINDS)
            raise InvalidValueError(f"There is no representation {name!r}. There are: {known}.")
        given = value_range if all(stage.keeps_values for stage in stages) else None
        stages.append(maker(part, argument.strip(), given, weights))
    if weights is not None and not any(isinstance(stage, LPIPS) for stage in stages):
        raise InvalidValueError(f"Weights were given, but {text!r} has no lpips to use them. Leave them out.")
    return stages[0] if len(stages) == 1 else Composition(*stages)


def _pixels(part: str, argument: str, value_range: Range, _: object) -> Representation:
    _no_more(part, argument)
    return Pixels() if value_range is None else Pixels(value_range)


def _crop(part: str, argument: str, value_range: Range, _: object) -> Representation:
    numbers = _numbers(part, argument)
    if len(numbers) != 4:
        raise _expected(part, "crop:TOP,LEFT,HEIGHT,WIDTH")
    return Crop(*numbers, value_range=value_range)


def _channels(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return Channels(*_numbers(part, argument), value_range=value_range)


def _coordinates(part: str, argument: str, value_range: Range, _: object) -> Representation:
    indices: list[int] = []
    for piece in argument.split(","):
        first, dash, last = piece.partition("-")
        numbers = _numbers(part, f"{first},{last}" if dash else first)
        indices += range(numbers[0], numbers[-1] + 1)
    return Coordinates(indices, value_range=value_range)


def _mask(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return Mask(_array(part, argument), value_range=value_range)


def _downsample(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return Downsample(_one_or_two(part, argument, "downsample:SIZE"), value_range=value_range)


def _dct(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return LowFrequencies(_one_or_two(part, argument, "dct:COUNT"), value_range=value_range)


def _linear(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return LinearMap(_array(part, argument), value_range=value_range)


def _lpips(part: str, argument: str, value_range: Range, weights: str | Path | None) -> Representation:
    net, at, size = argument.partition("@")
    wanted: int | None = 64
    if at:
        wanted = None if size.strip() == "full" else _numbers(part, size)[0]
    return LPIPS(net.strip() or "alex", size=wanted, weights=weights, value_range=value_range)  # type: ignore[arg-type]


def _vectors(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return Vectors(ranges=value_range, clip_radius=_radius(part, argument))


def _standardised(part: str, argument: str, value_range: Range, _: object) -> Representation:
    return Vectors(ranges=value_range, clip_radius=_radius(part, argument), scale="reference")


_MAKERS: dict[str, Callable[[str, str, Range, str | Path | None], Representation]] = {
    "pixels": _pixels,
    "crop": _crop,
    "channels": _channels,
    "coordinates": _coordinates,
    "mask": _mask,
    "downsample": _downsample,
    "dct": _dct,
    "linear": _linear,
    "lpips": _lpips,
    "vectors": _vectors,
    "standardised": _standardised,
}


def _expected(part: str, wanted: str) -> InvalidValueError:
    return InvalidValueError(f"Expected {wanted}. Found {part!r}.")


def _no_more(part: str, argument: str) -> None:
    if argument:
        raise _expected(part, part.partition(":")[0])


def _numbers(part: str, argument: str) -> list[int]:
    try:
        return [int(piece) for piece in argument.split(",")]
    except ValueError:
        raise _expected(part, f"whole numbers behind {part.partition(':')[0]}:") from None


def _one_or_two(part: str, argument: str, wanted: str) -> int | tuple[int, int]:
    numbers = _numbers(part, argument)
    if len(numbers) > 2:
        raise _expected(part, wanted)
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _radius(part: str, argument: str) -> float | None:
    if not argument:
        return None
    try:
        return float(argument)
    except ValueError:
        raise _expected(part, f"a radius behind {part.partition(':')[0]}:") from None


def _array(part: str, argument: str) -> np.ndarray:
    if not argument:
        raise _expected(part, f"a .npy file behind {part.partition(':')[0]}:")
    path = Path(argument)
    if not path.exists():
        raise DataError(f"There is no file {path} for {part!r}.")
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # a damaged file makes numpy raise nearly anything
        raise DataError(f"{path} cannot be read as an array: save it with numpy.save.") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"{path} is an archive; give a .npy file with one array.")
    return array
