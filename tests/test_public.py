"""What others rely on: public names, what importing costs, who may import whom, one version everywhere."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import opacus_reconbound
from opacus_reconbound.certificates.certify import library_version

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def project() -> dict[str, Any]:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    content: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "opacus_reconbound",
            "Pixels ReconboundError ReconstructionBound ReconstructionBudgetExceeded Schedule SourceCertificate "
            "SplitPlan calibrate_noise certify make_private_with_rho step_leakage forecast Forecast Finding guard "
            "inspect keep_empty_batches Ledger fingerprint Audit AuditedRun attach Floor calibrate_noise_scale "
            "calibrate_steps calibrate_sample_rate calibrate_batch_size Epsilon",
        ),
        ("opacus_reconbound.certificates.designs", "BlockDesign ReplicaDesign"),
        (
            "opacus_reconbound.attacks",
            "attack_plan attack_prior_aware attack_codebook Threat FULL_BATCH SUBSAMPLED fit_codebook log_likelihoods",
        ),
        ("opacus_reconbound.lightning", "ReconstructionBoundCallback private_optimizer"),
        ("opacus_reconbound.pytorch_lightning", "ReconstructionBoundCallback private_optimizer"),
        (
            "opacus_reconbound.leakage",
            "Run Schedule step_leakage noise_for_leakage steps_for_leakage "
            "noise_scale_for_leakage sample_rate_for_leakage batch_size_for_leakage",
        ),
    ],
)
def test_public_names(module: str, names: str) -> None:
    found = importlib.import_module(module)
    for name in names.split():
        assert getattr(found, name) is not None
        assert name in dir(found)


def test_all_is_what_can_be_imported() -> None:
    assert len(set(opacus_reconbound.__all__)) == len(opacus_reconbound.__all__)
    assert set(opacus_reconbound.__all__) == set(opacus_reconbound._HOMES)
    for name in opacus_reconbound.__all__:
        value = getattr(opacus_reconbound, name)
        assert value.__module__.startswith("opacus_reconbound.")
        assert getattr(opacus_reconbound, name) is value
        assert name in dir(opacus_reconbound)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        opacus_reconbound.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec("from opacus_reconbound import nothing")  # noqa: S102


def test_every_module_lists_names_that_exist() -> None:
    for path in sorted((ROOT / "opacus_reconbound").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.{public}"


def test_importing_registers_the_accountants_and_loads_nothing_else() -> None:
    code = """
import sys
import opacus
before = set(sys.modules)
import opacus_reconbound
from opacus.accountants import create_accountant
assert create_accountant("rdp+mi").mechanism() == "rdp+mi"
assert create_accountant("prv+mi").mechanism() == "prv+mi"
print(*sorted(name for name in set(sys.modules) - before))
heavy = ["lightning", "pytorch_lightning", "matplotlib", "lpips", "pydantic", "typer", "sklearn", "PIL", "tqdm"]
assert not [name for name in heavy if name in set(sys.modules) - before]
"""
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    ours = {name.split(".")[1] for name in run.stdout.split() if name.startswith("opacus_reconbound.")}
    assert ours == {"_mechanism", "_validate", "accountants", "errors", "leakage", "units"}


def test_the_command_line_shows_its_help_without_the_slow_parts() -> None:
    code = """
import sys
from opacus_reconbound.cli import main
try:
    main(["certify", "--help"])
except SystemExit:
    pass
heavy = ["lightning", "pytorch_lightning", "matplotlib", "lpips"]
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded
"""
    run = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_import_rules() -> None:
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Contracts: 3 kept, 0 broken." in run.stdout


def test_every_module_has_a_place_in_the_import_rules() -> None:
    layers = next(rule for rule in project()["tool"]["importlinter"]["contracts"] if rule["type"] == "layers")["layers"]
    placed = {name.strip(" ()") for layer in layers for name in layer.split(":")}
    package = ROOT / "opacus_reconbound"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    assert modules | {path.parent.name for path in package.glob("*/__init__.py")} <= placed


def test_types_are_shipped() -> None:
    assert (ROOT / "opacus_reconbound" / "py.typed").exists()
    assert project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["opacus_reconbound"]
    assert "Typing :: Typed" in project()["project"]["classifiers"]


def test_one_version_everywhere() -> None:
    version = project()["project"]["version"]
    assert library_version() in (version, "0+unknown")  # the latter in a source tree that is not installed
    citation = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert citation is not None
    assert citation[1] == version
    changes = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert changes[0] == version


def test_the_command_is_installed() -> None:
    module, name = project()["project"]["scripts"]["reconbound"].split(":")
    assert callable(getattr(importlib.import_module(module), name))
