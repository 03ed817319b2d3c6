"""Shared by the tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from scipy.stats import binom

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "golden.json").read_text())


def most_failures(repeats: int, level: float, *, chance: float = 1e-4) -> int:
    """The largest count of failures that a guarantee at ``level`` would exceed with probability below ``chance``."""
    return int(binom.ppf(1.0 - chance, repeats, level))


def nats(bits: float) -> float:
    return bits * math.log(2.0)
