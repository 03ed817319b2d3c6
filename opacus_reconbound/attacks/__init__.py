"""Attacks that run into the bound: the prior-aware attack on DP-SGD, and releases by codebooks."""

from opacus_reconbound.attacks.codebook import Codebook as Codebook
from opacus_reconbound.attacks.codebook import CodebookAttack as CodebookAttack
from opacus_reconbound.attacks.codebook import attack_codebook as attack_codebook
from opacus_reconbound.attacks.codebook import fit_codebook as fit_codebook
from opacus_reconbound.attacks.codebook import flip_probability as flip_probability
from opacus_reconbound.attacks.planned import PlannedAttack as PlannedAttack
from opacus_reconbound.attacks.planned import attack_plan as attack_plan
from opacus_reconbound.attacks.planned import role_vectors as role_vectors
from opacus_reconbound.attacks.prior_aware import FULL_BATCH as FULL_BATCH
from opacus_reconbound.attacks.prior_aware import SUBSAMPLED as SUBSAMPLED
from opacus_reconbound.attacks.prior_aware import PriorAwareAttack as PriorAwareAttack
from opacus_reconbound.attacks.prior_aware import Threat as Threat
from opacus_reconbound.attacks.prior_aware import attack_prior_aware as attack_prior_aware
from opacus_reconbound.attacks.prior_aware import directions as directions
from opacus_reconbound.attacks.prior_aware import log_likelihoods as log_likelihoods
from opacus_reconbound.attacks.prior_aware import observe as observe
from opacus_reconbound.attacks.results import AttackErrors as AttackErrors
from opacus_reconbound.attacks.results import bootstrap_errors as bootstrap_errors

__all__ = [
    "FULL_BATCH",
    "SUBSAMPLED",
    "AttackErrors",
    "Codebook",
    "CodebookAttack",
    "PlannedAttack",
    "PriorAwareAttack",
    "Threat",
    "attack_codebook",
    "attack_plan",
    "bootstrap_errors",
    "directions",
    "fit_codebook",
    "flip_probability",
    "log_likelihoods",
    "observe",
    "attack_prior_aware",
    "role_vectors",
]
