"""Every example runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {"05_lightning_cli": ("jsonargparse", "docstring_parser", "typeshed_client")}  # jsonargparse[signatures]


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    for package in ("sklearn", "mlxtend", "lightning", *NEEDS.get(example.stem, ())):
        pytest.importorskip(package)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(example)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ρ*" in run.stdout
    assert not list(tmp_path.iterdir()), "an example left files behind"
