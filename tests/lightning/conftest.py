"""Shared by the tests of the Lightning modules."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from spaces import CERTIFICATE, Space

from opacus_reconbound.certificates import SourceCertificate

NOISY = (
    "does not have many workers",
    "The number of training batches",
    "callbacks used to create the checkpoint need to be provided",
    "resuming from a checkpoint that ended before the epoch ended",
    "no pre-optimization state was saved",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lightning" in item.path.parts:
            for text in NOISY:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*{text}"))


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def space(request: pytest.FixtureRequest) -> Any:
    """One namespace: Lightning itself and our module for it."""
    lightning = importlib.import_module(request.param)
    ours = importlib.import_module(f"opacus_reconbound.{request.param.split('.')[0]}")
    return Space(lightning, ours)


@pytest.fixture
def certificate() -> SourceCertificate:
    """A certificate that is linear in the leakage: ρ*² = 0.9 − γ nats."""
    return CERTIFICATE
