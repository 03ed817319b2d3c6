"""S6: logical batches in Lightning, which ends epochs at a loader's length."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.utils.batch_memory_manager import wrap_data_loader
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.certificates import ReplicaDesign, SourceCertificate
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.errors import AccountingError
from opacus_reconbound.lightning import ReconstructionBoundCallback, private_optimizer
from opacus_reconbound.representations import Pixels

CERTIFICATE = SourceCertificate(
    designs=(ReplicaDesign(temperature=1.0, intercept=0.9),),
    trace=TraceScale(scale=1.0, upper=1.1, level=0.05, pairs=10, squared_diameter=4.0),
    representation=Pixels((0, 1)).describe((4,)),
    reference=SampleSummary(n=10, fingerprint="a"),
    estimation=SampleSummary(n=10, fingerprint="b"),
    alpha=0.05,
    alpha_split={"replica": 0.05},
    seed=0,
)


class Model(L.LightningModule):
    """Trains on pieces of logical batches, and lists the records of each noised sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)
        self.engine = PrivacyEngine(accountant="rdp+mi")
        x = torch.cat([torch.arange(60.0)[:, None], torch.randn(60, 3)], dim=1)
        self.loader = DPDataLoader.from_data_loader(DataLoader(TensorDataset(x, torch.arange(60) % 2), batch_size=30))
        self.private: Any = None
        self.entered: list[list[int]] = []
        self.pending: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.private.params[0].summed_grad is None or not self.private._is_last_step_skipped:
            self.pending = []
        self.pending += x[:, 0].int().tolist()
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.engine.accountant) > len(self.entered):
            self.entered.append(self.pending)

    def train_dataloader(self) -> Any:
        if self.private is None:
            return self.loader
        return wrap_data_loader(data_loader=self.loader, max_batch_size=8, optimizer=self.private)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        self.private = private_optimizer(self, optimizer, engine=self.engine, noise_multiplier=1.0, max_grad_norm=1.0)
        self.trainer.fit_loop._combined_loader = None  # have the trainer ask for its loader again
        return self.private


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*The number of training batches")
def test_s6_logical_batches_in_lightning(tmp_path: Any) -> None:
    def trainer(*callbacks: Any) -> Any:
        return L.Trainer(
            max_epochs=12,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
        )

    torch.manual_seed(0)
    model = Model()
    trainer().fit(model)
    assert any(len(records) > len(set(records)) for records in model.entered)  # a record twice in one noised sum
    model = Model()
    with pytest.raises(AccountingError, match="Lightning ends the epoch, inside a logical batch"):
        trainer(ReconstructionBoundCallback(CERTIFICATE, verbose=False)).fit(model)
    assert len(model.engine.accountant) == 0
