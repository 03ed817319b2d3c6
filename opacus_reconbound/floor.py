"""Live in a plain loop: forecast, progress, logs and a halt before the step that would breach a floor."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from opacus import PrivacyEngine
from tqdm import tqdm

from opacus_reconbound import _validate
from opacus_reconbound._live import (
    BITS,
    EPSILON,
    LEFT,
    RHO,
    account_of,
    breaches,
    describe_outcome,
    epsilon_of,
    forecast_run,
    measure,
    shorten,
    stricter_budget_in_force,
)
from opacus_reconbound.accountants import require_certificate
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.checks import GuardedLoader, guard, hooks_of
from opacus_reconbound.engine import Forecast, require_accountant, stricter_budget
from opacus_reconbound.errors import AccountingError, InvalidValueError, LedgerError, ReconstructionBudgetExceeded

__all__ = ["Floor", "attach"]

Log = Callable[[dict[str, float], int], Any]


class Floor:
    """What ``attach`` returns. Use it in a ``with`` block, or call ``close()`` at the end.

    Attributes:
        certificate: of the source.
        min_rho: the floor, or None.
        forecast: what was forecast at the start.
        stopping_reason: why training was stopped, or None.
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        certificate: SourceCertificate,
        *,
        model: Any,
        optimizers: list[Any],
        min_rho: float | None,
        steps: int | None,
        logs: list[Log],
        delta: float | None,
        epsilon_every_n_steps: int,
        progress: bool | None,
        verbose: bool,
    ) -> None:
        self.certificate, self.min_rho = certificate, min_rho
        self.stopping_reason: str | None = None
        self._arguments = engine, model, optimizers
        self._found = hooks_of(optimizers)
        self._accountant = account_of(self._found)
        self._delta, self._epsilon_every_n_steps = delta, epsilon_every_n_steps
        self._logs, self._verbose = logs, verbose
        budget = None if min_rho is None else certificate.leakage_budget(min_rho)
        if budget is not None:
            self._accountant.budget_bits = stricter_budget(self._accountant, budget)
        self._start = self._seen = taken = len(self._accountant)
        planned = None if steps is None else taken + steps
        self.forecast: Forecast = forecast_run(certificate, self._found, steps=planned, min_rho=min_rho, delta=delta)
        notice = stricter_budget_in_force(certificate, self._accountant, budget, before="attach()")
        for text in (notice, self.forecast.describe()):
            if text is not None:
                self._say(text)
        self._bar = tqdm(total=planned, initial=taken, unit="step", disable=None if progress is None else not progress)
        self._handles = [
            optimizer.original_optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers
        ]

    # -- what one can ask it -------------------------------------------------------------------------------------------

    @property
    def bound(self) -> ReconstructionBound:
        """The bound so far."""
        return self._accountant.bound(self.certificate)

    @property
    def stopped(self) -> bool:
        """Whether training was stopped by the floor."""
        return self.stopping_reason is not None

    # -- the loop ------------------------------------------------------------------------------------------------------

    def guard(self, loader: Any, *, accept: Sequence[str] = ()) -> GuardedUntilFloor:
        """The loader's batches, as ``opacus_reconbound.guard`` hands them out, ending before a step that would breach.

        Args:
            loader: what ``make_private`` returned, or what ``BatchMemoryManager`` made of it; Poisson batches only.
            accept: as in ``guard``.

        Raises:
            AccountingError: now, at the start of a pass or at a step, where what runs is not what is charged.
        """
        engine, model, optimizers = self._arguments
        return GuardedUntilFloor(self, guard(engine, model, optimizers, loader, accept=accept))

    def _ends(self) -> bool:
        """Whether the next step would breach; remembers that."""
        if not breaches(self._found):
            return False
        if self.stopping_reason is None:
            self.stopping_reason = "the next step would breach the floor"
        return True

    def _after_step(self, *_: Any) -> None:
        """An optimizer has changed the parameters."""
        steps = len(self._accountant)
        if steps == self._seen:  # a step of frozen parameters is not charged
            return
        first, advance, self._seen = self._seen == self._start, steps - self._seen, steps
        epsilon = None
        if self._delta is not None and (first or steps % self._epsilon_every_n_steps == 0 or breaches(self._found)):
            epsilon = epsilon_of(self._accountant, self._delta)
        values = measure(
            self.certificate,
            self._found,
            with_steps_left=self._accountant.budget_bits is not None,
            epsilon=epsilon,
        )
        for log in self._logs:
            log(values, steps)
        self._bar.set_postfix(shorten(values), refresh=False)
        self._bar.update(advance)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say how it ended, and take hands off the optimizers and logs. The budget stays armed."""
        if not self._handles:
            return
        self._release()
        self._say(
            describe_outcome(len(self._accountant), self.bound, stopped=self.stopping_reason, min_rho=self.min_rho)
        )

    def _release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._bar.close()
        for log in self._logs:
            if isinstance(log, _Table):
                log.close()
        with contextlib.suppress(LedgerError):  # what is not given back is counted as taken
            self._accountant.settle()

    def __enter__(self) -> Floor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ReconstructionBudgetExceeded):
            self.stopping_reason = self.stopping_reason or "the next step would have breached the floor"
        if error is None or self.stopped:
            self.close()
        else:
            self._release()

    def _say(self, text: str) -> None:
        if self._verbose:
            tqdm.write(text)  # does not tear a progress bar


class GuardedUntilFloor:
    """What ``Floor.guard`` returns: iterate over it in place of the loader, in as many passes as you like."""

    def __init__(self, floor: Floor, guarded: GuardedLoader) -> None:
        self._floor, self._guarded = floor, guarded

    def __len__(self) -> int:
        return len(self._guarded)

    def __iter__(self) -> Iterator[Any]:
        if self._floor._ends():
            return
        with contextlib.closing(iter(self._guarded)) as batches:  # type: ignore[type-var]
            for batch in batches:
                yield batch
                if self._floor._ends():
                    return


def attach(
    engine: PrivacyEngine,
    certificate: SourceCertificate,
    *,
    model: Any,
    optimizer: Any,
    min_rho: float | None = None,
    epochs: int | None = None,
    log: Any = None,
    delta: float | None = None,
    epsilon_every_n_steps: int = 50,
    progress: bool | None = None,
    verbose: bool = True,
) -> Floor:
    """Watch a plain training loop, and end it before ρ* falls below a floor.

    It forecasts the run, shows ρ* and γ in a progress bar, logs them after every step, and arms the floor on the
    engine's account. A step that would breach raises ``ReconstructionBudgetExceeded``, and is neither applied nor
    charged; a loop over ``floor.guard(loader)`` ends before that step instead.

    Args:
        engine: ``PrivacyEngine(accountant="rdp+mi")`` or ``"prv+mi"``, after ``make_private``, or after
            ``make_private_with_rho``, whose floor then stays in force.
        certificate: of the source.
        model: the first object that ``make_private`` returned.
        optimizer: the optimizer that it returned, or a list of all of this engine.
        min_rho: the floor, in (0, 1]; None to watch only.
        epochs: passes still to come, for the forecast and the progress bar; None for no planned end.
        log: where the figures go after every step, one or a list of: a function of a dictionary and the number of
            steps; the path of a CSV file, which is continued where it exists; an object with ``add_scalar``, such as
            TensorBoard's ``SummaryWriter``.
        delta: δ of the logged ε; None for no ε.
        epsilon_every_n_steps: how often ε is computed (it is slower than ρ*).
        progress: show the progress bar; by default where standard error is a terminal.
        verbose: print the forecast and the outcome.

    Logged are ``reconstruction/rho_star`` (rounded down), ``reconstruction/leakage_bits`` (rounded up),
    ``reconstruction/steps_left`` at the present noise (with a floor) and ``privacy/epsilon`` (with ``delta``). Where
    several processes train, the first one logs.

    Returns:
        The floor: ``guard``, ``bound``, ``forecast``, ``stopped``, ``close``.

    Raises:
        AccountingError: the engine does not account for the leakage of this optimizer.
        FloorUnreachableError: the certificate does not support the floor.
        InvalidValueError: an argument is out of range.

    Example:
        >>> with attach(engine, certificate, model=model, optimizer=optimizer, min_rho=0.7) as floor:  # doctest: +SKIP
        ...     for x, y in floor.guard(loader):
        ...         optimizer.zero_grad()
        ...         criterion(model(x), y).backward()
        ...         optimizer.step()
    """
    require_certificate(certificate)
    accountant = require_accountant(engine)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    found = hooks_of(optimizers)
    if account_of(found) is not accountant:
        raise AccountingError(
            "The optimizer is charged to another account than that of this engine. Attach to the engine that made it "
            "private."
        )
    if min_rho is not None:
        certificate.leakage_budget(min_rho)  # refuse before a file is made
    rate = found[0][1].sample_rate
    steps = None
    if epochs is not None:
        steps = _validate.integer("epochs", epochs, minimum=1) * (max(1, round(1 / rate)) if rate > 0 else 1)
    delta = None if delta is None else _validate.fraction("delta", delta)
    epsilon_every_n_steps = _validate.integer("epsilon_every_n_steps", epsilon_every_n_steps, minimum=1)
    first = _is_first_process()
    columns = [RHO, BITS]
    if min_rho is not None or accountant.budget_bits is not None:
        columns.append(LEFT)
    if delta is not None:
        columns.append(EPSILON)
    targets = [] if log is None else list(log) if isinstance(log, (list, tuple)) else [log]
    return Floor(
        engine,
        certificate,
        model=model,
        optimizers=optimizers,
        min_rho=min_rho,
        steps=steps,
        logs=[_log_to(target, columns) for target in targets] if first else [],
        delta=delta,
        epsilon_every_n_steps=epsilon_every_n_steps,
        progress=progress if first else False,
        verbose=verbose and first,
    )


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0


def _log_to(target: Any, columns: list[str]) -> Log:
    if isinstance(target, (str, os.PathLike)):
        return _Table(Path(target), columns)
    add_scalar = getattr(target, "add_scalar", None)
    if callable(add_scalar):

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                add_scalar(name, value, step)

        return write
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise InvalidValueError(
        "Expected log to be a function of (values, step), the path of a CSV file, an object with add_scalar, or a list "
        f"of these. Found {target!r}."
    )


class _Table:
    """A CSV file with a row for each step, which is on the disk when the step is over."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        names = ["step", *columns]
        try:
            self._file = path.open("a+", newline="", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InvalidValueError(f"log = {str(path)!r} cannot be written: {error}. Choose another path.") from error
        self._rows = csv.DictWriter(self._file, names)
        self._file.seek(0)
        header = next(csv.reader(self._file), None)
        if header is None:
            self._rows.writeheader()
        elif header != names:
            self._file.close()
            raise InvalidValueError(
                f"log = {str(path)!r} holds other columns, {','.join(header)[:80]}, than {','.join(names)}. Choose "
                "another path."
            )

    def __call__(self, values: Mapping[str, float], step: int) -> None:
        self._rows.writerow({"step": step, **values})

    def close(self) -> None:
        self._file.close()
