"""What the callback asks of a trainer."""

from __future__ import annotations

import math
import warnings
from typing import Any

from opacus_reconbound.checks import poisson_rate
from opacus_reconbound.errors import AccountingError

__all__ = ["planned_steps", "require_supported", "watches"]


def require_supported(trainer: Any) -> None:
    """Refuse options under which steps are not what is charged; warn of one that only harms.

    Raises:
        AccountingError: loss scaling, or accumulated gradients.
    """
    if getattr(getattr(trainer, "precision_plugin", None), "scaler", None) is not None:
        raise AccountingError(
            "precision='16-mixed' scales gradients before they are clipped and skips steps by what it sees in "
            "them. Use precision='bf16-mixed' or '32-true'."
        )
    if trainer.accumulate_grad_batches != 1:
        raise AccountingError(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} combines several batches into one step. A "
            "record can be in several of them, and then moves the sum by more than the clipping norm. Leave it at "
            "1 and choose the batch size that you want."
        )
    if trainer.gradient_clip_val:
        warnings.warn(
            f"gradient_clip_val={trainer.gradient_clip_val:g} has nothing to do with the clipping that privacy "
            "rests on: it changes nothing with per-sample gradients, and shortens the noised step with ghost "
            "clipping. Leave it out, and set max_grad_norm.",
            category=UserWarning,
            stacklevel=3,
        )


def planned_steps(trainer: Any, loader: Any, *, taken: int) -> int | None:
    """Steps all told at the trainer's planned end, at least those taken; None where it plans none."""
    rate = poisson_rate(loader)
    per_epoch = max(1, min(int(1 / rate) if rate else 1, trainer.num_training_batches))
    planned: float = trainer.max_epochs * per_epoch if (trainer.max_epochs or -1) >= 0 else math.inf
    if (trainer.max_steps or -1) >= 0:
        planned = min(planned, trainer.max_steps)
    return None if math.isinf(planned) else max(int(planned), taken)


def watches(callback: Any) -> bool:
    """Whether a callback, such as ModelCheckpoint, reads what is logged at steps of its own choice."""
    named = [getattr(callback, name, None) for name in ("monitor", "filename")]
    return any("reconstruction/" in str(name) or "privacy/" in str(name) for name in named)
