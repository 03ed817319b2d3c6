"""ρ* against the step, of a plan and of a run; against the leakage, of several representations; beside other bounds."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_reconbound import _atomic
from opacus_reconbound._files import check_writable
from opacus_reconbound.errors import InvalidValueError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["check_picture", "plot_comparisons", "plot_plan", "plot_representations", "plot_run", "run_figure", "save"]

_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")
_RHO = "ρ*, lower bound on any attack's relative RMSE"
_BLUE, _ORANGE, _GREY, _GREEN = "#1f5fa8", "#c8641a", "#6b6b6b", "#2e7d4f"


def plot_plan(
    path: str | os.PathLike[str],
    *,
    steps: Sequence[float],
    rho: Sequence[float],
    leakage_bits: Sequence[float],
    min_rho: float | None = None,
    last_step: int | None = None,
    title: str = "Reconstruction bound of the planned run",
) -> Path:
    """Draw ρ* against the step, the floor, and the last step that keeps it; the leakage on a second axis.

    Returns:
        The path written.
    """
    figure, axes = _figure()
    axes.plot(steps, rho, color=_BLUE, linewidth=2, label="ρ* guaranteed")
    _floor(axes, min_rho, last_step)
    axes.set(xlabel="training step", ylabel=_RHO, title=title, ylim=(0, 1.02))
    second = axes.twinx()
    second.plot(steps, leakage_bits, color=_GREY, linewidth=1.2, linestyle="-.", label="leakage γ")
    second.set_ylabel("γ, bits about one record")
    second.set_ylim(bottom=0)
    _legend(figure, axes, second)
    return save(figure, path)


def plot_run(
    path: str | os.PathLike[str],
    *,
    steps: Sequence[float],
    rho: Sequence[float],
    accuracy_steps: Sequence[float] = (),
    accuracy: Sequence[float] = (),
    min_rho: float | None = None,
    last_step: int | None = None,
    title: str = "Private training run",
) -> Path:
    """Draw what a run logged: ρ* and accuracy against the step, the floor, and where training stopped.

    Returns:
        The path written.
    """
    figure, axes = _figure()
    axes.plot(steps, rho, color=_BLUE, linewidth=2, label="ρ* guaranteed")
    _floor(axes, min_rho, last_step)
    axes.set(xlabel="training step", ylabel=_RHO, title=title, ylim=(0, 1.02))
    second = axes.twinx()
    second.plot(accuracy_steps, accuracy, color=_ORANGE, marker="o", markersize=3, linewidth=1.5, label="test accuracy")
    second.set(ylabel="test accuracy", ylim=(0, 1.02))
    _legend(figure, axes, second)
    return save(figure, path)


def run_figure(
    *,
    steps: Sequence[float],
    rho: Sequence[float],
    leakage_bits: Sequence[float],
    epsilon: Sequence[tuple[float, float]] = (),
    accuracy: Sequence[tuple[float, float]] = (),
    forecast: Sequence[tuple[float, float]] = (),
    min_rho: float | None = None,
    last_step: int | None = None,
) -> Any:
    """Draw a run as it goes on: ρ* with its floor and forecast, and accuracy; below, γ and ε. Returns the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
    upper.plot(steps, rho, color=_BLUE, linewidth=2, label="ρ* guaranteed")
    if forecast:
        upper.plot(*zip(*forecast, strict=True), color=_BLUE, linewidth=1.2, linestyle="-.", label="forecast")
    if accuracy:
        upper.plot(
            *zip(*accuracy, strict=True), color=_ORANGE, marker="o", markersize=3, linewidth=1.5, label="accuracy"
        )
    _floor(upper, min_rho, last_step)
    upper.set(ylabel="ρ*" + (", accuracy" if accuracy else ""), ylim=(0, 1.02))
    lower.plot(steps, leakage_bits, color=_GREY, linewidth=1.5, label="leakage γ")
    lower.set(xlabel="training step", ylabel="γ, bits about one record")
    lower.set_ylim(bottom=0)
    second = lower.twinx()
    if epsilon:
        second.plot(*zip(*epsilon, strict=True), color=_GREEN, linewidth=1.2, linestyle="--", label="ε")
    second.set_ylabel("ε")
    second.set_ylim(bottom=0)
    handles, labels = upper.get_legend_handles_labels()
    for axes in (lower, second):
        more, names = axes.get_legend_handles_labels()
        handles, labels = handles + more, labels + names
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def plot_representations(
    path: str | os.PathLike[str],
    *,
    leakage_bits: Sequence[float],
    rho: Mapping[str, Sequence[float]],
    images: Mapping[str, Sequence[ArrayLike]],
    title: str = "What counts as a reconstruction",
) -> Path:
    """Draw ρ* against the leakage for several representations, and beside each what it keeps of some images.

    Args:
        path: of the picture.
        leakage_bits: γ, bits.
        rho: for each representation's name, ρ* at these leakages.
        images: rows of sample images, named: such as the originals, and what each representation keeps of them.
        title: over the curves.

    Returns:
        The path written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, columns = max(1, len(images)), max([1, *(len(row) for row in images.values())])
    figure = Figure(figsize=(7.5 + 0.75 * columns, max(4.5, 0.75 * rows)), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(1, 2, width_ratios=[6.0, 1.5 + 0.75 * columns])
    left, right = parts
    axes = left.add_subplot()
    axes.grid(alpha=0.25)
    for name, values in rho.items():
        axes.plot(leakage_bits, values, linewidth=2, label=name)
    axes.set(xlabel="leakage γ, bits about one record", ylabel=_RHO, title=title, ylim=(0, 1.02))
    if rho:
        axes.legend(frameon=False)
    grid = right.subplots(rows, columns, squeeze=False)
    for line, (name, pictures) in zip(grid, images.items(), strict=False):
        line[0].set_ylabel(name, rotation=0, horizontalalignment="right", verticalalignment="center")
        for cell, picture in zip(line, pictures, strict=False):
            cell.imshow(picture, cmap="gray", interpolation="nearest")
    for cell in grid.flat:
        cell.set(xticks=[], yticks=[], frame_on=False)
    return save(figure, path)


def plot_comparisons(
    path: str | os.PathLike[str],
    *,
    errors: Sequence[tuple[str, float, str, str]],
    successes: Sequence[tuple[str, float]] = (),
    title: str = "Bounds on reconstruction, one schedule",
) -> Path:
    """Draw bounds on the error on the axis of ρ*, with the best guess without the model at 1, and bounds on success.

    Args:
        path: of the picture.
        errors: name, error over that of the best guess, what it bounds ("least error" or another) and which attacks
            ("any" or "unbiased"); an infinite one is named and has no bar.
        successes: name and probability.
        title: over the picture.

    Returns:
        The path written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, 1.6 + 0.5 * (len(errors) + len(successes))), layout="constrained")
    FigureCanvasAgg(figure)
    rows = [max(1, len(errors)), *([len(successes)] if successes else [])]
    parts = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False)[:, 0]
    upper = parts[0]
    kinds = {
        ("least error", "any"): (_BLUE, "least error of any attack"),
        ("least error", "unbiased"): (_ORANGE, "of unbiased attacks only"),
    }
    labelled: set[str] = set()
    for place, (_, ratio, bounds, attacks) in enumerate(errors):
        colour, label = kinds.get((bounds, attacks), (_GREY, "attained without the model"))
        if math.isfinite(ratio):
            upper.barh(place, ratio, color=colour, height=0.6, label="" if label in labelled else label)
            labelled.add(label)
    upper.set_yticks(range(len(errors)), [name if math.isfinite(r) else f"{name} (∞)" for name, r, _, _ in errors])
    upper.axvline(1.0, color="black", linewidth=1, linestyle="--", label="best guess without the model")
    upper.set(xlabel="relative RMSE")
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    upper.set_title(title)
    if any(1e3 < ratio < math.inf for _, ratio, _, _ in errors):
        upper.set_xscale("symlog", linthresh=1.0)
    if successes:
        parts[1].barh(range(len(successes)), [value for _, value in successes], color=_GREEN, height=0.6)
        parts[1].set_yticks(range(len(successes)), [name for name, _ in successes])
        parts[1].set(xlabel="largest probability of success, any attack", xlim=(0, 1))
    for axes in parts:
        axes.invert_yaxis()
        axes.grid(alpha=0.25, axis="x")
        axes.set_axisbelow(True)
    return save(figure, path)


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(alpha=0.25)
    return figure, axes


def _floor(axes: Any, min_rho: float | None, last_step: int | None) -> None:
    if min_rho is not None:
        axes.axhline(min_rho, color="black", linewidth=1, linestyle="--", label=f"floor {min_rho:g}")
    if last_step is not None:
        axes.axvline(last_step, color="black", linewidth=1, linestyle=":", label=f"last step {last_step:,}")


def _legend(figure: Any, axes: Any, second: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    more, names = second.get_legend_handles_labels()
    # below the axes, where no line is
    figure.legend(handles + more, labels + names, loc="outside lower center", ncols=4, frameon=False)


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse a path that names no picture or cannot be written, before anything is computed."""
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise InvalidValueError(f"{target} names no picture format; use one of: {', '.join(_FORMATS)}.")
    check_writable(target, "the picture's file, such as plan.png")


def save(figure: Any, path: str | os.PathLike[str]) -> Path:
    """Write a figure in the format of the path's suffix; a reader sees the old picture or the whole new one."""
    target = Path(path)
    check_picture(target)
    content = io.BytesIO()
    figure.savefig(content, dpi=140, format=target.suffix[1:].lower())
    _atomic.write_bytes(target, content.getvalue())
    return target
