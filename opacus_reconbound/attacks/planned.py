"""The prior-aware attack on a plan's targets, against a certificate's bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from opacus_reconbound.attacks.prior_aware import PriorAwareAttack, Threat, attack_prior_aware
from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
from opacus_reconbound.certificates.devices import host_by_default, rows_at_once
from opacus_reconbound.certificates.plan import Role, SplitPlan
from opacus_reconbound.certificates.records import Records, as_source
from opacus_reconbound.errors import OverlapError
from opacus_reconbound.representations import Representation

__all__ = ["PlannedAttack", "attack_plan", "role_vectors"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedAttack:
    """An attack and the bound that it runs into.

    Attributes:
        attack: what was achieved on the plan's targets.
        bound: what no attack can beat on average over the source, at the same leakage.
    """

    attack: PriorAwareAttack
    bound: ReconstructionBound

    @property
    def excess(self) -> float:
        """Mean squared error minus the bound on it, in standard errors of the former.

        The targets are a sample, so the mean may lie below the bound by chance: below −3 about once in a thousand
        where attack and bound are equal, and less often where the bound is loose.
        """
        errors = self.attack.mean
        difference = errors.mse - self.bound.mse
        if errors.mse_standard_error == 0:
            return math.copysign(math.inf, difference)
        return difference / errors.mse_standard_error


def role_vectors(
    data: Records, plan: SplitPlan, role: Role, representation: Representation
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The role's raw records (n, d) and their vectors (n, m), in the plan's order.

    Raises:
        DataError: the records are not those of the plan, or not what the representation is declared for.
    """
    source = as_source(role, plan.select(data, role))
    raw, vectors = [], []
    with torch.no_grad(), host_by_default():
        for chunk in source.chunks(rows_at_once(int(np.prod(source.record_shape)))):
            batch = torch.from_numpy(np.array(chunk))
            representation.check(batch)
            raw.append(np.asarray(chunk, dtype=np.float64).reshape(len(chunk), -1))
            vectors.append(representation(batch).double().numpy())
    return np.concatenate(raw), np.concatenate(vectors)


def attack_plan(
    data: Records,
    plan: SplitPlan,
    certificate: SourceCertificate,
    representation: Representation,
    *,
    leakage_bits: float,
    threat: Threat,
    resamples: int = 1000,
    seed: int = 0,
) -> PlannedAttack:
    """Attack the plan's targets with its shadow records as candidates, and read the certificate at the same leakage.

    The centre of the model's inputs is the mean of the shadow records, so none of them may be trained on. Where the
    plan has a role ``reference``, it must be the certificate's, so that no target lies in it.

    Args:
        data: all records, those that the plan was made with.
        plan: with roles ``targets`` and ``shadow``.
        certificate: of the representation.
        representation: Ψ, fitted where it needs it.
        leakage_bits: γ in (0, inf).
        threat: q and T.
        resamples: of the bootstrap.
        seed: of the releases.

    Raises:
        OverlapError: targets among the shadow or reference records, or shadow records in D_train.
        DataError: data or reference sample are not those of the plan.
        CertificateError: the certificate is about another representation.
    """
    plan.check_attack()
    shared = plan.overlap("train", "shadow")
    if len(shared):
        raise OverlapError(
            f"{shared}. The model's inputs are centred by the shadow records' mean, which must not depend on records "
            "that are trained on. Plan shadow records outside D_train."
        )
    plan.check_data(data)
    certificate.check_representation(representation)
    if "reference" in plan.roles:
        plan.check_sample("reference", certificate.reference)
    raw, vectors = role_vectors(data, plan, "targets", representation)
    raw_shadow, shadow = role_vectors(data, plan, "shadow", representation)
    attack = attack_prior_aware(
        raw,
        raw_shadow,
        leakage_bits=leakage_bits,
        threat=threat,
        variance=certificate.trace.reference,
        target_vectors=vectors,
        candidate_vectors=shadow,
        resamples=resamples,
        seed=seed,
    )
    return PlannedAttack(attack=attack, bound=certificate.bound(attack.leakage_bits))
