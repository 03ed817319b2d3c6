"""What the leakage costs per training step: measured against the accountant of Opacus in the same run.

Run with ``pytest tests/benchmarks -s``.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
from engines import make_training
from opacus.accountants import RDPAccountant

from opacus_reconbound.accountants import RDPMutualInformationAccountant
from opacus_reconbound.checks import guard

ADDED_MICROSECONDS = 5.0
STEPS = 5_000
REPEATS = 15


def microseconds_per_step(accountant: Any) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    return (time.perf_counter() - start) / STEPS * 1e6


def with_distinct_sigmas(accountant: Any, count: int) -> Any:
    for index in range(count):
        accountant.step(noise_multiplier=1.0 + (index + 1) * 1e-5, sample_rate=0.01)
    return accountant


@pytest.mark.parametrize("distinct", [1, 100_000])
@pytest.mark.parametrize("budget_bits", [None, 1e9], ids=["no budget", "budget"])
def test_time_added_to_a_step(distinct: int, budget_bits: float | None) -> None:
    plain = with_distinct_sigmas(RDPAccountant(), distinct)
    ours = with_distinct_sigmas(RDPMutualInformationAccountant(), distinct)
    ours.budget_bits = budget_bits
    if budget_bits is not None:
        assert ours.charged_bits > 0  # the first reading of a long history is timed below
    pairs = [(microseconds_per_step(ours), microseconds_per_step(plain)) for _ in range(REPEATS)]
    added = statistics.median(a - b for a, b in pairs)
    print(
        f"\n{distinct} sigmas, budget {budget_bits}: {statistics.median(a for a, _ in pairs):.2f} us a step, ", end=""
    )
    print(f"plain {statistics.median(b for _, b in pairs):.2f} us, added {added:.2f} us")
    assert added <= ADDED_MICROSECONDS


@pytest.mark.parametrize("guarded", [False, True], ids=["hook", "guard"])
@pytest.mark.parametrize("mode", ["flat", "ghost", "per_layer"])
def test_time_that_the_checks_add_to_a_step(mode: str, guarded: bool) -> None:
    """The whole hook, and the guarded loader's part in a batch, against Opacus's own hook on the same optimizer."""
    options: dict[str, Any] = {"grad_sample_mode": "ghost"} if mode == "ghost" else {}
    if mode == "per_layer":
        options = {"clipping": "per_layer", "max_grad_norm": [1.0] * 4}
    run = make_training("rdp+mi", **options)
    run.engine.accountant.budget_bits = 1e9
    ours, plain = run.optimizer.step_hook, RDPAccountant().get_optimizer_hook_fn(sample_rate=0.2)
    x, y = next(iter(run.loader))
    run.backward(x, y)
    run.optimizer.pre_step()
    loop = guard(run.engine, run.module, run.optimizer, run.loader) if guarded else None

    def hook() -> None:
        if loop is not None:
            loop._permit.batch()
        ours._norms_seen, ours._sizes._wealth = None, [0.0, 0.0]  # here one batch serves for all steps
        ours(run.optimizer)

    pairs = [(microseconds(hook), microseconds(lambda: plain(run.optimizer))) for _ in range(REPEATS)]
    added = statistics.median(a - b for a, b in pairs)
    print(f"\n{mode}, {'guarded' if guarded else 'hook alone'}: added {added:.2f} us a step")
    assert added <= 20.0


def microseconds(action: Any, count: int = 500) -> float:
    start = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - start) / count * 1e6


def test_time_to_read_the_leakage_after_100_000_distinct_sigmas() -> None:
    accountant = with_distinct_sigmas(RDPMutualInformationAccountant(), 100_000)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert accountant.leakage_bits > 0
        seconds.append(time.perf_counter() - start)
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
    start = time.perf_counter()
    left = len(accountant)
    counting = time.perf_counter() - start
    print(f"\nleakage_bits: first {seconds[0]:.2f} s, later {seconds[2] * 1e6:.0f} us; len {counting * 1e6:.0f} us")
    assert left == 100_003
    assert seconds[0] < 10.0
    assert seconds[2] < 1e-3
