"""``ReconstructionBoundCallback`` for ``lightning.pytorch``; ``private_optimizer`` for ``configure_optimizers``."""

from __future__ import annotations

from lightning.pytorch import Callback

from opacus_reconbound._lightning.callback import ReconstructionBoundMixin
from opacus_reconbound._lightning.wiring import private_optimizer

__all__ = ["ReconstructionBoundCallback", "private_optimizer"]


class ReconstructionBoundCallback(ReconstructionBoundMixin, Callback):  # noqa: D101 - the mixin's
    __doc__ = ReconstructionBoundMixin.__doc__
