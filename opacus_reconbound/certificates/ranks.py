"""Several processes with the same data: who does which part, and how the parts come together.

The processes are the ranks of the default group of ``torch.distributed`` (torchrun, Lightning, Fabric). Only tensors
travel, nothing is pickled. What a sum adds up to depends on the parts and their order, never on who made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import distributed

__all__ = ["Ranks", "current_ranks", "shared_among"]


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work; alone by default.

    Attributes:
        rank: of this process.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def of_default_group(cls) -> Ranks:
        """The ranks of the default group, or this process alone where there is none."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(rank=distributed.get_rank(), size=distributed.get_world_size())

    def owns(self, index: int) -> bool:
        """Whether part ``index`` is this process's."""
        return index % self.size == self.rank

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of rank ``source``."""
        if self.size > 1:
            carried = tensor.to(_carrier())
            distributed.broadcast(carried, src=source)
            tensor.copy_(carried)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Overwrite a tensor with the sum over the ranks; exact where at most one of them is not zero."""
        if self.size > 1:
            carried = tensor.to(_carrier())
            distributed.all_reduce(carried)
            tensor.copy_(carried)

    def texts(self, text: str) -> list[str]:
        """The text of every rank, in order."""
        if self.size == 1:
            return [text]
        return [self._text_of(source, text) for source in range(self.size)]

    def first_text(self, text: str) -> str:
        """The text of rank 0."""
        return text if self.size == 1 else self._text_of(0, text)

    def _text_of(self, source: int, text: str) -> str:
        content = text.encode()
        length = torch.tensor([len(content)])
        self.broadcast(length, source)
        letters = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source:
            letters.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.broadcast(letters, source)
        return bytes(letters.tolist()).decode()


_current: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def current_ranks() -> Ranks:
    """The ranks that share the sums over tiles; this process alone unless ``shared_among`` says otherwise."""
    return _current.get() or Ranks()


@contextmanager
def shared_among(ranks: Ranks) -> Iterator[None]:
    """Share the sums over tiles inside; every rank has to make the same calls with the same arguments."""
    token = _current.set(ranks)
    try:
        yield
    finally:
        _current.reset(token)


def _carrier() -> torch.device:
    """Where the group's backend takes its tensors from."""
    backend = str(distributed.get_backend()).lower()
    if any(name in backend for name in ("gloo", "mpi", "ucc", "cpu")):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
