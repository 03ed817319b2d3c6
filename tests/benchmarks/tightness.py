"""MNIST pixels by design: ρ*, time and peak memory, beside the paper's bound and the codebook attack.

RECONBOUND_MNIST=mnist.npz python tests/benchmarks/tightness.py --json tightness.json --figure tightness.png

Each design is certified in a process of its own, on 10,000 reference and 59,000 estimation records at α = .05.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BITS = (0.048, 0.169, 0.57, 1.0, 1.785, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
# the paper's Tables 1 and 8 (MNIST, pixels, 95 %) and its attack by balanced k-means codebooks (section 6)
PUBLISHED = dict(
    zip(BITS, (0.907, 0.892, 0.845, 0.809, 0.754, 0.739, 0.665, 0.606, 0.558, 0.507, 0.454, 0.397), strict=True)
)
CODEBOOK = dict(zip(range(1, 9), (0.975, 0.931, 0.882, 0.834, 0.790, 0.754, 0.721, 0.691), strict=True))
LABELS = {"replica": "two replicas", "multi": "many replicas", "block": "blocks", "auto": "auto"}


def certify_one(design: str, seed: int) -> dict[str, Any]:
    """Certify here and now; the split is drawn from the seed before any record is looked at."""
    from opacus_reconbound import Pixels, certify

    with np.load(os.environ["RECONBOUND_MNIST"]) as file:
        images = np.concatenate([file["x_train"], file["x_test"]])
    order = np.random.default_rng(seed).permutation(len(images))
    reference, estimation = images[order[:10_000]], images[order[10_000:69_000]]
    del images
    started = time.perf_counter()
    certificate = certify(
        reference, estimation, representation=Pixels((0, 255)), designs=design, seed=seed, progress=False
    )
    seconds = time.perf_counter() - started
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return {
        "seconds": round(seconds, 1),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20),
        "rho": {f"{bits:g}": int(certificate.bound(bits).rho * 1e4) / 1e4 for bits in BITS},
        "explain": certificate.explain(),
    }


def table(found: dict[str, Any]) -> str:
    """A Markdown table, ρ* rounded down."""
    lines = [
        "| bits | " + " | ".join(f"{bits:g}" for bits in BITS) + " | seconds | peak MiB |",
        "|---" * (len(BITS) + 3) + "|",
        "| paper | " + " | ".join(f"{PUBLISHED[bits]:.3f}" for bits in BITS) + " | | |",
    ]
    for design, one in found.items():
        values = " | ".join(f"{int(one['rho'][f'{bits:g}'] * 1e3) / 1e3:.3f}" for bits in BITS)
        lines.append(f"| {LABELS[design]} | {values} | {one['seconds']:.0f} | {one['peak_mib']:,} |")
    attacks = " | ".join(f"{CODEBOOK[int(bits)]:.3f}" if bits in CODEBOOK else "" for bits in BITS)
    return "\n".join([*lines, f"| codebook attack | {attacks} | | |"])


def draw(found: dict[str, Any], path: Path) -> None:
    """ρ* against leakage."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    axes.plot(list(CODEBOOK), list(CODEBOOK.values()), "k^--", lw=1, ms=4, label="codebook attack (the paper)")
    for design, one in found.items():
        axes.plot(BITS, list(one["rho"].values()), lw=2 if design == "auto" else 1, marker=".", label=LABELS[design])
    axes.plot(BITS, list(PUBLISHED.values()), "k.:", lw=1, label="bound (the paper)")
    axes.set(xlabel="leakage γ in bits", ylabel="ρ*", ylim=(0.35, 1.0), xlim=(0, 8.1))
    axes.set_title("MNIST pixels, 95 % confidence: no attack lies below a bound", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    """Run the designs one after the other, print the table and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--designs", nargs="+", choices=list(LABELS), default=["replica", "block", "auto"])
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--one", choices=list(LABELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(certify_one(options.one, options.seed)))
        return
    found: dict[str, Any] = {}
    for design in options.designs:
        command = [sys.executable, __file__, "--one", design, "--seed", str(options.seed)]
        found[design] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        print(f"{LABELS[design]}: {found[design]['seconds']} s, {found[design]['peak_mib']} MiB", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(table(found))
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
