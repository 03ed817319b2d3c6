"""Trainers in processes of their own: two that train together, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from spaces import BITS, NOISE, RATE

from opacus_reconbound.leakage.ledger import Ledger

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def start(script: str, *arguments: str) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *arguments],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> str:
    try:
        said = process.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("a process waits for the other\n" + process.communicate()[0])
    assert process.returncode == 0, said
    return str(said)


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_two_ranks(namespace: str, tmp_path: Path) -> None:
    finish(start("two_ranks.py", namespace, str(tmp_path)))
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for name, steps in (("stops together", 11), ("one generator", 24)):
        left, right = (rank[name] for rank in ranks)
        assert left["said"] == right["said"] == "finished"
        assert left["weights"] == right["weights"]
        for rank in (left, right):
            assert rank["updates"] == rank["steps"] == rank["global_step"] == steps
            assert rank["history"] == [[NOISE, RATE, steps]]
            assert rank["batch"] == 4.0  # of eight, on two processes
        assert left["sizes"] != right["sizes"]  # from different random streams
    for name, message in (
        ("each from all records", "each draws from all records"),
        ("ghost", "two backward passes a step"),
        ("injected", "Lightning can't inject a (distributed) sampler"),
    ):
        for rank in ranks:
            assert message in rank[name]["said"]
            assert rank[name]["updates"] == 0


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_killed_in_the_middle_and_resumed(namespace: str, tmp_path: Path) -> None:
    """The ledger holds every step that was taken; the noise of the resumed run is new, though its seed is not."""
    process = start("killed.py", namespace, str(tmp_path), "first")
    steps = tmp_path / "first.steps"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and (not steps.exists() or len(steps.read_text().split()) < 13):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    taken = len(steps.read_text().split())
    assert 13 <= taken < 30
    stored = max(tmp_path.glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    saved = int(stored.stem.partition("=")[2])
    assert 0 < saved <= taken
    before = Ledger(tmp_path / "ledger.jsonl").total_bits
    assert before >= taken * BITS * (1 - 1e-9)

    said = finish(start("killed.py", namespace, str(tmp_path), "second", str(stored)))
    assert "it was seeded anew" in said
    result = json.loads((tmp_path / "second.json").read_text())
    assert result["history"][0][:2] == [NOISE, RATE]
    assert result["steps"] == saved + result["updates"]  # of this trajectory
    # the floor allows for 38 steps of all that was ever taken; what the killed process had reserved counts as taken
    assert result["total"] <= 38.5 * BITS
    assert taken + result["updates"] <= 38
    assert result["total"] >= (taken + result["updates"]) * BITS * (1 - 1e-9)
    assert result["reason"] is not None
    noise = [(tmp_path / f"{name}.noise").read_text().split() for name in ("first", "second")]
    assert not set(noise[0]) & set(noise[1])
