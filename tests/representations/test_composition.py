"""Composition: order, ranges, the range B, names; and the one-line notation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import (
    KINDS,
    Channels,
    Composition,
    Coordinates,
    Crop,
    Downsample,
    Encoder,
    LinearMap,
    LowFrequencies,
    Mask,
    Pixels,
    Representation,
    Vectors,
    parse,
)

X = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(6, 28, 28)).astype(np.uint8))


def test_one_after_another() -> None:
    psi = Crop(8, 8, 12, 12) | Downsample(6) | LowFrequencies(3)
    expected = LowFrequencies(3)(Downsample(6).transform(Crop(8, 8, 12, 12).transform(X)))
    assert torch.equal(psi(X), expected)
    assert torch.equal(psi.transform(X).reshape(6, -1).float(), expected)
    assert psi.output_shape((28, 28)) == (3, 3)
    found = psi.describe((28, 28))
    assert found.name == "crop | downsample | dct"
    assert [stage["name"] for stage in json.loads(found.parameters)["stages"]] == ["crop", "downsample", "dct"]
    assert (found.dimension, found.record_shape, found.peak) == (9, (28, 28), None)


def test_grouping_does_not_matter() -> None:
    a, b, c = Crop(8, 8, 12, 12), Downsample(6), Pixels()
    assert ((a | b) | c).describe((28, 28)) == (a | (b | c)).describe((28, 28))
    assert (a | b).describe((28, 28)).digest != (b | Crop(0, 0, 6, 6)).describe((28, 28)).digest


@pytest.mark.parametrize(
    ("psi", "b", "peak"),
    [
        (Crop(8, 8, 12, 12) | Pixels(), 255**2 * 144, 255),
        (Crop(8, 8, 12, 12) | Pixels((0, 256)), None, None),
        (Crop(8, 8, 12, 12) | LowFrequencies(4), 255**2 * 144, None),
        (LowFrequencies(4) | Coordinates([0, 1]), 255**2 * 784, None),
        (Downsample(7) | Crop(0, 0, 2, 2), 255**2 * 4, 255),
        (Crop(0, 0, 2, 2) | LinearMap(np.eye(4) * 3), 9 * 255**2 * 4, None),
        (Crop(0, 0, 2, 2) | Vectors(clip_radius=10.0), 400, None),
    ],
)
def test_b_is_the_least_that_is_known(psi: Representation, b: float | None, peak: float | None) -> None:
    if b is None:
        return
    found = psi.describe((28, 28))
    assert found.squared_diameter == pytest.approx(b, rel=1e-6)
    assert found.squared_diameter >= b * (1 - 1e-12)
    assert found.peak == peak
    extremes = torch.stack([torch.zeros(28, 28), torch.full((28, 28), 255.0)])
    z = psi(extremes).double()
    assert float((z[0] - z[1]).square().sum()) <= found.squared_diameter * (1 + 1e-6)


def test_a_range_that_is_declared_behind_reaches_the_front() -> None:
    psi = Crop(0, 0, 4, 4) | Downsample(2) | Pixels(value_range=(0, 1))
    psi.check(torch.rand(3, 28, 28))
    assert psi.describe((28, 28)).squared_diameter == 4.0
    with pytest.raises(DataError, match=r"outside the declared value_range \(0, 1\)"):
        psi.check(X)
    front = Crop(0, 0, 4, 4, value_range=(0, 1)) | LowFrequencies(2)
    assert front.describe((28, 28)).squared_diameter == pytest.approx(16.0)


@pytest.mark.parametrize(
    "psi",
    [
        Crop(0, 0, 4, 4, value_range=(0, 1)) | Pixels(),
        Crop(0, 0, 4, 4, value_range=(0, 255)) | Downsample(2, value_range=(0, 1)),
        LowFrequencies(4) | Pixels(),
    ],
)
def test_ranges_that_disagree(psi: Representation) -> None:
    with pytest.raises(InvalidValueError, match=r"gives values in .* is declared for .*Declare one value_range"):
        psi.describe((28, 28))


def test_a_range_that_nobody_knows_has_to_be_declared_and_is_checked() -> None:
    module = torch.nn.Flatten().eval()
    unknown = Encoder(module, squared_diameter=1e9, provenance="none")
    eye = np.eye(784)[:2]
    with pytest.raises(InvalidValueError, match=r"Nothing is known of the range of what encoder gives.*of linear"):
        (unknown | LinearMap(eye)).describe((28, 28))
    psi = unknown | LinearMap(eye, value_range=(0, 100))
    assert psi.describe((28, 28)).squared_diameter == pytest.approx(2 * 100**2)
    psi(X[:, :, :] // 4)
    for use in (psi, psi.transform):
        with pytest.raises(DataError, match=r"outside the declared value_range \(0, 100\)"):
            use(X)
    # a scaled clip and an encoder's clip are known
    for first in (Vectors(clip_radius=3.0), Encoder(module, clip_radius=3.0, provenance="none")):
        assert (first | LinearMap(eye)).describe((28, 28)).squared_diameter == pytest.approx(36)  # L² (2R)²


@pytest.mark.parametrize("centred", [False, True])
def test_vectors_state_where_their_entries_lie(centred: bool) -> None:
    psi = Vectors(ranges=[(-1, 3), (0, 2)], scale="reference" if centred else [2.0, 5.0])
    corners = torch.tensor([[-1.0, 0.0], [3.0, 2.0], [-1.0, 2.0], [3.0, 0.0]])
    psi = psi.fit([corners])
    interval = psi.output_range((2,))
    z = psi(corners)
    assert interval is not None
    assert interval[0] <= float(z.min()) <= interval[0] + 1e-3
    assert interval[1] - 1e-3 <= float(z.max()) <= interval[1]


def test_what_is_no_stage() -> None:
    with pytest.raises(InvalidValueError, match=r"Found Linear\. Wrap a network as Encoder"):
        Pixels() | torch.nn.Linear(3, 2)  # type: ignore[operator]
    with pytest.raises(InvalidValueError, match="at least two"):
        Composition(Pixels())


def test_a_crop_outside_what_the_stage_before_gives() -> None:
    with pytest.raises(DataError, match="outside images of 7 × 7"):
        (Downsample(7) | Crop(4, 4, 4, 4)).describe((28, 28))


# ---- notation --------------------------------------------------------------------------------------------------------


def test_every_kind_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mask = np.random.default_rng(0).random((28, 28)) < 0.5
    np.save("m.npy", mask)
    np.save("a.npy", np.eye(784)[:3])
    expected: dict[str, Representation] = {
        "pixels": Pixels(),
        "crop:8,8,12,12": Crop(8, 8, 12, 12),
        "crop:8,8,12,12|pixels": Crop(8, 8, 12, 12) | Pixels(),
        " crop:8, 8, 12, 12 | downsample:6 ": Crop(8, 8, 12, 12) | Downsample(6),
        "downsample:7": Downsample(7),
        "downsample:7,14": Downsample((7, 14)),
        "dct:8": LowFrequencies(8),
        "DCT:8,4": LowFrequencies((8, 4)),
        "coordinates:0,3-5": Coordinates([0, 3, 4, 5]),
        "mask:m.npy": Mask(mask),
        "linear:a.npy": LinearMap(np.eye(784)[:3]),
        "vectors:12.5": Vectors(clip_radius=12.5),
    }
    for text, psi in expected.items():
        assert parse(text).describe((28, 28)) == psi.describe((28, 28)), text
    assert parse("channels:2,0").describe((3, 8, 8)) == Channels(2, 0).describe((3, 8, 8))
    assert parse("standardised:3").needs_fit
    written = {text.strip().lower().partition(":")[0] for text in expected} | {"channels", "standardised", "lpips"}
    assert written == {kind.partition(":")[0] for kind in KINDS}


def test_the_range_reaches_the_first_stage() -> None:
    found = parse("crop:0,0,4,4|pixels", value_range=(0, 1)).describe((8, 8))
    assert found.squared_diameter == 16.0
    assert parse("vectors", value_range=(0, 1)).describe((8,)).squared_diameter == 8.0
    assert parse("dct:2|vectors:3", value_range=(0, 1)).describe((8, 8)).squared_diameter == 36.0


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", InvalidValueError, "Expected a representation"),
        ("pixels|", InvalidValueError, r"joined by \|"),
        ("faces", InvalidValueError, "no representation 'faces'. There are: pixels, crop"),
        ("pixels:3", InvalidValueError, "Expected pixels. Found 'pixels:3'"),
        ("crop", InvalidValueError, "whole numbers behind crop:"),
        ("crop:1,2,3", InvalidValueError, "crop:TOP,LEFT,HEIGHT,WIDTH"),
        ("crop:a,2,3,4", InvalidValueError, "whole numbers behind crop:"),
        ("crop:-1,0,3,4", InvalidValueError, "top"),
        ("dct:1,2,3", InvalidValueError, "dct:COUNT"),
        ("downsample:x", InvalidValueError, "whole numbers"),
        ("mask:", InvalidValueError, ".npy file behind mask:"),
        ("mask:missing.npy", DataError, "no file missing.npy"),
        ("vectors", InvalidValueError, "Declare the range"),
        ("vectors:big", InvalidValueError, "a radius behind vectors:"),
        ("lpips:resnet", InvalidValueError, "alex, vgg, squeeze"),
        ("lpips:alex@", InvalidValueError, "whole numbers behind lpips:"),
        ("lpips:alex@8", InvalidValueError, "size"),
    ],
)
def test_text_that_is_none(text: str, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        parse(text)


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(b"hello")
    np.savez(tmp_path / "y.npz", a=np.ones(3))
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name, message in (("x.npy", "cannot be read"), ("y.npz", "archive"), ("o.npy", "cannot be read")):
        with pytest.raises(DataError, match=message):
            parse(f"mask:{tmp_path / name}")
    with pytest.raises(InvalidValueError, match="has no lpips"):
        parse("pixels", weights="alex.npz")


def test_the_help_lists_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    from opacus_reconbound.cli import main

    with pytest.raises(SystemExit):
        main(["certify", "--help"])
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    for kind, meaning in KINDS.items():
        assert f"{kind} {meaning}" in said, kind
