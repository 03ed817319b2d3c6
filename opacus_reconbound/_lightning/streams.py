"""Random streams: noise that an earlier process drew must not come again."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Stream", "require_new_randomness"]

Stream = tuple[str, int]  # the process, and the seed of a generator that batches or noise came from
_PROCESS = uuid.uuid4().hex


def require_new_randomness(used: Sequence[Any], streams: Sequence[Stream]) -> list[Stream]:
    """Seed generators anew, with a warning, where an earlier process drew the same numbers.

    Noise that comes twice would cancel in a difference of checkpoints.

    Args:
        used: the generators of the batches and the noise; None is torch's default.
        streams: of the run so far.

    Returns:
        The streams with those of this process.
    """
    generators = {id(each): each for each in used}.values()
    seeds = [seed for seed in map(_initial_seed, generators) if seed is not None]
    if any(process != _PROCESS and seed in seeds for process, seed in streams):
        warnings.warn(
            "The random generator of the batches or the noise was seeded as in the run that goes on here. Its "
            "numbers would come again, and noise that repeats cancels: it was seeded anew, from the operating "
            "system. Seed a run that goes on differently, such as seed_everything(seed + 1).",
            category=UserWarning,
            stacklevel=3,
        )
        for generator in generators:
            torch.seed() if generator is None else generator.seed()
        seeds = [seed for seed in map(_initial_seed, generators) if seed is not None]
    return list(dict.fromkeys([*streams, *((_PROCESS, seed) for seed in seeds)]))


def _initial_seed(generator: Any) -> int | None:
    try:
        return int((torch.default_generator if generator is None else generator).initial_seed())
    except (AttributeError, RuntimeError):  # a secure generator has none
        return None
