"""Independent tiles on all cores: one Python thread a core, one tensor thread each.

Torch's own threads meet at a barrier after every small operation, which is slow on a busy machine; tiles need none.
Torch also splits its sums by its number of threads, so that their last bits depend on it; sums of one tensor thread
do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from threading import Lock
from typing import TypeVar

import torch

__all__ = ["Counter", "Progress", "in_order", "one_tensor_thread", "part", "shared_out", "workers"]

Progress = Callable[[int, int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")

_WAITING = 2  # results a worker that may wait for their turn
_granted: ContextVar[int | None] = ContextVar("granted", default=None)


def workers(device: torch.device) -> int:
    """How many tiles to work on at a time: torch's number of threads on the CPU, one elsewhere."""
    return max(1, _granted.get() or torch.get_num_threads()) if device.type == "cpu" else 1


@contextmanager
def one_tensor_thread() -> Iterator[None]:
    """One thread for each tensor operation inside, so that no sum depends on their number; ``workers`` stays."""
    before = torch.get_num_threads()
    token = _granted.set(_granted.get() or before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _granted.reset(token)


def shared_out(work: Callable[[Sequence[Item]], Result], items: Sequence[Item], device: torch.device) -> list[Result]:
    """Deal the items to the workers in turn, and return what each worker made of its hand, in order.

    The dealing is fixed, so the same number of threads gives the same bits.
    """
    count = min(workers(device), len(items))
    with one_tensor_thread():
        if count <= 1:
            return [work(items)]
        hands = [items[index::count] for index in range(count)]
        with ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(work, hand) for hand in hands]
            try:
                return [future.result() for future in futures]
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def in_order(
    work: Callable[[Item], Result], items: Sequence[Item], device: torch.device, counter: Counter
) -> Iterator[Result]:
    """What ``work`` makes of each item, in the order of the items, whichever worker is done first.

    So a sum of the results has the same bits for any number of threads. Two results a worker wait at most. When one
    item fails, or the caller stops, the others end at their next report.

    Args:
        work: on one item; it may call ``counter.add``, through which an interruption reaches it.
        items: in the order in which they are taken up and handed out.
        device: where the work is done.
        counter: of the progress.
    """
    count = min(workers(device), len(items))
    with one_tensor_thread():
        if count <= 1:
            yield from map(work, items)
            return

        def guarded(item: Item) -> Result:
            try:
                return work(item)
            except BaseException:
                counter.stop()
                raise

        rest = iter(items)
        with ThreadPoolExecutor(count) as pool:
            waiting: deque[Future[Result]] = deque(
                pool.submit(guarded, item) for item in islice(rest, _WAITING * count)
            )
            try:
                while waiting:
                    result = waiting.popleft().result()
                    waiting.extend(pool.submit(guarded, item) for item in islice(rest, 1))
                    yield result
            except BaseException as error:
                counter.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                if isinstance(error, _StoppedError):  # another item's failure is why
                    for future in waiting:
                        cause = None if future.cancelled() else future.exception()
                        if cause is not None and not isinstance(cause, _StoppedError):
                            raise cause from None
                raise


class _StoppedError(Exception):
    """Ends the work of a thread whose result is not wanted any more."""


class Counter:
    """Progress from several threads, reported one at a time; also how an interrupt reaches the threads."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done, self._lock = progress, total, 0, Lock()
        self._stopped = False

    def add(self, amount: int = 1) -> None:
        """Report that much more as done.

        Raises:
            _StoppedError: the work was stopped.
        """
        if self._stopped:
            raise _StoppedError
        with self._lock:
            self._done += amount
            if self._progress is not None:
                self._progress(self._done, self._total)

    def stop(self) -> None:
        """Let every thread end at its next report."""
        self._stopped = True


def part(progress: Progress | None, index: int, parts: int, *, width: int = 1) -> Progress | None:
    """The progress of ``width`` parts of several equal ones, from ``index`` on, told in hundredths of a part."""
    if progress is None:
        return None

    def report(done: int, total: int) -> None:
        progress(index * 100 + done * 100 * width // max(1, total), parts * 100)

    return report
