"""Plans of splits: disjoint roles, repeats found by content, files, and what is checked against them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Subset, TensorDataset

from opacus_reconbound import SplitPlan
from opacus_reconbound.certificates import SourceCertificate, certify
from opacus_reconbound.certificates.records import as_source
from opacus_reconbound.errors import DataError, InvalidValueError, OverlapError
from opacus_reconbound.representations import Pixels

DIGITS = load_digits().images.astype(np.uint8)[np.random.default_rng(0).permutation(1797)][:800]
PSI = Pixels(value_range=(0, 16))
SIZES = {"train": 120, "val": 30, "test": 40, "reference": 150, "estimation": 350, "targets": 20, "shadow": 60}


def certificate(reference: Any, estimation: Any, **options: Any) -> SourceCertificate:
    return certify(reference, estimation, **({"representation": PSI, "progress": False} | options))


def read(records: Any) -> NDArray[Any]:
    return np.concatenate(list(as_source("some", records).chunks(64)))


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    return SplitPlan.make(DIGITS, **SIZES)


# ---- drawing ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=7, max_size=7), seed=st.integers(0, 2**40), independent=st.booleans()
)
def test_roles_are_disjoint_sorted_and_of_their_sizes(sizes: list[int], seed: int, independent: bool) -> None:
    wanted = {role: size for role, size in zip(SIZES, sizes, strict=True) if size}
    if not wanted:
        return
    records = np.arange(420, dtype=np.int32).reshape(210, 2)
    found = SplitPlan.make(records, **wanted, seed=seed, independent=independent)
    assert found.roles == tuple(wanted)
    training = {"train", "val", "test"}
    for role, size in wanted.items():
        indices = found.indices(role)  # type: ignore[arg-type]
        assert len(indices) == size
        assert (np.diff(indices) > 0).all()
        assert size == 0 or (indices[0] >= 0 and indices[-1] < 210)
    for a, b in combinations(wanted, 2):
        shared = np.intersect1d(found.indices(a), found.indices(b))  # type: ignore[arg-type]
        assert len(found.overlap(a, b)) == len(shared)
        if not independent or (a in training) == (b in training):
            assert not len(shared)
    assert found == SplitPlan.make(records, **wanted, seed=seed, independent=independent)


def test_independent_splits_overlap_by_chance() -> None:
    found = SplitPlan.make(np.arange(2000).reshape(1000, 2), train=500, estimation=500, reference=400, independent=True)
    shared = len(found.overlap("train", "estimation"))
    assert abs(shared - 250) < 6 * 8  # six standard deviations of the hypergeometric law
    assert [(o.first, o.second) for o in found.overlaps()] == [("train", "reference"), ("train", "estimation")]
    found.check_certificate()
    assert "D_train and D_est share" in found.explain()
    assert "(allowed)." in found.explain()


def test_other_seeds_and_other_data_are_other_plans(plan: SplitPlan) -> None:
    assert SplitPlan.make(DIGITS, **SIZES) == plan
    assert hash(SplitPlan.make(DIGITS, **SIZES)) == hash(plan)
    assert SplitPlan.make(DIGITS, **SIZES, seed=1) != plan
    changed = DIGITS.copy()
    changed[-1, 0, 0] += 1
    assert SplitPlan.make(changed, **SIZES) != plan
    assert plan != "plan"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 801}, "asks for 801 records, but there are 800"),
        ({"train": 700, "estimation": 700}, "asks for 1400 records"),
        ({"train": -1}, "train to be a whole number"),
        ({"train": 1.5}, "train to be a whole number"),
        ({}, "gives no record a role"),
        ({"train": 10, "seed": -1}, "seed"),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        SplitPlan.make(DIGITS, **options)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"holdout": [1]}, "no role 'holdout'. Roles are: train, val"),
        ({"train": [1, 2, 1]}, "train holds the index 1 more than once"),
        ({"train": [1, 800]}, "train holds the index 800, but there are 800 records, 0 to 799"),
        ({"train": [-1]}, "train holds the index -1"),
        ({"train": [0.5]}, "sequence of indices. Found shape .1,. of type float64"),
        ({"train": [[1]]}, "sequence of indices"),
        ({"train": np.ones(800, bool)}, "of type bool"),
        ({"train": []}, "gives no record a role"),
    ],
)
def test_index_sets_that_are_none(roles: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        SplitPlan.of(DIGITS, roles)


# ---- repeats ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(values=st.lists(st.integers(0, 6), min_size=4, max_size=25), data=st.data())
def test_overlaps_are_what_comparing_all_pairs_finds(values: list[int], data: st.DataObject) -> None:
    records = np.array(values, np.int16)[:, None] * np.ones(3, np.int16)
    chosen = st.lists(st.integers(0, len(values) - 1), unique=True, min_size=1)
    sets = {"train": data.draw(chosen), "estimation": data.draw(chosen)}
    found = SplitPlan.of(records, sets).overlap("train", "estimation").pairs.tolist()
    expected = []
    for j in sorted(sets["estimation"]):
        equal = [i for i in sorted(sets["train"]) if values[i] == values[j]]
        if equal:
            expected.append([j if j in equal else equal[0], j])
    assert found == expected


def test_repeats_are_found_by_content_and_named_by_index() -> None:
    records = DIGITS.copy()
    records[700], records[412], records[413] = records[3], records[3], records[5]
    found = SplitPlan.of(records, {"reference": range(200), "estimation": range(200, 700), "test": [700, 799]})
    assert found.repeats == ((3, 412, 700), (5, 413))
    assert [str(overlap) for overlap in found.overlaps()] == [
        "D_perp and D_est share 2 record(s): 3 = 412, 5 = 413",
        "D_perp and D_test share 1 record(s): 3 = 700",
        "D_est and D_test share 1 record(s): 412 = 700",
    ]
    assert found.explain().splitlines()[2:] == [
        "D_perp and D_est share 2 record(s): 3 = 412, 5 = 413 (refused in a certificate).",
        "D_perp and D_test share 1 record(s): 3 = 700 (allowed).",
        "D_est and D_test share 1 record(s): 412 = 700 (allowed).",
    ]
    with pytest.raises(OverlapError, match=r"D_perp and D_est share 2 record.s.: 3 = 412, 5 = 413 .indices"):
        found.check_certificate()
    found.check_certificate(allow_repeats=True)
    same = SplitPlan.of(records, {"reference": range(200), "estimation": range(199, 500)})
    with pytest.raises(OverlapError, match=r"share 1 record\(s\): 199 \(indices"):
        same.check_certificate(allow_repeats=True)


def test_a_data_set_of_equal_records() -> None:
    found = SplitPlan.make(np.zeros((300, 4)), reference=100, estimation=150)
    assert len(found.overlap("reference", "estimation")) == 150
    with pytest.raises(OverlapError, match=r"share 150 record\(s\): .*, … \("):
        found.check_certificate()


def test_hashing_holds_a_chunk_at_a_time() -> None:
    class Made:
        record_shape, dtype = (4096,), np.dtype(np.float64)

        def __len__(self) -> int:
            return 1500

        def chunks(self, size: int) -> Iterator[NDArray[Any]]:
            for start in range(0, 1500, 50):
                yield np.random.default_rng(start).random((min(50, size), 4096))

    tracemalloc.start()
    try:
        found = SplitPlan.make(Made(), train=700, estimation=800)
        assert tracemalloc.get_traced_memory()[1] < 0.2 * 1500 * 4096 * 8
    finally:
        tracemalloc.stop()
    assert read(found.select(Made(), "train")).shape == (700, 4096)
    Made.__len__ = lambda self: 1600  # type: ignore[method-assign]
    with pytest.raises(DataError, match="says that it has 1600 records, but it gave 1500"):
        SplitPlan.make(Made(), train=700)


# ---- attacks ---------------------------------------------------------------------------------------------------------


def test_attacks(plan: SplitPlan) -> None:
    plan.check_attack()
    whole = {"reference": range(100), "estimation": range(100, 500), "targets": range(600, 620)}
    for shadow in (range(100, 200), range(100), range(620, 700)):  # D_est, D_perp or others: all are allowed
        SplitPlan.of(DIGITS, {**whole, "shadow": shadow}).check_attack()
    SplitPlan.of(DIGITS, {**whole, "targets": range(480, 500)}).check_attack()  # within D_est
    with pytest.raises(OverlapError, match=r"D_targets and D_shadow share 1 record\(s\): 600 \(.*An attack needs"):
        SplitPlan.of(DIGITS, {**whole, "shadow": [600]}).check_attack()
    with pytest.raises(OverlapError, match="D_targets and D_perp share 1 record"):
        SplitPlan.of(DIGITS, {**whole, "targets": [7]}).check_attack()
    repeated = np.concatenate([DIGITS, DIGITS[600:601]])
    with pytest.raises(OverlapError, match=r"D_targets and D_shadow share 1 record\(s\): 600 = 800"):
        SplitPlan.of(repeated, {**whole, "shadow": [800]}).check_attack()
    with pytest.raises(InvalidValueError, match=r"no role 'targets'\. It has: train"):
        SplitPlan.make(DIGITS, train=3).check_attack()


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files(plan: SplitPlan, tmp_path: Path) -> None:
    for one in (plan, SplitPlan.of(DIGITS, {"train": [5, 3], "test": [3]})):
        one.save(tmp_path / "new" / "plan.json")
        again = SplitPlan.load(tmp_path / "new" / "plan.json")
        assert again == one
        assert again.digest == one.digest
        assert again.roles == one.roles
        for role in one.roles:
            assert np.array_equal(again.indices(role), one.indices(role))  # type: ignore[arg-type]
        assert (again.samples, again.repeats, again.seed) == (one.samples, one.repeats, one.seed)
        assert again.explain() == one.explain()
        assert again.select(DIGITS, "train").chunks(3)  # type: ignore[union-attr]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["plan.json"]
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="could not be written"):
        plan.save(tmp_path / "file" / "plan.json")


def resealed(path: Path, change: Any) -> None:
    from opacus_reconbound.certificates.plan import _digest

    content = json.loads(path.read_text())
    form = content.pop("format")
    content.pop("digest")
    change(content)
    path.write_text(json.dumps({"format": form, **content, "digest": _digest(content)}))


RESEALED: dict[str, tuple[Any, str]] = {
    "newer": (lambda c: c.update(schema_version=2), r"schema version 2; this library reads up to 1. Update"),
    "unknown role": (lambda c: c["roles"].update(holdout=[1]), "not a valid plan: roles.holdout"),
    "unknown field": (lambda c: c.update(note="x"), "not a valid plan: note"),
    "missing": (lambda c: c.pop("n"), "not a valid plan: n: Field required"),
    "text": (lambda c: c["roles"].update(train=["1"]), "not a valid plan: roles.train.0"),
    "out of range": (lambda c: c["roles"]["train"].append(800), "not a valid plan: train holds the index 800"),
    "repeats": (lambda c: c["repeats"].append([1, 800]), "not a valid plan: repeats holds the index 800"),
    "order": (lambda c: c["roles"]["train"].reverse(), "not ascending"),
    "sizes": (lambda c: c["roles"]["train"].pop(), "roles and samples disagree"),
    "type": (lambda c: c.update(dtype="numbers"), "not a valid plan: data type 'numbers' not understood"),
}


@pytest.mark.parametrize("case", RESEALED)
def test_files_with_a_right_digest_and_wrong_content(plan: SplitPlan, tmp_path: Path, case: str) -> None:
    change, message = RESEALED[case]
    plan.save(tmp_path / "plan.json")
    resealed(tmp_path / "plan.json", change)
    with pytest.raises(DataError, match=message) as caught:
        SplitPlan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_damaged_files(plan: SplitPlan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    text = file.read_text()
    for content, message in (
        (text[:-9], "truncated, or not a plan"),
        ("", "truncated, or not a plan"),
        ("[]", "not a plan of splits"),
        ("{}", "not a plan of splits"),
        (text.replace('"seed": 0', '"seed": 1'), "altered after it was made"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=message):
            SplitPlan.load(file)
    with pytest.raises(DataError, match=r"There is no plan at .*none\.json"):
        SplitPlan.load(tmp_path / "none.json")
    with pytest.raises(DataError, match="cannot be read"):
        SplitPlan.load(tmp_path)


# ---- selecting -------------------------------------------------------------------------------------------------------


def test_every_container(plan: SplitPlan, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", DIGITS[:500])
    np.savez(tmp_path / "b.npz", x=DIGITS[500:])
    labelled = TensorDataset(torch.from_numpy(DIGITS), torch.arange(800))

    class Module(lightning.pytorch.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(labelled, shuffle=True)

    images = [Image.fromarray(image) for image in DIGITS]
    wanted = DIGITS[plan.indices("val")]
    for data in (
        DIGITS,
        torch.from_numpy(DIGITS),
        labelled,
        images,
        Module(),
        [tmp_path / "a.npy", tmp_path / "b.npz"],
    ):
        assert SplitPlan.make(data, **SIZES) == plan
        assert np.array_equal(read(plan.select(data, "val")), wanted)
        plan.check_data(data)
    loader = DataLoader(plan.select(labelled, "val"), batch_size=30)  # type: ignore[arg-type]
    ((x, y),) = loader
    assert np.array_equal(x.numpy(), wanted)
    assert np.array_equal(y.numpy(), plan.indices("val"))


def test_other_data_are_refused(plan: SplitPlan) -> None:
    for other in (DIGITS[:-1], DIGITS[:, :-1], DIGITS.astype(float)):
        with pytest.raises(DataError, match=r"The plan is about 800 records of shape \(8, 8\) and type uint8, but"):
            plan.select(other, "train")
        with pytest.raises(DataError, match="not those that the plan was made with"):
            plan.check_data(other)
    with pytest.raises(DataError, match="not those that the plan was made with"):
        plan.check_data(DIGITS[::-1])
    with pytest.raises(InvalidValueError, match=r"no role 'test'\. It has: train"):
        SplitPlan.make(DIGITS, train=3).select(DIGITS, "test")
    assert repr(plan).startswith("SplitPlan(train=120, val=30")
    plan.indices("train")[:] = 0  # a copy
    assert len(np.unique(plan.indices("train"))) == 120


# ---- certificates ----------------------------------------------------------------------------------------------------


def test_certificates_name_their_plan(plan: SplitPlan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    samples = (plan.select(DIGITS, "reference"), plan.select(DIGITS, "estimation"))
    found = certificate(*samples, splits=tmp_path / "plan.json")
    assert found.settings["splits"] == plan.digest
    without = certificate(*samples)
    assert found.designs == without.designs
    assert "splits" not in without.settings
    shuffled = DIGITS[plan.indices("estimation")[::-1]]
    assert certificate(samples[0], shuffled, splits=plan).settings["splits"] == plan.digest
    plan.check_made(found)
    plan.check_made(without)


def test_certificates_of_other_records_are_refused(plan: SplitPlan) -> None:
    reference, estimation = (DIGITS[plan.indices(role)] for role in ("reference", "estimation"))  # type: ignore[arg-type]
    others = DIGITS[plan.indices("train")]
    swapped = np.concatenate([estimation[:-1], others[:1]])
    with pytest.raises(
        DataError, match="estimation sample is not the plan's D_est: it has as many records, but others"
    ):
        certificate(reference, swapped, splits=plan)
    with pytest.raises(DataError, match="reference sample is not the plan's D_perp"):
        certificate(np.concatenate([others, others[:30]]), estimation, splits=plan)
    with pytest.raises(
        DataError, match=r"estimation sample has 349 records, but the plan's D_est has 350.*plan\.select"
    ):
        certificate(reference, estimation[:-1], splits=plan)
    with pytest.raises(DataError, match="reference sample is not the plan's"):
        certificate(reference.astype(float), estimation.astype(float), splits=plan)
    with pytest.raises(InvalidValueError, match="no role 'estimation'"):
        certificate(reference, estimation, splits=SplitPlan.make(DIGITS, reference=150))
    other = certificate(reference, swapped)
    with pytest.raises(DataError, match="certificate's estimation sample is not the plan's D_est"):
        plan.check_made(other)


def test_a_plan_that_overlaps_is_refused_before_anything_is_read() -> None:
    overlapping = SplitPlan.of(DIGITS, {"reference": range(200), "estimation": range(150, 700)})
    with pytest.raises(OverlapError, match=r"D_perp and D_est share 50 record\(s\): 150, 151, 152, … \(indices"):
        certificate(DIGITS[:200], DIGITS[150:700], splits=overlapping, allow_repeats=True)
    training = SplitPlan.of(DIGITS, {"reference": range(200), "estimation": range(200, 800), "train": range(400)})
    assert certificate(DIGITS[:200], DIGITS[200:], splits=training).settings["splits"] == training.digest


def test_repeats_at_other_indices_may_be_allowed() -> None:
    records = np.concatenate([DIGITS, DIGITS[:10]])
    repeated = SplitPlan.of(records, {"reference": range(200), "estimation": range(200, 810)})
    with pytest.raises(OverlapError, match="0 = 800"):
        certificate(records[:200], records[200:], splits=repeated)
    assert certificate(records[:200], records[200:], splits=repeated, allow_repeats=True).designs


def test_reference_records_from_elsewhere_are_not_the_plans() -> None:
    found = SplitPlan.make(DIGITS, estimation=600)
    public = np.roll(DIGITS[:150], 1, axis=2)
    options: dict[str, Any] = {"normaliser": 1300.0, "splits": found}
    estimation = found.select(DIGITS, "estimation")
    made = certificate(public, estimation, reference_from="elsewhere", **options)
    found.check_made(made)
    none = certificate(None, estimation, designs="block", pairs=[(4, 1.6)], **options)
    found.check_made(none)
    with pytest.raises(InvalidValueError, match="no role 'reference'"):
        certificate(public, estimation, **options)


# ---- training --------------------------------------------------------------------------------------------------------


def test_training_sets(plan: SplitPlan) -> None:
    scaled = TensorDataset(torch.from_numpy(DIGITS / 16), torch.arange(800))
    plan.check_training(Subset(scaled, plan.indices("train").tolist()))
    plan.check_training(Subset(scaled, plan.indices("train")[::-1].tolist()))
    plan.check_training(TensorDataset(torch.zeros(120, 3)))  # as many; what they hold is not compared
    with pytest.raises(DataError, match="other records than the plan's D_train"):
        plan.check_training(Subset(scaled, range(120)))
    with pytest.raises(DataError, match="training loader's data set has 800 records, but the plan's D_train has 120"):
        plan.check_training(scaled)
    with pytest.raises(InvalidValueError, match="no role 'train'"):
        SplitPlan.make(DIGITS, val=3).check_training(scaled)
