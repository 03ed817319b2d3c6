"""The command line: every command, its numbers, and what it says to bad input."""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from opacus_reconbound import (
    Ledger,
    Pixels,
    Schedule,
    SourceCertificate,
    calibrate_batch_size,
    calibrate_noise,
    calibrate_noise_scale,
    calibrate_sample_rate,
    calibrate_steps,
    certify,
    forecast,
)
from opacus_reconbound.accountants import RDPMutualInformationAccountant
from opacus_reconbound.certificates import BlockDesign, ReplicaDesign
from opacus_reconbound.certificates.plan import SplitPlan
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary, split_indices
from opacus_reconbound.cli import main
from opacus_reconbound.comparisons import compare, prior_success

MODULE = importlib.import_module("opacus_reconbound.certificates.certify")  # the package has a function of that name
ROOT = Path(__file__).resolve().parent.parent
DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:700]
COMMANDS = ("certify", "inspect", "bound", "calibrate", "plan", "audit", "compare", "ledger", "demo")

CERTIFICATE = SourceCertificate(
    designs=(
        ReplicaDesign(temperature=0.2, intercept=0.85),
        ReplicaDesign(temperature=0.5, intercept=0.9),
        BlockDesign(block_size=28, dither=1.6, entropy_bits=7.9),
    ),
    trace=TraceScale(scale=100.0, upper=110.0, level=0.05, pairs=10, squared_diameter=4096.0),
    representation=Pixels((0, 16)).describe((8, 8)),
    reference=SampleSummary(n=100, fingerprint="a"),
    estimation=SampleSummary(n=600, fingerprint="b"),
    alpha=0.05,
    alpha_split={"replica": 0.05},
    seed=0,
)
HIGHEST = CERTIFICATE.highest_rho


class Harmful:
    """Unpickling it makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda constant: pytest.fail(f"not JSON: {constant}"))


class Runner:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, command: str, code: int = 0) -> Result:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(shlex.split(command))
        result = Result(exit_.value.code, *self.capsys.readouterr())  # type: ignore[arg-type]
        assert result.code == code, result
        return result

    def error(self, command: str, match: str) -> None:
        """Exit code 2, nothing on stdout, one line on stderr."""
        result = self(command, code=2)
        assert result.out == ""
        assert result.err.startswith("Error: ")
        assert result.err.count("\n") == 1
        assert result.err.endswith((".\n", "'\n"))  # a command to copy has no full stop
        assert "Traceback" not in result.err
        assert re.search(match, result.err), result.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def picture(path: Path, mode: str = "L", size: tuple[int, int] = (8, 8), seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = np.random.default_rng(seed).integers(0, 256, size=size[::-1], dtype=np.uint8)
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 256).save(path)
    else:
        Image.fromarray(grey).convert(mode).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything, good and bad."""
    base = tmp_path_factory.mktemp("cli")
    CERTIFICATE.save(base / "c.json")
    text = (base / "c.json").read_text()
    (base / "truncated.json").write_text(text[: len(text) // 2])
    (base / "tampered.json").write_text(text.replace('"alpha": 0.05', '"alpha": 0.04'))
    (base / "newer.json").write_text(text.replace('"schema_version": 1', '"schema_version": 2'))
    (base / "other.json").write_text("{}")
    np.save(base / "d.npy", DIGITS)
    np.save(base / "a.npy", DIGITS[:200])
    np.save(base / "b.npy", DIGITS[200:])
    np.save(base / "a-with-first-of-b.npy", np.concatenate([DIGITS[:200], DIGITS[200:201]]))
    np.savez(base / "one.npz", x=DIGITS)
    np.savez_compressed(base / "two.npz", x=DIGITS[:350], y=DIGITS[350:], label=np.arange(700))
    scaled = DIGITS / 16
    np.save(base / "float.npy", scaled)
    for name, value in (("nan", math.nan), ("inf", math.inf)):
        scaled[5, 0, 0] = value
        np.save(base / f"{name}.npy", scaled)
    np.save(base / "wide.npy", np.zeros((300, 9, 9), np.uint8))
    np.save(base / "constant.npy", np.zeros((300, 8, 8), np.uint8))
    np.save(base / "flat.npy", np.arange(1000))
    np.save(base / "none.npy", np.zeros((0, 8, 8), np.uint8))
    np.save(base / "complex.npy", DIGITS.astype(complex))
    np.save(base / "text.npy", np.array([["a", "b"]] * 300))
    harmful = np.array([Harmful()] * 300, dtype=object)
    np.save(base / "object.npy", harmful, allow_pickle=True)
    np.savez(base / "object.npz", x=harmful)
    for name in ("pickle.npy", "pickle.npz", "pickle.json"):
        (base / name).write_bytes(pickle.dumps(Harmful()))
    for name in ("empty.npy", "empty.npz", "empty.json"):
        (base / name).touch()
    whole = (base / "d.npy").read_bytes()
    (base / "cut.npy").write_bytes(whole[: len(whole) // 2])
    (base / "noise.npz").write_bytes(b"hello")
    (base / "renamed.npz").write_bytes(whole)
    (base / "renamed.npy").write_bytes((base / "one.npz").read_bytes())
    (base / "notes.txt").write_text("hello")
    for index in range(140):
        picture(base / f"images/{index % 3}/{index}.png", seed=index)
    picture(base / "sizes/0.png")
    picture(base / "sizes/1.png", size=(8, 9))
    picture(base / "channels/0.png")
    picture(base / "channels/1.png", "RGB")
    picture(base / "deep/0.png", "I;16")
    picture(base / "broken/0.png")
    (base / "broken/1.png").write_bytes((base / "broken/0.png").read_bytes()[:20])
    (base / "no-images").mkdir()
    (base / "no-images/readme.txt").write_text("hello")
    return base


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


# ---- the commands and their numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(run: Runner, command: str) -> None:
    result = run(f"{command} --help")
    assert result.err == ""
    assert result.out.startswith(f"Usage: reconbound {command}".rstrip())
    if command == "":
        for name in COMMANDS:
            assert f"\n  {name} " in result.out
        assert "..." not in result.out.split("Commands:")[1], "a description is cut off"
        assert "Exit codes" in result.out
    else:
        options = result.out.split("\nOptions:\n")[1]
        for line in re.findall(r"^  -.*$(?=\n(?:  -|\Z))", options, re.MULTILINE):
            assert re.search(r"\S  +\S", line), f"not documented: {line}"


def test_no_arguments_show_the_help_and_the_version_is_there(run: Runner) -> None:
    assert "Commands:" in run("", code=2).err
    assert re.fullmatch(r"\d+[.+].*\n", run("--version").out)


def test_certify_splits(run: Runner, tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "cert.json"
    result = run(f"certify d.npy -o {target} --n-reference 200 --n-estimation 450 --seed 3")
    parts = split_indices(700, [200, 450], seed=3)
    expected = certify(DIGITS[parts[0]], DIGITS[parts[1]], seed=3)
    assert SourceCertificate.load(target) == expected
    assert f"Wrote {target}." in result.out
    assert "200 reference and 450 estimation records" in result.out
    assert "It assumes:" in result.out
    assert [path.name for path in target.parent.iterdir()] == ["cert.json"]
    shown = run(f"certify d.npy -o {target} --n-reference 200 --n-estimation 450 --seed 3 --json").json
    assert shown["digest"] == expected.digest == run(f"inspect {target} --json").json["digest"]
    assert shown["confidence"] == 0.95


def test_certify_splits_by_a_plan(run: Runner, tmp_path: Path) -> None:
    target, file = tmp_path / "c.json", tmp_path / "plan.json"
    plan = SplitPlan.make(DIGITS, train=300, reference=200, estimation=450, independent=True, seed=5)
    plan.save(file)
    run(f"certify a.npy b.npy -o {target} --splits {file}")
    samples = (DIGITS[plan.indices("reference")], DIGITS[plan.indices("estimation")])
    assert SourceCertificate.load(target) == certify(*samples, splits=plan)
    run.error(f"certify b.npy a.npy -o {target} --splits {file}", "reference sample is not the plan's D_perp")
    run.error(f"certify a.npy -o {target} --splits {file}", "plan is about 700 records .* but the data are 200")
    run.error(f"certify d.npy -o {target} --splits {file} --n-reference 200", "so does --splits. Choose one")
    run.error(f"certify d.npy -o {target} --splits {tmp_path / 'none.json'}", "There is no plan at")
    run.error(
        f"certify --reference a.npy --estimation b.npy -o {target} --splits {file}", "estimation sample has 500 records"
    )
    SplitPlan.of(DIGITS, {"reference": range(200), "estimation": range(200, 700)}).save(file)
    run(f"certify --reference a.npy --estimation b.npy -o {target} --splits {file}")
    assert SourceCertificate.load(target).settings["splits"] == SplitPlan.load(file).digest


def test_certify_takes_samples_as_they_are(run: Runner, tmp_path: Path) -> None:
    run(f"certify --reference a.npy --estimation b.npy -o {tmp_path / 'c.json'} --value-range 0 16 --alpha 0.1")
    expected = certify(DIGITS[:200], DIGITS[200:], representation=Pixels((0, 16)), alpha=0.1)
    assert SourceCertificate.load(tmp_path / "c.json") == expected
    for normaliser in ("ucb", "900.5"):
        run(f"certify --reference a.npy --estimation b.npy -o {tmp_path / 'd.json'} --normaliser {normaliser}")
        declared: Any = normaliser if normaliser == "ucb" else float(normaliser)
        assert SourceCertificate.load(tmp_path / "d.json") == certify(DIGITS[:200], DIGITS[200:], normaliser=declared)


def test_certify_concatenates_sources_in_order(run: Runner, tmp_path: Path) -> None:
    digests = []
    for data in ("d.npy", "a.npy b.npy", "two.npz:x two.npz:y", "one.npz", "one.npz:x"):
        digests.append(run(f"certify {data} -o {tmp_path / 'c.json'} --json").json["digest"])
    assert len(set(digests)) == 1
    assert SourceCertificate.load(tmp_path / "c.json").reference.n == 100  # a seventh
    run(f"certify --reference a.npy --estimation two.npz:y -o {tmp_path / 'c.json'} --allow-repeats")
    assert "repeats values" in SourceCertificate.load(tmp_path / "c.json").assumptions[-1]


def test_certify_reads_a_folder_of_images_and_floats(run: Runner, tmp_path: Path) -> None:
    found = run(f"certify images/ -o {tmp_path / 'c.json'} --n-reference 40 --json").json
    assert (found["reference"]["n"], found["estimation"]["n"]) == (40, 100)
    assert found["representation"]["dimension"] == 64
    found = run(f"certify float.npy -o {tmp_path / 'c.json'} --value-range 0 1 --json").json
    assert found["representation"]["peak"] == 1.0


def test_certify_in_another_representation(run: Runner, tmp_path: Path) -> None:
    from opacus_reconbound.representations import Crop, Downsample, Vectors

    target = tmp_path / "c.json"
    common = f"certify --reference a.npy --estimation b.npy -o {target}"
    run(f"{common} --representation 'crop:2,2,4,4|downsample:2' --value-range 0 16")
    psi = Crop(2, 2, 4, 4, value_range=(0, 16)) | Downsample(2)
    found = SourceCertificate.load(target)
    assert found == certify(DIGITS[:200], DIGITS[200:], representation=psi)
    found.check_representation(psi)
    said = run(f"inspect {target}").out
    assert "Representation crop | downsample" in said
    run(f"{common} -r standardised:20 --cache {tmp_path / 'kept'} --reduction 10 --allow-repeats", code=2)  # constant
    run(f"certify float.npy -r vectors:9 --reduction 10 --cache {tmp_path / 'kept'} -o {target}")
    assert list((tmp_path / "kept").iterdir())
    found = SourceCertificate.load(target)
    assert found.settings["reduction"]["components"] == 10
    found.check_representation(Vectors(clip_radius=9))
    run(f"{common} --reduction none")
    assert SourceCertificate.load(target) == certify(DIGITS[:200], DIGITS[200:])


def test_certify_with_other_reference_records_or_none(run: Runner, tmp_path: Path) -> None:
    target = tmp_path / "c.json"
    said = run(f"certify --reference a.npy --estimation b.npy --reference-from elsewhere --normaliser 1300 -o {target}")
    assert "public or synthetic" in said.out
    assert "relative to the declared tr Σ" in said.out
    run(f"certify --estimation b.npy --designs block --normaliser 1300 -o {target}")
    found = SourceCertificate.load(target)
    assert (found.reference.n, found.trace.scale) == (0, 1300.0)


def test_npy_files_are_mapped_not_read(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    load = np.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        modes.append(kwargs.get("mmap_mode"))
        assert kwargs["allow_pickle"] is False
        return load(*args, **kwargs)

    monkeypatch.setattr(np, "load", spy)
    run(f"certify d.npy -o {tmp_path / 'c.json'}")
    assert modes == ["r"]


def test_inspect(run: Runner) -> None:
    text = run("inspect c.json").out
    assert CERTIFICATE.explain() in text
    assert CERTIFICATE.digest[:16] in text
    shown = run("inspect c.json --json").json
    assert shown.pop("confidence") == 0.95
    assert SourceCertificate.from_json(json.dumps(shown)) == CERTIFICATE


def test_bound(run: Runner) -> None:
    schedule = Schedule.constant(sample_rate=0.1, noise_multiplier=1.1, steps=100)
    expected = CERTIFICATE.bound(schedule.charged_bits)
    accountant = RDPMutualInformationAccountant()
    accountant.history = [(1.1, 0.1, 100)]
    shown = run("bound c.json --sample-rate 0.1 --noise-multiplier 1.1 --steps 100 --delta 1e-4 --json").json
    for name, value in {
        "leakage_bits": schedule.charged_bits,
        "rho_star": expected.rho,
        "mse": expected.mse,
        "rmse": expected.rmse,
        "rmse_per_coordinate": expected.rmse_per_coordinate,
        "psnr": expected.psnr,
        "confidence": 0.95,
        "epsilon": accountant.get_epsilon(1e-4),
        "delta": 1e-4,
    }.items():
        assert shown[name] == value, name
    assert shown["design"]["kind"] == "replica"
    text = run("bound c.json -q 0.1 -s 1.1 -t 100").out
    assert expected.explain() in text
    assert "by RDP at δ = 1e-05." in text
    assert run("bound c.json --leakage-bits 1 --json").json["rho_star"] == CERTIFICATE.bound(1.0).rho
    assert "epsilon" not in run("bound c.json --leakage-bits 1 --json").json


def test_bound_checks_a_floor(run: Runner) -> None:
    rho = CERTIFICATE.bound(1.0).rho
    assert run(f"bound c.json --leakage-bits 1 --min-rho {rho!r} --json").json["met"] is True
    missed = math.nextafter(rho, 1)
    assert run(f"bound c.json --leakage-bits 1 --min-rho {missed!r} --json", code=1).json["met"] is False
    assert "is met" in run("bound c.json --leakage-bits 1 --min-rho 0.5").out
    failed = run("bound c.json --leakage-bits 1 --min-rho 0.99", code=1)
    assert "NOT met" in failed.out
    assert failed.err == ""


@pytest.mark.parametrize(
    ("sigma", "bits", "epsilon"),
    [("0", math.inf, math.inf), ("1e-200", math.inf, math.inf), ("1e-160", None, math.inf), ("inf", 0.0, 0.0)],
)
def test_extreme_noise(run: Runner, sigma: str, bits: float | None, epsilon: float) -> None:
    """Infinite leakage, or none, is shown as that; Opacus's accountant, which fails or hangs there, is not asked."""
    shown = run(f"bound c.json -q 0.02 -s {sigma} -t 100 --json").json
    assert bits is None or float(shown["leakage_bits"]) == bits
    assert float(shown["epsilon"]) == epsilon
    if epsilon == math.inf:
        assert (shown["rho_star"], shown["epsilon"], shown["psnr"]) == (0.0, "inf", "inf")
        text = run(f"bound c.json -q 0.02 -s {sigma} -t 100").out
        assert "guarantees nothing" in text
        assert "ε <= inf" in text
        run(f"bound c.json -q 0.02 -s {sigma} -t 100 --min-rho 0.01", code=1)
        planned = run(f"plan c.json -q 0.02 -s {sigma} -t 100 --min-rho 0.5 --json", code=1).json
        assert planned["last_step"] == 0
        assert planned["rows"][0] == {"step": 0, "leakage_bits": 0.0, "rho_star": HIGHEST}
        assert planned["rows"][-1]["rho_star"] == 0.0
        text = run(f"plan c.json -q 0.02 -s {sigma} -t 100 --min-rho 0.5", code=1).out
        assert "reached at step 0" in text
        assert "nan" not in text
    else:
        assert shown["rho_star"] == HIGHEST


def test_nothing_sampled_or_no_steps_is_no_leakage(run: Runner) -> None:
    for schedule in ("-q 0 -s 0 -t 10", "-q 0.5 -s 0 -t 0"):
        shown = run(f"bound c.json {schedule} --json").json
        assert (shown["leakage_bits"], shown["rho_star"], shown["epsilon"]) == (0.0, HIGHEST, 0.0)


@pytest.mark.parametrize("rate", ["0.01", "0.3", "1"])
@pytest.mark.parametrize("steps", [1, 5000, 3_000_000])
def test_calibrate_prints_a_noise_that_keeps_the_floor(run: Runner, rate: str, steps: int) -> None:
    shown = run(f"calibrate c.json --min-rho 0.7 --sample-rate {rate} --steps {steps} --json").json
    sigma = shown["noise_multiplier"]
    least = calibrate_noise(CERTIFICATE, min_rho=0.7, sample_rate=float(rate), steps=steps)
    assert least <= sigma <= least + 1.1e-6
    assert shown["rho_star"] >= 0.7
    assert shown["min_rho"] == 0.7
    text = run(f"calibrate c.json --min-rho 0.7 --sample-rate {rate} --steps {steps}").out
    printed = re.search(r"noise_multiplier = (\S+):", text)
    assert printed is not None
    assert float(printed[1]) == sigma, "the printed figure must not be rounded below"
    assert run(f"bound c.json -q {rate} -t {steps} -s {printed[1]} --min-rho 0.7 --json").json["met"] is True
    run(f"bound c.json -q {rate} -t {steps} -s {least * (1 - 1e-5)!r} --min-rho 0.7", code=1)
    assert "ε <=" in text


def test_calibrate_finds_the_most_steps(run: Runner) -> None:
    shown = run("calibrate c.json --min-rho 0.7 -q 0.1 -s 2 --json").json
    steps = shown["steps"]
    assert steps == calibrate_steps(CERTIFICATE, min_rho=0.7, sample_rate=0.1, noise_multiplier=2.0)
    run(f"bound c.json -q 0.1 -s 2 -t {steps} --min-rho 0.7")
    run(f"bound c.json -q 0.1 -s 2 -t {steps + 1} --min-rho 0.7", code=1)
    assert f"steps = {steps}: the most that keep ρ* >= 0.7" in run("calibrate c.json --min-rho 0.7 -q 0.1 -s 2").out
    assert run("calibrate c.json --min-rho 0.7 -q 0 -s 2 --json").json["steps"] == 2**53


def test_calibrate_finds_the_largest_rate(run: Runner) -> None:
    rate = run("calibrate c.json --min-rho 0.7 -s 2 -t 500 --json").json["sample_rate"]
    assert rate == calibrate_sample_rate(CERTIFICATE, min_rho=0.7, noise_multiplier=2.0, steps=500)
    run(f"bound c.json -q {rate!r} -s 2 -t 500 --min-rho 0.7")
    run(f"bound c.json -q {rate + 2**-24!r} -s 2 -t 500 --min-rho 0.7", code=1)
    assert f"sample_rate = {rate!r}: the largest" in run("calibrate c.json --min-rho 0.7 -s 2 -t 500").out


@pytest.mark.parametrize(("option", "arguments"), [("--epochs 20", {"epochs": 20}), ("-t 500", {"steps": 500})])
def test_calibrate_finds_the_largest_batches(run: Runner, option: str, arguments: dict[str, int]) -> None:
    command = f"calibrate c.json --min-rho 0.7 -s 1.5 --records 5000 {option}"
    shown = run(f"{command} --json").json
    size = calibrate_batch_size(CERTIFICATE, min_rho=0.7, noise_multiplier=1.5, records=5000, **arguments)
    assert shown["batch_size"] == size
    assert shown["sample_rate"] == 1 / math.ceil(5000 / size)
    assert shown["rho_star"] >= 0.7
    run(f"bound c.json -q {shown['sample_rate']!r} -s 1.5 -t {shown['steps']} --min-rho 0.7")
    assert f"batch_size = {size}: the largest" in run(f"{command} --prv").out


def test_calibrate_finds_the_least_factor_on_a_schedule(run: Runner, tmp_path: Path) -> None:
    shape = np.linspace(1.0, 0.5, 300)
    np.save(tmp_path / "shape.npy", shape)
    (tmp_path / "shape.txt").write_text(",".join(map(repr, shape.tolist())), encoding="utf-8")
    found = [
        run(f"calibrate c.json --min-rho 0.7 -q 0.1 --noise-shape {tmp_path / name} --json").json
        for name in ("shape.npy", "shape.txt")
    ]
    assert found[0] == found[1]
    schedule = Schedule.from_arrays(sample_rates=0.1, noise_multipliers=shape)
    factor = found[0]["noise_scale"]
    least = calibrate_noise_scale(CERTIFICATE, min_rho=0.7, schedule=schedule)
    assert least <= factor <= least + 1.1e-6
    assert found[0]["rho_star"] == CERTIFICATE.bound(schedule.scaled(factor).charged_bits).rho >= 0.7


def test_plan(run: Runner, tmp_path: Path) -> None:
    command = "plan c.json -q 0.1 -s 1 -t 400 --min-rho 0.8"
    ahead = forecast(CERTIFICATE, sample_rate=0.1, noise_multiplier=1.0, steps=400, min_rho=0.8, delta=1e-5)
    shown = run(f"{command} --rows 4 --json", code=1).json
    assert shown["met"] is False
    assert ahead.epsilon is not None
    assert ahead.last_epsilon is not None
    assert (shown["epsilon"], shown["last_epsilon"]) == (ahead.epsilon.rdp, ahead.last_epsilon.rdp)
    last = shown["last_step"]
    assert last == ahead.last_step
    assert [row["step"] for row in shown["rows"]] == sorted({0, 100, 200, 300, 400, last})
    for row in shown["rows"]:
        bits = Schedule.constant(sample_rate=0.1, noise_multiplier=1.0, steps=row["step"]).charged_bits
        assert row["leakage_bits"] == pytest.approx(bits, rel=1e-12)
        assert row["rho_star"] == pytest.approx(CERTIFICATE.bound(bits).rho, rel=1e-12)
        assert (row["rho_star"] >= 0.8) == (row["step"] <= last)
    run(f"bound c.json -q 0.1 -s 1 -t {last} --min-rho 0.8")
    run(f"bound c.json -q 0.1 -s 1 -t {last + 1} --min-rho 0.8", code=1)
    target = tmp_path / "new" / "plan.svg"
    text = run(f"{command} --plot {target}", code=1).out
    assert target.read_text().rstrip().endswith("</svg>")
    assert ahead.describe() in text
    assert f"Wrote {target}." in text
    marked = [line for line in text.splitlines() if "<- last step that keeps the floor" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == str(last)
    assert run("plan c.json -q 0.1 -s 1 -t 10 --json").json["last_step"] is None
    assert run(f"plan c.json -q 0.1 -s 1 -t {last} --min-rho 0.8 --json").json["met"] is True
    run(f"plan c.json -q 0.1 -s 1 -t {last + 1} --min-rho 0.8", code=1)
    assert 0 < run("plan c.json -q 0.1 -s 1 -t 10 --prv --json").json["epsilon_prv"] < shown["last_epsilon"]
    assert "by PRV, at δ = 0.0001" in run("plan c.json -q 0.1 -s 1 -t 10 --prv --delta 1e-4").out
    assert len({len(line.split("  <-")[0]) for line in text.splitlines()[:12]}) == 1, "columns are not aligned"


COMPARE = "compare c.json -q 0.02 -s 1.1 -t 1000"


def test_compare(run: Runner, folder: Path) -> None:
    np.save(folder / "jacobian.npy", 0.05 * np.eye(64))
    np.save(folder / "narrow.npy", np.eye(3))
    found = run(
        f"{COMPARE} --prior-success 0.01 --candidates 1000 --entropy-bits 9 --jacobian jacobian.npy --json"
    ).json
    schedule = Schedule.constant(sample_rate=0.02, noise_multiplier=1.1, steps=1000)
    expected = compare(
        schedule, CERTIFICATE, prior_success=0.01, candidates=1000, entropy_bits=9.0, jacobian=0.05 * np.eye(64)
    )
    assert found["leakage_bits"] == schedule.charged_bits
    assert found["comparisons"] == json.loads(json.dumps([vars(row) for row in expected]))
    text = run(f"{COMPARE} --prior-success 0.01 --candidates 1000 --jacobian jacobian.npy").out
    for row in expected:
        assert f"  - {row.name}: {row.source}; prior: {row.prior.split(',')[0]}" in text
    assert text.count("Poisson sampling") == 1
    first = text.split("\n")[1]
    assert first.startswith("certificate (this library)")
    assert f"{math.floor(CERTIFICATE.bound(schedule.charged_bits).rho * 1000) / 1000:.3f}" in first
    assert re.search(
        r"^unbiased, by RDP of order 2 .* inf  +inf ", run("compare c.json -q 0 -s 1 -t 9").out, re.MULTILINE
    )
    run.error(f"{COMPARE} --jacobian narrow.npy", "64 columns")
    run.error(f"{COMPARE} --jacobian two.npz", "several arrays")
    run.error(f"{COMPARE} --jacobian c.json", "no array of numbers")
    run.error(f"{COMPARE} --entropy-bits 3", "needs candidates")
    run.error(f"{COMPARE} --prior-success 2", "prior_success in")


def test_compare_estimates_the_prior_success(run: Runner) -> None:
    def success(options: str) -> Any:
        rows = run(f"{COMPARE} --json {options}").json["comparisons"]
        return next(row for row in rows if row["name"] == "reconstruction robustness")

    kappa = prior_success(DIGITS[:200], 3.0 * 8)  # 64 coordinates
    assert 0.005 < kappa < 1
    by_data, by_value = success("--held-out a.npy --within 3"), success(f"--prior-success {kappa}")
    assert by_data == by_value
    assert by_data["confidence"] is None
    assert success("--prior-success 0.1 --prv")["value"] < success("--prior-success 0.1")["value"]
    run.error(f"{COMPARE} --held-out a.npy", "needs --within")
    run.error(f"{COMPARE} --within 3", "goes with --held-out")
    run.error(f"{COMPARE} --held-out a.npy --within 3 --prior-success 0.1", "not both")
    run.error(f"{COMPARE} --held-out wide.npy --within 3", r"\(9, 9\)")


def test_compare_draws(run: Runner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bounds.png"
    assert f"Wrote {path}." in run(f"{COMPARE} --prior-success 0.01 --plot {path}").out
    with Image.open(path) as drawn:
        assert drawn.size[0] > 800
    run.error(f"{COMPARE} --plot {tmp_path / 'bounds.txt'}", "picture format")


def test_plan_of_a_huge_number_of_steps(run: Runner) -> None:
    lines = run(f"plan c.json -q 0.1 -s 1 -t {2**53}").out.splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("missing.npy", "no file or folder missing.npy"),
        ("missing.npz:x", "no file or folder missing.npz"),
        ("empty.npy", "empty.npy is empty"),
        ("empty.npz:x", "empty.npz is empty"),
        ("cut.npy", "cut.npy cannot be read"),
        ("noise.npz", "noise.npz cannot be read"),
        ("renamed.npz", "single array.*Rename it to renamed.npy"),
        ("renamed.npy", "not what its name says"),
        ("notes.txt", "of a kind that is not read"),
        ("object.npy", "Python objects"),
        ("object.npz", "Python objects"),
        ("object.npz:x", "Python objects"),
        ("pickle.npy", "Python objects"),
        ("pickle.npz", "Python objects"),
        ("two.npz", "several arrays; say which: two.npz:x, two.npz:y, two.npz:label"),
        ("two.npz:z", "no array 'z'. It has: x, y, label"),
        ("two.npz:", "no array ''"),
        ("flat.npy", r"shape \(1000,\)"),
        ("two.npz:label", r"shape \(700,\)"),
        ("none.npy", r"shape \(0, 8, 8\)"),
        ("complex.npy --value-range 0 1", "real numbers. Found an array of type complex128"),
        ("text.npy --value-range 0 1", "real numbers. Found an array of type <U1"),
        ("float.npy", "float64, not 8-bit.*--value-range 0 1"),
        ("nan.npy --value-range 0 1", r"\[\d+\] holds NaN"),
        ("inf.npy --value-range 0 1", r"\[\d+\] holds NaN or infinite"),
        ("constant.npy", "all alike"),
        ("constant.npy --allow-repeats", "all alike"),
        ("d.npy wide.npy", r"wide.npy holds records of shape \(9, 9\)"),
        ("d.npy float.npy", "float.npy holds .* type float64"),
        ("d.npy d.npy", "given twice"),
        ("d.npy ./d.npy", "given twice"),
        ("one.npz one.npz:x", "given twice"),
        ("images images/0", "given twice"),
        ("d.npy one.npz", "share"),
        ("no-images", "holds no images"),
        ("sizes", r"1.png has the shape \(9, 8\).*0.png has \(8, 8\)"),
        ("channels", r"1.png has the shape \(8, 8, 3\)"),
        ("deep", "0.png cannot be read.*mode I;16"),
        ("broken", "1.png cannot be read"),
        ("d.npy --n-reference 701", "need 701 records, but there are 700"),
        ("d.npy --n-reference 400 --n-estimation 301", "need 701 records, but there are 700"),
        ("d.npy --n-reference 601", "estimation sample has 99 records; at least 100"),
        ("d.npy --n-reference 5", "reference sample has 5"),
        ("d.npy --n-reference -1", "--n-reference to be a whole number >= 0. Found -1"),
        ("d.npy --n-estimation -1", "--n-estimation to be a whole number >= 0. Found -1"),
        ("d.npy --n-reference 1.5", "'1.5' is not a whole number"),
        ("d.npy --seed -1", "--seed to be a whole number >= 0. Found -1"),
        ("d.npy --alpha 0", "Found 0.0"),
        ("d.npy --alpha 1", "Found 1.0"),
        ("d.npy --alpha nan", "NaN"),
        ("d.npy --designs quick", "Found 'quick'"),
        ("d.npy --normaliser trace", "Found 'trace'"),
        ("d.npy --normaliser -1", "Found -1.0"),
        ("d.npy --value-range 1 0", "low < high"),
        ("d.npy --value-range 0 nan", "NaN"),
        ("d.npy --value-range a b", "Found 'a'"),
        ("d.npy --value-range 0 8", "values from 0 to 16"),
        ("d.npy --device nonsense", "--device nonsense cannot be used"),
        ("d.npy --reference a.npy", "either DATA"),
        ("--reference a.npy", "--estimation go together"),
        ("--estimation a.npy", "--estimation go together"),
        ("", "No data was given"),
        ("--reference a.npy --estimation b.npy --n-reference 10", "taken as they are"),
        ("--reference a-with-first-of-b.npy --estimation b.npy", "share 1 record"),
        ("--reference a.npy --estimation a.npy --allow-repeats", "given twice"),
        ("--reference a.npy --estimation b.npy --estimation b.npy", "given twice"),
        ("--reference a.npy --estimation wide.npy", "different shapes"),
        ("--reference a.npy --estimation float.npy --value-range 0 16", "different types"),
        ("d.npy --unknown", "No such option"),
        ("d.npy -r faces", "no representation 'faces'. There are: pixels, crop"),
        ("d.npy -r crop:8,8,12,12", "crop of rows 8 to 19 .* lies outside images of 8 × 8"),
        ("d.npy -r crop:1,2", "crop:TOP,LEFT,HEIGHT,WIDTH"),
        ("d.npy -r mask:nowhere.npy", "no file nowhere.npy"),
        ("d.npy -r mask:object.npy", "cannot be read as an array"),
        ("d.npy -r mask:wide.npy", "keeps nothing"),
        ("d.npy -r linear:d.npy", r"matrix \(m, d\)"),
        ("d.npy -r pixels --weights alex.npz", "has no lpips to use them"),
        ("d.npy -r lpips --weights alex.npz", "no file alex.npz"),
        ("d.npy -r lpips --weights object.npz", "cannot be read as weights"),
        ("float.npy -r downsample:2", "not 8-bit.*--value-range 0 1"),
        ("d.npy -r vectors", "Declare the range"),
        ("constant.npy -r dct:2 --allow-repeats", "all alike"),
        ("d.npy --reduction 0", "--reduction"),
        ("d.npy --reduction many", "--reduction"),
        ("d.npy --cache notes.txt", "cache folder notes.txt cannot be used"),
        ("d.npy --reference-from elsewhere", "Declare it: normaliser"),
        ("d.npy --reference-from space", "'source' or 'elsewhere'"),
        ("--estimation b.npy --designs block", "Declare it: normaliser"),
    ],
)
def test_certify_refuses(run: Runner, data: str, match: str, tmp_path: Path) -> None:
    run.error(f"certify {data} -o {tmp_path / 'out.json'}", match)
    assert not list(tmp_path.iterdir())
    assert not Path("executed").exists(), "a pickle was executed"


@pytest.mark.parametrize(
    ("output", "match"),
    [
        ("images", "images is a folder"),
        ("''", "is a folder"),
        ("d.npy", "would be overwritten"),
        ("new.npy", "named like data"),
        ("a.npy/out.json", "a.npy is a file"),
        ("/proc/none/out.json", "cannot be written"),
    ],
)
def test_certify_refuses_an_output_before_it_computes(
    run: Runner, output: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "certify", lambda *_, **__: pytest.fail("computed"))
    before = Path("d.npy").read_bytes()
    run.error(f"certify d.npy -o {output}", match)
    assert Path("d.npy").read_bytes() == before
    run.error("certify d.npy", "Missing option '--output'")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="everything is writable")
def test_a_folder_without_permission(run: Runner, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    run.error(f"certify d.npy -o {tmp_path / 'c.json'}", "cannot be written: Permission denied")


@pytest.mark.parametrize("command", ["inspect {}", "bound {} --leakage-bits 1", "plan {} -q 0.1 -s 1 -t 10"])
@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("missing.json", "no certificate at missing.json"),
        ("empty.json", "is empty"),
        ("truncated.json", "truncated"),
        ("tampered.json", "altered"),
        ("newer.json", "schema version 2"),
        ("other.json", "not a reconstruction certificate"),
        ("pickle.json", "cannot be read|not whole JSON"),
        ("d.npy", "cannot be read as a certificate"),
        ("images", "cannot be read as a certificate"),
    ],
)
def test_a_bad_certificate(run: Runner, command: str, name: str, match: str) -> None:
    run.error(command.format(name), match)
    assert not Path("executed").exists(), "a pickle was executed"


SCHEDULE = "-q 0.1 -s 1 -t 100"


@pytest.mark.parametrize(
    ("command", "match"),
    [
        ("bound c.json -q 1.2 -s 1 -t 10", r"sample_rate in \[0, 1\].*Found 1.2.*batch size"),
        ("bound c.json -q -0.1 -s 1 -t 10", "Found -0.1"),
        ("bound c.json -q nan -s 1 -t 10", "NaN"),
        ("bound c.json -q 0.1 -s -1 -t 10", "noise_multiplier >= 0. Found -1.0"),
        ("bound c.json -q 0.1 -s nan -t 10", "NaN"),
        ("bound c.json -q 0.1 -s abc -t 10", "--noise-multiplier.*'abc' is not a number"),
        ("bound c.json -q 0.1 -s 1 -t -3", "--steps to be a whole number >= 0. Found -3"),
        ("bound c.json -q 0.1 -s 1 -t 2.5", "--steps.*'2.5' is not a whole number"),
        ("bound c.json -q 0.1 -s 1 -t 1e3", "'1e3' is not a whole number"),
        (f"bound c.json -q 0.1 -s 1 -t {10**30}", f"--steps .*Found {10**30}"),
        (f"bound c.json {SCHEDULE} --delta 2", r"delta in \(0, 1\). Found 2.0"),
        (f"bound c.json {SCHEDULE} --delta 0", "Found 0.0"),
        (f"bound c.json {SCHEDULE} --leakage-bits 1", "not a part or a mixture"),
        ("bound c.json -q 0.1 -s 1", "not a part or a mixture"),
        ("bound c.json", "not a part or a mixture"),
        ("bound c.json --leakage-bits -1", "Found -1.0"),
        ("bound c.json --leakage-bits nan", "NaN"),
        ("bound", "Missing argument 'CERT'. See `reconbound bound --help`"),
        (f"calibrate c.json --min-rho 0.7 -q 0.1 -t {10**30}", "--steps"),
        ("calibrate c.json -q 0.1 -t 10", "Missing option '--min-rho'"),
        ("calibrate c.json --min-rho 0.7 -q 1.2 -t 10", "Found 1.2"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 -t -1", "Found -1"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 -t 10 --delta nan", "NaN"),
        ("calibrate c.json --min-rho 0.7 -q 0.1", "Give two of --sample-rate, --noise-multiplier and --steps"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 -s 1 -t 10", "Give two of"),
        ("calibrate c.json --min-rho 0.7 -s 1 --epochs 10", "Give two of"),
        ("calibrate c.json --min-rho 0.7 -s 1 --records 10 -q 0.1", "Give two of"),
        ("calibrate c.json --min-rho 0.7 -s 1 --records 0 -t 1", "records to be a whole number >= 1. Found 0"),
        ("calibrate c.json --min-rho 0.7 -s 0 -q 0.1", r"leaks inf bits.*largest ρ\* attainable is 0, at 1 step"),
        ("calibrate c.json --min-rho 0.7 -s 0.01 -t 9999999999", r"Even sample_rate = 5.96e-08 leaks.*attainable is 0"),
        ("calibrate c.json --min-rho 0.7 -s 0.1 --records 9 --epochs 9", r"Even batch_size = 1 leaks.*attainable is 0"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 --noise-shape none.txt", "none.txt cannot be read as numbers"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 --noise-shape c.json", "cannot be read as numbers"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 --noise-shape empty.json", "it holds none"),
        ("calibrate c.json --min-rho 0.7 -q 0.1 --noise-shape pickle.npy", "cannot be read as numbers"),
        (f"plan c.json {SCHEDULE} --delta 0", "Found 0.0"),
        ("plan c.json -q 0.1 -s 1 -t 0", "--steps to be a whole number >= 1. Found 0"),
        (f"plan c.json -q 0.1 -s 1 -t {10**30}", "--steps"),
        (f"plan c.json {SCHEDULE} --rows 0", "--rows to be a whole number >= 1"),
        (f"plan c.json {SCHEDULE} --rows 1000000000", "--rows to be a whole number <= 100000"),
        (f"plan c.json {SCHEDULE} --plot plan", "names no picture format; use one of: .png, .svg"),
        (f"plan c.json {SCHEDULE} --plot plan.pgf", "names no picture format"),
        (f"plan c.json {SCHEDULE} --plot d.npy/plan.png", "cannot be written"),
        (f"plan c.json {SCHEDULE} --plot images", "names no picture format"),
        ("inspect c.json more", r"unexpected extra argument"),
        ("guess", "No such command 'guess'"),
        ("demo -o d.npy", "d.npy is a file"),
        ("demo -o d.npy/demo", "cannot be written"),
        ("demo --seed -1", "seed to be a whole number >= 0. Found -1"),
        ("demo --seed 4294967296", "<= 4294967295"),
        ("demo --seed x", "'x' is not a whole number"),
    ],
)
def test_bad_arguments(run: Runner, command: str, match: str) -> None:
    run.error(command, match)


@pytest.mark.parametrize("floor", ["0", "1.5", "-0.5", "nan", "x"])
@pytest.mark.parametrize(
    "command", [f"bound c.json {SCHEDULE}", "calibrate c.json -q 0.1 -t 10", f"plan c.json {SCHEDULE}"]
)
def test_bad_floors(run: Runner, command: str, floor: str) -> None:
    run.error(f"{command} --min-rho {floor}", f"(?i)--min-rho.*{floor}")


def test_a_floor_above_the_highest(run: Runner) -> None:
    above = math.nextafter(HIGHEST, 1)
    for command in ("calibrate c.json -q 0.1 -t 10", f"plan c.json {SCHEDULE}"):
        run.error(f"{command} --min-rho {above!r}", r"above what this certificate supports: ρ\* at zero leakage is")
    run(f"bound c.json {SCHEDULE} --min-rho {above!r}", code=1)


def test_matplotlib_is_named_where_it_is_missing(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run.error(f"plan c.json {SCHEDULE} --plot plan.png", r"needs matplotlib.*pip install 'opacus-reconbound\[report\]'")


# ---- interruptions and processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "name"), [(MODULE, "replica_estimates"), (os, "replace"), (os, "fsync")])
def test_an_interruption_leaves_no_half_file(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: ModuleType, name: str
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupt)
    result = run(f"certify d.npy -o {tmp_path / 'c.json'}", code=130)
    assert result.err == "Interrupted.\n"
    assert result.out == ""
    assert not list(tmp_path.iterdir())


def test_an_interruption_keeps_the_old_file(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = CERTIFICATE.save(tmp_path / "c.json").read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    run(f"certify d.npy -o {tmp_path / 'c.json'}", code=130)
    assert (tmp_path / "c.json").read_bytes() == old
    assert len(list(tmp_path.iterdir())) == 1


def test_running_out_of_memory_is_one_line(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 8 PiB.")

    monkeypatch.setattr(MODULE, "certify", fail)
    run.error(f"certify d.npy -o {tmp_path / 'c.json'}", "Unable to allocate")


def process(command: str, **kwargs: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-m", "opacus_reconbound.cli", *shlex.split(command)],
        env=os.environ | {"PYTHONPATH": path} | kwargs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_on_a_terminal_without_greek_letters() -> None:
    child = process("bound c.json --leakage-bits 1 --min-rho 0.99 --json", PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (1, "")
    assert json.loads(out)["rho_star"] == CERTIFICATE.bound(1.0).rho
    child = process("bound c.json --leakage-bits 1", PYTHONIOENCODING="ascii")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    assert "guess without the model" in out


def test_a_reader_that_has_seen_enough() -> None:
    child = process("plan c.json -q 0.001 -s 1 -t 100000 --rows 20000")
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(timeout=60) == 141


def test_ledger_lists_runs_and_judges_their_total(run: Runner, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    book = Ledger(path, fingerprint="digits")
    book.add([(1.0, 0.01, 1000)], run="first")
    book.add([(0.9, 0.01, 500)], run="second")
    total = Schedule.from_history([(1.0, 0.01, 1000), (0.9, 0.01, 500)]).charged_bits
    shown = run(f"ledger {path} --certificate c.json --min-rho 0.5").out
    assert "first" in shown
    assert re.search(r"total +1,500 +0\.\d+ +0\.000", shown)
    assert "floor of 0.5 is met" in shown
    found = run(f"ledger {path} --certificate c.json --json").json
    assert found["leakage_bits"] == total
    assert found["rho_star"] == CERTIFICATE.bound(total).rho
    assert [entry["steps"] for entry in found["runs"]] == [1000, 500]
    above = CERTIFICATE.bound(total * 0.9).rho
    assert "NOT met" in run(f"ledger {path} --certificate c.json --min-rho {above!r}", 1).out
    assert "needs --certificate" in run(f"ledger {path} --min-rho 0.5", 2).err
    assert "There is no ledger" in run(f"ledger {tmp_path / 'none'}", 2).err


AUDITED = "--records 45000 --batch-size 4096 --noise-multiplier 10 --steps 725"


def test_audit_of_options_and_of_a_file(run: Runner) -> None:
    found = run(f"audit {AUDITED} --delta 1e-6 --json").json
    schedule = Schedule.constant(sample_rate=4096 / 45000, noise_multiplier=10, steps=725)
    assert found["leakage_bits"] == schedule.leakage_bits
    assert found["charged_bits"] == schedule.charged_bits
    assert found["schedule"] == [{"sample_rate": 4096 / 45000, "noise_multiplier": 10, "steps": 725}]
    assert (found["delta"], found["bound"]) == (1e-6, None)
    assert found["epsilon_prv"] < found["epsilon_rdp"]
    assert "Poisson" in found["assumptions"][0]
    example = ROOT / "examples" / "audits" / "de-2022-cifar10.yaml"
    from_file = run(f"audit {example} --delta 1e-6 --json").json
    assert from_file["name"] == "De et al. 2022, CIFAR-10 at ε = 1"
    assert from_file["source"] == "arXiv 2204.13650"
    for key in ("name", "source"):
        del found[key], from_file[key]
    assert from_file == found
    phases = "--phase batch_size=4096,noise_multiplier=10,steps=700 --phase sample_rate=0.1,noise_multiplier=8,epochs=2"
    assert [r["steps"] for r in run(f"audit --records 45000 {phases} --json").json["schedule"]] == [700, 20]
    shown = run(f"audit {AUDITED}").out
    assert "This run: 725 steps at sample rate 0.09102" in shown
    assert "at δ = 1e-05: 1.001 by RDP" in shown
    assert "It assumes:\n  - Every step drew a Poisson sample" in shown


def test_audit_judges_a_floor(run: Runner) -> None:
    bits = Schedule.constant(sample_rate=4096 / 45000, noise_multiplier=10, steps=725).charged_bits
    rho = CERTIFICATE.bound(bits).rho
    assert "is met" in run(f"audit {AUDITED} --certificate c.json --min-rho {rho!r}").out
    above = math.nextafter(rho, 1)
    assert "NOT met" in run(f"audit {AUDITED} --certificate c.json --min-rho {above!r}", 1).out
    judged = run(f"audit {AUDITED} --certificate c.json --min-rho {above!r} --json", 1).json
    assert (judged["met"], judged["bound"]["rho_star"], judged["bound"]["leakage_bits"]) == (False, rho, bits)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("", "No run was given"),
        ("--delta 1e-5", "No run was given"),
        (f"other.json {AUDITED}", "RUN says what ran, and so does --records"),
        ("other.json --phase steps=1", "and so does --phase"),
        ("other.json", "other.json: Give sample_rate or batch_size"),
        ("none.yaml", "There is no file none.yaml"),
        ("one.npz", "one.npz is no file of torch.save"),
        (f"{AUDITED} --min-rho 0.5", "--min-rho needs --certificate"),
        (f"{AUDITED} --min-rho 2 --certificate c.json", "Found 2"),
        (f"{AUDITED} --certificate none.json", "There is no certificate at none.json"),
        (f"{AUDITED} --epochs 3", "Found both"),
        (f"{AUDITED} --delta 0", "Found 0"),
        (f"{AUDITED} --records many", "'many' is not a whole number"),
        ("--phase steps", "Found 'steps'"),
        ("--phase steps=1,steps=2", "each key once"),
        ("--phase =1", "Found '=1'"),
        ("--phase sigma=1", r"phases\[0\]: unknown key 'sigma'. Known are"),
        ("--records 100 --phase batch_size=200,noise_multiplier=1,steps=1", r"phases\[0\]: batch_size = 200 is more"),
        (f"{AUDITED} --target-epsilon 1 --accountant rdp --delta 1e-5", "stands for the noise_multiplier"),
    ],
)
def test_bad_audits(run: Runner, arguments: str, match: str) -> None:
    run.error(f"audit {arguments}", match)
