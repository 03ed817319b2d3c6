"""Ways in which Opacus's accounting and what runs part: each is first shown on a real engine, then refused or charged.

S1 to S17 are the names of the faults in the documentation's table.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from engines import Training, make_training
from opacus.accountants import create_accountant
from opacus.data_loader import DPDataLoader
from opacus.schedulers import LambdaGradClip
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.checks import guard, hooks_of, inspect, require_private_run
from opacus_reconbound.errors import AccountingError
from opacus_reconbound.leakage import step_charge, step_leakage
from opacus_reconbound.leakage.gaussian import realised_sample_rate

HUGE = 1e6  # makes every gradient clip


def codes(run: Training, loader: Any = None, **kwargs: Any) -> set[str]:
    findings = inspect(run.engine, run.module, run.optimizer, loader or run.loader, **kwargs)
    return {finding.code for finding in findings if finding.severity == "error"}


def guarded(run: Training, loader: Any = None, **kwargs: Any) -> Any:
    return guard(run.engine, run.module, run.optimizer, loader or run.loader, **kwargs)


def summed_gradient(run: Training, x: torch.Tensor, y: torch.Tensor, *, criterion: Any = None) -> float:
    """The l2 norm of the clipped sum over one batch, before noise: what one record adds when x is one record."""
    kept: list[float] = []
    add_noise = run.optimizer.add_noise

    def spy() -> None:
        kept.append(math.sqrt(sum(float(p.summed_grad.square().sum()) for p in run.optimizer.params)))
        add_noise()

    run.optimizer.add_noise = spy
    hook, run.optimizer.step_hook = run.optimizer.step_hook, None
    run.optimizer.zero_grad()
    (criterion or run.criterion)(run.module(x), y).backward()
    run.optimizer.step()
    run.optimizer.step_hook, run.optimizer.add_noise = hook, add_noise
    run.optimizer.zero_grad()
    return kept[0]


def noise_scale(run: Training) -> float:
    """The standard deviation of the noise that a step adds, measured on an empty sum."""
    kept: list[torch.Tensor] = []
    hook, run.optimizer.step_hook = run.optimizer.step_hook, None
    for _ in range(60):
        for p in run.optimizer.params:
            p.summed_grad = torch.zeros_like(p)
        run.optimizer.add_noise()
        kept += [p.grad.flatten().clone() for p in run.optimizer.params]
        run.optimizer.zero_grad()
    run.optimizer.step_hook = hook
    return float(torch.cat(kept).std())


def record(scale: float = HUGE) -> tuple[torch.Tensor, torch.Tensor]:
    return scale * torch.ones(1, 5), torch.zeros(1, dtype=torch.long)


# -- S1, S2: two copies of the clipping norm ---------------------------------------------------------------------------


def test_s1_a_clip_scheduler_with_ghost_clipping() -> None:
    run = make_training("rdp+mi", grad_sample_mode="ghost")
    run.epoch(list(run.loader)[:1])
    assert codes(run) == set()
    LambdaGradClip(run.optimizer, scheduler_function=lambda _: 0.25)
    assert summed_gradient(run, *record()) == pytest.approx(1.0, rel=1e-3)  # still clipped at 1
    assert noise_scale(run) == pytest.approx(0.25, rel=0.05)  # and the noise is a quarter of what is accounted
    assert codes(run) == {"clip_norms_differ"}
    before = run.parameters()
    with pytest.raises(AccountingError, match=r"max_grad_norm went from 1 to 0\.25.*guard"):
        run.epoch()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    run.epoch(guarded(run))
    assert run.engine.accountant.history == [(1.0, 0.2, 1), (0.25, 0.2, 5)]


def test_s1_a_clip_scheduler_with_per_layer_clipping() -> None:
    run = make_training("rdp+mi", clipping="per_layer", max_grad_norm=[1.0] * 4)
    run.epoch()
    LambdaGradClip(run.optimizer, scheduler_function=lambda _: 0.25)
    assert summed_gradient(run, *record()) > 1.4  # the layers that get a gradient are clipped at 1 each
    scale = noise_scale(run)
    assert scale == pytest.approx(0.5, rel=0.05)  # the scheduler began at the norm of all layers, which is 2
    findings = inspect(run.engine, run.module, run.optimizer, run.loader)
    assert [finding.severity for finding in findings if finding.code == "clip_norms_differ"] == ["warning"]
    run.epoch()
    assert run.engine.accountant.history == [(1.0, 0.2, 5), (0.25, 0.2, 5)]


def test_s1_a_clip_scheduler_with_flat_clipping_is_right() -> None:
    run = make_training("rdp+mi")
    LambdaGradClip(run.optimizer, scheduler_function=lambda _: 0.25)
    assert summed_gradient(run, *record()) == pytest.approx(0.25, rel=1e-3)
    assert noise_scale(run) == pytest.approx(0.25, rel=0.05)
    assert codes(run) == set()
    run.epoch()
    assert run.engine.accountant.history == [(1.0, 0.2, 5)]


def test_s2_a_second_make_private_on_a_wrapped_ghost_module() -> None:
    first = make_training("rdp+mi", grad_sample_mode="ghost", max_grad_norm=10.0)
    module, optimizer, criterion, loader = first.engine.make_private(
        module=first.module,
        optimizer=first.optimizer,
        data_loader=first.loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    run = Training(first.engine, module, optimizer, loader, criterion)
    assert summed_gradient(run, *record()) == pytest.approx(10.0, rel=1e-3)
    assert noise_scale(run) == pytest.approx(1.0, rel=0.05)
    assert codes(run) == {"clip_norms_differ"}
    run.epoch(guarded(run))
    assert run.engine.accountant.history == [(pytest.approx(0.1), 0.2, 5)]


# -- S3, S4: adaptive clipping -----------------------------------------------------------------------------------------


def test_s3_the_adaptive_engine_does_not_clip() -> None:
    engine = PrivacyEngineAdaptiveClipping(accountant="rdp+mi")
    run = make_training("", engine=engine, grad_sample_mode="ghost", target_unclipped_quantile=0.5)
    x, y = torch.randn(50, 5), torch.zeros(50, dtype=torch.long)
    x[0] = HUGE
    assert summed_gradient(run, x, y) > 1000 * run.optimizer.max_grad_norm * 50
    assert codes(run) == {"adaptive_clipping"}
    before = run.parameters()
    run.backward(x, y)
    with pytest.raises(AccountingError, match="clips adaptively"):
        run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    assert len(engine.accountant) == 0


def test_s4_adaclip_releases_the_size_of_the_batch() -> None:
    options = {"target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0}
    run = make_training("rdp+mi", clipping="adaptive", min_clipbound=0.1, unclipped_num_std=2.0, **options)
    hook, run.optimizer.step_hook = run.optimizer.step_hook, None
    x, y = torch.zeros(7, 5), torch.zeros(7, dtype=torch.long)
    run.backward(x, y)
    before = run.optimizer.max_grad_norm
    run.optimizer.step()
    moved = math.log(float(run.optimizer.max_grad_norm) / before)
    noised = float(run.optimizer.unclipped_num)
    assert noised / (0.5 - moved / 0.2) == pytest.approx(7, rel=1e-4)  # the exact size, from what is public
    run.optimizer.step_hook = hook
    assert codes(run) == {"adaptive_clipping"}
    with pytest.raises(AccountingError, match="exact size of the batch"):
        run.epoch()
    assert len(run.engine.accountant) == 0


# -- S5: interrupted logical batches -----------------------------------------------------------------------------------


def numbered(batch_size: int = 20, **options: Any) -> DataLoader:
    """A hundred records that carry their numbers."""
    x = torch.cat([torch.arange(100.0)[:, None], torch.randn(100, 4)], dim=1)
    return DataLoader(TensorDataset(x, torch.arange(100) % 3), batch_size=batch_size, **options)


def pieces(run: Training) -> Any:
    return BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=6, optimizer=run.optimizer)


def sums(run: Training, loader: Any, most: int = 1000) -> list[list[int]]:
    """Train, and list the records that enter each noised sum."""
    each, pending = [], list[int]()
    for index, (x, y) in enumerate(loader):
        steps = len(run.engine.accountant)
        run.backward(x, y)
        run.optimizer.step()
        pending += x[:, 0].int().tolist()
        if len(run.engine.accountant) > steps:
            each.append(pending)
            pending = []
        if index + 1 == most:
            break
    return [*each, pending] if pending else each


def doubled(records: list[int]) -> int:
    return len(records) - len(set(records))


@pytest.mark.parametrize("workers", [0, 2])
def test_s5_a_logical_batch_that_was_left(workers: int) -> None:
    run = make_training("rdp+mi", data_loader=numbered(50, num_workers=workers))
    with pieces(run) as loader:
        left = sums(run, loader, most=3)
        assert left == [left[0]]
        assert len(run.engine.accountant) == 0
        assert run.optimizer.params[0].summed_grad is not None
        assert codes(run, loader) == {"unfinished_logical_batch"}
        with pytest.raises(AccountingError, match="left before the batch was complete"):
            inspect(run.engine, run.module, run.optimizer, loader, strict=True)
        if workers == 0:
            entered = left[0] + sums(run, loader)[0]
            assert doubled(entered) > 0  # one noised sum, some records twice
        run.epoch(guarded(run, loader))
        steps = len(run.engine.accountant)
        for _ in range(2):
            interrupted = sums(run, guarded(run, loader), most=3)
            assert len(run.engine.accountant) == steps
            assert all(p.summed_grad is None and p.grad_sample is None for p in run.optimizer.params)
            assert doubled(interrupted[0]) == 0
        assert run.optimizer._step_skip_queue == []


def test_s5_a_step_too_many_or_too_few_on_a_piece() -> None:
    run = make_training("rdp+mi", data_loader=numbered(50))
    with pieces(run) as loader:
        x, y = next(iter(loader))
        for _ in range(2):
            run.backward(x, y)
            run.optimizer.step()
        assert run.engine.accountant.history == [(1.0, 0.5, 1)]  # the records of this piece were in the sum twice
        with pytest.raises(AccountingError, match="inside a logical batch"):
            for x, y in guarded(run, loader):
                for _ in range(2):
                    run.backward(x, y)
                    run.optimizer.step()
        with pytest.raises(AccountingError, match="0 steps were taken on 1 pieces"):
            for _ in guarded(run, loader):
                pass
    assert len(run.engine.accountant) == 1


def test_s5_a_clipping_norm_that_changes_inside_a_logical_batch() -> None:
    run = make_training("rdp+mi", data_loader=numbered(50))
    with pieces(run) as loader, pytest.raises(AccountingError, match="changed inside a logical batch"):
        for x, y in guarded(run, loader):
            run.backward(x, y)
            run.optimizer.step()
            run.optimizer.max_grad_norm *= 0.9
    assert len(run.engine.accountant) == 0


# -- S8, S9: several processes that do not train together; shown in two_processes.py -----------------------------------


def test_s8_s9_are_refused_where_lightning_counts_the_processes() -> None:
    run = make_training("rdp+mi", batch=50)
    found = hooks_of([run.optimizer])
    require_private_run(run.loader, found, world_size=1)
    with pytest.raises(AccountingError, match="each draws from all records"):
        require_private_run(run.loader, found, world_size=2)
    run.loader.batch_sampler.__class__ = DistributedUniformWithReplacementSampler
    with pytest.raises(AccountingError, match="each process would release a model of its own"):
        require_private_run(run.loader, found, world_size=2)


# -- S10: batches that are no Poisson samples --------------------------------------------------------------------------


def test_s10_fixed_batches_are_noticed_without_any_call() -> None:
    run = make_training("rdp+mi", poisson_sampling=False)
    assert codes(run) == {"not_poisson"}
    with pytest.raises(AccountingError, match="equal far more often"):
        for _ in range(20):
            run.epoch()
    assert 5 < len(run.engine.accountant) < 50


def test_s10_steps_that_share_a_batch_are_noticed_without_any_call() -> None:
    run = make_training("rdp+mi")
    with pytest.raises(AccountingError, match="equal far more often"):
        for _ in range(50):
            for x, y in run.loader:
                for _ in range(2):
                    run.backward(x, y)
                    run.optimizer.step()
    assert len(run.engine.accountant) < 150


def test_s10_fixed_batches_are_refused_or_charged_by_passes() -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(30, shuffle=True))
    with pytest.raises(AccountingError, match=r"does not draw Poisson batches.*per_pass"):
        guarded(run)
    loop = guarded(run, batches="per_pass")
    passes = [sums(run, loop), sums(run, loop)]
    for one in passes:
        assert [len(batch) for batch in one] == [30, 30, 30, 10]  # fixed sizes; each record once
        assert sorted(number for batch in one for number in batch) == list(range(100))
    account = run.engine.accountant
    assert account.history == [(1.0, 1.0, 1), (1.0, 0.0, 3)] * 2
    assert account.leakage_bits == pytest.approx(2 * 0.5 / math.log(2), rel=1e-12)
    assert account.leakage_bits > 8 * step_leakage(0.25, 1.0)  # what Poisson sampling would have been charged
    plain = create_accountant("rdp")
    plain.history = [(1.0, 1.0, 2)]
    assert run.engine.get_epsilon(1e-5) == plain.get_epsilon(1e-5)


def test_s10_a_pass_is_charged_at_its_least_noise() -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(30))
    for index, (x, y) in enumerate(guarded(run, batches="per_pass")):
        run.optimizer.noise_multiplier = [2.0, 3.0, 1.0, 2.0][index]
        run.backward(x, y)
        run.optimizer.step()
    assert run.engine.accountant.history == [(2.0, 1.0, 1), (3.0, 0.0, 1), (1.0, 1.0, 1), (2.0, 0.0, 1)]


def test_s10_a_pass_that_is_left_and_begun_again_is_a_pass() -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(30))
    loop = guarded(run, batches="per_pass")
    for most in (1, 2):
        sums(run, loop, most)
    assert run.engine.accountant.history == [(1.0, 1.0, 2), (1.0, 0.0, 1)]


def test_s10_fixed_batches_accumulated_and_split() -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(25))
    run.optimizer.zero_grad()
    for index, (x, y) in enumerate(guarded(run, batches="per_pass")):
        run.criterion(run.module(x), y).backward()
        if index % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()
    with pieces(run) as loader:
        assert all(doubled(batch) == 0 for batch in sums(run, guarded(run, loader, batches="per_pass")))
    assert run.engine.accountant.history == [(1.0, 1.0, 1), (1.0, 0.0, 1), (1.0, 1.0, 1), (1.0, 0.0, 3)]


def test_s10_what_two_passes_accumulate_does_not_enter_one_step() -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(30))
    loop = guarded(run, batches="per_pass")
    for x, y in loop:
        run.criterion(run.module(x), y).backward()
    for x, y in loop:
        run.criterion(run.module(x), y).backward()
        assert run.optimizer.accumulated_iterations == 1
        run.optimizer.step()
        break


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.RandomSampler(range(100), replacement=True),
        torch.utils.data.WeightedRandomSampler(torch.ones(100), 100),
        torch.utils.data.SubsetRandomSampler([0, 1, 1]),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_s10_passes_that_may_repeat_a_record_are_refused(sampler: Any) -> None:
    run = make_training("rdp+mi", poisson_sampling=False, data_loader=numbered(30, sampler=sampler))
    assert codes(run, batches="per_pass") == {"not_a_partition"}
    with pytest.raises(AccountingError, match="at most once in a pass"):
        guarded(run, batches="per_pass")
    poisson = make_training("rdp+mi")
    assert codes(poisson, batches="per_pass") == {"poisson_by_passes"}


# -- S11, S12, S13: rates ----------------------------------------------------------------------------------------------


def test_s11_one_over_one_over_n() -> None:
    run = make_training("rdp+mi", data_loader=numbered(1, sampler=range(93)))
    assert len(run.loader) == 92  # of 93
    assert run.loader.batch_sampler.sample_rate == 1 / 93
    findings = {finding.code: finding for finding in inspect(run.engine, run.module, run.optimizer, run.loader)}
    assert findings["rate_below_charge"].severity == "info"
    run.epoch()
    account = run.engine.accountant
    assert account.history == [(1.0, 1 / 92, 92)]
    assert account.charged_bits > 92 * step_charge(1 / 93, 1.0)[1]


def test_s12_the_float32_grid_of_the_sampler() -> None:
    q = 1e-6
    grid = torch.arange(0, 64) / 2**24  # all that torch.rand can draw below 64 / 2**24
    inside = int((grid < q).sum())
    assert inside / 2**24 > 1.01 * q
    assert realised_sample_rate(q) == inside / 2**24
    drawn = torch.rand(1 << 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn * 2**24, (drawn * 2**24).round())
    run = make_training("rdp+mi", data_loader=DPDataLoader(numbered().dataset, sample_rate=q), poisson_sampling=False)
    findings = {finding.code: finding for finding in inspect(run.engine, run.module, run.optimizer, run.loader)}
    assert "0.013 above" in findings["sampling_excess"].what
    x, y = record()
    run.backward(x, y)
    run.optimizer.step()
    account = run.engine.accountant
    assert account.charged_bits == step_leakage(inside / 2**24, 1.0) > 1.02 * step_leakage(q, 1.0)


@pytest.mark.parametrize("rate", [0.03, 0.6])
def test_s13_a_rate_of_ones_own(rate: float) -> None:
    loader = DPDataLoader(numbered().dataset, sample_rate=rate)
    run = make_training("rdp+mi", data_loader=loader, poisson_sampling=False)
    hook = run.optimizer.step_hook
    assert run.loader.batch_sampler.sample_rate == rate < hook.sample_rate == 1 / int(1 / rate)
    assert codes(run) == set()
    run.epoch(guarded(run))
    account = run.engine.accountant
    assert account.charged_bits >= len(account) * step_charge(rate, 1.0)[1]


def test_a_higher_rate_than_the_accounted_one_is_refused() -> None:
    run = make_training("rdp+mi")
    more = DPDataLoader(run.loader.dataset, sample_rate=0.4)
    assert codes(run, more) == {"rate_above_charge"}
    with pytest.raises(AccountingError, match=r"probability 0\.4, but optimizer 0 is charged for 0\.2"):
        guarded(run, more)


# -- S17: several accounts ---------------------------------------------------------------------------------------------


def test_s17_two_engines_on_the_same_records() -> None:
    loader = numbered()
    first = make_training("rdp+mi", data_loader=loader)
    first.epoch(guarded(first))
    second = make_training("rdp+mi", data_loader=loader)
    second.epoch()
    assert len(first.engine.accountant) == len(second.engine.accountant) == 5  # of ten that were taken
    assert codes(second) == {"several_accounts"}
    with pytest.raises(AccountingError, match="1 other account of this process charged"):
        guarded(second)
    assert codes(make_training("rdp+mi", data_loader=numbered())) == set()
    second.epoch(guarded(second, accept=["several_accounts"]))
    del second
    gc.collect()
    third = make_training("rdp+mi", engine=first.engine, data_loader=loader)  # one engine holds the sum
    third.epoch(guarded(third))
    assert len(first.engine.accountant) == 10


# -- beyond the list ---------------------------------------------------------------------------------------------------


def test_rand_on_empty_makes_a_record_up() -> None:
    run = make_training("rdp+mi", data_loader=numbered(1), rand_on_empty=True)
    sizes = [len(x) for x, _ in run.loader]
    assert 0 not in sizes[sizes.index(1) :]  # every third batch would be empty
    assert codes(run) == {"rand_on_empty"}
    with pytest.raises(AccountingError, match="made-up record"):
        guarded(run)


def test_a_loss_that_does_not_clip() -> None:
    plain = torch.nn.CrossEntropyLoss()
    run = make_training("rdp+mi", grad_sample_mode="ghost")
    x, y = torch.full((1, 5), HUGE), torch.zeros(1, dtype=torch.long)
    assert summed_gradient(run, x, y) == pytest.approx(1.0, rel=1e-3)
    assert summed_gradient(run, x, y, criterion=plain) > 1000
    before = run.parameters()
    with pytest.raises(AccountingError, match="were not clipped"):
        for x, y in guarded(run):
            run.optimizer.zero_grad()
            plain(run.module(x), y).backward()
            run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    run.epoch(guarded(run))
    assert len(run.engine.accountant) == 5


def test_a_piece_of_a_batch_that_was_not_clipped() -> None:
    run = make_training("rdp+mi", grad_sample_mode="ghost", data_loader=numbered(50))
    with pieces(run) as loader, pytest.raises(AccountingError, match="were not clipped"):
        for index, (x, y) in enumerate(guarded(run, loader)):
            run.optimizer.zero_grad()
            (torch.nn.functional.cross_entropy if index == 1 else run.criterion)(run.module(x), y).backward()
            run.optimizer.step()
    assert len(run.engine.accountant) == 0


def test_a_step_hook_that_was_replaced() -> None:
    run = make_training("rdp+mi")
    loop = guarded(run)
    with pytest.raises(AccountingError, match="hook was replaced"):
        for x, y in loop:
            run.optimizer.attach_step_hook(lambda _: None)
            run.backward(x, y)
            run.optimizer.step()
    assert codes(run) == {"not_charged"}
    with pytest.raises(AccountingError, match="attach_step_hook"):
        run.epoch(loop)


def test_a_generator_that_is_seeded_again_repeats_batches() -> None:
    generator = torch.Generator()
    run = make_training("rdp+mi", data_loader=numbered(generator=generator))
    loop = guarded(run)
    generator.manual_seed(5)
    first = sums(run, loop)
    generator.manual_seed(5)
    assert [len(batch) for batch in run.loader.batch_sampler] != []
    generator.manual_seed(5)
    with pytest.raises(AccountingError, match="generator of the batches is in a state in which it has been before"):
        sums(run, loop)
    assert len(run.engine.accountant) == len(first) == 5


def test_a_generator_that_is_seeded_again_repeats_noise() -> None:
    run = make_training("rdp+mi")
    loop = guarded(run)
    run.epoch(loop)
    run.noise.manual_seed(1)
    with pytest.raises(AccountingError, match="generator of the noise"):
        run.epoch(loop)
    for _ in loop.loader:  # a loop that takes no step uses up no noise
        pass


def test_accumulated_batches_are_refused() -> None:
    run = make_training("rdp+mi", poisson_sampling=False)
    batches = list(run.loader)
    for x, y in batches[:2]:
        run.criterion(run.module(x), y).backward()
    with pytest.raises(AccountingError, match=r"2 batches were accumulated.*several of them"):
        run.optimizer.step()
    assert all(p.grad is None for p in run.module.parameters())
    assert len(run.engine.accountant) == 0


def test_virtual_steps_that_combine_poisson_batches_are_refused() -> None:
    run = make_training("rdp+mi", data_loader=numbered(50))
    with pytest.raises(AccountingError, match="Several Poisson batches were combined"):
        for index, (x, y) in enumerate(guarded(run)):
            run.optimizer.signal_skip_step(do_skip=index == 0)
            run.backward(x, y)
            run.optimizer.step()
    assert len(run.engine.accountant) == 0


def test_two_steps_on_one_batch_and_steps_without_one_are_refused() -> None:
    run = make_training("rdp+mi")
    loop = guarded(run)
    for x, y in loop:
        run.backward(x, y)
        run.optimizer.step()
        run.backward(x, y)
        with pytest.raises(AccountingError, match="second one on one batch"):
            run.optimizer.step()
        break
    run.backward(x, y)
    with pytest.raises(AccountingError, match=r"handed out no batch.*guard"):
        run.optimizer.step()
    with pytest.raises(AccountingError, match="Another loop"):
        for _ in zip(loop, loop, strict=False):
            pass
    assert run.engine.accountant.history == [(1.0, 0.2, 1)]


def test_a_step_refused_by_the_budget_may_be_taken_later_on_the_same_batch() -> None:
    run = make_training("rdp+mi")
    run.engine.accountant.budget_bits = 0.0
    for x, y in guarded(run):
        run.backward(x, y)
        with pytest.raises(Exception, match="above the budget"):
            run.optimizer.step()
        run.engine.accountant.budget_bits = None
        run.backward(x, y)
        run.optimizer.step()
        break
    assert len(run.engine.accountant) == 1
