"""What a step of a DPOptimizer really does, as far as the optimizer itself can tell.

Opacus charges a step with ``optimizer.noise_multiplier`` and with one over the length of a loader. The functions here
read what the step is made of instead: the norm that the noise is scaled to, the norm that clipping uses, whether the
clipping norm is fixed at all, and whether the sizes of the batches can be those of Poisson samples.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizerFastGradientClipping
from scipy.stats import binom

from opacus_reconbound.errors import AccountingError

__all__ = ["BatchSizes", "clipping_norm", "effective_noise", "is_adaptive", "is_ghost"]

# Opacus computes norms in float32, and Theorem 4.1 is about real numbers: closer than this, two norms are one.
SAME_NORM = 1e-6

ADAPTIVE = (
    "clips adaptively: the norm follows a noised count of unclipped records that is divided by the exact size of the "
    "batch, and the size is released without noise."
)


def is_adaptive(optim: Any) -> bool:
    """Whether the clipping norm follows the records: AdaClip, or ``PrivacyEngineAdaptiveClipping`` once it has run."""
    return isinstance(optim, AdaClipDPOptimizer) or hasattr(optim, "_adjusted_noise_multiplier")


def is_ghost(optim: Any) -> bool:
    """Whether the gradients are clipped before the optimizer sees them, at a norm that the module keeps."""
    return isinstance(optim, DPOptimizerFastGradientClipping)


def clipping_norm(optim: Any, clipper: Any = None) -> float | None:
    """The l2 norm that one record's gradient is clipped to; None where only the module knows it.

    Args:
        optim: a DPOptimizer.
        clipper: with ghost clipping, the first object that ``make_private`` returned.
    """
    layers = getattr(optim, "max_grad_norms", None)
    if layers is not None:
        return math.hypot(*layers)
    if clipper is not None:
        return float(clipper.max_grad_norm)
    return None if is_ghost(optim) else float(optim.max_grad_norm)


def effective_noise(optim: Any, clipper: Any = None) -> float:
    """The noise's standard deviation over the norm that one record's gradient is really clipped to.

    It is ``optim.noise_multiplier`` where both norms agree. They part where a scheduler, or a second ``make_private``,
    moves ``optim.max_grad_norm`` while ghost clipping goes on at the module's norm and per-layer clipping at the
    layers' norms.
    """
    sigma: float = optim.noise_multiplier
    if clipper is None and not hasattr(optim, "max_grad_norms"):
        return sigma
    clipped, noised = clipping_norm(optim, clipper), float(optim.max_grad_norm)
    if clipped is None or abs(clipped - noised) <= SAME_NORM * clipped:
        return sigma
    return sigma * (noised / clipped) if clipped > 0 else math.inf


@lru_cache(maxsize=256)
def _log_odds(sample_rate: float, records: int) -> tuple[float, float] | None:
    """Log of (2/3)/p and of (1/3)/(1-p), p the probability that two Poisson batches are of one size, times 1.5."""
    spread = 12.0 * math.sqrt(records * sample_rate * (1.0 - sample_rate)) + 40.0
    centre = records * sample_rate
    sizes = np.arange(max(0, math.floor(centre - spread)), min(records, math.ceil(centre + spread)) + 1)
    equal = 1.5 * float(np.square(binom.pmf(sizes, records, sample_rate)).sum())
    if not 0.0 < equal < 2 / 3:
        return None
    return math.log(2 / 3 / equal), math.log(1 / 3 / (1.0 - equal))


class BatchSizes:
    """Notices batches that are no Poisson samples, or are used for several steps, by their sizes being equal too often.

    The sizes of two Poisson batches agree with a small probability p. Two wagers, one on the pairs (1, 2), (3, 4), ...
    and one on (2, 3), (4, 5), ..., multiply their wealth by (2/3)/p at equal sizes and by (1/3)/(1-p) at others. Each
    is a martingale under Poisson sampling, so the probability that either ever reaches ``1e12`` is below ``2e-12``
    (Ville's inequality); p is taken half as large again, for the number of records is known to the optimizer only
    from its expected batch size. Where batches are on average less than half of that, nothing is said.
    """

    LIMIT = math.log(1e12)

    def __init__(self) -> None:
        self._last = -1
        self._odd = False
        self._wealth = [0.0, 0.0]
        self._silent = False
        self._records = self._batches = 0

    def observe(self, optim: Any, sample_rate: float) -> None:
        """Look at the size of the pending batch of ``optim``.

        Raises:
            AccountingError: the sizes so far are not those of Poisson samples.
        """
        if self._silent:
            return
        if optim._is_last_step_skipped or optim._step_skip_queue or getattr(optim, "world_size", 1) > 1:
            self._silent = True  # pieces of batches have other sizes, and so have batches that may not be empty
            return
        expected = optim.expected_batch_size
        size = _batch_size(optim)
        if size is None or not expected or sample_rate >= 1.0:
            return
        odds = _log_odds(sample_rate, int(expected / sample_rate))
        if odds is None:
            return
        self._records += size
        self._batches += 1
        before, self._last = self._last, size
        if before < 0:
            return
        equal = size == before
        self._odd = not self._odd
        self._wealth[self._odd] += odds[0] if equal else odds[1]
        if max(self._wealth) > self.LIMIT:
            if 2 * self._records < expected * self._batches:
                self._silent = True
                return
            raise AccountingError(
                f"The sizes of the batches are equal far more often than those of Poisson samples are (the last one "
                f"has {size} records; {sample_rate * int(expected / sample_rate):.4g} were expected), but the steps "
                f"are charged as if each drew its own Poisson sample (sample_rate = {sample_rate:g}). What has been "
                "charged so far is too little. Iterate over the loader that make_private returned, take one step a "
                "batch, leave poisson_sampling at True; or charge fixed batches by passes: "
                "opacus_reconbound.guard(..., batches='per_pass')."
            )


def _batch_size(optim: Any) -> int | None:
    for group in optim.param_groups:
        for p in group["params"]:
            if p.requires_grad:
                samples = getattr(p, "grad_sample", None)
                if samples is None:
                    samples = getattr(p, "_norm_sample", None)
                return len(samples) if isinstance(samples, torch.Tensor) else None
    return None
