"""The callback and the wiring for ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningDataModule

from opacus_reconbound._lightning.callback import ReconstructionBoundMixin
from opacus_reconbound._lightning.data import PrivateDataModuleMixin
from opacus_reconbound._lightning.wiring import private_optimizer

__all__ = ["PrivateDataModule", "ReconstructionBoundCallback", "private_optimizer"]


class ReconstructionBoundCallback(ReconstructionBoundMixin, Callback):  # noqa: D101 - the mixin's
    __doc__ = ReconstructionBoundMixin.__doc__


class PrivateDataModule(PrivateDataModuleMixin, LightningDataModule):  # noqa: D101 - the mixin's
    __doc__ = PrivateDataModuleMixin.__doc__
