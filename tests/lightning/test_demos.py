"""Lightning's own demo models and data, unmodified, made private by the documented lines."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from opacus import PrivacyEngine
from spaces import Space
from torch.utils.data import DataLoader

from opacus_reconbound.certificates import SourceCertificate
from opacus_reconbound.leakage import step_charge


@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel", "DemoModel"])
def test_a_demo(space: Space, certificate: SourceCertificate, tmp_path: Any, name: str) -> None:
    demos = importlib.import_module(f"{space.L.__name__}.demos.boring_classes")

    class Private(getattr(demos, name)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.engine = PrivacyEngine(accountant="rdp+mi")

        def configure_optimizers(self) -> Any:
            return space.ours.private_optimizer(
                self, super().configure_optimizers(), engine=self.engine, noise_multiplier=1.0, max_grad_norm=1.0
            )

    model, q, data = Private(), 1 / 64, space.ours.PrivateDataModule(demos.BoringDataModule())
    if name == "DemoModel":  # it has no validation, and a view that no empty batch has
        q, data = 1 / 4, space.ours.PrivateDataModule(DataLoader(demos.RandomDataset(32, 64), batch_size=16))
    floor = certificate.bound(step_charge(q, 1.0)[1] * 12.5).rho
    callback = space.callback(certificate, floor, record=lambda batch: batch[:, :4] * 0)
    trainer = space.trainer(tmp_path, callback, max_epochs=9)
    trainer.fit(model, datamodule=data)
    assert model.engine.accountant.history == [(1.0, q, 12)]
    assert trainer.global_step == 12
    assert trainer.state.status.value == "finished"
    assert all(p.isfinite().all() for p in model.parameters())
    assert set(model.state_dict()) == set(getattr(demos, name)().state_dict())
