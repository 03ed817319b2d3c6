"""Records from files: what is read, in which order, and that damaged files give one clear error."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from opacus_reconbound._files import Stored, check_writable, open_records, open_source, refuse_repeats, split_key
from opacus_reconbound.certificates.records import SelectedRecords
from opacus_reconbound.errors import DataError, InvalidValueError

RECORDS = np.arange(60, dtype=np.uint8).reshape(10, 2, 3)


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def gather(arrays: Sequence[Stored], indices: NDArray[np.intp]) -> NDArray[Any]:
    chunks = list(SelectedRecords(arrays, indices).chunks(3))
    return np.concatenate(chunks) if chunks else np.empty((0, *arrays[0].shape[1:]), arrays[0].dtype)


# ---- arrays ----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), data=st.data())
def test_gather_is_indexing_the_concatenation(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes) * 2).reshape(-1, 2)
    arrays = np.split(whole, np.cumsum(sizes)[:-1])
    wanted = data.draw(st.lists(st.integers(0, len(whole) - 1), unique=True))
    indices = np.array(wanted, dtype=np.intp)
    found = gather(arrays, indices)
    assert found.dtype == whole.dtype
    assert np.array_equal(found, whole[indices])


def test_gather_copies_out_of_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", RECORDS)
    (array,) = open_records([str(tmp_path / "r.npy")])
    assert isinstance(array, np.memmap)
    assert not array.flags.writeable
    found = gather([array], np.array([1, 3]))
    assert type(found) is np.ndarray
    found[:] = 0
    assert np.array_equal(array, RECORDS)


def test_every_kind_of_source(tmp_path: Path) -> None:
    np.save(tmp_path / "r.npy", RECORDS)
    with (tmp_path / "f.NPY").open("wb") as file:
        np.save(file, np.asfortranarray(RECORDS))
    np.savez(tmp_path / "one.npz", RECORDS)
    np.savez_compressed(tmp_path / "t.npz", **{"a:b": RECORDS, "c": RECORDS[:5]})
    for source in ("r.npy", "f.NPY", "one.npz", "one.npz:arr_0", "t.npz:a:b"):
        assert np.array_equal(open_source(str(tmp_path / source)), RECORDS), source
    arrays = open_records([str(tmp_path / "t.npz:c"), str(tmp_path / "r.npy")])
    assert np.array_equal(gather(arrays, np.arange(15)), np.concatenate([RECORDS[:5], RECORDS]))


@pytest.mark.parametrize(
    ("source", "path", "key"),
    [
        ("a.npy", "a.npy", None),
        ("a.npz", "a.npz", None),
        ("a.npz:k", "a.npz", "k"),
        ("x/A.NPZ:k:l", "x/A.NPZ", "k:l"),
        ("a.npz:", "a.npz", ""),
        ("a.npy:k", "a.npy:k", None),
        ("C:/a.npz:k", "C:/a.npz", "k"),
    ],
)
def test_split_key(source: str, path: str, key: str | None) -> None:
    assert split_key(source) == (Path(path), key)


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    harmful = np.array([Harmful(mark)] * 3, dtype=object).reshape(3, 1)
    np.save(tmp_path / "o.npy", harmful, allow_pickle=True)
    np.savez(tmp_path / "o.npz", x=harmful, y=RECORDS)
    (tmp_path / "p.npy").write_bytes(pickle.dumps(Harmful(mark)))
    (tmp_path / "p.npz").write_bytes(pickle.dumps(Harmful(mark)))
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as archive:
        archive.writestr("x.npy", pickle.dumps(Harmful(mark)))
    for source in ("o.npy", "o.npz:x", "p.npy", "p.npz", "z.npz", "z.npz:x"):
        with pytest.raises(DataError, match=r"cannot be read|no array|not an array") as error:
            open_source(str(tmp_path / source))
        assert "allow_pickle" not in str(error.value)
        assert not mark.exists()
    assert np.array_equal(open_source(str(tmp_path / "o.npz:y")), RECORDS)


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.npz", "w") as archive:
        archive.writestr("notes.txt", "hello")
    with pytest.raises(DataError, match=r"notes\.txt is not an array"):
        open_source(str(tmp_path / "z.npz:notes.txt"))
    with zipfile.ZipFile(tmp_path / "e.npz", "w"):
        pass
    with pytest.raises(DataError, match="nothing"):
        open_source(str(tmp_path / "e.npz"))


def damaged(kind: str) -> bytes:
    file = io.BytesIO()
    if kind == "npy":
        np.save(file, RECORDS)
    elif kind == "npz":
        np.savez_compressed(file, x=RECORDS)
    else:
        Image.fromarray(np.tile(RECORDS[:, :, 0], (4, 8))).save(file, format=kind)
    return file.getvalue()


WHOLE = {kind: damaged(kind) for kind in ("npy", "npz", "png", "jpeg", "gif", "bmp", "tiff", "webp")}


@pytest.mark.filterwarnings("ignore")  # Pillow and numpy warn about damaged files; here only the outcome counts
@pytest.mark.parametrize("kind", WHOLE)
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_gives_records_or_a_data_error(kind: str, data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(WHOLE[kind])
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    folder = tmp_path / kind
    folder.mkdir(exist_ok=True)
    file = folder / f"x.{kind}"
    file.write_bytes(bytes(content))
    source = str(file) if kind in ("npy", "npz") else str(folder)
    message = ""
    try:
        assert np.asarray(open_source(source)).ndim >= 2
    except DataError as error:
        message = str(error)
    except MemoryError:  # a header may ask for anything; the command line says so in one line
        assert kind == "npz"
    assert "\n" not in message
    assert not message or str(file) in message


def test_a_header_that_asks_for_too_much(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (10, 999999999999999999), }"
    header += b" " * (64 - (10 + len(header)) % 64 - 1) + b"\n"
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(10)
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        open_source(str(tmp_path / "x.npy"))


def test_sources_must_agree(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", RECORDS)
    np.save(tmp_path / "b.npy", RECORDS.astype(np.int64))
    np.save(tmp_path / "c.npy", RECORDS[:, :1])
    for other in ("b.npy", "c.npy"):
        with pytest.raises(DataError, match=rf"{other} holds records .* must agree"):
            open_records([str(tmp_path / "a.npy"), str(tmp_path / other)])
    with pytest.raises(DataError, match="No data was given"):
        open_records([])


# ---- images ----------------------------------------------------------------------------------------------------------


def grey(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(5, 4), dtype=np.uint8)


def test_images_come_sorted_from_all_folders_and_hidden_ones_stay_out(tmp_path: Path) -> None:
    for index, name in enumerate(["b/2.png", "a/9.bmp", "a/10.PNG", "b/1.tif"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(grey(index)).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".thumbnails").mkdir()
    Image.fromarray(grey(7)).save(tmp_path / ".thumbnails" / "1.png")
    (tmp_path / "a" / "._9.png").write_bytes(b"what another system leaves")
    (tmp_path / "folder.png").mkdir()
    found = open_source(str(tmp_path))
    assert found.dtype == np.uint8
    assert np.array_equal(found, np.stack([grey(2), grey(1), grey(3), grey(0)]))


def test_a_hidden_folder_itself_can_be_named(tmp_path: Path) -> None:
    (tmp_path / ".data").mkdir()
    Image.fromarray(grey()).save(tmp_path / ".data" / "1.png")
    assert len(open_source(str(tmp_path / ".data"))) == 1


@pytest.mark.parametrize(
    ("mode", "shape"),
    [("L", (5, 4)), ("1", (5, 4)), ("LA", (5, 4)), ("RGB", (5, 4, 3)), ("P", (5, 4, 3)), ("RGBA", (5, 4, 3))],
)
def test_modes_become_8_bit_grey_or_colour(tmp_path: Path, mode: str, shape: tuple[int, ...]) -> None:
    picture = Image.fromarray(grey()).convert(mode)
    picture.save(tmp_path / "x.png")
    found = open_source(str(tmp_path))
    assert found.shape == (1, *shape)
    assert found.dtype == np.uint8
    expected = picture.convert("RGB" if len(shape) == 3 else "L")
    assert np.array_equal(found[0], np.asarray(expected))
    assert np.array_equal(found[[0]], np.asarray(expected)[None])


def test_cmyk(tmp_path: Path) -> None:
    Image.fromarray(grey()).convert("CMYK").save(tmp_path / "x.tif")
    assert open_source(str(tmp_path)).shape == (1, 5, 4, 3)


@pytest.mark.parametrize("values", [grey().astype(np.uint16) * 256, grey().astype(np.int32), grey().astype(np.float32)])
def test_more_than_8_bits_is_refused(tmp_path: Path, values: np.ndarray) -> None:
    Image.fromarray(values).save(tmp_path / "x.tif")
    with pytest.raises(DataError, match=r"x.tif cannot be read as an image: images of mode .* do not fit"):
        open_source(str(tmp_path))


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(grey()).save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image: Image size"):
        open_source(str(tmp_path))


def test_unlike_images_name_both_files(tmp_path: Path) -> None:
    Image.fromarray(grey()).save(tmp_path / "a.png")
    Image.fromarray(grey().T.copy()).save(tmp_path / "b.png")
    with pytest.raises(DataError, match=r"b.png has the shape \(4, 5\).*a.png has \(5, 4\)"):
        open_source(str(tmp_path))


# ---- repeats and outputs ---------------------------------------------------------------------------------------------


def test_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("images")
    refuse_repeats(["a.npy", "b.npy", "t.npz:x", "t.npz:y", "images", "images2", "x/a.npy"])
    for twice in (
        ["a.npy", "b.npy", "a.npy"],
        ["a.npy", str(tmp_path / "a.npy")],
        ["a.npy", "images/../a.npy"],
        ["t.npz:x", "t.npz:y", "t.npz:x"],
        ["t.npz", "t.npz:x"],
        ["images", "images/sub"],
        ["images/sub", "images"],
        ["images", "link"],
        [".", "images"],
    ):
        with pytest.raises(DataError, match="given twice"):
            refuse_repeats(twice)


def test_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "x.json", "a file")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path / "file" / "new" / "x.json"):
        with pytest.raises(InvalidValueError, match=r"x.json cannot be written: .*file is a file"):
            check_writable(path, "a file")
    with pytest.raises(InvalidValueError, match=r"is a folder\. Name the file, in it or elsewhere"):
        check_writable(tmp_path, "the file")
    check_writable(tmp_path / "file", "a file")
