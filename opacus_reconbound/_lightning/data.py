"""A data module, or loaders, with Poisson batches for training; everything else as it was."""

from __future__ import annotations

import hashlib
import inspect
from functools import partial
from typing import Any

import torch
from opacus.data_loader import DPDataLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from opacus_reconbound.checks import keep_empty_batches, poisson_rate
from opacus_reconbound.errors import AccountingError, InvalidValueError

__all__ = ["PrivateDataModuleMixin", "poisson_loader"]

_DELEGATED = (
    "prepare_data",
    "setup",
    "teardown",
    "on_exception",
    "state_dict",
    "load_state_dict",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "transfer_batch_to_device",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
)


class PrivateDataModuleMixin:
    """A data module whose training loader draws true Poisson batches: each record on its own, with probability q.

    q is one over the number of batches of the loader that it replaces, so that the average batch keeps its size. Empty
    batches are kept. Everything but the training loader is passed on as it is. Where several processes train, each
    draws from its own part of the records, from a random stream of its own; say ``use_distributed_sampler=False`` to
    the Trainer then.

    Args:
        data: a ``LightningDataModule`` (of either namespace), or the training ``DataLoader``.
        val: validation loader or loaders, beside a training loader.
        test: the same for ``test``.
        predict: the same for ``predict``.
        generator: of the batches; by default the training loader's own, or the global one. One that continues: it is
            never seeded again.

    Raises:
        InvalidValueError: ``data`` is neither of the two, or loaders are given beside a data module.
        AccountingError: when training starts, for a loader whose records cannot be drawn like that: a sampler of its
            own, an iterable data set, several loaders.
    """

    def __init__(
        self,
        data: Any,
        *,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._wrapped: Any = None
        self._trainer: Any = None
        super().__init__()
        self.generator = generator
        self._streams: dict[int, torch.Generator] = {}
        others = {"val_dataloader": val, "test_dataloader": test, "predict_dataloader": predict}
        if isinstance(data, DataLoader):
            self._train: Any = partial(_give, data)
            for name, loaders in others.items():
                if loaders is not None:
                    setattr(self, name, partial(_give, loaders))
            return
        if not hasattr(data, "train_dataloader"):
            raise InvalidValueError(f"Expected a LightningDataModule or a DataLoader. Found {type(data).__name__}.")
        if any(loaders is not None for loaders in others.values()):
            raise InvalidValueError("A data module has its own loaders; leave val, test and predict out.")
        self._wrapped, self._train = data, data.train_dataloader
        for name in _DELEGATED:
            # as attributes, and only where they are the data module's own: the Trainer looks at what is overridden
            hook = getattr(data, name, None)
            if hook is not None and not _is_default(hook):
                setattr(self, name, hook)

    @property
    def trainer(self) -> Any:
        """The trainer, which the wrapped data module sees too."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self._trainer = trainer
        if self._wrapped is not None:
            self._wrapped.trainer = trainer

    def train_dataloader(self) -> Any:
        """The training loader with Poisson batches."""
        loader = self._train()
        return poisson_loader(loader, generator=self._stream(loader))

    def _stream(self, loader: Any) -> torch.Generator | None:
        """The given generator; with several processes one of this process, drawn from it once and for all."""
        source = self.generator or getattr(loader, "generator", None)
        if _ranks() == 1:
            return source
        key = id(source)
        if key not in self._streams:
            drawn = int(torch.randint(2**62, (), generator=source))
            seed = hashlib.blake2b(f"{drawn}:{torch.distributed.get_rank()}".encode(), digest_size=7).digest()
            self._streams[key] = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        return self._streams[key]


def _give(loaders: Any) -> Any:
    return loaders


def _is_default(hook: Any) -> bool:
    """Whether a hook is Lightning's own, which does nothing."""
    module = getattr(hook, "__module__", "")
    return inspect.ismethod(hook) and module.partition(".core.")[0] in ("lightning.pytorch", "pytorch_lightning")


def _ranks() -> int:
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if running else 1


def poisson_loader(loader: Any, *, generator: torch.Generator | None = None) -> Any:
    """The same loader with Poisson batches; one that draws them already is returned as it is.

    Raises:
        AccountingError: its records cannot be drawn like that.
    """
    if poisson_rate(loader) is not None:
        return keep_empty_batches(loader)
    if not isinstance(loader, DataLoader):
        raise AccountingError(
            f"Poisson sampling needs one training DataLoader. Found {type(loader).__name__}. Join the data sets "
            "(torch.utils.data.ConcatDataset) and return one loader."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise AccountingError(
            f"The training data set ({type(loader.dataset).__name__}) is iterable: its records cannot be drawn by "
            "Poisson sampling, which needs to know all of them. Use a map-style data set."
        )
    batches: Any = loader.batch_sampler
    order: Any = None if batches is None else getattr(batches, "sampler", None)
    plain = type(order) in (InOrder, DistributedSampler) or (type(order) is RandomSampler and not order.replacement)
    if type(batches) is not BatchSampler or not plain:
        name = type(batches).__name__ if type(batches) is not BatchSampler else type(order).__name__
        raise AccountingError(
            f"The training loader draws records by a {name}, which Poisson sampling would replace: it draws from the "
            "whole data set. Use a DataLoader with batch_size= and shuffle=True or False, and a Subset where only some "
            "records are to be trained on."
        )
    if len(loader) == 0:
        raise AccountingError("The training loader has no batches: fewer records than batch_size, with drop_last=True.")
    private = DPDataLoader.from_data_loader(loader, generator=generator, distributed=_ranks() > 1)
    # the shape of an empty batch is that of the first one; should that be empty, this is
    private.collate_fn([loader.dataset[0]])
    return keep_empty_batches(private)
