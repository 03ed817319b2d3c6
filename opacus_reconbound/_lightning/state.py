"""The account in Lightning's checkpoints."""

from __future__ import annotations

import os
from typing import Any

import torch

from opacus_reconbound.accountants import MutualInformationAccountant
from opacus_reconbound.errors import AccountingError, InvalidValueError

__all__ = ["KEY", "VERSION", "readable", "require_account", "require_empty", "stored_account"]

KEY = "ReconstructionBoundCallback"
VERSION = 1


def readable(state: dict[str, Any]) -> dict[str, Any]:
    """The same state.

    Raises:
        AccountingError: it has another version.
    """
    version = state.get("version")
    if version != VERSION:
        raise AccountingError(
            f"The checkpoint's leakage account has version {version!r}; this library reads {VERSION}. "
            "Update opacus_reconbound."
        )
    return state


def require_account(checkpoint: dict[str, Any]) -> None:
    """Refuse a checkpoint of a trained model that says nothing about what its training leaked.

    Raises:
        AccountingError: it holds no account.
    """
    if checkpoint.get("global_step", 0) > 0 and KEY not in checkpoint.get("callbacks", {}):
        raise AccountingError(
            f"The checkpoint was trained for {checkpoint['global_step']} steps but holds no account of their "
            "leakage: it was saved without ReconstructionBoundCallback. Resume from a checkpoint saved with the "
            "callback, or load the weights only and put the earlier steps on the account "
            "(accountant.history = [(noise_multiplier, sample_rate, steps), ...])."
        )


def require_empty(accountant: MutualInformationAccountant) -> None:
    """Refuse to begin an account that has begun already.

    Raises:
        AccountingError: it holds steps.
    """
    if len(accountant) > 0:
        raise AccountingError(
            f"The account holds {len(accountant)} steps already, and continue_from= begins one. Make the "
            "engine anew, or leave continue_from out where these steps are those of the checkpoint."
        )


def stored_account(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The callback's state in a checkpoint; of nothing else in it any code is run."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InvalidValueError(f"There is no checkpoint {path} to continue from.") from None
    except Exception as error:  # a damaged file makes torch raise nearly anything
        raise InvalidValueError(
            f"The checkpoint {path} cannot be read with weights_only=True: {str(error).splitlines()[0]} Put the "
            "earlier steps on the account instead (accountant.history = [(noise_multiplier, sample_rate, steps), ...])."
        ) from error
    state = checkpoint.get("callbacks", {}).get(KEY) if isinstance(checkpoint, dict) else None
    if not state:
        raise AccountingError(
            f"The checkpoint {path} holds no account: it was saved without ReconstructionBoundCallback. Put the "
            "earlier steps on the account (accountant.history = [(noise_multiplier, sample_rate, steps), ...])."
        )
    return readable(state)
