"""No attack's mean error lies below the bound: every design, both threats, codebooks; and Opacus releases just that.

The allowance: targets are a sample, so their mean error may lie below its expectation; three of its standard errors
below, with a probability of about 0.001. The bounds themselves hold with 95 % confidence over D_perp and D_est.
"""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound import Pixels, SourceCertificate, SplitPlan, certify
from opacus_reconbound.attacks import (
    FULL_BATCH,
    SUBSAMPLED,
    Threat,
    attack_codebook,
    attack_plan,
    bootstrap_errors,
    directions,
    role_vectors,
)
from opacus_reconbound.attacks.planned import PlannedAttack
from opacus_reconbound.certificates import auto, multi
from opacus_reconbound.errors import CertificateError, DataError, OverlapError
from opacus_reconbound.representations import Downsample, Representation

datasets = pytest.importorskip("sklearn.datasets")

ALLOWANCE = 3.0  # standard errors of the mean over the targets
BITS = (0.72, 2.89, 8.01, 72.13)  # σ = 1, 1/2, 0.3, 0.1 in one full-batch step
IMAGES = datasets.load_digits().images
ORDER = np.random.default_rng(0).permutation(len(IMAGES))
PSI = Pixels(value_range=(0, 16))


def roles(**changes: Any) -> dict[Any, Any]:
    estimation = ORDER[300:1500]  # the shadow sample may be D_est (paper, Appendix F.4)
    return {"reference": ORDER[:300], "estimation": estimation, "shadow": estimation, "targets": ORDER[1500:]} | changes


@pytest.fixture(scope="module")
def plan() -> SplitPlan:
    return SplitPlan.of(IMAGES, roles())


def certified(plan: SplitPlan, designs: Any, representation: Representation = PSI) -> SourceCertificate:
    return certify(
        plan.select(IMAGES, "reference"),
        plan.select(IMAGES, "estimation"),
        representation=representation,
        designs=designs,
        splits=plan,
        progress=False,
    )


@pytest.fixture(scope="module")
def certificates(plan: SplitPlan) -> dict[str, SourceCertificate]:
    found = {"replica": certified(plan, "replica"), "block": certified(plan, "block")}
    with pytest.MonkeyPatch.context() as patch:  # many replicas with few trials: looser, and fast
        patch.setattr(auto, "MULTI_GRID", ((0.6, 4), (0.4, 8)))
        fit = functools.partial(multi.fit_multi_potentials, centres=20, most=30_000)
        patch.setattr(auto, "fit_multi_potentials", fit)
        patch.setattr(auto, "multi_estimates", functools.partial(multi.multi_estimates, turns=1, most=200_000))
        patch.setattr(multi, "_REFINE_NUMBER", 20_000)
        patch.setattr(multi, "_MOST_TRIALS", 30_000)
        found["multi"] = certified(plan, "multi")
    return found


@pytest.mark.parametrize("threat", [FULL_BATCH, SUBSAMPLED], ids=["full batch", "subsampled"])
def test_the_attack_stays_above_the_bound(
    threat: Threat, plan: SplitPlan, certificates: dict[str, SourceCertificate]
) -> None:
    for bits in BITS:
        run = attack_plan(IMAGES, plan, certificates["replica"], PSI, leakage_bits=bits, threat=threat, seed=1)
        for certificate in certificates.values():
            bound = certificate.bound(bits)
            assert bound.mse <= run.attack.mean.mse + ALLOWANCE * run.attack.mean.mse_standard_error
            assert PlannedAttack(attack=run.attack, bound=bound).excess >= -ALLOWANCE
            assert bound.mse <= run.attack.best.mse + ALLOWANCE * run.attack.best.mse_standard_error
            assert bits > 1 or bound.rho > 0.5  # else there would be nothing to test


def test_codebooks_stay_above_the_bound(plan: SplitPlan, certificates: dict[str, SourceCertificate]) -> None:
    targets, sample = (role_vectors(IMAGES, plan, role, PSI)[1] for role in ("targets", "shadow"))
    variance = certificates["replica"].trace.reference
    for bits in (0.1, 0.5, 1, 2, 4):
        errors = attack_codebook(targets, sample, rate_bits=bits, variance=variance).errors
        for certificate in certificates.values():
            assert certificate.bound(bits).mse <= errors.mse + ALLOWANCE * errors.mse_standard_error


def test_an_undercharged_release_is_caught(plan: SplitPlan, certificates: dict[str, SourceCertificate]) -> None:
    """The comparison can fail: a release of 72 bits that is charged 0.72 lies far below the bound."""
    run = attack_plan(IMAGES, plan, certificates["replica"], PSI, leakage_bits=72.13, threat=FULL_BATCH, seed=1)
    for certificate in certificates.values():
        undercharged = PlannedAttack(attack=run.attack, bound=certificate.bound(0.72))
        assert undercharged.excess < -10


def test_an_attack_that_has_seen_its_targets_is_refused(certificates: dict[str, SourceCertificate]) -> None:
    """And it would have been far better: the bound is not about it."""
    cheating = SplitPlan.of(IMAGES, roles(shadow=ORDER[300:]))
    with pytest.raises(OverlapError, match="D_targets and D_shadow share 297 record"):
        attack_plan(IMAGES, cheating, certificates["replica"], PSI, leakage_bits=8.01, threat=FULL_BATCH)


def test_a_centre_that_depends_on_the_training_records_is_refused(certificates: dict[str, SourceCertificate]) -> None:
    trained = SplitPlan.of(IMAGES, roles(train=ORDER[1400:]))
    trained.check_attack()  # the candidates alone might be
    with pytest.raises(OverlapError, match=r"D_train and D_shadow share 100 record.*outside D_train"):
        attack_plan(IMAGES, trained, certificates["replica"], PSI, leakage_bits=1.0, threat=FULL_BATCH)
    apart = SplitPlan.of(IMAGES, roles(train=ORDER[1500:]))
    assert attack_plan(IMAGES, apart, certificates["replica"], PSI, leakage_bits=1.0, threat=FULL_BATCH).excess > 0


def test_what_does_not_belong_together_is_refused(plan: SplitPlan, certificates: dict[str, SourceCertificate]) -> None:
    keep: dict[str, Any] = {"leakage_bits": 1.0, "threat": FULL_BATCH}
    with pytest.raises(CertificateError, match="not about"):
        attack_plan(IMAGES, plan, certificates["replica"], Downsample(4, value_range=(0, 16)), **keep)
    with pytest.raises(DataError, match="not those that the plan was made with"):
        attack_plan(IMAGES[::-1].copy(), plan, certificates["replica"], PSI, **keep)
    other = SplitPlan.of(IMAGES, roles(reference=ORDER[:299]))
    with pytest.raises(DataError, match="reference sample has 300 records, but the plan's D_perp has 299"):
        attack_plan(IMAGES, other, certificates["replica"], PSI, **keep)


def test_another_representation(plan: SplitPlan) -> None:
    """The release is about pixels, the error about what is kept of them."""
    coarse = Downsample(4, value_range=(0, 16))
    certificate = certified(plan, "replica", coarse)
    found = attack_plan(IMAGES, plan, certificate, coarse, leakage_bits=2.89, threat=FULL_BATCH)
    assert found.bound.representation == "downsample"
    assert found.excess >= -ALLOWANCE
    assert 0.5 < found.attack.mean.rho < 1
    vectors = role_vectors(IMAGES, plan, "targets", coarse)[1]
    assert vectors.shape == (len(ORDER) - 1500, certificate.representation.dimension)


def test_the_excess_is_in_standard_errors(plan: SplitPlan, certificates: dict[str, SourceCertificate]) -> None:
    found = attack_plan(IMAGES, plan, certificates["replica"], PSI, leakage_bits=0.72, threat=FULL_BATCH, seed=2)
    errors = bootstrap_errors(found.attack.mean.squared, certificates["replica"].trace.reference, seed=2)
    assert errors.mse_standard_error == found.attack.mean.mse_standard_error
    assert found.excess == pytest.approx((errors.mse - found.bound.mse) / errors.mse_standard_error)
    equal = replace(found.attack, mean=bootstrap_errors([1.0, 1.0], 1.0))
    assert PlannedAttack(attack=equal, bound=found.bound).excess == -math.inf


def test_opacus_releases_these_residuals() -> None:
    """One step of the linear model under Opacus, without noise and with: the others subtracted, u and σ w are left."""
    records, centre = IMAGES[:40].reshape(40, 64), IMAGES[40:400].reshape(-1, 64).mean(axis=0)
    u = directions(records, centre)
    left = []
    for sigma in (0.0, 0.5):
        model = torch.nn.Linear(64, 1, bias=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, loader = PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
                data_loader=DataLoader(TensorDataset(torch.tensor(records - centre).float()), batch_size=40),
                noise_multiplier=sigma,
                max_grad_norm=1.0,
                poisson_sampling=False,  # the full batch: q = 1
            )
        before = model.weight.detach().clone()
        for (batch,) in loader:
            optimizer.zero_grad()
            (-private(batch)).mean().backward()
            optimizer.step()
        update = 40 * (model.weight.detach() - before).double().numpy().ravel()
        left.append(update - u[1:].sum(axis=0))  # the adversary of record 0 knows all others
    np.testing.assert_allclose(left[0], u[0], atol=1e-4)
    noise = left[1] - u[0]
    assert noise.std() == pytest.approx(0.5, rel=4 / np.sqrt(2 * 64))
