"""Two processes give the certificate of one, to the last byte, whoever starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from opacus_reconbound import Pixels, certify
from opacus_reconbound.certificates import kernel
from opacus_reconbound.certificates.ranks import Ranks, current_ranks, shared_among

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("two_ranks.py"))
# more than one tile of estimation records, with little work in each
RECORDS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:1300]


@pytest.mark.parametrize("launcher", ["torchrun", "fabric"])
def test_two_processes_give_the_certificate_of_one(launcher: str, tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", RECORDS)
    expected = certify(
        RECORDS[:200], RECORDS[200:], designs="all", representation=Pixels((0, 16)), pairs=[(8, 1.6)]
    ).to_json()
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if launcher == "torchrun" else []
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *start, SCRIPT, launcher, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        assert (tmp_path / f"{launcher}.{rank}.json").read_text() == expected


def test_a_process_alone_needs_no_group() -> None:
    ranks = Ranks.of_default_group()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert current_ranks() == ranks
    tensor = torch.arange(3.0)
    ranks.broadcast(tensor, 0)
    ranks.add_up(tensor)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    assert ranks.texts("α") == ["α"]
    with shared_among(Ranks(1, 4)):
        assert [index for index in range(9) if current_ranks().owns(index)] == [1, 5]
    assert current_ranks().size == 1


@pytest.mark.parametrize("tiles", [0, 1, 2, 3, 23, 47, 48, 49, 86, 400])
def test_groups_hold_every_row_once_and_are_of_one_size(tiles: int) -> None:
    groups = kernel._groups(tiles)
    assert sorted(row for group in groups for row in group) == list(range(tiles))
    work = [sum(tiles - row for row in group) for group in groups]
    assert all(work)
    if tiles >= 400:
        assert max(work) < 1.15 * sum(work) / len(work)
