"""What the source hides: certificates of how uncertain the records are."""

from opacus_reconbound.certificates.certificate import ReconstructionBound as ReconstructionBound
from opacus_reconbound.certificates.certificate import SourceCertificate as SourceCertificate
from opacus_reconbound.certificates.certify import certify as certify
from opacus_reconbound.certificates.designs import BlockDesign as BlockDesign
from opacus_reconbound.certificates.designs import ReplicaDesign as ReplicaDesign

__all__ = ["BlockDesign", "ReconstructionBound", "ReplicaDesign", "SourceCertificate", "certify"]
