"""The demo, as the README tells to run it: once, in a process of its own, in an empty folder."""

from __future__ import annotations

import csv
import os
import re
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from opacus_reconbound import Schedule, SourceCertificate
from opacus_reconbound.demo import BATCH, DELTA, MIN_RHO, N_TRAIN, NOISE

pytest.importorskip("lightning")
pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

ROOT = Path(__file__).resolve().parent.parent


class Demo(NamedTuple):
    seconds: float  # of processor time: a busy machine must not fail the test
    code: int
    out: str
    err: str
    folder: Path

    def column(self, name: str) -> list[float]:
        with (self.folder / "log" / "metrics.csv").open(newline="") as file:
            return [float(row[name]) for row in csv.DictReader(file) if row[name]]

    def logged(self, name: str) -> dict[int, float]:
        """One value for each step taken, counted from 1."""
        with (self.folder / "log" / "metrics.csv").open(newline="") as file:
            return {int(row["step"]) + 1: float(row[name]) for row in csv.DictReader(file) if row[name]}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """`reconbound demo`, without options."""
    folder = tmp_path_factory.mktemp("demo")
    start = _processor_seconds()
    run = subprocess.run(
        [sys.executable, "-m", "opacus_reconbound.cli", "demo"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert sorted(path.name for path in folder.iterdir()) == ["reconbound-demo"]
    return Demo(_processor_seconds() - start, run.returncode, run.stdout, run.stderr, folder / "reconbound-demo")


def test_it_ends_well_and_in_time(demo: Demo) -> None:
    assert demo.code == 0, demo.err
    assert demo.seconds < 120
    for text in (demo.out, demo.err):
        assert "Traceback" not in text
        assert "Warning" not in text
        assert "nan" not in text


def test_it_leaves_a_certificate(demo: Demo) -> None:
    certificate = SourceCertificate.load(demo.folder / "certificate.json")
    assert certificate.highest_rho > 0.9
    assert (certificate.reference.n, certificate.estimation.n) == (600, 1900)
    promised = re.findall(r"γ = (\d) bits: no attack gets below ρ\* = (0\.\d{3})\n", demo.out)
    assert [bits for bits, _ in promised] == ["0", "1", "2", "3"]
    for bits, rho in promised:
        assert 0 <= certificate.bound(float(bits)).rho - float(rho) < 1e-3


def test_it_stops_before_the_step_that_would_breach(demo: Demo) -> None:
    certificate = SourceCertificate.load(demo.folder / "certificate.json")
    rho, bits = demo.logged("reconstruction/rho_star"), demo.logged("reconstruction/leakage_bits")
    steps = max(rho)
    assert list(rho) == list(range(1, steps + 1))
    values = list(rho.values())
    assert all(after <= before for before, after in pairwise(values))
    assert values[-1] >= MIN_RHO - 1e-6  # logged in single precision
    for taken, met in ((steps, True), (steps + 1, False)):
        schedule = Schedule.constant(sample_rate=BATCH / N_TRAIN, noise_multiplier=NOISE, steps=taken)
        assert (certificate.bound(schedule.charged_bits).rho >= MIN_RHO) is met
        if met:
            assert bits[taken] == pytest.approx(schedule.charged_bits, rel=1e-6)
    assert "Training was stopped: the next step would breach the floor" in demo.out
    assert demo.logged("reconstruction/steps_left")[steps] == 0
    # in mid-training, in mid-epoch: neither the number of epochs nor min_epochs ended it
    per_epoch = N_TRAIN // BATCH
    assert steps < 30 * per_epoch
    assert steps % per_epoch


def test_it_says_so_beforehand(demo: Demo) -> None:
    said = re.search(
        r"Forecast: at these settings training would end after 400 steps at ρ\* = 0\.\d{3} \(\d\.\d{3} bits; "
        r"ε <= [\d.]+ by RDP at δ = [\d.]+\); the floor of 0\.75 is reached at step (\d+) "
        r"\(ε <= [\d.]+ by RDP at δ = [\d.]+\), and training will stop there\.",
        demo.out,
    )
    assert said is not None
    assert int(said[1]) == max(demo.logged("reconstruction/rho_star"))


def test_the_progress_bar_shows_the_bound_live(demo: Demo) -> None:
    text = demo.out + demo.err
    for name in ("rho*=", "bits=", "left=", "eps=", "accuracy="):
        assert name in text


def test_the_summary(demo: Demo) -> None:
    certificate = SourceCertificate.load(demo.folder / "certificate.json")
    steps = max(demo.logged("reconstruction/rho_star"))
    summary = demo.out[demo.out.index("\nSummary\n") :]
    schedule = Schedule.constant(sample_rate=BATCH / N_TRAIN, noise_multiplier=NOISE, steps=steps)
    bound = certificate.bound(schedule.charged_bits)

    def figure(name: str) -> float:
        found = re.search(rf"^  {re.escape(name)} +([\d.]+)", summary, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    assert figure("test accuracy") == pytest.approx(demo.column("accuracy")[-1], abs=1e-3)
    assert figure("test accuracy") > 0.7
    assert f"after {steps} steps" in summary
    # rounded to the safe side: leakage, PSNR and ε up, ρ* and RMSE down
    assert 0 <= figure("leakage γ") - bound.leakage_bits <= 1e-3
    assert 0 <= bound.rho - figure("ρ*") <= 1e-3
    assert 0 <= bound.rmse_per_coordinate - figure("RMSE of any attack") <= 0.1
    assert bound.psnr is not None
    assert 0 <= figure("PSNR of any attack") - bound.psnr <= 0.01
    assert figure("ε") >= demo.column("privacy/epsilon")[-1] - 1e-5
    assert f"δ = {DELTA:g}" in summary
    assert figure("confidence") == 0.95
    for assumption in certificate.assumptions:
        assert f"  - {assumption}\n" in summary
    assert "In reconbound-demo/: certificate.json" in summary


def test_the_picture(demo: Demo) -> None:
    with Image.open(demo.folder / "run.png") as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB"))
    assert min(pixels.shape[:2]) > 400
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    for colour in ((0x1F, 0x5F, 0xA8), (0xC8, 0x64, 0x1A)):  # ρ* and accuracy
        assert (pixels == colour).all(axis=2).sum() > 200
