"""Pictures are written whole, in the format of their name, with what they should show; errors come first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from opacus_reconbound.errors import InvalidValueError

pytest.importorskip("matplotlib")

from opacus_reconbound.report import plots

BLUE, ORANGE = (0x1F, 0x5F, 0xA8), (0xC8, 0x64, 0x1A)
GREEN = (0x2E, 0x7D, 0x4F)
BLUE_LINE, ORANGE_LINE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)  # matplotlib's first two
STEPS = list(range(0, 401, 10))
PLAN: dict[str, Any] = {
    "steps": STEPS,
    "rho": [0.95 - 0.001 * step for step in STEPS],
    "leakage_bits": [0.01 * step for step in STEPS],
}
RUN: dict[str, Any] = {
    "steps": STEPS,
    "rho": PLAN["rho"],
    "accuracy_steps": [50, 100, 200],
    "accuracy": [0.3, 0.6, 0.8],
}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def count(path: Path, colour: tuple[int, int, int]) -> int:
    return int((pixels(path) == colour).all(axis=2).sum())


def test_a_plan(tmp_path: Path) -> None:
    plain = plots.plot_plan(tmp_path / "plain.png", **PLAN)
    marked = plots.plot_plan(tmp_path / "new" / "marked.png", **PLAN, min_rho=0.75, last_step=200)
    assert plain == tmp_path / "plain.png"
    assert pixels(plain).shape == pixels(marked).shape == (630, 1050, 3)
    assert count(plain, BLUE) > 500
    assert count(marked, (0, 0, 0)) > count(plain, (0, 0, 0))


def test_comparisons(tmp_path: Path) -> None:
    errors = [("ours", 0.8, "least error", "any"), ("theirs", 0.9, "least error", "unbiased")]
    one = plots.plot_comparisons(tmp_path / "one.png", errors=errors[:1])
    both = plots.plot_comparisons(tmp_path / "both.png", errors=errors, successes=[("near", 0.4)])
    endless = plots.plot_comparisons(tmp_path / "inf.png", errors=[*errors[:1], ("x", math.inf, "least error", "any")])
    assert min(count(path, BLUE) for path in (one, both, endless)) > 500
    assert count(one, ORANGE) == count(endless, ORANGE) == 0
    assert count(both, ORANGE) > 500
    assert count(both, GREEN) > 500
    wide = plots.plot_comparisons(tmp_path / "wide.png", errors=[*errors[:1], ("far", 1e9, "least error", "any")])
    assert count(wide, BLUE) > 100
    plots.plot_comparisons(tmp_path / "none.png", errors=[])


def test_a_run(tmp_path: Path) -> None:
    path = plots.plot_run(tmp_path / "run.png", **RUN, min_rho=0.75, last_step=200)
    assert count(path, BLUE) > 500
    assert count(path, ORANGE) > 100
    nothing = plots.plot_run(tmp_path / "empty.png", steps=[], rho=[])
    assert count(nothing, ORANGE) < count(path, ORANGE)


def test_representations(tmp_path: Path) -> None:
    white = np.ones((8, 8))
    drawn = plots.plot_representations(
        tmp_path / "r.png",
        leakage_bits=[0, 1, 2],
        rho={"pixels": [0.9, 0.8, 0.7], "coarse": [0.8, 0.6, 0.5]},
        images={"original": [np.eye(8), 1 - np.eye(8)], "coarse": [white]},
    )
    assert count(drawn, BLUE_LINE) > 300
    assert count(drawn, ORANGE_LINE) > 300
    empty = plots.plot_representations(tmp_path / "e.png", leakage_bits=[], rho={}, images={})
    assert count(empty, BLUE_LINE) == 0


def test_infinite_leakage_can_be_drawn(tmp_path: Path) -> None:
    path = plots.plot_plan(
        tmp_path / "plan.png", steps=[0, 1, 2], rho=[0.9, 0.0, 0.0], leakage_bits=[0.0, math.inf, math.inf], last_step=0
    )
    assert count(path, BLUE) > 100


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.png", b"\x89PNG"),
        ("a.PNG", b"\x89PNG"),
        ("a.svg", b"<?xml"),
        ("a.pdf", b"%PDF"),
        ("a.jpg", b"\xff\xd8"),
        ("a.jpeg", b"\xff\xd8"),
        ("a.webp", b"RIFF"),
    ],
)
def test_formats(tmp_path: Path, name: str, start: bytes) -> None:
    path = plots.plot_plan(str(tmp_path / name), **PLAN)
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("name", ["plan", "plan.txt", "plan.pgf", "plan.", ".png"])
def test_no_picture_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match=r"names no picture format; use one of: \.png, \.svg"):
        plots.plot_plan(tmp_path / name, **PLAN)
    assert not list(tmp_path.iterdir())


def test_places_where_no_picture_can_be(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for name, match in (("folder.png", "is a folder"), ("file/plan.png", "cannot be written")):
        with pytest.raises(InvalidValueError, match=match):
            plots.plot_run(tmp_path / name, **RUN)


def test_an_interruption_leaves_no_half_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def interrupt(_: Any, file: Any, **__: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plots.plot_plan(tmp_path / "plan.png", **PLAN)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_open() -> None:
    """Pictures are made without pyplot, so a notebook's figures and backend stay as they are."""
    import sys

    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
