"""Coverage of whole certificates, by the public call, on sources whose truth is known; judged by binomial limits.

Two truths. The weak one is the distortion-rate function, which the inequality itself leaves some room to. The sharp one
is the value that a design would have given the exact law: only margins stand between it and the certificate, so levels
are chosen where missing margins show, and each test checks that the values without them would not pass.

Gaussian sources have no bounded support and certificates want a range, so they are clipped at eight standard deviations
and more, and records are stored in single precision. Both are maps of the record, z' = c(z): a channel for z is one
for z', with no more information and sqrt(D') <= sqrt(D) + sqrt(E‖z − z'‖²). The last term is here below 1e-8 for the
clipping and 1e-6 for the rounding, which ``ALLOWANCE`` covers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    Array,
    DiscreteSource,
    gaussian_distortion_rate,
    gaussian_intercept,
    log_orderings,
    log_v,
    mixture_entropy,
    most_failures,
    multiplicities,
    scatter,
)
from numpy.typing import NDArray

from opacus_reconbound import Pixels, SourceCertificate, certify
from opacus_reconbound.certificates import auto, multi
from opacus_reconbound.certificates.centres import fit_centres
from opacus_reconbound.certificates.diagnostics import value_at_zero
from opacus_reconbound.certificates.margins import empirical_bernstein, upper_tail
from opacus_reconbound.units import nats_to_bits

ALLOWANCE = 1e-5
ALPHA = 0.1
VARIANCES = np.array([1.0, 0.5, 0.25, 0.1])
RATES = (0.0, 0.2, 0.5, 1.0, 2.0)
PAIRS = [(1, 0.4), (2, 0.8), (4, 1.6)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: threads that wait for one another would take several times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_monte_carlo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two designs with many replicas, with few trials that are fast."""
    monkeypatch.setattr(auto, "MULTI_GRID", ((0.6, 4), (0.4, 8)))
    fit = functools.partial(multi.fit_multi_potentials, centres=20, most=30_000)
    monkeypatch.setattr(auto, "fit_multi_potentials", fit)
    monkeypatch.setattr(auto, "multi_estimates", functools.partial(multi.multi_estimates, turns=1, most=200_000))
    monkeypatch.setattr(multi, "_REFINE_NUMBER", 20_000)
    monkeypatch.setattr(multi, "_MOST_TRIALS", 30_000)


def gaussians(rng: np.random.Generator, n: int, variances: Array) -> NDArray[np.float32]:
    z = rng.normal(size=(n, len(variances))) * np.sqrt(variances)
    reach = 8.0 * math.sqrt(float(variances.max()))
    return z.clip(-reach, reach).astype(np.float32)


def certificate(z: NDArray[Any], n_reference: int, reach: float, **options: Any) -> SourceCertificate:
    return certify(
        z[:n_reference], z[n_reference:], representation=Pixels((-reach, reach)), alpha=ALPHA, progress=False, **options
    )


# ---- Gaussian vectors, reverse water-filling -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("designs", "repeats", "least"), [("replica", 200, 0.25), ("block", 40, 0.2), (["replica", "block"], 40, 0.2)]
)
def test_gaussian_vectors(designs: Any, repeats: int, least: float) -> None:
    rng = np.random.default_rng(7)
    failures, sharp, above, heights = 0, 0, 0, []
    truth = {rate: gaussian_distortion_rate(VARIANCES, rate) for rate in RATES}
    for seed in range(repeats):
        found = certificate(gaussians(rng, 600, VARIANCES), 150, 8.0, designs=designs, pairs=PAIRS, seed=seed)
        scale = found.trace.scale
        failures += any(found.bound(nats_to_bits(rate)).mse > truth[rate] + ALLOWANCE for rate in RATES)
        heights.append(found.bound(0.0).mse / truth[0.0])
        exact = [
            gaussian_intercept(VARIANCES, design.slope * scale, design.replicas) + ALLOWANCE
            for design in found.designs
            if design.kind == "replica"
        ]
        values = [design.intercept * scale for design in found.designs if design.kind == "replica"]
        points = [parts.point * scale for parts in found.diagnostics if parts is not None][: len(exact)]
        sharp += any(value > limit for value, limit in zip(values, exact, strict=True))
        above += any(point > limit for point, limit in zip(points, exact, strict=True))
    assert failures <= most_failures(repeats, ALPHA)
    assert sharp <= most_failures(repeats, ALPHA)
    if designs != "block":
        assert above > most_failures(repeats, ALPHA)  # without margins the test fails
    assert min(heights) > least


@pytest.mark.usefixtures("small_monte_carlo")
def test_gaussian_vectors_and_many_replicas() -> None:
    """With the Monte Carlo in the loop."""
    rng = np.random.default_rng(8)
    repeats, failures, sharp, heights = 24, 0, 0, []
    for seed in range(repeats):
        found = certificate(gaussians(rng, 700, VARIANCES), 150, 8.0, designs="multi", seed=seed)
        assert {design.replicas for design in found.designs if design.kind == "replica"} == {4, 8}
        scale = found.trace.scale
        failures += any(
            found.bound(nats_to_bits(rate)).mse > gaussian_distortion_rate(VARIANCES, rate) + ALLOWANCE
            for rate in RATES
        )
        sharp += any(
            design.intercept * scale > gaussian_intercept(VARIANCES, design.slope * scale, design.replicas) + ALLOWANCE
            for design in found.designs
            if design.kind == "replica"
        )
        heights.append(found.bound(0.0).mse / VARIANCES.sum())
    assert failures <= most_failures(repeats, ALPHA)
    assert sharp <= most_failures(repeats, ALPHA)
    assert np.mean(heights) > 0.2


# ---- discrete sources, exact designs ---------------------------------------------------------------------------------


def against_the_exact_law(found: SourceCertificate, source: DiscreteSource) -> tuple[bool, bool]:
    """Whether some design, and some value without margins, lies above what the exact law would have given."""
    scale, failed, above = found.trace.scale, False, False
    for design, parts in zip(found.designs, found.diagnostics, strict=True):
        if design.kind == "replica":
            exact = source.intercept(design.slope * scale, design.replicas) / scale
        else:
            entropy = mixture_entropy(source.points[:, 0], source.p, math.sqrt(design.dither * scale))
            exact = value_at_zero(replace(design, entropy_bits=nats_to_bits(entropy - 0.5 * math.log(scale))))
        failed |= value_at_zero(design) > exact + ALLOWANCE
        above |= parts is not None and parts.point > exact + ALLOWANCE
    return failed, above


@pytest.mark.parametrize(
    ("seed", "atoms", "designs", "n", "repeats"),
    [(0, 4, "replica", 1200, 60), (1, 6, "block", 1200, 40), (1, 6, "all", 400, 40), (2, 5, "multi", 400, 20)],
)
@pytest.mark.usefixtures("small_monte_carlo")
def test_discrete_sources_on_the_line(seed: int, atoms: int, designs: Any, n: int, repeats: int) -> None:
    source, rng = DiscreteSource.random(seed, atoms=atoms, dimension=1), np.random.default_rng(seed)
    reach = float(np.abs(source.points).max()) + 1.0
    curve = [source.distortion_rate(float(slope), side=100, rounds=100) for slope in np.geomspace(0.05, 2.0, 6)]
    failures, sharp, above, heights = 0, 0, 0, []
    for repeat in range(repeats):
        z = source.points[source.draw(rng, n + 120)].astype(np.float32)
        found = certificate(
            z, 120, reach, designs=designs, pairs=[(1, 0.2), (1, 0.8)], temperatures=(0.56, 0.28, 0.14), seed=repeat,
            allow_repeats=True,
        )  # fmt: skip
        failed, larger = against_the_exact_law(found, source)
        sharp += failed
        above += larger
        failures += any(found.bound(nats_to_bits(rate)).mse > distortion + ALLOWANCE for rate, distortion in curve)
        heights.append(found.bound(0.0).mse)
    assert sharp <= most_failures(repeats, ALPHA)
    assert failures <= most_failures(repeats, ALPHA)
    assert above > most_failures(repeats, ALPHA) or designs == "multi"  # without margins the test fails
    assert np.mean(heights) > 0.08  # and the certificates say something


# ---- f fitted on the estimation sample itself ------------------------------------------------------------------------


def improved(source: DiscreteSource, f: Array, counts: Array, scale: float, m: int, rounds: int) -> Array:
    """Ascent of mean f − (s/m) ln V_m of this very sample, an atom at a time: naive, by enumeration of all tuples.

    At the top each atom has its share of the sample under the law of m-tuples, so f moves by −s ln of their ratio.
    """
    seen, share = counts > 0, counts / counts.sum()
    occurs = multiplicities(int(seen.sum()), m)
    base = log_orderings(occurs) - scatter(source.points[seen], occurs) / scale
    f = f.copy()
    for _ in range(rounds):
        exponent = base + occurs @ (np.log(share[seen]) + f[seen] / scale)
        law = np.exp(exponent - exponent.max())
        under = law @ occurs / law.sum() / m
        f[seen] -= scale / m * np.log(under / share[seen])
    return f


@pytest.mark.parametrize("rounds", [0, 1, 10, 300])
def test_in_sample_fits_of_four_replicas(rounds: int) -> None:
    """Lemma 1 holds for f fitted on the estimation sample, so the whole certificate does, at any stage of the fit."""
    source, scale, m, level, repeats, n = DiscreteSource.random(7, atoms=5), 0.8, 4, 0.1, 200, 200
    exact, factor = source.potential(scale, m), m / (m - 1)
    truth = factor * float(source.p @ exact)
    failures = above = broken = 0
    gaps = []
    for repeat in range(repeats):
        rng = np.random.default_rng(repeat)
        reference = source.tensor[source.draw(rng, 80)]
        counts = np.bincount(source.draw(rng, n), minlength=len(source.p))
        centres = fit_centres(reference, scale=scale, replicas=m, seed=repeat)
        f0 = centres.potential(source.tensor).numpy()
        f = improved(source, f0, counts, scale, m, rounds)
        mean = counts / n
        value = float(mean @ f) - scale / m * log_v(source.points, mean * np.exp(f / scale), scale, m)
        broken += value > float(mean @ exact) + 1e-9
        above += factor * value > truth
        # Lemmas 2 and 3 as in the library, by hand
        largest = float(centres.potential(reference).max())
        capped = np.repeat(np.minimum(f0, largest), counts)
        margin = empirical_bernstein(variance=float(capped.var(ddof=1)), value_range=largest, n=n, level=level / 2)
        clip = max(largest / scale, 7.5)
        observed = (float(mean @ f0) - value) / scale
        gap = upper_tail(observed, clip=clip, slack=math.exp(-clip), n=n, level=level / 2)
        intercept = factor * (float(capped.mean()) - margin - scale * gap)
        failures += intercept > truth
        gaps.append(truth - intercept)
    assert broken == 0  # this lemma has no probability in it
    assert failures <= most_failures(repeats, level)
    assert np.mean(gaps) < truth
    if rounds >= 10:
        assert above > most_failures(repeats, level)  # without margins the test fails where f is fitted well


def test_fitting_in_the_sample_gains() -> None:
    """Every round raises the value that Lemma 1 bounds, up to the best one, which Newton's method finds as well."""
    source, scale, m, n = DiscreteSource.random(7, atoms=5), 0.8, 4, 200
    counts = np.bincount(source.draw(np.random.default_rng(0), n), minlength=5)
    assert (counts > 0).all()
    mean, f, values = counts / n, np.zeros(5), []
    for rounds in (0, 1, 2, 4, 8, 300):
        g = improved(source, f, counts, scale, m, rounds)
        values.append(float(mean @ g) - scale / m * log_v(source.points, mean * np.exp(g / scale), scale, m))
    assert (np.diff(values) > 0).all()
    best = float(mean @ DiscreteSource(source.points, mean).potential(scale, m))
    assert values[-1] == pytest.approx(best, abs=1e-8)
