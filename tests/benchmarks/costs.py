"""What a certificate, a bound and a step cost: growth with n and d, and a brute-force estimator in the same run.

python tests/benchmarks/costs.py --json costs.json

Synthetic records; CPU time, all threads together, since others may use the machine. Every certificate is made in a
process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

GROWTH_N = ((7_500, 784), (15_000, 784), (30_000, 784), (60_000, 784))
GROWTH_D = ((4_000, 784), (4_000, 3_072), (4_000, 12_288))
REFERENCE = 2_000
PAIR = (28, 1.6)
PAIR_RECORDS = (20_000, 784)
DRAWS = 8_000


def records(n: int, d: int, seed: int) -> np.ndarray:
    """Records near a plane of 30 dimensions, as images are."""
    generator = np.random.default_rng(seed)
    plane = np.random.default_rng(0).standard_normal((30, d), dtype=np.float32)
    noise = generator.standard_normal((n, d), dtype=np.float32)
    return generator.standard_normal((n, 30), dtype=np.float32) @ plane + 0.5 * noise


def certify_one(design: str, n: int, d: int) -> dict[str, Any]:
    """CPU time and peak memory of one certificate; the memory that the records themselves take is given beside it."""
    from opacus_reconbound import certify
    from opacus_reconbound.representations import Vectors

    torch.set_num_threads(1)
    reference, estimation = records(REFERENCE, d, 1), records(n, d, 2)
    vectors = Vectors(clip_radius=20.0 * math.sqrt(d))
    started = time.process_time()
    certify(reference, estimation, representation=vectors, designs=design, reduction=None, progress=False)
    seconds = time.process_time() - started
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return {
        "design": design,
        "n": n,
        "d": d,
        "cpu_seconds": round(seconds, 2),
        "records_mib": round((reference.nbytes + estimation.nbytes) / 2**20),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20),
    }


def brute_force() -> dict[str, Any]:
    """One pair (k, ν²) of the block grid: the library, and a direct sum over all centres in float64, draw by draw.

    Both take as many draws, and their entropies agree within the Monte Carlo error.
    """
    from opacus_reconbound.certificates.block import block_estimates
    from opacus_reconbound.certificates.rotation import Rotation

    torch.set_num_threads(1)
    (k, dither), (n, d) = PAIR, PAIR_RECORDS
    scale = math.sqrt(d * (30.0 + 0.25))
    reference = torch.from_numpy(records(REFERENCE, d, 1) / scale)
    estimation = torch.from_numpy(records(n, d, 2) / scale)
    started = time.process_time()
    (found,) = block_estimates(reference, estimation, pairs=[PAIR], level=0.05, draws=DRAWS)
    ours = time.process_time() - started

    started = time.process_time()
    rotation = Rotation.fit(reference)
    blocks = rotation.order // k
    centres = (math.sqrt(blocks) * rotation.apply(estimation.double())).view(n, blocks, k)
    generator, s2, logs = torch.Generator().manual_seed(0), dither / k, []
    for draw in range(DRAWS):
        z = centres[:, draw % blocks]
        j = int(torch.randint(n, (), generator=generator))
        y = z[j] + math.sqrt(s2) * torch.randn(k, generator=generator, dtype=torch.float64)
        logs.append(float(torch.logsumexp((z - y).square().sum(dim=1) / (-2.0 * s2), dim=0)))
    entropy = math.log(n) + 0.5 * k * math.log(2.0 * math.pi * s2) - sum(logs) / len(logs)
    brute = time.process_time() - started
    return {
        "pair": list(PAIR),
        "n": n,
        "d": d,
        "draws": DRAWS,
        "cpu_seconds": round(ours, 2),
        "brute_force_cpu_seconds": round(brute, 2),
        "ratio": round(brute / ours, 1),
        "entropy_bits": round(found.entropy_bits, 3),
        "brute_force_entropy_bits": round(entropy / math.log(2.0), 3),
    }


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds of a call."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return round(1e6 * median(found), 2)


def reading() -> dict[str, float]:
    """Microseconds of ``.bound()``, of a step of the accountant, and of both: a step with a live ρ*."""
    from opacus_reconbound import certify
    from opacus_reconbound.accountants import RDPMutualInformationAccountant
    from opacus_reconbound.representations import Vectors

    certificate = certify(
        records(500, 20, 1),
        records(2_000, 20, 2),
        representation=Vectors(clip_radius=100.0),
        designs="all",
        progress=False,
    )
    accountant = RDPMutualInformationAccountant()
    step = partial(accountant.step, noise_multiplier=1.0, sample_rate=0.01)

    def live() -> float:
        step()
        return certificate.bound(accountant.leakage_bits).rho

    return {
        "bound_us": timed(lambda: certificate.bound(1.7), 2_000),
        "step_us": timed(step, 20_000),
        "step_and_bound_us": timed(live, 2_000),
    }


def main() -> None:
    """Measure, print the tables and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--designs", nargs="+", choices=["replica", "block", "multi"], default=["replica", "block"])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        design, n, d = options.one
        print(json.dumps(certify_one(design, int(n), int(d))))
        return
    found: dict[str, Any] = {"certificates": []}
    lines = ["| design | n | d | CPU seconds | records MiB | peak MiB |", "|---|---|---|---|---|---|"]
    for design in options.designs:
        for n, d in dict.fromkeys(GROWTH_N + GROWTH_D):
            if design == "multi" and n < 8_000:
                continue
            if design == "block" and d > 4_096:
                continue  # the default grid of blocks is for fewer coordinates
            command = [sys.executable, __file__, "--one", design, str(n), str(d)]
            one = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            found["certificates"].append(one)
            lines.append(
                f"| {design} | {n:,} | {d:,} | {one['cpu_seconds']:.1f} | {one['records_mib']:,} | "
                f"{one['peak_mib']:,} |"
            )
            print(lines[-1], file=sys.stderr)
    print("\n".join(lines))
    # last: Linux counts the memory that this process had at its start to every process started from it
    found |= {"reading": reading(), "brute_force": brute_force()}
    pair = found["brute_force"]
    print(f"\nOne pair of the block grid, {pair['draws']:,} draws: {pair['cpu_seconds']} s; by brute force ", end="")
    print(f"{pair['brute_force_cpu_seconds']} s, {pair['ratio']} times as long")
    print(", ".join(f"{name.removesuffix('_us')}: {value} µs" for name, value in found["reading"].items()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
