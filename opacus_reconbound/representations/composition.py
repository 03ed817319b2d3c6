"""One representation after another: ``Crop(8, 8, 12, 12) | LPIPS("alex")``."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator

import torch

from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.representations.base import Representation, RepresentationDescriptor

__all__ = ["Composition"]


class Composition(Representation):
    """First stage first. Ranges that are not declared are taken from the neighbours.

    Stages that keep values (crops, masks, means) take the range that the first stage behind them declares; every
    other stage takes what the stage before it gives. Declared ranges must agree, else the range B would be wrong.

    Args:
        stages: at least two representations; compositions among them are taken apart.

    Raises:
        InvalidValueError: at use, a stage gives values outside the range that the next one declares, or in a range
            that is not known.

    Example:
        >>> (Crop(8, 8, 12, 12) | Pixels()).describe((28, 28)).name
        'crop | pixels'
    """

    def __init__(self, *stages: Representation) -> None:
        super().__init__()
        flat: list[Representation] = []
        for stage in stages:
            if not isinstance(stage, Representation):
                raise InvalidValueError(
                    f"Expected representations on both sides of |. Found {type(stage).__name__}. Wrap a network as "
                    "Encoder(network, ...)."
                )
            flat += stage._stages() if isinstance(stage, Composition) else [stage]
        if len(flat) < 2:
            raise InvalidValueError("A composition needs at least two representations.")
        self.stages = torch.nn.ModuleList(flat)
        self._resolve_first()
        self.value_range = self._stages()[0].value_range
        self.uses_range = flat[0].uses_range
        self.keeps_values = all(stage.keeps_values for stage in flat)

    def _resolve_first(self) -> None:
        """Give the leading stages that keep values the range that is declared behind them."""
        waiting: list[int] = []
        for index, stage in enumerate(self._stages()):
            if stage.value_range is not None:
                for earlier in waiting:
                    self.stages[earlier] = _with_range(self._stages()[earlier], stage.value_range)
                return
            if not stage.keeps_values:
                return
            waiting.append(index)

    def _stages(self) -> list[Representation]:
        return list(self.stages)  # type: ignore[arg-type]

    def along(self, record_shape: tuple[int, ...]) -> Iterator[tuple[Representation, tuple[int, ...]]]:
        """Every stage with its range resolved, and the shape of the records that reach it."""
        shape = tuple(record_shape)
        before: Representation | None = None
        given: tuple[float, float] | None = None
        for stage in self._stages():
            if before is not None and stage.uses_range:
                declared = stage.value_range
                if given is None:
                    if declared is None:
                        raise InvalidValueError(
                            f"Nothing is known of the range of what {_name(before)} gives. Declare the value_range of "
                            f"{_name(stage)} behind it."
                        )
                elif declared is None:
                    stage = _with_range(stage, given)
                elif given[0] < declared[0] or given[1] > declared[1] or (before.keeps_values and given != declared):
                    raise InvalidValueError(
                        f"{_name(before)} gives values in ({given[0]:g}, {given[1]:g}), but {_name(stage)} behind it "
                        f"is declared for ({declared[0]:g}, {declared[1]:g}). Declare one value_range."
                    )
            yield stage, shape
            given, shape, before = stage.output_range(shape), stage.output_shape(shape), stage

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """All stages, one after another."""
        vectors: torch.Tensor
        *first, last = self._steps(records)
        for stage, verify in first:
            records = _checked(stage, records, verify)
            records = stage.transform(records)
        vectors = last[0](_checked(last[0], records, last[1]))
        return vectors

    def _steps(self, records: torch.Tensor) -> list[tuple[Representation, bool]]:
        """The stages, and whether a declared range has to be checked on what reaches them."""
        steps, known = [], True  # the first is checked on the raw records
        for stage, shape in self.along(tuple(records.shape[1:])):
            steps.append((stage, stage.uses_range and not known))
            known = stage.output_range(shape) is not None
        return steps

    def transform(self, records: torch.Tensor) -> torch.Tensor:
        """All stages, in the last one's layout."""
        for stage, verify in self._steps(records):
            records = stage.transform(_checked(stage, records, verify))
        return records

    def output_shape(self, record_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape behind the last stage."""
        stage, shape = list(self.along(record_shape))[-1]
        return stage.output_shape(shape)

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float] | None:
        """The range behind the last stage."""
        stage, shape = list(self.along(record_shape))[-1]
        return stage.output_range(shape)

    def operator_norm(self, record_shape: tuple[int, ...]) -> float | None:
        """The product of the stages' norms, where all have one."""
        product = 1.0
        for stage, shape in self.along(record_shape):
            norm = stage.operator_norm(shape)
            if norm is None:
                return None
            product *= norm
        return product

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """Names and parameters of all stages.

        B is the last stage's, or its L² times the B before it where that is smaller. PSNR has a meaning where all
        stages keep it.
        """
        found, diameter = [], float("inf")
        for stage, shape in self.along(record_shape):
            found.append(stage.describe(shape))
            norm = stage.operator_norm(shape)
            diameter = min(found[-1].squared_diameter, float("inf") if norm is None else norm**2 * diameter)
        return RepresentationDescriptor.create(
            name=" | ".join(part.name for part in found),
            parameters={"stages": [{"name": part.name} | json.loads(part.parameters) for part in found]},
            record_shape=tuple(record_shape),
            dimension=found[-1].dimension,
            squared_diameter=diameter,
            peak=None if any(part.peak is None for part in found) else found[-1].peak,
        )

    def check(self, records: torch.Tensor) -> None:
        """What the first stage refuses."""
        stage, _ = next(self.along(tuple(records.shape[1:])))
        stage.check(records)

    @property
    def needs_fit(self) -> bool:
        """Whether a stage does."""
        return any(stage.needs_fit for stage in self._stages())

    def fit(self, reference: Iterable[torch.Tensor]) -> Representation:
        """Fit the stages in order, each on what the fitted ones before it give."""
        fitted: list[Representation] = []
        for stage in self._stages():
            fitted.append(stage.fit(_Through(fitted, reference)) if stage.needs_fit else stage)
        return Composition(*fitted) if self.needs_fit else self


class _Through:
    """Chunks of records as a later stage receives them; can be iterated again."""

    def __init__(self, stages: list[Representation], reference: Iterable[torch.Tensor]) -> None:
        self._stages, self._reference = list(stages), reference

    def __iter__(self) -> Iterator[torch.Tensor]:
        for chunk in self._reference:
            if not self._stages:
                yield chunk
                continue
            before = self._stages[0] if len(self._stages) == 1 else Composition(*self._stages)
            with torch.no_grad():
                yield before.transform(chunk)


def _checked(stage: Representation, records: torch.Tensor, verify: bool) -> torch.Tensor:
    if verify:
        stage.check(records)
    return records


def _with_range(stage: Representation, value_range: tuple[float, float]) -> Representation:
    """The same stage (weights shared) with this range declared."""
    other = copy.copy(stage)
    other.value_range = value_range
    return other


def _name(stage: Representation) -> str:
    return str(getattr(stage, "kind", type(stage).__name__.lower()))
