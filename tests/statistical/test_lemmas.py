"""The theorem and the lemma of the upper tail for more than two replicas, on sources where everything can be counted.

The other lemmas have theirs beside the code: Lemma 1 in ``certificates/test_replica.py`` (m = 2) and ``test_multi.py``
(m = 4, 8), Lemma 2 in ``test_replica.py`` and ``test_centres.py``, Lemma 3 for m = 2 in ``test_replica.py``, Lemma 4 in
``test_multi.py``, the doubling identity in ``test_tuples.py``.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from helpers import Array, DiscreteSource, most_failures, mutual_information
from hypothesis import given
from hypothesis import strategies as st

from opacus_reconbound.certificates.centres import fit_centres
from opacus_reconbound.certificates.margins import upper_tail

seeds = st.integers(0, 10**6)


def replicas_of(source: DiscreteSource, joint: Array, m: int) -> tuple[Array, Array]:
    """All m-tuples of atoms, and the law of m draws that are independent given the channel's output."""
    outputs = joint.sum(0)
    posterior = joint / np.maximum(outputs, 1e-300)
    tuples = np.array(list(itertools.product(range(len(source.p)), repeat=m)))
    return tuples, np.asarray(np.prod(posterior[tuples], axis=1) @ outputs)


@given(seeds, st.sampled_from([2, 3, 4, 5]), st.integers(1, 5), st.floats(0.05, 2.0), st.floats(0.0, 3.0))
def test_the_theorem_for_m_replicas_of_any_channel(seed: int, m: int, outputs: int, scale: float, size: float) -> None:
    """Their mean pair distance is the least error, their total correlation at most (m − 1) γ; and the bound holds."""
    source, rng = DiscreteSource.random(seed, atoms=3, dimension=2), np.random.default_rng(seed)
    joint = source.p[:, None] * rng.dirichlet(np.full(outputs, 0.4), size=3)
    tuples, law = replicas_of(source, joint, m)
    estimate = (joint / joint.sum(0)).T @ source.points
    error = float((joint * ((source.points[:, None] - estimate[None]) ** 2).sum(2)).sum())

    z = source.points[tuples]
    cost = ((z - z.mean(1, keepdims=True)) ** 2).sum((1, 2)) / (m - 1)  # the mean over pairs of ‖z_i − z_j‖²/2
    pairs = [((z[:, i] - z[:, j]) ** 2).sum(1) / 2 for i, j in itertools.combinations(range(m), 2)]
    np.testing.assert_allclose(cost, np.mean(pairs, axis=0), atol=1e-12)
    assert law @ cost == pytest.approx(error, abs=1e-9)

    independent = np.prod(source.p[tuples], axis=1)
    seen = law > 1e-200
    correlation = float((law[seen] * np.log(law[seen] / independent[seen])).sum())
    leakage = mutual_information(joint)
    assert correlation <= (m - 1) * leakage + 1e-9

    epsilon = scale / (m - 1)
    for g in (size * rng.normal(size=3), source.potential(scale, m) / (m - 1)):
        exponent = (g[tuples].sum(1) - cost) / epsilon
        partition = math.log(float(independent @ np.exp(exponent - exponent.max()))) + float(exponent.max())
        bound = m * float(source.p @ g) - epsilon * partition - scale * leakage
        assert bound <= error + 1e-9
    # for the population's potential the partition function is one
    assert bound == pytest.approx(source.intercept(scale, m) - scale * leakage, abs=1e-7)


def test_the_two_ways_to_the_potential_of_two_replicas() -> None:
    """Newton's method over pairs, and the fixed point of its definition."""
    for seed in range(5):
        source, epsilon = DiscreteSource.random(seed, atoms=6), 0.1 * (seed + 1)
        kernel = np.exp(-((source.points[:, None] - source.points[None]) ** 2).sum(2) / (2 * epsilon))
        h = np.zeros(6)
        for _ in range(5000):
            h = 0.5 * (h - np.log(kernel @ (source.p * np.exp(h))))
        np.testing.assert_allclose(source.potential(epsilon, 2), epsilon * h, atol=1e-8)


@pytest.mark.parametrize("m", [2, 4, 8])
@pytest.mark.parametrize(("seed", "n"), [(0, 60), (3, 200)])
def test_lemma_3_for_m_replicas(m: int, seed: int, n: int) -> None:
    """y* covers −E X' of the exact potential and a fitted f_0; what is observed does not."""
    source, scale, level, repeats = DiscreteSource.random(seed, atoms=5), 0.4, 0.3, 2000
    rng = np.random.default_rng(seed)
    centres = fit_centres(source.tensor[source.draw(rng, 60)], scale=scale, replicas=m, seed=seed)
    f0 = centres.potential(source.tensor).numpy()
    clip = 7.5
    x = np.maximum((source.potential(scale, m) - f0) / scale, -clip)
    assert source.p @ np.exp(x) <= 1 + math.exp(-clip)
    y = -float(source.p @ x)
    assert y > 0.0
    observed = -(rng.multinomial(n, source.p, size=repeats) / n) @ x
    found = [upper_tail(value, clip=clip, slack=math.exp(-clip), n=n, level=level) for value in observed.tolist()]
    assert (np.array(found) < y).sum() <= most_failures(repeats, level)
    assert (observed < y).mean() > 0.4
