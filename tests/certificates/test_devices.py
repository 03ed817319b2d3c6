"""A device without float64, such as MPS: imitated by tensors that refuse float64, with the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from opacus_reconbound import Pixels, certify
from opacus_reconbound.certificates.devices import float64_device, rows_at_once, to_float64

FAR = torch.device("meta")  # stands for a device that has no float64
RECORDS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:900]


class FarTensor(torch.Tensor):
    """Says that it lies on the far device; the numbers are in ``near``, on the CPU."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> FarTensor:
        if near.dtype == torch.float64:
            raise TypeError("the device has no float64")
        made: FarTensor = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, strides=near.stride(), dtype=near.dtype, device=FAR
        )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class FarDevice(TorchDispatchMode):
    """Makes far tensors where a factory is asked for the far device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the CPU; the result is far if an operand is, or if it was asked for there."""
    values = tree_flatten((args, kwargs))[0]
    far = any(isinstance(value, FarTensor) for value in values)
    wanted = kwargs.get("device")
    if wanted is not None and torch.device(wanted) == FAR:
        far, kwargs = True, kwargs | {"device": torch.device("cpu")}
    elif wanted is not None and far:  # a copy to the CPU
        assert kwargs.get("dtype") in (None, *(v.dtype for v in values if isinstance(v, FarTensor)))
        far = False
    elif far:  # operands on two devices do not mix, except for single numbers and copies
        mixed = [v for v in values if isinstance(v, torch.Tensor) and not isinstance(v, FarTensor) and v.dim() > 0]
        assert not mixed or func is torch.ops.aten.copy_.default or "index" in str(func), func
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], FarTensor):
            args[0].copy_(args[1].near)
            return args[0]
    result = func(*tree_map(nearer, args), **tree_map(nearer, kwargs))
    if far and func._schema.is_mutable:  # in place, or into out=
        return kwargs.get("out", args[0])
    return tree_map(lambda value: FarTensor(value) if far and isinstance(value, torch.Tensor) else value, result)


def nearer(value: Any) -> Any:
    return value.near if isinstance(value, FarTensor) else value


@contextmanager
def no_float64_on_the_far_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("devices", "kernel", "replica", "rotation", "mixture", "scale"):
            module = __import__(f"opacus_reconbound.certificates.{name}", fromlist=["float64_device"])
            if hasattr(module, "float64_device"):
                patch.setattr(module, "float64_device", lambda device: torch.device("cpu") if device == FAR else device)
        patch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # there is none for this device
        with FarDevice():
            yield


def test_the_imitation_refuses_float64_and_computes() -> None:
    with no_float64_on_the_far_device():
        x = torch.ones(3, 2, device=FAR)
        assert isinstance(x, FarTensor)
        assert isinstance(x @ x.T, FarTensor)
        assert float((x @ x.T).sum()) == 18.0
        with pytest.raises(TypeError, match="no float64"):
            x.double()
        with pytest.raises(TypeError, match="no float64"):
            torch.zeros(3, dtype=torch.float64, device=FAR)
        with pytest.raises(AssertionError):
            x + torch.ones(3, 2)
        x[1:] = torch.zeros(2, 2)
        assert to_float64(x).sum().dtype == torch.float64
        assert float(to_float64(x).sum()) == 2.0
        assert not isinstance(to_float64(x), FarTensor)


@pytest.mark.parametrize(("designs", "dtype"), [("fast", np.uint8), ("block", np.float64)])
def test_a_certificate_on_a_device_without_float64(designs: str, dtype: type) -> None:
    samples = RECORDS[:200].astype(dtype), RECORDS[200:].astype(dtype)
    options: dict[str, Any] = {"representation": Pixels((0, 16)), "designs": designs, "pairs": [(8, 1.6)]}
    expected = certify(*samples, **options)
    with no_float64_on_the_far_device():
        found = certify(*samples, **options, device=FAR)
    if designs == "fast":
        assert found.to_json() == expected.to_json()
    else:  # tiles are wider off the CPU
        assert found.bound(1.0).rho == pytest.approx(expected.bound(1.0).rho, abs=1e-6)


def test_where_float64_is() -> None:
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    for name in ("cpu", "cuda", "cuda:1"):
        assert float64_device(torch.device(name)) == torch.device(name)
    x = torch.ones(2, dtype=torch.float64)
    assert to_float64(x) is x


def test_rows_at_once() -> None:
    assert rows_at_once(64) == 4096
    assert rows_at_once(49_152) == 21
    assert rows_at_once(10**9) == rows_at_once(0, most=1) == 1
