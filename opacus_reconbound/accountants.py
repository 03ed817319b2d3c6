"""The Opacus accountants "rdp+mi" and "prv+mi": (ε, δ) as before, and beside it the leakage γ in bits.

Importing this module registers both names, so that ``PrivacyEngine(accountant="prv+mi")`` works. ε is computed by
the inner accountant of Opacus. γ is a pure function of ``history``, Opacus's list of
``(noise_multiplier, sample_rate, num_steps)``, which others may assign or edit: it is summed exactly and rounded
once, so a run read step by step, resumed, or read at its end gives the same bits.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from opacus.accountants import PRVAccountant, RDPAccountant, create_accountant, register_accountant
from opacus.accountants.accountant import IAccountant
from opacus.accountants.analysis import rdp as rdp_analysis

from opacus_reconbound import _validate
from opacus_reconbound._mechanism import ADAPTIVE, BatchSizes, effective_noise, is_adaptive, is_ghost
from opacus_reconbound.errors import AccountingError, InvalidValueError, LedgerError, ReconstructionBudgetExceeded
from opacus_reconbound.leakage import ExactSum, Schedule, step_ceiling, step_charge, step_charges

if TYPE_CHECKING:
    from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
    from opacus_reconbound.leakage.ledger import Ledger, LedgerSession

__all__ = [
    "MutualInformationAccountant",
    "PRVMutualInformationAccountant",
    "Permit",
    "RDP_ADVICE",
    "RDPMutualInformationAccountant",
    "StepHook",
    "discard_pending_step",
    "without_advice",
]

Entry = tuple[float, float, int]

_STATE_VERSION = 2  # 1: without a ledger
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e4  # Opacus computes ε between these
_CHARGING = Lock()
RDP_ADVICE = "Optimal order is the"
"""How Opacus's advice to widen the orders of RDP begins; a looser ε is still an upper bound."""


@contextmanager
def without_advice() -> Iterator[None]:
    """Inside, RDP's advice to widen its orders is not shown."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=RDP_ADVICE, category=UserWarning)
        yield


def _pair(noise_multiplier: object, sample_rate: object) -> tuple[float, float]:
    try:
        return _validate.non_negative("noise_multiplier", noise_multiplier), _validate.sample_rate(sample_rate)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{error} Nothing was charged. Check the optimizer's noise_multiplier and its scheduler, and the sample "
            "rate, which Opacus multiplies by the number of batches accumulated into a step: accumulate fewer."
        ) from error


def _entry(index: int, entry: Any) -> Entry:
    try:
        sigma, q, steps = entry
        sigma, q = _validate.non_negative("noise_multiplier", sigma), _validate.sample_rate(q)
        return sigma, q, _validate.steps("num_steps", steps)
    except (TypeError, ValueError) as error:
        raise InvalidValueError(
            f"Expected history[{index}] = (noise_multiplier, sample_rate, num_steps). "
            f"Found {_validate.shown(entry)}: {error}"
        ) from error


def _reveals(sigma: float, q: float) -> bool:
    return q > 0 and not math.isinf(sigma)


def _sum_above(a: float, b: float) -> float:
    """A number not below a + b."""
    return math.nextafter(a + b, math.inf)


def _counts(history: Iterable[Entry]) -> Counter[tuple[float, float]]:
    """Steps of each (σ, q)."""
    counts: Counter[tuple[float, float]] = Counter()
    for sigma, q, steps in history:
        counts[sigma, q] += steps
    return counts


def require_certificate(certificate: SourceCertificate) -> SourceCertificate:
    """The certificate, or an error where it is something else, such as a path."""
    if not hasattr(certificate, "leakage_budget"):
        raise InvalidValueError(
            f"Expected a SourceCertificate. Found {certificate!r}. Read a file with SourceCertificate.load(path)."
        )
    return certificate


def _entries(history: Iterable[Any], start: int = 0) -> list[Entry]:
    return [_entry(index, entry) for index, entry in enumerate(history, start)]


def _memory(value: Any, expected: str) -> dict[str, Any]:
    """What a state says about its ledger, checked."""
    kinds = {"id": str, "run": str, "lines": int, "chain": str}
    if not isinstance(value, Mapping) or any(type(value.get(key)) is not kind for key, kind in kinds.items()):
        raise InvalidValueError(f"{expected}'ledger': {_validate.shown(value)}, which names no ledger.")
    return {key: value[key] for key in kinds}


def _require_remembered(ledger: Ledger, memory: Mapping[str, Any]) -> None:
    if ledger.id != memory["id"]:
        raise LedgerError(
            f"The state was charged to another ledger than {ledger.path}. Use that one: this one does not hold what "
            "the run revealed so far."
        )
    if not ledger.continues(memory["lines"], memory["chain"]):
        raise LedgerError(
            f"The ledger {ledger.path} is older than the state, or was changed: it lacks lines that were written "
            "before the state was saved. Restore the file as it was last written."
        )


def _require_one_process() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise AccountingError(
            "Several processes train together; each would charge the same steps to the ledger. Put the whole run on it "
            "before it starts, ledger.add([(noise_multiplier, sample_rate, steps)], run=...), and train without it."
        )


class _History(list[Entry]):
    """Opacus's list of runs. ``version`` grows with every change but the accountant's own steps."""

    def __init__(self, entries: Iterable[Entry], version: int) -> None:
        super().__init__(entries)
        self.version = version

    def __reduce__(self) -> tuple[Any, ...]:
        return _History, (list(self), self.version)


def _versioned(change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: _History, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            self.version += 1  # afterwards: what another thread reads meanwhile is filed under the old version

    return method


for _name in ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"]:
    setattr(_History, _name, _versioned(getattr(list, _name)))
for _name in ["__delitem__", "__iadd__", "__imul__", "__setitem__"]:
    setattr(_History, _name, _versioned(getattr(list, _name)))


class _Totals(NamedTuple):
    """What is summed: the first ``runs`` entries, of the last of them ``last`` steps. Never changed in place."""

    version: int
    runs: int = 0
    last: int = 0
    steps: int = 0
    recorded: ExactSum = ExactSum()
    charged: ExactSum = ExactSum()


class _Ahead(NamedTuple):
    """How far the history got under a budget, and an upper bound on its charge, so that not every step need be summed.

    Far from the budget a step is admitted by ``ceiling_bits`` alone. Only where that bound meets the budget, what is
    new since the last exact sum is added to it, in one go, and decides. The bound is about a tenth above the sum, so
    what is left of the budget shrinks about tenfold from one such sum to the next, and a run makes few of them.
    """

    version: int
    runs: int = 0
    last: int = 0
    steps: int = 0
    ceiling_bits: float = 0.0

    def describes(self, history: _History) -> bool:
        """Whether these are the entries, and the steps of the last of them, that the history has now."""
        runs = len(history)
        return self.version == history.version and self.runs == runs and (runs == 0 or self.last == history[-1][2])


class Permit(Protocol):
    """What knows the loader, such as ``opacus_reconbound.guard``: it admits a step and says at which rate."""

    def rate(self, optim: Any, sample_rate: float, noise_multiplier: float) -> float:
        """The inclusion probability to charge the pending step of ``optim`` with, or an error."""
        ...

    def taken(self, optim: Any, noise_multiplier: float) -> None:
        """The pending step has been charged."""
        ...


class StepHook:
    """What Opacus calls between noising the gradient and applying it: charge the step, or discard it.

    Attributes:
        accountant: is charged.
        sample_rate: q of one batch.
        clipper: with ghost clipping, the first object that ``make_private`` returned, which keeps the clipping norm.
            Where it is known (``watch_clipping``), the step is charged with the noise over *that* norm; else a norm
            that changes is refused.
        permit: what knows the loader, or None.
    """

    def __init__(self, accountant: MutualInformationAccountant, sample_rate: float) -> None:
        self.accountant = accountant
        self.sample_rate = sample_rate
        self.clipper: Any = None
        self.permit: Permit | None = None
        self._sizes = BatchSizes()
        self._norm: float | None = None
        self._norms_seen: Any = None

    def __call__(self, optim: Any) -> None:
        """Charge the pending step of ``optim``, a DPOptimizer. Where that fails, no gradient is left to apply.

        Raises:
            AccountingError: the step is not what is charged.
            InvalidValueError: σ or q out of range; nothing is charged.
            ReconstructionBudgetExceeded: the step would go beyond ``budget_bits``; nothing is charged.
        """
        try:
            self._require_fixed_clipping(optim)
            sigma = self.noise_multiplier(optim)
            permit = self.permit
            if permit is None:
                q = self.sample_rate
                if optim.accumulated_iterations > 1:
                    raise _accumulated(optim)
            else:
                q = permit.rate(optim, self.sample_rate, sigma)
            self.accountant.step(noise_multiplier=sigma, sample_rate=q)
            if permit is None:
                self._sizes.observe(optim, self.sample_rate)
            else:
                permit.taken(optim, sigma)
        except BaseException:
            discard_pending_step(optim)
            raise

    def noise_multiplier(self, optim: Any) -> float:
        """σ that a step of ``optim`` is charged with: its noise over the norm that it really clips to."""
        return effective_noise(optim, self.clipper)

    def watch_clipping(self, clipper: Any) -> None:
        """Charge from now on by the norm of ghost clipping, and require that it clips.

        Args:
            clipper: the first object that ``make_private`` returned.
        """
        self.clipper = clipper
        self._norms_seen = clipper._per_sample_gradient_norms

    def require_clipped(self) -> None:
        """Refuse gradients that ghost clipping has not clipped since this was last called; a plain loss leaves them so.

        Raises:
            AccountingError: they were not clipped.
        """
        norms = self.clipper._per_sample_gradient_norms
        if norms is None or norms is self._norms_seen:
            raise AccountingError(
                "The gradients of this step were not clipped: the loss was not computed by the criterion that "
                "make_private returned, which clips them with grad_sample_mode='ghost'. Use that criterion."
            )
        self._norms_seen = norms

    def _require_fixed_clipping(self, optim: Any) -> None:
        if is_adaptive(optim):
            raise AccountingError(f"{type(optim).__name__} {ADAPTIVE} Use clipping='flat' or 'per_layer'.")
        if not is_ghost(optim):
            return
        if self.clipper is not None:
            self.require_clipped()
            return
        if self._norm is None:
            self._norm = optim.max_grad_norm
        elif optim.max_grad_norm != self._norm:
            raise AccountingError(
                f"The optimizer's max_grad_norm went from {self._norm:g} to {optim.max_grad_norm:g}, which scales its "
                "noise, but ghost clipping goes on at the module's own norm. Use no GradClipScheduler with ghost "
                "clipping; or let opacus_reconbound.guard(engine, model, optimizer, loader) charge what runs."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> StepHook:
        return self  # a copied optimizer charges the same accountant, as it does with Opacus's closures


def _accumulated(optim: Any) -> AccountingError:
    return AccountingError(
        f"{optim.accumulated_iterations} batches were accumulated into one step. A record can be in several of them, "
        "and then moves the sum by more than the clipping norm, or in just one, and then no sampling amplifies. Use "
        "one batch a step, of the size that you want (BatchMemoryManager splits it); or charge fixed batches by "
        "passes: opacus_reconbound.guard(..., batches='per_pass')."
    )


def discard_pending_step(optim: Any) -> None:
    """Remove the clipped, summed and noised gradient, so that no later call can apply it uncharged."""
    sharded = getattr(optim, "grad_state", {})
    for p in optim.params:
        p.grad = p.grad_sample = p.summed_grad = None
        if p in sharded:
            sharded[p]["summed_grad"] = None
    optim._step_skip_queue.clear()
    optim._is_last_step_skipped = False


class MutualInformationAccountant(IAccountant):  # type: ignore[misc]
    """Adds the leakage to an Opacus accountant; a mixin, to be listed before that accountant.

    Leakage is in bits and bounds I(record; trajectory | all other records). Bounds and budgets use ``charged_bits``,
    which with a ledger is the total of all runs on it. Reading changes nothing. ``len()`` is the number of steps of
    this history.
    """

    def __init__(self) -> None:
        self._session: LedgerSession | None = None
        self._on_ledger: tuple[int, Counter[tuple[float, float]]] = (-1, Counter())  # version of the history, its steps
        self._remembered: dict[str, Any] | None = None  # the ledger that a loaded state was charged to
        self._history = _History((), 0)
        self._totals = _Totals(0)
        self._ahead = _Ahead(0)
        self._budget_bits: float | None = None
        self._floor: float | None = None  # what the budget stands for, for messages
        super().__init__()

    @classmethod
    def mechanism(cls) -> str:
        """The name for ``PrivacyEngine(accountant=...)``."""
        return f"{super().mechanism()}+mi"

    @property
    def history(self) -> list[Entry]:
        """Runs ``(noise_multiplier, sample_rate, num_steps)``. Assigning a list validates and copies it."""
        return self._history

    @history.setter
    def history(self, entries: Iterable[Any]) -> None:
        self._history = _History(_entries(entries), self._history.version + 1)

    @property
    def schedule(self) -> Schedule:
        """The history as a frozen ``Schedule``."""
        return Schedule.from_history(self._history)

    def __len__(self) -> int:
        ahead = self._ahead
        if ahead.describes(self._history):
            return ahead.steps
        totals, entries = self._unread()
        return totals.steps - totals.last + sum(steps for _, _, steps in entries)

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Charge one step; to be called before it is applied.

        Args:
            noise_multiplier: σ in [0, inf].
            sample_rate: q in [0, 1].

        Raises:
            InvalidValueError: σ or q out of range; nothing is charged.
            ReconstructionBudgetExceeded: the step would go beyond ``budget_bits``; nothing is charged.
        """
        sigma, q = _pair(noise_multiplier, sample_rate)
        with _CHARGING:  # threads that share an account must not overwrite each other's steps
            history, merges, steps = self._history, False, 1
            if history:
                last_sigma, last_q, before = history[-1]
                if last_sigma == sigma and last_q == q and before < _validate.MOST_STEPS:
                    merges, steps = True, before + 1
            ahead = None
            if self._session is not None:
                self._charge_ledger(self._session, sigma, q)
            elif self._remembered is not None:
                raise self._ledger_is_missing()
            elif self._budget_bits is not None:
                taken, ceiling = self._affordable(sigma, q, self._budget_bits)
                ahead = _Ahead(history.version, len(history) + (not merges), steps, taken + 1, ceiling)
            # One change of the list, so that a reader in another thread never misses an entry; the version stays.
            if merges:
                list.__setitem__(history, -1, (sigma, q, steps))
            else:
                list.append(history, (sigma, q, 1))
            if ahead is not None:
                self._ahead = ahead

    def _affordable(self, sigma: float, q: float, budget: float) -> tuple[int, float]:
        """The steps taken, and an upper bound on the charge after one more; an error where it exceeds the budget."""
        ahead = self._ahead
        if ahead.describes(self._history):
            ceiling = _sum_above(ahead.ceiling_bits, step_ceiling(q, sigma))
            if ceiling <= budget:  # then so is the exact sum, and its rounded value, which is what decides
                return ahead.steps, ceiling
        totals = self._read()
        before = totals.charged.value
        ceiling = _sum_above(math.nextafter(before, math.inf), step_ceiling(q, sigma))
        if ceiling > budget:
            after = totals.charged.after(step_charge(q, sigma)[1])
            if after > budget:
                source = f"{totals.steps} step{'s' * (totals.steps != 1)}"
                raise self._exceeded(sigma, q, before, after, budget, source)
            ceiling = math.nextafter(after, math.inf)
        return totals.steps, ceiling

    def _exceeded(
        self, sigma: float, q: float, before: float, after: float, budget: float, source: str
    ) -> ReconstructionBudgetExceeded:
        floor = "" if self._floor is None else f" (the floor ρ* >= {self._floor:g})"
        return ReconstructionBudgetExceeded(
            f"Leakage so far: {before:.6g} bits in {source}. One more at noise_multiplier={sigma:.6g}, "
            f"sample_rate={q:.6g} would make it {after:.6g} bits, above the budget of {budget:.6g} bits{floor}. It was "
            "not charged, its gradient is discarded and the parameters are unchanged. Stop training here, or raise "
            "budget_bits and give up the floor it stands for.",
            leakage_bits=before,
            next_bits=after,
            budget_bits=budget,
        )

    # -- the ledger -------------------------------------------------------------------------------------------------

    def use_ledger(self, ledger: Ledger, *, run: str, reserve_steps: int = 256) -> None:
        """Charge every step to a ledger too: ``charged_bits``, bounds and budgets then hold for all runs on it.

        Steps of the history that are not on the ledger yet are added to it. A state that was saved while a ledger was
        in use remembers it, so a run that resumes is not charged twice for what it did before.

        Args:
            ledger: of the training set.
            run: a name for this run; a restart keeps it.
            reserve_steps: how many steps are reserved by one write; the most that a killed process leaves over-counted.

        Raises:
            LedgerError: the state that was loaded was charged to another ledger, or to a newer copy of this one.
            AccountingError: another ledger is in use, or several processes train together.
        """
        session = ledger.session(run, reserve_steps=reserve_steps)
        if self._session is not None:
            if self._session.ledger.id != ledger.id:
                raise AccountingError(
                    f"The accountant is charged to the ledger {self._session.ledger.path} already. Give every training "
                    "set one ledger, and every run a fresh accountant."
                )
            self._session.settle()
        _require_one_process()
        if self._remembered is not None:
            _require_remembered(ledger, self._remembered)
        elif self._session is None:
            session.add(_entries(self._history))
        self._session, self._remembered = session, None
        self._on_ledger = self._history.version, _counts(self._history)

    @property
    def ledger(self) -> Ledger | None:
        """The ledger in use, or None."""
        return None if self._session is None else self._session.ledger

    def settle(self) -> None:
        """Give back to the ledger, where one is in use, what is reserved on it; at the end of a run."""
        if self._session is not None:
            self._reconcile(self._session)
            self._session.settle()

    def _charge_ledger(self, session: LedgerSession, sigma: float, q: float) -> None:
        """One more step on the ledger, or an error."""
        _require_one_process()
        self._reconcile(session)
        if session.charge(sigma, q, budget_bits=self._budget_bits):
            self._on_ledger[1][sigma, q] += 1
            return
        total, budget = session.total, self.budget_bits
        raise self._exceeded(
            sigma,
            q,
            total.value,
            total.after(step_charge(q, sigma)[1]),
            math.inf if budget is None else budget,
            f"all runs on the ledger {session.ledger.path}",
        )

    def _reconcile(self, session: LedgerSession) -> None:
        """Charge what was put into the history from outside."""
        if self._on_ledger[0] != self._history.version:
            version = self._history.version
            self._on_ledger = version, self._charge_missing(session, _entries(self._history))

    def _charge_missing(self, session: LedgerSession, entries: list[Entry]) -> Counter[tuple[float, float]]:
        """Put on the ledger what these entries hold beyond what was charged; their steps."""
        counts, known = _counts(entries), self._on_ledger[1]
        missing = [(sigma, q, n - known[sigma, q]) for (sigma, q), n in counts.items() if n > known[sigma, q]]
        if missing:
            session.add(missing)
        return counts

    def _total(self) -> ExactSum:
        """What budgets and bounds are about: everything on the ledger, or this history."""
        if self._session is None:
            return self._read().charged
        self._reconcile(self._session)
        return self._session.total

    def _ledger_is_missing(self) -> AccountingError:
        memory = self._remembered or {}
        return AccountingError(
            f"The state that was loaded was charged to a ledger, as run {memory.get('run')!r}. Go on with "
            "accountant.use_ledger(ledger, run=...), or the ledger would not hold the steps from here on."
        )

    def get_optimizer_hook_fn(self, sample_rate: float) -> StepHook:
        """The hook that ``PrivacyEngine`` attaches to a DPOptimizer; ``sample_rate`` is q of one batch."""
        return StepHook(self, sample_rate)

    def get_epsilon(self, delta: float, *args: Any, **kwargs: Any) -> float:
        """ε at ``delta`` from the inner accountant: 0 before the first step, inf after one (almost) without noise.

        Args:
            delta: δ in (0, 1).
            *args: for the inner accountant.
            **kwargs: for the inner accountant (``alphas``, ``eps_error``); what it does not know is ignored.
        """
        taken = [entry for entry in _entries(self._history) if entry[2] > 0]
        if not taken:
            return 0.0
        if any(sigma < _LEAST_NOISE and q > 0 for sigma, q, _ in taken):
            return math.inf
        if any(sigma > _MOST_NOISE or q == 0 for sigma, q, _ in taken):
            # Opacus does not return for noise without end; less noise gives a larger ε, which is on the safe side
            bounded = type(self)()
            bounded.history = [(min(sigma, _MOST_NOISE), q, steps) for sigma, q, steps in taken if _reveals(sigma, q)]
            return bounded.get_epsilon(delta, *args, **kwargs)
        return float(super().get_epsilon(delta, *args, **kwargs))

    def _unread(self) -> tuple[_Totals, list[Entry]]:
        """The totals that still hold, and the entries from their last one on."""
        history, totals = self._history, self._totals
        if totals.version != history.version:
            totals = _Totals(history.version)
        return totals, history[totals.runs - 1 if totals.runs else 0 :]

    def _read(self) -> _Totals:
        """The totals of the whole history: what is new since the last reading is added."""
        totals, entries = self._unread()
        if not entries or (totals.runs and len(entries) == 1 and entries[0][2] == totals.last):
            return totals
        first = max(totals.runs - 1, 0)
        entries = _entries(entries, first)
        runs, last = first + len(entries), entries[-1][2]
        sigma, q, steps = entries[0]
        entries[0] = (sigma, q, steps - totals.last)
        recorded, charged = totals.recorded.copy(), totals.charged.copy()
        charges = step_charges([q for _, q, _ in entries], [sigma for sigma, _, _ in entries])
        for (_, _, steps), (bits, charged_bits) in zip(entries, charges, strict=True):
            recorded.add(bits, steps)
            charged.add(charged_bits, steps)
        steps = totals.steps + sum(steps for _, _, steps in entries)
        self._totals = _Totals(totals.version, runs, last, steps, recorded, charged)
        return self._totals

    @property
    def leakage_bits(self) -> float:
        """γ in bits: Σ K(q, σ) over the recorded steps (paper, Theorem 4.1)."""
        return self._read().recorded.value

    @property
    def charged_bits(self) -> float:
        """γ in bits at the sample rate that Opacus's float32 sampler realises; what bounds and budgets use.

        With a ledger: the total of all runs on it, with what other processes have reserved.
        """
        return self._total().value

    @property
    def sampling_excess_bits(self) -> float:
        """What the sampler's 24-bit grid adds to ``leakage_bits``, in bits."""
        totals = self._read()
        recorded, charged = totals.recorded.value, totals.charged.value
        return 0.0 if recorded == charged else charged - recorded

    def bound(self, certificate: SourceCertificate) -> ReconstructionBound:
        """ρ* for the training so far: ``certificate.bound(charged_bits)``."""
        return require_certificate(certificate).bound(self.charged_bits)

    @property
    def budget_bits(self) -> float | None:
        """The most ``charged_bits`` may become, in bits; None for no limit. It is in no history and no state.

        With a ledger that has a budget: the stricter of the two.
        """
        ledgers = None if self._session is None else self._session.ledger.budget_bits
        limits = [limit for limit in (self._budget_bits, ledgers) if limit is not None]
        return min(limits, default=None)

    @budget_bits.setter
    def budget_bits(self, bits: float | None) -> None:
        self._budget_bits = None if bits is None else _validate.non_negative("budget_bits", bits)
        self._floor = None

    def set_floor(self, certificate: SourceCertificate, min_rho: float) -> None:
        """Refuse every step that would take ρ* below ``min_rho``: sets ``budget_bits``."""
        self.budget_bits = require_certificate(certificate).leakage_budget(min_rho)
        self._floor = min_rho

    def leakage_after(self, *, noise_multiplier: float, sample_rate: float, steps: int = 1) -> float:
        """``charged_bits`` after ``steps`` more steps at (q, σ); charges nothing."""
        sigma, q = _pair(noise_multiplier, sample_rate)
        return self._total().after(step_charge(q, sigma)[1], _validate.steps("steps", steps))

    def would_exceed(
        self, budget_bits: float | None = None, *, noise_multiplier: float, sample_rate: float, steps: int = 1
    ) -> bool:
        """Whether ``steps`` more steps at (q, σ) would go beyond a budget in bits; charges nothing.

        The budget is by default the accountant's own; False where there is none.
        """
        budget = self.budget_bits if budget_bits is None else _validate.non_negative("budget_bits", budget_bits)
        sigma, q = _pair(noise_multiplier, sample_rate)
        steps = _validate.steps("steps", steps)
        if budget is None:
            return False
        ahead = self._ahead
        if self._session is None and ahead.describes(self._history):
            product = math.nextafter(steps * step_ceiling(q, sigma), math.inf)
            if _sum_above(ahead.ceiling_bits, product) <= budget:
                return False
        return self._total().after(step_charge(q, sigma)[1], steps) > budget

    def steps_left(self, *, noise_multiplier: float, sample_rate: float) -> int | None:
        """The most further steps at (q, σ) within ``budget_bits``; None for no budget or more than 2**53 steps."""
        sigma, q = _pair(noise_multiplier, sample_rate)
        budget, charged, bits = self.budget_bits, self._total(), step_charge(q, sigma)[1]
        if budget is None or charged.after(bits, _validate.MOST_STEPS) <= budget:
            return None
        within, beyond = 0, _validate.MOST_STEPS
        while beyond - within > 1:
            middle = (within + beyond) // 2
            within, beyond = (within, middle) if charged.after(bits, middle) > budget else (middle, beyond)
        return within

    def state_dict(self, destination: Any = None) -> Any:
        """Opacus's two keys and ours, in plain lists, tuples and numbers, filled into ``destination`` if given.

        With a ledger, the steps so far are settled on it first, and the state remembers it.
        """
        ours: dict[str, Any] = {"version": 1}
        if self._session is not None:
            self.settle()
            lines, chain = self._session.ledger.position()
            memory = {"id": self._session.ledger.id, "run": self._session.run, "lines": lines, "chain": chain}
            ours = {"version": _STATE_VERSION, "ledger": memory}
        elif self._remembered is not None:
            ours = {"version": _STATE_VERSION, "ledger": dict(self._remembered)}
        state = self.to_opacus_state_dict(destination)
        state.update(mechanism=self.mechanism(), reconbound=ours)
        return state

    def to_opacus_state_dict(self, destination: Any = None) -> Any:
        """A state that Opacus's own accountant ("rdp" or "prv") loads: the way back."""
        state = OrderedDict() if destination is None else destination
        state.update(history=_entries(self._history), mechanism=super().mechanism())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow_smaller: bool = False) -> None:
        """Replace the history by a copy of a state's: one of ours, or of Opacus's own accountant.

        Args:
            state_dict: as ``state_dict()`` returns it.
            allow_smaller: accept less leakage than is charged here already. Right only where nobody has seen, or
                will see, what came of the steps that are forgotten.

        Raises:
            InvalidValueError: not such a state; the accountant is unchanged.
            AccountingError: less leakage than is charged here; the accountant is unchanged.
            LedgerError: the state was charged to another ledger than the one in use, or to a newer copy of it.
        """
        entries, memory = self._content_of(state_dict)
        if self._session is not None and memory is not None:
            _require_remembered(self._session.ledger, memory)
        if len(self) > 0 and not allow_smaller:
            forgotten = _counts(self._history)
            forgotten.subtract(_counts(entries))
            if any(steps > 0 for steps in forgotten.values()):
                loaded, bits = Schedule.from_history(entries).charged_bits, self._read().charged.value
                raise AccountingError(
                    f"The state holds {loaded:.6g} bits of leakage, this accountant {bits:.6g} bits from {len(self)} "
                    "steps that are not all in the state: loading would forget steps that were taken. Load it into a "
                    "fresh accountant or PrivacyEngine, or pass allow_smaller=True if nothing that came of those "
                    "steps was ever seen."
                )
        if self._session is None:
            self.history, self._remembered = entries, memory
            return
        self._reconcile(self._session)
        counts = _counts(entries) if memory is not None else self._charge_missing(self._session, entries)
        self.history = entries
        self._on_ledger = self._history.version, counts

    def _content_of(self, state: Any) -> tuple[list[Entry], dict[str, Any] | None]:
        """The history of a state, and the ledger that it remembers."""
        own, inner = self.mechanism(), super().mechanism()
        expected = f"Expected the state of an accountant {own!r} or {inner!r}, as its state_dict() returns it. Found "
        if not isinstance(state, Mapping):
            raise InvalidValueError(f"{expected}{type(state).__name__}.")
        mechanism, history, ours = (state.get(key) for key in ("mechanism", "history", "reconbound"))
        if mechanism not in (own, inner) or not isinstance(history, (list, tuple)):
            raise InvalidValueError(
                f"{expected}mechanism {_validate.shown(mechanism)}, history of type {type(history).__name__}."
            )
        if mechanism == own:
            version = ours.get("version") if isinstance(ours, Mapping) else None
            if type(version) is not int or version < 1:
                raise InvalidValueError(f"{expected}'reconbound': {_validate.shown(ours)}, which names no version.")
            if version > _STATE_VERSION:
                raise InvalidValueError(
                    f"Expected a state of version {_STATE_VERSION} at most. Found {_validate.shown(version)}. "
                    "Update opacus-reconbound."
                )
            if isinstance(ours, Mapping) and "ledger" in ours:
                return _entries(history), _memory(ours["ledger"], expected)
        return _entries(history), None


@lru_cache(maxsize=4096)
def _rdp_of_step(q: float, sigma: float, orders: tuple[float, ...]) -> Any:
    return rdp_analysis.compute_rdp(q=q, noise_multiplier=sigma, steps=1, orders=list(orders))


class RDPMutualInformationAccountant(MutualInformationAccountant, RDPAccountant):  # type: ignore[misc]
    """The accountant "rdp+mi": ε from Opacus's ``RDPAccountant``, γ beside it."""

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """ε at ``delta`` and the best order, as Opacus computes them, but the divergences of each (q, σ) only once."""
        if not self.history:
            return 0.0, 0.0
        orders = tuple(self.DEFAULT_ALPHAS if alphas is None else alphas)
        rdp = sum(_rdp_of_step(q, sigma, orders) * steps for sigma, q, steps in self.history)
        epsilon, order = rdp_analysis.get_privacy_spent(orders=list(orders), rdp=rdp, delta=delta)
        return float(epsilon), float(order)


class PRVMutualInformationAccountant(MutualInformationAccountant, PRVAccountant):  # type: ignore[misc]
    """The accountant "prv+mi": ε from Opacus's ``PRVAccountant``, γ beside it."""


def _register(accountant: type[MutualInformationAccountant]) -> None:
    name = accountant.mechanism()
    try:
        register_accountant(name, accountant)
    except ValueError as error:
        present = type(create_accountant(name))
        if (present.__module__, present.__qualname__) != (accountant.__module__, accountant.__qualname__):
            raise AccountingError(
                f"Opacus already has an accountant {name!r}: {present.__module__}.{present.__qualname__}. Register "
                "that one under another name before importing opacus_reconbound."
            ) from error
        register_accountant(name, accountant, force=True)  # this module was reloaded


_register(RDPMutualInformationAccountant)
_register(PRVMutualInformationAccountant)
