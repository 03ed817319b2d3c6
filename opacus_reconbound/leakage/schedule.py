"""A training schedule (q_t, σ_t) as far as leakage is concerned, and the sum over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from opacus_reconbound import _validate
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.leakage.gaussian import realised_sample_rates, step_leakage

__all__ = ["Run", "Schedule", "charged_total"]


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive steps with one (q, σ).

    Attributes:
        sample_rate: q, the probability that a record enters a step.
        noise_multiplier: σ, the noise standard deviation over the clipping norm.
        steps: how many such steps.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_rate", _validate.sample_rate(self.sample_rate))
        object.__setattr__(self, "noise_multiplier", _validate.non_negative("noise_multiplier", self.noise_multiplier))
        object.__setattr__(self, "steps", _validate.steps("steps", self.steps))


def _exact_total(bits: NDArray[np.float64], steps: NDArray[np.int64]) -> float:
    """Correctly rounded Σ steps · bits: each product is split into parts that are exact, then ``math.fsum``."""
    keep = steps > 0
    bits, steps = bits[keep], steps[keep]
    if np.isinf(bits).any():
        return math.inf
    # Veltkamp: bits = high + low with at most 26 and 27 significant bits; counts in two halves of 26 bits
    mantissa, exponent = np.frexp(bits)
    high = np.ldexp(np.round(np.ldexp(mantissa, 26)), exponent - 26)
    low = bits - high
    upper, lower = (steps >> 26) << 26, steps & ((1 << 26) - 1)
    try:
        parts = np.concatenate([high * upper, high * lower, low * upper, low * lower])
        return math.fsum(parts.tolist())
    except OverflowError:
        return math.inf


def charged_total(
    sample_rates: NDArray[np.float64], noise_multipliers: NDArray[np.float64], steps: NDArray[np.int64]
) -> float:
    """Charged bits of so many steps at each (q, σ), in all; exact, rounded once."""
    recorded = np.atleast_1d(step_leakage(sample_rates, noise_multipliers))
    realised = np.atleast_1d(step_leakage(realised_sample_rates(sample_rates), noise_multipliers))
    return _exact_total(np.maximum(recorded, realised), steps)


@dataclass(frozen=True)
class Schedule:
    """Runs of steps, in order. Frozen; schedules compose with ``+``, as leakage does.

    Two runs on the same protected records are one longer schedule (paper, Lemma D.1): a search over ten
    configurations is charged all ten.

    Attributes:
        runs: the runs, neighbours with equal (q, σ) merged and empty runs dropped.

    Example:
        >>> schedule = Schedule.constant(sample_rate=0.02, noise_multiplier=1.0, steps=1000)
        >>> (schedule + schedule).steps
        2000
    """

    runs: tuple[Run, ...] = ()

    def __post_init__(self) -> None:
        merged: list[Run] = []
        for run in self.runs:
            if not isinstance(run, Run):
                raise InvalidValueError(f"Expected Schedule runs to be Run objects. Found {run!r}.")
            if run.steps == 0:
                continue
            last = merged[-1] if merged else None
            if (
                last is not None
                and last.sample_rate == run.sample_rate
                and last.noise_multiplier == run.noise_multiplier
                and last.steps + run.steps <= _validate.MOST_STEPS
            ):
                merged[-1] = Run(run.sample_rate, run.noise_multiplier, last.steps + run.steps)
            else:
                merged.append(run)
        object.__setattr__(self, "runs", tuple(merged))

    @classmethod
    def constant(cls, *, sample_rate: float, noise_multiplier: float, steps: int) -> Schedule:
        """The same (q, σ) in every step."""
        return cls((Run(sample_rate, noise_multiplier, steps),))

    @classmethod
    def from_arrays(
        cls,
        *,
        sample_rates: ArrayLike,
        noise_multipliers: ArrayLike,
        steps: ArrayLike = 1,
    ) -> Schedule:
        """One run for each entry; the arguments are broadcast, so a scalar serves for all."""
        try:
            q, sigma, count = np.broadcast_arrays(
                np.asarray(sample_rates, float), np.asarray(noise_multipliers, float), np.asarray(steps)
            )
        except (TypeError, ValueError) as error:
            raise InvalidValueError(f"Expected arrays of one length. {error}") from error
        rows = zip(q.ravel().tolist(), sigma.ravel().tolist(), count.ravel().tolist(), strict=True)
        return cls(tuple(Run(*row) for row in rows))

    @classmethod
    def from_history(cls, history: Iterable[Sequence[float]]) -> Schedule:
        """From an Opacus accountant's history: entries (noise_multiplier, sample_rate, num_steps), in this order."""
        runs = []
        for index, entry in enumerate(history):
            try:
                sigma, q, steps = entry
                runs.append(Run(q, sigma, steps))  # type: ignore[arg-type]
            except (TypeError, ValueError) as error:
                raise InvalidValueError(
                    f"Expected history[{index}] = (noise_multiplier, sample_rate, num_steps). "
                    f"Found {_validate.shown(entry)}: {error}"
                ) from error
        return cls(tuple(runs))

    def __add__(self, other: object) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        return Schedule(self.runs + other.runs)

    def scaled(self, factor: float) -> Schedule:
        """The same sample rates and steps, with every noise multiplier times ``factor`` in [0, inf)."""
        factor = _validate.non_negative("factor", _validate.finite("factor", factor))
        return Schedule(
            tuple(
                Run(
                    run.sample_rate,
                    run.noise_multiplier * factor if run.noise_multiplier < math.inf else math.inf,
                    run.steps,
                )
                for run in self.runs
            )
        )

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    @cached_property
    def steps(self) -> int:
        """Number of steps."""
        return sum(run.steps for run in self.runs)

    @cached_property
    def leakage_bits(self) -> float:
        """γ, an upper bound on I(record; trajectory | all other records), in bits (paper, equation 10)."""
        if not self.runs:
            return 0.0
        q, sigma, steps = self._columns()
        return _exact_total(np.atleast_1d(step_leakage(q, sigma)), steps)

    @cached_property
    def charged_bits(self) -> float:
        """γ at the inclusion probability that Opacus's float32 sampler realises; bounds and budgets use it."""
        return charged_total(*self._columns()) if self.runs else 0.0

    @property
    def sampling_excess_bits(self) -> float:
        """What the sampler's 24-bit grid adds: ``charged_bits − leakage_bits``."""
        if math.isinf(self.charged_bits):
            return 0.0 if math.isinf(self.leakage_bits) else math.inf
        return self.charged_bits - self.leakage_bits

    def _columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
        q = np.array([run.sample_rate for run in self.runs], dtype=np.float64)
        sigma = np.array([run.noise_multiplier for run in self.runs], dtype=np.float64)
        steps = np.array([run.steps for run in self.runs], dtype=np.int64)
        return q, sigma, steps

    def charged_bits_at(self, steps: ArrayLike) -> NDArray[np.float64]:
        """Charged bits after each of the given numbers of steps, for tables and plots of a whole run.

        Args:
            steps: whole numbers in [0, self.steps], any shape.

        Returns:
            Bits, float64, of the same shape; rounded up by one part in 1e13.
        """
        at = np.asarray(steps, dtype=np.int64)
        if at.size and (at.min() < 0 or at.max() > self.steps):
            raise InvalidValueError(f"Expected steps in [0, {self.steps}]. Found {at.min()} to {at.max()}.")
        if not self.runs:
            return np.zeros(at.shape)
        q, sigma, counts = self._columns()
        bits = np.atleast_1d(np.maximum(step_leakage(q, sigma), step_leakage(realised_sample_rates(q), sigma)))
        ends = np.concatenate([[0], np.cumsum(counts)])
        with np.errstate(invalid="ignore"):
            totals = np.concatenate([[0.0], np.cumsum(bits * counts)])
        index = np.clip(np.searchsorted(ends, at, side="left") - 1, 0, len(bits) - 1)
        inside = at - ends[index]
        with np.errstate(invalid="ignore"):
            extra = np.where(inside > 0, bits[index] * inside, 0.0)
        return np.asarray((totals[index] + extra) * (1.0 + 1e-13))
