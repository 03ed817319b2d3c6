"""What users have: files, folders of images, torchvision's data sets, Lightning data modules, lists."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from opacus_reconbound._files import open_source
from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.certificates.records import ArrayRecords, as_source, select
from opacus_reconbound.errors import DataError, OverlapError
from opacus_reconbound.representations import Downsample, Pixels

DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:500]
PSI = Pixels(value_range=(0, 16))
FIRST = np.arange(150)
SECOND = np.arange(150, 500)


def certificate(reference: Any, estimation: Any, **options: Any) -> SourceCertificate:
    return certify(reference, estimation, **({"representation": PSI, "progress": False} | options))


def read(records: Any) -> np.ndarray:
    return np.concatenate(list(as_source("some", records).chunks(64)))


@pytest.fixture(scope="module")
def expected() -> SourceCertificate:
    return certificate(DIGITS[:150], DIGITS[150:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As torchvision's ImageFolder has it: a folder for each class."""
    root = tmp_path_factory.mktemp("images")
    for index, image in enumerate(DIGITS):
        file = root / f"{index // 100}" / f"{index:04}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(file)
    return root


# ---- files -----------------------------------------------------------------------------------------------------------


def test_paths(tmp_path: Path, folder: Path, expected: SourceCertificate) -> None:
    np.save(tmp_path / "a.npy", DIGITS[:150])
    np.save(tmp_path / "b.npy", DIGITS[150:300])
    np.savez(tmp_path / "c.npz", x=DIGITS[300:], y=np.arange(200))
    rest = [tmp_path / "b.npy", f"{tmp_path}/c.npz:x"]
    assert certificate(tmp_path / "a.npy", rest).to_json() == expected.to_json()
    whole = [tmp_path / "a.npy", *rest]
    for data in (whole, folder, str(folder), DIGITS, torch.from_numpy(DIGITS), ArrayRecords(DIGITS), DIGITS.tolist()):
        assert np.array_equal(read(data), DIGITS)
        assert np.array_equal(read(select("some", data, SECOND)), DIGITS[150:])
        assert len(as_source("some", select("some", data, FIRST[:7]))) == 7
    images = (select("images", folder, FIRST), select("images", folder, SECOND))
    assert certificate(*images).to_json() == expected.to_json()


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["nowhere.npy"], "no file or folder nowhere.npy"),
        ("nowhere", "no file or folder nowhere"),
        (["a.npy", "./a.npy"], "given twice"),
        (["a.npy", "b.npy"], r"b\.npy holds records of shape \(9, 8\).*must agree"),
        ("e.npy", r"e\.npy is empty"),
        ("empty", "holds no images"),
    ],
)
def test_paths_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", DIGITS)
    np.save("b.npy", np.zeros((500, 9, 8), np.uint8))
    Path("e.npy").touch()
    Path("empty").mkdir()
    with pytest.raises(DataError, match=message):
        certificate(DIGITS[:150], paths)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, ">f8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_uncompressed_archives_stay_on_disk(tmp_path: Path, dtype: Any, order: str) -> None:
    records = np.asarray(DIGITS.astype(dtype), order=order)  # type: ignore[call-overload]
    np.savez(tmp_path / "x.npz", small=np.arange(3), records=records)
    found = open_source(f"{tmp_path}/x.npz:records")
    assert isinstance(found, np.memmap)
    assert not found.flags.writeable
    assert found.dtype == records.dtype
    assert np.array_equal(found, records)
    np.savez_compressed(tmp_path / "y.npz", records=records)
    assert not isinstance(open_source(f"{tmp_path}/y.npz"), np.memmap)


def test_a_damaged_archive_is_noticed_although_it_is_only_mapped(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", records=DIGITS)
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[5000] ^= 1
    (tmp_path / "x.npz").write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"x\.npz cannot be read as an array of numbers: Bad CRC-32"):
        open_source(f"{tmp_path}/x.npz")


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_read_where_they_are_needed(tmp_path: Path) -> None:
    raw = 40 * 400 * 500 * 3
    for index in range(40):
        Image.new("RGB", (500, 400), (index, 3, 200)).save(tmp_path / f"{index:02}.png")
    tracemalloc.start()
    try:
        source = as_source("some", tmp_path)
        assert (len(source), source.record_shape, source.dtype) == (40, (400, 500, 3), np.uint8)
        assert sum(int(chunk[:, 0, 0, 0].sum()) for chunk in source.chunks(2)) == sum(range(40))
        assert tracemalloc.get_traced_memory()[1] < 0.3 * raw
    finally:
        tracemalloc.stop()


def test_a_truncated_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 40, 40), dtype=np.uint8)
    for index, image in enumerate(noise):
        Image.fromarray(image).save(tmp_path / f"{index:02}.png")
    content = (tmp_path / "07.png").read_bytes()
    (tmp_path / "07.png").write_bytes(content[:700])
    source = as_source("some", tmp_path)
    with pytest.raises(DataError, match=r"07\.png cannot be read as an image: .*Repair it or take it out"):
        list(source.chunks(4))
    assert np.array_equal(read(select("some", tmp_path, np.array([0, 6, 8]))), noise[[0, 6, 8]])


def test_images_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("a.png")
    Image.new("L", (8, 8)).save("b.png")
    with pytest.raises(DataError, match=r"b\.png has the shape \(8, 8\), but .*a\.png has \(8, 8, 3\)"):
        as_source("some", tmp_path)
    Path("a.png").write_text("no image")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image"):
        as_source("some", tmp_path)


def test_channels_first_and_last() -> None:
    colour = np.random.default_rng(0).integers(0, 256, (500, 8, 8, 3), dtype=np.uint8)
    last = certify(colour[:150], colour[150:], representation=Downsample(2), progress=False)
    moved = np.moveaxis(colour, -1, 1)
    first = certify(moved[:150], moved[150:], representation=Downsample(2), progress=False)
    assert first.representation.record_shape == (3, 8, 8)
    assert first.representation.dimension == last.representation.dimension == 12
    assert first.bound(1.0).rho == pytest.approx(last.bound(1.0).rho, rel=1e-5)


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(DIGITS),
        lambda: [torch.from_numpy(record) for record in DIGITS],
        lambda: [Image.fromarray(record) for record in DIGITS],
        lambda: [(Image.fromarray(record).convert("LA"), 7) for record in DIGITS],
        lambda: tuple(DIGITS),
    ],
    ids=["arrays", "tensors", "images", "labelled images", "a tuple"],
)
def test_lists_of_records(make: Any, expected: SourceCertificate) -> None:
    data = make()
    assert certificate(data[:150], data[150:]).to_json() == expected.to_json()
    assert certificate(select("x", data, FIRST), select("x", data, SECOND)).to_json() == expected.to_json()


RAGGED: dict[str, tuple[Any, str]] = {
    "arrays": ([*DIGITS[:300], np.zeros((8, 9), np.uint8)], r"estimation\[300\] has shape \(8, 9\)"),
    "types": ([*DIGITS[:300], np.zeros((8, 8))], r"estimation\[300\] has shape \(8, 8\) and type float64"),
    "images": (
        [*map(Image.fromarray, DIGITS[:200]), Image.new("RGB", (8, 8))],
        r"estimation\[200\] has shape \(8, 8, 3\)",
    ),
    "deep images": ([Image.new("I;16", (8, 8))] * 200, r"estimation\[0\] is no record: images of mode I;16"),
    "numbers": ([[1.0, 2.0]] * 123 + [[3.0]], r"one array \(n, \.\.\.\).*\. estimation\[123\] is not shaped like"),
    "deep numbers": (
        [[[1, 2], [3, 4]]] * 110 + [[[1], [3, 4]]],
        r"estimation\[110\] is not shaped like estimation\[0\]",
    ),
    "something else": ([*DIGITS[:300], None], r"estimation\[300\] is of type NoneType"),
}


@pytest.mark.parametrize("case", RAGGED)
def test_the_first_record_that_does_not_fit_is_named(case: str) -> None:
    estimation, message = RAGGED[case]
    with pytest.raises(DataError, match=message) as caught:
        certificate(DIGITS[:150], estimation)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


# ---- torchvision -----------------------------------------------------------------------------------------------------


def test_torchvision_mnist_and_image_folders(tmp_path: Path, folder: Path, expected: SourceCertificate) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    labels = np.arange(500, dtype=np.uint8) % 10
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 500, 8, 8) + DIGITS.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 500) + labels.tobytes())
    mnist = datasets.MNIST(tmp_path)
    assert certificate(Subset(mnist, range(150)), select("x", mnist, SECOND)).to_json() == expected.to_json()
    images = datasets.ImageFolder(folder)  # gives RGB
    colour = np.repeat(DIGITS[..., None], 3, axis=-1)
    assert np.array_equal(read(images), colour)
    transforms = pytest.importorskip("torchvision.transforms")
    scaled = datasets.ImageFolder(folder, transform=transforms.ToTensor())
    assert as_source("x", scaled).record_shape == (3, 8, 8)
    found = certificate(select("x", scaled, FIRST), select("x", scaled, SECOND), representation=Pixels((0, 1)))
    assert found.bound(1.0).rho == pytest.approx(certificate(colour[:150], colour[150:]).bound(1.0).rho, rel=1e-5)


def test_torchvision_fake_data() -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    fake = datasets.FakeData(size=400, image_size=(3, 4, 4))
    found = certificate(Subset(fake, range(100)), Subset(fake, range(100, 400)), representation=Pixels())
    assert found.representation.record_shape == (4, 4, 3)
    with pytest.raises(OverlapError, match=r"reference\[99\] = estimation\[0\]"):
        certificate(Subset(fake, range(100)), Subset(fake, range(99, 400)), representation=Pixels())


def test_random_transforms_are_refused(folder: Path) -> None:
    datasets, transforms = pytest.importorskip("torchvision.datasets"), pytest.importorskip("torchvision.transforms")
    jittered = datasets.ImageFolder(folder, transform=transforms.RandomCrop(8, padding=2))
    with pytest.raises(DataError, match=r"another record each time it is read.*Leave out random transforms"):
        as_source("some", jittered)


# ---- Lightning -------------------------------------------------------------------------------------------------------


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DIGITS)


def data_module(base: Any, loader: Any) -> Any:
    class Digits(base):  # type: ignore[misc]
        calls: tuple[str, ...] = ()

        def prepare_data(self) -> None:
            self.calls += ("prepare",)

        def setup(self, stage: str) -> None:
            self.calls += (stage,)
            self.data = TensorDataset(torch.from_numpy(DIGITS), torch.arange(500))

        def train_dataloader(self) -> Any:
            return loader(self.data)

    return Digits()


@pytest.mark.parametrize("base", [lightning.pytorch.LightningDataModule, pytorch_lightning.LightningDataModule])
def test_data_modules_give_their_training_records(base: Any, expected: SourceCertificate) -> None:
    module = data_module(base, lambda data: DataLoader(data, batch_size=7, shuffle=True))
    assert np.array_equal(read(module), DIGITS)  # in the order of the data set, whatever the loader does
    assert module.calls == ("prepare", "fit")
    found = certificate(select("x", module, FIRST), select("x", module, SECOND))
    assert found.to_json() == expected.to_json()
    assert certificate(DIGITS[:150], select("x", module, SECOND)).to_json() == expected.to_json()


def failing(data: Dataset[Any]) -> Any:
    raise OSError("no such disk")


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (failing, r"data module Digits of the some records gives no training loader: OSError: no such disk\. Repair"),
        (lambda data: [DataLoader(data), DataLoader(data)], "gives a list to train on, not one DataLoader"),
        (lambda data: None, "gives a NoneType to train on"),
        (lambda data: DataLoader(Streamed()), "IterableDataset, which has no fixed order"),
    ],
)
def test_data_modules_without_one_data_set(loader: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_source("some", data_module(lightning.pytorch.LightningDataModule, loader))


def test_a_data_module_that_says_nothing() -> None:
    with pytest.raises(DataError, match="LightningDataModule of the some records gives no training loader"):
        as_source("some", lightning.pytorch.LightningDataModule())
