"""The forecast as a table, where rich is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["print_table"]


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
