"""Is what runs what is accounted?

``inspect`` looks at an engine, a model, its optimizer and its loader, and returns what it finds. ``guard`` stands
between the loader and the loop: it inspects at every pass, admits one step a batch, and charges fixed batches by passes
where one asks for that. What can be seen from the optimizer alone is checked at every step, with neither of the two.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, SupportsIndex
from weakref import WeakKeyDictionary, WeakSet

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from opacus_reconbound._mechanism import ADAPTIVE, SAME_NORM, clipping_norm, effective_noise, is_adaptive, is_ghost
from opacus_reconbound.accountants import MutualInformationAccountant, StepHook, discard_pending_step
from opacus_reconbound.engine import require_accountant
from opacus_reconbound.errors import AccountingError, InvalidValueError
from opacus_reconbound.leakage.gaussian import realised_sample_rate

__all__ = [
    "Finding",
    "GuardedLoader",
    "guard",
    "hooks_of",
    "inspect",
    "keep_empty_batches",
    "poisson_rate",
    "ranks_in_step",
    "require_private_run",
]

Severity = Literal["error", "warning", "info"]
Batches = Literal["poisson", "per_pass"]
Found = list[tuple[Any, StepHook]]

_SAME_RATE = 1e-12  # relative; below this a rate, or a probability, makes no difference to any digit that is kept
_EXCESS = 1e-6
_KNOWN = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    AdaClipDPOptimizer,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that ``inspect`` found.

    Attributes:
        code: a short name that stays.
        severity: ``"error"``: what runs is not what is accounted. ``"warning"``: it may not be. ``"info"``: it is
            accounted for, and worth knowing.
        what: what was found, with its values.
        why: why it matters; may be empty where ``what`` says it.
        remedy: what to do; may be empty for ``"info"``.
    """

    code: str
    severity: Severity
    what: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.remedy) if part)


def inspect(
    engine: PrivacyEngine,
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    batches: Batches = "poisson",
    strict: bool = False,
    accept: Collection[str] = (),
    across_ranks: bool = True,
) -> tuple[Finding, ...]:
    """Compare what will run with what will be charged, after ``make_private`` and before training.

    It changes nothing. It sees the state of the moment: a scheduler that moves a clipping norm later, or a second step
    on one batch, is seen by ``guard``.

    Args:
        engine: the ``PrivacyEngine``.
        model: the first object that ``make_private`` returned.
        optimizer: the optimizer that it returned, or a list of all that step on this loader.
        loader: the loader that it returned, or what ``BatchMemoryManager`` made of it.
        batches: ``"poisson"``, or ``"per_pass"`` for fixed batches that ``guard`` charges by passes.
        strict: raise where there is an error.
        accept: codes that do not raise.
        across_ranks: where several processes train, compare them. Every process has to call ``inspect`` then.

    Returns:
        The findings, errors first.

    Raises:
        AccountingError: with ``strict``, for all errors together.
        InvalidValueError: ``batches`` is neither of the two.
    """
    if batches not in ("poisson", "per_pass"):
        raise InvalidValueError(f"Expected batches='poisson' or 'per_pass'. Found {batches!r}.")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    world_size = _world_size()
    found = [
        (each, each.step_hook)
        for each in optimizers
        if isinstance(each, DPOptimizer) and isinstance(each.step_hook, StepHook)
    ]
    findings = [
        *_of_account(engine, found),
        *_of_hooks(optimizers),
        *_of_model(model, optimizers, found),
        *_of_loader(loader, found, world_size=world_size, batches=batches),
        *_of_dataset(loader, found),
    ]
    if across_ranks and world_size > 1:
        findings += _of_ranks(loader, found)
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    if strict:
        _raise_errors(finding for finding in findings if finding.code not in accept)
    return tuple(findings)


def _raise_errors(findings: Iterable[Finding]) -> None:
    errors = [str(finding) for finding in findings if finding.severity == "error"]
    if errors:
        raise AccountingError("\n".join(errors))


def _raise_first(findings: Iterator[Finding]) -> None:
    for finding in findings:
        if finding.severity == "error":
            raise AccountingError(str(finding))


def _world_size() -> int:
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return int(torch.distributed.get_world_size()) if running else 1


# -- the account and its hooks -----------------------------------------------------------------------------------------


def _of_account(engine: PrivacyEngine, found: Found) -> Iterator[Finding]:
    try:
        accountant = require_accountant(engine)
    except AccountingError as error:
        yield Finding(code="no_account", severity="error", what=str(error))
        return
    for index, (_, hook) in enumerate(found):
        if hook.accountant is not accountant:
            yield Finding(
                code="other_account",
                severity="error",
                what=f"Optimizer {index} is charged to another account than that of this engine.",
                why="What both reveal adds up, and neither account holds it.",
                remedy="Make every optimizer private with one engine.",
            )


def _of_hooks(optimizers: list[Any]) -> Iterator[Finding]:
    if not optimizers:
        yield Finding(
            code="no_optimizer",
            severity="error",
            what="The trainer has no optimizer, so there is nothing to account for.",
        )
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, DPOptimizer):
            yield Finding(
                code="not_private",
                severity="error",
                what=f"Optimizer {index} is a {type(optimizer).__name__}, not a DPOptimizer: its steps add no noise.",
                remedy="Use the optimizer that PrivacyEngine.make_private returned; in Lightning, return it, or "
                "private_optimizer(self, ...), from configure_optimizers().",
            )
            continue
        if not isinstance(optimizer.step_hook, StepHook):
            yield Finding(
                code="not_charged",
                severity="error",
                what=f"The steps of optimizer {index} are not charged by an accountant that knows the leakage.",
                remedy="Make the engine with PrivacyEngine(accountant='rdp+mi') or 'prv+mi'; and call "
                "attach_step_hook() on a DPOptimizer for nothing else, for it replaces the accountant's hook.",
            )
        if is_adaptive(optimizer):
            yield Finding(
                code="adaptive_clipping",
                severity="error",
                what=f"Optimizer {index} ({type(optimizer).__name__}) {ADAPTIVE}",
                why="No account holds that.",
                remedy="Use clipping='flat' or 'per_layer'.",
            )
        elif type(optimizer) not in _KNOWN:
            yield Finding(
                code="unknown_optimizer",
                severity="warning",
                what=f"Optimizer {index} is a {type(optimizer).__name__}, which is none of Opacus's own.",
                why="Nobody has checked that it clips to max_grad_norm and adds noise of noise_multiplier times that.",
                remedy="Check it yourself.",
            )
    if len(optimizers) > 1:
        yield Finding(
            code="several_optimizers",
            severity="info",
            what=f"{len(optimizers)} optimizers step on one loader.",
            why="Their steps add up where each draws its own batch; steps that share one reveal more than is charged.",
            remedy="Alternate between batches; guard() and the callback refuse a second step on one batch.",
        )


def hooks_of(optimizers: list[Any]) -> Found:
    """Each private optimizer with the hook that charges its steps.

    Raises:
        AccountingError: an optimizer is not private, clips adaptively, or is not charged by this library.
    """
    _raise_first(_of_hooks(optimizers))
    return [(optimizer, optimizer.step_hook) for optimizer in optimizers]


# -- the model ---------------------------------------------------------------------------------------------------------


def _clipper_of(model: Any) -> Any:
    """What keeps the norm of ghost clipping: the wrapped module, or the hooks object."""
    return model if hasattr(model, "max_grad_norm") and hasattr(model, "get_clipping_coef") else None


def _of_model(model: Any, optimizers: list[Any], found: Found) -> Iterator[Finding]:
    module = getattr(model, "_module", model)
    known = {id(p) for p in module.parameters()} if hasattr(module, "parameters") else set()
    frozen = trained = 0
    for index, optimizer in enumerate(optimizers):
        every = [p for group in getattr(optimizer, "param_groups", []) for p in group["params"]]
        if any(id(p) not in known for p in every):
            yield Finding(
                code="other_model",
                severity="error",
                what=f"Optimizer {index} trains parameters that are not the model's.",
                remedy="Pass the model and the optimizer that one call of make_private returned.",
            )
        mine = sum(p.requires_grad for p in every)
        trained += mine
        frozen += len(every) - mine
        if every and mine == 0:
            yield Finding(
                code="nothing_trained",
                severity="info",
                what=f"All {len(every)} parameters of optimizer {index} are frozen.",
                why="Its steps change nothing, reveal nothing, and are not charged.",
            )
    if frozen and trained:
        yield Finding(
            code="frozen_parameters",
            severity="info",
            what=f"{frozen} of {frozen + trained} parameters are frozen.",
            why="They get neither gradient nor noise, and stay what they were.",
            remedy="Their values must not come from the protected records.",
        )
    for index, (optimizer, hook) in enumerate(found):
        yield from _of_clipping(model, index, optimizer, hook)


def _of_clipping(model: Any, index: int, optimizer: Any, hook: StepHook) -> Iterator[Finding]:
    layers = hasattr(optimizer, "max_grad_norms")
    clipper = hook.clipper or _clipper_of(model)
    if is_adaptive(optimizer) or not (layers or is_ghost(optimizer)):
        return
    clipped, noised = clipping_norm(optimizer, clipper), float(optimizer.max_grad_norm)
    if clipped is None:
        yield Finding(
            code="clip_norm_unknown",
            severity="error",
            what=f"Optimizer {index} leaves clipping to the module, and the {type(model).__name__} that was passed "
            "does not clip.",
            remedy="Pass the first object that make_private returned, also with wrap_model=False.",
        )
        return
    if abs(clipped - noised) > SAME_NORM * clipped:
        corrected = layers or hook.clipper is not None
        yield Finding(
            code="clip_norms_differ",
            severity="warning" if corrected else "error",
            what=f"Optimizer {index} scales its noise to max_grad_norm = {noised:g}, but gradients are clipped at "
            f"{clipped:g}: the noise multiplier in effect is {effective_noise(optimizer, clipper):g}, not "
            f"{float(optimizer.noise_multiplier):g}.",
            why="A GradClipScheduler, or a second make_private on a wrapped module, changes only the first of the two."
            + (" Steps are charged at the noise multiplier in effect." if corrected else ""),
            remedy="Set both norms, or let guard() charge the noise multiplier in effect." if not corrected else "",
        )


# -- the loader --------------------------------------------------------------------------------------------------------


def _poisson_sampler(loader: Any) -> Any:
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    poisson = isinstance(sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler))
    return sampler if poisson else None


def poisson_rate(loader: Any) -> float | None:
    """The inclusion probability of a loader that draws Poisson batches; None for any other loader."""
    sampler = _poisson_sampler(loader)
    return None if sampler is None else float(sampler.sample_rate)


def _is_full_batch(loader: Any) -> bool:
    """Whether every batch is the whole data set, each record once."""
    try:
        single = len(loader) == 1 and not getattr(loader, "drop_last", False)
        sampler: Any = getattr(loader, "sampler", None)
        plain = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement
        )
        return bool(single and plain and len(sampler) == len(loader.dataset))
    except TypeError:
        return False


def _enters_once(loader: Any) -> bool:
    """Whether a pass over a loader holds each record at most once, in an order that no record influences."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if type(sampler) is not BatchSampler:
        return False
    order: Any = sampler.sampler
    if type(order) is RandomSampler:
        return not order.replacement and len(order) <= len(loader.dataset)
    if type(order) is SubsetRandomSampler:
        return len(set(order.indices)) == len(order.indices)
    return type(order) is SequentialSampler


def require_private_run(loader: Any, found: Found, *, world_size: int, ends_at_length: bool = False) -> None:
    """Refuse a run whose batches are not what its optimizers charge for.

    Args:
        loader: of the training.
        found: as ``hooks_of`` returns it.
        world_size: number of processes.
        ends_at_length: a pass ends at the loader's length, as in Lightning, and not where the loader ends.

    Raises:
        AccountingError: no Poisson sampling, a higher rate than the accounted one, batches that are made up, cut or
            left out, or ranks out of step.
    """
    if ends_at_length and isinstance(getattr(loader, "batch_sampler", None), BatchSplittingSampler):
        raise AccountingError(
            "The training loader splits logical batches (BatchMemoryManager). Its length is an estimate, at which "
            "Lightning ends the epoch, inside a logical batch; the rest of that batch then enters the next one, and a "
            "record can be in it twice. Leave BatchMemoryManager out and choose a smaller batch size."
        )
    _raise_first(_of_loader(loader, found, world_size=world_size, batches="poisson"))


def _of_loader(loader: Any, found: Found, *, world_size: int, batches: Batches) -> Iterator[Finding]:
    sampler = _poisson_sampler(loader)
    if batches == "per_pass":
        yield from _of_passes(loader, sampler, world_size)
    elif sampler is not None:
        yield from _of_poisson(loader, sampler, world_size)
    for index, (optimizer, hook) in enumerate(found):
        if batches == "poisson":
            yield from _of_rate(loader, sampler, index, hook)
        if world_size > 1 and "Distributed" not in type(optimizer).__name__ and "FSDP" not in type(optimizer).__name__:
            yield Finding(
                code="gradients_not_combined",
                severity="error",
                what=f"{world_size} processes train, but optimizer {index} ({type(optimizer).__name__}) does not "
                "combine their gradients: each process would release a model of its own.",
                remedy="Use a distributed DPOptimizer (get_optimizer_class(..., distributed=True)) and "
                "Trainer(use_distributed_sampler=False); in an Opacus loop wrap the module in "
                "DifferentiallyPrivateDistributedDataParallel first.",
            )
        yield from _of_split(loader, index, optimizer)


def _of_rate(loader: Any, sampler: Any, index: int, hook: StepHook) -> Iterator[Finding]:
    charged = hook.sample_rate
    if sampler is None:
        if charged == 1.0 and _is_full_batch(loader):
            return
        yield Finding(
            code="not_poisson",
            severity="error",
            what=f"The training loader ({type(loader).__name__}) does not draw Poisson batches, but its steps are "
            f"charged as if it did (sample_rate = {charged:g}).",
            remedy="Use DPDataLoader.from_data_loader(loader), and make the run private before the trainer builds its "
            "loaders (not in on_train_start). In an Opacus loop leave poisson_sampling at True and iterate over the "
            "loader that make_private returned; or charge fixed batches by passes with guard(..., batches='per_pass').",
        )
        return
    rate = float(sampler.sample_rate)
    if rate > charged * (1.0 + _SAME_RATE):
        yield Finding(
            code="rate_above_charge",
            severity="error",
            what=f"The training loader includes each record with probability {rate:g}, but optimizer {index} is "
            f"charged for {charged:g}.",
            remedy="Make the engine private with the loader that trains.",
        )
    elif rate < charged * (1.0 - _SAME_RATE):
        yield Finding(
            code="rate_below_charge",
            severity="info",
            what=f"The training loader includes each record with probability {rate!r}; optimizer {index} is charged "
            f"for {charged!r}, which is more.",
            why="Opacus rounds one over the rate down to a number of batches and accounts at one over that.",
        )


def _of_poisson(loader: Any, sampler: Any, world_size: int) -> Iterator[Finding]:
    rate = float(sampler.sample_rate)
    if getattr(getattr(loader, "collate_fn", None), "rand_on_empty", False):
        yield Finding(
            code="rand_on_empty",
            severity="error",
            what="The loader replaces an empty batch by a made-up record (rand_on_empty=True).",
            why="Where all other records stay out, a record then replaces the made-up one, and the sum moves by up to "
            "twice the clipping norm.",
            remedy="Leave rand_on_empty at False: a step on an empty batch applies noise alone, and is charged.",
        )
    distributed = isinstance(sampler, DistributedUniformWithReplacementSampler)
    if world_size > 1 and not distributed:
        yield Finding(
            code="sampler_not_distributed",
            severity="error",
            what=f"{world_size} processes train, and each draws from all records (sample_rate = {rate:g}).",
            why=f"A record can be in the batches of {world_size} processes at once, and then moves the sum by more "
            "than the clipping norm.",
            remedy="Use DPDataLoader.from_data_loader(loader, distributed=True).",
        )
    if distributed and not isinstance(sampler, _KeepingSampler):
        empty = math.exp(sampler.num_samples * math.log1p(-rate)) if rate < 1.0 else 0.0
        if empty > _SAME_RATE:
            yield Finding(
                code="empty_batches_left_out",
                severity="error",
                what=f"A batch of this process is empty with probability {empty:.2g}, and Opacus's distributed sampler "
                "leaves empty batches out.",
                why="A record then enters a step with a higher probability than is charged, and the processes take "
                "different numbers of steps.",
                remedy="Train with opacus_reconbound.keep_empty_batches(loader), or with larger batches.",
            )
    realised = realised_sample_rate(rate)
    if realised > rate * (1.0 + _EXCESS):
        yield Finding(
            code="sampling_excess",
            severity="info",
            what=f"Opacus's sampler draws on a grid of 2**-24 and includes each record with probability {realised!r}, "
            f"which is {realised / rate - 1.0:.2g} above the accounted {rate!r}.",
            why="charged_bits, and so every bound and budget, uses the former; ε uses the latter.",
        )


def _of_passes(loader: Any, sampler: Any, world_size: int) -> Iterator[Finding]:
    if sampler is not None:
        yield Finding(
            code="poisson_by_passes",
            severity="error",
            what="The loader draws Poisson batches, in which a record can be several times in a pass.",
            remedy="Leave batches at 'poisson', which also charges less.",
        )
    elif not _enters_once(loader):
        yield Finding(
            code="not_a_partition",
            severity="error",
            what=f"The training loader ({type(loader).__name__}) is not known to hold each record at most once in a "
            "pass, in an order that no record influences.",
            remedy="Use a DataLoader with shuffle=True or False, without a sampler that repeats records.",
        )
    if world_size > 1:
        yield Finding(
            code="passes_of_several_processes",
            severity="error",
            what=f"{world_size} processes train on fixed batches.",
            why="Whether their batches are disjoint cannot be seen from one of them.",
            remedy="Use Poisson sampling: DPDataLoader.from_data_loader(loader, distributed=True).",
        )


def _of_split(loader: Any, index: int, optimizer: Any) -> Iterator[Finding]:
    splitter = getattr(loader, "batch_sampler", None)
    if isinstance(splitter, BatchSplittingSampler) and splitter.optimizer is not optimizer:
        yield Finding(
            code="split_for_another_optimizer",
            severity="error",
            what=f"The loader splits logical batches for another optimizer than optimizer {index}.",
            why="This one would take a step on each piece, and the other wait for pieces that it does not get.",
            remedy="Give BatchMemoryManager the optimizer that steps on its loader.",
        )
    if getattr(optimizer, "_is_last_step_skipped", False) or getattr(optimizer, "_step_skip_queue", None):
        yield Finding(
            code="unfinished_logical_batch",
            severity="error",
            what=f"Optimizer {index} is inside a logical batch: its loop over BatchMemoryManager's loader was left "
            "before the batch was complete.",
            why="The pieces seen so far enter the next step as well, in which a record can then be twice.",
            remedy="Finish every logical batch; or iterate over guard(...), which discards what is left of it.",
        )


class _KeepingSampler(DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's distributed sampler, with its empty batches."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.arange(self.total_size)
        if self.shuffle:
            order = torch.randperm(
                self.total_size, generator=torch.Generator().manual_seed(self.shuffle_seed + self.epoch)
            )
        mine = order[self.rank : self.total_size : self.num_replicas]
        for _ in range(self.num_batches):
            yield mine[torch.rand(len(mine), generator=self.generator) < self.sample_rate].tolist()


class _KeepingLoader(DPDataLoader):  # type: ignore[misc]
    def __init__(self, loader: Any) -> None:
        old = loader.batch_sampler
        self.sample_rate, self.distributed = old.sample_rate, True
        sampler = _KeepingSampler(
            total_size=old.total_size,
            sample_rate=old.sample_rate,
            shuffle=old.shuffle,
            shuffle_seed=old.shuffle_seed,
            steps=old.num_batches,
            generator=old.generator,
        )
        sampler.set_epoch(old.epoch)
        DataLoader.__init__(
            self,
            dataset=loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )


def keep_empty_batches(loader: Any) -> Any:
    """The same distributed Poisson loader, with the empty batches that Opacus's sampler leaves out.

    Every process then takes the same number of steps, and each record enters with the accounted probability.

    Args:
        loader: what ``make_private`` returned for a distributed module, or ``DPDataLoader.from_data_loader(loader,
            distributed=True)``. Of any other loader nothing is left out, and it is returned as it is.
    """
    sampler = getattr(loader, "batch_sampler", None)
    opacus = isinstance(sampler, DistributedUniformWithReplacementSampler) and not isinstance(sampler, _KeepingSampler)
    return _KeepingLoader(loader) if opacus else loader


# -- several accounts, several processes -------------------------------------------------------------------------------

_ACCOUNTS: WeakKeyDictionary[Any, WeakSet[MutualInformationAccountant]] = WeakKeyDictionary()


def _of_dataset(loader: Any, found: Found) -> Iterator[Finding]:
    dataset = getattr(loader, "dataset", None)
    try:
        accounts = _ACCOUNTS.setdefault(dataset, WeakSet())
    except TypeError:  # no weak reference to it, or no hash
        return
    mine = [hook.accountant for _, hook in found]
    others = [each for each in accounts if len(each) > 0 and all(each is not one for one in mine)]
    for accountant in mine:
        accounts.add(accountant)
    if others:
        bits = sum(each.charged_bits for each in others)
        yield Finding(
            code="several_accounts",
            severity="error",
            what=f"{len(others)} other account{'s' * (len(others) > 1)} of this process charged {bits:.6g} bits for "
            "steps on the same data set.",
            why="What all of them reveal about a record adds up, and no account holds the sum.",
            remedy="Use one engine for all runs on the same records; or accept=['several_accounts'] where nobody sees "
            "what came of the other runs, or their schedules are added up elsewhere.",
        )


def _digest(generator: Any) -> str:
    """A fingerprint of a generator's state, by which two of one state are recognised; empty where it has none."""
    try:
        state = (torch.default_generator if generator is None else generator).get_state()
        return hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=16).hexdigest()
    except (AttributeError, RuntimeError, TypeError):
        return ""


def _of_ranks(loader: Any, found: Found) -> list[Finding]:
    sampler = _poisson_sampler(loader)
    mine: dict[str, Any] = {"stream": "" if sampler is None else _digest(sampler.generator)}
    mine["charged"] = [
        (
            float(hook.noise_multiplier(optimizer)),
            hook.sample_rate,
            float(optimizer.max_grad_norm),
            hook.accountant.charged_bits,
            len(hook.accountant),
            hook.accountant.budget_bits,
        )
        for optimizer, hook in found
    ]
    every: list[Any] = [None] * _world_size()
    torch.distributed.all_gather_object(every, mine)
    findings = []
    for rank, other in enumerate(every):
        if other["charged"] != every[0]["charged"]:
            findings.append(
                Finding(
                    code="ranks_disagree",
                    severity="error",
                    what=f"Process {rank} would charge {other['charged']} where process 0 would charge "
                    f"{every[0]['charged']} (noise multiplier, sample rate, clipping norm, bits so far, steps so far, "
                    "budget).",
                    why="They would stop at different steps, and their models would part.",
                    remedy="Set the same noise, loader, account and budget in every process.",
                )
            )
    streams = [other["stream"] for other in every if other["stream"]]
    if isinstance(sampler, DistributedUniformWithReplacementSampler) and len(set(streams)) < len(streams):
        findings.append(
            Finding(
                code="ranks_share_randomness",
                severity="error",
                what="Processes draw their batches from random generators in the same state.",
                why="A record of one process then enters exactly when its counterpart of another does, and the two "
                "betray each other: no sampling amplifies any more.",
                remedy="Seed every process differently, such as by torch.manual_seed(seed + rank), after the model is "
                "made.",
            )
        )
    return findings


def ranks_in_step(loader: Any, found: Found) -> None:
    """Where several processes train, compare them; every process has to call this.

    Raises:
        AccountingError: they would charge differently, or draw the same random numbers.
    """
    if _world_size() > 1:
        _raise_errors(_of_ranks(loader, found))


# -- the loop ----------------------------------------------------------------------------------------------------------


class _Flags(list[bool]):
    """The queue by which BatchMemoryManager tells the optimizer which pieces end a logical batch; counts the calls."""

    taken = 0
    lost = False

    def pop(self, index: SupportsIndex = -1) -> bool:
        self.taken += 1
        return super().pop(index)

    def clear(self) -> None:
        self.lost = self.lost or len(self) > 0
        super().clear()


class _Permit:
    """One step for each batch of one loader; see ``guard``."""

    def __init__(self, optimizers: list[Any], *, split: bool, by_passes: bool, streams: dict[str, int]) -> None:
        self.optimizers, self.split, self.by_passes, self.streams = optimizers, split, by_passes, streams
        self.hooks: list[StepHook] = [optimizer.step_hook for optimizer in optimizers]
        self.iteration = 0  # loops over the guarded loader so far; the latest one is in force
        self._fresh = False  # a batch has been handed out and no step taken on it
        self._ends = True  # that batch ends a logical batch
        self._least = math.inf  # the least noise that this pass was charged for
        self._pieces = 0
        self._flags = _Flags()
        self._norms: list[float] = []

    def open(self) -> int:
        for optimizer in self.optimizers:
            discard_pending_step(optimizer)
        if self.split:
            self._flags = _Flags()
            self.optimizers[0]._step_skip_queue = self._flags
        self._fresh, self._ends, self._least, self._pieces = False, True, math.inf, 0
        self.iteration += 1
        return self.iteration

    def require_hooks(self) -> None:
        if any(optimizer.step_hook is not hook for optimizer, hook in zip(self.optimizers, self.hooks, strict=True)):
            raise AccountingError(
                "The accountant's step hook was replaced during training (attach_step_hook has one slot), so steps "
                "were not charged. Attach no other hook to a DPOptimizer."
            )

    def batch(self) -> None:
        self.require_hooks()
        if self.split:
            if self._flags.lost or self._flags.taken != self._pieces:
                raise AccountingError(
                    f"{self._flags.taken} steps were taken on {self._pieces} pieces of batches: BatchMemoryManager and "
                    "the optimizer are out of step, and records of two logical batches would enter one sum. Call "
                    "step() exactly once for every piece, and begin a new loop after a step was refused."
                )
            self._pieces += 1
        for hook in self.hooks:
            if hook.clipper is not None:
                if not self._ends:  # a step that ends a logical batch requires it itself
                    hook.require_clipped()
                hook.watch_clipping(hook.clipper)
        if self._ends or not self.split:
            self._norms = [optimizer.max_grad_norm for optimizer in self.optimizers]
        self._ends = not (self.split and self._flags and self._flags[0])
        self._fresh = True

    def close(self, iteration: int) -> None:
        if iteration != self.iteration:
            return  # a later loop is in force
        self._fresh = False
        for optimizer in self.optimizers:
            if optimizer._is_last_step_skipped or optimizer._step_skip_queue:
                discard_pending_step(optimizer)

    def rate(self, optim: Any, sample_rate: float, noise_multiplier: float) -> float:
        if not self._fresh:
            raise AccountingError(
                "A step is about to be taken for which guard() has handed out no batch, or a second one on one batch. "
                "Leakage adds up over steps only where each draws its own batch; steps that share a batch reveal more "
                "than is charged for them. Iterate over guard(...) itself (of BatchMemoryManager's loader, where that "
                "is used), and take one step a batch."
            )
        if self.split and not self._ends:
            raise AccountingError(
                "A step is about to be taken inside a logical batch of BatchMemoryManager. Call step() exactly once "
                "for every piece: a second call on one piece counts its records twice."
            )
        accumulated = optim._is_last_step_skipped
        if accumulated and optim.max_grad_norm != self._norms[self.optimizers.index(optim)]:
            raise AccountingError(
                "max_grad_norm changed inside a logical batch: some of its pieces were clipped at another norm than "
                "the noise is scaled to. Step the scheduler between logical batches."
            )
        if self.by_passes:
            return 1.0 if noise_multiplier < self._least else 0.0
        if optim.accumulated_iterations > 1 or (accumulated and not self.split):
            raise AccountingError(
                "Several Poisson batches were combined into one step (accumulated, or by signal_skip_step). A record "
                "can be in several of them, and then moves the sum by more than the clipping norm. Use one batch a "
                "step, of the size that you want; BatchMemoryManager splits it."
            )
        return sample_rate

    def taken(self, optim: Any, noise_multiplier: float) -> None:
        self._fresh = False
        self._least = min(self._least, noise_multiplier)


class GuardedLoader:
    """What ``guard`` returns: iterate over it in place of the loader.

    Attributes:
        loader: the guarded loader.
        batches: how it is charged.
    """

    def __init__(
        self, engine: PrivacyEngine, model: Any, optimizers: list[Any], loader: Any, batches: Batches, accept: Any
    ) -> None:
        self.loader, self.batches = loader, batches
        self._arguments = engine, model, optimizers
        self._accept = frozenset(accept)
        inspect(*self._arguments, loader, batches=batches, strict=True, accept=self._accept | _CORRECTED)
        streams: dict[str, int] = {}
        for optimizer in optimizers:
            streams.update(getattr(optimizer.step_hook.permit, "streams", {}))
        split = isinstance(getattr(loader, "batch_sampler", None), BatchSplittingSampler)
        self._permit = _Permit(optimizers, split=split, by_passes=batches == "per_pass", streams=streams)
        for optimizer, hook in zip(optimizers, self._permit.hooks, strict=True):
            hook.permit = self._permit
            if is_ghost(optimizer):
                hook.watch_clipping(_clipper_of(model))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        permit = self._permit
        iteration = permit.open()
        inspect(*self._arguments, self.loader, batches=self.batches, strict=True, accept=self._accept)
        self._require_new_randomness()
        try:
            for batch in self.loader:
                permit.batch()
                yield batch
                if permit.iteration != iteration:
                    raise AccountingError(
                        "Another loop over the same guarded loader has begun. Finish one loop before the next."
                    )
            permit.require_hooks()
        finally:
            permit.close(iteration)

    def _require_new_randomness(self) -> None:
        """A generator that is seeded again repeats its batches, and its noise, which then cancels in a difference."""
        steps = sum(len(accountant) for accountant in {hook.accountant for hook in self._permit.hooks})
        sampler = _poisson_sampler(self.loader)
        for use, generator in [
            ("batches", getattr(sampler, "generator", None)),
            *(("noise", optimizer.generator) for optimizer in self._permit.optimizers),
        ]:
            state = _digest(generator)
            if state and steps > self._permit.streams.setdefault(state, steps):
                raise AccountingError(
                    f"The random generator of the {use} is in a state in which it has been before: it was seeded "
                    "again. Batches and noise then repeat, and noise that repeats cancels. Seed once, before training."
                )


_CORRECTED = frozenset({"unfinished_logical_batch", "clip_norms_differ"})  # errors that guard() does away with


def guard(
    engine: PrivacyEngine,
    model: Any,
    optimizer: Any,
    loader: Any,
    *,
    batches: Batches = "poisson",
    accept: Collection[str] = (),
) -> GuardedLoader:
    """Stand between a loader and a training loop, so that what runs is what is charged.

    At every pass it inspects anew and discards what an interrupted logical batch has left. At every step it requires a
    batch of its own, and with ghost clipping it charges the noise over the norm at which the module clips. Steps of
    the optimizer outside a loop over the result are refused from now on.

    ``batches="per_pass"`` charges fixed batches (``poisson_sampling=False``), with no amplification by sampling. Given
    the order in which the records come, each is in one step of a pass, and the pass reveals at most 1/(2σ²) nats about
    it, σ the least noise of the pass; the first step of a pass is charged with q = 1 and the others with q = 0. This
    **assumes that the order is independent of the records**, as a shuffle is, and a file sorted by content is not.

    Args:
        engine: the ``PrivacyEngine``.
        model: the first object that ``make_private`` returned.
        optimizer: the optimizer that it returned, or a list of all that step on this loader.
        loader: the loader that it returned. With ``BatchMemoryManager``, the loader that *that* returns, guarded anew
            at every entry.
        batches: ``"poisson"`` or ``"per_pass"``.
        accept: codes of ``inspect`` that are not refused.

    Returns:
        An iterable over the loader's batches, of the loader's length.

    Raises:
        AccountingError: now, at the start of a pass or at a step, where what runs is not what is charged.

    Example:
        >>> for x, y in guard(engine, model, optimizer, loader):  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return GuardedLoader(engine, model, optimizers, loader, batches, accept)
