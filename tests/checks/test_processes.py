"""Two real processes (gloo) that train together; what they do and check is in ``two_processes.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.skipif(sys.platform == "win32", reason="gloo meets through a file here")
def test_two_processes(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "two_processes.py"), str(rank), str(tmp_path / "store")],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=240)[0])
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join([*said, "a process waits for the other"]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [text.strip().splitlines()[-1] for text in said] == ["done", "done"], "\n".join(said)
