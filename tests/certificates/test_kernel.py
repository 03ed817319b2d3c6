"""Kernel sums: a naive double loop, the promised arithmetic errors, far-away records, ladders, threads, progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from opacus_reconbound.certificates import kernel
from opacus_reconbound.certificates.kernel import (
    SUM_ERROR,
    KernelLadder,
    cost_error,
    log_kernel_means,
    pair_sums,
    strict_float32,
)
from opacus_reconbound.certificates.parallel import Counter, in_order, shared_out, workers

CPU = torch.device("cpu")
LADDERS = {
    "one": (0.3,),
    "halving": (0.8, 0.4, 0.2, 0.1, 0.05),
    "two chains": (0.8, 0.56, 0.4, 0.28, 0.2, 0.14, 0.1, 0.085, 0.07),
    "no chain": (1.0, 0.7, 0.45),
    "unordered": (0.1, 0.4, 0.33, 0.2),
}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def exact_costs(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """‖x − y‖²/2 in float64, one pair at a time."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    out = np.empty((len(x), len(y)))
    for i in range(len(x)):
        for j in range(len(y)):
            out[i, j] = 0.5 * np.sum((x[i] - y[j]) ** 2)
    return out


def naive_pair_sums(z: np.ndarray, w: np.ndarray, temperatures: tuple[float, ...]) -> np.ndarray:
    costs = exact_costs(z, z)
    np.fill_diagonal(costs, np.inf)
    return np.stack(
        [np.exp(-costs / e) @ row.astype(np.float64) / len(z) for e, row in zip(temperatures, w, strict=True)]
    )


def naive_log_means(z: np.ndarray, p: np.ndarray, w: np.ndarray, temperatures: tuple[float, ...]) -> np.ndarray:
    costs = exact_costs(z, p)
    rows = []
    for epsilon, row in zip(temperatures, w, strict=True):
        exponents = np.log(row.astype(np.float64)) - costs / epsilon
        top = exponents.max(axis=1)
        rows.append(top + np.log(np.exp(exponents - top[:, None]).sum(axis=1) / len(p)))
    return np.stack(rows)


def sample(n: int, m: int, seed: int) -> np.ndarray:
    z = np.random.default_rng(seed).normal(size=(n, m)) / math.sqrt(m)
    return z.astype(np.float32)


def weights(count: int, n: int, seed: int) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(size=(count, n))).astype(np.float32)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize(("n", "tile"), [(150, 512), (150, 64), (61, 7), (64, 64), (2, 512)])
def test_pair_sums_against_a_double_loop(name: str, n: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE", tile)
    ladder = KernelLadder.plan(LADDERS[name])
    z, w = sample(n, 5, n), weights(len(ladder.temperatures), n, n + 1)
    found = pair_sums(torch.from_numpy(z), torch.from_numpy(w), ladder)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), naive_pair_sums(z, w, ladder.temperatures), rtol=2e-4, atol=0)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("name", LADDERS)
@pytest.mark.parametrize(("n", "points", "chunk", "tile"), [(70, 45, 256, 512), (70, 45, 16, 512), (45, 130, 7, 50)])
def test_log_kernel_means_against_a_double_loop(
    name: str, n: int, points: int, chunk: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_TILE", tile)
    ladder = KernelLadder.plan(LADDERS[name])
    z, p, w = sample(n, 4, n), sample(points, 4, n + 1), weights(len(ladder.temperatures), points, n + 2)
    found = log_kernel_means(torch.from_numpy(z), torch.from_numpy(p), torch.from_numpy(w), ladder, chunk=chunk)
    np.testing.assert_allclose(found.numpy(), naive_log_means(z, p, w, ladder.temperatures), rtol=0, atol=2e-4)


def adversarial(kind: str, rng: np.random.Generator) -> np.ndarray:
    if kind == "random":
        return rng.normal(size=(40, 784)) / 28
    if kind == "large norms":  # near one another, far from the origin: nothing but cancellation
        return 300.0 + rng.normal(size=(40, 784))
    if kind == "antipodal":  # partial sums as large as they can be
        half = rng.uniform(1.0, 2.0, size=(20, 3000))
        return np.concatenate([half, -half])
    if kind == "wide":
        return 10.0 + rng.normal(size=(30, 3000))
    if kind == "one large coordinate":
        z = rng.normal(size=(40, 600))
        z[:, 0] = 1e6 + 1e4 * z[:, 0]
        return z
    if kind == "images of 49,152 entries":
        return 0.3 + rng.normal(size=(12, 49_152)) / 222
    if kind == "all scales":  # of coordinates and of records
        return rng.normal(size=(30, 5000)) * 10.0 ** rng.uniform(-7, 1, 5000) * 10.0 ** rng.uniform(-4, 0, (30, 1))
    if kind == "one sign":  # every rounding of the running sums goes the same way
        return np.full((6, 8192), 1.0 + 2.0**-13) + 2.0**-20 * rng.integers(0, 2, size=(6, 8192))
    return rng.normal(size=(40, 1)) * 1e-10


KINDS = (
    "random", "large norms", "antipodal", "wide", "one large coordinate", "tiny", "images of 49,152 entries",
    "all scales", "one sign",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_cost_error_bounds_the_error(kind: str) -> None:
    """The vectors are rounded to float32 too; the exact cost is that of the unrounded ones."""
    worst = 0.0
    for seed in range(3):
        z = adversarial(kind, np.random.default_rng(seed))
        x = torch.from_numpy(z.astype(np.float32))
        half = kernel.half_square_norms(x)
        with strict_float32():
            found = kernel.costs(x, x, half, half).double().numpy()
        errors = np.abs(found - exact_costs(z, z))
        bound = cost_error(z.shape[1], float((z**2).sum(1).max()))
        assert errors.max() <= bound
        worst = max(worst, float(errors.max() / bound))
    assert worst > 1e-4  # the bound is about this error, not about nothing


def test_cost_error_grows_with_dimension_and_norm() -> None:
    assert cost_error(256, 1.0) < cost_error(257, 1.0) < cost_error(5000, 1.0)
    assert cost_error(784, 3.0) == pytest.approx(3.0 * cost_error(784, 1.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_both_errors_bound_what_the_sums_are_off(kind: str, spread: float) -> None:
    """Against float64 on the unrounded vectors, in units in which the allowance is not everything."""
    z = adversarial(kind, np.random.default_rng(7))
    exact = exact_costs(z, z)
    largest = float((z**2).sum(1).max())
    temperature = max(spread * float(np.median(exact)), 3.0 * cost_error(z.shape[1], largest))
    ladder = KernelLadder.plan((2 * temperature, temperature, 0.7 * temperature))
    w = weights(3, len(z), 8)
    x = torch.from_numpy(z.astype(np.float32))
    sums = pair_sums(x, torch.from_numpy(w), ladder).numpy()
    means = log_kernel_means(x, x, torch.from_numpy(w), ladder).numpy()
    for g, epsilon in enumerate(ladder.temperatures):
        allowed = cost_error(z.shape[1], largest) / epsilon + SUM_ERROR
        exponents = np.log(w[g].astype(np.float64)) - exact / epsilon
        np.testing.assert_allclose(means[g], logsumexp(exponents, axis=1) - math.log(len(z)), rtol=0, atol=allowed)
        np.fill_diagonal(exponents, -np.inf)
        without = logsumexp(exponents, axis=1) - math.log(len(z))
        normal = without > -60  # float32 kernels below that lose digits: they only ever count as less
        assert (sums[g] <= np.exp(without + allowed)).all()
        np.testing.assert_allclose(np.log(sums[g][normal]), without[normal], rtol=0, atol=allowed)


def lattice(n: int) -> np.ndarray:
    """Points on a line whose costs are exact in float32, so only kernels and sums err."""
    return np.random.default_rng(n).integers(0, 24, size=(n, 1)).astype(np.float32) / 8.0


@pytest.mark.parametrize("temperatures", [(3.2, 1.6, 0.8, 0.4, 0.2, 0.1), (1.7, 0.9, 0.11)])
def test_sum_error_bounds_the_relative_error(temperatures: tuple[float, ...]) -> None:
    ladder = KernelLadder.plan(temperatures)
    n = 1300
    z, w = lattice(n), weights(len(temperatures), n, 5)
    costs = (z.astype(np.float64) - z.astype(np.float64).T) ** 2 / 2
    assert costs.max() / min(temperatures) < 80  # no kernel underflows
    sums = pair_sums(torch.from_numpy(z), torch.from_numpy(w), ladder).numpy()
    means = log_kernel_means(torch.from_numpy(z), torch.from_numpy(z), torch.from_numpy(w), ladder).numpy()
    worst = 0.0
    for g, epsilon in enumerate(ladder.temperatures):
        full = np.exp(-costs / epsilon)
        whole = full @ w[g].astype(np.float64) / n
        np.fill_diagonal(full, 0.0)
        exact = full @ w[g].astype(np.float64) / n
        worst = max(worst, float(np.abs(sums[g] / exact - 1).max()), float(np.abs(means[g] - np.log(whole)).max()))
    assert 1e-9 < worst <= SUM_ERROR


def test_sum_error_holds_for_many_points() -> None:
    """Tens of thousands of terms: the sum must not be one long float32 chain."""
    points = np.zeros((40_000, 1), np.float32)
    w = np.full((1, len(points)), 1.0 + 2**-12, np.float32)
    found = log_kernel_means(torch.zeros(3, 1), torch.from_numpy(points), torch.from_numpy(w), KernelLadder.plan([1.0]))
    np.testing.assert_allclose(found.numpy(), math.log1p(2**-12), rtol=0, atol=1e-7)


@pytest.mark.parametrize("distance", [1e2, 1e4, 1e6])
def test_far_away_records_stay_finite(distance: float) -> None:
    points = sample(50, 3, 0)
    z = np.array([[distance, 0, 0], [0, -distance, 0]], np.float32)
    ladder = KernelLadder.plan((0.4, 0.2, 0.07))
    w = weights(3, 50, 1)
    found = log_kernel_means(torch.from_numpy(z), torch.from_numpy(points), torch.from_numpy(w), ladder).numpy()
    assert np.isfinite(found).all()
    exact = naive_log_means(z, points, w, ladder.temperatures)
    allowed = SUM_ERROR + cost_error(3, distance**2) / np.array(ladder.temperatures)[:, None]
    assert (np.abs(found - exact) <= allowed).all()
    sums = pair_sums(torch.from_numpy(z), torch.ones(3, 2), ladder)
    assert (sums == 0).all()


def ladder_kernels(ladder: KernelLadder, cost: torch.Tensor) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    for position, tensor in ladder.kernels(cost):
        assert position not in found
        found[position] = tensor.clone()
    return found


@given(
    st.lists(st.floats(0.01, 2.0), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.5, 0.25, 2.0, 1.0 + 2e-16, 0.5 * (1 + 2e-16), 1 - 1e-16]), max_size=6),
)
def test_every_temperature_gets_its_own_kernel(base: list[float], factors: list[float]) -> None:
    """Near-equal temperatures included: two of them may be half of the same third one."""
    temperatures = base + [base[0] * factor for factor in factors]
    ladder = KernelLadder.plan(temperatures)
    assert ladder.temperatures == tuple(sorted(set(temperatures), reverse=True))
    cost = torch.linspace(0, 0.5, 9).reshape(3, 3)
    found = ladder_kernels(ladder, cost)
    assert sorted(found) == list(range(len(ladder.temperatures)))
    for position, tensor in found.items():
        expected = torch.exp(-cost.double() / ladder.temperatures[position])
        torch.testing.assert_close(tensor.double(), expected, rtol=SUM_ERROR, atol=1e-30)


def test_plan_of_the_default_temperatures() -> None:
    ladder = KernelLadder.plan((0.07, 0.8, 0.56, 0.4, 0.28, 0.2, 0.14, 0.1, 0.085))
    exponentials = [t for t, parent in zip(ladder.temperatures, ladder.parents, strict=True) if parent is None]
    assert exponentials == [0.8, 0.56, 0.085]
    for t, parent in zip(ladder.temperatures, ladder.parents, strict=True):
        assert parent is None or ladder.temperatures[parent] == pytest.approx(2 * t, rel=1e-14)


def test_chains_have_at_most_five_squarings() -> None:
    ladder = KernelLadder.plan([2.0**-i for i in range(14)])
    depth: list[int] = []
    for parent in ladder.parents:
        depth.append(0 if parent is None else depth[parent] + 1)
    assert max(depth) == 5
    assert depth.count(0) == 3


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_strict_float32_restores_the_setting(setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with strict_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == setting
        with pytest.raises(KeyError), strict_float32():
            raise KeyError
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_threads")
def test_progress_rises_to_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE", 16)
    ladder = KernelLadder.plan((0.4,))
    z = torch.from_numpy(sample(100, 2, 0))
    for call in (
        lambda report: pair_sums(z, torch.ones(1, 100), ladder, report),
        lambda report: log_kernel_means(z, z[:30], torch.ones(1, 30), ladder, report, chunk=16),
    ):
        seen: list[tuple[int, int]] = []
        call(lambda done, total, seen=seen: seen.append((done, total)))
        assert len(seen) > 3
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]
        assert len({total for _, total in seen}) == 1


@pytest.mark.usefixtures("_threads")
def test_an_interrupt_from_the_progress_call_stops_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE", 16)
    z = torch.from_numpy(sample(100, 2, 0))
    threads = torch.get_num_threads()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair_sums(z, torch.ones(1, 100), KernelLadder.plan((0.4,)), interrupt)
    assert torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_every_item_is_dealt_once(count: int) -> None:
    hands = shared_out(list, list(range(count)), CPU)
    assert sorted(item for hand in hands for item in hand) == list(range(count))
    assert len(hands) == min(count, torch.get_num_threads())


def with_threads(count: int, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return call()
    finally:
        torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_TILE", 16)
    z, w = torch.from_numpy(sample(1500, 3, 3)), torch.from_numpy(weights(2, 1500, 4))
    ladder = KernelLadder.plan((0.4, 0.3))
    for call in (lambda: pair_sums(z, w, ladder), lambda: log_kernel_means(z, z, w, ladder, chunk=64)):
        first = with_threads(1, call)
        for count in (2, 3, 7):
            assert torch.equal(with_threads(count, call), first)


@pytest.mark.usefixtures("_threads")
def test_results_come_in_order_and_few_wait() -> None:
    alive, most, lock = 0, 0, Lock()

    def work(item: int) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        time.sleep(0.002 * (item % 3 == 0))  # the first ones are slow
        assert torch.get_num_threads() == 1
        return item

    found = []
    for item in in_order(work, range(60), CPU, Counter(None, 60)):
        found.append(item)
        with lock:
            alive -= 1
    assert found == list(range(60))
    assert most <= 2 * workers(CPU) + 1


def test_a_failure_stops_the_other_threads() -> None:
    steps = 0

    def call() -> torch.Tensor:
        counter = Counter(None, 10**6)

        def work(item: int) -> None:
            nonlocal steps
            if item == 1:
                raise KeyError("second")
            for _ in range(10**4):
                counter.add()
                steps += 1
                time.sleep(0.001)

        for _ in in_order(work, range(50), CPU, counter):
            pass
        return torch.empty(0)

    with pytest.raises(KeyError, match="second"):
        with_threads(2, call)
    assert steps < 2000


@pytest.mark.usefixtures("_threads")
def test_autocast_around_changes_no_bit() -> None:
    z, w = torch.from_numpy(sample(600, 3, 3)), torch.from_numpy(weights(1, 600, 4))
    ladder = KernelLadder.plan((0.4,))
    calls = (lambda: pair_sums(z, w, ladder), lambda: log_kernel_means(z, z[:50], w[:, :50], ladder))
    before = [call() for call in calls]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(call(), found) for call, found in zip(calls, before, strict=True))


def test_counter_without_a_listener() -> None:
    counter = Counter(None, 3)
    counter.add(3)
    counter.add()


def test_shared_work_has_one_tensor_thread_even_alone() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for items in ([0], [0, 1], list(range(7))):
            assert set(shared_out(lambda hand: torch.get_num_threads(), items, CPU)) == {1}
            assert set(in_order(lambda item: torch.get_num_threads(), items, CPU, Counter(None, 7))) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
