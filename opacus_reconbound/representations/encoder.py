"""A frozen encoder: any network, fixed independently of the protected records, as the representation."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable

import torch

from opacus_reconbound import _validate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations.base import (
    Representation,
    RepresentationDescriptor,
    check_range,
    checked_range,
    tensor_digest,
)

__all__ = ["Encoder"]

_EXCLUDES = (
    "An encoder must be fixed independently of the protected records: not trained, fine-tuned, distilled, pruned, "
    "quantised, normalised, or chosen among several on them, or on a model that has seen them; nor changed after the "
    "certificate. Say where it comes from, as in Encoder(..., provenance='ImageNet weights of torchvision, 2021')."
)
_PLAIN = (bool, int, float, str, type(None))


class Encoder(Representation):
    """Vectors of a network that is fixed independently of the protected records.

    Exactly one of ``squared_diameter`` and ``clip_radius`` has to be given: the range of the vectors must be known
    before any record is seen.

    Args:
        module: a ``torch.nn.Module`` in evaluation mode, or a ``torch.export.ExportedProgram`` of one, from a float32
            batch (n, *record_shape) to (n, ...); the output is flattened. An exported program needs a dynamic batch
            dimension.
        name: what reports call it.
        squared_diameter: B, an upper bound on the squared distance of two outputs, that you can prove.
        clip_radius: R; outputs of larger norm are scaled back to norm R, as a part of Ψ, and B = (2R)².
        provenance: where the network comes from, for the certificate. Without it a warning says what is excluded.
        value_range: least and largest value of an entry of a record, to be checked; not checked unless given.

    Raises:
        InvalidValueError: the module is in training mode, or the range is not declared.
        DataError: at use, where the network's output is not finite or is farther apart than declared.
    """

    kind = "encoder"

    def __init__(
        self,
        module: torch.nn.Module | torch.export.ExportedProgram,
        *,
        name: str = "encoder",
        squared_diameter: float | None = None,
        clip_radius: float | None = None,
        provenance: str | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        if (squared_diameter is None) == (clip_radius is None):
            raise InvalidValueError(
                "Declare the range of the encoder's vectors: either squared_diameter=B, which no two of them exceed, "
                "or clip_radius=R, to which longer ones are scaled back."
            )
        self.label = name
        self.clip_radius = None if clip_radius is None else _validate.positive("clip_radius", clip_radius)
        self.squared_diameter = (
            4.0 * self.clip_radius**2
            if self.clip_radius is not None
            else _validate.positive("squared_diameter", squared_diameter)
        )
        self.provenance = provenance
        self.value_range = checked_range(value_range)
        if isinstance(module, torch.export.ExportedProgram):
            _refuse_training_graph(module)
            self._code, tensors = _program_code(module)
            self.module: torch.nn.Module = module.module()
            self._modes: list[torch.nn.Module] = []
        elif isinstance(module, torch.nn.Module):
            self._modes = list(module.modules())
            self._code, tensors = _module_code(module), _module_tensors(module)
            self.module = module
            self._refuse_training(InvalidValueError)
        else:
            raise InvalidValueError(
                f"Expected a torch.nn.Module or a torch.export program. Found {type(module).__name__}."
            )
        self._weights = tensor_digest(tensors)
        self._held = tensor_digest(_module_tensors(self.module))
        self.module.requires_grad_(False)
        self._dimensions: dict[tuple[int, ...], int] = {}
        if provenance is None:
            warnings.warn(_EXCLUDES, UserWarning, stacklevel=2)

    def train(self, mode: bool = True) -> Encoder:
        """Leave the network in the mode in which it was given: evaluation."""
        self.training = False
        return self

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """Map records (n, ...) to float32 vectors (n, m), clipped where a radius was declared."""
        vectors = self._run(records)
        if self.clip_radius is not None:
            norms = vectors.double().square().sum(dim=1, keepdim=True).sqrt()
            # the factor keeps a clipped norm within R in float32 too
            factors = (self.clip_radius * (1.0 - 1e-6) / norms.clamp(min=1e-300)).clamp(max=1.0)
            vectors = (vectors.double() * factors).to(torch.float32)
        elif len(vectors) > 1:
            apart = (vectors.double() - vectors.double().roll(1, dims=0)).square().sum(dim=1)
            if float(apart.max()) > self.squared_diameter:
                raise DataError(
                    f"Two vectors of {self.label} have a squared distance of {float(apart.max()):.6g}, more than the "
                    f"declared squared_diameter = {self.squared_diameter:g}. Declare a true bound, or a clip_radius."
                )
        return vectors

    def _run(self, records: torch.Tensor) -> torch.Tensor:
        self._refuse_training(DataError)
        try:
            with torch.no_grad():
                found = self.module(records.to(torch.float32))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            raise DataError(
                f"{self.label} fails on records of shape {tuple(records.shape)}: {reason[:200]}. It is given a float32 "
                "batch; an exported program needs a dynamic batch dimension."
            ) from error
        if not isinstance(found, torch.Tensor) or found.ndim < 1 or len(found) != len(records):
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise DataError(
                f"{self.label} must map a batch (n, ...) to one tensor (n, ...). It mapped {tuple(records.shape)} to "
                f"{shape}."
            )
        return found.reshape(len(records), -1).to(torch.float32)

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for records of this shape, with digests over weights and code.

        Raises:
            DataError: the weights have changed since the encoder was made.
        """
        shape = tuple(record_shape)
        if tensor_digest(_module_tensors(self.module)) != self._held:
            raise DataError(f"The weights of {self.label} have changed since it was made. Make a new Encoder.")
        if shape not in self._dimensions:
            device = next((p.device for p in (*self.module.parameters(), *self.module.buffers())), torch.device("cpu"))
            self._dimensions[shape] = int(self._run(torch.zeros((2, *shape), device=device)).shape[1])
        return RepresentationDescriptor.create(
            name=self.label,
            parameters={
                "kind": self.kind,
                "code": self._code,
                "weights": self._weights,
                "clip_radius": self.clip_radius,
                "provenance": self.provenance,
                "value_range": None if self.value_range is None else list(self.value_range),
            },
            record_shape=shape,
            dimension=self._dimensions[shape],
            squared_diameter=self.squared_diameter,
            peak=None,
        )

    def check(self, records: torch.Tensor) -> None:
        """Refuse a network that is back in training mode, and values outside a declared range."""
        self._refuse_training(DataError)
        if self.value_range is not None:
            check_range(records, self.value_range, "Encoder(..., value_range=(0, 1))")

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float] | None:
        """± R where vectors are clipped."""
        return None if self.clip_radius is None else (-self.clip_radius, self.clip_radius)

    def _refuse_training(self, error: Callable[[str], Exception]) -> None:
        for module in self._modes:
            if module.training:
                raise error(
                    f"The encoder is in training mode ({type(module).__name__}), where its output can depend on "
                    "chance and on the rest of the batch. Call .eval() on it first."
                )


def _module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, also those outside the state dict."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _module_code(module: torch.nn.Module) -> str:
    """SHA-256 over the module's structure, its plain attributes and the source of its own classes.

    Classes of torch and torchvision count by their name. Functions elsewhere that ``forward`` calls are not seen.
    """
    whole = hashlib.sha256()
    for path, part in module.named_modules():
        kind = type(part)
        whole.update(f"{path}:{kind.__module__}.{kind.__qualname__};{part.extra_repr()};".encode())
        plain = {
            name: value
            for name, value in vars(part).items()
            if not name.startswith("_")
            and name != "training"
            and (isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)))
        }
        whole.update(repr(sorted(plain.items())).encode())
        if kind.__module__.partition(".")[0] not in ("torch", "torchvision"):
            whole.update(_source(kind).encode())
    return whole.hexdigest()


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # typed in at a prompt
        code = getattr(getattr(kind, "forward", None), "__code__", None)
        if code is None:
            raise InvalidValueError(
                f"The code of {kind.__qualname__} cannot be read, so the certificate could not say what it is about. "
                "Define it in a file, or give a torch.export program."
            ) from None
        return f"{code.co_code.hex()}{code.co_names}{[c for c in code.co_consts if isinstance(c, _PLAIN)]}"


def _program_code(program: torch.export.ExportedProgram) -> tuple[str, dict[str, torch.Tensor]]:
    """SHA-256 over an exported program's graph, and its tensors."""
    lines = []
    for node in program.graph_module.graph.nodes:
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {sorted(node.kwargs.items())}")
    signature = program.graph_signature
    lines.append(f"{[(s.kind.name, str(s.arg), s.target) for s in signature.input_specs]}")
    lines.append(f"{[(s.kind.name, str(s.arg), s.target) for s in signature.output_specs]}")
    tensors = dict(program.state_dict)
    tensors |= {f"constant {n}": v for n, v in program.constants.items() if isinstance(v, torch.Tensor)}
    return hashlib.sha256("\n".join(lines).encode()).hexdigest(), tensors


def _refuse_training_graph(program: torch.export.ExportedProgram) -> None:
    for node in program.graph_module.graph.nodes:
        target = str(node.target)
        dropout = "dropout" in target and any(argument is True for argument in node.args)
        batch_norm = "batch_norm" in target and any(argument is True for argument in node.args[5:6])
        if dropout or batch_norm or ("bernoulli" in target or ".rand" in target):
            raise InvalidValueError(
                f"The exported program draws random numbers or uses the batch's statistics ({target}): it was exported "
                "in training mode. Call .eval() on the module before torch.export.export."
            )
