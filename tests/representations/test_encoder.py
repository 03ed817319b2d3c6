"""Frozen encoders: what is refused, what the digest covers, exported programs, the declared range."""

from __future__ import annotations

import copy
import json
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from opacus_reconbound.certificates import certify
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import Crop, Encoder

RECORDS = np.random.default_rng(0).integers(0, 256, size=(400, 6, 6)).astype(np.uint8)


def network(seed: int = 0, *, dropout: float = 0.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4)).eval()


def encoder(module: Any = None, **options: Any) -> Encoder:
    settings = {"clip_radius": 50.0, "provenance": "random weights"} | options
    return Encoder(network() if module is None else module, **settings)


class Own(nn.Module):
    """With an attribute that counts."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) * self.factor


class Fault(nn.Module):
    """Wrong in one way or another."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.calls = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        flat = x.flatten(1)
        if self.fault == "nan":
            return torch.where(flat == 7.5, torch.nan, flat)
        if self.fault == "dropout":
            return nn.functional.dropout(flat + 1.0)  # by default in training mode, whatever the module's mode
        if self.fault == "chance":
            return flat + torch.rand_like(flat)
        if self.fault == "counter":
            self.calls += 1.0
            return flat + self.calls
        if self.fault == "batch":
            return flat - flat.mean(dim=0)
        if self.fault == "neighbour":
            return flat + 0.01 * flat.roll(1, dims=0)
        return {"tuple": (flat, flat), "sum": flat.sum(), "pairs": flat[::2]}[self.fault]


def test_it_is_the_network() -> None:
    module = network()
    x = torch.from_numpy(RECORDS[:10])
    with torch.no_grad():
        expected = module(x.float())
    assert torch.equal(encoder(module, clip_radius=1e6)(x), expected)
    found = encoder(module, name="faces-v2").describe((6, 6))
    assert (found.name, found.dimension, found.squared_diameter, found.peak) == ("faces-v2", 4, 4 * 50.0**2, None)
    assert json.loads(found.parameters)["provenance"] == "random weights"


def test_a_clip_radius_keeps_vectors_within_it_and_short_ones_as_they_are() -> None:
    x = torch.from_numpy(RECORDS)
    raw = encoder(clip_radius=1e6)(x)
    radius = float(raw.norm(dim=1).median())
    clipped = encoder(clip_radius=radius)(x)
    assert float(clipped.double().norm(dim=1).max()) <= radius
    short = raw.norm(dim=1) < radius * (1 - 1e-5)
    assert torch.equal(clipped[short], raw[short])
    cosine = torch.nn.functional.cosine_similarity(clipped, raw)
    assert float(cosine.min()) > 1 - 1e-5


def test_a_declared_bound_that_is_false_is_noticed() -> None:
    with pytest.raises(DataError, match=r"squared distance of .* more than the declared squared_diameter = 0\.1"):
        encoder(clip_radius=None, squared_diameter=0.1)(torch.from_numpy(RECORDS))
    encoder(clip_radius=None, squared_diameter=1e9)(torch.from_numpy(RECORDS))


# ---- what it is fixed to ---------------------------------------------------------------------------------------------


def test_the_digest_covers_weights_code_and_attributes() -> None:
    base = encoder(network(0)).describe((6, 6)).digest
    assert encoder(copy.deepcopy(network(0))).describe((6, 6)).digest == base
    others = [
        encoder(network(1)),
        encoder(nn.Sequential(*list(network(0))[:-2], nn.Identity(), list(network(0))[-1]).eval()),
        encoder(network(0), clip_radius=51.0),
        encoder(network(0), provenance="elsewhere"),
        encoder(network(0), name="other"),
        encoder(Own(2.0).eval()),
        encoder(Own(3.0).eval()),
        encoder(Fault("nan").eval(), clip_radius=1.0),
    ]
    digests = {psi.describe((6, 6)).digest for psi in others}
    assert base not in digests
    assert len(digests) == len(others)


def test_the_code_of_own_classes_counts() -> None:
    text = "class Typed(nn.Module):\n    def forward(self, x):\n        return x.flatten(1) * FACTOR\n"
    one, two = (text.replace("FACTOR", factor) for factor in "23")
    digests = set()
    for source in (one, two):
        space: dict[str, Any] = {"nn": nn, "__name__": "typed_in"}
        exec(source, space)  # noqa: S102 - as at a prompt
        digests.add(encoder(space["Typed"]().eval()).describe((6, 6)).digest)
    assert len(digests) == 2


def test_weights_that_change_later() -> None:
    psi = encoder()
    psi.describe((6, 6))
    with torch.no_grad():
        next(psi.module.parameters()).add_(1.0)
    with pytest.raises(DataError, match="weights of encoder have changed"):
        psi.describe((6, 6))


def test_the_warning_says_what_is_excluded() -> None:
    with pytest.warns(UserWarning, match=r"not trained, fine-tuned.*or chosen among several on them.*provenance="):
        Encoder(network(), clip_radius=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder()


# ---- training mode and chance ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: network().train(), lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2))])
def test_training_mode_is_refused(make: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"training mode \(Sequential\).*Call \.eval\(\)"):
        encoder(make())


def test_one_layer_left_in_training_mode_is_refused() -> None:
    module = network(dropout=0.5)
    module[3].train()  # type: ignore[index]
    with pytest.raises(InvalidValueError, match=r"training mode \(Dropout\)"):
        encoder(module)


def test_training_mode_again_after_it_was_made() -> None:
    module = network(dropout=0.5)
    psi = encoder(module)
    module.train()
    psi.eval()  # does not hide it
    for use in (psi.check, psi):
        with pytest.raises(DataError, match="training mode"):
            use(torch.from_numpy(RECORDS[:4]))
    module.eval()
    psi.train()  # leaves the network alone
    assert not module.training
    psi(torch.from_numpy(RECORDS[:4]))


CERTIFY_REFUSES = {
    "dropout": "other vectors when it is called again.*dropout",
    "chance": "other vectors when it is called again.*dropout",
    "counter": "other vectors when it is called again",
    "batch": "changes with the other records in its batch",
    "neighbour": "changes with the other records in its batch",
    "tuple": "must map a batch .* to one tensor.*tuple",
    "sum": "must map a batch",
    "pairs": "must map a batch",
}


@pytest.mark.parametrize("fault", CERTIFY_REFUSES)
def test_certify_refuses(fault: str) -> None:
    with pytest.raises(DataError, match=CERTIFY_REFUSES[fault]):
        certify(
            RECORDS[:200], RECORDS[200:], representation=encoder(Fault(fault).eval(), clip_radius=1e5), progress=False
        )


@pytest.mark.parametrize(("index", "where"), [(0, "reference[0]"), (131, "reference[131]"), (207, "estimation[7]")])
def test_activations_that_are_not_finite_are_named(index: int, where: str) -> None:
    records = np.round(RECORDS).astype(np.float32)
    records[index, 3, 3] = 7.5
    psi = encoder(Fault("nan").eval(), clip_radius=1e5)
    with pytest.raises(DataError, match=rf"representation is not finite on {re.escape(where)}\."):
        certify(records[:200], records[200:], representation=psi, allow_repeats=True, progress=False)


def test_batch_norm_of_the_batch_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False)).eval()
    with pytest.raises(DataError, match="changes with the other records in its batch"):
        certify(RECORDS[:200], RECORDS[200:], representation=encoder(module), progress=False)


def test_a_network_that_fails() -> None:
    with pytest.raises(DataError, match=r"encoder fails on records of shape \(2, 5, 5\)"):
        encoder().describe((5, 5))


# ---- exported programs -----------------------------------------------------------------------------------------------


def exported(module: nn.Module, *, dynamic: bool = True) -> torch.export.ExportedProgram:
    example = torch.zeros(4, 6, 6)
    shapes = ({0: torch.export.Dim("n", min=1, max=4096)},) if dynamic else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (example,), dynamic_shapes=shapes)


def test_an_exported_program() -> None:
    module = network(dropout=0.5)
    program = encoder(exported(module), clip_radius=1e6)
    x = torch.from_numpy(RECORDS[:10])
    torch.testing.assert_close(program(x), encoder(module, clip_radius=1e6)(x))
    base = program.describe((6, 6))
    assert base.dimension == 4
    assert encoder(exported(module), clip_radius=1e6).describe((6, 6)).digest == base.digest
    assert encoder(exported(network(1)), clip_radius=1e6).describe((6, 6)).digest != base.digest
    assert (
        encoder(exported(Own(2.0).eval()), clip_radius=1e6).describe((6, 6)).digest
        != encoder(exported(Own(3.0).eval()), clip_radius=1e6).describe((6, 6)).digest
    )
    certificate = certify(RECORDS[:200], RECORDS[200:], representation=program, progress=False)
    certificate.check_representation(program)
    assert certificate.representation == base


def test_a_program_exported_in_training_mode() -> None:
    with pytest.raises(InvalidValueError, match=r"dropout.*exported in training mode"):
        encoder(exported(network(dropout=0.5).train()))


def test_a_program_of_one_batch_size() -> None:
    with pytest.raises(DataError, match="dynamic batch dimension"):
        encoder(exported(network(), dynamic=False)).describe((6, 6))


# ---- declarations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_radius": None}, "Declare the range"),
        ({"squared_diameter": 3.0}, "Declare the range"),
        ({"clip_radius": 0.0}, "clip_radius > 0"),
        ({"clip_radius": None, "squared_diameter": -1.0}, "squared_diameter > 0"),
        ({"value_range": (1, 0)}, "low < high"),
        ({"module": "resnet"}, "Expected a torch.nn.Module or a torch.export program. Found str"),
    ],
)
def test_declarations_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        encoder(**options)


def test_a_value_range_is_checked_where_it_is_declared() -> None:
    encoder().check(torch.full((2, 6, 6), 1e6))
    with pytest.raises(DataError, match="outside the declared value_range"):
        encoder(value_range=(0, 1)).check(torch.full((2, 6, 6), 2.0))


def test_behind_a_crop() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(9, 2)).eval()
    psi = Crop(0, 0, 3, 3) | encoder(module, name="corner")
    found = psi.describe((6, 6))
    assert (found.name, found.dimension, found.squared_diameter) == ("crop | corner", 2, 1e4)
    assert psi(torch.from_numpy(RECORDS[:5])).shape == (5, 2)
