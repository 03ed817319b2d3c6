"""The tables of the documentation name tests and findings that exist, and all of them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "opacus.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    _, _, rest = PAGE.partition(f"\n### {title}\n")
    assert rest
    return re.split(r"\n##+ ", rest)[0]


def test_every_test_that_is_named_exists() -> None:
    written = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", written, flags=re.MULTILINE))
    for title in ("Modes", "Where Opacus and what runs part"):
        rows = [row for row in section(title).splitlines() if row.startswith("| ")][2:]
        assert len(rows) > 10
        for row in rows:
            named = re.findall(r"`(test_\w+)`", row)
            assert len(named) == 1, row
            assert named[0] in defined


def test_every_finding_is_listed_with_its_severity() -> None:
    source = (ROOT / "opacus_reconbound" / "checks.py").read_text(encoding="utf-8")
    found = re.findall(r'Finding\(\s*code="(\w+)",\s*severity="(\w+)"', source)
    assert len(re.findall(r"\bFinding\(", source)) == len(found)
    listed = {
        code: severity
        for row in section("Findings").splitlines()
        if row.startswith("| `")
        for codes, severity in [re.match(r"\| (.*?) \| (\w+)", row).groups()]  # type: ignore[union-attr]
        for code in re.findall(r"`(\w+)`", codes)
    }
    assert listed == dict(found) | {"clip_norms_differ": "error"}  # a warning where it is corrected
