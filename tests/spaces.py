"""Real Trainers of both namespaces; small enough to train in a fraction of a second."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader, TensorDataset

from opacus_reconbound.certificates import ReplicaDesign, SourceCertificate
from opacus_reconbound.certificates.scale import TraceScale
from opacus_reconbound.certificates.split import SampleSummary
from opacus_reconbound.leakage import step_charge
from opacus_reconbound.representations import Pixels

RATE, NOISE, STEPS_PER_EPOCH = 0.125, 1.0, 8
BITS = step_charge(RATE, NOISE)[1]


class Space:
    def __init__(self, lightning: ModuleType, ours: ModuleType) -> None:
        self.L, self.ours = lightning, ours

    def module(self, manual: bool = False, *, engine: Any = None, **private: Any) -> Any:
        """A module that counts its updates; ``private`` is for ``private_optimizer``."""
        space = self

        class Model(space.L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = torch.nn.Linear(4, 2)
                self.engine = engine or PrivacyEngine(accountant="rdp+mi")
                self.automatic_optimization = not manual
                self.updates = 0
                self.validations = 0

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                x, y = batch
                criterion = getattr(self.optimizers(), "criterion", torch.nn.functional.cross_entropy)
                loss = criterion(self.net(x), y)
                if len(x):
                    self.log("loss", loss.detach())
                if manual:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                    return None
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.validations += 1

            def train_dataloader(self) -> Any:
                return DPDataLoader.from_data_loader(DataLoader(DATA, batch_size=8))

            def val_dataloader(self) -> Any:
                return DataLoader(DATA, batch_size=64)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                made = space.ours.private_optimizer(
                    self, optimizer, engine=self.engine, **{"noise_multiplier": NOISE, "max_grad_norm": 1.0, **private}
                )
                made.original_optimizer.register_step_post_hook(self.count)
                return made

            def count(self, *_: Any) -> None:
                self.updates += 1

        return Model()

    def trainer(self, tmp_path: Any, *callbacks: Any, **kwargs: Any) -> Any:
        options: dict[str, Any] = {
            "max_epochs": 3,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "default_root_dir": tmp_path,
            "callbacks": list(callbacks),
        }
        return self.L.Trainer(**{**options, **kwargs})

    def callback(self, certificate: SourceCertificate, min_rho: float | None = None, **kwargs: Any) -> Any:
        return self.ours.ReconstructionBoundCallback(certificate, min_rho, verbose=False, **kwargs)


DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)


# linear in the leakage: ρ*² = 0.9 − γ nats
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


def floor_after(certificate: SourceCertificate, steps: float) -> float:
    """A floor that ``steps`` steps keep, and ``ceil(steps)`` do not."""
    return certificate.bound(BITS * steps).rho
