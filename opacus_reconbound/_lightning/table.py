"""The forecast as a table, where rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from opacus_reconbound._rounding import down3, three_digits
from opacus_reconbound.accountants import StepHook
from opacus_reconbound.certificates.certificate import ReconstructionBound
from opacus_reconbound.engine import Forecast

__all__ = ["forecast_rows", "print_table"]


def forecast_rows(found: Forecast, bound: ReconstructionBound, optimizer: Any, hook: StepHook) -> list[tuple[str, str]]:
    """The rows of the table.

    Args:
        found: the forecast.
        bound: at its start.
        optimizer: the private optimizer it is for.
        hook: that charges the optimizer's steps.

    Returns:
        Names and values; ρ* rounded down, γ (bits) rounded up.
    """
    planned = "no planned end" if found.steps is None else f"{found.steps:,}"
    rows = [
        ("sample rate q", f"{hook.sample_rate:.6g}"),
        ("noise multiplier σ", f"{hook.noise_multiplier(optimizer):.6g}"),
        ("steps planned", planned),
        ("leakage γ now", f"{three_digits(bound.leakage_bits, down=False):.3g} bits"),
        ("ρ* now", down3(bound.rho)),
    ]
    if found.rho is not None and found.leakage_bits is not None:
        rows += [
            ("leakage γ at the end", f"{three_digits(found.leakage_bits, down=False):.3g} bits"),
            ("ρ* at the end", down3(found.rho)),
        ]
    if found.min_rho is not None:
        reached = "not reached" if found.last_step is None else f"{found.last_step:,}"
        rows += [("floor on ρ*", f"{found.min_rho:g}"), ("last step within the floor", reached)]
    return rows


def print_table(title: str, rows: Sequence[tuple[str, str]]) -> bool:
    """Print a table of names and values; False, and nothing printed, where rich is not installed."""
    if importlib.util.find_spec("rich") is None:
        return False
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.ROUNDED, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in rows:
        table.add_row(Text(name), Text(value))  # as text: brackets are no markup
    Console(file=sys.stdout).print(table)
    return True
