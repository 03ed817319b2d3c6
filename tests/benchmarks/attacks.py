"""MNIST pixels: the prior-aware attack and codebook releases, beside the paper's (Table 6, Figure 3) and the bound.

RECONBOUND_MNIST=mnist.npz python tests/benchmarks/attacks.py --json attacks.json --figure attacks.png

D_perp 10,000, D_est and shadow sample 59,000, targets from the 1,000 images that remain. One thread suffices; what is
found is written after every figure, and a second run with the same --json goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from opacus_reconbound import Pixels, SourceCertificate, SplitPlan, certify
from opacus_reconbound.attacks import FULL_BATCH, SUBSAMPLED, attack_codebook, attack_prior_aware, role_vectors

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text(encoding="utf-8"))
BITS: list[float] = GOLDEN["attack_vs_bound_rho"]["gamma_bits"]
RATES: list[int] = GOLDEN["tightness_mnist_pixel"]["R"]
PUBLISHED = {
    "full batch": dict(zip(BITS, GOLDEN["attack_vs_bound_rho"]["mnist_pixel_full_batch"], strict=True)),
    "subsampled": dict(zip(BITS, GOLDEN["attack_vs_bound_rho"]["mnist_pixel_subsampled_q.02_T100"], strict=True)),
    "bound": dict(zip(BITS, GOLDEN["attack_vs_bound_rho"]["mnist_pixel_bound"], strict=True)),
    "codebook": dict(zip(RATES, GOLDEN["tightness_mnist_pixel"]["rho_codebook"], strict=True)),
}
THREATS = {"full batch": FULL_BATCH, "subsampled": SUBSAMPLED}


def table(found: dict[str, Any]) -> str:
    """A Markdown table: measured ± standard error beside published."""
    lines = ["| | bits | published | measured | standard error | seconds |", "|---|---|---|---|---|---|"]
    for key, one in found.items():
        name, bits = key.split(" @ ")
        published = PUBLISHED.get(name, {}).get(float(bits))
        shown = "" if published is None else f"{published:.3f}"
        error = "" if one["error"] is None else f"{one['error']:.3f}"
        lines.append(f"| {name} | {bits} | {shown} | {one['rho']:.3f} | {error} | {one['seconds']:.0f} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """ρ of every target, their mean, and the bound."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    for offset, (name, colour) in zip((-0.12, 0.12), (("full batch", "C0"), ("subsampled", "C1")), strict=True):
        for place, bits in enumerate(BITS):
            one = found.get(f"{name} @ {bits:g}")
            if one is None:
                continue
            x = place + offset + np.linspace(-0.08, 0.08, len(one["targets"]))
            axes.plot(x, one["targets"], ".", color=colour, ms=3, alpha=0.5)
            label = name if place == 0 else None
            axes.errorbar(place + offset, one["rho"], 2 * one["error"], fmt="_", color="k", ms=16, capsize=3)
            axes.plot([], [], ".", color=colour, label=label)
    for place, bits in enumerate(BITS):
        if f"bound @ {bits:g}" in found:
            axes.plot(
                [place - 0.3, place + 0.3],
                [found[f"bound @ {bits:g}"]["rho"]] * 2,
                "C3",
                lw=2,
                label="bound on the mean, 95 % confidence" if place == 0 else None,
            )
    axes.set(xticks=range(len(BITS)), xticklabels=[f"{bits:g}" for bits in BITS], ylim=(0, None))
    axes.set(
        xlabel="leakage γ in bits", ylabel="ρ", title="MNIST pixels: 100 targets, their mean (± 2 standard errors)"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Bound, attacks and codebooks, one after the other; print the table and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="codebooks of plain k-means too")
    parser.add_argument("--parts", nargs="+", default=["bound", *THREATS, "codebook"])
    parser.add_argument("--certificate", type=Path, help="of this split; else one is made")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    with np.load(os.environ["RECONBOUND_MNIST"]) as file:
        images = np.concatenate([file["x_train"], file["x_test"]]).reshape(-1, 784)
    order = np.random.default_rng(options.seed).permutation(len(images))
    roles: dict[Any, Any] = {"reference": order[:10_000], "estimation": order[10_000:69_000]}
    roles |= {"shadow": roles["estimation"], "targets": order[69_000 : 69_000 + options.targets]}
    plan, psi = SplitPlan.of(images, roles), Pixels((0, 255))
    plan.check_attack()
    _, z = role_vectors(images, plan, "targets", psi)
    _, pool = role_vectors(images, plan, "shadow", psi)
    # as in the paper, ρ is relative to tr Σ̂ of D_perp
    variance = float(images[plan.indices("reference")].astype(np.float64).var(axis=0).sum())
    found: dict[str, Any] = {}
    if options.json and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))

    def keep(key: str, rho: float, error: float | None, seconds: float, **more: Any) -> None:
        found[key] = {"rho": round(rho, 4), "error": None if error is None else round(error, 4)}
        found[key] |= {"seconds": round(seconds, 1), **more}
        print(key, {name: value for name, value in found[key].items() if name != "targets"}, flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if "bound" in options.parts and f"bound @ {BITS[0]:g}" not in found:
        started = time.perf_counter()
        if options.certificate:
            certificate = SourceCertificate.load(options.certificate)
            plan.check_sample("reference", certificate.reference)
            plan.check_sample("estimation", certificate.estimation)
        else:
            perp, est = plan.select(images, "reference"), plan.select(images, "estimation")
            certificate = certify(perp, est, representation=psi, splits=plan, progress=False, seed=options.seed)
        for bits in sorted({*BITS, *map(float, RATES)}):
            keep(f"bound @ {bits:g}", certificate.bound(bits).rho, None, time.perf_counter() - started)
    for name, threat in THREATS.items():
        for bits in BITS if name in options.parts else []:
            if f"{name} @ {bits:g}" in found:
                continue
            started = time.perf_counter()
            one = attack_prior_aware(z, pool, leakage_bits=bits, threat=threat, variance=variance, seed=options.seed)
            keep(
                f"{name} @ {bits:g}",
                one.mean.rho,
                one.mean.rho_standard_error,
                time.perf_counter() - started,
                best=round(one.best.rho, 4),
                sigma=round(one.noise_multiplier, 4),
                targets=np.round(one.mean.rho_per_target, 3).tolist(),
            )
    books = {"codebook": True} | ({"plain codebook": False} if options.plain else {})
    for name, balanced in books.items():
        for rate in RATES if "codebook" in options.parts else []:
            if f"{name} @ {rate}" in found:
                continue
            started = time.perf_counter()
            book = attack_codebook(z, pool, rate_bits=rate, variance=variance, balanced=balanced, seed=options.seed)
            errors, seconds = book.errors, time.perf_counter() - started
            entropy = round(book.codebook.entropy_bits, 4)
            keep(f"{name} @ {rate}", errors.rho, errors.rho_standard_error, seconds, entropy_bits=entropy)
    print(table(found))
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
