"""Every mode of Opacus: guarded, inspected, charged, and vetoed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines import Training, make_training
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialGradClip, ExponentialNoise, StepNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.checks import Finding, guard, inspect
from opacus_reconbound.errors import AccountingError, InvalidValueError, ReconstructionBudgetExceeded
from opacus_reconbound.leakage import step_charge

MODES: dict[str, dict[str, Any]] = {
    "hooks": {},
    "functorch": {"grad_sample_mode": "functorch"},
    "ew": {"grad_sample_mode": "ew"},
    "ghost": {"grad_sample_mode": "ghost"},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": [0.5, 1.0, 2.0, 1.0]},
    "per_layer functorch": {"clipping": "per_layer", "max_grad_norm": [1.0] * 4, "grad_sample_mode": "functorch"},
    "hooks, sum": {"loss_reduction": "sum", "criterion": nn.CrossEntropyLoss(reduction="sum")},
    "ghost, sum": {
        "grad_sample_mode": "ghost",
        "loss_reduction": "sum",
        "criterion": nn.CrossEntropyLoss(reduction="sum"),
    },
    "hooks, unwrapped": {"wrap_model": False},
    "ghost, unwrapped": {"wrap_model": False, "grad_sample_mode": "ghost"},
}

everywhere = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def prepared(options: dict[str, Any], **more: Any) -> tuple[Training, Any]:
    """A training, and the object to inspect, which with ``wrap_model=False`` is not the model but its hooks."""
    if options.get("wrap_model", True):
        run = make_training("rdp+mi", **options, **more)
        return run, run.module
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    run = make_training("rdp+mi", module=module, optimizer=optimizer, **options, **more)
    hooks, run.module = run.module, module
    return run, hooks


@everywhere
def test_guarded_training_is_charged_and_vetoed(options: dict[str, Any]) -> None:
    run, model = prepared(options)
    assert inspect(run.engine, model, run.optimizer, run.loader) == ()
    loop = guard(run.engine, model, run.optimizer, run.loader)
    assert len(loop) == 5
    run.epoch(loop)
    account = run.engine.accountant
    assert account.history == [(1.0, 0.2, 5)]
    assert account.charged_bits == pytest.approx(5 * step_charge(0.2, 1.0)[1], rel=1e-15)
    account.budget_bits = account.leakage_after(noise_multiplier=1.0, sample_rate=0.2, steps=2)
    with pytest.raises(ReconstructionBudgetExceeded):
        run.epoch(loop)
    before = run.parameters()
    with pytest.raises(ReconstructionBudgetExceeded):
        run.epoch(loop)
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    assert account.history == [(1.0, 0.2, 7)]


@everywhere
def test_one_record_moves_the_sum_by_at_most_the_clipping_norm(options: dict[str, Any]) -> None:
    """What Theorem 4.1 needs: sensitivity C, noise σC; both are measured, not read off."""
    run, _ = prepared(options, noise_multiplier=3.0)
    kept: list[torch.Tensor] = []
    add_noise = run.optimizer.add_noise

    def spy() -> None:
        kept.append(torch.cat([p.summed_grad.flatten().clone() for p in run.optimizer.params]))
        add_noise()
        kept.append(torch.cat([p.grad.flatten().clone() for p in run.optimizer.params]))

    run.optimizer.add_noise = spy
    norm = math.hypot(*options["max_grad_norm"]) if "max_grad_norm" in options else 1.0
    x, y = 1e4 * torch.randn(9, 5), torch.arange(9) % 3
    noise = []
    for _ in range(10):
        for records in (9, 8):
            run.backward(x[:records], y[:records])
            run.optimizer.pre_step()
        whole, noised, without, noised_without = kept[-4:]
        assert float((whole - without).norm()) <= norm * (1 + 1e-5)
        noise += [noised - whole, noised_without - without]
    # 20 draws of 39 numbers: their standard deviation is known to about 2.5 %
    assert float(torch.cat(noise).std()) == pytest.approx(3.0 * norm, rel=0.12)


@everywhere
def test_an_empty_batch_is_a_step(options: dict[str, Any]) -> None:
    run, model = prepared(options)
    for x, y in guard(run.engine, model, run.optimizer, run.loader):
        before = run.parameters()
        if options == MODES["ew"]:  # torch's expanded weights do not take it, and say so
            with pytest.raises(RuntimeError):
                run.backward(x[:0], y[:0])
            return
        run.backward(x[:0], y[:0])
        run.optimizer.step()
        assert not any(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))  # noise alone
        break
    assert run.engine.accountant.history == [(1.0, 0.2, 1)]


@pytest.mark.parametrize(
    ("mode", "workers"), [("hooks", 0), ("hooks", 2), ("ghost", 0), ("ghost", 2), ("per_layer", 0)]
)
def test_batch_memory_manager(mode: str, workers: int) -> None:
    run, model = prepared(MODES[mode], workers=workers)
    pieces = 0
    for _ in range(2):
        with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer) as loader:
            for x, y in guard(run.engine, model, run.optimizer, loader):
                run.backward(x, y)
                run.optimizer.step()
                pieces += 1
    assert pieces > 20
    assert run.engine.accountant.history == [(1.0, 0.2, 10)]


def test_batch_memory_manager_of_another_optimizer() -> None:
    run, other = make_training("rdp+mi"), make_training("rdp+mi")
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=7, optimizer=other.optimizer) as loader:
        codes = {finding.code for finding in inspect(run.engine, run.module, run.optimizer, loader)}
    assert codes == {"split_for_another_optimizer"}


def test_a_veto_inside_batch_memory_manager_ends_the_loop() -> None:
    """With workers, flags of pieces to come are lost with the step; the loop must not go on without them."""
    run = make_training("rdp+mi", workers=2)
    run.engine.accountant.budget_bits = 0.0
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer) as loader:
        with pytest.raises(AccountingError, match="begin a new loop after a step was refused"):
            for x, y in guard(run.engine, run.module, run.optimizer, loader):
                run.backward(x, y)
                try:
                    run.optimizer.step()
                except ReconstructionBudgetExceeded:
                    run.engine.accountant.budget_bits = None
        steps = len(run.engine.accountant)
        run.epoch(guard(run.engine, run.module, run.optimizer, loader))
    assert len(run.engine.accountant) == steps + 5


@everywhere
def test_noise_schedulers(options: dict[str, Any]) -> None:
    run, model = prepared(options)
    exponential, steps = ExponentialNoise(run.optimizer, gamma=0.5), StepNoise(run.optimizer, step_size=2, gamma=3.0)
    for _ in range(2):
        run.epoch(guard(run.engine, model, run.optimizer, run.loader))
        exponential.step()
        steps.step()
    assert run.engine.accountant.history == [(1.0, 0.2, 5), (0.5, 0.2, 5)]
    assert run.optimizer.noise_multiplier == 0.75


@everywhere
def test_clip_schedulers(options: dict[str, Any]) -> None:
    run, model = prepared(options)
    scheduler = ExponentialGradClip(run.optimizer, gamma=0.5)
    loop = guard(run.engine, model, run.optimizer, run.loader)
    for _ in range(2):
        run.epoch(loop)
        scheduler.step()
    own_norms = "ghost" in options.get("grad_sample_mode", "") or "clipping" in options
    second = 0.5 if own_norms else 1.0  # flat clipping follows the scheduler; the others keep their norms
    assert run.engine.accountant.schedule.runs[-1].noise_multiplier == pytest.approx(second)
    assert len(run.engine.accountant) == 10


def test_clip_schedulers_that_raise_the_noise_are_charged_less() -> None:
    run = make_training("rdp+mi", grad_sample_mode="ghost")
    run.optimizer.max_grad_norm = 3.0
    run.epoch(guard(run.engine, run.module, run.optimizer, run.loader))
    assert run.engine.accountant.history == [(3.0, 0.2, 5)]


def test_a_full_batch_is_exact() -> None:
    run = make_training("rdp+mi", batch=100, noise_multiplier=5.0)
    assert [len(x) for x, _ in run.loader] == [100]
    for _ in range(7):
        run.epoch(guard(run.engine, run.module, run.optimizer, run.loader))
    account = run.engine.accountant
    assert account.history == [(5.0, 1.0, 7)]
    assert account.leakage_bits == account.charged_bits
    assert account.charged_bits == pytest.approx(7 / (2 * 25 * math.log(2)), rel=1e-12)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_full_fixed_batch_is_exact(shuffle: bool) -> None:
    records = TensorDataset(torch.randn(100, 5), torch.randint(0, 3, (100,)))
    loader = DataLoader(records, batch_size=128, shuffle=shuffle)
    run = make_training("rdp+mi", data_loader=loader, poisson_sampling=False)
    for _ in range(3):
        run.epoch(guard(run.engine, run.module, run.optimizer, run.loader))
    assert run.engine.accountant.history == [(1.0, 1.0, 3)]


def test_many_equal_batches_are_right_at_full_batch() -> None:
    run = make_training("rdp+mi", batch=100, noise_multiplier=50.0)
    for _ in range(30):
        run.epoch()
    assert run.engine.accountant.history == [(50.0, 1.0, 30)]


def test_two_optimizers_alternate_between_batches() -> None:
    first = make_training("rdp+mi")
    second = make_training("rdp+mi", engine=first.engine, noise_multiplier=2.0, data_loader=first.loader)
    both = [first.optimizer, second.optimizer]
    model = nn.ModuleList([first.module, second.module])
    findings = inspect(first.engine, model, both, first.loader)
    assert [(finding.code, finding.severity) for finding in findings] == [("several_optimizers", "info")]
    loop = guard(first.engine, model, both, first.loader)
    for index, (x, y) in enumerate(loop):
        run = (first, second)[index % 2]
        run.backward(x, y)
        run.optimizer.step()
    assert first.engine.accountant.history == [(1.0, 0.2, 1), (2.0, 0.2, 1)] * 2 + [(1.0, 0.2, 1)]
    with pytest.raises(AccountingError, match="second one on one batch"):
        for x, y in loop:
            for run in (first, second):
                run.backward(x, y)
                run.optimizer.step()


# -- findings ----------------------------------------------------------------------------------------------------------


def test_frozen_parameters() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    module[0].requires_grad_(False)
    run = make_training("rdp+mi", module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    (finding,) = inspect(run.engine, run.module, run.optimizer, run.loader, strict=True)
    assert (finding.code, finding.severity) == ("frozen_parameters", "info")
    assert finding.what == "2 of 4 parameters are frozen."
    before = run.parameters()
    run.epoch(guard(run.engine, run.module, run.optimizer, run.loader))
    assert [torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True)] == [True, True, False, False]
    assert len(run.engine.accountant) == 5


def test_nothing_to_train() -> None:
    run = make_training("rdp+mi")
    for p in run.module.parameters():
        p.requires_grad_(False)
    (finding,) = inspect(run.engine, run.module, run.optimizer, run.loader)
    assert (finding.code, finding.severity) == ("nothing_trained", "info")
    before = run.parameters()
    run.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, run.parameters(), strict=True))
    assert len(run.engine.accountant) == 0


def test_objects_of_different_calls() -> None:
    run, other = make_training("rdp+mi"), make_training("rdp+mi")
    plain = torch.optim.SGD(run.module.parameters(), lr=0.1)
    foreign = PrivacyEngine(accountant="rdp")

    def codes(engine: Any, model: Any, optimizer: Any) -> list[str]:
        return [finding.code for finding in inspect(engine, model, optimizer, run.loader)]

    assert codes(run.engine, other.module, run.optimizer) == ["other_model"]
    assert codes(other.engine, run.module, run.optimizer) == ["other_account"]
    assert codes(run.engine, run.module, plain) == ["not_private"]
    assert codes(run.engine, run.module, []) == ["no_optimizer"]
    assert codes(foreign, run.module, run.optimizer) == ["no_account"]
    ghost, _ = prepared(MODES["ghost, unwrapped"])
    findings = inspect(ghost.engine, ghost.module, ghost.optimizer, ghost.loader)
    assert [finding.code for finding in findings] == ["clip_norm_unknown"]


def test_an_optimizer_of_ones_own_is_told() -> None:
    from opacus.optimizers import DPOptimizer

    class Mine(DPOptimizer):
        pass

    run = make_training("rdp+mi")
    run.optimizer.__class__ = Mine
    (finding,) = inspect(run.engine, run.module, run.optimizer, run.loader, strict=True)
    assert (finding.code, finding.severity) == ("unknown_optimizer", "warning")


def test_strict_names_every_error_and_accept_lets_one_pass() -> None:
    run = make_training("rdp+mi", poisson_sampling=False)
    other = make_training("rdp+mi")
    arguments = (other.engine, run.module, run.optimizer, run.loader)
    with pytest.raises(AccountingError, match=r"charged to another account(.|\n)*does not draw Poisson batches"):
        inspect(*arguments, strict=True)
    with pytest.raises(AccountingError, match=r"^The training loader"):
        inspect(*arguments, strict=True, accept=["other_account"])
    findings = inspect(*arguments, strict=True, accept=["other_account", "not_poisson"])
    assert [finding.severity for finding in findings] == ["error", "error"]
    assert all(isinstance(finding, Finding) and finding.remedy for finding in findings)
    with pytest.raises(AttributeError):
        findings[0].code = "none"  # type: ignore[misc]
    with pytest.raises(InvalidValueError, match=r"batches='poisson' or 'per_pass'\. Found 'shuffled'"):
        inspect(*arguments, batches="shuffled")  # type: ignore[arg-type]


def test_inspecting_changes_nothing() -> None:
    run = make_training("rdp+mi", grad_sample_mode="ghost")
    state, hook = torch.get_rng_state(), run.optimizer.step_hook
    for _ in range(2):
        assert inspect(run.engine, run.module, run.optimizer, run.loader) == ()
    assert torch.equal(state, torch.get_rng_state())
    assert (hook.permit, hook.clipper) == (None, None)
    assert run.engine.accountant.history == []
