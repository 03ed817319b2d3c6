"""The certificate: file round trips and bad files, the bound and its inverse, rounding."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import timeit
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from opacus_reconbound.certificates import BlockDesign, ReconstructionBound, ReplicaDesign, SourceCertificate
from opacus_reconbound.certificates.diagnostics import DesignDiagnostics, value_at_zero
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.errors import CertificateError, FloorUnreachableError, InvalidValueError
from opacus_reconbound.representations import Pixels


def make(*designs: BlockDesign | ReplicaDesign, **changes: Any) -> SourceCertificate:
    trace = {"scale": 1000.0, "upper": 1100.0, "level": 0.03, "pairs": 50, "squared_diameter": 16.0**2 * 64}
    trace |= changes.pop("trace", {})
    fields: dict[str, Any] = {
        "designs": designs
        or (
            ReplicaDesign(temperature=0.4, intercept=0.8),
            ReplicaDesign(temperature=0.05, intercept=0.31, replicas=3),
            BlockDesign(block_size=8, dither=1.6, entropy_bits=9.5),
        ),
        "trace": TraceScale(**trace),
        "representation": Pixels(value_range=(0, 16)).describe((8, 8)),
        "reference": SampleSummary(n=100, fingerprint="a" * 64),
        "estimation": SampleSummary(n=400, fingerprint="b" * 64),
        "alpha": 0.05,
        "alpha_split": {"replica": 0.025, "block": 0.025},
        "seed": 7,
        "settings": {"temperatures": [0.4, 0.05], "margins": "paper", "nested": {"x": None, "é": True}},
        "assumptions": ("Records are i.i.d.", "Ψ is fixed."),
        "library_version": "0.1.0",
    }
    return SourceCertificate(**(fields | changes))


CERTIFICATE = make()
TEXT = CERTIFICATE.to_json()

designs = st.lists(
    st.one_of(
        st.builds(
            ReplicaDesign,
            temperature=st.floats(1e-3, 3.0),
            intercept=st.floats(-0.5, 1.3),
            replicas=st.integers(2, 32),
        ),
        st.builds(
            BlockDesign, block_size=st.integers(1, 30), dither=st.floats(0.05, 8), entropy_bits=st.floats(-40, 10)
        ).filter(lambda design: design.distortion(0.0) < 8.0),
    ),
    min_size=1,
    max_size=9,
)
traces = st.one_of(
    st.just({}),
    st.just({"normaliser": "ucb"}),
    st.builds(lambda v: {"normaliser": "declared", "declared": v}, st.floats(900, 5000)),
)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "source.json"
    assert CERTIFICATE.save(str(path)) == path
    loaded = SourceCertificate.load(path)
    assert loaded == CERTIFICATE
    assert loaded.digest == CERTIFICATE.digest
    assert loaded.to_json() == TEXT
    loaded.save(path)
    assert path.read_text(encoding="utf-8") == TEXT + "\n"
    assert json.loads(TEXT)["digest"] == loaded.digest
    assert [p.name for p in path.parent.iterdir()] == ["source.json"]


@given(designs, traces, st.floats(1e-6, 0.5), st.integers(0, 2**62))
def test_round_trip_keeps_every_bit(found: list[Any], trace: dict[str, Any], alpha: float, seed: int) -> None:
    certificate = make(*found, trace=trace, alpha=alpha, alpha_split={"replica": alpha}, seed=seed)
    loaded = SourceCertificate.from_json(certificate.to_json())
    assert loaded == certificate
    assert loaded.digest == certificate.digest
    for bits in (0.0, 0.3, 2.0):
        assert loaded.bound(bits) == certificate.bound(bits)


def test_the_digest_covers_every_field() -> None:
    changed = [
        CERTIFICATE,
        replace(CERTIFICATE, designs=CERTIFICATE.designs[:2]),
        replace(CERTIFICATE, designs=CERTIFICATE.designs[::-1]),
        make(trace={"upper": 1100.0000000000002}),
        replace(CERTIFICATE, representation=Pixels(value_range=(0, 17)).describe((8, 8))),
        replace(CERTIFICATE, reference=SampleSummary(n=101, fingerprint="a" * 64)),
        replace(CERTIFICATE, estimation=SampleSummary(n=400, fingerprint="c" * 64)),
        replace(CERTIFICATE, alpha=0.06),
        replace(CERTIFICATE, alpha_split={"replica": 0.05}),
        replace(CERTIFICATE, seed=8),
        replace(CERTIFICATE, settings={}),
        replace(CERTIFICATE, assumptions=()),
        replace(CERTIFICATE, library_version="0.1.1"),
    ]
    assert len({certificate.digest for certificate in changed}) == len(changed)


def test_a_certificate_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        CERTIFICATE.alpha = 0.5  # type: ignore[misc]


def signed(content: dict[str, Any]) -> str:
    """The text of a file whose digest fits its content, whatever that is."""
    body = {key: value for key, value in content.items() if key not in ("format", "digest")}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({**content, "digest": hashlib.sha256(canonical.encode()).hexdigest()})


def changed_at(path: str, value: Any, text: str = TEXT) -> str:
    content = json.loads(text)
    *parents, last = path.split(".")
    node = content
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    if value is KeyError:
        del node[last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return signed(content)


def test_signed_is_what_the_library_signs() -> None:
    """Else every test with it would pass for the wrong reason."""
    assert SourceCertificate.from_json(signed(json.loads(TEXT))) == CERTIFICATE


REMEDY = r"`reconbound certify`|Update opacus_reconbound"


def refused(text: str, match: str) -> None:
    with pytest.raises(CertificateError, match=match) as caught:
        SourceCertificate.from_json(text, name="a.json")
    assert "a.json" in str(caught.value)
    assert re.search(REMEDY, str(caught.value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, r"schema version 2; this library reads up to 1\. Update"),
        ("schema_version", 10**30, "Update opacus_reconbound"),
        ("schema_version", 0, "schema_version"),
        ("schema_version", "1", "schema_version"),
        ("schema_version", True, "schema_version"),
        ("schema_version", KeyError, "schema_version"),
        ("surprise", 1, "surprise"),
        ("trace.surprise", 1, "surprise"),
        ("designs.0.surprise", 1, "surprise"),
        ("alpha", KeyError, "alpha"),
        ("designs", KeyError, "designs"),
        ("trace.upper", KeyError, "upper"),
        ("alpha", "0.05", "alpha"),
        ("alpha", None, "alpha"),
        ("alpha", True, "alpha"),
        ("alpha", 0, r"alpha in \(0, 1\)"),
        ("alpha", 1.5, r"alpha in \(0, 1\)"),
        ("seed", 1.5, "seed"),
        ("seed", "1", "seed"),
        ("designs", [], "at least one design"),
        ("designs", {}, "designs"),
        ("designs", "x", "designs"),
        ("designs.0", None, "designs"),
        ("designs.0.kind", "oracle", "designs.0"),
        ("designs.0.kind", KeyError, "designs.0"),
        ("designs.0.temperature", -1.0, "temperature > 0"),
        ("designs.0.temperature", "0.4", "temperature"),
        ("designs.0.intercept", 8.2, r"designs\.0 promises a squared error of 8200 .* at most .* 8192"),
        ("designs.1.intercept", 1e300, r"designs\.1 promises"),
        ("designs.2.entropy_bits", 1e5, r"designs\.2 promises a squared error of inf"),
        ("trace.scale", 1e9, r"designs\.0 promises"),
        ("designs.0.replicas", 1, "replicas"),
        ("designs.2.block_size", 0, "block_size"),
        ("trace.scale", 0.0, "trace.scale > 0"),
        ("trace.normaliser", "mean", "normaliser"),
        ("trace.normaliser", "declared", "needs its value"),
        ("reference.n", "100", "reference.n"),
        ("reference.fingerprint", 5, "fingerprint"),
        ("alpha_split", {"replica": 0.04, "block": 0.04}, "spends more than alpha"),
        ("alpha_split", [0.05], "alpha_split"),
        ("representation.squared_diameter", 1.0, "digest does not fit its description"),
        ("representation.record_shape", [4, 16], "digest does not fit its description"),
        ("representation.record_shape", 64, "record_shape"),
        ("assumptions", "none", "assumptions"),
        ("settings", [], "settings"),
    ],
)
def test_invalid_content_with_a_fitting_digest(path: str, value: Any, message: str) -> None:
    refused(changed_at(path, value), message)


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_empty(text: str) -> None:
    refused(text, "is empty: it is truncated or not a certificate")


@given(st.integers(1, len(TEXT) - 1))
def test_truncated(length: int) -> None:
    refused(TEXT[:length], "truncated")


@given(st.integers(0, len(TEXT.encode()) - 1), st.integers(1, 255))
def test_one_byte_changed(tmp_path_factory: pytest.TempPathFactory, position: int, change: int) -> None:
    """Refused, unless the change is to white space or to the case of an exponent and so means the same."""
    raw = bytearray(TEXT.encode())
    raw[position] ^= change
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    path.write_bytes(raw)
    try:
        loaded = SourceCertificate.load(path)
    except CertificateError as error:
        assert re.search(REMEDY, str(error))  # noqa: PT017
    else:
        assert json.loads(raw) == json.loads(TEXT)
        assert loaded == CERTIFICATE


@given(st.integers(0, len(TEXT) - 1), st.characters(categories=["Ll", "Nd"]))
def test_one_character_inserted(position: int, character: str) -> None:
    text = TEXT[:position] + character + TEXT[position:]
    try:
        loaded = SourceCertificate.from_json(text)
    except CertificateError as error:
        assert re.search(REMEDY, str(error))  # noqa: PT017
    else:
        assert loaded == CERTIFICATE


@pytest.mark.parametrize("text", ["[]", "1", '"x"', "null", "{}", '{"format": "something"}', '{"format": 1}'])
def test_other_json(text: str) -> None:
    refused(text, "not a reconstruction certificate")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("where", ['"alpha": ', '"intercept": ', '"scale": '])
def test_numbers_that_are_none(number: str, where: str) -> None:
    text = re.sub(f"{where}[-0-9.e]+", f"{where}{number}", TEXT, count=1)
    assert number in text
    refused(text, "it holds")


def test_numbers_too_long() -> None:
    refused(TEXT.replace('"seed": 7', '"seed": ' + "7" * 5000), "not whole JSON")
    content = json.loads(TEXT)
    content["settings"] = {"big": 10**400}
    SourceCertificate.from_json(signed(content))  # odd, but nothing is wrong with it


def test_duplicate_keys() -> None:
    refused(TEXT.replace('"seed": 7', '"seed": 8,\n "seed": 7'), "a key occurs twice")
    refused(TEXT.replace('"temperature": 0.4', '"temperature": 0.4, "temperature": 0.4'), "a key occurs twice")


@pytest.mark.parametrize("depth", [100, 500, 900, 3000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_nesting(depth: int, opening: str, closing: str) -> None:
    nested = opening * depth + "1" + closing * depth
    with pytest.raises(CertificateError):
        SourceCertificate.from_json(nested)
    with pytest.raises(CertificateError):
        SourceCertificate.from_json(TEXT.replace('"margins": "paper"', f'"margins": {nested}'))


def test_deep_nesting_with_a_fitting_digest() -> None:
    nested: Any = 1
    for _ in range(400):
        nested = [nested]
    content = json.loads(TEXT)
    content["settings"] = {"nested": nested}
    with pytest.raises(CertificateError):
        SourceCertificate.from_json(signed(content))


def test_lone_surrogates() -> None:
    content = json.loads(TEXT)
    content["library_version"] = "\ud800"
    refused(signed(content), "not a valid certificate")


def test_missing_directory_and_binary(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"no certificate at .*none\.json.*`reconbound certify`"):
        SourceCertificate.load(tmp_path / "none.json")
    with pytest.raises(CertificateError, match=r"cannot be read.*`reconbound certify`"):
        SourceCertificate.load(tmp_path)
    garbage = tmp_path / "garbage.json"
    for seed in range(20):
        garbage.write_bytes(np.random.default_rng(seed).bytes(500))
        with pytest.raises(CertificateError, match="`reconbound certify`"):
            SourceCertificate.load(garbage)
    garbage.write_bytes(b"\x00" * 100)
    with pytest.raises(CertificateError, match="`reconbound certify`"):
        SourceCertificate.load(garbage)
    garbage.write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(CertificateError, match="`reconbound certify`"):
        SourceCertificate.load(garbage)


class _Trap:
    """Pickled, it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    trap, path = tmp_path / "executed", tmp_path / "evil.json"
    path.write_bytes(pickle.dumps(_Trap(trap)))
    with pytest.raises(CertificateError):
        SourceCertificate.load(path)
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists()  # it would have been
    trap.unlink()
    code = f"__import__('pathlib').Path({str(trap)!r}).touch()"
    content = json.loads(TEXT)
    content["settings"] = {"__class__": code, "py/object": code, "!!python/object/apply:eval": [code]}
    content["library_version"] = code
    path.write_text(signed(content))
    assert SourceCertificate.load(path).library_version == code
    assert not trap.exists()


# ---- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    path = CERTIFICATE.save(tmp_path / "source.json")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, where, fail)
    expected = CertificateError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        make(seed=8).save(path)
    if isinstance(error, OSError):
        assert "No space left" in str(caught.value)
        assert "Choose a folder" in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["source.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = CERTIFICATE.save(tmp_path / "source.json")
    script = f"""
        import os, signal
        from opacus_reconbound.certificates import SourceCertificate
        certificate = SourceCertificate.load({str(path)!r})
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        certificate.save({str(path)!r})
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert SourceCertificate.load(path) == CERTIFICATE


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CertificateError, match=r"could not be written.*Choose a folder"):
        CERTIFICATE.save(tmp_path / "file" / "source.json")


def test_saved_files_have_ordinary_permissions(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        assert CERTIFICATE.save(tmp_path / "source.json").stat().st_mode & 0o777 == 0o644
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(umask)


# ---- the bound and its inverse ---------------------------------------------------------------------------------------


def test_the_bound_is_the_best_design() -> None:
    found = CERTIFICATE.bound(1.0)
    nats = math.log(2)
    values = [0.8 - 0.4 * nats, 0.31 - 2 * 0.05 * nats, 8 / (2 * math.pi * math.e) * 2 ** (2 * 8.5 / 8) - 1.6]
    assert found.mse == pytest.approx(1000 * max(values), rel=1e-12)
    assert found.rho == pytest.approx(math.sqrt(max(values)), rel=1e-12)
    assert found.design == CERTIFICATE.designs[int(np.argmax(values))]
    assert found.rmse == pytest.approx(math.sqrt(found.mse))
    assert found.rmse_per_coordinate == pytest.approx(math.sqrt(found.mse / 64))
    assert found.psnr == pytest.approx(20 * math.log10(16 / found.rmse_per_coordinate))
    assert found.leakage_bits == 1.0
    assert found.dimension == 64
    assert found.confidence == 0.95


def test_at_infinite_leakage_nothing_is_guaranteed() -> None:
    found = CERTIFICATE.bound(math.inf)
    assert found.rho == found.mse == found.rmse == 0.0
    assert found.psnr == math.inf
    assert found.design is None
    assert "infinitely many bits" in found.explain()
    assert "guarantees nothing" in found.explain()


@pytest.mark.parametrize("bits", [-1e-9, -math.inf, math.nan])
def test_no_such_leakage(bits: float) -> None:
    with pytest.raises(InvalidValueError, match="leakage_bits"):
        CERTIFICATE.bound(bits)


@given(designs, traces, st.floats(0, 40), st.floats(0, 10))
def test_the_bound_falls_with_the_leakage(found: list[Any], trace: dict[str, Any], bits: float, more: float) -> None:
    certificate = make(*found, trace=trace)
    low, high = certificate.bound(bits), certificate.bound(bits + more)
    assert 0.0 <= high.rho <= low.rho <= 1.0
    assert high.mse <= low.mse
    assert certificate.highest_rho == certificate.bound(0.0).rho


@given(designs, traces, st.floats(1e-6, 1.0))
def test_the_budget_is_the_inverse_on_the_safe_side(found: list[Any], trace: dict[str, Any], share: float) -> None:
    certificate = make(*found, trace=trace)
    highest = certificate.highest_rho
    assume(highest > 0)
    floor = share * highest
    budget = certificate.leakage_budget(floor)
    assert 0.0 <= budget < math.inf
    assert certificate.bound(budget).rho >= floor
    # a billionth more is too much, save what double precision cannot tell apart
    assert certificate.bound(budget * (1 + 1e-9) + 1e-10).rho < floor


@given(designs, st.floats(0.01, 1.0), st.floats(0.5, 1.0))
def test_a_lower_floor_has_a_larger_budget(found: list[Any], share: float, factor: float) -> None:
    certificate = make(*found)
    assume(certificate.highest_rho > 1e-6)
    floor = share * certificate.highest_rho
    assert certificate.leakage_budget(floor * factor) >= certificate.leakage_budget(floor)


@pytest.mark.parametrize("floor", [1e-300, 1e-200, 1e-160, 1e-20, 1e-9])
def test_tiny_floors(floor: float) -> None:
    budget = CERTIFICATE.leakage_budget(floor)
    assert CERTIFICATE.bound(budget).rho >= floor
    assert budget == pytest.approx(CERTIFICATE.leakage_budget(1e-7), rel=1e-6)


def test_floors_at_and_above_the_highest() -> None:
    highest = CERTIFICATE.highest_rho
    assert CERTIFICATE.leakage_budget(highest) >= 0.0
    shown = f"{math.floor(highest * 1e4) / 1e4:g}"
    for floor in (math.nextafter(highest, 2.0), 0.999, 1.0):
        with pytest.raises(FloorUnreachableError, match=rf"zero leakage is {shown}\. Choose a floor below"):
            CERTIFICATE.leakage_budget(floor)
    assert CERTIFICATE.leakage_budget(float(shown)) >= 0.0  # the floor that the message names can be had


@pytest.mark.parametrize(
    ("floor", "message"),
    [
        (0.0, "min_rho > 0"),
        (-0.5, "min_rho > 0"),
        (math.nan, "NaN"),
        (1.0 + 1e-12, r"\(0, 1\]"),
        (math.inf, "finite"),
        ("x", "number"),
    ],
)
def test_no_such_floor(floor: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        CERTIFICATE.leakage_budget(floor)


def test_a_ratio_never_exceeds_one() -> None:
    certificate = make(ReplicaDesign(temperature=1.0, intercept=1.2))
    assert certificate.highest_rho == 1.0
    assert certificate.bound(0.0).mse == 1200.0
    budget = certificate.leakage_budget(1.0)
    assert budget == pytest.approx(0.2 / math.log(2), rel=1e-12)


def test_normalisers() -> None:
    point = CERTIFICATE
    upper = make(trace={"normaliser": "ucb"})
    declared = make(trace={"normaliser": "declared", "declared": 4000.0})
    assert [c.confidence for c in (point, upper, declared)] == [0.95, 0.92, 0.95]
    a, b, c = (certificate.bound(0.5) for certificate in (point, upper, declared))
    assert a.mse == b.mse == c.mse
    assert b.rho == pytest.approx(a.rho * math.sqrt(1000 / 1100), rel=1e-14)
    assert c.rho == pytest.approx(a.rho / 2, rel=1e-14)
    assert ["estimated" in a.normaliser, "upper bound" in b.normaliser, "declared" in c.normaliser] == [True] * 3
    assert upper.leakage_budget(0.5) < point.leakage_budget(0.5)


def test_no_psnr_without_a_peak() -> None:
    assert replace(CERTIFICATE.bound(1.0), peak=None).psnr is None
    assert "PSNR" not in replace(CERTIFICATE.bound(1.0), peak=None).explain()


def test_bound_and_budget_are_fast() -> None:
    certificate = make(*[ReplicaDesign(temperature=0.1 * i, intercept=0.1 * i + 0.1) for i in range(1, 8)])
    for call in (lambda: certificate.bound(0.7), lambda: certificate.leakage_budget(0.5)):
        assert min(timeit.repeat(call, number=200, repeat=20)) / 200 < 50e-6


# ---- words -----------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(1e-12, 1e12), st.floats(1e-9, 1e6))
def test_explain_rounds_to_the_safe_side(rho: float, mse: float, bits: float) -> None:
    design = CERTIFICATE.designs[0]
    bound = ReconstructionBound(
        leakage_bits=bits, rho=rho, mse=mse, dimension=64, design=design, confidence=0.95, normaliser="it",
        representation="pixels", peak=16.0,
    )  # fmt: skip
    text = bound.explain()
    number = r"([-+0-9.e]+)"
    found = re.search(rf"at {number} bits", text, re.IGNORECASE)
    assert found
    assert bits * (1 - 1e-12) <= float(found[1]) <= bits * 1.002
    if rho < 1e-3:
        assert "guarantees nothing" in text
        return
    shown = re.search(rf"at least {number} times", text)
    per_coordinate = re.search(rf"at least {number} per coordinate", text)
    psnr = re.search(rf"PSNR of at most {number} dB", text)
    assert shown
    assert per_coordinate
    assert psnr
    assert rho - 1.001e-3 <= float(shown[1]) <= rho * (1 + 1e-12)
    exact = bound.rmse_per_coordinate
    assert exact * 0.998 <= float(per_coordinate[1]) <= exact * (1 + 1e-12)
    assert bound.psnr is not None
    assert bound.psnr - 1e-9 <= float(psnr[1]) <= bound.psnr + 0.0101
    assert "average over the source" in text


@pytest.mark.parametrize("bits", [5e-324, 1e-310, 1e-300, 1.7e308])
def test_explain_at_the_ends_of_the_numbers(bits: float) -> None:
    assert "bits of leakage" in CERTIFICATE.bound(bits).explain()


DIAGNOSTICS = (
    DesignDiagnostics(
        n=400, point=0.93, in_sample=0.92, certified=0.8, sampling_margin=0.05, range_margin=0.02, gap_margin=0.06,
        diagonal_share=0.05,
    ),
    None,
    DesignDiagnostics(
        n=400, point=1.0, in_sample=0.95, certified=value_at_zero(CERTIFICATE.designs[2]), sampling_margin=0.001,
        diagonal_share=0.0,
    ),
)  # fmt: skip
EXPLAINED = make(diagnostics=DIAGNOSTICS)


@pytest.mark.parametrize("certificate", [CERTIFICATE, EXPLAINED])
def test_the_certificate_in_words(certificate: SourceCertificate) -> None:
    text = certificate.explain()
    assert "100 reference and 400 estimation records; confidence 0.95" in text
    assert "64 coordinates" in text
    assert 7 <= text.count("\n") <= 13
    told = re.search(r"ρ\* is at least (.*); from ([0-9.]+) bits on nothing", text)
    assert told
    pairs = re.findall(r"([0-9.]+) at ([0-9.]+)", told[1])
    assert len(pairs) >= 4
    for rho, bits in pairs:
        exact = certificate.bound(float(bits)).rho
        assert exact - 1e-3 <= float(rho) <= exact
    ranges = certificate.winners()
    assert float(told[2]) == pytest.approx(ranges[-1].stop_bits, abs=0.006)
    rows = re.findall(r"^  ([0-9.]+) to ([0-9.]+) bits: (replica|block) design, (.*?);", text, flags=re.MULTILINE)
    assert len(rows) == len(ranges)
    for (start, stop, kind, _), winner in zip(rows, ranges, strict=True):
        assert float(start) == pytest.approx(winner.start_bits, abs=0.006)
        assert float(stop) == pytest.approx(winner.stop_bits, abs=0.006)
        assert kind == winner.design.kind


def test_what_limits_the_designs_in_words() -> None:
    block, replica, other = [line for line in EXPLAINED.explain().splitlines() if line.startswith("  ")]
    # at zero leakage, where the block design wins: .95 − certified, and 1 − .95, both rounded up
    assert re.search(r"limited by the margins \(margins 0.12[01], Monte Carlo 0.05[01]\)\.$", block)
    # .92 − .8, −.4 ln .95 and .93 − .92
    assert re.search(r"limited by the margins \(margins 0.12[01], diagonal 0.021, rounding 0.01[01]\)\.$", replica)
    assert other.endswith("what limits it was not recorded.")
    assert "no diagnostics" not in EXPLAINED.explain()
    assert "make it again" in CERTIFICATE.explain()
    assert "what limits it was not recorded" in CERTIFICATE.explain()
    alone = make(
        ReplicaDesign(temperature=0.4, intercept=0.8), diagnostics=(replace(DIAGNOSTICS[0], diagonal_share=1.0),)
    )
    assert "every record is alone" in alone.explain()
    assert "Nothing is guaranteed at any leakage" in make(ReplicaDesign(temperature=0.4, intercept=-0.1)).explain()


def test_what_more_records_would_bring_in_words() -> None:
    text = EXPLAINED.explain().splitlines()[-1]
    assert text.startswith("More estimation records, an estimate and not a bound: ")
    found = re.findall(
        r"at ([13]) bits? ([0-9.]+) would become about ([0-9.]+) with 800 and ([0-9.]+) with 1,600", text
    )
    assert [bits for bits, *_ in found] == ["1", "3"]
    for bits, *values in found:
        for factor, value in zip((1, 2, 4), values, strict=True):
            exact = EXPLAINED.rho_with_more_records(float(bits), factor)
            assert exact is not None
            assert exact - 1e-3 <= float(value) <= exact


def test_many_ranges_in_words() -> None:
    certificate = make(*[ReplicaDesign(temperature=0.05 * i, intercept=0.25 * math.sqrt(i)) for i in range(1, 14)])
    lines = [line for line in certificate.explain().splitlines() if line.startswith("  ")]
    assert len(certificate.winners()) > 9
    assert len(lines) == 9
    assert "narrower ranges are left out; `winners()` has them all" in lines[-1]
    starts = [float(line.split()[0]) for line in lines[:-1]]
    assert starts == sorted(starts)


def test_more_records_are_an_estimate_beside_the_bound() -> None:
    """The bound itself does not depend on diagnostics, and nothing is estimated without them."""
    for bits in (0.0, 1.0, 3.0, 50.0):
        assert EXPLAINED.bound(bits) == CERTIFICATE.bound(bits)
        values = [EXPLAINED.rho_with_more_records(bits, factor) for factor in (1.0, 2.0, 4.0)]
        assert values[0] == pytest.approx(CERTIFICATE.bound(bits).rho, rel=1e-12)
        assert values == sorted(values)
    assert EXPLAINED.rho_with_more_records(0.0) > CERTIFICATE.highest_rho
    assert CERTIFICATE.rho_with_more_records(0.0) is None
    with pytest.raises(InvalidValueError, match="factor >= 1"):
        EXPLAINED.rho_with_more_records(1.0, 0.5)
    with pytest.raises(InvalidValueError, match="leakage_bits"):
        EXPLAINED.rho_with_more_records(-1.0)


# ---- diagnostics in the file -----------------------------------------------------------------------------------------


def test_diagnostics_travel_in_the_file() -> None:
    loaded = SourceCertificate.from_json(EXPLAINED.to_json())
    assert loaded == EXPLAINED
    assert loaded.digest == EXPLAINED.digest != CERTIFICATE.digest
    changed = replace(EXPLAINED, diagnostics=(replace(DIAGNOSTICS[0], diagonal_share=0.06), *DIAGNOSTICS[1:]))
    assert changed.digest != EXPLAINED.digest
    assert replace(EXPLAINED, diagnostics=()) == CERTIFICATE


def test_files_from_before_diagnostics_stay_what_they_are() -> None:
    """The field is absent where it is empty; this text and digest are of the version before it existed."""
    assert "diagnostics" not in json.loads(TEXT)
    assert CERTIFICATE.digest == "b48937e0ea1eb0ce01c77bce55e41b01840446f79789b0b5cf593b6b864b68a0"
    content = json.loads(TEXT)
    content["diagnostics"] = []
    text = json.dumps(content)  # the same content, and so the same digest
    assert SourceCertificate.from_json(text) == CERTIFICATE
    assert SourceCertificate.from_json(text).to_json() == TEXT


@pytest.mark.parametrize(
    ("diagnostics", "message"),
    [
        (DIAGNOSTICS[:2], "each of the 3 designs, or none at all. Found 2"),
        (DIAGNOSTICS[::-1], "diagnostics.0 are of another design"),
        ((replace(DIAGNOSTICS[0], n=401), None, None), "another sample: n = 401, estimation.n = 400"),
    ],
)
def test_diagnostics_of_something_else(diagnostics: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make(diagnostics=diagnostics)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("diagnostics.0.certified", 0.81, "another design"),
        ("diagnostics.0.surprise", 1.0, "surprise"),
        ("diagnostics.0.point", "1", "point"),
        ("diagnostics.0.diagonal_share", 1.5, r"diagonal_share in \[0, 1\]"),
        ("diagnostics.1", 0.5, "diagnostics"),
    ],
)
def test_invalid_diagnostics_with_a_fitting_digest(path: str, value: Any, message: str) -> None:
    refused(changed_at(path, value, EXPLAINED.to_json()), message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, r"alpha in \(0, 1\)"),
        ({"designs": ()}, "at least one design"),
        ({"alpha_split": {"replica": 0.03, "block": 0.03}}, "spends more than alpha"),
    ],
)
def test_invalid_certificates(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        replace(CERTIFICATE, **change)


def test_extreme_designs_are_answered_or_refused_never_hung() -> None:
    tiny = make(ReplicaDesign(temperature=1e-320, intercept=0.9))
    assert tiny.bound(tiny.leakage_budget(0.5)).rho >= 0.5
    with pytest.raises(CertificateError, match="not a valid certificate"):
        SourceCertificate.from_json(changed_at("designs.0.replicas", 10**400))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("alpha_split", {}),
        ("alpha_split", {"replica": -0.1}),
        ("estimation.n", 0),
        ("reference.n", -3),
    ],
)
def test_impossible_content_with_a_fitting_digest(path: str, value: Any) -> None:
    with pytest.raises(CertificateError, match="not a valid certificate"):
        SourceCertificate.from_json(changed_at(path, value))


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a certificate's JSON."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 2**80), st.sampled_from([10**400, 5e-324, 1e308])
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(places(json.loads(EXPLAINED.to_json())), key=str)), st.one_of(numbers, anything))
@example(("trace", "scale"), 1e-300)
@example(("diagnostics", 0, "in_sample"), -1.8e305)
@example(("diagnostics", 2, "in_sample"), -7.0)
@example(("designs", 1, "temperature"), 2.2e-311)
def test_whatever_stands_in_a_file_is_answered_or_refused(place: tuple[Any, ...], value: Any) -> None:
    content = inner = json.loads(EXPLAINED.to_json())
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    try:
        certificate = SourceCertificate.from_json(signed(content))
    except CertificateError as error:
        if len(str(error)) > 1000:
            raise
        return
    most = certificate.trace.squared_diameter / 2
    for bits in (0.0, 1e-300, 2.0, 1e300, math.inf):
        bound = certificate.bound(bits)
        assert 0.0 <= bound.rho <= 1.0
        assert bound.mse <= most * (1 + 1e-6)
        assert bound.explain()
    assert certificate.explain()
    with contextlib.suppress(FloorUnreachableError):
        assert certificate.bound(certificate.leakage_budget(0.5)).rho >= 0.5
