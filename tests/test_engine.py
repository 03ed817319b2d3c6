"""From a floor to noise, forecasts and engines: against brute force, and on real Opacus runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_reconbound import (
    Schedule,
    SourceCertificate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_noise_scale,
    calibrate_sample_rate,
    calibrate_steps,
    forecast,
    make_private_with_rho,
)
from opacus_reconbound.accountants import PRVMutualInformationAccountant, RDPMutualInformationAccountant
from opacus_reconbound.certificates import BlockDesign, ReplicaDesign
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.engine import require_accountant
from opacus_reconbound.errors import (
    AccountingError,
    CalibrationError,
    FloorUnreachableError,
    InvalidValueError,
    ReconstructionBudgetExceeded,
)
from opacus_reconbound.representations import Pixels


def of(*designs: Any) -> SourceCertificate:
    return SourceCertificate(
        designs=designs,
        trace=TraceScale(scale=1.0, upper=1.1, level=0.05, pairs=10, squared_diameter=4.0),
        representation=Pixels((0, 1)).describe((4,)),
        reference=SampleSummary(n=10, fingerprint="a"),
        estimation=SampleSummary(n=10, fingerprint="b"),
        alpha=0.05,
        alpha_split={"replica": 0.05},
        seed=0,
    )


def block(size: int, *, dither: float, intercept: float) -> BlockDesign:
    """With a distortion of ``intercept`` at zero leakage."""
    variance = (intercept + dither) / size
    return BlockDesign(
        block_size=size, dither=dither, entropy_bits=0.5 * size * math.log2(2.0 * math.pi * math.e * variance)
    )


LINEAR = of(ReplicaDesign(temperature=1.0, intercept=0.9))
certificates = st.lists(
    st.one_of(
        st.builds(
            ReplicaDesign,
            temperature=st.floats(0.02, 2.0),
            intercept=st.floats(0.1, 0.99),
            replicas=st.integers(2, 4),
        ),
        st.builds(
            block,
            st.sampled_from([1, 8, 28]),
            dither=st.floats(0.1, 10.0),
            intercept=st.floats(0.01, 1.9),
        ),
    ),
    min_size=1,
    max_size=4,
).map(lambda designs: of(*designs))
rates = st.sampled_from([1e-4, 0.01, 1 / 93, 0.3, 1.0])


# ---- calibrate_noise -------------------------------------------------------------------------------------------------


@given(certificate=certificates, share=st.floats(0.05, 0.99), rate=rates, steps=st.sampled_from([1, 77, 40_000]))
def test_the_noise_keeps_the_floor_and_less_does_not(
    certificate: SourceCertificate, share: float, rate: float, steps: int
) -> None:
    floor = share * certificate.highest_rho
    assume(floor > 1e-3)

    def rho(sigma: float) -> float:
        schedule = Schedule.constant(sample_rate=rate, noise_multiplier=sigma, steps=steps)
        return certificate.bound(schedule.charged_bits).rho

    sigma = calibrate_noise(certificate, min_rho=floor, sample_rate=rate, steps=steps)
    assert rho(sigma) >= floor
    assert rho(sigma * (1 - 3e-6)) < floor
    accountant = RDPMutualInformationAccountant()
    accountant.set_floor(certificate, floor)
    assert not accountant.would_exceed(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    coarse = calibrate_noise(certificate, min_rho=floor, sample_rate=rate, steps=steps, relative_tolerance=0.1)
    assert sigma * (1 - 1e-5) <= coarse <= sigma * 1.11


def test_nothing_to_hide_needs_no_noise() -> None:
    assert calibrate_noise(LINEAR, min_rho=0.5, sample_rate=0, steps=10) == 0
    assert calibrate_noise(LINEAR, min_rho=0.5, sample_rate=0.1, steps=0) == 0


@pytest.mark.parametrize("floor", [0, -1, 1.0001, math.nan, math.inf, "high", True])
def test_floors_outside_the_range(floor: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"min_rho"):
        calibrate_noise(LINEAR, min_rho=floor, sample_rate=0.1, steps=10)
    with pytest.raises(InvalidValueError, match=r"min_rho"):
        forecast(LINEAR, min_rho=floor, sample_rate=0.1, noise_multiplier=1, steps=10)


def test_a_floor_above_the_highest() -> None:
    with pytest.raises(FloorUnreachableError, match=r"zero leakage is 0\.9486"):
        calibrate_noise(LINEAR, min_rho=0.95, sample_rate=0.1, steps=10)
    with pytest.raises(CalibrationError, match="zero bits"):
        calibrate_noise(of(ReplicaDesign(temperature=1.0, intercept=0.25)), min_rho=0.5, sample_rate=0.1, steps=10)


@pytest.mark.parametrize(
    ("change", "match"),
    [({"sample_rate": 1.2}, "Found 1.2"), ({"steps": -1}, "Found -1"), ({"steps": 1.5}, "Found 1.5")],
)
def test_bad_schedules(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidValueError, match=match):
        calibrate_noise(LINEAR, **{"min_rho": 0.5, "sample_rate": 0.1, "steps": 10} | change)


# ---- steps, batches, schedules ---------------------------------------------------------------------------------------


@given(certificate=certificates, share=st.floats(0.05, 0.99), rate=rates, sigma=st.sampled_from([0.7, 1.1, 6.0]))
def test_the_steps_that_are_found_keep_the_floor_in_a_forecast(
    certificate: SourceCertificate, share: float, rate: float, sigma: float
) -> None:
    floor = share * certificate.highest_rho
    assume(floor > 1e-3)
    run = {"sample_rate": rate, "noise_multiplier": sigma}
    try:
        steps = calibrate_steps(certificate, min_rho=floor, **run)
    except CalibrationError:
        assert forecast(certificate, **run, steps=1, min_rho=floor).last_step == 0
        return
    assert steps is not None
    assert forecast(certificate, **run, steps=steps, min_rho=floor).last_step is None
    assert forecast(certificate, **run, steps=steps + 1, min_rho=floor).last_step == steps


@given(certificate=certificates, share=st.floats(0.05, 0.95), steps=st.integers(1, 2000), sigma=st.floats(0.5, 9))
def test_the_rate_that_is_found_keeps_the_floor(
    certificate: SourceCertificate, share: float, steps: int, sigma: float
) -> None:
    floor = share * certificate.highest_rho
    assume(floor > 1e-3)
    rate = calibrate_sample_rate(certificate, min_rho=floor, noise_multiplier=sigma, steps=steps)
    run = {"noise_multiplier": sigma, "steps": steps, "min_rho": floor}
    assert forecast(certificate, sample_rate=rate, **run).last_step is None
    if rate < 1:
        assert forecast(certificate, sample_rate=rate + 2.0**-24, **run).last_step is not None


def test_the_factor_that_is_found_keeps_the_floor() -> None:
    shape = Schedule.from_arrays(sample_rates=0.05, noise_multipliers=[1.0 - 0.001 * i for i in range(500)])
    factor = calibrate_noise_scale(LINEAR, min_rho=0.7, schedule=shape)
    assert LINEAR.bound(shape.scaled(factor).charged_bits).rho >= 0.7
    assert LINEAR.bound(shape.scaled(factor * (1 - 2e-6)).charged_bits).rho < 0.7
    accountant = RDPMutualInformationAccountant()
    accountant.set_floor(LINEAR, 0.7)
    for run in shape.scaled(factor):
        accountant.step(noise_multiplier=run.noise_multiplier, sample_rate=run.sample_rate)


@pytest.mark.parametrize("records", [97, 100, 1000])
def test_the_batch_size_that_is_found_keeps_the_floor_in_an_engine(records: int) -> None:
    size = calibrate_batch_size(LINEAR, min_rho=0.8, records=records, noise_multiplier=1.5, epochs=3)
    assert 1 < size < records
    rhos = []
    for batch_size in (size, size + 1):
        engine = PrivacyEngine(accountant="rdp+mi")
        made = parts(1, records)
        made["data_loader"] = DataLoader(made["data_loader"].dataset, batch_size=batch_size)
        _, optimizer, loader = engine.make_private(**made, noise_multiplier=1.5)
        accountant = require_accountant(engine)
        accountant.history = [(1.5, optimizer.step_hook.sample_rate, 3 * len(loader))]
        rhos.append(accountant.bound(LINEAR).rho)
    assert rhos[0] >= 0.8 > rhos[1]


def test_what_can_be_had_is_named_where_a_floor_cannot() -> None:
    with pytest.raises(CalibrationError, match=r"A single step at sample_rate = 1, .*attainable is 0\.\d+, at 1 step"):
        calibrate_steps(LINEAR, min_rho=0.9, sample_rate=1.0, noise_multiplier=1.2)
    with pytest.raises(CalibrationError, match=r"Even batch_size = 1 leaks .*attainable is 0, at batch_size = 1\.$"):
        calibrate_batch_size(LINEAR, min_rho=0.9, records=10, noise_multiplier=0.2, epochs=100)
    with pytest.raises(CalibrationError, match=r"Even sample_rate = 5\.96e-08 .*is 0, at sample_rate = 5\.96e"):
        calibrate_sample_rate(LINEAR, min_rho=0.9, noise_multiplier=0.0, steps=1)
    edge = of(ReplicaDesign(temperature=1.0, intercept=0.25))
    with pytest.raises(CalibrationError, match=r"zero bits.*attainable is 0\.5, at noise_multiplier = inf"):
        calibrate_noise(edge, min_rho=0.5, sample_rate=0.1, steps=10)
    with pytest.raises(CalibrationError, match=r"zero bits.*attainable is 0\.5, at noise_scale = inf"):
        some = Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=1)
        calibrate_noise_scale(edge, min_rho=0.5, schedule=some)
    for calibrate in (
        lambda: calibrate_steps(LINEAR, min_rho=0.95, sample_rate=0.1, noise_multiplier=1.0),
        lambda: calibrate_sample_rate(LINEAR, min_rho=0.95, noise_multiplier=1.0, steps=1),
        lambda: calibrate_batch_size(LINEAR, min_rho=0.95, records=9, noise_multiplier=1.0, steps=1),
    ):
        with pytest.raises(FloorUnreachableError, match=r"zero leakage is 0\.9486"):
            calibrate()
    assert calibrate_steps(LINEAR, min_rho=0.9, sample_rate=0.0, noise_multiplier=1.0) is None


# ---- forecast --------------------------------------------------------------------------------------------------------


def brute_force(accountant: RDPMutualInformationAccountant, rate: float, sigma: float, planned: int) -> int | None:
    """Step until the accountant refuses; None where it never does before the planned end."""
    while len(accountant) < planned:
        try:
            accountant.step(noise_multiplier=sigma, sample_rate=rate)
        except ReconstructionBudgetExceeded:
            return len(accountant)
    return None


@given(
    certificate=certificates,
    share=st.floats(0.3, 0.999),
    before=st.lists(st.tuples(st.sampled_from([0.8, 1.5, 3.0]), rates, st.integers(1, 20)), max_size=3),
    rate=st.sampled_from([0.05, 1 / 93, 1.0]),
    sigma=st.sampled_from([0.7, 1.1, 6.0]),
    planned=st.integers(0, 120),
)
def test_the_forecast_is_what_the_accountant_does(
    certificate: SourceCertificate,
    share: float,
    before: list[tuple[float, float, int]],
    rate: float,
    sigma: float,
    planned: int,
) -> None:
    floor = share * certificate.highest_rho
    assume(floor > 0)
    accountant = RDPMutualInformationAccountant()
    accountant.history = before
    taken = len(accountant)
    ahead = forecast(
        certificate,
        sample_rate=rate,
        noise_multiplier=sigma,
        steps=taken + planned,
        min_rho=floor,
        steps_taken=taken,
        bits_taken=accountant.charged_bits,
    )
    assert ahead.leakage_bits == pytest.approx(
        accountant.leakage_after(noise_multiplier=sigma, sample_rate=rate, steps=planned), rel=1e-14
    )
    assert ahead.rho == certificate.bound(ahead.leakage_bits or 0.0).rho
    assert ahead.budget_bits == certificate.leakage_budget(floor)
    assert ahead.highest_rho == certificate.highest_rho
    accountant.set_floor(certificate, floor)
    # a floor breached already is told even where no step is planned any more
    assert ahead.last_step == (taken if ahead.breached else brute_force(accountant, rate, sigma, taken + planned))


@given(rate=rates, sigma=st.sampled_from([0.7, 1.1, 6.0]), allowed=st.integers(0, 60))
def test_a_budget_that_a_step_meets_exactly(rate: float, sigma: float, allowed: int) -> None:
    """The floor lies exactly at ρ* after so many steps: that step is still taken, in the forecast and in truth."""
    certificate = of(ReplicaDesign(temperature=0.01, intercept=0.9))
    floor = certificate.bound(
        Schedule.constant(sample_rate=rate, noise_multiplier=sigma, steps=allowed).charged_bits
    ).rho
    assume(floor > 0)
    accountant = RDPMutualInformationAccountant()
    accountant.set_floor(certificate, floor)
    ahead = forecast(certificate, sample_rate=rate, noise_multiplier=sigma, steps=allowed + 40, min_rho=floor)
    assert ahead.last_step == brute_force(accountant, rate, sigma, allowed + 40)


def test_forecasts_without_an_end_or_a_floor() -> None:
    open_end = forecast(LINEAR, sample_rate=0.1, noise_multiplier=1.0, steps=None, min_rho=0.8)
    assert (open_end.steps, open_end.leakage_bits, open_end.rho) == (None, None, None)
    closed = forecast(LINEAR, sample_rate=0.1, noise_multiplier=1.0, steps=10_000, min_rho=0.8)
    assert open_end.last_step == closed.last_step
    assert closed.last_step is not None
    assert 0 < closed.last_step < 10_000
    assert "no planned end" in open_end.describe()
    assert f"reached at step {closed.last_step:,}, and training will stop there." in closed.describe()
    assert forecast(LINEAR, sample_rate=0.1, noise_multiplier=1.0, steps=10).describe().endswith("bits).")
    safe = forecast(LINEAR, sample_rate=0.1, noise_multiplier=50.0, steps=10, min_rho=0.8)
    assert safe.last_step is None
    assert "the floor of 0.8 is not reached" in safe.describe()


@pytest.mark.parametrize("min_rho", [None, 0.7])
def test_a_forecast_names_the_budget_that_ends_the_run_and_not_a_floor_that_does_not(min_rho: float | None) -> None:
    planned = {"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 10_000, "min_rho": min_rho}
    floor = forecast(LINEAR, **{**planned, "min_rho": 0.8})
    assert floor.budget_bits is not None
    ahead = forecast(LINEAR, **planned, budget_bits=floor.budget_bits)
    assert ahead.last_step == floor.last_step
    budget = f"the budget of {floor.budget_bits:.6g} bits in force is reached at step {floor.last_step:,}"
    assert budget in ahead.describe()
    assert "the floor of" not in ahead.describe()
    other = forecast(LINEAR, **{**planned, "min_rho": 0.8}, budget_bits=2 * floor.budget_bits)
    assert other == floor
    ample = forecast(LINEAR, **planned, budget_bits=1e-9 if min_rho is None else 1e-12)
    assert ample.last_step == 0
    assert "in force is reached at step 0" in ample.describe()


def test_a_noise_schedule_that_is_none() -> None:
    with pytest.raises(InvalidValueError, match=r"Expected a Schedule\. Found \[1, 2\]\. Make one with"):
        calibrate_noise_scale(LINEAR, min_rho=0.7, schedule=[1, 2])  # type: ignore[arg-type]


def test_a_forecast_without_noise() -> None:
    ahead = forecast(LINEAR, sample_rate=0.1, noise_multiplier=0.0, steps=10, min_rho=0.8)
    assert (ahead.last_step, ahead.rho, ahead.leakage_bits) == (0, 0.0, math.inf)
    assert "inf bits" in ahead.describe()
    little = forecast(LINEAR, sample_rate=1.0, noise_multiplier=1e-153, steps=10, min_rho=0.8)
    assert "bits" in little.describe()
    nobody = forecast(LINEAR, sample_rate=0.0, noise_multiplier=0.0, steps=10, min_rho=0.8)
    assert (nobody.last_step, nobody.leakage_bits) == (None, 0.0)


def test_a_spent_account() -> None:
    ahead = forecast(
        LINEAR, sample_rate=0.1, noise_multiplier=1.0, steps=100, min_rho=0.8, steps_taken=60, bits_taken=5.0
    )
    assert ahead.last_step == 60


def test_epsilon_beside_a_forecast() -> None:
    before = [(2.0, 0.1, 60)]
    run = {"sample_rate": 0.1, "noise_multiplier": 1.0, "min_rho": 0.8, "delta": 1e-5, "prv": True}
    ahead = forecast(LINEAR, **run, steps=600, steps_taken=60, bits_taken=0.1, history=before)
    assert ahead.last_step is not None
    for found, steps in ((ahead.epsilon, 600), (ahead.last_epsilon, ahead.last_step)):
        assert found is not None
        for kind, value in ((RDPMutualInformationAccountant, found.rdp), (PRVMutualInformationAccountant, found.prv)):
            accountant = kind()
            accountant.history = [*before, (1.0, 0.1, steps - 60)]
            assert value == accountant.get_epsilon(1e-5)
        assert found.prv is not None
        assert found.prv < found.rdp
        assert found.describe() in ahead.describe()
        assert "at δ = 1e-05" in found.describe()
    assert forecast(LINEAR, **run | {"prv": False}, steps=5).describe().count("by RDP at") == 1
    open_end = forecast(LINEAR, **run | {"prv": False}, steps=None)
    assert open_end.epsilon is None
    assert open_end.last_epsilon is not None
    without = forecast(LINEAR, **run | {"delta": None}, steps=600)
    assert (without.epsilon, without.last_epsilon) == (None, None)
    assert "ε" not in without.describe()
    with pytest.raises(InvalidValueError, match="history to hold the 60 steps taken, for ε"):
        forecast(LINEAR, **run, steps=600, steps_taken=60, bits_taken=0.1)
    with pytest.raises(InvalidValueError, match=r"delta in \(0, 1\)"):
        forecast(LINEAR, **run | {"delta": 1.0}, steps=600)


def test_epsilon_without_noise() -> None:
    ahead = forecast(LINEAR, sample_rate=0.1, noise_multiplier=0.0, steps=10, min_rho=0.8, delta=1e-5, prv=True)
    assert ahead.epsilon is not None
    assert ahead.last_epsilon is not None
    assert (ahead.epsilon.rdp, ahead.epsilon.prv, ahead.last_epsilon.rdp) == (math.inf, math.inf, 0.0)
    assert "ε <= inf by RDP" in ahead.describe()


# ---- make_private_with_rho -------------------------------------------------------------------------------------------


def parts(batches: int, batch_size: int = 2) -> dict[str, Any]:
    n = batches * batch_size
    data = TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 2)
    module = torch.nn.Linear(4, 2)
    return {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "data_loader": DataLoader(data, batch_size=batch_size),
        "max_grad_norm": 1.0,
    }


def train(made: Any, epochs: int, loss: Any = torch.nn.functional.cross_entropy) -> None:
    module, optimizer, loader = made[0], made[1], made[-1]
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss(module(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("mechanism", ["rdp+mi", "prv+mi"])
@pytest.mark.parametrize("batches", [1, 7, 93, 99])  # int(1/(1/n)) is n - 1 for the last two
def test_all_epochs_run_and_no_step_more(batches: int, mechanism: str) -> None:
    epochs = 3
    engine = PrivacyEngine(accountant=mechanism)
    made = make_private_with_rho(engine, **parts(batches), certificate=LINEAR, min_rho=0.8, epochs=epochs)
    steps = int(1 / (1 / batches))
    assert len(made[-1]) == steps
    train(made, epochs)
    accountant = require_accountant(engine)
    assert len(accountant) == epochs * steps
    assert accountant.history == [(made[1].noise_multiplier, 1 / steps, epochs * steps)]
    assert accountant.bound(LINEAR).rho >= 0.8
    # the least noise, to its tolerance: a little less would not have done, and the next step is refused
    less = Schedule.constant(
        sample_rate=1 / steps, noise_multiplier=made[1].noise_multiplier * (1 - 3e-6), steps=epochs * steps
    )
    assert LINEAR.bound(less.charged_bits).rho < 0.8
    with pytest.raises(ReconstructionBudgetExceeded):
        train(made, 1)
    assert len(accountant) == epochs * steps


def test_a_loader_that_samples_by_poisson_already() -> None:
    given = parts(93)
    given["data_loader"] = DPDataLoader.from_data_loader(given["data_loader"])
    engine = PrivacyEngine(accountant="rdp+mi")
    made = make_private_with_rho(engine, **given, certificate=LINEAR, min_rho=0.8, epochs=2)
    train(made, 2)
    assert len(require_accountant(engine)) == 2 * len(made[-1])


def test_steps_already_charged_count() -> None:
    engine = PrivacyEngine(accountant="rdp+mi")
    accountant = require_accountant(engine)
    accountant.history = [(1.0, 0.05, 20)]
    already = accountant.charged_bits
    fresh = calibrate_noise(LINEAR, min_rho=0.8, sample_rate=1 / 10, steps=20)
    made = make_private_with_rho(engine, **parts(10), certificate=LINEAR, min_rho=0.8, epochs=2)
    assert made[1].noise_multiplier > fresh
    train(made, 2)
    assert accountant.charged_bits > already
    assert accountant.bound(LINEAR).rho >= 0.8
    with pytest.raises(ReconstructionBudgetExceeded):
        train(made, 1)


def test_an_armed_floor_stays_and_is_calibrated_to() -> None:
    engine = PrivacyEngine(accountant="rdp+mi")
    accountant = require_accountant(engine)
    accountant.set_floor(LINEAR, 0.9)
    made = make_private_with_rho(engine, **parts(10), certificate=LINEAR, min_rho=0.8, epochs=2)
    assert accountant.budget_bits == LINEAR.leakage_budget(0.9)
    train(made, 2)
    assert accountant.bound(LINEAR).rho >= 0.9


def test_options_are_passed_on() -> None:
    engine = PrivacyEngine(accountant="rdp+mi")
    made = make_private_with_rho(
        engine,
        **parts(8),
        certificate=LINEAR,
        min_rho=0.8,
        epochs=2,
        grad_sample_mode="ghost",
        criterion=torch.nn.CrossEntropyLoss(),
        noise_generator=torch.Generator().manual_seed(1),
    )
    module, optimizer, criterion, loader = made
    train((module, optimizer, loader), 2, criterion)
    assert len(require_accountant(engine)) == 2 * len(loader)
    assert require_accountant(engine).bound(LINEAR).rho >= 0.8


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
@pytest.mark.filterwarnings("ignore:GDP accounting is experimental")
def test_an_engine_without_an_account_of_the_leakage(accountant: str) -> None:
    engine = PrivacyEngine(accountant=accountant)
    with pytest.raises(AccountingError, match=r"PrivacyEngine\(accountant='rdp\+mi'\)"):
        make_private_with_rho(engine, **parts(4), certificate=LINEAR, min_rho=0.8, epochs=2)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield torch.zeros(4), torch.tensor(0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"poisson_sampling": False}, AccountingError, "poisson_sampling=True"),
        ({"noise_multiplier": 1.0}, InvalidValueError, "chooses noise_multiplier"),
        ({"epochs": 0}, InvalidValueError, "epochs to be a whole number >= 1. Found 0"),
        ({"epochs": 1.5}, InvalidValueError, "Found 1.5"),
        ({"min_rho": 0.95}, FloorUnreachableError, "0.9486"),
        ({"min_rho": 0}, InvalidValueError, "min_rho > 0"),
        ({"data_loader": DataLoader(Stream())}, AccountingError, "map-style"),
        (
            {"data_loader": DataLoader(TensorDataset(torch.zeros(3, 4)), batch_size=4, drop_last=True)},
            InvalidValueError,
            "no batches",
        ),
    ],
)
def test_refusals_leave_everything_as_it_was(change: dict[str, Any], error: type[Exception], match: str) -> None:
    engine = PrivacyEngine(accountant="rdp+mi")
    arguments = parts(4) | {"certificate": LINEAR, "min_rho": 0.8, "epochs": 2} | change
    with pytest.raises(error, match=match):
        make_private_with_rho(engine, **arguments)
    accountant = require_accountant(engine)
    assert (len(accountant), accountant.budget_bits) == (0, None)
    assert not hasattr(next(arguments["module"].parameters()), "grad_sample")


@pytest.mark.parametrize("history", [[(1.0, 0.5, 100)], [(0.0, 0.1, 1)]])
def test_a_spent_account_is_refused(history: list[Any]) -> None:
    engine = PrivacyEngine(accountant="rdp+mi")
    require_accountant(engine).history = history
    with pytest.raises(CalibrationError, match="nothing is left for further training"):
        make_private_with_rho(engine, **parts(4), certificate=LINEAR, min_rho=0.8, epochs=2)


@settings(max_examples=25)
@given(certificate=certificates, share=st.floats(0.3, 0.95), batches=st.integers(1, 130), epochs=st.integers(1, 5))
def test_the_armed_budget_admits_every_planned_step(
    certificate: SourceCertificate, share: float, batches: int, epochs: int
) -> None:
    floor = share * certificate.highest_rho
    assume(floor > 1e-3)
    engine = PrivacyEngine(accountant="rdp+mi")
    made = make_private_with_rho(engine, **parts(batches, 1), certificate=certificate, min_rho=floor, epochs=epochs)
    rate = 1 / len(made[-1])
    accountant = require_accountant(engine)
    for _ in range(epochs * len(made[-1])):
        accountant.step(noise_multiplier=made[1].noise_multiplier, sample_rate=rate)
    assert accountant.bound(certificate).rho >= floor
    assert accountant.would_exceed(noise_multiplier=made[1].noise_multiplier, sample_rate=rate)
