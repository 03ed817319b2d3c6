"""Independent tiles on all cores: one Python thread a core, one tensor thread each.

Torch's own threads meet at a barrier after every small operation, which is slow on a busy machine; tiles need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import TypeVar

import torch

__all__ = ["Counter", "Progress", "part", "shared_out", "workers"]

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


def workers(device: torch.device) -> int:
    """How many tiles to work on at a time: torch's number of threads on the CPU, one elsewhere."""
    return max(1, torch.get_num_threads()) if device.type == "cpu" else 1


@contextmanager
def _single_tensor_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def shared_out(
    work: Callable[[Sequence[Item]], Result], items: Sequence[Item], device: torch.device, *, steady: bool = False
) -> list[Result]:
    """Deal the items to the workers in turn, and return what each worker made of its hand, in order.

    The dealing is fixed, so the same number of threads gives the same bits.

    Args:
        work: what to do with a hand.
        items: what to deal.
        device: where they are worked on.
        steady: one tensor thread for a single worker too, so that an item's bits depend on no number of threads.
    """
    count = min(workers(device), len(items))
    if count <= 1:
        with _single_tensor_thread() if steady else nullcontext():
            return [work(items)]
    hands = [items[index::count] for index in range(count)]
    with _single_tensor_thread(), ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, hand) for hand in hands]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Counter:
    """Progress from several threads, reported one at a time; also how an interrupt reaches the threads."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()

    def add(self, amount: int = 1) -> None:
        """Report that much more as done."""
        with self._lock:
            self._done += amount
            if self._progress is not None:
                self._progress(self._done, self._total)


def part(progress: Progress | None, index: int, parts: int, *, width: int = 1) -> Progress | None:
    """The progress of ``width`` parts of several equal ones, from ``index`` on, told in hundredths of a part."""
    if progress is None:
        return None

    def report(done: int, total: int) -> None:
        progress(index * 100 + done * 100 * width // max(1, total), parts * 100)

    return report
