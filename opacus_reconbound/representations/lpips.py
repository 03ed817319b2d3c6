"""LPIPS: perceptual distance as a squared distance between vectors (Zhang et al. 2018, version 0.1 of the heads).

For each layer l: features normalised to unit length over the channels (lpips' own ε), times √w_lc, over √(H_l W_l);
flattened and joined. Then ‖Ψ(x) − Ψ(y)‖² is ``lpips.LPIPS(net)(x, y)`` to float accuracy. Normalised features are
non-negative with norm at most 1, so two of them are at most √2 apart, and B = 2 Σ_l max_c w_lc.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
from opacus_reconbound.representations.images import Where, checked_where, image_layout

__all__ = ["LPIPS"]

_NETS = {"alex": 31, "vgg": 16, "squeeze": 17}  # with the smallest image that every layer accepts
_BATCH_PIXELS = 2**19  # of images in one pass through the network: 128 of 64 × 64


class LPIPS(Representation):
    """Learned perceptual similarity; needs the package ``lpips`` (extra ``lpips``).

    Args:
        net: the backbone: ``"alex"``, ``"vgg"`` or ``"squeeze"``.
        size: images are resized to size × size, bilinear without antialiasing (``align_corners=False``). None: as
            they are.
        weights: the backbone's weights: a ``.npz`` file with arrays ``features.<i>.weight`` and ``features.<i>.bias``,
            or a torchvision state dict ``.pth``. None: as ``lpips`` gets them, by a download into torch's cache. The
            heads always come with the package ``lpips``.
        channels: the channel axis of records with three axes: ``"first"``, ``"last"``, or ``"auto"``. Grey images are
            repeated in three channels.
        value_range: least and largest value of an entry, known in advance; mapped to [−1, 1]. The 8-bit grid unless
            given.

    Raises:
        InvalidValueError: an unknown net, or ``lpips`` is not installed.
        DataError: weights that cannot be read or do not fit.
    """

    kind = "lpips"
    uses_range = True

    def __init__(
        self,
        net: Literal["alex", "vgg", "squeeze"] = "alex",
        *,
        size: int | None = 64,
        weights: str | Path | None = None,
        channels: Where = "auto",
        value_range: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        if net not in _NETS:
            raise InvalidValueError(f"Expected net to be one of {', '.join(_NETS)}. Found {net!r}.")
        self.net_name = net
        self.size = None if size is None else _validate.integer("size", size, minimum=_NETS[net])
        self.channels = checked_where(channels)
        self.value_range = checked_range(value_range)
        model, self._eps = _build(net, None if weights is None else Path(weights))
        self.scaling, self.net = model.scaling_layer, model.net
        self._layers = int(model.L)
        diameter = largest = 0.0
        for layer in range(self._layers):
            head = getattr(model, f"lin{layer}").model[-1].weight.detach().flatten()
            if not bool((head >= 0.0).all()):
                raise DataError(f"The head of layer {layer} has negative weights, so LPIPS is no squared distance.")
            root = head.sqrt()
            self.register_buffer(f"root{layer}", root[None, :, None, None])
            diameter += 2.0 * float(root.max().double() ** 2)
            largest = max(largest, float(root.max()))
        self._diameter, self._largest = diameter, largest
        self._digest = tensor_digest(
            {name: value for name, value in self.state_dict().items() if not name.endswith("num_batches_tracked")}
        )
        self._dimensions: dict[tuple[int, int], int] = {}
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> LPIPS:
        """Stay in evaluation mode: the representation is frozen."""
        return super().train(False)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        """Map images (n, ...) to float32 vectors (n, m), some at a time."""
        layout = image_layout("lpips", tuple(records.shape[1:]), self.channels)
        low, high = self.range_or_default
        side = (self.size or layout.height) * (self.size or layout.width)
        step = max(1, _BATCH_PIXELS // side)
        parts = []
        for start in range(0, len(records), step):
            planes = layout.planes(records[start : start + step]).to(torch.float32)
            planes = (planes - low) / (high - low)
            if self.size is not None:
                planes = torch.nn.functional.interpolate(
                    planes, size=(self.size, self.size), mode="bilinear", align_corners=False
                )
            planes = (2.0 * planes - 1.0).expand(-1, 3, -1, -1)
            parts.append(self._vectors(planes))
        return torch.cat(parts)

    def _vectors(self, images: torch.Tensor) -> torch.Tensor:
        pieces = []
        for layer, features in enumerate(self.net(self.scaling(images))):
            norm = features.square().sum(dim=1, keepdim=True).sqrt()
            root = getattr(self, f"root{layer}") / (features.shape[2] * features.shape[3]) ** 0.5
            pieces.append((features / (norm + self._eps) * root).flatten(1))
        return torch.cat(pieces, dim=1)

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        """The descriptor for images of this shape; B = 2 Σ_l max_c w_lc."""
        layout = image_layout("lpips", record_shape, self.channels)
        if layout.channels not in (1, 3):
            raise DataError(
                f"lpips needs grey or colour images. Found {layout.channels} channels in records of shape "
                f"{tuple(record_shape)}. Select channels first, as in Channels(0, 1, 2) | LPIPS(...)."
            )
        height, width = self.size or layout.height, self.size or layout.width
        if min(height, width) < _NETS[self.net_name]:
            raise DataError(
                f"lpips:{self.net_name} needs images of at least {_NETS[self.net_name]} pixels a side. Found {height} "
                f"× {width}; give a size."
            )
        if (height, width) not in self._dimensions:
            with torch.no_grad():
                device = next(self.net.parameters()).device
                blank = torch.zeros(1, 3, height, width, device=device)
                self._dimensions[height, width] = int(self._vectors(blank).shape[1])
        return RepresentationDescriptor.create(
            name="lpips",
            parameters={
                "net": self.net_name,
                "version": "0.1",
                "size": self.size,
                "resize": "bilinear, align_corners=False",
                "channels": self.channels,
                "value_range": list(self.range_or_default),
                "weights": self._digest,
            },
            record_shape=tuple(record_shape),
            dimension=self._dimensions[height, width],
            squared_diameter=self._diameter,
            peak=None,
        )

    def output_range(self, record_shape: tuple[int, ...]) -> tuple[float, float]:
        """0 to the largest √w: normalised features lie in [0, 1]."""
        return 0.0, self._largest * (1.0 + 1e-5)

    def check(self, records: torch.Tensor) -> None:
        """Refuse values outside the declared range, and fractions in [0, 1] under the 8-bit range."""
        check_range(records, self.range_or_default, f"LPIPS({self.net_name!r}, value_range=(0, 1))")


def _build(net: str, weights: Path | None) -> tuple[Any, float]:
    """lpips' own model with its heads, and the ε of its normalisation; the global random state is left alone."""
    try:
        import lpips
    except ImportError as error:
        raise InvalidValueError(
            "LPIPS needs the package lpips. Install it with: pip install 'opacus-reconbound[lpips]'"
        ) from error
    heads = Path(lpips.__file__).parent / "weights" / "v0.1" / f"{net}.pth"
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # torchvision, about how lpips calls it
        model = lpips.LPIPS(net=net, pretrained=False, pnet_rand=weights is not None, verbose=False)
    model.load_state_dict(torch.load(heads, map_location="cpu", weights_only=True), strict=False)
    if weights is not None:
        _load_backbone(model, net, weights)
    return model.eval(), float(lpips.normalize_tensor.__defaults__[0])


def _load_backbone(model: Any, net: str, path: Path) -> None:
    given = _read_weights(path)
    wanted = model.net.state_dict()
    chosen = {}
    for name, tensor in wanted.items():
        source = "features." + name.partition(".")[2]
        if source not in given:
            raise DataError(f"{path} has no array {source}, which the backbone {net} needs. Is it of another network?")
        if given[source].shape != tensor.shape:
            raise DataError(
                f"{path}: {source} has the shape {tuple(given[source].shape)}, but the backbone {net} needs "
                f"{tuple(tensor.shape)}. Is it of another network?"
            )
        if not bool(torch.isfinite(given[source]).all()):
            raise DataError(f"{path}: {source} holds NaN or infinite values.")
        chosen[name] = given[source].to(tensor.dtype)
    own = model.state_dict()
    for name, tensor in given.items():
        if name.startswith("lin") and name in own and not torch.equal(own[name], tensor.to(own[name].dtype)):
            raise DataError(
                f"{path}: {name} is not the head that comes with lpips. Take the lin arrays out of the file."
            )
    model.net.load_state_dict(chosen)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Tensors by name from a .npz archive or a state dict; never a pickle of anything else."""
    if not path.exists():
        raise DataError(f"There is no file {path} with the backbone's weights.")
    try:
        if path.suffix.lower() == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                return {name: torch.from_numpy(np.array(archive[name])) for name in archive.files}
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes numpy, zipfile and torch raise nearly anything
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise DataError(
            f"{path} cannot be read as weights: {reason}. Give a .npz file or a state dict .pth."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise DataError(f"{path} is no state dict: names with tensors. Save it with torch.save(net.state_dict(), ...).")
    return content
