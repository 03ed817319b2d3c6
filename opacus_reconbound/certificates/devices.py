"""What a device can do, and how much of a sample to work on at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from opacus_reconbound.errors import InvalidValueError

__all__ = ["float64_device", "host_by_default", "rows_at_once", "to_device", "to_float64", "usable_device"]

_ELEMENTS = 2**20


def float64_device(device: torch.device) -> torch.device:
    """The device itself, or the host where it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float64, on its device or, where that has no float64, on the host."""
    return tensor.to(float64_device(tensor.device)).to(torch.float64)  # in this order: no float64 on the device


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, in float32 where it is float64 and the device has none."""
    if tensor.dtype == torch.float64 and float64_device(device) != device:
        tensor = tensor.to(torch.float32)
    return tensor.to(device)


def rows_at_once(width: int, most: int = 4096) -> int:
    """How many records of that many entries to take at once: about a million numbers, 8 MiB in float64."""
    return max(1, min(most, _ELEMENTS // max(1, width)))


@contextmanager
def host_by_default() -> Iterator[None]:
    """Inside, new tensors lie on the host, as random numbers must, whatever ``torch.set_default_device`` says."""
    with torch.device("cpu"):
        yield


def usable_device(name: str, device: str | torch.device) -> torch.device:
    """The device, where tensors can be made on it and read back.

    Args:
        name: of the option, for the message.
        device: such as "cpu" or "cuda:0".

    Raises:
        InvalidValueError: there is no such device here.
    """
    try:
        place = torch.device(device)
        torch.empty(1, device=place).cpu()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InvalidValueError(
            f"{name} {device} cannot be used here: {str(error).splitlines()[0].rstrip('.')}. The default is cpu."
        ) from error
    return place
