"""The records of training against what the certificate is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from spaces import Space
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound._lightning.records import declared_range
from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import DataError, InvalidValueError
from opacus_reconbound.representations import Crop, Downsample, Encoder, Pixels, Vectors

IMAGES = TensorDataset(torch.rand(64, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)


def fit(space: Space, certificate: SourceCertificate, tmp_path: Any, record: Any, *, data: Any = IMAGES) -> Any:
    model = space.module()
    model.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    callback = space.callback(certificate, record=record)
    loader = space.ours.PrivateDataModule(DataLoader(data, batch_size=8)).train_dataloader()
    space.trainer(tmp_path, callback, max_epochs=1).fit(model, loader)
    return callback


def about(certificate: SourceCertificate, representation: Any, shape: tuple[int, ...]) -> SourceCertificate:
    return replace(certificate, representation=representation.describe(shape))


@pytest.mark.parametrize(
    "representation", [Pixels((0, 255)), Crop(0, 0, 2, 2) | Pixels((0, 255)), Downsample(2, value_range=(0, 255))]
)
def test_records_that_fit(space: Space, certificate: SourceCertificate, tmp_path: Any, representation: Any) -> None:
    made = about(certificate, representation, (4, 4))
    callback = fit(space, made, tmp_path, lambda batch: (batch[0] * 255).squeeze(1))
    checked, unchecked = callback.checks
    assert "have the certified shape (4, 4), and values from" in checked
    assert "within the declared (0, 255)" in checked
    assert "Later batches were not looked at" in unchecked
    assert len(callback.accountant) == 8


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda batch: batch[0], r"shape \(1, 4, 4\), but the certificate is about records of shape \(4, 4\)"),
        (lambda batch: batch[0].squeeze(1), r"floating-point numbers in \[0, 1\].*declares \(0, 255\)"),
        (lambda batch: 300 * batch[0].squeeze(1), "outside the declared value_range"),
        (lambda batch: (batch[0].squeeze(1) - 0.5) * 255, "values from -1"),
        (lambda batch: batch[0].squeeze(1) / 0, "no finite real numbers"),
        (lambda batch: "x", "It returned str"),
    ],
)
def test_records_that_do_not_fit(
    space: Space, certificate: SourceCertificate, tmp_path: Any, record: Any, message: str
) -> None:
    made = about(certificate, Pixels((0, 255)), (4, 4))
    with pytest.raises(DataError, match=message):
        fit(space, made, tmp_path, record)


def test_what_could_not_be_checked_is_said(
    space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture
) -> None:
    encoder = Encoder(torch.nn.Flatten().eval(), clip_radius=100.0, provenance="none")
    callback = fit(space, about(certificate, encoder, (1, 4, 4)), tmp_path, lambda batch: batch[0])
    assert "could not be checked: the certificate declares no range" in callback.checks[1]
    model, callback = space.module(), space.ours.ReconstructionBoundCallback(certificate)
    space.trainer(tmp_path, callback, max_epochs=1).fit(model)
    assert callback.checks[0].startswith("The training records were not compared with the certificate")
    assert callback.checks[0] in capsys.readouterr().out


def test_an_empty_first_batch_waits_for_the_next(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    calls: list[int] = []

    def record(batch: Any) -> Any:
        calls.append(len(batch[0]))
        return batch[0][:0] if len(calls) == 1 else batch[0]

    callback = fit(space, about(certificate, Pixels((0, 1)), (1, 4, 4)), tmp_path, record)
    assert len(calls) >= 2
    assert not any(calls[1:-1])  # it stops with the first batch that has records
    assert calls[-1] > 0
    assert "certified shape" in callback.checks[0]


def test_declared_ranges() -> None:
    assert declared_range(Pixels((0, 3)).describe((2,))) == (0.0, 3.0)
    assert declared_range((Crop(0, 0, 2, 2) | Pixels((0, 16))).describe((4, 4))) == (0.0, 16.0)
    assert declared_range(Vectors(clip_radius=3.0).describe((5,))) is None


def test_record_has_to_be_a_function(space: Space, certificate: SourceCertificate) -> None:
    with pytest.raises(InvalidValueError, match="function of a batch"):
        space.callback(certificate, record=0)
