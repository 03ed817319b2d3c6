"""The Lightning callback that draws a run as it goes on, and writes its page at the end."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from opacus_reconbound import _validate
from opacus_reconbound._lightning.callback import ReconstructionBoundMixin
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.report import plots
from opacus_reconbound.report.page import Progress, check_page, draw_run, run_of, write_page

__all__ = ["TrainingReportMixin"]

_POINTS = 2_000  # on a curve; beyond, every other one is left out
_NAMES = ("opacus-reconbound", "opacus", "torch", "lightning", "pytorch-lightning")


class TrainingReportMixin:
    """Draws ρ* with its floor and forecast, γ, ε and accuracy as training goes on, and writes a page at the end.

    It reads the ``ReconstructionBoundCallback`` beside it, and needs the extra ``report`` (matplotlib). The page is
    one HTML file that fetches nothing. Where training fails, both are written as far as it came.

    Args:
        page: the page's file, such as ``"report.html"``; None for none.
        figure: a picture that is written again and again, such as ``"run.png"``; None for none.
        every_n_steps: how often.
        accuracy: the name of a logged metric in [0, 1]; by default the first with ``acc`` in its name, one of
            validation where there is one. It is read after each validation and each epoch.

    Raises:
        InvalidValueError: neither a page nor a figure, a name that is none, no matplotlib; when training starts, no
            ``ReconstructionBoundCallback``.
    """

    def __init__(
        self,
        page: str | os.PathLike[str] | None = "report.html",
        *,
        figure: str | os.PathLike[str] | None = None,
        every_n_steps: int = 50,
        accuracy: str | None = None,
    ) -> None:
        if page is None and figure is None:
            raise InvalidValueError("TrainingReport has nothing to write. Name a page, a figure, or both.")
        if importlib.util.find_spec("matplotlib") is None:
            raise InvalidValueError("TrainingReport needs matplotlib: pip install 'opacus-reconbound[report]'.")
        self.page = None if page is None else check_page(page)
        if figure is not None:
            plots.check_picture(figure)
        self.figure = None if figure is None else Path(figure)
        self.every_n_steps = _validate.integer("every_n_steps", every_n_steps, minimum=1)
        self.accuracy = accuracy
        self.progress: list[Progress] = []
        self._stride = 1
        self._callback: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the callback to read."""
        found = [each for each in trainer.callbacks if isinstance(each, ReconstructionBoundMixin)]
        if not found:
            raise InvalidValueError(
                "TrainingReport reads a ReconstructionBoundCallback, and the Trainer has none. Add one to its "
                "callbacks."
            )
        self._callback, self.progress, self._stride = found[0], [], 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note where the run stands; draw."""
        if not trainer.is_global_zero or self._callback is None or self._callback.accountant is None:
            return
        step = len(self._callback.accountant)
        if step % self._stride == 0:
            self._note(step)
        if self.figure is not None and step % self.every_n_steps == 0:
            self._draw()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the accuracy."""
        self._note_accuracy(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the accuracy."""
        self._note_accuracy(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Draw the last figure, write the page."""
        self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, as far as training came."""
        self._finish(trainer)

    def _note(self, step: int) -> None:
        bound = self._callback.bound
        if self.progress and self.progress[-1].step == step:
            return
        self.progress.append(Progress(step=step, rho=bound.rho, leakage_bits=bound.leakage_bits))
        if len(self.progress) > _POINTS:
            self._stride *= 2
            self.progress = [
                point
                for point in self.progress
                if point.step % self._stride == 0 or point.accuracy is not None or point.epsilon is not None
            ]

    def _amend(self, **values: Any) -> None:
        """Put values on the present step."""
        step = len(self._callback.accountant)
        self._note(step)
        self.progress[-1] = replace(self.progress[-1], **values)

    def _note_accuracy(self, trainer: Any) -> None:
        if not trainer.is_global_zero or self._callback is None or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        names = [self.accuracy] if self.accuracy else sorted((n for n in metrics if "acc" in n), key=_validation_first)
        if names and names[0] in metrics:
            value = float(metrics[names[0]])
            if math.isfinite(value):
                self._amend(accuracy=value)

    def _draw(self) -> None:
        self._amend(epsilon=self._callback.epsilon())
        if self.figure is not None:
            draw_run(self.figure, self._run())

    def _run(self) -> Any:
        return run_of(self._callback, self.progress, _versions())

    def _finish(self, trainer: Any) -> None:
        callback = self._callback
        if not trainer.is_global_zero or callback is None or callback.accountant is None or callback.forecast is None:
            return
        self._draw()
        if self.page is not None:
            write_page(self.page, self._run())


def _validation_first(name: str) -> tuple[bool, str]:
    return not name.startswith("val"), name


def _versions() -> dict[str, str]:
    found = {}
    for name in _NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
