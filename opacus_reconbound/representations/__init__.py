"""Representations Ψ: what counts as a reconstruction."""

from opacus_reconbound.representations.base import Representation as Representation
from opacus_reconbound.representations.base import RepresentationDescriptor as RepresentationDescriptor
from opacus_reconbound.representations.composition import Composition as Composition
from opacus_reconbound.representations.encoder import Encoder as Encoder
from opacus_reconbound.representations.linear import Channels as Channels
from opacus_reconbound.representations.linear import Coordinates as Coordinates
from opacus_reconbound.representations.linear import Crop as Crop
from opacus_reconbound.representations.linear import Downsample as Downsample
from opacus_reconbound.representations.linear import LinearMap as LinearMap
from opacus_reconbound.representations.linear import LowFrequencies as LowFrequencies
from opacus_reconbound.representations.linear import Mask as Mask
from opacus_reconbound.representations.lpips import LPIPS as LPIPS
from opacus_reconbound.representations.parse import KINDS as KINDS
from opacus_reconbound.representations.parse import parse as parse
from opacus_reconbound.representations.pixels import Pixels as Pixels
from opacus_reconbound.representations.vectors import Vectors as Vectors

__all__ = [
    "KINDS",
    "Channels",
    "Composition",
    "Coordinates",
    "Crop",
    "Downsample",
    "Encoder",
    "LPIPS",
    "LinearMap",
    "LowFrequencies",
    "Mask",
    "Pixels",
    "Representation",
    "RepresentationDescriptor",
    "Vectors",
    "parse",
]
