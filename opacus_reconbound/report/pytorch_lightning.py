"""``TrainingReport`` for ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning import Callback

from opacus_reconbound.report.callback import TrainingReportMixin

__all__ = ["TrainingReport"]


class TrainingReport(TrainingReportMixin, Callback):  # noqa: D101 - the mixin's
    __doc__ = TrainingReportMixin.__doc__
