"""Several runs on the same records add up: a file that outlives the processes which train (paper, Appendix F).

Leakage is charged *before* it is released. A run reserves bits on the ledger, one line with ``fsync`` for many steps,
and takes steps only within its reservation; the next line says which steps were really taken and replaces the
reservation. A process that is killed therefore leaves a reservation behind, an over-count of at most
``reserve_steps`` steps, and never a step that is not counted. A run that ends gives back what it did not use.

The file holds one JSON object a line and is only ever appended to, under a lock. Each line carries a checksum chained
over all lines before it, so a line that is altered, lost or out of order is noticed. A line that a killed writer left
half-written was never acknowledged, so no step rests on it: the next writer removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import sys
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opacus_reconbound import _validate
from opacus_reconbound.errors import InvalidValueError, LedgerError
from opacus_reconbound.leakage.exact import ExactSum
from opacus_reconbound.leakage.gaussian import step_ceiling, step_charge, step_charges
from opacus_reconbound.leakage.schedule import Run, Schedule

__all__ = ["Ledger", "LedgerRun", "LedgerSession"]

Entry = tuple[float, float, int]  # (noise_multiplier, sample_rate, num_steps), as in Opacus's histories

_VERSION = 1
_START = "0" * 32
_MARK = b',"chain":"'
_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows


@dataclass(frozen=True, kw_only=True)
class LedgerRun:
    """One run on a ledger, all its sessions together.

    Attributes:
        run: its name.
        sessions: how many processes (or restarts) took steps under this name.
        schedule: the steps that were taken, as far as they are settled.
        reserved_bits: bits that are reserved and not settled: by a process that trains now, or that was killed.
        charged_bits: bits of the schedule, and what is reserved.
        last_change: time of its last line, in seconds since 1970.
    """

    run: str
    sessions: int
    schedule: Schedule
    reserved_bits: float
    charged_bits: float
    last_change: int


class _Run:
    """What has been read of one run."""

    def __init__(self) -> None:
        self.steps: Counter[tuple[float, float]] = Counter()
        self.sessions: set[str] = set()
        self.last_change = 0


class Ledger:
    """All leakage about one training set: an append-only file, safe for concurrent processes and killed writers.

    Hand it to an accountant (``accountant.use_ledger(ledger, run="baseline")``) or to the Lightning callback. Every
    budget and every bound then holds for the total of all runs on the ledger.

    The file must not be copied back from a backup or edited: a ledger that forgets is worse than none. What a
    checkpoint remembers of it is compared when the run resumes. Put it on a file system with working locks, and with
    the data, not with one experiment.

    Args:
        path: the file, made if it is missing; or a folder, in which the file is named after the fingerprint.
        fingerprint: of the training set, such as ``opacus_reconbound.fingerprint(dataset)``, or any fixed name for
            it. Needed to make a ledger; an existing one is refused where it differs.

    Attributes:
        path: the file.
        fingerprint: of the training set.
        id: distinguishes this ledger from all others.

    Raises:
        LedgerError: the file is no ledger, damaged, written by a newer version, or about other records.
        InvalidValueError: a new ledger needs a fingerprint.

    Example:
        >>> import tempfile
        >>> ledger = Ledger(tempfile.mkdtemp(), fingerprint="digits")
        >>> ledger.add([(1.0, 0.01, 1000)], run="first try")
        >>> round(ledger.total_bits, 4), [run.run for run in ledger.runs]
        (0.1209, ['first try'])
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: str | None = None) -> None:
        if fingerprint is not None and not (isinstance(fingerprint, str) and fingerprint):
            raise InvalidValueError(f"Expected fingerprint to be a text. Found {fingerprint!r}.")
        self.path = Path(path)
        if self.path.is_dir():
            if fingerprint is None:
                raise InvalidValueError(f"{path} is a folder of ledgers. Say of which records: fingerprint=...")
            self.path /= hashlib.sha256(fingerprint.encode()).hexdigest()[:32] + ".jsonl"
        self.fingerprint = ""
        self.id = ""
        self._lock = threading.RLock()
        self._offset = 0  # bytes read: whole, valid lines only
        self._chains = [_START]  # after each line
        self._runs: dict[str, _Run] = {}
        self._reserved: dict[str, tuple[str, float]] = {}  # session: (run, bits)
        self._settled = ExactSum()
        self._budget_bits: float | None = None
        if not self.path.exists() and fingerprint is None:
            raise InvalidValueError(
                f"There is no ledger at {self.path}. To make one, say of which records: fingerprint=..."
            )
        with self._exclusive(create=fingerprint is not None) as file:
            if self._offset == 0 and fingerprint is not None:
                header = {"ledger": uuid.uuid4().hex, "version": _VERSION, "fingerprint": fingerprint}
                self._append(file, header)
                _sync_folder(self.path.parent)
        if self._offset == 0:
            raise LedgerError(f"{self.path} is not a ledger: it is empty.")
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise LedgerError(
                f"{self.path} is the ledger of other records: its fingerprint is {self.fingerprint[:32]!r}, not "
                f"{fingerprint[:32]!r}. Each training set needs a ledger of its own; has this one been changed?"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Ledger, (str(self.path), self.fingerprint)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        return self

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def total_bits(self) -> float:
        """Charged bits of all runs, with what is reserved; exact, rounded once."""
        with self._lock:
            self.refresh()
            return self._total().value

    @property
    def reserved_bits(self) -> float:
        """Bits that are reserved and not settled, by processes that train now or were killed."""
        with self._lock:
            self.refresh()
            return math.fsum(bits for _, bits in self._reserved.values())

    @property
    def schedule(self) -> Schedule:
        """All settled steps of all runs."""
        return sum((run.schedule for run in self.runs), Schedule())

    @property
    def runs(self) -> tuple[LedgerRun, ...]:
        """The runs, in the order of their first lines."""
        with self._lock:
            self.refresh()
            return tuple(self._summary(name, run) for name, run in self._runs.items())

    @property
    def budget_bits(self) -> float | None:
        """The most bits that all runs together may charge; None for no limit. Every writer keeps it."""
        with self._lock:
            self.refresh()
            return self._budget_bits

    def refresh(self) -> None:
        """Read what other processes have added; cheap where nothing was. Done by everything above."""
        with self._lock:
            try:
                size = os.stat(self.path).st_size
                if size == self._offset:
                    return
                if size > self._offset:
                    with open(self.path, "rb") as file:
                        file.seek(self._offset)
                        data = file.read()
            except OSError as error:
                raise LedgerError(f"The ledger {self.path} cannot be read: {error.strerror}.") from error
            if size < self._offset:
                raise self._damaged("it has become shorter")
            self._consume(data[: data.rfind(b"\n") + 1])

    def position(self) -> tuple[int, str]:
        """Number of lines and the checksum after them: what a checkpoint remembers of the ledger."""
        with self._lock:
            return len(self._chains) - 1, self._chains[-1]

    def continues(self, lines: int, chain: str) -> bool:
        """Whether the first ``lines`` lines are those that a ``position()`` was taken after."""
        with self._lock:
            self.refresh()
            return 0 <= lines < len(self._chains) and self._chains[lines] == chain

    # -- writing ----------------------------------------------------------------------------------------------------

    def add(self, history: Iterable[Any], *, run: str) -> None:
        """Charge steps that were taken elsewhere, or are about to be.

        Args:
            history: entries (noise_multiplier, sample_rate, num_steps), as in an Opacus accountant.
            run: their name.
        """
        entries = [(r.noise_multiplier, r.sample_rate, r.steps) for r in Schedule.from_history(history)]
        with self._exclusive() as file:
            self._append(file, _line(_run_name(run), uuid.uuid4().hex, entries, 0.0))

    def set_budget(self, bits: float | None) -> None:
        """Limit what all runs together may charge; None lifts the limit.

        Args:
            bits: such as ``certificate.leakage_budget(min_rho)``.
        """
        value = None if bits is None else _validate.non_negative("bits", bits)
        with self._exclusive() as file:
            self._append(file, {"budget_bits": None if value is None else _plain(value), "time": int(time.time())})

    def session(self, run: str, *, reserve_steps: int = 256) -> LedgerSession:
        """A writer for one run in one process; ``accountant.use_ledger`` makes it for you."""
        return LedgerSession(self, run, reserve_steps=reserve_steps)

    @contextlib.contextmanager
    def _exclusive(self, *, create: bool = False) -> Iterator[int]:
        """The file, locked against other writers and read to its end; what a killed writer left is repaired."""
        with self._lock:
            try:
                if create:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self.path, os.O_RDWR | _BINARY | (os.O_CREAT if create else 0), 0o644)
            except OSError as error:
                raise LedgerError(f"The ledger {self.path} cannot be opened: {error.strerror}.") from error
            try:
                with _locked(file):
                    self._read_to_end(file)
                    yield file
            except OSError as error:
                raise LedgerError(
                    f"The ledger {self.path} cannot be written: {error.strerror}. Nothing was charged."
                ) from error
            finally:
                os.close(file)

    def _read_to_end(self, file: int) -> None:
        size = os.fstat(file).st_size
        if size < self._offset:
            raise self._damaged("it has become shorter")
        data = _read(file, self._offset, size - self._offset)
        whole = data.rfind(b"\n") + 1
        self._consume(data[:whole])
        torn = data[whole:]
        if not torn:
            return
        if self._chain_of(torn) is not None:  # all of it is there but the end of the line
            _write(file, size, b"\n")
            os.fsync(file)
            self._consume(torn + b"\n")
            return
        if self._offset == 0 and not b'{"ledger":"'.startswith(torn[:11]):
            raise LedgerError(f"{self.path} is not a ledger. Choose another file.")
        os.ftruncate(file, self._offset)  # its writer was killed before it could take a step
        os.fsync(file)

    def _append(self, file: int, record: Mapping[str, Any]) -> None:
        payload = json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
        chain = _chain(self._chains[-1], payload)
        line = payload[:-1] + _MARK + chain.encode() + b'"}\n'
        start = self._offset
        try:
            _write(file, start, line)
            os.fsync(file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file, start)
            raise
        self._consume(line)

    # -- lines ------------------------------------------------------------------------------------------------------

    def _chain_of(self, line: bytes) -> str | None:
        """The checksum of a line that continues what has been read; None where it does not."""
        payload, mark, tail = line.rpartition(_MARK)
        if not mark or len(tail) != len(_START) + 2 or tail[-2:] != b'"}':
            return None
        chain = _chain(self._chains[-1], payload + b"}")
        return chain if tail[:-2] == chain.encode() else None

    def _consume(self, data: bytes) -> None:
        """Take in whole lines. What a line says is checked before any of it counts."""
        for line in data.splitlines(keepends=True):
            number = len(self._chains)
            chain = self._chain_of(line[:-1])
            if chain is None:
                if number == 1:
                    raise LedgerError(f"{self.path} is not a ledger, or its first line is damaged.")
                raise self._damaged(f"line {number} is altered, or lines before it are missing")
            try:
                record = json.loads(line, parse_constant=_no_constant)
                self._take(record, first=number == 1)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                reason = " ".join(str(error).split())[:200]
                raise self._damaged(f"line {number} is not what a ledger holds ({reason})") from error
            self._chains.append(chain)
            self._offset += len(line)

    def _take(self, record: dict[str, Any], *, first: bool) -> None:
        if first:
            version, identity, fingerprint = record["version"], record["ledger"], record["fingerprint"]
            if type(version) is not int or not isinstance(identity, str) or not isinstance(fingerprint, str):
                raise ValueError("bad header")
            if version != _VERSION:
                raise LedgerError(
                    f"{self.path} has version {version}; this library reads {_VERSION}. Update opacus-reconbound."
                )
            self.id, self.fingerprint = identity, fingerprint
            return
        if "budget_bits" in record:
            bits = record["budget_bits"]
            self._budget_bits = None if bits is None else _validate.non_negative("budget_bits", bits)
            return
        name, session, when = _run_name(record["run"]), record["session"], _validate.integer("time", record["time"])
        if not isinstance(session, str):
            raise ValueError("bad session")
        reserved = _validate.non_negative("reserved_bits", record["reserved_bits"])
        entries = [
            (
                _validate.non_negative("noise_multiplier", sigma),
                _validate.sample_rate(q),
                _validate.steps("num_steps", steps),
            )
            for sigma, q, steps in record["entries"]
        ]
        run = self._runs.setdefault(name, _Run())
        charges = step_charges([q for _, q, _ in entries], [sigma for sigma, _, _ in entries])
        for (sigma, q, steps), (_, bits) in zip(entries, charges, strict=True):
            run.steps[sigma, q] += steps
            self._settled.add(bits, steps)
        run.sessions.add(session)
        run.last_change = when
        self._reserved.pop(session, None)
        if reserved > 0:
            self._reserved[session] = (name, reserved)

    def _total(self, *, without: str | None = None) -> ExactSum:
        """Settled and reserved bits, without what one session has reserved."""
        total = self._settled.copy()
        for session, (_, bits) in self._reserved.items():
            if session != without:
                total.add(bits)
        return total

    def _summary(self, name: str, run: _Run) -> LedgerRun:
        total = ExactSum()
        for (sigma, q), steps in run.steps.items():
            total.add(step_charge(q, sigma)[1], steps)
        reserved = math.fsum(bits for other, bits in self._reserved.values() if other == name)
        total.add(reserved)
        return LedgerRun(
            run=name,
            sessions=len(run.sessions),
            schedule=Schedule(
                tuple(
                    Run(q, sigma, min(steps - taken, _validate.MOST_STEPS))
                    for (sigma, q), steps in run.steps.items()
                    for taken in range(0, steps, _validate.MOST_STEPS)
                )
            ),
            reserved_bits=reserved,
            charged_bits=total.value,
            last_change=run.last_change,
        )

    def _damaged(self, how: str) -> LedgerError:
        return LedgerError(
            f"The ledger {self.path} is damaged: {how}. What it held cannot be told from what is left, so nothing is "
            "charged to it. Restore the file as it was last written; never an older copy, which would forget runs."
        )


class LedgerSession:
    """The steps of one run in one process: reserved before they are taken, settled afterwards.

    Well within the reservation and the budget a step is admitted by an upper bound on its charge, which is cheap. Only
    where that bound meets either, the exact sum decides, as it would at every step; what is written is always exact.

    Safe to share between threads; a forked process continues in a session of its own.

    Attributes:
        ledger: where they are charged.
        run: the name of the run.
        reserve_steps: how many steps are reserved at once: the most that a killed process leaves over-counted.
    """

    def __init__(self, ledger: Ledger, run: str, *, reserve_steps: int = 256) -> None:
        self.ledger = ledger
        self.run = _run_name(run)
        self.reserve_steps = _validate.steps("reserve_steps", reserve_steps, minimum=1)
        self._lock = ledger._lock
        self._begin()
        _SESSIONS.add(self)

    def _begin(self) -> None:
        self._process = os.getpid()
        self._id = uuid.uuid4().hex
        self._granted = 0.0  # bits that are reserved on the file
        self._pending: list[Entry] = []  # steps taken within them
        self._pending_bits = ExactSum()  # of the first of them,
        self._summed = (0, 0)  # so many entries, and so many steps of the last of these
        self._ceiling = 0.0  # an upper bound on the bits of all of them
        self._base: tuple[int, ExactSum, float] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LedgerSession:
        return self  # two copies must not spend one reservation

    def __reduce__(self) -> tuple[Any, ...]:
        return _session, (self.ledger, self.run, self.reserve_steps)

    @property
    def total(self) -> ExactSum:
        """Bits of everything on the ledger, with this session's own steps and without its unused reservation."""
        with self._lock:
            self._after_fork()
            self.ledger.refresh()
            return self._total()

    def charge(self, noise_multiplier: float, sample_rate: float, *, budget_bits: float | None = None) -> bool:
        """Charge one step, before it is taken.

        Args:
            noise_multiplier: σ in [0, inf].
            sample_rate: q in [0, 1].
            budget_bits: the most that the total may become, beside the ledger's own limit.

        Returns:
            Whether the step is charged; False where it would exceed a budget, and nothing is charged.

        Raises:
            LedgerError: the ledger cannot be read or written; nothing is charged.
        """
        with self._lock:
            self._after_fork()
            ceiling = _above(self._ceiling + step_ceiling(sample_rate, noise_multiplier))
            if not self._covers_ceiling(ceiling, budget_bits):
                bits = step_charge(sample_rate, noise_multiplier)[1]
                if not self._covers(bits, budget_bits) and not self._reserve(bits, budget_bits):
                    return False
                ceiling = _above(self._sum_pending().after(bits))
            last = self._pending[-1] if self._pending else None
            if last is not None and last[0] == noise_multiplier and last[1] == sample_rate:
                self._pending[-1] = (noise_multiplier, sample_rate, last[2] + 1)
            else:
                self._pending.append((noise_multiplier, sample_rate, 1))
            self._ceiling = ceiling
            return True

    def add(self, entries: Iterable[Entry]) -> None:
        """Charge steps at once, such as those of a history that is not on the ledger yet; no budget stops this."""
        with self._lock:
            self._after_fork()
            self._pending.extend(entries)
            self._ceiling = math.inf  # until they are written
            self.settle(force=True)

    def settle(self, *, force: bool = False) -> None:
        """Write which steps were taken, and give back what is reserved beyond them; at the end of a run."""
        with self._lock:
            self._after_fork()
            if force or self._pending or self._granted > 0:
                self._write(0.0)

    def _after_fork(self) -> None:
        if self._process != os.getpid():
            self._begin()

    def _sum_pending(self) -> ExactSum:
        """Bits of the pending steps, exactly: what is new since the last time is added."""
        entries, last = self._summed
        new = self._pending[max(entries - 1, 0) :]
        if new and (entries, last) != (len(self._pending), new[-1][2]):
            charges = step_charges([q for _, q, _ in new], [sigma for sigma, _, _ in new])
            for (_, _, steps), (_, bits) in zip(new, charges, strict=True):
                self._pending_bits.add(bits, steps - last)
                last = 0
            self._summed = len(self._pending), new[-1][2]
        return self._pending_bits

    def _others(self) -> tuple[ExactSum, float]:
        """Everything on the ledger but what this session has pending or reserved; and an upper bound on it in bits."""
        lines = len(self.ledger._chains)
        if self._base is None or self._base[0] != lines:
            total = self.ledger._total(without=self._id)
            self._base = lines, total, _above(total.value)
        return self._base[1:]

    def _total(self) -> ExactSum:
        total = self._others()[0].copy()
        total.include(self._sum_pending())
        return total

    def _limit(self, budget: float | None) -> float | None:
        own = self.ledger._budget_bits
        return own if budget is None else budget if own is None else min(own, budget)

    def _covers_ceiling(self, ceiling: float, budget: float | None) -> bool:
        """Whether pending steps of at most so many bits fit, this one among them; where not, the exact sum decides."""
        if self._granted == 0.0 or not ceiling <= self._granted:
            return False
        limit = self._limit(budget)
        return limit is None or _above(self._others()[1] + ceiling) <= limit

    def _covers(self, bits: float, budget: float | None) -> bool:
        if not self._sum_pending().after(bits) <= self._granted or self._granted == 0.0:
            return False
        limit = self._limit(budget)
        return limit is None or self._total().after(bits) <= limit

    def _reserve(self, bits: float, budget: float | None) -> bool:
        """Settle, and reserve as many steps of ``bits`` as are wanted and fit; False where not one fits."""
        with self.ledger._exclusive() as file:
            total, limit, steps = self._total(), self._limit(budget), self.reserve_steps
            if limit is not None and total.after(bits, steps) > limit:
                low, high = 0, steps
                while high - low > 1:
                    middle = (low + high) // 2
                    low, high = (low, middle) if total.after(bits, middle) > limit else (middle, high)
                if low == 0:
                    return False
                steps = low
            # a step that reveals nothing needs a line as well, so that it is settled some time
            self._write(max(ExactSum().after(bits, steps), 5e-324), file)
        return True

    def _write(self, granted: float, file: int | None = None) -> None:
        record = _line(self.run, self._id, self._pending, granted)
        if file is None:
            with self.ledger._exclusive() as opened:
                self.ledger._append(opened, record)
        else:
            self.ledger._append(file, record)
        self._granted, self._pending, self._pending_bits = granted, [], ExactSum()
        self._summed, self._ceiling = (0, 0), 0.0


def _above(value: float) -> float:
    """A number above a correctly rounded one's exact value."""
    return math.nextafter(value, math.inf)


def _session(ledger: Ledger, run: str, reserve_steps: int) -> LedgerSession:
    return LedgerSession(ledger, run, reserve_steps=reserve_steps)


_SESSIONS: weakref.WeakSet[LedgerSession] = weakref.WeakSet()


@atexit.register
def _settle_all() -> None:
    for session in list(_SESSIONS):
        if session._process == os.getpid():
            with contextlib.suppress(LedgerError, OSError):  # what is left is an over-count
                session.settle()


# -- lines and files -------------------------------------------------------------------------------------------------


def _line(run: str, session: str, entries: Iterable[Entry], reserved: float) -> dict[str, Any]:
    return {
        "run": run,
        "session": session,
        "time": int(time.time()),
        "entries": [[_plain(sigma), q, steps] for sigma, q, steps in entries],
        "reserved_bits": _plain(reserved),
    }


def _plain(value: float) -> float | str:
    return "inf" if math.isinf(value) else value  # JSON has no infinity


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _run_name(run: object) -> str:
    if not isinstance(run, str) or not run or len(run) > 200 or not run.isprintable():
        raise InvalidValueError(f"Expected run to be a name of 1 to 200 printable letters. Found {run!r}.")
    return run


def _chain(before: str, payload: bytes) -> str:
    return hashlib.sha256(before.encode() + payload).hexdigest()[: len(_START)]


def _read(file: int, start: int, size: int) -> bytes:
    os.lseek(file, start, os.SEEK_SET)
    pieces = []
    while size > 0:
        piece = os.read(file, size)
        if not piece:
            break
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write(file: int, start: int, data: bytes) -> None:
    os.lseek(file, start, os.SEEK_SET)
    while data:
        data = data[os.write(file, data) :]


def _sync_folder(folder: Path) -> None:
    """Make the file's name durable too."""
    if sys.platform != "win32":
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


if sys.platform == "win32":  # pragma: no cover
    import msvcrt

    _FAR = 2**30  # a byte that no reader reads: Windows locks keep readers out

    @contextlib.contextmanager
    def _locked(file: int) -> Iterator[None]:
        while True:
            os.lseek(file, _FAR, os.SEEK_SET)
            try:
                msvcrt.locking(file, msvcrt.LK_LOCK, 1)
                break
            except OSError:  # it gives up after ten seconds
                continue
        try:
            yield
        finally:
            os.lseek(file, _FAR, os.SEEK_SET)
            msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    @contextlib.contextmanager
    def _locked(file: int) -> Iterator[None]:
        fcntl.flock(file, fcntl.LOCK_EX)  # of the open file: excludes other threads too, and ends with the process
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
