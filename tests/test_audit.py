"""Audits of finished runs: published figures, descriptions good and bad, Opacus's own files."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from engines import make_training
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.gdp import GaussianAccountant
from opacus.accountants.utils import get_noise_multiplier

from opacus_reconbound import Audit, AuditedRun, Schedule, SourceCertificate, step_leakage
from opacus_reconbound.audit import epsilon
from opacus_reconbound.certificates import ReplicaDesign
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.errors import CalibrationError, DataError, InvalidValueError, ReconboundError
from opacus_reconbound.representations import Pixels

AUDITS = Path(__file__).resolve().parent.parent / "examples" / "audits"
CIFAR: dict[str, Any] = {"records": 45000, "batch_size": 4096, "noise_multiplier": 10, "steps": 725, "delta": 1e-5}
HISTORY = [(1.0, 0.01, 300), (0.8, 0.01, 20), (1.0, 0.01, 5)]
CERTIFICATE = SourceCertificate(
    designs=(ReplicaDesign(temperature=1.0, intercept=0.9),),
    trace=TraceScale(scale=1.0, upper=1.1, level=0.05, pairs=10, squared_diameter=4.0),
    representation=Pixels((0, 1)).describe((4,)),
    reference=SampleSummary(n=10, fingerprint="a"),
    estimation=SampleSummary(n=10, fingerprint="b"),
    alpha=0.05,
    alpha_split={"replica": 0.05},
    seed=0,
)


# ---- published runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "rate", "noise", "steps", "delta", "by_rdp"),
    [
        ("de-2022-cifar10.yaml", 4096 / 45000, 10.0, 725, 1e-5, "1.0007"),
        ("de-2022-imagenet.yaml", 16384 / 1271167, 2.5, 71589, 8e-7, "8.0001"),
    ],
)
def test_de_et_al_2022(file: str, rate: float, noise: float, steps: int, delta: float, by_rdp: str) -> None:
    found = AuditedRun.load(AUDITS / file).audit(CERTIFICATE)
    assert found.run.schedule == Schedule.constant(sample_rate=rate, noise_multiplier=noise, steps=steps)
    assert found.run.delta == delta
    assert f"{found.epsilon_rdp:.4f}" == by_rdp
    for inner, value in ((RDPAccountant(), found.epsilon_rdp), (PRVAccountant(), found.epsilon_prv)):
        inner.history = [(noise, rate, steps)]
        assert value == inner.get_epsilon(delta)
    assert found.epsilon_prv is not None
    assert found.epsilon_prv < found.epsilon_rdp
    assert found.leakage_bits == pytest.approx(steps * float(step_leakage(rate, noise)), rel=1e-12)
    assert found.leakage_bits <= found.charged_bits <= found.leakage_bits * 1.00001
    assert found.bound == CERTIFICATE.bound(found.charged_bits)


def test_what_it_says_is_on_the_safe_side() -> None:
    found = AuditedRun.load(AUDITS / "de-2022-cifar10.yaml").audit()
    said = found.explain()
    assert "CIFAR-10 at ε = 1 (arXiv 2204.13650): 725 steps at sample rate 0.09102 and noise multiplier 10." in said
    assert "at most 0.044 bits" in said, said  # 0.04351
    assert "1.001 by RDP, 0.925 by PRV" in said  # 1.00071, 0.92457
    assert "4,096 of 45,000 records" in said
    assert "a certificate" in said
    with_bound = AuditedRun.from_description(CIFAR).audit(CERTIFICATE)
    assert with_bound.bound is not None
    assert with_bound.bound.explain() in with_bound.explain()
    assert len(with_bound.assumptions) == len(found.assumptions) + 1
    assert "Poisson" in found.assumptions[0]


# ---- descriptions ----------------------------------------------------------------------------------------------------


def test_ways_to_say_the_same() -> None:
    plain = AuditedRun.from_description(CIFAR)
    rest = {key: CIFAR[key] for key in ("noise_multiplier", "delta")}
    by_rate = AuditedRun.from_description({"sample_rate": 4096 / 45000, "steps": 725, **rest})
    as_phase = {key: CIFAR[key] for key in ("batch_size", "noise_multiplier", "steps")}
    by_phase = AuditedRun.from_description({"records": 45000, "delta": 1e-5, "phases": [as_phase]})
    text = AuditedRun.from_description({key: str(value) for key, value in CIFAR.items()})  # YAML reads 1e-5 as text
    assert plain.schedule == by_rate.schedule == by_phase.schedule == text.schedule
    assert {plain.delta, by_rate.delta, by_phase.delta, text.delta} == {1e-5}
    assert AuditedRun.from_description(CIFAR, delta=1e-6).delta == 1e-6
    assert by_rate.derived == ()


def test_phases_add_up() -> None:
    phases = [
        {"batch_size": 100, "noise_multiplier": 1.0, "steps": 300},
        {"sample_rate": 0.02, "noise_multiplier": 1.5, "epochs": 2},
    ]
    run = AuditedRun.from_description({"records": 10_000, "phases": phases})
    first = Schedule.constant(sample_rate=0.01, noise_multiplier=1.0, steps=300)
    second = Schedule.constant(sample_rate=0.02, noise_multiplier=1.5, steps=100)
    assert run.schedule == first + second
    assert run.derived == (
        "phases[0]: The sample rate 0.01 is 100 of 10,000 records.",
        "phases[1]: 2 epochs at that rate are 100 steps, rounded up.",
    )


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "steps"),
    [(4900, 100, 100, 4900), (1000, 300, 1, 4), (1000, 300, 3, 10), (45000, 4096, 66, 726), (93, 1, 1, 93)],
)
def test_epochs_are_rounded_up_to_steps(records: int, batch: int, epochs: int, steps: int) -> None:
    given = {"records": records, "batch_size": batch, "epochs": epochs, "noise_multiplier": 1}
    assert AuditedRun.from_description(given).schedule.steps == steps


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"records": 10**15, "batch_size": 1, "epochs": 1}, 10**15),
        ({"records": 10**13 + 1, "batch_size": 10, "epochs": 1}, 10**12 + 1),
        ({"records": 100, "batch_size": 10, "epochs": 0.1}, 1),
        ({"records": 100, "batch_size": 10, "epochs": 0.3}, 3),
        ({"sample_rate": 1 / 49, "epochs": 100}, 4900),
        ({"sample_rate": 2.0**-45, "epochs": 1}, 2**45),
    ],
)
def test_no_step_is_lost_to_rounding(given: dict[str, Any], steps: int) -> None:
    assert AuditedRun.from_description(given | {"noise_multiplier": 1}).schedule.steps == steps


@given(records=st.integers(1, 10**7), share=st.floats(1e-6, 1), epochs=st.integers(1, 500))
def test_epochs_of_batches_are_the_exact_number_of_steps(records: int, share: float, epochs: int) -> None:
    batch = max(1, math.floor(records * share))
    given = {"records": records, "batch_size": batch, "epochs": epochs, "noise_multiplier": 1}
    assert AuditedRun.from_description(given).schedule.steps == -(-epochs * records // batch)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_noise_for_a_target(accountant: Any) -> None:
    given = {key: value for key, value in CIFAR.items() if key != "noise_multiplier"}
    run = AuditedRun.from_description(given | {"target_epsilon": 1.0, "accountant": accountant})
    sigma = run.schedule.runs[0].noise_multiplier
    expected = get_noise_multiplier(
        target_epsilon=1.0,
        target_delta=1e-5,
        sample_rate=4096 / 45000,
        steps=725,
        accountant=accountant,
        epsilon_tolerance=0.001,
    )
    assert sigma == expected
    assert 0.999 <= epsilon(run.schedule, 1e-5, accountant=accountant) <= 1.0
    assert f"get_noise_multiplier(accountant={accountant!r})" in run.derived[-1]
    assert f"{sigma:.6g}" in run.derived[-1]


def test_a_target_that_no_noise_meets() -> None:
    given = {"sample_rate": 1.0, "steps": 2**40, "delta": 1e-9, "target_epsilon": 1e-3, "accountant": "rdp"}
    with pytest.raises(CalibrationError, match=r"target_epsilon = 0\.001 at delta = 1e-09.*budget is too low"):
        AuditedRun.from_description(given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sigma": 1}, r"unknown key 'sigma'\. Known are batch_size, .*noise_multiplier.*phases"),
        (
            {"phases": [{"sigma": 1}]},
            r"phases\[0\]: unknown key 'sigma'\. Known are batch_size, .*epochs\.",
        ),
        ({"noise_multiplier": -1}, r"noise_multiplier >= 0\. Found -1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier to be a number. Found NaN"),
        ({"noise_multiplier": "ten"}, "noise_multiplier to be a number. Found 'ten'"),
        ({"noise_multiplier": True}, "Found True"),
        ({"noise_multiplier": None}, "Give noise_multiplier, or target_epsilon"),
        ({"steps": 0}, "steps to be a whole number >= 1. Found 0"),
        ({"steps": 7.5}, "Found 7.5"),
        ({"steps": 10**30}, "steps to be a whole number <="),
        ({"steps": None}, "Give steps or epochs, one of the two. Found neither"),
        ({"epochs": 3}, "Give steps or epochs, one of the two. Found both"),
        ({"steps": None, "epochs": -2}, "epochs > 0. Found -2"),
        ({"steps": None, "epochs": 1e300}, "epochs = 1e.300 at sample rate 0.0910222 are more than"),
        ({"batch_size": 45001}, "batch_size = 45,001 is more than records = 45,000"),
        ({"records": None}, "batch_size = 4096 needs records"),
        ({"sample_rate": 0.1}, "Give sample_rate or batch_size, one of the two. Found both"),
        ({"batch_size": None}, "Give sample_rate or batch_size, one of the two. Found neither"),
        ({"batch_size": None, "sample_rate": 1.5}, r"sample_rate in \[0, 1\].*Found 1\.5"),
        ({"batch_size": None, "sample_rate": 0, "steps": None, "epochs": 1}, "epochs need a sample rate above 0"),
        ({"delta": 1}, r"delta in \(0, 1\). Found 1"),
        ({"phases": [{"steps": 1}]}, "batch_size stands beside phases"),
        ({"phases": 3}, "phases: .*Found 3"),
        ({"target_epsilon": 1}, "target_epsilon and accountant go together"),
        ({"accountant": "rdp"}, "target_epsilon and accountant go together"),
        ({"target_epsilon": 1, "accountant": "gdp"}, "accountant: .*'rdp' or 'prv'.*Found 'gdp'"),
        ({"target_epsilon": 1, "accountant": "rdp"}, "target_epsilon = 1 stands for the noise_multiplier"),
        ({"target_epsilon": 1, "accountant": "rdp", "noise_multiplier": None, "delta": None}, "needs delta"),
        (
            {"target_epsilon": 1e6, "accountant": "rdp", "noise_multiplier": None},
            "= 1e.06 .*at most 1000",
        ),
    ],
)
def test_bad_descriptions(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidValueError, match=match):
        AuditedRun.from_description(CIFAR | change)


# ---- ε ---------------------------------------------------------------------------------------------------------------


def test_the_order_of_phases_makes_no_difference_to_epsilon() -> None:
    schedule = Schedule.from_history(HISTORY)
    joined = Schedule.from_history([(1.0, 0.01, 305), (0.8, 0.01, 20)])
    for accountant in ("rdp", "prv"):
        assert epsilon(schedule, 1e-5, accountant=accountant) == epsilon(joined, 1e-5, accountant=accountant)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("history", "prv"),
    [
        ([], 0.0),
        ([(0.0, 0.1, 1)], math.inf),
        ([(0.02, 0.1, 10)], None),  # Opacus: discrete mean differs from continuous mean
        ([(0.6, 0.05, 100_000)], None),  # Opacus: gigabytes
        ([(0.5 + i / 100, 0.1, 1000) for i in range(40)], None),  # Opacus: minutes
    ],
)
def test_where_prv_ends(history: Any, prv: float | None) -> None:
    found = AuditedRun.from_history(history).audit()
    assert found.epsilon_prv == prv
    said = found.explain()
    assert ("not computed (Opacus would take too long) by PRV" in said) == (prv is None)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning")
@pytest.mark.parametrize("accountant", [RDPAccountant, PRVAccountant, GaussianAccountant])
def test_states_of_opacus(tmp_path: Path, accountant: Any) -> None:
    steps = HISTORY[:1] if accountant is GaussianAccountant else HISTORY
    inner = accountant()
    for sigma, q, count in steps:
        for _ in range(count):
            inner.step(noise_multiplier=sigma, sample_rate=q)
    torch.save(inner.state_dict(), tmp_path / "account.pt")
    run = AuditedRun.load(tmp_path / "account.pt", delta=1e-6)
    assert run.schedule == Schedule.from_history(steps)
    assert run.delta == 1e-6


def test_histories_as_text(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text(json.dumps(HISTORY))
    (tmp_path / "state.json").write_text(json.dumps({"history": HISTORY, "mechanism": "rdp"}))
    (tmp_path / "history.yaml").write_text("- [1, 0.01, 300]\n- [0.8, 0.01, 20]\n- [1, 0.01, 5]\n")
    for file in ("history.json", "state.json", "history.yaml"):
        assert AuditedRun.load(tmp_path / file).schedule == Schedule.from_history(HISTORY)


def test_a_checkpoint_of_an_engine(tmp_path: Path) -> None:
    training = make_training("rdp")
    training.epoch()
    training.engine.save_checkpoint(path=tmp_path / "engine.pt", module=training.module, optimizer=training.optimizer)
    found = AuditedRun.load(tmp_path / "engine.pt").audit()
    assert found.run.schedule == Schedule.constant(sample_rate=0.2, noise_multiplier=1.0, steps=5)
    assert found.epsilon_rdp == training.engine.get_epsilon(1e-5)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    from opacus_reconbound.lightning import ReconstructionBoundCallback, private_optimizer

    training = make_training("prv+mi")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(5, 3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return private_optimizer(self, optimizer, engine=training.engine, noise_multiplier=2.0, max_grad_norm=1.0)

    trainer = L.Trainer(
        max_epochs=2,
        callbacks=[ReconstructionBoundCallback(CERTIFICATE, verbose=False)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), training.loader)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    run = AuditedRun.load(tmp_path / "run.ckpt")
    assert run.schedule == Schedule.constant(sample_rate=0.2, noise_multiplier=2.0, steps=10)


def bomb(levels: int = 12) -> str:
    """A few hundred letters of YAML that stand for 10**levels items."""
    text = "&a0 [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]"
    for level in range(1, levels):
        text = f"&a{level} [{text}{f', *a{level - 1}' * 9}]"
    return text


class Harmful:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("none.yaml", None, "There is no file"),
        ("none.pt", None, "There is no file"),
        ("empty.yaml", b"", "neither the description"),
        ("empty.json", b"", "cannot be read as JSON"),
        ("empty.pt", b"", "without executing"),
        ("text.pt", b"hello", "without executing"),
        ("twice.yaml", b"steps: 1\nsteps: 2\n", "the key 'steps' occurs twice"),
        ("twice.json", b'{"steps": 1, "steps": 2}', "the key 'steps' occurs twice"),
        ("broken.yaml", b"steps: [1", "cannot be read as YAML"),
        ("binary.yaml", b"\xff\xfe\x00", "cannot be read as YAML"),
        ("object.yaml", b"!!python/object/apply:os.mkdir [executed]", "cannot be read as YAML"),
        ("deep.json", b"[" * 100_000, "cannot be read as JSON"),
        ("number.yaml", b"3", "neither the description"),
        ("unknown.yaml", b"step: 3", "unknown.yaml: unknown key 'step'"),
        ("one.yml", b"1: 3", "one.yml: "),
        ("short.json", b"[[1, 0.01]]", r"short.json: Expected history\[0\] = .*Found \[1, 0.01\]"),
        ("swapped.json", b"[[0.01, 2, 5]]", "sample_rate in .*Found 2"),
        ("octal.yaml", b"records: 045000", "'045000' is not a number in base ten"),
        ("sixty.yaml", b"steps: 12:05", "'12:05' is not a number in base ten"),
        ("history.json", b'{"history": 5}', r"Expected a history .*Found 5\."),
        ("scalar.yaml", b"!!map 3", "expected a mapping node, but found scalar"),
        ("count.yaml", f"records: {bomb()}".encode(), r"Expected records to be a number\. Found \[\[\["),
        ("text.yaml", f"name: {bomb()}".encode(), r"name: Input should be a valid string\. Found \[\[\["),
        ("entry.yaml", f"[{bomb()}]".encode(), r"Expected history\[0\] = .*Found \[\[\["),
    ],
)
def test_bad_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ReconboundError, match=match) as error:
        AuditedRun.load(name)
    assert name in str(error.value)
    assert not Path("executed").exists()


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"history": HISTORY, "mechanism": Harmful()}, "saved.pt")
    Path("pickled.pt").write_bytes(pickle.dumps(Harmful()))
    for name in ("saved.pt", "pickled.pt"):
        with pytest.raises(DataError, match=f"{name} is no file .* without executing"):
            AuditedRun.load(name)
    assert not Path("executed").exists()
    torch.save({"weights": torch.zeros(3)}, "weights.pt")
    with pytest.raises(DataError, match=r"weights\.pt holds no account"):
        AuditedRun.load("weights.pt")


def test_results_are_frozen() -> None:
    found = AuditedRun.from_description(CIFAR).audit()
    assert isinstance(found, Audit)
    for thing, field in ((found, "epsilon_rdp"), (found.run, "delta")):
        with pytest.raises(AttributeError):
            setattr(thing, field, 0.1)
    with pytest.raises(InvalidValueError, match="delta"):
        AuditedRun.from_history(HISTORY, delta=0)
