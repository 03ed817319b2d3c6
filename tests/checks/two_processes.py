"""One of two gloo processes; run as ``python two_processes.py RANK STORE``. Prints ``done`` where all holds."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.checks import Finding, guard, inspect, keep_empty_batches
from opacus_reconbound.errors import AccountingError, ReconstructionBudgetExceeded

RANK = int(sys.argv[1])
NUMBERS = torch.arange(120.0)
RECORDS = TensorDataset(torch.cat([NUMBERS[:, None], torch.randn(120, 4)], dim=1), torch.arange(120) % 3)


def everyone(value: Any) -> list[Any]:
    values = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values


def raises(kind: type[Exception], text: str, action: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        action()


class Run:
    """A private model of two processes; seeds differ unless told."""

    def __init__(self, *, batch: int = 80, seed: int = 0, wrap: Any = None, keep: bool = True, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        module = (wrap or DifferentiallyPrivateDistributedDataParallel)(self.net)
        torch.manual_seed(seed)
        self.engine = PrivacyEngine(accountant="rdp+mi")
        made = self.engine.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(*RECORDS.tensors), batch_size=batch),
            noise_multiplier=1.0,
            **{"max_grad_norm": 1.0, **options},
        )
        self.module, self.optimizer, *criterion, loader = made
        self.criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        self.loader = keep_empty_batches(loader) if keep else loader

    def guarded(self, loader: Any = None, **options: Any) -> Any:
        return guard(self.engine, self.module, self.optimizer, self.loader if loader is None else loader, **options)

    def inspect(self) -> tuple[Finding, ...]:
        return inspect(self.engine, self.module, self.optimizer, self.loader)

    def codes(self) -> list[str]:
        return [finding.code for finding in self.inspect() if finding.severity == "error"]

    def epoch(self, loader: Any = None) -> int:
        records = 0
        for x, y in self.guarded(loader):
            self.optimizer.zero_grad()
            self.criterion(self.module(x), y).backward()
            self.optimizer.step()
            records += len(x)
        return records

    def weights(self) -> list[Any]:
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in self.module.parameters()]
        return [w.detach().tolist() for w in whole]


def agrees_and_halts_together(**options: Any) -> None:
    run = Run(seed=RANK, **options)
    assert run.codes() == [], run.inspect()
    for _ in range(2):
        run.epoch()
    account = run.engine.accountant
    assert account.history == [(1.0, 1.0 / len(run.loader), 2 * len(run.loader))], account.history
    assert len(set(everyone(account.charged_bits))) == 1
    left, right = everyone(run.weights())
    assert left == right
    q = run.optimizer.step_hook.sample_rate
    account.budget_bits = account.leakage_after(noise_multiplier=1.0, sample_rate=q, steps=1)
    steps = len(account)

    def train() -> None:
        while True:
            run.epoch()

    raises(ReconstructionBudgetExceeded, "above the budget", train)  # on both, and neither waits for the other
    assert everyone(len(account)) == [steps + 1, steps + 1]
    left, right = everyone(run.weights())
    assert left == right


def noise_is_sigma_times_what_one_record_moves(**options: Any) -> None:
    """Measured on the combined gradient: one record on process 0, none on process 1; then noise alone."""
    run = Run(seed=RANK, **options)

    def gradient(records: int, noise_multiplier: float) -> torch.Tensor:
        run.optimizer.noise_multiplier = noise_multiplier
        run.optimizer.zero_grad()
        x = 1e5 * torch.ones(records, 5)
        with torch.no_grad():
            y = run.module(x).argmin(1)  # so that the gradient is large, and clipped
        run.criterion(run.module(x), y).backward()
        run.optimizer.step()
        grads = [p.grad for p in run.optimizer.params]
        return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads])

    moved = float(gradient(1 if RANK == 0 else 0, 0.0).norm())
    noise = torch.cat([gradient(0, 3.0) for _ in range(30)])  # 1,170 numbers: known to about 2 %
    assert moved > 0
    assert abs(float(noise.std()) / (3.0 * moved) - 1.0) < 0.1, (float(noise.std()), moved)


def shows_what_identical_seeds_do() -> None:
    run = Run(seed=5)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    mine = [[order[RANK::2].tolist().index(i) for i in batch] for batch in run.loader.batch_sampler]
    first, second = everyone(mine)
    assert first == second  # the record at one place of one process enters when the one at that place of the other does
    torch.manual_seed(5)
    assert run.codes() == ["ranks_share_randomness"], run.inspect()
    raises(AccountingError, "torch.manual_seed(seed + rank)", run.guarded)


def shows_empty_batches_left_out() -> None:
    run = Run(batch=2, seed=RANK, keep=False)
    assert len(run.loader) == 60
    taken = everyone(len(list(run.loader)))
    assert max(taken) < 60  # some were left out,
    assert taken[0] != taken[1]  # and not the same number
    assert run.codes() == ["empty_batches_left_out"], run.inspect()
    run.loader = keep_empty_batches(run.loader)
    assert isinstance(run.loader, DPDataLoader)
    assert run.loader.sample_rate == run.loader.batch_sampler.sample_rate == 1 / 60
    assert keep_empty_batches(run.loader) is run.loader
    sizes = [len(x) for x, _ in run.loader]
    assert len(sizes) == 60
    assert 0 in sizes
    assert run.codes() == []
    run.epoch()
    assert run.engine.accountant.history == [(1.0, 1 / 60, 60)]
    left, right = everyone(run.weights())
    assert left == right


def shows_models_that_part() -> None:
    run = Run(seed=RANK, wrap=lambda net: net, keep=False)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.module(x), y).backward()
        run.optimizer.step()
    left, right = everyone(run.weights())
    assert left != right
    assert run.codes() == ["sampler_not_distributed", "gradients_not_combined"], run.inspect()


def shows_records_of_several_processes() -> None:
    run = Run(seed=RANK, poisson_sampling=False, keep=False)
    drawn = [x[:, 0].int().tolist() for x, _ in run.loader]
    assert everyone(drawn)[0] == everyone(drawn)[1]  # the same eighty records on both: each enters one sum twice
    assert run.optimizer.expected_batch_size == 30.0  # where one sum of both was expected to have sixty
    assert run.codes() == ["not_poisson"], run.inspect()
    raises(AccountingError, "disjoint cannot be seen", lambda: run.guarded(batches="per_pass"))
    steps = 0
    run.loader = DPDataLoader.from_data_loader(run.loader)  # Poisson, and each process from all records
    left, right = everyone([x[:, 0].int().tolist() for x, _ in run.loader])
    assert any(set(a) & set(b) for a, b in zip(left, right, strict=True))
    assert run.codes() == ["sampler_not_distributed"], run.inspect()
    assert steps == len(run.engine.accountant)


def shows_processes_that_disagree() -> None:
    run = Run(seed=RANK)
    run.optimizer.noise_multiplier = 1.0 + RANK
    assert run.codes() == ["ranks_disagree"], run.inspect()
    run.optimizer.noise_multiplier = 1.0
    run.engine.accountant.budget_bits = 1.0 + RANK
    assert run.codes() == ["ranks_disagree"], run.inspect()
    raises(AccountingError, "would part", run.guarded)


def splits_logical_batches() -> None:
    """Processes have different numbers of pieces and the same number of steps."""
    run = Run(seed=RANK)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer) as loader:
        run.epoch(loader)
    assert run.engine.accountant.history == [(1.0, 0.5, 2)]
    left, right = everyone(run.weights())
    assert left == right


def shards() -> None:
    init_device_mesh("cpu", (2,))
    options = {"wrap": FSDP2Wrapper, "grad_sample_mode": "ghost_fsdp"}
    agrees_and_halts_together(**options)
    noise_is_sigma_times_what_one_record_moves(**options)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2)
    torch.set_num_threads(1)
    agrees_and_halts_together()
    agrees_and_halts_together(grad_sample_mode="ghost")
    agrees_and_halts_together(clipping="per_layer", max_grad_norm=[1.0] * 4)
    noise_is_sigma_times_what_one_record_moves()
    noise_is_sigma_times_what_one_record_moves(grad_sample_mode="ghost")
    splits_logical_batches()
    shows_what_identical_seeds_do()
    shows_empty_batches_left_out()
    shows_models_that_part()
    shows_records_of_several_processes()
    shows_processes_that_disagree()
    shards()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    print("done")


if __name__ == "__main__":
    main()
