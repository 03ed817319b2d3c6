"""Interrupted certificates go on where they stopped, to the last bit; other people's files are refused."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from opacus_reconbound import Pixels, SourceCertificate, certify
from opacus_reconbound.certificates.checkpoint import differences
from opacus_reconbound.errors import CertificateError

MODULE = importlib.import_module("opacus_reconbound.certificates.certify")  # the package has a function of that name
ROOT = Path(__file__).resolve().parents[2]
DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:700]
PAIRS = [(8, 1.6), (4, 3.2)]


def certificate(checkpoint: Path | None = None, **options: Any) -> SourceCertificate:
    return certify(
        options.pop("reference", DIGITS[:200]),
        options.pop("estimation", DIGITS[200:]),
        checkpoint=checkpoint,
        **({"representation": Pixels((0, 16)), "designs": "all", "pairs": PAIRS, "progress": False} | options),
    )


@pytest.fixture(scope="module")
def whole() -> str:
    return certificate().to_json()


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def never(*_: Any, **__: Any) -> Any:
    pytest.fail("computed again")


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The replica designs are finished, the block designs are not."""
    path = tmp_path / "half.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "block_estimates", interrupt)
        with pytest.raises(KeyboardInterrupt):
            certificate(path)
    assert list(json.loads(path.read_text())["finished"]) == ["replica"]
    return path


def test_finished_kinds_are_not_computed_again(half: Path, whole: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "replica_estimates", never)
    assert certificate(half).to_json() == whole
    monkeypatch.setattr(MODULE, "block_estimates", never)
    assert certificate(half).to_json() == whole  # the file stays, and holds everything
    assert [path.name for path in half.parent.iterdir()] == ["half.json"]


def test_the_first_kind_interrupted_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "replica_estimates", interrupt)
    with pytest.raises(KeyboardInterrupt):
        certificate(tmp_path / "c.json")
    assert not list(tmp_path.iterdir())


def test_what_the_designs_do_not_depend_on_may_change(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = certificate(normaliser="ucb", trace_level=0.01).to_json()
    monkeypatch.setattr(MODULE, "replica_estimates", never)
    assert certificate(half, normaliser="ucb", trace_level=0.01).to_json() == expected


def test_the_pilots_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    expected = certificate(designs="auto").to_json()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MODULE, "replica_estimates", interrupt)
        with pytest.raises(KeyboardInterrupt):
            certificate(path, designs="auto")
    monkeypatch.setattr(MODULE, "choose_kinds", never)
    assert certificate(path, designs="auto").to_json() == expected


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, r"different: seed \(0 there, 1 here\)\. Delete that file"),
    "alpha": ({"alpha": 0.1}, r"alpha \(0\.05 there, 0\.1 here\)"),
    "kinds": ({"designs": "block"}, r'designs \(\["replica", "block"\] there, \["block"\] here\)'),
    "temperatures": ({"temperatures": [0.4, 0.2]}, "different: temperatures"),
    "pairs": ({"pairs": PAIRS[:1]}, "different: pairs"),
    "margins": ({"margins": "paper"}, 'margins \\("bernstein" there, "paper" here\\)'),
    "max_reference": ({"max_reference": 100}, r"max_reference \(10000 there, 100 here\)"),
    "representation": ({"representation": Pixels((0, 17))}, r"different: representation\. "),
    "records": ({"estimation": DIGITS[201:]}, r"different: estimation records\. "),
    "order": ({"reference": DIGITS[199::-1]}, r"different: reference records\. "),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_certificate_is_refused(case: str, half: Path) -> None:
    options, message = OTHERS[case]
    before = half.read_bytes()
    with pytest.raises(CertificateError, match=message) as caught:
        certificate(half, **options)
    assert str(half) in str(caught.value)
    assert "go on from there" in str(caught.value)
    assert half.read_bytes() == before


def test_another_version_is_refused(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "library_version", lambda: "99.0")
    with pytest.raises(CertificateError, match=r'library version \(".*" there, "99\.0" here\)'):
        certificate(half)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_files_are_refused(half: Path, share: float) -> None:
    text = half.read_text()
    half.write_text(text[: int(share * len(text))])
    with pytest.raises(CertificateError, match=r"not whole.*Delete that file to start afresh"):
        certificate(half)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "not a file of finished designs.*Name another checkpoint"),
        ("[1]", "not a file of finished designs"),
        ('{"format": "opacus_reconbound/unfinished-certificate/1"}', "altered after it was written"),
        ("\udcff", "not whole"),
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "notes.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(CertificateError, match=message):
        certificate(path)
    assert path.read_bytes() == content.encode(errors="surrogateescape")


def test_altered_files_are_refused(half: Path) -> None:
    text = half.read_text()
    assert '"replicas": 2' in text
    half.write_text(text.replace('"replicas": 2', '"replicas": 3', 1))
    with pytest.raises(CertificateError, match="altered"):
        certificate(half)


def test_a_file_that_cannot_be_written_or_read(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="cannot be read"):
        certificate(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CertificateError, match=r"could not be written.*leave checkpoint out|cannot be read"):
        certificate(tmp_path / "file" / "c.json")


def test_differences() -> None:
    assert differences({"a": 1, "b": [1]}, {"a": 1, "b": [1]}) == ""
    assert differences({"a": 1, "b": "x" * 99}, {"a": 2, "c": None, "b": "y"}) == "a (1 there, 2 here), b"


# ---- the command line, as processes ----------------------------------------------------------------------------------


def start(command: str, folder: Path) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "opacus_reconbound.cli", *shlex.split(command)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def when_there(path: Path, child: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 120
    while not path.exists():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records for which the block designs take long enough to be interrupted."""
    base = tmp_path_factory.mktemp("records")
    rng = np.random.default_rng(0)
    faces = rng.normal(size=(6, 256)) / 3
    images = (rng.normal(size=(2300, 6)) @ faces + 0.1 * rng.normal(size=(2300, 256))) * 60 + 128
    np.save(base / "d.npy", images.clip(0, 255).astype(np.uint8).reshape(-1, 16, 16))
    child = start("certify d.npy -o whole.json --designs all --n-reference 300", base)
    assert child.communicate(timeout=300)[1] == ""
    assert sorted(path.name for path in base.iterdir()) == ["d.npy", "whole.json"]
    return base


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_goes_on_where_it_was(folder: Path, how: signal.Signals) -> None:
    command = "certify d.npy -o c.json --designs all --n-reference 300"
    # where the tests run in the background, shells let SIGINT be ignored, and a child would inherit that
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        child = start(command, folder)
    finally:
        signal.signal(signal.SIGINT, before)
    partial = folder / "c.json.partial"
    when_there(partial, child)
    child.send_signal(how)
    out, err = child.communicate(timeout=60)
    assert out == ""
    assert not (folder / "c.json").exists()
    if how == signal.SIGINT:
        assert child.returncode == 130
        assert err.endswith(
            "What is finished is kept in c.json.partial: the same command goes on from there.\nInterrupted.\n"
        )
    else:
        assert child.returncode == -signal.SIGKILL
    finished = json.loads(partial.read_text())["finished"]
    assert list(finished) == ["replica"]

    other = start(f"{command} --alpha 0.1", folder)
    out, err = other.communicate(timeout=60)
    assert (other.returncode, out) == (2, "")
    assert "alpha (0.05 there, 0.1 here)" in err
    assert err.count("\n") == 1

    child = start(command, folder)
    out, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (0, "")
    assert (folder / "c.json").read_bytes() == (folder / "whole.json").read_bytes()
    assert not partial.exists()
    (folder / "c.json").unlink()
