"""The command line ``reconbound``. Exit codes: 0 fine, 1 a floor is not met, 2 bad input."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from opacus_reconbound import _validate
from opacus_reconbound._rounding import down3, up3
from opacus_reconbound.errors import DataError, InvalidValueError, ReconboundError

if TYPE_CHECKING:
    from opacus_reconbound.certificates.certificate import ReconstructionBound, SourceCertificate
    from opacus_reconbound.engine import Epsilon
    from opacus_reconbound.leakage import Schedule

__all__ = ["app", "main"]

_MOST_HELD_OUT = 3000  # records from which κ is estimated: all pairs are compared

app = typer.Typer(
    name="reconbound",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "How well could anyone reconstruct a training record?\n\n"
        "First make a certificate of the records, once (certify); then ask what a training schedule guarantees "
        "(bound, plan) or which noise, steps or batches a guarantee needs (calibrate). ρ* is a lower bound on the "
        "error of every reconstruction attack, relative to the best guess without the model: 1 means that training "
        "reveals nothing useful, 0 that nothing is guaranteed.\n\n"
        "Exit codes: 0 fine, 1 a floor (--min-rho) is not met, 2 bad input, 130 interrupted."
    ),
)


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number.") from None


def _whole(text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number.") from None


_RATE = typer.Option(
    "--sample-rate",
    "-q",
    parser=_number,
    metavar="Q",
    help="Probability that a record enters a step: 1/len(loader) in Opacus, else batch size over records.",
)
_NOISE = typer.Option(
    "--noise-multiplier",
    "-s",
    parser=_number,
    metavar="SIGMA",
    help="Standard deviation of the noise over the clipping norm.",
)
_STEPS = typer.Option("--steps", "-t", parser=_whole, metavar="N", help="Number of optimizer steps.")
_FLOOR = typer.Option("--min-rho", parser=_number, metavar="RHO", help="The floor that ρ* must keep, in (0, 1].")

Certificate = Annotated[Path, typer.Argument(metavar="CERT", help="A file made by `reconbound certify`.")]
Delta = Annotated[
    float, typer.Option("--delta", parser=_number, metavar="DELTA", help="δ at which ε is shown, in (0, 1).")
]
Prv = Annotated[
    bool, typer.Option("--prv", help="Show ε by the PRV accountant too: tighter, and about a second slower.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help='Print JSON instead of text, unrounded; infinity is the string "inf".')
]


@app.command(short_help="Make a certificate of held-out records, once.")
def certify(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="CERT", help="The certificate's file, such as cert.json.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            show_default=False,
            help="Records: a .npy file, FILE.npz:KEY, or a folder of images (8-bit, one size). Several are "
            "concatenated; the whole is then split at random into the two samples.",
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            show_default=False,
            help="The reference sample D_perp as it is, where you have split yourself; needs --estimation. Repeatable.",
        ),
    ] = None,
    estimation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            show_default=False,
            help="The estimation sample D_est as it is, disjoint from the reference. Repeatable.",
        ),
    ] = None,
    n_reference: Annotated[
        int | None,
        typer.Option(
            parser=_whole,
            metavar="N",
            show_default=False,
            help="How many records of DATA become D_perp, which fixes all choices.  [default: a seventh, 10,000 at "
            "most]",
        ),
    ] = None,
    n_estimation: Annotated[
        int | None,
        typer.Option(
            parser=_whole,
            metavar="N",
            show_default=False,
            help="How many become D_est, which is measured: the more, the tighter.  [default: all others]",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Seed of the split and of everything random.")
    ] = 0,
    designs: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help=(
                "fast (two replicas), auto (what a pilot on the reference sample chooses, many replicas among it; "
                "tighter, slower), block (the paper's), or all (fast and block, each with half of α)."
            ),
        ),
    ] = "fast",
    alpha: Annotated[
        float,
        typer.Option(parser=_number, metavar="ALPHA", help="Probability with which the certificate may be wrong."),
    ] = 0.05,
    value_range: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="LOW HIGH",
            show_default=False,
            help="Least and largest value that an entry can take.  [default: 0 255, for 8-bit records only]",
        ),
    ] = None,
    representation: Annotated[
        str,
        typer.Option(
            "--representation",
            "-r",
            metavar="TEXT",
            help="What counts as a reconstruction: one of the representations listed above, or several joined by |.",
        ),
    ] = "pixels",
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Backbone weights for lpips, a .npz or a torchvision state dict .pth.  [default: as lpips downloads "
            "them]",
        ),
    ] = None,
    reduction: Annotated[
        str,
        typer.Option(
            metavar="N",
            help="Principal coordinates that the designs use: a number, none, or auto (2,048 where there are more than "
            "4,096 and all vectors together would take more than 3 GiB). The bound is on all coordinates.",
        ),
    ] = "auto",
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            show_default=False,
            help="Keep the vectors of the representation here, so that they are computed once.",
        ),
    ] = None,
    reference_from: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="source, or elsewhere: the reference records are public or synthetic; needs a number as --normaliser.",
        ),
    ] = "source",
    normaliser: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="What ρ* is relative to: point (the estimated tr Σ), ucb (an upper bound on it), or a number.",
        ),
    ] = "point",
    allow_repeats: Annotated[
        bool,
        typer.Option(
            "--allow-repeats",
            help="Accept equal records: the source repeats values, and they are independent draws.",
        ),
    ] = False,
    splits: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="A plan saved by SplitPlan.save: DATA is split by it, or given samples are checked against it.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where to compute: cpu, cuda, mps.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Make a certificate: how uncertain the records are, once for all trainings.

    The records must be held out: drawn from the same source as the training records, and not trained on. The more
    of them, the tighter the certificate; below a few thousand it promises little.

    Kinds of designs that are finished are kept in CERT.partial until the certificate is written: after an
    interruption the same command goes on from there.

    \b
    Representations, for --representation; several are joined by |:
      pixels                      raw values
      crop:TOP,LEFT,HEIGHT,WIDTH  a box of an image
      channels:I,J,...            some channels
      coordinates:I,J-K,...       some entries of the flattened record
      mask:FILE.npy               the entries where a boolean array is true
      downsample:SIZE             a coarse image of SIZE × SIZE means (or ROWS,COLUMNS)
      dct:COUNT                   the COUNT × COUNT lowest frequencies (or ROWS,COLUMNS)
      linear:FILE.npy             z = A x for a matrix A
      lpips:NET@SIZE              perceptual distance; NET alex, vgg or squeeze; SIZE 64 unless given, or 'full'
      vectors:RADIUS              tabular rows or embeddings, clipped to a ball ('vectors' alone needs --value-range)
      standardised:RADIUS         the same, columns standardised on the reference sample first

    \b
    Examples:
      reconbound certify mnist.npz:x_train mnist.npz:x_test -o mnist.json
      reconbound certify photos/ -o photos.json --n-reference 5000
      reconbound certify --reference a.npy --estimation b.npy -o cert.json --value-range 0 1
      reconbound certify photos/ -o faces.json --representation "crop:8,8,48,48|lpips:alex@64" --cache vectors/
    """  # noqa: D301 - \b keeps the lines of the example
    import numpy as np

    from opacus_reconbound._files import check_writable, open_records, refuse_repeats, split_key
    from opacus_reconbound.certificates.certify import certify as make
    from opacus_reconbound.certificates.devices import usable_device
    from opacus_reconbound.certificates.plan import SplitPlan
    from opacus_reconbound.certificates.records import SelectedRecords
    from opacus_reconbound.certificates.split import split_indices
    from opacus_reconbound.representations import Composition, Vectors, parse

    check_writable(output, "the certificate's file, such as cert.json")
    if data and (reference or estimation):
        raise InvalidValueError("Give either DATA, which is split, or --reference with --estimation, not both.")
    if not data and not (estimation and (reference or designs == "block")):
        raise InvalidValueError(
            "--reference and --estimation go together: the two samples, disjoint. One of them is missing."
            if reference or estimation
            else "No data was given: name DATA, or both --reference and --estimation."
        )
    sources = [*(data or []), *(reference or []), *(estimation or [])]
    for source in sources:
        if output.exists() and split_key(source)[0].exists() and output.samefile(split_key(source)[0]):
            raise InvalidValueError(f"--output {output} is one of the data files and would be overwritten; rename it.")
    if output.suffix.lower() in (".npy", ".npz"):
        raise InvalidValueError(f"--output {output} is named like data; a certificate is JSON. Call it cert.json.")
    seed = _validate.integer("--seed", seed)
    low_high: tuple[float, float] | None = None
    if value_range is not None:
        low_high = (
            _validate.finite("--value-range", value_range[0]),
            _validate.finite("--value-range", value_range[1]),
        )
    psi = parse(representation, value_range=low_high, weights=weights)
    kept: Any = None if reduction == "none" else reduction
    if reduction not in ("auto", "none"):
        kept = _validate.integer("--reduction", reduction, minimum=1)
    declared: Any = normaliser
    if normaliser not in ("point", "ucb"):
        try:
            declared = float(normaliser)
        except ValueError:
            raise InvalidValueError(f"Expected --normaliser point, ucb or a number. Found {normaliser!r}.") from None
    usable_device("--device", device)
    refuse_repeats(sources)
    plan = None if splits is None else SplitPlan.load(splits)
    samples: tuple[Any, Any]
    if data and plan is not None:
        if n_reference is not None or n_estimation is not None:
            raise InvalidValueError("--n-reference and --n-estimation split DATA, and so does --splits. Choose one.")
        samples = cast(Any, (plan.select(data, "reference"), plan.select(data, "estimation")))
    elif data:
        arrays = open_records(data)
        total = sum(len(array) for array in arrays)
        first = min(10_000, total // 7) if n_reference is None else _validate.integer("--n-reference", n_reference)
        second = max(0, total - first) if n_estimation is None else _validate.integer("--n-estimation", n_estimation)
        if first + second > total:
            raise InvalidValueError(
                f"--n-reference {first} and --n-estimation {second} need {first + second} records, but there are "
                f"{total}. Choose smaller numbers."
            )
        parts = split_indices(total, [first, second], seed=seed)
        samples = (SelectedRecords(arrays, parts[0]), SelectedRecords(arrays, parts[1]))
    else:
        if n_reference is not None or n_estimation is not None:
            raise InvalidValueError("--n-reference and --n-estimation split DATA; given samples are taken as they are.")
        left = SelectedRecords(open_records(reference)) if reference else None
        samples = (left, SelectedRecords(open_records(estimation or [])))
    first_stage = psi.stages[0] if isinstance(psi, Composition) else psi
    if low_high is None and samples[1].dtype != np.uint8 and not isinstance(first_stage, Vectors):
        raise DataError(
            f"The records are of type {samples[1].dtype}, not 8-bit. Say which values an entry can take, as in "
            "--value-range 0 1."
        )
    partial = output.with_name(f"{output.name}.partial")
    try:
        certificate = make(
            *samples,
            representation=psi,
            designs=designs,
            alpha=alpha,
            seed=seed,
            normaliser=declared,
            reference_from=reference_from,  # type: ignore[arg-type]
            reduction=kept,
            cache=cache,
            allow_repeats=allow_repeats,
            splits=plan,
            device=device,
            checkpoint=partial,
        )
        certificate.save(output)
    except KeyboardInterrupt:
        if partial.exists():
            typer.echo(f"What is finished is kept in {partial}: the same command goes on from there.", err=True)
        raise
    partial.unlink(missing_ok=True)
    _show(certificate, as_json, f"Wrote {output}.")


@app.command(short_help="Show what a certificate says, rests on and assumes.")
def inspect(certificate: Certificate, as_json: AsJson = False) -> None:
    """Show what a certificate says, what it was made from, and what it assumes."""
    _show(_load(certificate), as_json, None)


@app.command(short_help="ρ* of a training schedule; check a floor.")
def bound(
    certificate: Certificate,
    sample_rate: Annotated[float | None, _RATE] = None,
    noise_multiplier: Annotated[float | None, _NOISE] = None,
    steps: Annotated[int | None, _STEPS] = None,
    leakage_bits: Annotated[
        float | None,
        typer.Option(
            parser=_number, metavar="BITS", help="A leakage γ in bits, instead of the three options of a schedule."
        ),
    ] = None,
    min_rho: Annotated[float | None, _FLOOR] = None,
    delta: Delta = 1e-5,
    as_json: AsJson = False,
) -> None:
    """The reconstruction bound of a training schedule. With --min-rho, exit code 1 where the floor is not met.

    \b
    Example:
      reconbound bound mnist.json --sample-rate 0.02 --noise-multiplier 1.1 --steps 4900
    """  # noqa: D301 - \b keeps the lines of the example
    source = _load(certificate)
    given = [value is not None for value in (sample_rate, noise_multiplier, steps)]
    floor = None if min_rho is None else _checked_floor(min_rho)
    result: dict[str, Any]
    epsilon = None
    if leakage_bits is not None and not any(given):
        found = source.bound(leakage_bits)
        result = _bound_as_dict(found)
    elif sample_rate is not None and noise_multiplier is not None and steps is not None and leakage_bits is None:
        from opacus_reconbound.leakage import Schedule

        run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=_checked_steps(steps))
        found = source.bound(run.charged_bits)
        epsilon = _epsilon(run, delta, prv=False)
        result = _bound_as_dict(found) | _epsilon_as_dict(epsilon)
    else:
        raise InvalidValueError(
            "Give --sample-rate, --noise-multiplier and --steps, or --leakage-bits alone; not a part or a mixture."
        )
    met = floor is None or found.rho >= floor
    if as_json:
        _print_json(result | ({} if floor is None else {"min_rho": floor, "met": met}))
    else:
        typer.echo(found.explain())
        if epsilon is not None:
            typer.echo(f"For comparison: {epsilon.describe()}.")
        if floor is not None:
            typer.echo(
                f"The floor of {floor:g} is {'met' if met else 'NOT met'}: ρ* = {math.floor(found.rho * 1e4) / 1e4:g}."
            )
    if not met:
        raise typer.Exit(1)


@app.command(short_help="The noise, steps or batches that keep a floor, and their ε.")
def calibrate(
    certificate: Certificate,
    min_rho: Annotated[float, _FLOOR],
    sample_rate: Annotated[float | None, _RATE] = None,
    noise_multiplier: Annotated[float | None, _NOISE] = None,
    steps: Annotated[int | None, _STEPS] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            parser=_whole, metavar="N", show_default=False, help="Passes, instead of --steps; with --records."
        ),
    ] = None,
    records: Annotated[
        int | None,
        typer.Option(
            parser=_whole, metavar="N", show_default=False, help="Training records: find the largest batch size."
        ),
    ] = None,
    noise_shape: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Relative noise of every step, a .npy file or a text of numbers: find the least factor on it.",
        ),
    ] = None,
    delta: Delta = 1e-5,
    prv: Prv = False,
    as_json: AsJson = False,
) -> None:
    """What keeps ρ* at or above a floor, rounded to the safe side, and what it means in ε.

    Of the sample rate, the noise and the steps, give two; the third is found: the least noise, the most steps, or the
    largest sample rate. With --records the largest batch size of a data loader is found in place of a rate, for a
    number of steps or epochs. With --noise-shape the noise of each step is a factor times its entry in a file, and
    the least factor is found.

    \b
    Examples:
      reconbound calibrate mnist.json --min-rho 0.8 --sample-rate 0.02 --steps 4900
      reconbound calibrate mnist.json --min-rho 0.8 --sample-rate 0.02 --noise-multiplier 1.1
      reconbound calibrate mnist.json --min-rho 0.8 --noise-multiplier 1.1 --steps 4900
      reconbound calibrate mnist.json --min-rho 0.8 --noise-multiplier 1.1 --epochs 20 --records 60000
      reconbound calibrate mnist.json --min-rho 0.8 --sample-rate 0.02 --noise-shape decay.npy
    """  # noqa: D301 - \b keeps the lines of the example
    from opacus_reconbound import engine
    from opacus_reconbound.leakage import Schedule
    from opacus_reconbound.leakage.calibration import steps_per_epoch

    source, floor = _load(certificate), _checked_floor(min_rho)
    steps = None if steps is None else _checked_steps(steps)
    given = {
        name
        for name, value in [
            ("rate", sample_rate),
            ("noise", noise_multiplier),
            ("steps", steps),
            ("epochs", epochs),
            ("records", records),
            ("shape", noise_shape),
        ]
        if value is not None
    }
    result: dict[str, Any]
    if given == {"rate", "shape"} and sample_rate is not None and noise_shape is not None:
        from opacus_reconbound._files import read_numbers

        shape = Schedule.from_arrays(sample_rates=sample_rate, noise_multipliers=read_numbers(noise_shape))
        factor = _up_six(engine.calibrate_noise_scale(source, min_rho=floor, schedule=shape))
        run = shape.scaled(factor)
        result = {"noise_scale": factor, "sample_rate": sample_rate, "steps": run.steps}
        said = f"noise_scale = {factor!r}: the least factor on {noise_shape} that keeps"
    elif given == {"rate", "steps"} and sample_rate is not None and steps is not None:
        sigma = _up_six(engine.calibrate_noise(source, min_rho=floor, sample_rate=sample_rate, steps=steps))
        run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=sigma, steps=steps)
        result = {"noise_multiplier": sigma, "sample_rate": sample_rate, "steps": steps}
        said = f"noise_multiplier = {sigma!r}: the least that keeps"
    elif given == {"rate", "noise"} and sample_rate is not None and noise_multiplier is not None:
        most = engine.calibrate_steps(source, min_rho=floor, sample_rate=sample_rate, noise_multiplier=noise_multiplier)
        steps = _validate.MOST_STEPS if most is None else min(most, _validate.MOST_STEPS)
        run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
        result = {"steps": steps, "sample_rate": sample_rate, "noise_multiplier": noise_multiplier}
        said = f"steps = {steps}: {'so many keep' if steps == _validate.MOST_STEPS else 'the most that keep'}"
    elif given == {"noise", "steps"} and noise_multiplier is not None and steps is not None:
        rate = engine.calibrate_sample_rate(source, min_rho=floor, noise_multiplier=noise_multiplier, steps=steps)
        run = Schedule.constant(sample_rate=rate, noise_multiplier=noise_multiplier, steps=steps)
        result = {"sample_rate": rate, "noise_multiplier": noise_multiplier, "steps": steps}
        said = f"sample_rate = {rate!r}: the largest that keeps"
    elif records is not None and noise_multiplier is not None and len(given) == 3 and given & {"steps", "epochs"}:
        size = engine.calibrate_batch_size(
            source, min_rho=floor, records=records, noise_multiplier=noise_multiplier, epochs=epochs, steps=steps
        )
        per_epoch = steps_per_epoch(-(-records // size))
        steps = _checked_steps(per_epoch * epochs if steps is None and epochs is not None else steps or 0)
        run = Schedule.constant(sample_rate=1 / per_epoch, noise_multiplier=noise_multiplier, steps=steps)
        result = {
            "batch_size": size,
            "records": records,
            "sample_rate": 1 / per_epoch,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
        }
        said = f"batch_size = {size}: the largest that keeps"
    else:
        raise InvalidValueError(
            "Give two of --sample-rate, --noise-multiplier and --steps, to find the third; or --records and "
            "--noise-multiplier with --steps or --epochs, to find the batch size; or --sample-rate and --noise-shape."
        )
    found = source.bound(run.charged_bits)
    epsilon = _epsilon(run, delta, prv=prv)
    if as_json:
        _print_json(result | {"min_rho": min_rho} | _bound_as_dict(found) | _epsilon_as_dict(epsilon))
        return
    typer.echo(
        f"{said} ρ* >= {min_rho:g} for {run.steps:,} steps at sample rate {result['sample_rate']:g} "
        f"({up3(run.charged_bits)} bits)."
    )
    typer.echo(f"In terms of differential privacy: {epsilon.describe()}.")
    typer.echo(found.explain())


@app.command(short_help="ρ* against the step: table, picture, where a floor ends it.")
def plan(
    certificate: Certificate,
    sample_rate: Annotated[float, _RATE],
    noise_multiplier: Annotated[float, _NOISE],
    steps: Annotated[int, _STEPS],
    min_rho: Annotated[float | None, _FLOOR] = None,
    rows: Annotated[int, typer.Option(parser=_whole, metavar="N", help="Rows of the table after step 0.")] = 10,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw ρ* against the step into this file: .png, .svg or .pdf."),
    ] = None,
    delta: Delta = 1e-5,
    prv: Prv = False,
    as_json: AsJson = False,
) -> None:
    """ρ* against the step for a schedule, as a table and a picture, and where a floor would end it.

    With --min-rho, exit code 1 where the floor ends the schedule before its last step.

    \b
    Example:
      reconbound plan mnist.json -q 0.02 -s 1.1 -t 4900 --min-rho 0.8 --plot plan.png
    """  # noqa: D301 - \b keeps the lines of the example
    import numpy as np

    from opacus_reconbound.engine import forecast
    from opacus_reconbound.leakage import Schedule

    source = _load(certificate)
    steps = _checked_steps(steps, minimum=1)
    rows = _validate.integer("--rows", rows, minimum=1, maximum=100_000)
    floor = None if min_rho is None else _checked_floor(min_rho)
    if plot is not None:
        plots = _need("matplotlib", "report")
        plots.check_picture(plot)
    run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=steps)
    ahead = forecast(
        source,
        sample_rate=sample_rate,
        noise_multiplier=noise_multiplier,
        steps=steps,
        min_rho=floor,
        delta=delta,
        prv=prv,
    )
    at = sorted({int(step) for step in np.linspace(0, steps, rows + 1).round()} | {ahead.last_step or 0})
    bits = run.charged_bits_at(at).tolist()
    table = [
        {"step": step, "leakage_bits": b, "rho_star": source.bound(b).rho} for step, b in zip(at, bits, strict=True)
    ]
    if plot is not None:
        fine = np.unique(np.linspace(0, steps, 400).round().astype(int))
        fine_bits = run.charged_bits_at(fine).tolist()
        plots.plot_plan(
            plot,
            steps=fine.tolist(),
            rho=[source.bound(b).rho for b in fine_bits],
            leakage_bits=fine_bits,
            min_rho=floor,
            last_step=ahead.last_step,
        )
    met = ahead.last_step is None
    if as_json:
        content = {"rows": table, "last_step": ahead.last_step, "min_rho": floor, "forecast": ahead.describe()}
        last = None if ahead.last_epsilon is None else ahead.last_epsilon.rdp
        content |= _epsilon_as_dict(ahead.epsilon) | {"last_epsilon": last}
        _print_json(content | ({} if floor is None else {"met": met}))
    else:
        cells = [("step", "bits", "ρ*")]
        cells += [(f"{row['step']:,}", up3(row["leakage_bits"]), down3(row["rho_star"])) for row in table]
        widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
        for index, cell in enumerate(cells):
            last_kept = index > 0 and table[index - 1]["step"] == ahead.last_step
            line = "  ".join(text.rjust(width) for text, width in zip(cell, widths, strict=True))
            typer.echo(f"{line}{'  <- last step that keeps the floor' if last_kept else ''}")
        typer.echo(ahead.describe())
        if plot is not None:
            typer.echo(f"Wrote {plot}.")
    if not met:
        raise typer.Exit(1)


@app.command(short_help="γ, ε and ρ* of a published or finished run.")
def audit(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN",
            show_default=False,
            help="A description (.yaml, .json), a history [[σ, q, steps], ...] (.json), or a checkpoint that holds an "
            "accountant's state. Or describe the run by options.",
        ),
    ] = None,
    records: Annotated[int | None, typer.Option(parser=_whole, metavar="N", help="Number of training records.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(parser=_whole, metavar="N", help="Expected records in a step; needs --records.")
    ] = None,
    sample_rate: Annotated[float | None, _RATE] = None,
    noise_multiplier: Annotated[float | None, _NOISE] = None,
    target_epsilon: Annotated[
        float | None,
        typer.Option(
            parser=_number,
            metavar="EPS",
            help="The ε that the noise was chosen for, where the noise is not known; needs --delta and --accountant.",
        ),
    ] = None,
    accountant: Annotated[
        str | None, typer.Option(metavar="KIND", help="What chose the noise for --target-epsilon: rdp or prv.")
    ] = None,
    steps: Annotated[int | None, _STEPS] = None,
    epochs: Annotated[
        float | None, typer.Option(parser=_number, metavar="N", help="Passes over the records, instead of --steps.")
    ] = None,
    phase: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE,...",
            show_default=False,
            help="One phase of several, as in batch_size=4096,noise_multiplier=10,steps=725. Repeatable.",
        ),
    ] = None,
    delta: Annotated[
        float | None,
        typer.Option(
            parser=_number, metavar="DELTA", show_default=False, help="δ of ε, in (0, 1).  [default: RUN's, or 1e-05]"
        ),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="CERT", show_default=False, help="Show ρ* by this certificate.")
    ] = None,
    min_rho: Annotated[float | None, _FLOOR] = None,
    as_json: AsJson = False,
) -> None:
    """What a published or finished run guarantees: γ, ε by RDP and by PRV, and with a certificate ρ*.

    With --min-rho, exit code 1 where the floor is not met.

    \b
    Examples:
      reconbound audit de-2022-cifar10.yaml
      reconbound audit --records 45000 --batch-size 4096 --noise-multiplier 10 --steps 725 --delta 1e-5
      reconbound audit --records 45000 --batch-size 4096 --target-epsilon 1 --accountant rdp --steps 725 --delta 1e-5
      reconbound audit checkpoint.pt --certificate mnist.json --min-rho 0.7
    """  # noqa: D301 - \b keeps the lines of the example
    from opacus_reconbound.audit import AuditedRun

    if min_rho is not None and certificate is None:
        raise InvalidValueError("--min-rho needs --certificate CERT.")
    floor = None if min_rho is None else _checked_floor(min_rho)
    options: dict[str, Any] = {
        "records": records,
        "batch_size": batch_size,
        "sample_rate": sample_rate,
        "noise_multiplier": noise_multiplier,
        "target_epsilon": target_epsilon,
        "accountant": accountant,
        "steps": steps,
        "epochs": epochs,
        "phase": [_pairs(text) for text in phase] if phase else None,
    }
    given = [key.replace("_", "-") for key, value in options.items() if value is not None]
    if run is None and not given:
        raise InvalidValueError("No run was given: name RUN, a file, or describe the run by options.")
    if run is not None and given:
        raise InvalidValueError(f"RUN says what ran, and so does --{given[0]}. Give one of the two.")
    source = None if certificate is None else _load(certificate)
    options["phases"] = options.pop("phase")
    audited = AuditedRun.from_description(options, delta=delta) if run is None else AuditedRun.load(run, delta=delta)
    found = audited.audit(source)
    met = floor is None or found.bound is None or found.bound.rho >= floor
    if as_json:
        result: dict[str, Any] = {
            "name": audited.name,
            "source": audited.source,
            "schedule": [
                {"sample_rate": r.sample_rate, "noise_multiplier": r.noise_multiplier, "steps": r.steps}
                for r in audited.schedule
            ],
            "steps": audited.schedule.steps,
            "leakage_bits": found.leakage_bits,
            "charged_bits": found.charged_bits,
            "delta": audited.delta,
            "epsilon_rdp": found.epsilon_rdp,
            "epsilon_prv": found.epsilon_prv,
            "bound": None if found.bound is None else _bound_as_dict(found.bound),
            "derived": audited.derived,
            "assumptions": found.assumptions,
        }
        _print_json(result | ({} if floor is None else {"min_rho": floor, "met": met}))
    else:
        typer.echo(found.explain())
        typer.echo("It assumes:")
        for assumption in found.assumptions:
            typer.echo(f"  - {assumption}")
        if floor is not None and found.bound is not None:
            typer.echo(f"The floor of {floor:g} is {'met' if met else 'NOT met'}: ρ* = {down3(found.bound.rho)}.")
    if not met:
        raise typer.Exit(1)


@app.command(short_help="Other published bounds beside ρ*, for one schedule.")
def compare(
    certificate: Certificate,
    sample_rate: Annotated[float, _RATE],
    noise_multiplier: Annotated[float, _NOISE],
    steps: Annotated[int, _STEPS],
    prior_success: Annotated[
        float | None,
        typer.Option(
            parser=_number,
            metavar="KAPPA",
            help="κ, with which the best guess without the model comes as near as is meant: adds reconstruction "
            "robustness.",
        ),
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            show_default=False,
            help="Estimate κ from these records of the certificate's source (pixels only), uncertified; needs "
            "--within. Repeatable.",
        ),
    ] = None,
    within: Annotated[
        float | None,
        typer.Option(parser=_number, metavar="RMSE", help="The distance meant, for --held-out: RMSE per coordinate."),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            parser=_whole, metavar="N", help="Values that a record can take: adds Fano's bound on exact recovery."
        ),
    ] = None,
    entropy_bits: Annotated[
        float | None,
        typer.Option(parser=_number, metavar="BITS", help="Entropy of the record, for that.  [default: log2 N]"),
    ] = None,
    jacobian: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy",
            help="Derivative of the clipped gradient over the clipping norm by the record, gradient × record: adds "
            "Fisher information and van Trees.",
        ),
    ] = None,
    prv: Annotated[
        bool, typer.Option("--prv", help="Tighten reconstruction robustness by the PRV accountant, in seconds.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the bounds into this file: .png, .svg or .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """ρ* and other published bounds on reconstruction for one schedule, each with what it assumes.

    \b
    Example:
      reconbound compare mnist.json -q 0.02 -s 1.1 -t 4900 --prior-success 0.01 --candidates 1000
    """  # noqa: D301 - \b keeps the lines of the example
    from opacus_reconbound.comparisons import compare as all_bounds
    from opacus_reconbound.leakage import Schedule

    source = _load(certificate)
    run = Schedule.constant(sample_rate=sample_rate, noise_multiplier=noise_multiplier, steps=_checked_steps(steps))
    if plot is not None:
        plots = _need("matplotlib", "report")
        plots.check_picture(plot)
    if held_out:
        if prior_success is not None:
            raise InvalidValueError("Give either --prior-success or --held-out, from which it is estimated, not both.")
        prior_success = _estimated_prior(source, held_out, within)
    elif within is not None:
        raise InvalidValueError("--within goes with --held-out: the records from which κ is estimated.")
    rows = all_bounds(
        run,
        source,
        prior_success=prior_success,
        candidates=candidates,
        entropy_bits=entropy_bits,
        jacobian=None if jacobian is None else _matrix(jacobian),
        prv=prv,
    )
    if plot is not None:
        plots.plot_comparisons(
            plot,
            errors=[(row.name, row.ratio, row.bounds, row.attacks) for row in rows if row.ratio is not None],
            successes=[(row.name, row.value) for row in rows if row.bounds == "largest success"],
        )
    if as_json:
        _print_json({"leakage_bits": run.charged_bits, "comparisons": [vars(row) for row in rows]})
        return
    cells = [("bound", "ratio", "value", "of", "attacks", "confidence")]
    for row in rows:
        shown = up3 if row.bounds != "least error" else down3
        confidence = "none" if row.confidence is None else f"{row.confidence:g}"
        ratio = "" if row.ratio is None else _shown(row.ratio, shown)
        cells.append((row.name, ratio, _shown(row.value, shown), row.bounds, row.attacks, confidence))
    _print_table(cells)
    typer.echo(
        f"At {up3(run.charged_bits)} bits. Errors are RMSE per coordinate, in data units; the ratio is to the best "
        "guess without the model, whose own ratio is 1. Successes are probabilities."
    )
    bounds = [set(row.assumptions) for row in rows if row.bounds != "attained error"]
    shared = set.intersection(*bounds) if len(bounds) > 1 else set()
    for assumption in sorted(shared):
        typer.echo(f"All bounds assume: {assumption}. Besides:")
    for row in rows:
        rest = "".join(f"; {assumption}" for assumption in row.assumptions if assumption not in shared)
        typer.echo(f"  - {row.name}: {row.source}; prior: {row.prior}{rest}.")
    if plot is not None:
        typer.echo(f"Wrote {plot}.")


@app.command(short_help="What all runs on the same records reveal together.")
def ledger(
    path: Annotated[Path, typer.Argument(metavar="LEDGER", help="A file that accountants were charged to.")],
    certificate: Annotated[
        Path | None, typer.Option(metavar="CERT", show_default=False, help="Show ρ* of the total by this certificate.")
    ] = None,
    min_rho: Annotated[float | None, _FLOOR] = None,
    as_json: AsJson = False,
) -> None:
    """All runs on a ledger, and their total. With --min-rho, exit code 1 where the total does not keep the floor.

    \b
    Example:
      reconbound ledger digits.jsonl --certificate mnist.json --min-rho 0.7
    """  # noqa: D301 - \b keeps the lines of the example
    from opacus_reconbound.leakage.ledger import Ledger

    if min_rho is not None and certificate is None:
        raise InvalidValueError("--min-rho needs --certificate CERT.")
    floor = None if min_rho is None else _checked_floor(min_rho)
    source = None if certificate is None else _load(certificate)
    book = Ledger(path)
    runs, total, reserved, budget = book.runs, book.total_bits, book.reserved_bits, book.budget_bits
    found = None if source is None else source.bound(total)
    met = floor is None or found is None or found.rho >= floor
    if as_json:
        listed = [
            {
                "run": run.run,
                "sessions": run.sessions,
                "steps": run.schedule.steps,
                "charged_bits": run.charged_bits,
                "reserved_bits": run.reserved_bits,
                "last_change": run.last_change,
            }
            for run in runs
        ]
        content = {"fingerprint": book.fingerprint, "runs": listed, "budget_bits": budget, "reserved_bits": reserved}
        result = content | ({"leakage_bits": total} if found is None else _bound_as_dict(found))
        _print_json(result | ({} if floor is None else {"min_rho": floor, "met": met}))
    else:
        typer.echo(f"Records {book.fingerprint[:32]}: {len(runs)} run{'s' * (len(runs) != 1)}.")
        _print_table(
            [("run", "sessions", "steps", "bits", "of these reserved")]
            + [
                (r.run, str(r.sessions), f"{r.schedule.steps:,}", up3(r.charged_bits), up3(r.reserved_bits))
                for r in runs
            ]
            + [("total", "", f"{sum(r.schedule.steps for r in runs):,}", up3(total), up3(reserved))]
        )
        if budget is not None:
            typer.echo(f"All runs together may charge {up3(budget)} bits.")
        if found is not None:
            typer.echo(found.explain())
        if floor is not None and found is not None:
            typer.echo(f"The floor of {floor:g} is {'met' if met else 'NOT met'}: ρ* = {down3(found.rho)}.")
    if not met:
        raise typer.Exit(1)


@app.command(short_help="Train on real digits until the floor is reached.")
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for certificate, log and picture.")
    ] = Path("reconbound-demo"),
    seed: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Seed of the split, the network and the noise.")
    ] = 0,
) -> None:
    """Train privately on real digits until the reconstruction floor is reached; under two minutes.

    Nothing is downloaded: the 5,000 MNIST digits come inside a package. It needs the extra `demo`.
    """
    from opacus_reconbound.demo import run_demo

    run_demo(output, seed=seed)


def _version(show: bool) -> None:
    if show:
        from opacus_reconbound.certificates.certify import library_version

        typer.echo(library_version())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; every error becomes one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Greek letters gets escapes, not a traceback
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(args=arguments, prog_name="reconbound", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        cause = end.__context__ if isinstance(end, SystemExit) else end
        if isinstance(cause, BrokenPipeError):  # the reader, such as `head`, has seen enough; typer exits with 1 then
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = 141
        else:  # Lightning's way out of an interrupted training
            code = 130
    except (ReconboundError, OSError, MemoryError) as error:
        code = _fail(str(error) or type(error).__name__)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a usage error of the command line library
            raise
        path = getattr(getattr(error, "ctx", None), "command_path", "reconbound")
        code = _fail(f"{error.format_message().rstrip('.')}. See `{path} --help`.")
    if code == 130:
        typer.echo("Interrupted.", err=True)
    sys.exit(code or 0)


def _fail(message: str) -> int:
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    return 2


# -- helpers ---------------------------------------------------------------------------------------------------------


def _load(path: Path) -> SourceCertificate:
    from opacus_reconbound.certificates.certificate import SourceCertificate

    return SourceCertificate.load(path)


def _checked_floor(min_rho: float) -> float:
    if not 0.0 < min_rho <= 1.0:
        raise InvalidValueError(f"Expected --min-rho in (0, 1]. Found {min_rho!r}.")
    return min_rho


def _checked_steps(steps: int, minimum: int = 0) -> int:
    return _validate.steps("--steps", steps, minimum=minimum)


def _pairs(text: str) -> dict[str, str]:
    """The mapping that ``key=value,key=value`` writes."""
    pairs = [part.partition("=") for part in text.split(",")]
    keys = [key.strip() for key, _, _ in pairs]
    if not all(equals and key for key, (_, equals, _) in zip(keys, pairs, strict=True)) or len(set(keys)) < len(keys):
        raise InvalidValueError(
            "Expected --phase KEY=VALUE,..., each key once, as in batch_size=4096,noise_multiplier=10,steps=725. "
            f"Found {text!r}."
        )
    return {key: value.strip() for key, (_, _, value) in zip(keys, pairs, strict=True)}


def _estimated_prior(source: SourceCertificate, held_out: Sequence[str], within: float | None) -> float:
    """κ of some records within a distance per coordinate, for a certificate of pixels."""
    import numpy as np

    from opacus_reconbound._files import open_records
    from opacus_reconbound.certificates.records import SelectedRecords
    from opacus_reconbound.comparisons import prior_success

    described = source.representation
    if within is None:
        raise InvalidValueError("--held-out needs --within, the distance that is meant.")
    if described.name != "pixels":
        raise InvalidValueError(
            f"--held-out estimates κ in pixels, but the certificate is about {described.name}. Give --prior-success; "
            "opacus_reconbound.comparisons.prior_success estimates it from vectors."
        )
    records = SelectedRecords(open_records(held_out))
    if math.prod(records.record_shape) != described.dimension:
        raise DataError(
            f"The held-out records have shape {records.record_shape}, those of the certificate "
            f"{described.record_shape}."
        )
    if len(records) > _MOST_HELD_OUT:
        spread = np.linspace(0, len(records) - 1, _MOST_HELD_OUT).round().astype(np.intp)
        records = SelectedRecords(open_records(held_out), spread)
    values = np.concatenate([np.asarray(chunk) for chunk in records.chunks(1024)])
    return prior_success(values, _validate.positive("--within", within) * math.sqrt(described.dimension))


def _matrix(path: Path) -> Any:
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} holds no array of numbers. Save the Jacobian with numpy.save. {error}") from error
    if not isinstance(found, np.ndarray):
        raise DataError(f"{path} holds several arrays. Save the Jacobian alone, with numpy.save.")
    return found


def _need(package: str, extra: str) -> Any:
    try:
        __import__(package)
    except ImportError as error:
        raise InvalidValueError(
            f"This needs {package}. Install it with: pip install 'opacus-reconbound[{extra}]'"
        ) from error
    from opacus_reconbound.report import plots

    return plots


def _epsilon(schedule: Schedule, delta: float, *, prv: bool) -> Epsilon:
    from opacus_reconbound.engine import epsilon_of

    history = [(run.noise_multiplier, run.sample_rate, run.steps) for run in schedule]
    return epsilon_of(history, delta, prv=prv)


def _epsilon_as_dict(epsilon: Epsilon | None) -> dict[str, Any]:
    if epsilon is None:
        return {}
    prv = {} if epsilon.prv is None else {"epsilon_prv": epsilon.prv}
    return {"epsilon": epsilon.rdp} | prv | {"delta": epsilon.delta}


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


def _print_table(rows: Sequence[tuple[str, ...]]) -> None:
    """Rows of cells, the first column to the left and the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        typer.echo("  ".join(cells).rstrip())


def _print_json(value: Any) -> None:
    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(entry) for key, entry in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(entry) for entry in item]
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)  # JSON has no infinity
        return item

    letters = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(plain(value), indent=1, ensure_ascii=not letters, allow_nan=False))


def _shown(value: float, shown: Callable[[float], str]) -> str:
    return shown(value) if math.isfinite(value) else "inf"


def _up_six(value: float) -> float:
    """Six decimals, upwards, to be printed in full: what is copied from here keeps the floor too."""
    return max(value, math.ceil(value * 1e6) / 1e6)


if __name__ == "__main__":
    main()
