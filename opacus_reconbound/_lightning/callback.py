"""The callback: live ρ*, and a halt before the step that would breach the floor.

Four layers keep the floor. (1) After each step the next one is predicted; if it would breach, training is asked to
stop, and ``min_epochs``/``min_steps`` are lifted. (2) Before each step the check is repeated with the noise that this
step will really use. (3) The accountant holds the budget itself and refuses to charge. (4) The underlying optimizer
is audited: an update that was not charged exactly once is refused.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from opacus_reconbound import _validate
from opacus_reconbound._lightning.records import NOT_COMPARED, check_records
from opacus_reconbound._lightning.state import KEY, VERSION, readable, require_account, require_empty, stored_account
from opacus_reconbound._lightning.streams import Stream, require_new_randomness
from opacus_reconbound._lightning.table import forecast_rows, print_table
from opacus_reconbound._lightning.trainer import planned_steps, require_supported, watches
from opacus_reconbound._lightning.wiring import (
    remove_grad_sample_hooks,
    require_hooks_in_place,
    require_no_swallowed_settings,
)
from opacus_reconbound._live import (
    account_of,
    breaches,
    describe_outcome,
    epsilon_of,
    forecast_run,
    measure,
    shorten,
    stricter_budget_in_force,
)
from opacus_reconbound._rounding import down3
from opacus_reconbound.accountants import MutualInformationAccountant, StepHook, discard_pending_step
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.certificates.plan import SplitPlan
from opacus_reconbound.checks import hooks_of, ranks_in_step, require_private_run
from opacus_reconbound.engine import Forecast, stricter_budget
from opacus_reconbound.errors import AccountingError, InvalidValueError, LedgerError
from opacus_reconbound.leakage.ledger import Ledger

__all__ = ["ReconstructionBoundMixin"]

_REFRESH = 0.5  # seconds between two entries of the progress bar


class ReconstructionBoundMixin:
    r"""Logs a live reconstruction bound during private training, and stops before a floor on ρ* is breached.

    Works with automatic and manual optimization. The optimizer must come from a ``PrivacyEngine`` with accountant
    ``"rdp+mi"`` or ``"prv+mi"``, and the loader must draw Poisson batches; anything else is refused before the first
    step. The state travels in Lightning's checkpoints: a resumed run continues the same account, and a checkpoint
    without it is refused.

    Args:
        certificate: a ``SourceCertificate`` or the path of one.
        min_rho: the floor; None to log only.
        delta: δ of the logged ε; by default N^-1.1 for N training records, as in the paper.
        epsilon_every_n_steps: how often ε is computed (it is slower than ρ*).
        verbose: print the forecast and the outcome.
        ledger: of the training set, or its path. The floor, the bound and the steps left then hold for all runs on it.
        run: the name of this run on the ledger; a restart keeps it.
        splits: a ``SplitPlan`` or the path of one. A certificate that was not made from its D_perp and D_est is
            refused, and before the first step a training set that is not its D_train: by the number of records, and
            by the indices of a ``Subset``. D_train may overlap D_est.
        on_breach: what happens before a step that would breach the floor. ``"stop"``: training ends as at its planned
            end, with the status FINISHED. ``"raise"``: ``ReconstructionBudgetExceeded``; nothing is applied.
            ``"warn"``: one warning, and training goes on; the floor is not armed.
        record: maps a training batch to its raw records, such as ``lambda batch: batch[0]``. Those of the first batch
            are compared with the certificate: their shape, and their range of values. ``checks`` says what was found.
        continue_from: a checkpoint whose account this run continues, where only its weights were loaded
            (``load_from_checkpoint``): they carry what their training revealed.

    Logged metrics, at the trainer's ``log_every_n_steps``, at each epoch's last step and before a stop, and at every
    step where a callback such as ``ModelCheckpoint`` monitors one; ``bound`` is always of this moment:
        ``reconstruction/rho_star``: ρ* so far, rounded down.
        ``reconstruction/leakage_bits``: γ charged so far, in bits, rounded up.
        ``reconstruction/steps_left``: further steps within the floor at the present noise (with a floor).
        ``privacy/epsilon``: ε at ``delta``, every ``epsilon_every_n_steps`` steps, at each epoch's last step, and
            before a stop.

    The progress bar shows them as ``rho*``, ``bits``, ``left`` and ``eps``.

    Attributes:
        accountant: the account, once training has started.
        forecast: what was forecast at the start.
        stopping_reason: why training was stopped, or None.
        checks: what was compared with the certificate, and what could not be, in sentences.

    Raises:
        InvalidValueError: an argument is out of range.
        CertificateError: the certificate cannot be read.
        FloorUnreachableError: the certificate does not support the floor.
        DataError: the certificate or the training set does not fit ``splits``.
        AccountingError: during training, where what runs is not what is accounted.
    """

    # Path and not os.PathLike[str]: jsonargparse would read the file itself, and hand over what is in it
    def __init__(
        self,
        certificate: SourceCertificate | str | Path,
        min_rho: float | None = None,
        *,
        delta: float | None = None,
        epsilon_every_n_steps: int = 50,
        verbose: bool = True,
        ledger: Ledger | str | Path | None = None,
        run: str | None = None,
        splits: SplitPlan | str | Path | None = None,
        on_breach: Literal["stop", "raise", "warn"] = "stop",
        record: Callable[[Any], Any] | None = None,
        continue_from: str | Path | None = None,
    ) -> None:
        if on_breach not in ("stop", "raise", "warn"):
            raise InvalidValueError(f"Expected on_breach='stop', 'raise' or 'warn'. Found {on_breach!r}.")
        if record is not None and not callable(record):
            raise InvalidValueError(f"Expected record to be a function of a batch. Found {record!r}.")
        if (ledger is None) != (run is None):
            raise InvalidValueError("ledger and run go together: the ledger of the training set, and a name on it.")
        if not isinstance(certificate, SourceCertificate):
            certificate = SourceCertificate.load(certificate)
        self.certificate = certificate
        self.splits = splits if splits is None or isinstance(splits, SplitPlan) else SplitPlan.load(splits)
        if self.splits is not None:
            self.splits.check_made(certificate)
        self.min_rho = min_rho
        self.budget_bits = None if min_rho is None else certificate.leakage_budget(min_rho)
        self.delta = None if delta is None else _validate.fraction("delta", delta)
        self.epsilon_every_n_steps = _validate.integer("epsilon_every_n_steps", epsilon_every_n_steps, minimum=1)
        self.verbose = verbose
        self.ledger = ledger if ledger is None or isinstance(ledger, Ledger) else Ledger(ledger)
        self.run = run
        self.on_breach = on_breach
        self.record = record
        self.checks: tuple[str, ...] = ()
        self._continued = None if continue_from is None else stored_account(continue_from)
        self.accountant: MutualInformationAccountant | None = None
        self.forecast: Forecast | None = None
        self.stopping_reason: str | None = None
        self._found: list[tuple[Any, StepHook]] = []
        self._audits: list[Any] = []
        self._audited_steps = 0
        self._updates_of_batch = 0
        self._logged_steps = -1
        self._shown = -math.inf  # when the progress bar was last told, seconds
        self._watched = False
        self._restored: dict[str, Any] | None = None
        self._lifted: tuple[Any, Any] | None = None
        self._warned = False
        self._streams: list[Stream] = []

    # -- what one can ask it ----------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """One key for both namespaces, whatever the arguments: another floor must not start a new account."""
        return KEY

    @property
    def bound(self) -> ReconstructionBound:
        """The bound so far; at zero leakage before training."""
        bits = 0.0 if self.accountant is None else self.accountant.charged_bits
        return self.certificate.bound(bits)

    def epsilon(self) -> float:
        """ε at ``delta`` so far."""
        if self.accountant is None or self.delta is None:
            raise InvalidValueError("ε is known once training has started, or where delta was given.")
        return epsilon_of(self.accountant, self.delta)

    # -- start ------------------------------------------------------------------------------------------------------

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of a trained model that says nothing about what its training leaked."""
        require_account(checkpoint)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state; it is applied when training starts, for the optimizers do not exist yet."""
        self._restored = readable(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The account as plain values, and what it was judged by."""
        if self.accountant is not None:
            accountant = dict(self.accountant.state_dict())
        elif self._restored is not None:
            accountant = self._restored["accountant"]
        else:
            return {}
        return {
            "version": VERSION,
            "accountant": accountant,
            "certificate": self.certificate.digest,
            "min_rho": self.min_rho,
            "streams": list(self._streams),
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the wiring, restore the account, arm the budget, forecast; stop at once where it is spent."""
        self.stopping_reason = None
        self._lifted = None
        self._found = hooks_of(list(trainer.optimizers))
        self.accountant = accountant = account_of(self._found)
        require_supported(trainer)
        require_no_swallowed_settings(pl_module)
        loader = trainer.train_dataloader
        require_private_run(loader, self._found, world_size=trainer.world_size, ends_at_length=True)
        if self.splits is not None:
            self.splits.check_training(loader.dataset)
        if self.ledger is not None and self.run is not None:
            accountant.use_ledger(self.ledger, run=self.run)
        earlier = self._restored or self._continued
        if earlier is not None:
            if self._restored is None:
                require_empty(accountant)
            accountant.load_state_dict(earlier["accountant"])
            self._streams = [tuple(stream) for stream in earlier.get("streams", ())]
            self._restored = self._continued = None
        used = [getattr(loader.batch_sampler, "generator", None), *(private.generator for private, _ in self._found)]
        self._streams = require_new_randomness(used, self._streams)
        self._warned = False
        self._shown = -math.inf
        self._watched = any(watches(callback) for callback in trainer.callbacks)
        if self.budget_bits is not None and self.on_breach != "warn":
            accountant.budget_bits = stricter_budget(accountant, self.budget_bits)
        if self.delta is None:
            self.delta = min(0.5, float(max(2, len(loader.dataset))) ** -1.1)
        ranks_in_step(loader, self._found)
        self._audited_steps = len(accountant)
        self._logged_steps = -1
        self._audits = [
            optimizer.original_optimizer.register_step_pre_hook(self._audit) for optimizer, _ in self._found
        ]
        self._announce(trainer, loader)
        self.checks = (NOT_COMPARED,) if self.record is None else ()
        for sentence in self.checks:
            self._say(trainer, sentence)
        if self._breaches() and self.on_breach == "stop":
            self._stop(trainer, "the leakage budget was spent before training")

    def _announce(self, trainer: Any, loader: Any) -> None:
        assert self.accountant is not None  # noqa: S101 - set by the caller
        self.forecast = forecast_run(
            self.certificate,
            self._found,
            steps=planned_steps(trainer, loader, taken=len(self.accountant)),
            min_rho=self.min_rho,
            delta=self.delta,
        )
        notice = stricter_budget_in_force(self.certificate, self.accountant, self.budget_bits, before="fit()")
        if notice is not None:
            self._say(trainer, notice)
        if self.verbose and trainer.is_global_zero:
            print_table("Reconstruction bound: forecast", forecast_rows(self.forecast, self.bound, *self._found[0]))
        self._say(trainer, self.forecast.describe(on_breach=self.on_breach))

    # -- every step -------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A loader may have been exchanged or changed since the last batch: it still has to be what is charged."""
        loader = trainer.train_dataloader
        require_private_run(loader, self._found, world_size=trainer.world_size, ends_at_length=True)
        self._updates_of_batch = 0
        if self.record is not None and not self.checks:
            self._compare(trainer, batch)

    def _compare(self, trainer: Any, batch: Any) -> None:
        """The records of the first batch that has some, with what the certificate is about."""
        assert self.record is not None  # noqa: S101 - the caller has looked
        records = self.record(batch)
        if hasattr(records, "__len__") and len(records) == 0:
            return  # a Poisson batch can be empty
        self.checks = check_records(records, self.certificate.representation)
        self._say(trainer, " ".join(self.checks))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Layer 2: the exact check, with the noise of this very step."""
        if self._updates_of_batch > 0:
            raise AccountingError(
                "A second optimizer step is about to be taken on one batch. Leakage adds up over steps only where each "
                "draws its own Poisson batch; steps that share a batch reveal more than is charged for them. Take one "
                "step a batch: with several optimizers, alternate between batches."
            )
        require_no_swallowed_settings(pl_module)
        require_hooks_in_place(self._found)
        if self._breaches() and self.on_breach == "stop":
            for private, _ in self._found:
                discard_pending_step(private)
            self._stop(trainer, "the next step would have breached the floor")
            raise StopIteration
        # with "raise", the accountant refuses the step itself, before it is charged or applied

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, and layer 1: ask for a stop where the next step would breach."""
        if self.accountant is None:
            return
        breaches = self._breaches()
        steps = len(self.accountant)
        if steps != self._logged_steps:
            self._logged_steps = steps
            # also where it may be the last value anyone sees: at the end of an epoch, of the steps, of the budget
            last = trainer.is_last_batch or steps == trainer.max_steps or breaches
            self._log(trainer, pl_module, steps, last=last)
        if breaches and self.on_breach == "stop":
            self._stop(trainer, "the next step would breach the floor")
        if self.on_breach == "warn" and self.budget_bits is not None and not self._warned:
            self._warn_of_breach(self.accountant, self.budget_bits)

    def _log(self, trainer: Any, pl_module: Any, steps: int, *, last: bool) -> None:
        """Log where someone looks: one metric takes Lightning about a millisecond."""
        with_epsilon = last or steps == 1 or steps % self.epsilon_every_n_steps == 0
        logs = with_epsilon or self._watched or trainer._logger_connector.should_update_logs  # as in Lightning's own
        now = time.monotonic()
        shows = logs or (trainer.progress_bar_callback is not None and now - self._shown >= _REFRESH)
        if not shows:
            return
        values = self._values(with_epsilon=with_epsilon)
        if logs:
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        self._shown = now
        pl_module.log_dict(shorten(values), on_step=True, on_epoch=False, prog_bar=True, logger=False, batch_size=1)

    def _warn_of_breach(self, accountant: MutualInformationAccountant, budget: float) -> None:
        if accountant.charged_bits > budget:
            self._warned = True
            warnings.warn(
                f"The floor of {self.min_rho:g} is breached since step {len(accountant):,}: ρ* is "
                f"{down3(self.bound.rho)}. Training goes on, as on_breach='warn' says.",
                category=UserWarning,
                stacklevel=2,
            )

    def _values(self, *, with_epsilon: bool) -> dict[str, float]:
        assert self.accountant is not None  # noqa: S101 - set in on_train_start
        return measure(
            self.certificate,
            self._found,
            with_steps_left=self.accountant.budget_bits is not None,
            epsilon=self.epsilon() if with_epsilon else None,
        )

    def _breaches(self) -> bool:
        return self.accountant is not None and breaches(self._found)

    def _audit(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Layer 4: runs just before the parameters change."""
        assert self.accountant is not None  # noqa: S101 - set in on_train_start
        steps = len(self.accountant)
        if steps != self._audited_steps + 1:
            raise AccountingError(
                f"An update is about to be applied for which {steps - self._audited_steps} steps were charged instead "
                "of one. Call step() on the DPOptimizer only, and leave its step hook and its original_optimizer alone."
            )
        self._audited_steps = steps
        self._updates_of_batch += 1

    # -- the end ----------------------------------------------------------------------------------------------------

    def _stop(self, trainer: Any, reason: str) -> None:
        if self.stopping_reason is None:
            self.stopping_reason = reason
        trainer.should_stop = True
        loop = trainer.fit_loop
        if self._lifted is None:
            self._lifted = (loop.min_epochs, loop.epoch_loop.min_steps)
        loop.min_epochs = 0
        loop.epoch_loop.min_steps = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say how it ended."""
        if self.accountant is None:
            return
        outcome = describe_outcome(len(self.accountant), self.bound, stopped=self.stopping_reason, min_rho=self.min_rho)
        self._say(trainer, outcome)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the trainer's minima, end the audit, free the module for another ``fit``; the budget stays armed."""
        if stage == "fit":
            self._clean_up(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Clean up as ``teardown`` does, which Lightning does not call for callbacks after an exception."""
        self._clean_up(trainer, pl_module)

    def _clean_up(self, trainer: Any, pl_module: Any) -> None:
        if self._lifted is not None:
            trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = self._lifted
            self._lifted = None
        for handle in self._audits:
            handle.remove()
        self._audits = []
        remove_grad_sample_hooks(pl_module)
        self._found = []
        if self.accountant is not None:
            with contextlib.suppress(LedgerError):  # what is not given back is counted as taken
                self.accountant.settle()

    def _say(self, trainer: Any, text: str) -> None:
        if self.verbose and trainer.is_global_zero:
            tqdm.write(text)  # does not tear a progress bar
