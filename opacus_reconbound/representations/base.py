"""Representations Ψ: what counts as a reconstruction.

A representation maps a record to a vector; the bound is on the squared distance between vectors. It must be fixed
independently of the protected records and of the training run. Its descriptor goes into every certificate, so that a
certificate says exactly what it is about.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Representation", "RepresentationDescriptor"]


@dataclass(frozen=True, kw_only=True)
class RepresentationDescriptor:
    """What a certificate says about its representation.

    Attributes:
        name: the kind of representation, such as ``"pixels"``.
        parameters: its settings, as canonical JSON text.
        record_shape: the shape of one raw record.
        dimension: m, the number of coordinates of the vector.
        squared_diameter: B, an upper bound on the squared distance of two vectors, known in advance.
        peak: the largest difference within one coordinate, for PSNR; None where PSNR has no meaning.
        digest: SHA-256 over all of the above.
    """

    name: str
    parameters: str
    record_shape: tuple[int, ...]
    dimension: int
    squared_diameter: float
    peak: float | None
    digest: str

    @staticmethod
    def digest_of(
        *,
        name: str,
        parameters: str,
        record_shape: tuple[int, ...],
        dimension: int,
        squared_diameter: float,
        peak: float | None,
    ) -> str:
        """The digest of a descriptor with these fields."""
        fields = [name, parameters, list(record_shape), dimension, squared_diameter, peak]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()

    @classmethod
    def create(
        cls,
        *,
        name: str,
        parameters: dict[str, Any],
        record_shape: tuple[int, ...],
        dimension: int,
        squared_diameter: float,
        peak: float | None,
    ) -> RepresentationDescriptor:
        """A descriptor with its digest filled in."""
        text = json.dumps(parameters, sort_keys=True)
        digest = cls.digest_of(
            name=name,
            parameters=text,
            record_shape=record_shape,
            dimension=dimension,
            squared_diameter=squared_diameter,
            peak=peak,
        )
        return cls(
            name=name,
            parameters=text,
            record_shape=record_shape,
            dimension=dimension,
            squared_diameter=squared_diameter,
            peak=peak,
            digest=digest,
        )


class Representation(torch.nn.Module, ABC):
    """A fixed map from a batch of raw records to a batch of vectors."""

    @abstractmethod
    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """Map records (n, *record_shape) to float32 vectors (n, m), one record at a time in effect."""

    @abstractmethod
    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape."""

    @abstractmethod
    def check(self, records: torch.Tensor) -> None:
        """Raise ``DataError`` where these records are not what the representation is declared for."""
