"""Are the records of training those that a certificate is about, as far as one batch can tell?"""

from __future__ import annotations

import json
from typing import Any

import torch

from opacus_reconbound.errors import DataError
from opacus_reconbound.representations.base import RepresentationDescriptor, check_range

__all__ = ["NOT_COMPARED", "check_records", "declared_range"]

NOT_COMPARED = (
    "The training records were not compared with the certificate: give record=, a function that maps a batch to its "
    "raw records, such as lambda batch: batch[0]."
)
_NEVER = "That they come from the same source as the certificate's samples cannot be checked from here"


def declared_range(representation: RepresentationDescriptor) -> tuple[float, float] | None:
    """The range that a certificate declares for the entries of a raw record; None where it declares none."""
    parameters = json.loads(representation.parameters)
    stages = parameters.get("stages") or [parameters]
    found = stages[0].get("value_range")
    if not isinstance(found, list) or len(found) != 2:
        return None
    return float(found[0]), float(found[1])


def check_records(records: Any, representation: RepresentationDescriptor) -> tuple[str, ...]:
    """Compare raw records with what a certificate is about.

    Args:
        records: of one batch, (n, *record_shape) with n >= 1, before any scaling for training.
        representation: the certificate's.

    Returns:
        What was checked, and what could not be, in sentences.

    Raises:
        DataError: no tensor, another shape, or values outside the declared range.
    """
    remedy = "Have record= undo what training does to raw records (scaling, reshaping), or certify what is trained on."
    if not isinstance(records, torch.Tensor) or records.ndim == 0:
        raise DataError(f"record= has to return a tensor of raw records. It returned {type(records).__name__}.")
    shape = tuple(records.shape[1:])
    if shape != tuple(representation.record_shape):
        raise DataError(
            f"The training records have the shape {shape}, but the certificate is about records of shape "
            f"{tuple(representation.record_shape)}. {remedy}"
        )
    if records.is_complex() or not bool(torch.isfinite(records).all()):
        raise DataError(f"The training records hold values that are no finite real numbers. {remedy}")
    least, largest = float(records.min()), float(records.max())
    seen = f"The {len(records)} records of the first batch have the certified shape {shape}"
    value_range = declared_range(representation)
    if value_range is None:
        return (
            f"{seen}.",
            f"Their values, from {least:g} to {largest:g}, could not be checked: the certificate declares no range. "
            f"{_NEVER}.",
        )
    try:
        check_range(records, value_range, "Pixels(value_range=(0, 1))")
    except DataError as error:
        raise DataError(
            f"{error} The certificate declares ({value_range[0]:g}, {value_range[1]:g}). {remedy}"
        ) from None
    return (
        f"{seen}, and values from {least:g} to {largest:g} within the declared ({value_range[0]:g}, "
        f"{value_range[1]:g}).",
        f"Later batches were not looked at. {_NEVER}.",
    )
