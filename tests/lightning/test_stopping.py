"""What happens before a step that would breach the floor, whatever else the trainer is told."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from spaces import BITS, NOISE, RATE, Space, floor_after

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.errors import InvalidValueError, ReconstructionBudgetExceeded


@pytest.mark.parametrize("manual", [False, True])
def test_raise(space: Space, certificate: SourceCertificate, tmp_path: Any, manual: bool) -> None:
    model = space.module(manual)
    callback = space.callback(certificate, floor_after(certificate, 5.5), on_breach="raise")
    trainer = space.trainer(tmp_path, callback, min_epochs=2)
    weights: list[torch.Tensor] = []
    model.on_train_batch_end = lambda *_: weights.append(model.net.weight.detach().clone())
    with pytest.raises(ReconstructionBudgetExceeded, match="above the budget"):
        trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == 5
    assert torch.equal(weights[-1], model.net.weight)
    assert trainer.state.status.value == "interrupted"
    assert callback.stopping_reason is None
    assert "the next step will raise an error" in callback.forecast.describe(on_breach="raise")
    # the budget stays armed
    with pytest.raises(ReconstructionBudgetExceeded):
        space.trainer(tmp_path, space.callback(certificate, callback.min_rho, on_breach="raise")).fit(model)
    assert model.updates == 5


def test_raise_has_nothing_to_raise_where_the_end_comes_first(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model = space.module()
    callback = space.callback(certificate, floor_after(certificate, 8.5), on_breach="raise")
    space.trainer(tmp_path, callback, max_epochs=1).fit(model)
    assert model.updates == 8


def test_warn(space: Space, certificate: SourceCertificate, tmp_path: Any, capsys: pytest.CaptureFixture) -> None:
    model = space.module()
    callback = space.ours.ReconstructionBoundCallback(certificate, floor_after(certificate, 5.5), on_breach="warn")
    with pytest.warns(UserWarning, match=r"is breached since step 6: ρ\* is 0\.\d{3}") as caught:
        space.trainer(tmp_path, callback).fit(model)
    assert sum("is breached" in str(warning.message) for warning in caught) == 1
    assert model.updates == 24
    assert callback.accountant.budget_bits is None
    assert callback.bound.rho < callback.min_rho
    assert re.search(r"reached at step 5 \(ε <= .*\), and training will go on with a warning", capsys.readouterr().out)


def test_warn_leaves_a_budget_that_is_armed_already(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model = space.module()
    model.engine.accountant.budget_bits = 2.5 * BITS
    callback = space.callback(certificate, floor_after(certificate, 5.5), on_breach="warn")
    with pytest.raises(ReconstructionBudgetExceeded):
        space.trainer(tmp_path, callback).fit(model)
    assert model.updates == 2


def test_what_is_no_choice(space: Space, certificate: SourceCertificate) -> None:
    with pytest.raises(InvalidValueError, match="Found 'halt'"):
        space.callback(certificate, on_breach="halt")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_steps": 12, "min_epochs": 2}, 12),
        ({"max_steps": 12, "min_epochs": 3, "max_epochs": 9}, 12),
        ({"max_steps": 20, "min_steps": 18}, 17),
        ({"max_epochs": -1, "min_steps": 40}, 17),
        ({"max_epochs": 5, "limit_train_batches": 2}, 10),
        ({"max_epochs": 50, "limit_train_batches": 3, "min_epochs": 40}, 17),
        ({"max_epochs": 50, "check_val_every_n_epoch": 2}, 17),
        ({"max_epochs": 50, "val_check_interval": 3}, 17),
        ({"max_epochs": 50, "min_epochs": 9, "min_steps": 99}, 17),
    ],
)
def test_mixes_of_limits(
    space: Space, certificate: SourceCertificate, tmp_path: Any, options: dict, expected: int
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 17.5))
    trainer = space.trainer(tmp_path, callback, **options)
    trainer.fit(model)
    assert model.updates == len(model.engine.accountant) == trainer.global_step == expected
    assert trainer.state.status.value == "finished"
    assert callback.stopping_reason == (None if expected < 17 else "the next step would breach the floor")
    planned = options.get("max_steps", 8 * options.get("max_epochs", 0))
    if "limit_train_batches" in options:
        planned = options["max_epochs"] * options["limit_train_batches"]
    assert callback.forecast.steps == (None if planned < 0 else planned)
    assert callback.forecast.last_step == (None if 0 <= planned <= 17 else 17)


def test_minima_are_restored_after_an_exception_too(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    model.on_validation_end = lambda: 1 / 0
    trainer = space.trainer(tmp_path, callback, min_epochs=2, min_steps=20)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model)
    assert (trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps) == (2, 20)
    assert model.updates == 5


def test_a_second_fit_of_one_trainer_says_its_own_reason(
    space: Space, certificate: SourceCertificate, tmp_path: Any
) -> None:
    model, callback = space.module(), space.callback(certificate, floor_after(certificate, 5.5))
    trainer = space.trainer(tmp_path, callback, min_epochs=1)
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 9
    trainer.fit(model)
    assert model.updates == 5
    assert callback.stopping_reason == "the leakage budget was spent before training"


def test_beside_early_stopping(space: Space, certificate: SourceCertificate, tmp_path: Any) -> None:
    """Whichever comes first stops, and only the callback's own stop is its own."""
    early = importlib.import_module(f"{space.L.__name__}.callbacks").EarlyStopping
    for patience, steps in ((1, 16), (9, 20)):
        model, callback = space.module(), space.callback(certificate, floor_after(certificate, 20.5))
        model.validation_step = lambda batch, batch_idx, model=model: model.log("val", 1.0)
        stopper = early("val", patience=patience)
        space.trainer(tmp_path, stopper, callback, max_epochs=9).fit(model)
        assert model.updates == len(model.engine.accountant) == steps
        assert (callback.stopping_reason is None) == (patience == 1)
        assert callback.accountant.history == [(NOISE, RATE, steps)]
