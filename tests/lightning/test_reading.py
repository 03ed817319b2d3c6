"""What a run shows: the forecast, the loggers, the figure and the page."""

from __future__ import annotations

import base64
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from spaces import Space, floor_after

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import InvalidValueError

pytest.importorskip("matplotlib")


def report(space: Space, *arguments: Any, **options: Any) -> Any:
    name = space.L.__name__.split(".")[0]
    return importlib.import_module(f"opacus_reconbound.report.{name}").TrainingReport(*arguments, **options)


def loggers(space: Space) -> Any:
    return importlib.import_module(f"{space.L.__name__}.loggers")


# ---- the forecast ----------------------------------------------------------------------------------------------------


def printed(space: Space, certificate: SourceCertificate, tmp_path: Any, **options: Any) -> None:
    callback = space.ours.ReconstructionBoundCallback(certificate, floor_after(certificate, 5.5), **options)
    space.trainer(tmp_path, callback, max_epochs=1).fit(space.module())


def test_the_table(space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("rich")
    printed(space, certificate, tmp_path)
    rows = {
        cells[0].strip(): cells[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if len(cells := line.strip("│").split("│")) == 2
    }
    assert rows["sample rate q"] == "0.125"
    assert rows["noise multiplier σ"] == "1"
    assert rows["steps planned"] == "8"
    assert rows["last step within the floor"] == "5"
    assert rows["ρ* now"] == f"{math.floor(certificate.highest_rho * 1e3) / 1e3:.3f}"
    assert float(rows["ρ* at the end"]) <= certificate.bound(8 * 0.0159).rho


def test_without_rich_the_sentence_is_there_all_the_same(
    space: Space,
    certificate: SourceCertificate,
    tmp_path: Any,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find(name, *a))
    printed(space, certificate, tmp_path)
    out = capsys.readouterr().out
    assert "│" not in out
    assert re.search(r"is reached at step 5 \(ε <= .*\), and training will stop there", out)


def test_silence(space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    printed(space, certificate, tmp_path, verbose=False)
    assert "Forecast" not in capsys.readouterr().out


# ---- loggers ---------------------------------------------------------------------------------------------------------


def test_tensorboard(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = loggers(space).TensorBoardLogger(tmp_path, name="", version="run")
    callback = space.callback(certificate, floor_after(certificate, 5.5))
    space.trainer(tmp_path, callback, logger=logger, log_every_n_steps=1).fit(space.module())
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    names = {"reconstruction/rho_star", "reconstruction/leakage_bits", "reconstruction/steps_left", "privacy/epsilon"}
    assert names <= set(events.Tags()["scalars"])
    rho = [event.value for event in events.Scalars("reconstruction/rho_star")]
    assert len(rho) == 5
    assert rho == sorted(rho, reverse=True)
    assert rho[-1] <= callback.bound.rho
    assert [event.value for event in events.Scalars("reconstruction/steps_left")] == [4, 3, 2, 1, 0]
    assert events.Scalars("privacy/epsilon")[-1].value >= callback.epsilon()


def test_csv_in_strides_holds_the_last_step(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    logger = loggers(space).CSVLogger(tmp_path, name="", version="log")
    callback = space.callback(certificate, floor_after(certificate, 11.5))
    space.trainer(tmp_path, callback, logger=logger, log_every_n_steps=4).fit(space.module())
    header, *rows = (line.split(",") for line in (tmp_path / "log" / "metrics.csv").read_text().splitlines())
    left = header.index("reconstruction/steps_left")
    assert [float(row[left]) for row in rows if row[left]] == [7.0, 3.0, 0.0]


def wandb_history(path: Path) -> list[dict[str, float]]:
    """The rows of a run's file: records in blocks of 32 KiB, as in LevelDB's log, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, rows, pending = path.read_bytes(), [], b""
    assert data[:4] == b":W&B"
    at = 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no room for another record's head
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pending = (b"" if kind in (1, 2) else pending) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # neither whole nor the last part of one
            continue
        record = wandb_internal_pb2.Record.FromString(pending)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_offline(
    space: Space, certificate: SourceCertificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = loggers(space).WandbLogger(offline=True, save_dir=tmp_path, project="test", name="run")
    callback = space.callback(certificate, floor_after(certificate, 5.5))
    space.trainer(tmp_path, callback, logger=logger, log_every_n_steps=1).fit(space.module())
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    wandb.teardown()  # its service ends, and has written everything
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = wandb_history(path)
    rho = [row["reconstruction/rho_star"] for row in rows]
    assert rho == sorted(rho, reverse=True)
    assert [row["reconstruction/steps_left"] for row in rows] == [4, 3, 2, 1, 0]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2, 3, 4]
    for last in (rows[-1], summary):
        assert last["reconstruction/rho_star"] == pytest.approx(callback.bound.rho)
        assert last["reconstruction/rho_star"] <= callback.bound.rho
        assert last["reconstruction/leakage_bits"] >= callback.bound.leakage_bits
        assert last["privacy/epsilon"] >= callback.epsilon()


# ---- the figure ------------------------------------------------------------------------------------------------------


def accurate(space: Space) -> Any:
    model = space.module()
    model.validation_step = lambda batch, batch_idx: model.log("val_accuracy", 0.25 + 0.1 * model.trainer.current_epoch)
    return model


def test_a_figure_while_training_goes_on(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    path = tmp_path / "run.png"
    written: list[tuple[int, int]] = []

    class Spy(space.L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if path.exists():
                written.append((trainer.global_step, path.stat().st_mtime_ns))

    ours = report(space, None, figure=path, every_n_steps=4)
    callback = space.callback(certificate, floor_after(certificate, 22.5))
    space.trainer(tmp_path, callback, ours, Spy()).fit(accurate(space))
    assert written[0][0] == 4
    assert len({time for _, time in written}) == 5
    assert [point.step for point in ours.progress] == list(range(1, 23))
    assert [point.step for point in ours.progress if point.epsilon is not None] == [4, 8, 12, 16, 20, 22]
    assert [point.accuracy for point in ours.progress if point.accuracy is not None] == pytest.approx(
        [0.25, 0.35, 0.45]
    )
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour in ((0x1F, 0x5F, 0xA8), (0xC8, 0x64, 0x1A), (0x6B, 0x6B, 0x6B), (0x2E, 0x7D, 0x4F)):
        assert (pixels == colour).all(1).sum() > 50


def test_a_long_run_is_thinned(space: Space, certificate: SourceCertificate, tmp_path: Any, monkeypatch: Any) -> None:
    import opacus_reconbound.report.callback as module

    monkeypatch.setattr(module, "_POINTS", 10)
    ours = report(space, tmp_path / "report.html")
    space.trainer(tmp_path, space.callback(certificate), ours, max_epochs=5).fit(space.module())
    steps = [point.step for point in ours.progress]
    assert steps == sorted(set(steps))
    assert steps[-1] == 40
    assert 5 <= len(steps) <= 11


# ---- the page --------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags, attributes and text; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text.append(data.strip())


def trained_page(space: Space, certificate: SourceCertificate, tmp_path: Path, **options: Any) -> tuple[Any, Path]:
    callback = space.callback(certificate, floor_after(certificate, 5.5), **options)
    path = tmp_path / "out" / "report.html"
    space.trainer(tmp_path, callback, report(space, path)).fit(accurate(space))
    return callback, path


def test_the_page(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    callback, path = trained_page(space, certificate, tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    text = " ".join(page.text)
    assert "Training was stopped: the next step would breach the floor." in text
    assert f"{math.floor(callback.bound.rho * 1e3) / 1e3:.3f}" in page.text
    assert callback.bound.explain() in text
    assert certificate.digest in text
    assert "not compared with the certificate" in text
    assert callback.forecast.describe() in text
    epsilon = next(page.text[i - 1] for i, piece in enumerate(page.text) if piece.startswith("ε at"))
    assert callback.epsilon() <= float(epsilon) <= callback.epsilon() + 0.001
    # nothing is fetched, nothing runs
    assert {tag for tag, _ in page.found} & {"script", "link", "iframe", "object", "embed", "form", "base"} == set()
    for _, attributes in page.found:
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attributes)
    source = path.read_text(encoding="utf-8")
    assert "url(" not in source
    assert "@import" not in source
    image = next(attributes["src"] for tag, attributes in page.found if tag == "img")
    root = ET.fromstring(base64.b64decode((image or "").partition(",")[2]))  # noqa: S314 - our own
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20


def test_what_comes_from_outside_is_escaped(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    from dataclasses import replace

    evil = replace(certificate, assumptions=('<script>alert(1)</script> & "quotes"',))
    _, path = trained_page(space, evil, tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert not any(tag == "script" for tag, _ in page.found)
    assert '<script>alert(1)</script> & "quotes"' in page.text


def test_a_breach_is_said(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is breached since step 6"):
        callback, path = trained_page(space, certificate, tmp_path, on_breach="warn")
    assert f"Training ended by itself. The floor of {callback.min_rho:g} is breached." in path.read_text("utf-8")


def test_a_run_that_fails_has_its_page(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    model = accurate(space)
    model.on_train_batch_start = lambda batch, index: 1 / 0 if index == 3 else None
    with pytest.raises(ZeroDivisionError):
        space.trainer(tmp_path, space.callback(certificate), report(space, tmp_path / "a.html")).fit(model)
    assert re.search(r"<b>3</b><span>steps", (tmp_path / "a.html").read_text(encoding="utf-8"))


def test_reports_that_cannot_be(space: Space, certificate: SourceCertificate, tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="nothing to write"):
        report(space, None)
    with pytest.raises(InvalidValueError, match="names no page"):
        report(space, tmp_path / "report.txt")
    with pytest.raises(InvalidValueError, match="picture format"):
        report(space, None, figure=tmp_path / "report.txt")
    with pytest.raises(InvalidValueError, match="every_n_steps"):
        report(space, every_n_steps=0)
    with pytest.raises(InvalidValueError, match="the Trainer has none"):
        space.trainer(tmp_path, report(space, tmp_path / "a.html")).fit(space.module())


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def browse(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run a browser that can reach nothing but files."""
    return subprocess.run(
        [
            str(BROWSER),
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND"),
            f"--user-data-dir={tmp_path / 'profile'}",
            *arguments,
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed; the page is parsed above")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page(space: Space, certificate: SourceCertificate, tmp_path: Path, width: int) -> None:
    _, path = trained_page(space, certificate, tmp_path)
    picture = tmp_path / "shot.png"
    browse(tmp_path, f"--window-size={width},3000", f"--screenshot={picture}", path.as_uri())
    with Image.open(picture) as shot:
        pixels = np.asarray(shot.convert("RGB"))
    assert pixels.shape == (3000, width, 3)
    blue = np.abs(pixels.astype(int) - (0x1F, 0x5F, 0xA8)).max(2) < 32
    assert blue.sum() > 50  # the line of ρ*
    assert (pixels < 128).all(2).mean() > 0.005  # text
    inked = (pixels < 200).all(2).any(1)
    assert inked[:100].any()
    assert not inked[-100:].any()  # all of it fits
    assert not (pixels < 250).any(2)[:, -8:].any()  # nothing is cut off at the right


def test_the_callback_alone_loads_no_report(space: Space) -> None:
    code = (
        f"import sys, {space.ours.__name__}; print([n for n in sys.modules if n.startswith('opacus_reconbound.rep')])"
    )
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.strip().splitlines()[-1]
    assert "representations" in loaded
    assert "opacus_reconbound.report" not in loaded
