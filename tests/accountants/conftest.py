"""Fixtures: real Opacus engines of every accountant and mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engines import MODES, Training, make_training


@pytest.fixture
def training() -> Callable[..., Training]:
    return make_training


@pytest.fixture(params=["rdp+mi", "prv+mi"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=list(MODES))
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return MODES[request.param]
