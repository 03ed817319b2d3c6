"""Wiring Opacus into Lightning with public interfaces, and checking that what runs is what is accounted."""

from __future__ import annotations

from typing import Any

from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch.utils.data import RandomSampler, SequentialSampler

from opacus_reconbound.accountants import StepHook
from opacus_reconbound.engine import require_accountant
from opacus_reconbound.errors import AccountingError

__all__ = ["hooks_of", "poisson_rate", "private_optimizer", "remove_grad_sample_hooks", "require_private_run"]

_HOOKS = "_reconbound_grad_sample_hooks"


def private_optimizer(
    module: Any,
    optimizer: Any,
    *,
    engine: PrivacyEngine,
    noise_multiplier: float,
    max_grad_norm: float,
    **kwargs: Any,
) -> Any:
    """Make a LightningModule private from its ``configure_optimizers``; return the optimizer to return there.

    The training loader has to sample by Poisson already: return ``DPDataLoader.from_data_loader(loader)`` from
    ``train_dataloader`` or pass it to ``fit``. The module is not wrapped, so checkpoint keys stay as they are. Make
    the engine once, outside ``configure_optimizers``, so that a second ``fit`` adds to the same account.

    Args:
        module: the LightningModule, ``self``.
        optimizer: the torch optimizer over its parameters.
        engine: ``PrivacyEngine(accountant="rdp+mi")`` or ``"prv+mi"``.
        noise_multiplier: σ.
        max_grad_norm: the clipping norm.
        **kwargs: for ``PrivacyEngine.make_private``.

    Raises:
        AccountingError: the training loader does not sample by Poisson.
    """
    require_accountant(engine)
    trainer = module.trainer
    trainer.fit_loop.setup_data()  # public; the trainer would do it only after the optimizers
    loader = trainer.train_dataloader
    if not isinstance(loader, DPDataLoader):
        raise AccountingError(
            f"The training loader is a {type(loader).__name__}, which does not draw Poisson batches. Return "
            "opacus.data_loader.DPDataLoader.from_data_loader(loader) from train_dataloader(), or pass it to fit()."
        )
    hooks, private, _ = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        wrap_model=False,
        **kwargs,
    )
    setattr(private, _HOOKS, hooks)
    return private


def remove_grad_sample_hooks(optimizer: Any) -> None:
    """Undo ``private_optimizer`` on the module, so that another ``fit`` can add its own hooks."""
    hooks = getattr(optimizer, _HOOKS, None)
    if hooks is not None:
        hooks.remove_hooks()
        setattr(optimizer, _HOOKS, None)


def hooks_of(optimizers: list[Any]) -> list[tuple[Any, StepHook]]:
    """Each private optimizer with the hook that charges its steps.

    Raises:
        AccountingError: an optimizer is not private, or its steps are not charged by this library.
    """
    if not optimizers:
        raise AccountingError("The trainer has no optimizer, so there is nothing to account for.")
    found = []
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, DPOptimizer):
            raise AccountingError(
                f"Optimizer {index} is a {type(optimizer).__name__}, not a DPOptimizer: its steps add no noise. Return "
                "the optimizer of PrivacyEngine.make_private, or private_optimizer(self, ...), from "
                "configure_optimizers()."
            )
        hook = optimizer.step_hook
        if not isinstance(hook, StepHook):
            raise AccountingError(
                f"The steps of optimizer {index} are not charged by an accountant that knows the leakage. Make the "
                "engine with PrivacyEngine(accountant='rdp+mi') or 'prv+mi'; and call attach_step_hook() on a "
                "DPOptimizer for nothing else, for it replaces the accountant's hook."
            )
        found.append((optimizer, hook))
    return found


def poisson_rate(loader: Any) -> float | None:
    """The inclusion probability of a loader that draws Poisson batches; None for any other loader."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if isinstance(sampler, (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)):
        return float(sampler.sample_rate)
    return None


def require_private_run(loader: Any, found: list[tuple[Any, StepHook]], *, world_size: int) -> None:
    """Refuse a run whose batches are not what its optimizers charge for.

    Raises:
        AccountingError: no Poisson sampling, a higher rate than the accounted one, or ranks out of step.
    """
    rate = poisson_rate(loader)
    for index, (optimizer, hook) in enumerate(found):
        if rate is None:
            whole = hook.sample_rate == 1.0 and _is_full_batch(loader)
            if not whole:
                raise AccountingError(
                    f"The training loader ({type(loader).__name__}) does not draw Poisson batches, but its steps are "
                    f"charged as if it did (sample_rate = {hook.sample_rate:g}). Use DPDataLoader.from_data_loader("
                    "loader), and make the run private before the trainer builds its loaders (not in on_train_start)."
                )
        elif rate > hook.sample_rate * (1.0 + 1e-12):
            raise AccountingError(
                f"The training loader includes each record with probability {rate:g}, but optimizer {index} is charged "
                f"for {hook.sample_rate:g}. Make the engine private with the loader that trains."
            )
        if world_size > 1 and "Distributed" not in type(optimizer).__name__ and "FSDP" not in type(optimizer).__name__:
            raise AccountingError(
                f"{world_size} processes train, but optimizer {index} ({type(optimizer).__name__}) does not combine "
                "their gradients: each process would release a model of its own. Use a distributed DPOptimizer "
                "(get_optimizer_class(..., distributed=True)) and Trainer(use_distributed_sampler=False)."
            )


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
