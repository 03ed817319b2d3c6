"""Which records serve for what: a plan of disjoint roles (paper, Appendix F), made once, saved, and checked against."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.utils.data import Subset

from opacus_reconbound import _atomic, _validate
from opacus_reconbound.certificates.certificate import SourceCertificate
from opacus_reconbound.certificates.devices import rows_at_once
from opacus_reconbound.certificates.records import Records, RecordSource, as_source, select
from opacus_reconbound.certificates.split import DIGEST_BYTES, SampleSummary, record_digests, split_indices, summarise
from opacus_reconbound.errors import DataError, InvalidValueError, OverlapError

__all__ = ["Overlap", "Role", "SplitPlan"]

Role = Literal["train", "val", "test", "reference", "estimation", "targets", "shadow"]

_SYMBOLS: dict[str, str] = {
    "train": "D_train",
    "val": "D_val",
    "test": "D_test",
    "reference": "D_perp",
    "estimation": "D_est",
    "targets": "D_targets",
    "shadow": "D_shadow",
}
_TRAINING = ("train", "val", "test")
_CERTIFICATE = (("reference", "estimation"),)
_ATTACK = (("targets", "reference"), ("targets", "shadow"))
_SCHEMA_VERSION = 1
_FORMAT = "opacus_reconbound.splits"
_CHUNK = 1024  # records at a time, at most
_REMEDY = "Make it again with SplitPlan.make."

Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class Overlap:
    """Equal records in two roles.

    Attributes:
        first: a role.
        second: another.
        pairs: (k, 2), one row for each record of ``second`` that is also in ``first``: its least index there, and its
            own. The two are the same where one record has both roles, and differ where the data repeat it.
    """

    first: str
    second: str
    pairs: Indices

    def __len__(self) -> int:
        return len(self.pairs)

    def __str__(self) -> str:
        shown = ", ".join(f"{i}" if i == j else f"{i} = {j}" for i, j in self.pairs[:3].tolist())
        more = ", …" if len(self) > 3 else ""
        return f"{_SYMBOLS[self.first]} and {_SYMBOLS[self.second]} share {len(self)} record(s): {shown}{more}"


class _File(BaseModel):
    """What is saved; lists are ascending indices into the data."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1]
    n: int = Field(ge=1)
    record_shape: list[int]
    dtype: str
    fingerprint: str
    seed: int | None
    roles: dict[Role, list[int]]
    repeats: list[list[int]]
    samples: dict[Role, SampleSummary]


class SplitPlan:
    """Roles of the records of one data set, by index, with what is needed to tell whether records are those.

    Make one with ``make`` (random), ``of`` (your own index sets) or ``load``. What must be disjoint is refused where it
    matters, by content as well as by index:

    - a certificate: D_perp and D_est. Either may overlap the training records;
    - an attack: the targets and D_perp, the targets and the shadow records.

    Everything else that overlaps is listed by ``overlaps``. The file holds indices and hashes of samples, no records;
    it is as sensitive as a certificate.

    Attributes:
        n: number of records of the data.
        record_shape: of one record.
        dtype: of the entries.
        fingerprint: SHA-256 over the digests of all records, in order.
        seed: of the split; None for index sets of one's own.
        samples: number and fingerprint of each role's records, as certificates remember them.
        repeats: groups of indices of equal records, where they have a role.

    Example:
        >>> records = np.arange(600).reshape(200, 3)
        >>> plan = SplitPlan.make(records, reference=40, estimation=150, targets=10)
        >>> len(plan.select(records, "estimation")), len(plan.overlaps())
        (150, 0)
    """

    def __init__(self, content: Mapping[str, Any], roles: Mapping[str, Indices]) -> None:
        """From what ``_File`` validates; ``make``, ``of`` and ``load`` are the ways in."""
        self._content, self._roles = dict(content), dict(roles)
        self.n: int = content["n"]
        self.record_shape: tuple[int, ...] = tuple(content["record_shape"])
        self.dtype = np.dtype(content["dtype"])
        self.fingerprint: str = content["fingerprint"]
        self.seed: int | None = content["seed"]
        self.repeats = tuple(tuple(group) for group in content["repeats"])
        self.samples = {role: SampleSummary(**summary) for role, summary in content["samples"].items()}
        self.digest = _digest(self._content)

    # ---- making ------------------------------------------------------------------------------------------------------

    @classmethod
    def make(
        cls,
        data: Records,
        *,
        train: int = 0,
        val: int = 0,
        test: int = 0,
        reference: int = 0,
        estimation: int = 0,
        targets: int = 0,
        shadow: int = 0,
        independent: bool = False,
        seed: int = 0,
    ) -> SplitPlan:
        """Draw disjoint index sets at random.

        Args:
            data: all records, in any form that ``certify`` takes; read once, a chunk at a time, 16 bytes a record kept.
            train: how many records are trained on.
            val: how many choose hyperparameters.
            test: how many report the final utility.
            reference: D_perp, which fixes everything that a certificate chooses.
            estimation: D_est, which a certificate measures.
            targets: records that an attack is measured on.
            shadow: records that an attack fits or draws from.
            independent: draw the training split (train, val, test) independently of the others, as the paper does: then
                a record may be in both, such as in D_train and D_est.
            seed: of the split.

        Raises:
            InvalidValueError: there are fewer records.
            DataError: the data cannot be read.
        """
        sizes = {
            "train": train,
            "val": val,
            "test": test,
            "reference": reference,
            "estimation": estimation,
            "targets": targets,
            "shadow": shadow,
        }
        sizes = {role: _validate.integer(role, size) for role, size in sizes.items()}
        sizes = {role: size for role, size in sizes.items() if size}
        seed = _validate.integer("seed", seed, maximum=2**63 - 1)
        source = as_source("data", data)
        training = {role: size for role, size in sizes.items() if role in _TRAINING} if independent else {}
        others = {role: size for role, size in sizes.items() if role not in training}
        roles: dict[str, Indices] = {}
        for part, seeds in ((others, [seed]), (training, [seed, 1])):
            roles |= zip(part, split_indices(len(source), list(part.values()), seed=seeds), strict=True)
        return cls._of(source, {role: roles[role] for role in sizes}, seed)

    @classmethod
    def of(cls, data: Records, roles: Mapping[Role, ArrayLike]) -> SplitPlan:
        """A plan of your own index sets, which may overlap where Appendix F lets them.

        Args:
            data: all records, in any form that ``certify`` takes; read once.
            roles: indices into ``data`` by role.

        Raises:
            InvalidValueError: an unknown role, or indices that are repeated, not whole or out of range.
            DataError: the data cannot be read.
        """
        source = as_source("data", data)
        return cls._of(source, {role: _indices(role, given, len(source)) for role, given in roles.items()}, None)

    @classmethod
    def _of(cls, source: RecordSource, roles: Mapping[str, Indices], seed: int | None) -> SplitPlan:
        if not roles or not any(map(len, roles.values())):
            raise InvalidValueError("The plan gives no record a role. Say how many, as in estimation=1000.")
        digests = _digests(source)
        used = np.unique(np.concatenate(list(roles.values())))
        content = {
            "schema_version": _SCHEMA_VERSION,
            "n": len(source),
            "record_shape": list(source.record_shape),
            "dtype": source.dtype.str,
            "fingerprint": hashlib.sha256(digests.tobytes()).hexdigest(),
            "seed": seed,
            "roles": {role: indices.tolist() for role, indices in roles.items()},
            "repeats": _repeats(digests, used),
            "samples": {role: vars(_summary(digests[indices])) for role, indices in roles.items()},
        }
        return cls(content, roles)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a reader sees the whole file or none.

        Raises:
            DataError: it cannot be written.
        """
        content = {"format": _FORMAT, **self._content, "digest": self.digest}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
        try:
            _atomic.write_text(Path(path), f"{{\n{lines}\n}}\n")
        except OSError as error:
            raise DataError(f"The plan could not be written to {path}: {error}. Name another file.") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SplitPlan:
        """Read a plan, and check that it is whole and unaltered.

        Raises:
            DataError: the file is missing, damaged, altered, too new or something else.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise DataError(f"There is no plan at {path}.") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}.") from error
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError too
            raise DataError(f"{path} is truncated, or not a plan of splits. {_REMEDY}") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise DataError(f"{path} is not a plan of splits (no format {_FORMAT!r}). Name a file of SplitPlan.save.")
        version = content.get("schema_version")
        if isinstance(version, int) and version > _SCHEMA_VERSION:
            raise DataError(
                f"{path} has schema version {version}; this library reads up to {_SCHEMA_VERSION}. Update "
                "opacus_reconbound."
            )
        if content.pop("digest", None) != _digest(content):
            raise DataError(f"{path} was altered after it was made (its digest does not fit its content). {_REMEDY}")
        try:
            _File.model_validate_json(json.dumps(content))
            roles = {role: _indices(role, given, content["n"]) for role, given in content["roles"].items()}
            ordered = all(given == roles[role].tolist() for role, given in content["roles"].items())
            _indices("repeats", list(chain.from_iterable(content["repeats"])), content["n"])
            counted = {role: summary["n"] for role, summary in content["samples"].items()}
            if not ordered or counted != {role: len(given) for role, given in roles.items()}:
                raise InvalidValueError("roles and samples disagree, or indices are not ascending")
            return cls(content, roles)
        except (ValidationError, InvalidValueError, TypeError) as error:
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False)[0]
                reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            else:
                reason = str(error).rstrip(".")
            raise DataError(f"{path} is not a valid plan: {reason}. {_REMEDY}") from error

    # ---- what it says ------------------------------------------------------------------------------------------------

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that it has."""
        return tuple(self._roles)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, SplitPlan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{role}={len(indices)}" for role, indices in self._roles.items())
        return f"SplitPlan({sizes}, n={self.n}, digest={self.digest[:12]}…)"

    def indices(self, role: Role) -> Indices:
        """The role's records, as ascending indices into the data.

        Raises:
            InvalidValueError: the plan does not have that role.
        """
        if role not in self._roles:
            raise InvalidValueError(f"The plan has no role {role!r}. It has: {', '.join(self._roles)}.")
        return self._roles[role].copy()

    def select(self, data: Records, role: Role) -> RecordSource | Subset[Any]:
        """The role's records out of the data, read when they are used; ``certify`` takes the result.

        Args:
            data: as it was when the plan was made; only the number of records, shape and type are compared here.
            role: which.

        Returns:
            A ``torch.utils.data.Subset`` where the data are a data set, a data module or a list, labels and all, so
            that a loader can be made of it; else a source of records.
        """
        source = as_source("data", data)
        found = (len(source), source.record_shape, source.dtype.str)
        if found != (self.n, self.record_shape, self.dtype.str):
            raise DataError(
                f"The plan is about {self.n} records of shape {self.record_shape} and type {self.dtype}, but the data "
                f"are {found[0]} of shape {found[1]} and type {source.dtype}. Give the data that it was made with."
            )
        return select("data", data, self.indices(role))

    def overlaps(self) -> tuple[Overlap, ...]:
        """All pairs of roles that share records, by index or by content."""
        names = list(self._roles)
        found = (self.overlap(a, b) for k, a in enumerate(names) for b in names[k + 1 :])
        return tuple(overlap for overlap in found if len(overlap))

    def overlap(self, first: str, second: str) -> Overlap:
        """The records that two roles share; none where the plan lacks one of them."""
        ours, theirs = (self._roles.get(role, np.empty(0, dtype=np.intp)) for role in (first, second))
        same = np.arange(self.n)
        for group in self.repeats:
            same[list(group)] = group[0]
        keys, positions = np.unique(same[ours], return_index=True)  # of the least index among equal ones
        shared = theirs[np.isin(same[theirs], keys)]
        partners = ours[positions[np.searchsorted(keys, same[shared])]] if len(shared) else shared
        own = np.isin(shared, ours)
        return Overlap(first=first, second=second, pairs=np.stack([np.where(own, shared, partners), shared], axis=1))

    def explain(self) -> str:
        """Sizes, and what the roles share, in a few lines."""
        sizes = ", ".join(f"{_SYMBOLS[role]} {len(indices)}" for role, indices in self._roles.items())
        seed = "index sets as given" if self.seed is None else f"seed {self.seed}"
        lines = [f"{self.n} records of shape {self.record_shape}, {self.dtype}; {seed}.", f"{sizes}."]
        for overlap in self.overlaps():
            pair = {overlap.first, overlap.second}
            refused = "a certificate" if pair in map(set, _CERTIFICATE) else "an attack"
            says = f"refused in {refused}" if pair in map(set, _CERTIFICATE + _ATTACK) else "allowed"
            lines.append(f"{overlap} ({says}).")
        if len(lines) == 2:
            lines.append("No two roles share a record.")
        return "\n".join(lines)

    # ---- what it is checked against ----------------------------------------------------------------------------------

    def check_certificate(self, *, allow_repeats: bool = False) -> None:
        """Refuse a plan whose D_perp and D_est share a record.

        Args:
            allow_repeats: accept equal records at different indices, as independent draws of a source that repeats
                values; one record in both samples is refused all the same.

        Raises:
            OverlapError: they share records.
        """
        self._refuse(_CERTIFICATE, "A certificate", by_index_only=allow_repeats)

    def check_attack(self) -> None:
        """Refuse a plan whose targets lie in D_perp or among the shadow records.

        Raises:
            OverlapError: they do.
            InvalidValueError: it has no targets.
        """
        self.indices("targets")
        self._refuse(_ATTACK, "An attack", by_index_only=False)

    def check_size(self, role: Role, n: int, what: str = "") -> None:
        """Refuse a sample of another size than this role's.

        Raises:
            DataError: it has more or fewer records.
            InvalidValueError: the plan does not have that role.
        """
        wanted, what = len(self.indices(role)), what or f"{role} sample"
        if n != wanted:
            raise DataError(
                f"The {what} has {n} records, but the plan's {_SYMBOLS[role]} has {wanted}. Take the records from the "
                f"plan: plan.select(data, {role!r})."
            )

    def check_sample(self, role: Role, found: SampleSummary, what: str = "") -> None:
        """Refuse a sample that is not this role's records, in whatever order.

        Raises:
            DataError: it is another.
        """
        what = what or f"{role} sample"
        self.check_size(role, found.n, what)
        if found != self.samples[role]:
            raise DataError(
                f"The {what} is not the plan's {_SYMBOLS[role]}: it has as many records, but others. Take the records "
                f"from the plan, plan.select(data, {role!r}), unchanged and of the same type."
            )

    def check_data(self, data: Records) -> None:
        """Read all records, and refuse data that are not those of the plan, in their order.

        Raises:
            DataError: they are others.
        """
        source = as_source("data", data)
        if hashlib.sha256(_digests(source).tobytes()).hexdigest() != self.fingerprint:
            raise DataError(
                "The data are not those that the plan was made with, or in another order or type; its indices would "
                f"mean other records. {_REMEDY}"
            )

    def check_made(self, certificate: SourceCertificate) -> None:
        """Refuse a certificate that was not made from the plan's D_perp and D_est.

        Raises:
            DataError: it was made from other records.
        """
        if certificate.reference.n and certificate.settings.get("reference_from") != "elsewhere":
            self.check_sample("reference", certificate.reference, "certificate's reference sample")
        self.check_sample("estimation", certificate.estimation, "certificate's estimation sample")

    def check_training(self, dataset: Any) -> None:
        """Refuse a training data set that is not the plan's D_train, by its size and, for a ``Subset``, its indices.

        What it holds is not compared, for it may be transformed for training; ``check_sample`` compares records.

        Raises:
            DataError: it is another.
        """
        wanted = self.indices("train")
        self.check_size("train", len(dataset), "training loader's data set")
        whole = dataset.dataset if isinstance(dataset, Subset) else None
        if (
            whole is not None
            and len(cast(Any, whole)) == self.n
            and not np.array_equal(np.sort(np.asarray(dataset.indices)), wanted)
        ):
            raise DataError(
                "The training loader's data set has other records than the plan's D_train. Take them from the plan: "
                "plan.select(data, 'train')."
            )

    def _refuse(self, pairs: Sequence[tuple[str, str]], what: str, *, by_index_only: bool) -> None:
        for first, second in pairs:
            found = self.overlap(first, second)
            if by_index_only:
                same = found.pairs[found.pairs[:, 0] == found.pairs[:, 1]]
                found = Overlap(first=first, second=second, pairs=same)
            if len(found):
                raise OverlapError(
                    f"{found} (indices into the data). {what} needs them disjoint (paper, Appendix F): split without "
                    "repetition, or remove duplicates before splitting."
                )


def _indices(role: str, given: ArrayLike, n: int) -> Indices:
    """Ascending, checked."""
    if role not in (*_SYMBOLS, "repeats"):
        raise InvalidValueError(f"There is no role {role!r}. Roles are: {', '.join(_SYMBOLS)}.")
    found = np.asarray(given)
    if found.size == 0:
        return np.empty(0, dtype=np.intp)
    if found.ndim != 1 or found.dtype.kind not in "ui":
        raise InvalidValueError(
            f"Expected {role} to be a sequence of indices. Found shape {found.shape} of type {found.dtype}."
        )
    found = np.sort(found).astype(np.intp)
    if found[0] < 0 or found[-1] >= n:
        wrong = found[0] if found[0] < 0 else found[-1]
        raise InvalidValueError(f"{role} holds the index {wrong}, but there are {n} records, 0 to {n - 1}.")
    twice = found[1:][np.diff(found) == 0]
    if len(twice):
        raise InvalidValueError(f"{role} holds the index {twice[0]} more than once; a record counts once.")
    return found


def _digests(source: RecordSource) -> NDArray[np.uint8]:
    """(n, 16), read a chunk at a time."""
    digests = np.empty((len(source), DIGEST_BYTES), dtype=np.uint8)
    start = 0
    for chunk in source.chunks(rows_at_once(math.prod(source.record_shape) // 4, _CHUNK)):
        own = np.frombuffer(b"".join(record_digests(chunk)), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        digests[start : start + len(own)] = own
        start += len(own)
    if start != len(source):
        raise DataError(f"The data source says that it has {len(source)} records, but it gave {start}.")
    return digests


def _repeats(digests: NDArray[np.uint8], used: Indices) -> list[list[int]]:
    """Groups of two or more of these indices whose digests are equal, each ascending."""
    words = np.ascontiguousarray(digests[used]).view(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    new = np.concatenate([[True], (words[order][1:] != words[order][:-1]).any(axis=1)])
    starts = np.flatnonzero(new)
    sizes = np.diff(np.append(starts, len(order)))
    groups = [
        sorted(used[order[start : start + size]].tolist())
        for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True)
    ]
    return sorted(groups)


def _summary(digests: NDArray[np.uint8]) -> SampleSummary:
    return summarise([row.tobytes() for row in digests])


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
