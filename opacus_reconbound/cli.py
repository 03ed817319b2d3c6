"""The command line ``reconbound``. Exit codes: 0 fine, 1 a floor is not met, 2 bad input."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opacus_reconbound.errors import DataError, InvalidValueError, ReconboundError

if TYPE_CHECKING:
    from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate

__all__ = ["app", "main"]

app = typer.Typer(
    name="reconbound",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "How well could anyone reconstruct a training record?\n\n"
        "First make a certificate of the records once (certify); then ask what a training schedule guarantees "
        "(bound, plan) or which noise a guarantee needs (calibrate). ρ* is a lower bound on the error of every "
        "reconstruction attack, relative to the best guess without the model: 1 means that training reveals nothing "
        "useful, 0 that nothing is guaranteed.\n\n"
        "Exit codes: 0 fine, 1 a floor (--min-rho) is not met, 2 bad input."
    ),
)

Certificate = Annotated[Path, typer.Argument(metavar="CERT", help="A certificate made by `reconbound certify`.")]
SampleRate = Annotated[
    float, typer.Option("--sample-rate", "-q", help="Probability that a record enters a step: batch size / records.")
]
NoiseMultiplier = Annotated[
    float, typer.Option("--noise-multiplier", "-s", help="Noise standard deviation over the clipping norm.")
]
Steps = Annotated[int, typer.Option("--steps", "-t", help="Number of optimizer steps.")]
MinRho = Annotated[float | None, typer.Option("--min-rho", help="The floor that ρ* must keep, in (0, 1].")]
Delta = Annotated[float, typer.Option("--delta", help="δ at which ε is shown.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def certify(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="CERT", help="Where to write the certificate.")],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DATA]...",
            help="Records: a .npy file, FILE.npz:KEY, or a folder of images; several are concatenated, then split.",
        ),
    ] = None,
    reference: Annotated[
        list[str] | None, typer.Option(help="The reference sample D_perp as it is, instead of DATA; repeatable.")
    ] = None,
    estimation: Annotated[
        list[str] | None, typer.Option(help="The estimation sample D_est as it is, instead of DATA; repeatable.")
    ] = None,
    n_reference: Annotated[
        int | None, typer.Option(help="Records of DATA for D_perp. Default: a seventh, at most 10,000.")
    ] = None,
    n_estimation: Annotated[int | None, typer.Option(help="Records of DATA for D_est. Default: all others.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the split and of everything random.")] = 0,
    designs: Annotated[
        str, typer.Option(help="fast (replica designs), block (the paper's), or all; α is shared among kinds.")
    ] = "fast",
    alpha: Annotated[float, typer.Option(help="Probability with which the certificate may fail.")] = 0.05,
    value_range: Annotated[
        tuple[float, float] | None,
        typer.Option(metavar="LOW HIGH", help="Least and largest value of an entry. 8-bit data: 0 255."),
    ] = None,
    normaliser: Annotated[
        str, typer.Option(help="What ρ* is relative to: point (tr Σ̂), ucb (its upper bound), or a number.")
    ] = "point",
    allow_repeats: Annotated[
        bool, typer.Option("--allow-repeats", help="Equal records in both samples are independent draws.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, mps.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Make a certificate: how uncertain the records are, once for all trainings.

    The records must come from the same source as the training records, and must not be needed for anything that the
    certificate's choices could depend on. The more estimation records, the tighter the certificate.

    Example: reconbound certify mnist.npz:x_train mnist.npz:x_test -o mnist.json --n-reference 10000
    """
    import numpy as np

    from opacus_reconbound._files import gather, open_records
    from opacus_reconbound.certificates.certify import certify as make
    from opacus_reconbound.certificates.split import split_indices
    from opacus_reconbound.representations import Pixels

    if output.is_dir():
        raise InvalidValueError(f"{output} is a folder. Name the certificate's file, such as {output / 'cert.json'}.")
    if data and (reference or estimation):
        raise InvalidValueError("Give either DATA, which is split, or --reference with --estimation, not both.")
    samples: tuple[Any, Any]
    if data:
        arrays = open_records(data)
        total = sum(len(array) for array in arrays)
        first = min(10_000, total // 7) if n_reference is None else n_reference
        second = max(0, total - first) if n_estimation is None else n_estimation
        parts = split_indices(total, [first, second], seed=seed)
        samples = (gather(arrays, parts[0]), gather(arrays, parts[1]))
    elif reference and estimation:
        if n_reference is not None or n_estimation is not None:
            raise InvalidValueError("--n-reference and --n-estimation split DATA; given samples are taken as they are.")
        left, right = open_records(reference), open_records(estimation)
        samples = (
            left[0] if len(left) == 1 else np.concatenate(left),
            right[0] if len(right) == 1 else np.concatenate(right),
        )
    else:
        raise InvalidValueError("No data was given: name DATA, or both --reference and --estimation.")
    if value_range is None and samples[0].dtype != np.uint8:
        raise DataError(
            f"The records are of type {samples[0].dtype}, not 8-bit. Say which values an entry can take, as in "
            "--value-range 0 1."
        )
    if normaliser not in ("point", "ucb"):
        try:
            declared: Any = float(normaliser)
        except ValueError as error:
            raise InvalidValueError(f"Expected --normaliser point, ucb or a number. Found {normaliser!r}.") from error
    else:
        declared = normaliser
    certificate = make(
        *samples,
        representation=Pixels(value_range or (0.0, 255.0)),
        designs=designs,
        alpha=alpha,
        seed=seed,
        normaliser=declared,
        allow_repeats=allow_repeats,
        device=device,
    )
    certificate.save(output)
    _show(certificate, as_json, f"Wrote {output}.")


@app.command()
def inspect(certificate: Certificate, as_json: AsJson = False) -> None:
    """Show what a certificate says, what it was made from, and what it assumes."""
    _show(_load(certificate), as_json, None)


@app.command()
def bound(
    certificate: Certificate,
    sample_rate: Annotated[
        float | None, typer.Option("--sample-rate", "-q", help="Probability that a record enters a step.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option("--noise-multiplier", "-s", help="Noise standard deviation over the clipping norm.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", "-t", help="Number of optimizer steps.")] = None,
    leakage_bits: Annotated[
        float | None, typer.Option(help="A leakage in bits, instead of a schedule: the bound is for this γ.")
    ] = None,
    min_rho: MinRho = None,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """The reconstruction bound of a training schedule. With --min-rho, exit code 1 where the floor is not met.

    Example: reconbound bound mnist.json --sample-rate 0.02 --noise-multiplier 1.1 --steps 4900
    """
    source = _load(certificate)
    schedule = (sample_rate, noise_multiplier, steps)
    given = [value is not None for value in schedule]
    floor = _checked_floor(min_rho)
    result: dict[str, Any]
    if leakage_bits is not None and not any(given):
        found = source.bound(leakage_bits)
        result = _bound_as_dict(found)
    elif sample_rate is not None and noise_multiplier is not None and steps is not None and leakage_bits is None:
        from opacus_reconbound.leakage import Schedule

        run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
        found = source.bound(run.charged_bits)
        result = _bound_as_dict(found) | {"epsilon": _epsilon(run, delta), "delta": delta}
    else:
        raise InvalidValueError(
            "Give --sample-rate, --noise-multiplier and --steps, or --leakage-bits alone; not a part or a mixture."
        )
    met = floor is None or found.rho >= floor
    if as_json:
        _print_json(result | ({} if floor is None else {"min_rho": floor, "met": met}))
    else:
        typer.echo(found.explain())
        if "epsilon" in result:
            typer.echo(f"For comparison: ε <= {_up(result['epsilon'])} at δ = {delta:g} (RDP).")
        if floor is not None:
            typer.echo(
                f"The floor of {floor:g} is {'met' if met else 'NOT met'}: ρ* = {math.floor(found.rho * 1e4) / 1e4:g}."
            )
    if not met:
        raise typer.Exit(1)


@app.command()
def calibrate(
    certificate: Certificate,
    min_rho: Annotated[float, typer.Option("--min-rho", help="The floor that ρ* must keep, in (0, 1].")],
    sample_rate: SampleRate,
    steps: Steps,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """The least noise that keeps ρ* at or above a floor, rounded to the safe side, and what it means in ε.

    Example: reconbound calibrate mnist.json --min-rho 0.8 --sample-rate 0.02 --steps 4900
    """
    from opacus_reconbound.engine import calibrate_noise
    from opacus_reconbound.leakage import Schedule

    source = _load(certificate)
    sigma = calibrate_noise(source, min_rho=min_rho, sample_rate=sample_rate, steps=steps)
    # six decimals, upwards: what is printed keeps the floor too
    sigma = math.ceil(sigma * 1e6) / 1e6
    run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=sigma, steps=steps)
    found = source.bound(run.charged_bits)
    epsilon = _epsilon(run, delta)
    if as_json:
        _print_json(
            {"noise_multiplier": sigma, "sample_rate": sample_rate, "steps": steps, "min_rho": min_rho}
            | _bound_as_dict(found)
            | {"epsilon": epsilon, "delta": delta}
        )
        return
    typer.echo(
        f"noise_multiplier = {sigma:g}: the least that keeps ρ* >= {min_rho:g} for {steps:,} steps at sample rate "
        f"{sample_rate:g} ({_up(run.charged_bits)} bits)."
    )
    typer.echo(f"In terms of differential privacy: ε <= {_up(epsilon)} at δ = {delta:g} (RDP).")
    typer.echo(found.explain())


@app.command()
def plan(
    certificate: Certificate,
    sample_rate: SampleRate,
    noise_multiplier: NoiseMultiplier,
    steps: Steps,
    min_rho: MinRho = None,
    rows: Annotated[int, typer.Option(help="Rows of the table.")] = 10,
    plot: Annotated[Path | None, typer.Option(help="Draw ρ* against the step into this file (.png, .svg).")] = None,
    as_json: AsJson = False,
) -> None:
    """ρ* against the step for a schedule, as a table and a picture, and where a floor would end it.

    Example: reconbound plan mnist.json -q 0.02 -s 1.1 -t 4900 --min-rho 0.8 --plot plan.png
    """
    import numpy as np

    from opacus_reconbound import _validate
    from opacus_reconbound.engine import forecast
    from opacus_reconbound.leakage import Schedule

    source = _load(certificate)
    steps = _validate.integer("steps", steps, minimum=1)
    rows = _validate.integer("rows", rows, minimum=1)
    run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    ahead = forecast(
        source, sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps, min_rho=_checked_floor(min_rho)
    )
    at = sorted({int(step) for step in np.linspace(0, steps, rows + 1).round()} | {ahead.last_step or 0})
    bits = run.charged_bits_at(at).tolist()
    table = [
        {"step": step, "leakage_bits": b, "rho_star": source.bound(b).rho} for step, b in zip(at, bits, strict=True)
    ]
    if plot is not None:
        plots = _need("matplotlib", "report")
        fine = np.unique(np.linspace(0, steps, 400).round().astype(int))
        fine_bits = run.charged_bits_at(fine).tolist()
        plots.plot_plan(
            plot,
            steps=fine.tolist(),
            rho=[source.bound(b).rho for b in fine_bits],
            leakage_bits=fine_bits,
            min_rho=min_rho,
            last_step=ahead.last_step,
        )
    if as_json:
        _print_json({"rows": table, "last_step": ahead.last_step, "min_rho": min_rho, "forecast": ahead.describe()})
        return
    typer.echo(f"{'step':>10}  {'bits':>10}  {'ρ*':>6}")
    for row in table:
        mark = "  <- last step that keeps the floor" if row["step"] == ahead.last_step else ""
        typer.echo(f"{row['step']:>10,}  {_up(row['leakage_bits']):>10}  {_down3(row['rho_star']):>6}{mark}")
    typer.echo(ahead.describe())
    if plot is not None:
        typer.echo(f"Wrote {plot}.")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for certificate, log and picture.")] = Path(
        "reconbound-demo"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the split, the network and the noise.")] = 0,
) -> None:
    """Train privately on real digits until the reconstruction floor is reached; under two minutes."""
    from opacus_reconbound.demo import run_demo

    run_demo(output, seed=seed)


def _version(show: bool) -> None:
    if show:
        from opacus_reconbound.certificates.certify import library_version

        typer.echo(library_version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Options before the command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every error of this library becomes one line and exit code 2."""
    try:
        app(args=arguments)
    except (ReconboundError, OSError, MemoryError) as error:
        message = str(error) or type(error).__name__
        typer.echo(f"Error: {message}", err=True)
        sys.exit(2)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _load(path: Path) -> SourceCertificate:
    from opacus_reconbound.certificates.certificate import SourceCertificate

    return SourceCertificate.load(path)


def _checked_floor(min_rho: float | None) -> float | None:
    if min_rho is not None and not 0.0 < min_rho <= 1.0:
        raise InvalidValueError(f"Expected --min-rho in (0, 1]. Found {min_rho!r}.")
    return min_rho


def _need(package: str, extra: str) -> Any:
    try:
        __import__(package)
    except ImportError as error:
        raise InvalidValueError(
            f"This needs {package}. Install it with: pip install 'opacus-reconbound[{extra}]'"
        ) from error
    from opacus_reconbound.report import plots

    return plots


def _epsilon(schedule: Any, delta: float) -> float:
    import warnings

    from opacus_reconbound import _validate
    from opacus_reconbound.accountants import RDPMutualInformationAccountant

    _validate.fraction("delta", delta)
    accountant = RDPMutualInformationAccountant()
    accountant.history = [(run.noise_multiplier, run.sample_rate, run.steps) for run in schedule]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the", category=UserWarning)
        return accountant.get_epsilon(delta)


def _show(certificate: SourceCertificate, as_json: bool, note: str | None) -> None:
    if as_json:
        _print_json(json.loads(certificate.to_json()) | {"confidence": certificate.confidence})
        return
    if note:
        typer.echo(note)
    typer.echo(certificate.explain())
    typer.echo(f"Digest {certificate.digest[:16]}…, library {certificate.library_version}, seed {certificate.seed}.")
    typer.echo("It assumes:")
    for assumption in certificate.assumptions:
        typer.echo(f"  - {assumption}")


def _bound_as_dict(found: ReconstructionBound) -> dict[str, Any]:
    return {
        "leakage_bits": found.leakage_bits,
        "rho_star": found.rho,
        "mse": found.mse,
        "rmse": found.rmse,
        "rmse_per_coordinate": found.rmse_per_coordinate,
        "psnr": found.psnr,
        "confidence": found.confidence,
        "normaliser": found.normaliser,
        "representation": found.representation,
        "design": None if found.design is None else vars(found.design),
    }


def _print_json(value: Any) -> None:
    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(entry) for entry in item]
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)  # JSON has no infinity
        return item

    typer.echo(json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False))


def _up(value: float) -> str:
    return "inf" if math.isinf(value) else f"{math.ceil(value * 1e3) / 1e3:.3f}"


def _down3(value: float) -> str:
    return f"{math.floor(value * 1e3) / 1e3:.3f}"


if __name__ == "__main__":
    main()
