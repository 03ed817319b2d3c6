"""Wiring Opacus into Lightning with public interfaces."""

from __future__ import annotations

from typing import Any

from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader

from opacus_reconbound.engine import require_accountant
from opacus_reconbound.errors import AccountingError

__all__ = ["private_optimizer", "remove_grad_sample_hooks"]

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
        AccountingError: the training loader does not sample by Poisson, or ghost clipping is asked for.
    """
    require_accountant(engine)
    mode = kwargs.get("grad_sample_mode", "hooks")
    if "ghost" in mode:
        raise AccountingError(
            f"grad_sample_mode={mode!r} clips within a criterion that make_private returns, and a LightningModule "
            "computes its loss without it, so nothing would be clipped. Leave grad_sample_mode at 'hooks', or train in "
            "a loop of your own with opacus_reconbound.guard."
        )
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
