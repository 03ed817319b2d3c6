"""Representations Ψ: what counts as a reconstruction."""

from opacus_reconbound.representations.base import Representation as Representation
from opacus_reconbound.representations.base import RepresentationDescriptor as RepresentationDescriptor
from opacus_reconbound.representations.pixels import Pixels as Pixels

__all__ = ["Pixels", "Representation", "RepresentationDescriptor"]
