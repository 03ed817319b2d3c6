"""Wiring Opacus into Lightning with public interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from opacus import PrivacyEngine
from opacus.optimizers import get_optimizer_class

from opacus_reconbound._mechanism import is_ghost
from opacus_reconbound.accountants import StepHook
from opacus_reconbound.checks import poisson_rate
from opacus_reconbound.engine import require_accountant
from opacus_reconbound.errors import AccountingError, InvalidValueError

__all__ = ["private_optimizer", "remove_grad_sample_hooks", "require_hooks_in_place", "require_no_swallowed_settings"]

_HOOKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # of each module; on it, they would be copied with it
_SETTINGS = ("noise_multiplier", "max_grad_norm", "max_grad_norms", "expected_batch_size", "generator", "step_hook")


def private_optimizer(
    module: Any,
    optimizer: Any,
    *,
    engine: PrivacyEngine,
    noise_multiplier: float,
    max_grad_norm: float | list[float],
    **kwargs: Any,
) -> Any:
    """Make a LightningModule private from its ``configure_optimizers``; return the optimizer to return there.

    The training loader has to sample by Poisson already: give ``fit`` a ``PrivateDataModule``, or a ``DPDataLoader``.
    The module is not wrapped, so checkpoint keys stay as they are. Make the engine once, outside
    ``configure_optimizers``, so that a second ``fit`` adds to the same account. Where several processes train, their
    gradients are combined; the noise is added once.

    With ``grad_sample_mode="ghost"`` the optimizer has a ``criterion``: compute the loss in ``training_step`` by
    ``self.optimizers().criterion(output, target)``. It returns an ordinary scalar, for ``self.log`` and for automatic
    and manual optimization.

    Args:
        module: the LightningModule, ``self``.
        optimizer: the torch optimizer over its parameters; or all that ``configure_optimizers`` returned before, with
            learning rate schedulers, which then follow the private optimizer.
        engine: ``PrivacyEngine(accountant="rdp+mi")`` or ``"prv+mi"``.
        noise_multiplier: σ.
        max_grad_norm: the clipping norm; with ``clipping="per_layer"`` one for each parameter tensor.
        **kwargs: for ``PrivacyEngine.make_private``, such as ``clipping``, ``grad_sample_mode`` or ``criterion``.

    Returns:
        What was given for ``optimizer``, with the private optimizer in its place.

    Raises:
        AccountingError: the training loader does not sample by Poisson, ghost clipping with several processes, or a
            mode for FSDP.
        InvalidValueError: ``wrap_model`` is given.
    """
    if "wrap_model" in kwargs:
        raise InvalidValueError("private_optimizer never wraps the module; leave wrap_model out.")
    require_accountant(engine)
    given, optimizer = optimizer, _only_optimizer(optimizer)
    trainer = module.trainer
    trainer.fit_loop.setup_data()  # public; the trainer would do it only after the optimizers
    loader = trainer.train_dataloader
    if poisson_rate(loader) is None:
        raise AccountingError(
            f"The training loader is a {type(loader).__name__}, which does not draw Poisson batches. Pass "
            "PrivateDataModule(loader) to fit(), or return opacus.data_loader.DPDataLoader.from_data_loader(loader) "
            "from train_dataloader()."
        )
    mode = kwargs.get("grad_sample_mode", "hooks")
    if trainer.world_size > 1 and "ghost" in mode:
        raise AccountingError(
            f"grad_sample_mode={mode!r} runs two backward passes a step, which Lightning's DDP does not allow for. Use "
            "grad_sample_mode='hooks' where several processes train."
        )
    if "fsdp" in mode:
        raise AccountingError(
            f"grad_sample_mode={mode!r} needs a module that FSDP has wrapped already, and Lightning wraps it later. "
            "Use grad_sample_mode='ghost' or 'hooks'."
        )
    _remove(module)
    made = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        wrap_model=False,
        **kwargs,
    )
    hooks, private = made[:2]
    _HOOKS[module] = hooks
    if trainer.world_size > 1:
        private = _distributed(private, trainer.world_size, clipping=kwargs.get("clipping", "flat"), mode=mode)
    # with manual optimization a step is taken inside Lightning's autocast, which would clip and add noise in bfloat16
    private.pre_step = partial(_in_full_precision, private.pre_step, module.device.type)
    if is_ghost(private):
        private.step_hook.watch_clipping(hooks)
        private.criterion = _GhostCriterion(made[2])
    return _exchange(given, optimizer, private)


def _only_optimizer(given: Any) -> Any:
    found = given
    while not isinstance(found, torch.optim.Optimizer):
        if isinstance(found, dict) and "optimizer" in found:
            found = found["optimizer"]
        elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], (list, tuple)):
            found = found[0]  # ([optimizers], [schedulers])
        elif isinstance(found, (list, tuple)) and len(found) == 1:
            found = found[0]
        else:
            raise InvalidValueError(
                "Expected one torch optimizer, or what configure_optimizers returns with one, its schedulers beside "
                f"it. Found {type(found).__name__}{f' of {len(found)}' if isinstance(found, (list, tuple)) else ''}. "
                "Opacus makes one optimizer of a module private."
            )
    return found


def _exchange(given: Any, old: Any, new: Any) -> Any:
    """The same structure with another optimizer; schedulers follow it."""
    if given is old:
        return new
    if isinstance(given, dict):
        return {key: _exchange(value, old, new) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(_exchange(value, old, new) for value in given)
    if getattr(given, "optimizer", None) is old:
        given.optimizer = new
        if not hasattr(new.step, "_wrapped_by_lr_sched"):
            # a scheduler counts the steps of its optimizer by this mark, to warn where there are none
            new.step = partial(new.step)
            new.step._wrapped_by_lr_sched = new._opt_called = True
        for inner in getattr(given, "_schedulers", ()):
            _exchange(inner, old, new)
    return given


def _in_full_precision(pre_step: Any, device: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return pre_step(*args, **kwargs)


def _distributed(private: Any, world_size: int, *, clipping: str, mode: str) -> Any:
    """The same optimizer for several processes; make_private sees no DDP yet, which Lightning wraps around later."""
    kind = get_optimizer_class(clipping=clipping, distributed=True, grad_sample_mode=mode)
    combined = kind(
        optimizer=private.original_optimizer,
        noise_multiplier=private.noise_multiplier,
        max_grad_norm=getattr(private, "max_grad_norms", private.max_grad_norm),
        expected_batch_size=private.expected_batch_size / world_size,
        loss_reduction=private.loss_reduction,
        generator=private.generator,
        secure_mode=private.secure_mode,
    )
    combined.attach_step_hook(private.step_hook)
    return combined


class _TwoPasses(torch.autograd.Function):
    """The loss of ghost clipping as an ordinary scalar, whose gradient is that of Opacus's two passes."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, loss: Any) -> torch.Tensor:
        ctx.loss = loss
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        if float(gradient) != 1.0:
            raise AccountingError(
                f"The loss of ghost clipping was multiplied by {float(gradient):g} before backward(), which Opacus's "
                "second pass does not see. Return the loss as the criterion gave it, and scale the learning rate."
            )
        with torch.enable_grad():
            ctx.loss.backward()
        return None, None


class _GhostCriterion:
    """Opacus's clipping criterion, with an ordinary scalar as its value."""

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = self.criterion(*args, **kwargs)
        value = loss.detach().clone() if torch.is_tensor(loss) else torch.as_tensor(loss.item())
        scalar: torch.Tensor = _TwoPasses.apply(value.requires_grad_(torch.is_grad_enabled()), loss)
        return scalar


def _remove(module: Any) -> None:
    hooks = _HOOKS.pop(module, None)
    if hooks is not None:
        hooks.remove_hooks()


def remove_grad_sample_hooks(module: Any) -> None:
    """Undo ``private_optimizer`` on the module, so that it can be copied, saved and trained otherwise."""
    _remove(module)


def require_hooks_in_place(found: Sequence[tuple[Any, StepHook]]) -> None:
    """Refuse optimizers whose steps are no longer charged.

    Raises:
        AccountingError: a step hook was replaced.
    """
    for private, hook in found:
        if private.step_hook is not hook:
            raise AccountingError(
                "The accountant's step hook was replaced during training (attach_step_hook has one slot), so steps "
                "would not be charged. Attach no other hook to a DPOptimizer."
            )


def require_no_swallowed_settings(module: Any) -> None:
    """Refuse settings that landed on Lightning's wrapper of an optimizer, where nothing reads them.

    Raises:
        AccountingError: there are some.
    """
    wrappers = module.optimizers()
    for index, wrapper in enumerate(wrappers if isinstance(wrappers, list) else [wrappers]):
        inner = getattr(wrapper, "optimizer", None)
        names = [] if inner is None else [name for name in _SETTINGS if name in vars(wrapper)]
        if names:
            raise AccountingError(
                f"{', '.join(names)} was set on Lightning's wrapper of optimizer {index}, and the optimizer itself "
                "keeps its old setting. Give schedulers, assignments and hooks "
                "self.optimizers(use_pl_optimizer=False), or trainer.optimizers[i]."
            )
