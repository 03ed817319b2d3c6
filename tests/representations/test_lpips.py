"""LPIPS: equality with ``lpips.LPIPS``, the published sizes, range and trace, weights files, refusals."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import GOLDEN

from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import LPIPS, Channels, Crop, Pixels, parse

pytest.importorskip("lpips")

WEIGHTS = os.environ.get("RECONBOUND_ALEXNET")
MNIST = os.environ.get("RECONBOUND_MNIST")
needs_weights = pytest.mark.skipif(WEIGHTS is None, reason="set RECONBOUND_ALEXNET to AlexNet's weights to check it")
needs_mnist = pytest.mark.skipif(
    WEIGHTS is None or MNIST is None, reason="set RECONBOUND_ALEXNET and RECONBOUND_MNIST to check it"
)


@cache
def alex(**options: Any) -> LPIPS:
    return LPIPS("alex", **({"weights": WEIGHTS} | options))


@pytest.fixture(scope="module")
def random_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict of the right shapes; what a network sees does not matter to most tests."""
    import torchvision

    with torch.random.fork_rng():
        torch.manual_seed(0)
        path = tmp_path_factory.mktemp("weights") / "alexnet.pth"
        state = torchvision.models.alexnet().state_dict()
    torch.save({name: value for name, value in state.items() if name.startswith("features")}, path)
    return path


def theirs(weights: str | Path) -> torch.nn.Module:
    import lpips

    model = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False).eval()
    given = dict(np.load(weights)) if str(weights).endswith(".npz") else torch.load(weights, weights_only=True)
    state = {name: torch.as_tensor(given["features." + name.split(".", 1)[1]]) for name in model.net.state_dict()}
    model.net.load_state_dict(state)
    return model  # type: ignore[no-any-return]


def prepared(images: torch.Tensor, size: int) -> torch.Tensor:
    x = torch.nn.functional.interpolate(images.float() / 255, size=(size, size), mode="bilinear", align_corners=False)
    return (2 * x - 1).expand(-1, 3, -1, -1)


@cache
def digits() -> torch.Tensor:
    with np.load(str(MNIST)) as archive:
        return torch.from_numpy(np.concatenate([archive["x_train"], archive["x_test"]]))


def perp() -> torch.Tensor:
    return digits()[torch.from_numpy(np.random.default_rng(42).permutation(70_000)[60_000:])]


def quietly() -> Any:
    import warnings

    guard = warnings.catch_warnings()
    guard.__enter__()
    warnings.simplefilter("ignore")  # torchvision, about how lpips calls it
    return guard


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    guard = quietly()
    yield
    guard.__exit__(None, None, None)


# ---- equality and published values -----------------------------------------------------------------------------------


@needs_mnist
@pytest.mark.parametrize("size", [64, 40])
def test_it_is_lpips_on_mnist_pairs(size: int) -> None:
    x = perp()[:200]
    with torch.no_grad():
        z = alex(size=size)(x).double()
        planes = prepared(x[:, None], size)
        expected = theirs(str(WEIGHTS))(planes[:100], planes[100:]).flatten().double()
    found = (z[:100] - z[100:]).square().sum(dim=1)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)
    assert 0.005 < float(found.min()) < float(found.max()) < 1.0


@pytest.mark.parametrize("shape", [(3, 40, 36), (40, 36, 3)])
def test_it_is_lpips_on_colour_images_as_they_are(random_weights: Path, shape: tuple[int, ...]) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(6, *shape)).astype(np.uint8))
    psi = LPIPS("alex", size=None, weights=random_weights)
    planes = x if shape[0] == 3 else x.movedim(-1, 1)
    with torch.no_grad():
        z = psi(x).double()
        expected = theirs(random_weights)(planes[:3].float() / 127.5 - 1, planes[3:].float() / 127.5 - 1).flatten()
    torch.testing.assert_close((z[:3] - z[3:]).square().sum(dim=1).float(), expected, rtol=1e-5, atol=1e-6)


@needs_weights
def test_the_published_size_and_range() -> None:
    found = alex().describe((28, 28))
    assert found.dimension == GOLDEN["lpips"]["alexnet_features_at_64px"] == 31_872
    assert found.squared_diameter == pytest.approx(GOLDEN["lpips"]["alexnet_B"], rel=1e-12)
    assert found.squared_diameter == pytest.approx(8.04733, abs=1e-5)
    assert (found.name, found.peak) == ("lpips", None)


@needs_mnist
def test_the_published_trace_on_mnist() -> None:
    x = perp()
    total, squares = torch.zeros(31_872, dtype=torch.float64), 0.0
    with torch.no_grad():
        for start in range(0, len(x), 500):
            z = alex()(x[start : start + 500]).double()
            total += z.sum(dim=0)
            squares += float(z.square().sum())
    trace = squares / len(x) - float((total / len(x)).square().sum())
    assert trace == pytest.approx(GOLDEN["lpips"]["mnist_tr_sigma_hat"], abs=1e-6)


def test_no_two_images_are_further_apart_than_b(random_weights: Path) -> None:
    psi = LPIPS("alex", size=None, weights=random_weights)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, size=(40, 32, 32, 3)).astype(np.uint8)
    x[:10] = rng.integers(0, 2, size=(10, 1, 1, 3)) * 255  # flat colours
    with torch.no_grad():
        z = psi(torch.from_numpy(x)).double()
    interval = psi.output_range((32, 32, 3))
    assert interval[0] == 0.0 <= float(z.min())
    assert float(z.max()) <= interval[1]
    assert float(torch.cdist(z, z).max()) ** 2 < psi.describe((32, 32, 3)).squared_diameter


# ---- images ----------------------------------------------------------------------------------------------------------


def test_grey_is_three_equal_channels_and_ranges_scale(random_weights: Path) -> None:
    psi = LPIPS("alex", weights=random_weights)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(3, 28, 28)).astype(np.uint8))
    z = psi(x)
    assert torch.equal(psi(x[:, None].expand(-1, 3, -1, -1)), z)
    assert torch.equal(psi(x[..., None]), z)
    unit = LPIPS("alex", weights=random_weights, value_range=(0, 1))
    torch.testing.assert_close(unit(x / 255), z, atol=2e-6, rtol=1e-4)
    with pytest.raises(DataError, match=r"LPIPS\('alex', value_range=\(0, 1\)\)"):
        psi.check(x / 255)


def test_batches_do_not_matter(random_weights: Path) -> None:
    psi = LPIPS("alex", weights=random_weights)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(130, 28, 28)).astype(np.uint8))
    torch.testing.assert_close(psi(x)[126:], psi(x[126:]), atol=1e-6, rtol=1e-4)


def test_behind_a_crop_and_in_one_line(random_weights: Path) -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(3, 28, 28)).astype(np.uint8))
    plain = LPIPS("alex", weights=random_weights)
    psi = Crop(8, 8, 12, 12) | plain
    assert torch.equal(psi(x), plain(x[:, 8:20, 8:20]))
    found = psi.describe((28, 28))
    assert found.name == "crop | lpips"
    assert parse("crop:8,8,12,12|lpips:alex@64", weights=random_weights).describe((28, 28)) == found
    assert plain.describe((28, 28)).digest != found.digest
    full = parse("lpips:alex@full", weights=random_weights)
    assert full.describe((40, 40)).dimension < found.dimension
    assert (Channels(0, 1, 2) | plain).describe((4, 64, 64)).dimension == 31_872
    assert (Pixels((0, 1)) | plain).describe((28, 28)).dimension == 31_872


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ((4, 64, 64), 64, "Found 4 channels.*Select channels first"),
        ((784,), 64, "needs images"),
        ((28, 28), None, "at least 31 pixels a side. Found 28 × 28; give a size"),
    ],
)
def test_images_that_do_not_fit(random_weights: Path, shape: tuple[int, ...], size: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LPIPS("alex", size=size, weights=random_weights).describe(shape)


@pytest.mark.parametrize(("net", "dimension"), [("squeeze", 118_976), ("vgg", 499_712)])
def test_the_other_backbones(tmp_path: Path, net: str, dimension: int) -> None:
    import lpips

    with torch.random.fork_rng():
        model = lpips.LPIPS(net=net, pnet_rand=True, pretrained=False, verbose=False)
    state = {"features." + name.split(".", 1)[1]: value for name, value in model.net.state_dict().items()}
    torch.save(state, tmp_path / "net.pth")
    psi = LPIPS(net, weights=tmp_path / "net.pth")  # type: ignore[arg-type]
    assert psi.describe((28, 28)).dimension == dimension
    assert psi.describe((28, 28)).squared_diameter < 20
    model = lpips.LPIPS(net=net, pnet_rand=True, verbose=False).eval()  # with the heads
    model.net.load_state_dict({name: state["features." + name.split(".", 1)[1]] for name in model.net.state_dict()})
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size=(2, 28, 28)).astype(np.uint8))
    planes = prepared(x[:, None], 64)
    with torch.no_grad():
        z = psi(x).double()
        expected = model(planes[:1], planes[1:]).flatten()
    torch.testing.assert_close((z[0] - z[1]).square().sum().float()[None], expected, rtol=1e-5, atol=1e-7)


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_frozen_quiet_and_without_a_trace_in_the_random_state(
    random_weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.random.get_rng_state()
    psi = LPIPS("alex", weights=random_weights)
    assert torch.equal(before, torch.random.get_rng_state())
    assert capsys.readouterr() == ("", "")
    psi.train()
    assert not any(module.training for module in psi.modules())
    assert not any(parameter.requires_grad for parameter in psi.parameters())


@needs_weights
def test_both_kinds_of_files_give_one_digest(tmp_path: Path, random_weights: Path) -> None:
    with np.load(str(WEIGHTS)) as archive:
        torch.save({name: torch.from_numpy(archive[name]) for name in archive.files}, tmp_path / "alex.pth")
    again = LPIPS("alex", weights=tmp_path / "alex.pth").describe((28, 28))
    assert again == alex().describe((28, 28))
    assert again.digest != LPIPS("alex", weights=random_weights).describe((28, 28)).digest
    assert again.digest != alex(size=65).describe((28, 28)).digest


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_weights_that_are_none(tmp_path: Path, random_weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = torch.load(random_weights, weights_only=True)
    name = "features.3.weight"
    files: dict[str, tuple[Any, str]] = {
        "missing key.pth": ({k: v for k, v in state.items() if k != name}, f"has no array {name}"),
        "shape.pth": (state | {name: torch.zeros(3)}, rf"{name} has the shape \(3,\)"),
        "nan.pth": (state | {name: torch.full_like(state[name], torch.nan)}, f"{name} holds NaN"),
        "head.pth": (state | {"lin0.model.1.weight": torch.ones(1, 64, 1, 1)}, "not the head that comes with lpips"),
        "list.pth": ([1, 2], "no state dict"),
        "numbers.pth": ({"features.0.weight": 3}, "no state dict"),
    }
    for file, (content, message) in files.items():
        torch.save(content, file)
        with pytest.raises(DataError, match=message):
            LPIPS("alex", weights=file)
    Path("harmful.pth").write_bytes(pickle.dumps(Harmful()))
    np.savez("harmful.npz", **{"features.0.weight": np.array([Harmful()], dtype=object)})
    Path("noise.npz").write_bytes(b"hello")
    for file in ("harmful.pth", "harmful.npz", "noise.npz"):
        with pytest.raises(DataError, match="cannot be read as weights"):
            LPIPS("alex", weights=file)
    assert not Path("executed").exists()
    with pytest.raises(DataError, match=r"no file nowhere\.pth"):
        LPIPS("alex", weights="nowhere.pth")


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'opacus-reconbound\[lpips\]'"):
        LPIPS("alex")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"net": "resnet"}, "alex, vgg, squeeze"), ({"size": 8}, "size"), ({"value_range": (1, 0)}, "low < high")],
)
def test_settings_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        LPIPS(**options)
