"""The callback and the wiring for ``pytorch_lightning``."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_lightning import Callback, LightningDataModule
from torch.utils.data import DataLoader

from opacus_reconbound._lightning.callback import ReconstructionBoundMixin
from opacus_reconbound._lightning.data import PrivateDataModuleMixin
from opacus_reconbound._lightning.wiring import private_optimizer

__all__ = ["PrivateDataModule", "ReconstructionBoundCallback", "private_optimizer"]


class ReconstructionBoundCallback(ReconstructionBoundMixin, Callback):  # noqa: D101 - the mixin's
    __doc__ = ReconstructionBoundMixin.__doc__


class PrivateDataModule(PrivateDataModuleMixin, LightningDataModule):  # noqa: D101 - the mixin's
    __doc__ = PrivateDataModuleMixin.__doc__

    # the arguments with this namespace's types, which LightningCLI reads
    def __init__(
        self,
        data: LightningDataModule | DataLoader[Any],
        *,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(data, val=val, test=test, predict=predict, generator=generator)
