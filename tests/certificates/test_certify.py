"""Data in, certificate out: digits and synthetic data, every refusal, inputs that must agree."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import most_failures
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.certificates.replica import DEFAULT_TEMPERATURES
from opacus_reconbound.errors import DataError, InvalidValueError, OverlapError
from opacus_reconbound.representations import Pixels, Representation, RepresentationDescriptor

ROOT = Path(__file__).resolve().parents[2]
Images = NDArray[np.uint8]
DIGITS: Images = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)]
PSI = Pixels(value_range=(0, 16))


def digits(reference: Any = None, estimation: Any = None, **options: Any) -> SourceCertificate:
    return certify(
        DIGITS[:400] if reference is None else reference,
        DIGITS[400:] if estimation is None else estimation,
        **({"representation": PSI, "progress": False} | options),
    )


@pytest.fixture(scope="module")
def certificate() -> SourceCertificate:
    return digits()


CENTRES = np.random.default_rng(5).uniform(0.2, 0.8, size=(3, 6))


def synthetic(seed: int, n: int) -> NDArray[np.float32]:
    """Three soft clusters in six dimensions, in [0, 1]."""
    rng = np.random.default_rng(seed)
    return (CENTRES[rng.integers(3, size=n)] + rng.uniform(-0.1, 0.1, size=(n, 6))).astype(np.float32)


# ---- end to end ------------------------------------------------------------------------------------------------------


def test_digits(certificate: SourceCertificate) -> None:
    flat = DIGITS[:400].reshape(400, 64).astype(np.float64)
    trace = certificate.trace
    assert trace.scale == pytest.approx(flat.var(axis=0).sum(), rel=1e-12)
    assert trace.pairs == 200
    assert trace.scale < trace.upper < 2 * trace.scale
    assert trace.squared_diameter == 16**2 * 64
    assert (certificate.reference.n, certificate.estimation.n) == (400, 1397)
    assert certificate.confidence == 0.95
    assert certificate.alpha_split == {"replica": 0.05}
    assert certificate.representation == PSI.describe((8, 8))
    assert sorted(design.temperature for design in certificate.designs) == sorted(DEFAULT_TEMPERATURES)  # type: ignore[union-attr]
    assert certificate.settings["temperatures"] == list(DEFAULT_TEMPERATURES)
    assert len(certificate.assumptions) == 5
    ratios = [certificate.bound(bits).rho for bits in (0, 1, 2, 4, 50)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 0.7
    assert ratios[1] > 0.5
    assert ratios[-1] == 0.0


def test_digits_are_reconstructed_worse_than_the_bound_by_an_attack(certificate: SourceCertificate) -> None:
    """An attack that learns which of k codebook records is nearest leaks at most log2 k bits."""
    codebook = DIGITS[:400].reshape(400, 64).astype(np.float64)
    records = DIGITS[400:].reshape(-1, 64).astype(np.float64)
    for bits in (1, 2, 3, 5):
        chosen = codebook[: 2**bits]
        errors = ((records[:, None] - chosen[None]) ** 2).sum(2).min(1)
        assert certificate.bound(bits).mse < errors.mean()


def test_the_file_round_trip(certificate: SourceCertificate, tmp_path: Path) -> None:
    loaded = SourceCertificate.load(certificate.save(tmp_path / "digits.json"))
    assert loaded == certificate
    assert loaded.digest == certificate.digest
    assert loaded.bound(1.0) == certificate.bound(1.0)
    for name in ("all", "block"):
        other = digits(designs=name, pairs=[(8, 1.6)])
        assert SourceCertificate.from_json(other.to_json()) == other


def test_coverage_at_zero_leakage() -> None:
    """At γ = 0 the truth is the variance of the source, which is known: no certificate may exceed it too often."""
    level, repeats, failures = 0.5, 60, 0
    truth = float(CENTRES.var(axis=0).sum()) + 6 * 0.2**2 / 12
    heights = []
    for seed in range(repeats):
        found = certify(
            synthetic(2 * seed, 100),
            synthetic(2 * seed + 1, 600),
            representation=Pixels(value_range=(0, 1)),
            alpha=level,
            progress=False,
        )
        failures += found.bound(0.0).mse > truth
        heights.append(found.bound(0.0).mse / truth)
    assert failures <= most_failures(repeats, level)
    assert min(heights) > 0.3


def test_both_kinds_share_alpha() -> None:
    both = digits(designs="all", pairs=[(8, 1.6), (4, 3.2)], alpha=0.08)
    assert both.alpha_split == {"replica": 0.04, "block": 0.04}
    assert both.confidence == 0.92
    replica = digits(designs="replica", alpha=0.04)
    block = digits(designs=["block"], pairs=[(8, 1.6), (4, 3.2)], alpha=0.04)
    assert both.designs == replica.designs + block.designs
    assert block.alpha_split == {"block": 0.04}
    assert both.settings["pairs"] == [[8, 1.6], [4, 3.2]]
    for bits in (0.0, 1.0, 3.0):
        assert both.bound(bits).rho == max(replica.bound(bits).rho, block.bound(bits).rho)


def test_a_smaller_alpha_is_a_lower_bound(certificate: SourceCertificate) -> None:
    strict = digits(alpha=0.001)
    for a, b in zip(certificate.designs, strict.designs, strict=True):
        assert b.distortion(0.5) <= a.distortion(0.5)
    assert strict.highest_rho < certificate.highest_rho


def test_normalisers(certificate: SourceCertificate) -> None:
    upper = digits(normaliser="ucb", trace_level=0.03)
    declared = digits(normaliser=5000)
    assert upper.confidence == 0.92
    assert upper.trace.reference == upper.trace.upper
    assert declared.trace.reference == declared.trace.declared == 5000.0
    assert certificate.bound(1.0).mse == upper.bound(1.0).mse == declared.bound(1.0).mse
    assert upper.bound(1.0).rho < certificate.bound(1.0).rho
    assert declared.bound(1.0).rho == pytest.approx(math.sqrt(certificate.bound(1.0).mse / 5000))


# ---- the same records give the same certificate ----------------------------------------------------------------------


def test_the_same_seed_gives_the_same_digest(certificate: SourceCertificate) -> None:
    assert digits().digest == certificate.digest
    assert digits(seed=1).digest != certificate.digest
    assert digits(seed=1).designs == certificate.designs  # the replica designs draw nothing


@pytest.mark.parametrize("designs", ["fast", "all"])
def test_the_number_of_threads_does_not_matter(designs: str) -> None:
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(digits(designs=designs, pairs=[(8, 1.6), (4, 0.4)]).to_json())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_stays_near_the_matrix_of_vectors(tmp_path: Path) -> None:
    """The peak of a process of its own, above what importing takes; the mapped file counts as well."""
    n, d = 1100, 49_152
    data = np.lib.format.open_memmap(tmp_path / "d.npy", mode="w+", dtype=np.uint8, shape=(n, d))
    rng = np.random.default_rng(0)
    for row in data:
        row[:] = rng.integers(0, 256, size=d, dtype=np.uint8)
    data.flush()
    script = (
        "import re, sys, numpy as np\n"
        "from opacus_reconbound import certify\n"
        "peak = lambda: 1024 * int(re.search('VmHWM:\\\\s+(\\\\d+)', open('/proc/self/status').read())[1])\n"
        "small = np.random.default_rng(0).integers(0, 256, (300, 9), np.uint8)\n"
        "certify(small[:100], small[100:], allow_repeats=True, temperatures=[.4])\n"
        "before, x = peak(), np.load(sys.argv[1], mmap_mode='r')\n"
        "certify(x[:100], x[100:], temperatures=[.4])\n"
        "print(peak() - before)"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "d.npy")],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert 4 * n * d < int(done.stdout) < 4 * n * d + n * d + 130 * 2**20


def test_other_containers_of_the_same_records(certificate: SourceCertificate, tmp_path: Path) -> None:
    np.save(tmp_path / "reference.npy", DIGITS[:400])
    np.save(tmp_path / "estimation.npy", DIGITS[400:])
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("reference", "estimation")]
    assert digits(*mapped).digest == certificate.digest
    assert digits(torch.from_numpy(DIGITS[:400]), torch.from_numpy(DIGITS[400:])).digest == certificate.digest
    assert digits(np.asfortranarray(DIGITS[:400]), DIGITS[400:]).digest == certificate.digest
    tracked = torch.from_numpy(DIGITS.astype(np.float32)).requires_grad_()
    assert digits(tracked[:400], tracked[400:]).designs == certificate.designs


@pytest.mark.parametrize(
    "dtype", [np.int8, np.int16, np.uint16, np.int64, np.float16, np.float32, np.float64, ">f4", ">i2", np.longdouble]
)
def test_the_number_type_does_not_matter(certificate: SourceCertificate, dtype: Any) -> None:
    records = DIGITS.astype(dtype)
    assert digits(records[:400], records[400:]).designs == certificate.designs


def test_bfloat16_and_lists(certificate: SourceCertificate) -> None:
    records = torch.from_numpy(DIGITS).to(torch.bfloat16)
    assert digits(records[:400], records[400:]).designs == certificate.designs
    assert digits(DIGITS[:400].tolist(), DIGITS[400:].tolist()).designs == certificate.designs


def test_booleans() -> None:
    records = DIGITS > 7
    psi = Pixels(value_range=(0, 1))
    binary = certify(records[:400], records[400:], representation=psi, allow_repeats=True, progress=False)
    flat = records[:400].reshape(400, 64)
    assert binary.trace.scale == pytest.approx(flat.astype(float).var(axis=0).sum(), rel=1e-12)


def test_the_order_of_the_estimation_records_changes_rounding_only(certificate: SourceCertificate) -> None:
    other = digits(estimation=DIGITS[400:][::-1].copy())
    assert other.estimation == certificate.estimation
    assert other.trace == certificate.trace
    for a, b in zip(certificate.designs, other.designs, strict=True):
        assert b.distortion(0.5) == pytest.approx(a.distortion(0.5), abs=1e-5)


def test_the_order_of_the_reference_records_changes_the_pairing_and_rounding_only(
    certificate: SourceCertificate,
) -> None:
    other = digits(reference=DIGITS[:400][::-1].copy())
    assert other.reference == certificate.reference
    assert other.trace.scale == pytest.approx(certificate.trace.scale, rel=1e-12)
    for a, b in zip(certificate.designs, other.designs, strict=True):
        assert b.distortion(0.5) == pytest.approx(a.distortion(0.5), abs=1e-4)


def test_shifting_and_scaling_the_values_changes_the_unit_only(certificate: SourceCertificate) -> None:
    moved = 4.0 * DIGITS.astype(np.float32) - 100.0
    other = digits(moved[:400], moved[400:], representation=Pixels(value_range=(-100, -36)))
    assert other.bound(1.0).mse == pytest.approx(16 * certificate.bound(1.0).mse, rel=1e-5)
    assert other.bound(1.0).psnr == pytest.approx(certificate.bound(1.0).psnr, abs=1e-4)


def test_reference_records_beyond_the_maximum_serve_the_scale_only() -> None:
    few = digits(max_reference=100)
    assert few.settings["max_reference"] == 100
    assert few.reference.n == 400
    assert few.trace == digits().trace
    assert few.designs != digits().designs


def test_the_inputs_are_left_alone() -> None:
    reference = torch.from_numpy(DIGITS[:400].astype(np.float32))
    before = reference.clone()
    estimation = DIGITS[400:].astype(np.float32)
    digits(reference, estimation)
    assert torch.equal(reference, before)
    assert np.array_equal(estimation, DIGITS[400:])


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_overlap_by_content_at_other_indices() -> None:
    estimation = DIGITS[400:].copy()
    estimation[77] = DIGITS[3]
    with pytest.raises(OverlapError, match=r"share 1 record\(s\): reference\[3\] = estimation\[77\]\..*allow_repeats"):
        digits(estimation=estimation)
    allowed = digits(estimation=estimation, allow_repeats=True)
    assert "independent draws" in allowed.assumptions[-1]
    assert len(allowed.assumptions) == 6


def test_copies_within_a_sample_are_refused() -> None:
    """Thirty records a hundred times, or a reference sample of three: margins and tr Σ̂ would be of many records."""
    with pytest.raises(OverlapError, match=r"Of the 3000 records of the estimation sample only 30 are .*allow_repeats"):
        digits(estimation=np.repeat(DIGITS[400:430], 100, axis=0))
    with pytest.raises(OverlapError, match="Of the 300 records of the reference sample only 3 are distinct"):
        digits(reference=np.repeat(DIGITS[:3], 100, axis=0), designs="block", pairs=[(8, 1.6)])
    few = np.concatenate([DIGITS[400:], DIGITS[400:410]])
    assert digits(estimation=few).estimation.n == 1407
    assert digits(estimation=np.repeat(DIGITS[400:430], 100, axis=0), allow_repeats=True).estimation.n == 3000


@pytest.mark.parametrize(
    ("default", "value"), [("set_default_device", "meta"), ("set_default_dtype", torch.float64)], ids=str
)
@pytest.mark.parametrize("kind", ["fast", "block"])
def test_torchs_defaults_do_not_matter(default: str, value: Any, kind: str) -> None:
    expected = digits(designs=kind, pairs=[(8, 1.6)])
    before = torch.get_default_dtype()
    try:
        getattr(torch, default)(value)
        assert digits(designs=kind, pairs=[(8, 1.6)]) == expected
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def with_value(value: float) -> NDArray[np.float64]:
    records = DIGITS[400:].astype(np.float64)
    records[1100, 2, 3] = value
    return records


class Broken(Representation):
    """Wrong in one way or another."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        z = records.reshape(len(records), -1).to(torch.float32)
        if self.fault == "nan":
            return torch.where(z > 15, torch.nan, z)
        if self.fault == "inf":
            return z / 0.0
        return {"flat": z.sum(1), "cube": z[:, None], "fewer": z[1:], "narrow": z[:, 1:]}[self.fault]

    def describe(self, record_shape: tuple[int, ...]) -> RepresentationDescriptor:
        return PSI.describe(record_shape)

    def check(self, records: torch.Tensor) -> None:
        pass


FLOATS = DIGITS.astype(np.float64)
REFUSALS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "NaN": (
        {"reference": FLOATS[:400], "estimation": with_value(np.nan)},
        DataError,
        r"estimation\[1100\] holds NaN or infinite values\. Remove or repair",
    ),
    "infinity": (
        {"reference": FLOATS[:400], "estimation": with_value(-np.inf)},
        DataError,
        r"estimation\[1100\] holds NaN or infinite values\. Remove or repair",
    ),
    "constant": ({"reference": np.full_like(DIGITS[:400], 3)}, DataError, "all alike"),
    "few reference records": ({"reference": DIGITS[:31]}, DataError, "reference sample has 31 records; at least 32"),
    "few estimation records": ({"estimation": DIGITS[400:499]}, DataError, "has 99 records; at least 100 are needed"),
    "one dimension": ({"reference": np.arange(400.0)}, DataError, r"\(n, \.\.\.\).*Found shape \(400,\)"),
    "a number": ({"reference": 3.0}, DataError, r"Found shape \(\)"),
    "no entries": ({"reference": np.zeros((400, 0))}, DataError, "empty"),
    "objects": ({"reference": DIGITS[:400].astype(object)}, DataError, "reference records to be real numbers.*object"),
    "complex": ({"reference": DIGITS[:400] + 0j}, DataError, "real numbers.*complex"),
    "strings": ({"estimation": DIGITS[400:].astype(str)}, DataError, "estimation records to be real numbers.*<U"),
    "None": ({"estimation": [None] * 200}, DataError, "real numbers"),
    "ragged": ({"reference": [[1.0, 2.0], [3.0]] * 40}, DataError, "reference records do not form one array"),
    "shapes": (
        {"estimation": DIGITS[400:].reshape(-1, 64)},
        DataError,
        r"different shapes: reference \(8, 8\), estimation \(64,\)",
    ),
    "types": ({"estimation": FLOATS[400:]}, DataError, "different types: reference uint8, estimation float64"),
    "fractions under the 8-bit range": (
        {"reference": FLOATS[:400] / 16, "estimation": FLOATS[400:] / 16, "representation": Pixels()},
        DataError,
        r"floating-point numbers in \[0, 1\].*Pixels\(value_range=\(0, 1\)\)",
    ),
    "values outside the range": (
        {"representation": Pixels(value_range=(0, 15))},
        DataError,
        r"values from 0 to 16, outside the declared value_range \(0, 15\)",
    ),
    "alpha 0": ({"alpha": 0.0}, InvalidValueError, r"alpha in \(0, 1\)"),
    "alpha 1": ({"alpha": 1.0}, InvalidValueError, r"alpha in \(0, 1\)"),
    "alpha NaN": ({"alpha": math.nan}, InvalidValueError, "alpha"),
    "trace level": ({"trace_level": 0.0}, InvalidValueError, r"trace_level in \(0, 1\)"),
    "seed": ({"seed": -1}, InvalidValueError, "seed"),
    "seed fraction": ({"seed": 0.5}, InvalidValueError, "seed to be a whole number"),
    "temperature 0": ({"temperatures": [0.4, 0.0]}, InvalidValueError, "temperatures > 0"),
    "temperature NaN": ({"temperatures": [math.nan]}, InvalidValueError, "temperatures"),
    "no temperature": ({"temperatures": []}, InvalidValueError, "distinct temperatures"),
    "temperatures twice": ({"temperatures": [0.4, 0.2, 0.4]}, InvalidValueError, "distinct temperatures"),
    "designs": ({"designs": "slow"}, InvalidValueError, "'fast', 'auto', 'replica', 'multi', 'block', 'all'.*'slow'"),
    "designs in a list": ({"designs": ["replica", "oracle"]}, InvalidValueError, "'fast'.*oracle"),
    "a number for designs": ({"designs": 3}, InvalidValueError, "'fast'.*Found 3"),
    "device": ({"device": "nonsense"}, InvalidValueError, "device nonsense cannot be used here: .*default is cpu"),
    "temperature far off": ({"temperatures": [1e-300]}, InvalidValueError, "temperatures in units of tr Σ.*1e-300"),
    "pairs far off": ({"designs": "block", "pairs": [(8, 1e300)]}, InvalidValueError, "pairs in units of tr Σ.*1e.300"),
    "declared far off": (
        {"normaliser": 1e-300, "reference_from": "elsewhere"},
        InvalidValueError,
        "normaliser = 1e-300 is too small.*squared data units",
    ),
    "no designs": ({"designs": []}, InvalidValueError, "'fast'"),
    "normaliser": ({"normaliser": "mean"}, InvalidValueError, "normaliser to be 'point', 'ucb' or a declared.*'mean'"),
    "normaliser 0": ({"normaliser": 0.0}, InvalidValueError, "normaliser > 0"),
    "maximum": ({"max_reference": -5}, InvalidValueError, "max_reference"),
    "representation NaN": (
        {"representation": Broken("nan")},
        DataError,
        r"representation is not finite on reference\[0\]",
    ),
    "representation infinite": ({"representation": Broken("inf")}, DataError, "representation is not finite"),
    **{
        f"representation {fault}": (
            {"representation": Broken(fault)},
            DataError,
            r"must map \(n, \.\.\.\) to \(n, m\), m = 64 .*It mapped \(400, 8, 8\) to",
        )
        for fault in ("flat", "cube", "fewer", "narrow")
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    arguments, error, message = REFUSALS[case]
    with pytest.raises(error, match=message) as caught:
        digits(**arguments)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


# ---- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    digits(progress=True)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    digits(progress=False)
    assert terminal.getvalue() == ""
    digits(progress=True)
    assert "replica designs" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_the_file_names_no_path_and_no_record(certificate: SourceCertificate) -> None:
    content = json.loads(certificate.to_json())
    assert len(certificate.to_json()) < 10_000
    assert set(content) == {
        "format", "digest", "designs", "trace", "representation", "reference", "estimation", "alpha", "alpha_split",
        "seed", "settings", "assumptions", "library_version", "diagnostics", "schema_version",
    }  # fmt: skip


def test_values_that_single_precision_cannot_tell_apart_are_refused() -> None:
    """Rounding would count as uncertainty: the certified error would exceed what the prior mean attains."""
    generator = np.random.default_rng(0)
    records = 1e6 + 0.025 * generator.standard_normal((600, 300))
    with pytest.raises(DataError, match=r"single precision.*Subtract a constant"):
        certify(records[:200], records[200:], representation=Pixels(value_range=(0, 2e6)))
    centred = records - 1e6
    assert certify(centred[:200], centred[200:], representation=Pixels(value_range=(-1, 1))).highest_rho > 0


def test_masks_seeds_and_confidences_out_of_range() -> None:
    records = np.random.default_rng(0).integers(0, 255, size=(400, 9)).astype(np.uint8)
    with pytest.raises(DataError, match="masked array"):
        certify(np.ma.masked_greater(records[:100], 200), records[100:])
    with pytest.raises(InvalidValueError, match="seed"):
        certify(records[:100], records[100:], seed=2**70)
    with pytest.raises(InvalidValueError, match="confidence would be"):
        certify(records[:100], records[100:], alpha=0.6, trace_level=0.6, normaliser="ucb")
