"""What each rank does in test_ranks.py; started by torchrun or by Fabric, it writes into the folder it is given."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from opacus_reconbound import Pixels, certify
from opacus_reconbound.certificates import kernel
from opacus_reconbound.certificates.checkpoint import Checkpoint
from opacus_reconbound.certificates.ranks import Ranks, shared_among
from opacus_reconbound.errors import CertificateError, DataError


def main(launcher: str, folder: Path) -> None:
    if launcher == "fabric":
        from lightning.fabric import Fabric

        Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
    else:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = Ranks.of_default_group()
    assert ranks.size == 2
    assert distributed.get_backend() == "gloo"
    torch.set_num_threads(1 + ranks.rank)  # nothing may depend on it
    records = np.load(folder / "d.npy")
    options: dict[str, Any] = {"representation": Pixels((0, 16)), "pairs": [(8, 1.6)]}
    reference, estimation = records[:200], records[200:]

    found = certify(reference, estimation, designs="all", **options, checkpoint=folder / f"{launcher}.partial")
    (folder / f"{launcher}.{ranks.rank}.json").write_text(found.to_json())
    again = certify(reference, estimation, designs="all", **options, checkpoint=folder / f"{launcher}.partial")
    assert again == found
    if launcher == "fabric":
        return

    # every rank computed its own share only, and both lie in the sums
    tile, kernel._TILE = kernel._TILE, 32
    calls = []
    costs = kernel.costs
    kernel.costs = lambda *args: calls.append(0) or costs(*args)
    z = torch.from_numpy(records[:500].reshape(500, -1).astype(np.float32) / 50)
    ladder, weights = kernel.KernelLadder.plan((0.8, 0.4, 0.3)), torch.rand(3, 500, generator=torch.manual_seed(0))
    alone = kernel.pair_sums(z, weights, ladder), kernel.log_kernel_means(z, z[:90], weights[:, :90], ladder, chunk=32)
    tiles, chunks = 16 * 17 // 2, 16
    assert len(calls) == tiles + chunks
    calls.clear()
    with shared_among(ranks):
        both = (
            kernel.pair_sums(z, weights, ladder),
            kernel.log_kernel_means(z, z[:90], weights[:, :90], ladder, chunk=32),
        )
    assert 0.4 * (tiles + chunks) < len(calls) < 0.6 * (tiles + chunks)
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
    kernel._TILE, kernel.costs = tile, costs

    # other records, another order, other options, other weights: refused on every rank, and the group is still of use
    class Scaled(Pixels):
        def forward(self, records: torch.Tensor) -> torch.Tensor:
            return super().forward(records) * (1.0 + 0.5 * ranks.rank)

    samples = {"reference": reference, "estimation": estimation}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"estimation": estimation[: 400 + ranks.rank]}, r"Rank 1 .* different: estimation records\."),
        ({"reference": reference[:: 1 - 2 * ranks.rank]}, r"Rank 1 .* different: reference records\."),
        ({"seed": ranks.rank}, r"Rank 1 .* different: seed \(0 there, 1 here\)"),
        ({"representation": Scaled((0, 16))}, "Rank 1 maps the same records to other vectors than rank 0"),
    ]
    for change, message in changes:
        with pytest.raises(DataError, match=message):
            certify(**(samples | options | change))
    with pytest.raises(CertificateError, match=r"different: seed \(0 there, 5 here\)"):  # rank 0's file
        certify(reference, estimation, designs="all", **options, seed=5, checkpoint=folder / f"{launcher}.partial")
    assert Checkpoint(None, {}, ranks).put("x", ranks.rank) == 0  # rank 0 decides

    if ranks.rank == 0:  # one rank alone, while the other does something else
        assert certify(reference, estimation, designs="all", **options, distributed=False) == found
    distributed.barrier()
    assert ranks.texts(f"rank {ranks.rank} γ") == ["rank 0 γ", "rank 1 γ"]
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
