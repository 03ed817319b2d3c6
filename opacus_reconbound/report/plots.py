"""ρ* against the step: of a plan, and of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opacus_reconbound.errors import InvalidValueError

__all__ = ["plot_plan", "plot_run"]

_RHO = "ρ*, lower bound on any attack's relative RMSE"
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8641a", "#6b6b6b"


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
    """Draw ρ* against the step, the floor, and the last step that keeps it; the leakage on a second axis above.

    Returns:
        The path written.
    """
    figure, axes = _figure()
    axes.plot(steps, rho, color=_BLUE, linewidth=2, label="ρ* guaranteed")
    _floor(axes, min_rho, last_step)
    axes.set(xlabel="training step", ylabel=_RHO, title=title, ylim=(0, 1.02))
    second = axes.twinx()
    second.plot(steps, leakage_bits, color=_GREY, linewidth=1, linestyle=":", label="leakage")
    second.set_ylabel("γ, bits about one record")
    second.set_ylim(bottom=0)
    _legend(axes, second)
    return _save(figure, path)


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
    _legend(axes, second)
    return _save(figure, path)


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


def _legend(axes: Any, second: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    more, names = second.get_legend_handles_labels()
    axes.legend(handles + more, labels + names, loc="lower center", framealpha=0.9)


def _save(figure: Any, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    kinds = set(figure.canvas.get_supported_filetypes())
    if target.suffix.lstrip(".").lower() not in kinds:
        raise InvalidValueError(f"{target} has no picture format; use one of: {', '.join(sorted(kinds))}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=140)
    return target
