"""Is a representation one fixed map of single records? Checked on the first records before anything is certified."""

from __future__ import annotations

import torch

from opacus_reconbound.errors import DataError
from opacus_reconbound.representations import Representation

__all__ = ["PROBE", "check_stable"]

PROBE = 64  # records
# float32 sums are grouped by the size of a batch; on accelerators convolutions may also use shorter mantissas
_TOLERANCE, _TOLERANCE_OFF_CPU = 1e-4, 1e-2


def check_stable(psi: Representation, records: torch.Tensor, within: torch.Tensor) -> None:
    """Raise ``DataError`` where vectors change from call to call, or with the other records of a batch.

    Args:
        psi: the representation, in evaluation mode.
        records: the first raw records, at most ``PROBE`` of them, on the device.
        within: their vectors, computed in a larger batch; finite.
    """
    with torch.no_grad():
        first, again = psi(records), psi(records)
        alone = psi(records[: (len(records) + 1) // 2])
    if not torch.equal(first, again):
        raise DataError(
            "The representation maps the same records to other vectors when it is called again. Switch off what is "
            "random: dropout, noise, random crops, layers in training mode."
        )
    tolerance = _TOLERANCE if records.device.type == "cpu" else _TOLERANCE_OFF_CPU
    allowed = tolerance * float(first.abs().max())
    differences = (first - within, first[: len(alone)] - alone)
    if any(float(difference.abs().max()) > allowed for difference in differences):
        raise DataError(
            "The vector of a record changes with the other records in its batch. A representation must map one record "
            "at a time: no statistics of the batch, no layers in training mode."
        )
