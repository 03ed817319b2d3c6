"""A training run on one page: an HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import html
import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opacus_reconbound import _atomic
from opacus_reconbound._files import check_writable
from opacus_reconbound._rounding import down3
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.engine import Forecast
from opacus_reconbound.errors import InvalidValueError
from opacus_reconbound.report import plots

__all__ = ["Progress", "Run", "check_page", "draw_run", "run_of", "write_page"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stood after a step.

    Attributes:
        step: steps on the account.
        rho: ρ*.
        leakage_bits: γ.
        epsilon: ε, where it was computed.
        accuracy: where it was logged.
    """

    step: int
    rho: float
    leakage_bits: float
    epsilon: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a page says of a run.

    Attributes:
        certificate: of the source.
        bound: at the end.
        forecast: from the start.
        progress: in the order of the steps.
        history: runs (noise multiplier, sample rate, steps) of the account.
        steps: on the account.
        epsilon: at ``delta``, or None.
        delta: δ.
        stopping_reason: or None.
        checks: what was compared, and what could not be.
        on_breach: what was to happen at the floor.
        versions: of the libraries, by name.
    """

    certificate: SourceCertificate
    bound: ReconstructionBound
    forecast: Forecast
    progress: Sequence[Progress]
    history: Sequence[tuple[float, float, int]]
    steps: int
    epsilon: float | None
    delta: float | None
    stopping_reason: str | None
    checks: Sequence[str]
    on_breach: Literal["stop", "raise", "warn"]
    versions: dict[str, str]


def draw_run(target: str | os.PathLike[str] | io.BytesIO, run: Run, *, format: str | None = None) -> None:
    """Draw ρ* with its floor and forecast, γ, ε, and accuracy where there is one, against the step."""
    figure = plots.run_figure(
        steps=[point.step for point in run.progress],
        rho=[point.rho for point in run.progress],
        leakage_bits=[point.leakage_bits for point in run.progress],
        epsilon=[(point.step, point.epsilon) for point in run.progress if point.epsilon is not None],
        accuracy=[(point.step, point.accuracy) for point in run.progress if point.accuracy is not None],
        forecast=_forecast_curve(run),
        min_rho=run.forecast.min_rho,
        last_step=run.forecast.last_step,
    )
    if isinstance(target, io.BytesIO):
        figure.savefig(target, format=format)
    else:
        plots.save(figure, target)


def _forecast_curve(run: Run) -> list[tuple[float, float]]:
    """ρ* from the last step drawn, at the present rate of leakage: to the planned end, or past the floor."""
    end, bits = run.forecast.steps, run.forecast.leakage_bits
    if end is None or bits is None or not run.progress:
        return []
    last = run.progress[-1]
    if last.step >= end or bits <= last.leakage_bits:
        return []
    drawn = 1.0
    if run.forecast.last_step is not None and run.on_breach != "warn":
        # what comes long after the stop would leave the run itself no room
        drawn = min(1.0, max(0.0, (2 * run.forecast.last_step - last.step) / (end - last.step)))
    points = [drawn * i / 100 for i in range(101)] if drawn > 0 else []
    return [
        (
            last.step + t * (end - last.step),
            run.certificate.bound(last.leakage_bits + t * (bits - last.leakage_bits)).rho,
        )
        for t in points
    ]


def check_page(path: str | os.PathLike[str]) -> Path:
    """Refuse a path that is no page or cannot be written, before training."""
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InvalidValueError(f"{target} names no page; use a name such as report.html.")
    check_writable(target, "the report's file, such as report.html")
    return target


def write_page(path: str | os.PathLike[str], run: Run) -> Path:
    """Write the page; nothing in it is fetched from anywhere, and nothing in it runs.

    Returns:
        The path written.
    """
    target = check_page(path)
    picture = io.BytesIO()
    draw_run(picture, run, format="svg")
    _atomic.write_text(target, _page(run, base64.b64encode(picture.getvalue()).decode()))
    return target


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 54rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.lead { font-size: 1.1rem; } .figures { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
.figure { border: 1px solid #ccc; border-radius: .5rem; padding: .6rem 1rem; min-width: 8rem; }
.figure b { display: block; font-size: 1.6rem; } .figure span { color: #555; font-size: .85rem; }
img { width: 100%; max-width: 720px; height: auto; } table { border-collapse: collapse; }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.about td:first-child { width: 11rem; overflow-wrap: normal; }
footer { margin-top: 2rem; color: #555; font-size: .85rem; }
@media (max-width: 36rem) { .figure { flex: 1 1 8rem; min-width: 0; } ul { padding-left: 1.2rem; }
  .about td { display: block; padding-right: 0; } .about td:first-child { width: auto; padding-bottom: 0; color: #555; }
  .about td + td { padding-top: 0; padding-bottom: .5rem; } }
@media print { body { margin: 0; } }
"""


def _page(run: Run, picture: str) -> str:
    certificate, bound = run.certificate, run.bound
    floor = run.forecast.min_rho
    figures = [
        (down3(bound.rho), "ρ* guaranteed" + ("" if floor is None else f", floor {floor:g}")),
        (_up(bound.leakage_bits), "bits about one record, at most (γ)"),
        *(
            [(_up(run.epsilon), f"ε at δ = {run.delta:.2g}")]
            if run.epsilon is not None and run.delta is not None
            else []
        ),
        (f"{run.steps:,}", "steps"),
    ]
    history = [(f"{sigma:g}", f"{q:.6g}", f"{steps:,}") for sigma, q, steps in run.history[:50]]
    if len(run.history) > 50:
        history.append((f"and {len(run.history) - 50:,} more", "", f"{sum(n for _, _, n in run.history[50:]):,}"))
    outcome = (
        "Training ended by itself." if run.stopping_reason is None else f"Training was stopped: {run.stopping_reason}."
    )
    breached = floor is not None and bound.rho < floor
    if breached:
        outcome += f" The floor of {floor:g} is breached."
    about = [
        ("digest", certificate.digest),
        ("representation", f"{certificate.representation.name} {certificate.representation.parameters}"),
        ("shape of a record", str(tuple(certificate.representation.record_shape))),
        ("records", f"{certificate.reference.n:,} reference, {certificate.estimation.n:,} estimation"),
        ("confidence", f"{bound.confidence:g}"),
        ("ρ* relative to", bound.normaliser),
        ("ρ* at zero leakage", down3(certificate.highest_rho)),
        *(("assumption", text) for text in certificate.assumptions),
    ]
    settings = [
        ("floor", "none" if floor is None else f"{floor:g}"),
        ("at the floor", run.on_breach),
        *run.versions.items(),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Private training: reconstruction bound</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Private training: reconstruction bound</h1>
<p class="lead">{_text(outcome)}</p>
<div class="figures">{"".join(_figure(value, name) for value, name in figures)}</div>
<p>{_text(bound.explain())}</p>
<p><img alt="ρ* against the training step" src="data:image/svg+xml;base64,{picture}"></p>
<h2>Forecast from the start</h2>
<p>{_text(run.forecast.describe(on_breach=run.on_breach))}</p>
<h2>What was charged</h2>
{_table(history, ("noise multiplier σ", "sample rate q", "steps"))}
<h2>What was checked</h2>
<ul>{"".join(f"<li>{_text(check)}</li>" for check in run.checks)}</ul>
<h2>Certificate</h2>
{_table(about, style="about")}
<h2>Settings</h2>
{_table(settings, style="about")}
<footer>ρ* is rounded down, γ and ε are rounded up.</footer>
</body>
</html>
"""


def _text(value: object) -> str:
    return html.escape(str(value))


def _figure(value: str, name: str) -> str:
    return f'<div class="figure"><b>{_text(value)}</b><span>{_text(name)}</span></div>'


def _table(rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = (), *, style: str = "plain") -> str:
    head = f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr>" if header else ""
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table class="{style}">{head}{body}</table>'


def _up(value: float) -> str:
    return "∞" if math.isinf(value) else f"{math.ceil(value * 1e3) / 1e3:.3f}"


def run_of(callback: Any, progress: Sequence[Progress], versions: dict[str, str]) -> Run:
    """What a page says of a run, from the callback that watched it."""
    accountant = callback.accountant
    return Run(
        certificate=callback.certificate,
        bound=callback.bound,
        forecast=callback.forecast,
        progress=tuple(progress),
        history=tuple(accountant.history),
        steps=len(accountant),
        epsilon=callback.epsilon() if len(accountant) else None,
        delta=callback.delta,
        stopping_reason=callback.stopping_reason,
        checks=callback.checks,
        on_breach=callback.on_breach,
        versions=versions,
    )
