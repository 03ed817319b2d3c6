"""The budget: a step beyond it is neither charged nor applied, and look-ahead and veto agree to the last bit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import create_accountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from opacus_reconbound.accountants import RDPMutualInformationAccountant
from opacus_reconbound.errors import InvalidValueError, ReconstructionBudgetExceeded
from opacus_reconbound.leakage import step_charge, steps_for_leakage

rates = st.sampled_from([0.0, 1e-5, 0.1, 1 / 3, 1.0])
noises = st.sampled_from([0.0, 0.3, 1.0, 2.5, 40.0, math.inf])
histories = st.lists(st.tuples(noises, rates, st.integers(0, 40)), max_size=4)


def allow(accountant: Any, steps: int, *, noise_multiplier: float = 1.0, sample_rate: float = 0.2) -> None:
    """A budget that exactly ``steps`` more steps use up."""
    accountant.budget_bits = accountant.leakage_after(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps
    )


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_nothing_pending(run: Any) -> None:
    for p in run.optimizer.params:
        assert p.grad is None
        assert p.grad_sample is None
        assert p.summed_grad is None
    assert run.optimizer._step_skip_queue == []
    assert run.optimizer._is_last_step_skipped is False


# -- the veto in training --------------------------------------------------------------------------------------


def test_the_vetoed_step_is_neither_charged_nor_applied(name: str, mode: dict[str, Any], training: Any) -> None:
    run = training(name, **mode)
    accountant = run.engine.accountant
    allow(accountant, 3)
    snapshots = []
    with pytest.raises(ReconstructionBudgetExceeded, match=r"in 3 steps.*parameters are unchanged") as caught:
        for x, y in run.loader:
            run.backward(x, y)
            snapshots.append(run.parameters())
            run.optimizer.step()
    assert len(snapshots) == 4
    assert not equal(snapshots[2], snapshots[3])
    assert equal(snapshots[3], run.parameters())
    assert_nothing_pending(run)
    assert accountant.history == [(1.0, 0.2, 3)]
    assert run.engine.get_epsilon(1e-5) > 0
    error = caught.value
    assert error.leakage_bits == accountant.charged_bits == error.budget_bits == accountant.budget_bits
    assert error.next_bits == accountant.leakage_after(noise_multiplier=1.0, sample_rate=0.2)


def test_the_vetoed_gradient_cannot_be_applied_later(name: str, mode: dict[str, Any], training: Any) -> None:
    run = training(name, **mode)
    run.engine.accountant.budget_bits = 0.0
    (x, y), (x2, y2) = list(run.loader)[:2]
    before = run.parameters()
    run.backward(x, y)
    with pytest.raises(ReconstructionBudgetExceeded):
        run.optimizer.step()
    run.optimizer.original_optimizer.step()
    assert equal(before, run.parameters())
    with pytest.raises((ValueError, AttributeError, TypeError)):
        run.optimizer.step()
    assert equal(before, run.parameters())
    assert len(run.engine.accountant) == 0
    # without the budget the next step is exactly what it is in a run that never met the vetoed batch
    run.engine.accountant.budget_bits = None
    fresh = training(name, **mode)
    for each in (run, fresh):
        each.noise.manual_seed(7)
        each.backward(x2, y2)
        each.optimizer.step()
    assert equal(run.parameters(), fresh.parameters())
    assert run.engine.accountant.history == [(1.0, 0.2, 1)]


def test_veto_under_the_batch_memory_manager(name: str, mode: dict[str, Any], training: Any) -> None:
    run = training(name, **mode)
    allow(run.engine.accountant, 2)
    with BatchMemoryManager(data_loader=run.loader, max_physical_batch_size=8, optimizer=run.optimizer) as loader:
        with pytest.raises(ReconstructionBudgetExceeded):
            run.epoch(loader)
        assert_nothing_pending(run)
        assert run.engine.accountant.history == [(1.0, 0.2, 2)]
        before = run.parameters()
        run.optimizer.original_optimizer.step()
        assert equal(before, run.parameters())
        with pytest.raises(ReconstructionBudgetExceeded):
            run.epoch(loader)
    assert equal(before, run.parameters())
    assert run.engine.accountant.history == [(1.0, 0.2, 2)]


def test_a_falling_noise_multiplier_is_seen_by_the_veto(name: str, training: Any) -> None:
    run = training(name)
    accountant = run.engine.accountant
    allow(accountant, 3)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.step()
    assert not accountant.would_exceed(noise_multiplier=1.0, sample_rate=0.2, steps=2)
    run.optimizer.noise_multiplier = 0.3
    before = run.parameters()
    run.backward(x, y)
    with pytest.raises(ReconstructionBudgetExceeded, match=r"in 1 step\. One more at noise_multiplier=0\.3"):
        run.optimizer.step()
    assert equal(before, run.parameters())


def test_a_step_without_noise_breaks_any_budget_at_once(name: str, training: Any) -> None:
    run = training(name, noise_multiplier=0.0)
    run.engine.accountant.budget_bits = 1e300
    before = run.parameters()
    with pytest.raises(ReconstructionBudgetExceeded, match=r"0 bits in 0 steps.*would make it inf bits"):
        run.epoch()
    assert equal(before, run.parameters())
    assert run.engine.accountant.steps_left(noise_multiplier=0.0, sample_rate=0.2) == 0


def test_any_failure_of_the_charge_discards_the_gradient(name: str, mode: dict[str, Any], training: Any) -> None:
    run = training(name, **mode)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.attach_step_hook(run.engine.accountant.get_optimizer_hook_fn(sample_rate=20))
    with pytest.raises(InvalidValueError, match="A batch size has to be divided by the number of records"):
        run.optimizer.step()
    assert_nothing_pending(run)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_the_sharded_optimizer_of_fsdp_is_discarded_too(tmp_path: Any, training: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        init_device_mesh("cpu", (1,))
        module = FSDP2Wrapper(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        run = training("rdp+mi", grad_sample_mode="ghost_fsdp", module=module, optimizer=optimizer)
        x, y = next(iter(run.loader))
        run.backward(x, y)
        run.optimizer.step()
        run.engine.accountant.budget_bits = 0.0
        before = [p.full_tensor() for p in run.parameters()]
        run.backward(x, y)
        with pytest.raises(ReconstructionBudgetExceeded):
            run.optimizer.step()
        assert all(state["summed_grad"] is None for state in run.optimizer.grad_state.values())
        run.optimizer.original_optimizer.step()
        assert equal(before, [p.full_tensor() for p in run.parameters()])
        assert run.engine.accountant.history == [(1.0, 0.2, 1)]
    finally:
        torch.distributed.destroy_process_group()


# -- the arithmetic of the budget ------------------------------------------------------------------------------


def test_the_budget_is_a_limit_that_may_be_reached(name: str) -> None:
    accountant = create_accountant(name)
    assert accountant.budget_bits is None
    allow(accountant, 37)
    for _ in range(37):
        accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    message = (
        r"^Leakage so far: [\d.]+ bits in 37 steps\. One more at noise_multiplier=1, sample_rate=0\.2 would make it "
        r"[\d.]+ bits, above the budget of [\d.]+ bits\. It was not charged, its gradient is discarded and the "
        r"parameters are unchanged\. Stop training here, or raise budget_bits"
    )
    with pytest.raises(ReconstructionBudgetExceeded, match=message):
        accountant.step(noise_multiplier=1.0, sample_rate=0.2)
    assert accountant.history == [(1.0, 0.2, 37)]


@given(history=histories, sigma=noises, q=rates, budget=st.floats(0, 5), count=st.integers(0, 6))
def test_look_ahead_and_veto_agree(
    history: list[tuple[float, float, int]], sigma: float, q: float, budget: float, count: int
) -> None:
    accountant = RDPMutualInformationAccountant()
    accountant.history = history
    accountant.budget_bits = budget
    pair = {"noise_multiplier": sigma, "sample_rate": q}
    left = accountant.steps_left(**pair)
    for _ in range(count):
        exceeds = accountant.would_exceed(**pair)
        after = accountant.leakage_after(**pair)
        assert exceeds == (left == 0)
        if exceeds:
            with pytest.raises(ReconstructionBudgetExceeded):
                accountant.step(**pair)
            assert accountant.schedule.steps == len(accountant)
            break
        accountant.step(**pair)
        assert accountant.charged_bits == after == accountant.schedule.charged_bits
        assert accountant.leakage_bits == accountant.schedule.leakage_bits
        left = None if left is None else left - 1
        assert accountant.steps_left(**pair) == left


@given(history=histories, sigma=noises, q=rates, budget=st.floats(0, 1e6))
def test_steps_left_is_the_most_that_do_not_exceed(
    history: list[tuple[float, float, int]], sigma: float, q: float, budget: float
) -> None:
    accountant = RDPMutualInformationAccountant()
    accountant.history = history
    accountant.budget_bits = budget
    left = accountant.steps_left(noise_multiplier=sigma, sample_rate=q)
    exceeds = lambda steps: accountant.would_exceed(noise_multiplier=sigma, sample_rate=q, steps=steps)  # noqa: E731
    if left is None:
        assert not exceeds(2**53)
    else:
        assert exceeds(left + 1)
        assert not exceeds(left) or (left == 0 and accountant.charged_bits > budget)
    if not history:
        expected = steps_for_leakage(budget, sample_rate=q, noise_multiplier=sigma)
        assert left == (None if expected is None or expected >= 2**53 else expected)


def test_steps_left_without_limit(name: str) -> None:
    accountant = create_accountant(name)
    assert accountant.steps_left(noise_multiplier=1.0, sample_rate=0.2) is None
    accountant.budget_bits = math.inf
    assert accountant.steps_left(noise_multiplier=0.0, sample_rate=0.2) is None
    accountant.budget_bits = 1.0
    assert accountant.steps_left(noise_multiplier=1.0, sample_rate=0.0) is None
    accountant.history = [(1.0, 0.5, 1000)]
    assert accountant.steps_left(noise_multiplier=1.0, sample_rate=0.0) == 0


def test_would_exceed_with_a_budget_of_its_own(name: str) -> None:
    accountant = create_accountant(name)
    pair = {"noise_multiplier": 1.0, "sample_rate": 0.2}
    charge = step_charge(0.2, 1.0)[1]
    assert accountant.would_exceed(**pair) is False
    assert accountant.would_exceed(charge, **pair) is False
    assert accountant.would_exceed(charge, **pair, steps=2) is True
    assert accountant.would_exceed(0.0, **pair, steps=0) is False
    accountant.budget_bits = 0.0
    assert accountant.would_exceed(**pair) is True
    assert accountant.would_exceed(1.0, **pair) is False


@pytest.mark.parametrize("budget", [-1.0, math.nan, "much", True])
def test_a_wrong_budget_is_refused(name: str, budget: Any) -> None:
    accountant = create_accountant(name)
    with pytest.raises(InvalidValueError, match="budget_bits"):
        accountant.budget_bits = budget
    with pytest.raises(InvalidValueError, match="budget_bits"):
        accountant.would_exceed(budget, noise_multiplier=1.0, sample_rate=0.2)
    assert accountant.budget_bits is None


def test_bound_and_floor_go_through_the_certificate_in_charged_bits(name: str) -> None:
    certificate: Any = SimpleNamespace(bound=lambda bits: ("bound", bits), leakage_budget=lambda min_rho: 4.0 - min_rho)
    accountant = create_accountant(name)
    accountant.step(noise_multiplier=1.0, sample_rate=1e-6)
    assert accountant.charged_bits > accountant.leakage_bits
    assert accountant.sampling_excess_bits == accountant.charged_bits - accountant.leakage_bits
    assert accountant.bound(certificate) == ("bound", accountant.charged_bits)
    accountant.set_floor(certificate, 0.75)
    assert accountant.budget_bits == 3.25


def test_a_path_in_place_of_a_certificate_is_refused() -> None:
    accountant = RDPMutualInformationAccountant()
    with pytest.raises(InvalidValueError, match=r"SourceCertificate\.load"):
        accountant.set_floor("certificate.json", 0.7)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match=r"SourceCertificate\.load"):
        accountant.bound("certificate.json")  # type: ignore[arg-type]
    assert accountant.budget_bits is None
