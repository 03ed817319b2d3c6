"""What a finished run guarantees: from a publication's figures, or an Opacus history, to γ, ε and ρ*.

γ needs the sample rate and the noise multiplier of each step and nothing else, so it can be had for runs that knew
nothing of this library. A description in YAML or JSON, a history, or a checkpoint becomes an ``AuditedRun``; what it
does not hold and had to be worked out is kept beside it as text, and so is what the figures assume.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from opacus_reconbound import _validate
from opacus_reconbound._rounding import up3
from opacus_reconbound.accountants import without_advice
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.errors import CalibrationError, DataError, InvalidValueError
from opacus_reconbound.leakage import Run, Schedule

__all__ = ["DELTA", "Audit", "AuditedRun", "epsilon"]

Accounting = Literal["rdp", "prv"]

DELTA = 1e-5  # where nothing else is said
_MOST_EPSILON = {"rdp": 1000.0, "prv": 20.0}  # as a target; the search passes through less noise and a larger ε
_PRV_WORK = 3e4  # ε √steps, times distinct steps; beyond it Opacus takes minutes, or more memory than there is
_MOST_PHASES = 6  # that are listed one by one

_ASSUMPTIONS = (
    "Every step drew a Poisson sample of its own: each record entered with the sample rate, independently of all "
    "others. Shuffled or fixed batches are not amplified by sampling; they reveal up to 1/(2σ²) nats a pass.",
    "The gradient of one record was clipped to a norm C, and the noise had standard deviation σ C, so that a record "
    "moves a step's sum by C at most: γ compares steps with and without it, and ε is for adding or removing a record. "
    "Augmentations averaged before clipping are one gradient; a record in several rows is not. A σ published over the "
    "sensitivity 2C of replacing a record has to be doubled first.",
    "Everything that was seen of trainings on these records is in the schedule: trials and restarts add up.",
)


def epsilon(schedule: Schedule, delta: float, *, accountant: Accounting = "rdp") -> float:
    """ε of a schedule by an accountant of Opacus: 0 for no steps, inf where there is (almost) no noise.

    Args:
        schedule: the steps. Their order makes no difference to ε.
        delta: δ in (0, 1).
        accountant: ``"rdp"`` or ``"prv"``.
    """
    _validate.fraction("delta", delta)
    inner = create_accountant(f"{accountant}+mi")
    inner.history = [(sigma, q, steps) for (sigma, q), steps in _distinct(schedule).items()]
    with _quiet():
        return float(inner.get_epsilon(delta))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Opacus's warnings: RDP's advice to widen its orders (a looser ε is still a bound), PRV's overflows."""
    with without_advice():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


def _distinct(schedule: Schedule) -> Counter[tuple[float, float]]:
    """Steps of each (σ, q)."""
    steps: Counter[tuple[float, float]] = Counter()
    for run in schedule:
        steps[run.noise_multiplier, run.sample_rate] += run.steps
    return steps


# -- descriptions ------------------------------------------------------------------------------------------------------


class _Phase(BaseModel):
    """Steps at one (q, σ), as a publication states them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int | None = None
    sample_rate: float | None = None
    noise_multiplier: float | None = None
    steps: int | None = None
    epochs: float | None = None

    @field_validator("records", "batch_size", "steps", mode="before", check_fields=False)
    @classmethod
    def _count(cls, value: object, info: ValidationInfo) -> object:
        return _validate.integer(str(info.field_name), value, minimum=1, maximum=_validate.MOST_STEPS)

    @field_validator("epochs", "target_epsilon", mode="before", check_fields=False)
    @classmethod
    def _positive(cls, value: object, info: ValidationInfo) -> object:
        return _validate.positive(str(info.field_name), value)

    @field_validator("noise_multiplier", mode="before")
    @classmethod
    def _noise(cls, value: object) -> object:
        return _validate.non_negative("noise_multiplier", value)

    @field_validator("sample_rate", mode="before")
    @classmethod
    def _rate(cls, value: object) -> object:
        return _validate.sample_rate(value)


class _Description(_Phase):
    """A run: its own fields are those of its only phase, or ``phases`` has them."""

    name: str | None = None
    source: str | None = None
    records: int | None = None
    delta: float | None = None
    target_epsilon: float | None = None
    accountant: Accounting | None = None
    phases: tuple[_Phase, ...] = ()

    @field_validator("delta", mode="before")
    @classmethod
    def _delta(cls, value: object) -> object:
        return _validate.fraction("delta", value)


def _reason(error: ValidationError) -> str:
    """What is wrong with a description, in one sentence that names the key."""
    first = error.errors(include_url=False)[0]
    path = list(first["loc"])
    nested = len(path) > 1 and path[0] == "phases"
    where = f"phases[{path[1]}]: " if nested else ""
    if first["type"] == "extra_forbidden":
        known = ", ".join((_Phase if nested else _Description).model_fields)
        return f"{where}unknown key {_validate.shown(path[-1])}. Known are {known}."
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidValueError):
        return f"{where}{cause}"
    return f"{where}{path[-1] if path else 'the description'}: {first['msg']}. Found {_validate.shown(first['input'])}."


def _one_of(where: str, phase: _Phase, first: str, second: str) -> Any:
    """The one of two fields that is given."""
    values = getattr(phase, first), getattr(phase, second)
    if (values[0] is None) == (values[1] is None):
        found = "both" if values[0] is not None else "neither"
        raise InvalidValueError(f"{where}Give {first} or {second}, one of the two. Found {found}.")
    return values


def _rate_of(where: str, phase: _Phase, records: int | None) -> tuple[float, str | None]:
    rate, size = _one_of(where, phase, "sample_rate", "batch_size")
    if rate is not None:
        return float(rate), None
    if records is None:
        raise InvalidValueError(f"{where}batch_size = {size} needs records, the number of training records.")
    if size > records:
        raise InvalidValueError(f"{where}batch_size = {size:,} is more than records = {records:,}.")
    return size / records, f"The sample rate {size / records:.4g} is {size:,} of {records:,} records."


def _steps_of(where: str, phase: _Phase, rate: float, records: int | None) -> tuple[int, str | None]:
    steps, epochs = _one_of(where, phase, "steps", "epochs")
    if steps is not None:
        return int(steps), None
    if rate == 0.0:
        raise InvalidValueError(f"{where}epochs need a sample rate above 0. Give steps.")
    if phase.batch_size is not None and records is not None:
        exact = Fraction(repr(epochs)) * records / phase.batch_size
    else:  # 1/49 is no float, and 100 epochs of it no 4,901 steps
        exact = Fraction(repr(epochs)) / Fraction(rate) * (1 - Fraction(1, 2**52))
    if exact > _validate.MOST_STEPS:
        raise InvalidValueError(f"{where}epochs = {epochs:g} at sample rate {rate:g} are more than 2**53 steps.")
    count = math.ceil(exact)
    return count, f"{epochs:g} epochs at that rate are {count:,} steps, rounded up."


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AuditedRun:
    """A finished run, as far as leakage is concerned.

    Attributes:
        schedule: its steps.
        delta: δ at which ε is told.
        name: what to call it.
        source: where the figures are from, or None.
        derived: how each figure that was not given was worked out, a sentence each.
    """

    schedule: Schedule
    delta: float = DELTA
    name: str = "This run"
    source: str | None = None
    derived: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _validate.fraction("delta", self.delta)

    @classmethod
    def from_description(cls, description: Mapping[str, Any], *, delta: float | None = None) -> AuditedRun:
        """From what a publication states.

        Args:
            description: ``batch_size`` with ``records``, or ``sample_rate``; ``noise_multiplier``, or
                ``target_epsilon`` with ``delta`` and the ``accountant`` that chose the noise (``"rdp"``, ``"prv"``);
                ``steps`` or ``epochs``. Several phases are a list ``phases`` of such mappings. Also ``name``,
                ``source``.
            delta: in place of the description's.

        Raises:
            InvalidValueError: a key is unknown, missing or one too many, or a value out of range.
            CalibrationError: no noise meets the target ε.
        """
        given = dict(description) | ({} if delta is None else {"delta": delta})
        try:
            found = _Description.model_validate({key: value for key, value in given.items() if value is not None})
        except ValidationError as error:
            raise InvalidValueError(_reason(error)) from error
        phases: tuple[_Phase, ...] = found.phases or (found,)
        beside = [key for key in _Phase.model_fields if getattr(found, key) is not None]
        if found.phases and beside:
            raise InvalidValueError(f"{beside[0]} stands beside phases. Give it in each of the phases.")
        if (found.target_epsilon is None) != (found.accountant is None):
            raise InvalidValueError(
                "target_epsilon and accountant go together: the ε that the noise was chosen for, and the accounting "
                "that chose it ('rdp' or 'prv'). ε of the run is told by both in any case."
            )
        if found.target_epsilon is not None and (len(phases) > 1 or phases[0].noise_multiplier is not None):
            raise InvalidValueError(
                f"target_epsilon = {found.target_epsilon:g} stands for the noise_multiplier of a run of one phase. "
                "Leave it out where noise multipliers are known."
            )
        runs, derived = [], []
        for index, phase in enumerate(phases):
            where = f"phases[{index}]: " if found.phases else ""
            rate, of_rate = _rate_of(where, phase, found.records)
            steps, of_steps = _steps_of(where, phase, rate, found.records)
            sigma, of_sigma = phase.noise_multiplier, None
            if sigma is None:
                sigma, of_sigma = _noise_of(where, found, rate, steps)
            runs.append(Run(rate, sigma, steps))
            derived += [f"{where}{text}" for text in (of_rate, of_steps, of_sigma) if text is not None]
        return cls(
            schedule=Schedule(tuple(runs)),
            delta=DELTA if found.delta is None else found.delta,
            name=found.name or "This run",
            source=found.source,
            derived=tuple(derived),
        )

    @classmethod
    def from_history(cls, history: Any, *, delta: float = DELTA, name: str = "This run") -> AuditedRun:
        """From an Opacus accountant's history.

        Args:
            history: entries (noise_multiplier, sample_rate, num_steps), in this order.
            delta: δ at which ε is told.
            name: what to call it.
        """
        return cls(schedule=Schedule.from_history(history), delta=delta, name=name)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, delta: float | None = None) -> AuditedRun:
        """From a file; nothing in it is executed.

        Args:
            path: ``.yaml``, ``.yml`` or ``.json``: a description, or a history ``[[σ, q, steps], ...]``. Anything
                else: what ``torch.save`` wrote of an accountant's ``state_dict()``, ``PrivacyEngine.save_checkpoint``,
                or Lightning with this library's callback.
            delta: δ at which ε is told, in place of the file's.

        Raises:
            DataError: the file is missing, damaged, or holds no account.
            InvalidValueError: a figure in it is out of range, unknown or missing.
        """
        source = Path(path)
        text = source.suffix.lower() in (".yaml", ".yml", ".json")
        content = _read_text(source) if text else _read_checkpoint(source)
        state = _account_in(content)
        if not text and state is None:
            raise DataError(f"{source} holds no account: neither an accountant's state nor a checkpoint with one.")
        try:
            if state is not None:
                return cls.from_history(_history_in(state), delta=DELTA if delta is None else delta, name=str(source))
            if isinstance(content, list):
                return cls.from_history(content, delta=DELTA if delta is None else delta, name=str(source))
            if isinstance(content, dict):
                return cls.from_description({"name": str(source)} | content, delta=delta)
        except InvalidValueError as error:
            raise InvalidValueError(f"{source}: {error}") from error
        raise DataError(f"{source} is neither the description of a run nor a history [[σ, q, steps], ...].")

    def audit(self, certificate: SourceCertificate | None = None) -> Audit:
        """γ, ε by RDP and PRV, and with a certificate ρ*."""
        by_rdp = epsilon(self.schedule, self.delta)
        return Audit(
            run=self,
            leakage_bits=self.schedule.leakage_bits,
            charged_bits=self.schedule.charged_bits,
            epsilon_rdp=by_rdp,
            epsilon_prv=_by_prv(self.schedule, self.delta, by_rdp),
            bound=None if certificate is None else certificate.bound(self.schedule.charged_bits),
        )


def _noise_of(where: str, found: _Description, rate: float, steps: int) -> tuple[float, str]:
    """The noise that Opacus chooses for a target ε, and how that was done."""
    target, accountant = found.target_epsilon, found.accountant
    if target is None or accountant is None:
        raise InvalidValueError(f"{where}Give noise_multiplier, or target_epsilon with delta and accountant.")
    if found.delta is None:
        raise InvalidValueError(f"target_epsilon = {target:g} needs delta.")
    if not rate > 0.0 or target > _MOST_EPSILON[accountant]:
        raise InvalidValueError(
            f"target_epsilon = {target:g} at sample rate {rate:g}: the noise is not searched for. Expected a rate "
            f"above 0 and, by {accountant.upper()}, an ε of at most {_MOST_EPSILON[accountant]:g}. Give "
            "noise_multiplier."
        )
    tolerance = min(0.01, target / 1000)
    try:
        with _quiet():
            sigma = float(
                get_noise_multiplier(
                    target_epsilon=target,
                    target_delta=found.delta,
                    sample_rate=rate,
                    steps=steps,
                    accountant=accountant,
                    epsilon_tolerance=tolerance,
                )
            )
    except (ValueError, RuntimeError, OverflowError, MemoryError) as error:
        raise CalibrationError(
            f"Opacus finds no noise for target_epsilon = {target:g} at delta = {found.delta:g}, sample rate {rate:g} "
            f"and {steps:,} steps by {accountant.upper()}: {error} Give noise_multiplier."
        ) from error
    return sigma, (
        f"The noise multiplier {sigma:.6g} is what Opacus's get_noise_multiplier(accountant={accountant!r}) gives for "
        f"ε = {target:g} at δ = {found.delta:g}, to within {tolerance:g}; a run with less noise revealed more."
    )


def _by_prv(schedule: Schedule, delta: float, by_rdp: float) -> float | None:
    if math.isinf(by_rdp):
        return math.inf
    if by_rdp * math.sqrt(schedule.steps) * len(_distinct(schedule)) > _PRV_WORK:
        return None
    try:
        found = epsilon(schedule, delta, accountant="prv")
    except (ValueError, RuntimeError, OverflowError, MemoryError):  # Opacus's grid is too coarse, or too large
        return None
    return None if math.isnan(found) else found


# -- results -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audited run guarantees.

    Attributes:
        run: the run.
        leakage_bits: γ, what the trajectory reveals about a record at most, in bits.
        charged_bits: the same at the sample rate that Opacus's float32 sampler realises; ρ* is for this.
        epsilon_rdp: ε at ``run.delta`` by RDP.
        epsilon_prv: ε at ``run.delta`` by PRV; None where Opacus cannot compute it in reasonable time and memory.
        bound: ρ*, where a certificate was given.
    """

    run: AuditedRun
    leakage_bits: float
    charged_bits: float
    epsilon_rdp: float
    epsilon_prv: float | None
    bound: ReconstructionBound | None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures assume of the run, a sentence or two each."""
        if self.bound is None:
            return _ASSUMPTIONS
        return (*_ASSUMPTIONS, "The training records were drawn from the source that the certificate is about.")

    def explain(self) -> str:
        """The audit in words, each figure rounded to the safe side."""
        run = self.run
        by_prv = "not computed (Opacus would take too long)" if self.epsilon_prv is None else up3(self.epsilon_prv)
        lines = [
            f"{run.name}{f' ({run.source})' if run.source else ''}: {_of_schedule(run.schedule)}",
            f"Its whole trajectory reveals at most {up3(self.charged_bits)} bits about any one record (γ).",
            f"ε at δ = {run.delta:g}: {up3(self.epsilon_rdp)} by RDP, {by_prv} by PRV.",
            "How well a record can be reconstructed depends on the records too: a certificate of their source gives ρ*."
            if self.bound is None
            else self.bound.explain(),
        ]
        return "\n".join([*lines, *run.derived])


def _of_schedule(schedule: Schedule) -> str:
    parts = [
        f"{run.steps:,} steps at sample rate {run.sample_rate:.4g} and noise multiplier {run.noise_multiplier:.6g}"
        for run in schedule
    ]
    if len(parts) > _MOST_PHASES:
        return f"{schedule.steps:,} steps in {len(parts):,} phases."
    return f"{'; '.join(parts) or 'no steps'}."


# -- files -------------------------------------------------------------------------------------------------------------


def _require_once(keys: list[Any]) -> None:
    twice = [key for key, times in Counter(map(str, keys)).items() if times > 1]
    if twice:
        raise ValueError(f"the key {twice[0]!r} occurs twice")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _require_once([key for key, _ in pairs])
    return dict(pairs)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which would take the last of two equal keys, 045000 for 18,944, and 1:30 for 90."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):  # else the safe loader's error
            _require_once([key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
        return dict(super().construct_mapping(node, deep=deep))

    def construct_plain_number(self, node: yaml.ScalarNode) -> int | float:
        """A number in base ten."""
        text = node.value.replace("_", "")
        if ":" in text or re.match(r"[-+]?0[0-9a-zA-Z]", text):
            raise ValueError(f"{_validate.shown(node.value)} is not a number in base ten")
        if node.tag.endswith(":int"):
            return int(self.construct_yaml_int(node))
        return float(self.construct_yaml_float(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_plain_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_plain_number)


def _read_text(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            return json.loads(text, object_pairs_hook=_once)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise DataError(f"There is no file {path}.") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(f"{path} cannot be read as {path.suffix[1:].upper()}: {error}.") from error


def _read_checkpoint(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"There is no file {path}.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, IndexError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split(".")[0].split())
        raise DataError(
            f"{path} is no file of torch.save that can be read without executing what is in it: {reason}. Save the "
            "account alone: torch.save(engine.accountant.state_dict(), path)."
        ) from error


def _history_in(state: Mapping[str, Any]) -> Any:
    history = state["history"]
    if not isinstance(history, (list, tuple)):
        raise InvalidValueError(
            f"Expected a history [[noise_multiplier, sample_rate, num_steps], ...]. Found {_validate.shown(history)}."
        )
    return history


def _account_in(content: Any) -> Mapping[str, Any] | None:
    """The state of an accountant: the content itself, or within a checkpoint of Opacus or Lightning."""
    if not isinstance(content, Mapping):
        return None
    if "history" in content:
        return content
    callbacks = content.get("callbacks")
    inside = [content.get("privacy_accountant_state_dict")]
    if isinstance(callbacks, Mapping):
        inside += [state.get("accountant") for state in callbacks.values() if isinstance(state, Mapping)]
    return next((state for state in inside if isinstance(state, Mapping) and "history" in state), None)
