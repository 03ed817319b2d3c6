"""Real Opacus engines, small enough to train in milliseconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MODES: dict[str, dict[str, Any]] = {
    "flat": {},
    "ghost": {"grad_sample_mode": "ghost"},
    "functorch": {"grad_sample_mode": "functorch"},
    "per_layer": {"clipping": "per_layer", "max_grad_norm": [1.0] * 4},
}


@dataclass
class Training:
    """A private model, its optimizer, loader and criterion."""

    engine: PrivacyEngine
    module: Any
    optimizer: Any
    loader: Any
    criterion: Any
    noise: torch.Generator = field(default_factory=torch.Generator)

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.module(x), y).backward()

    def epoch(self, loader: Any = None) -> None:
        for x, y in self.loader if loader is None else loader:
            self.backward(x, y)
            self.optimizer.step()


def make_training(
    accountant: str,
    *,
    engine: PrivacyEngine | None = None,
    epsilon: float | None = None,
    batch: int = 20,
    workers: int = 0,
    **options: Any,
) -> Training:
    torch.manual_seed(0)
    records = TensorDataset(torch.randn(100, 5), torch.randint(0, 3, (100,)))
    module = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    noise = torch.Generator().manual_seed(1)
    criterion = nn.CrossEntropyLoss()
    engine = engine or PrivacyEngine(accountant=accountant)
    arguments = {
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "data_loader": DataLoader(records, batch_size=batch, num_workers=workers),
        "max_grad_norm": 1.0,
        "criterion": criterion,
        "noise_generator": noise,
        **options,
    }
    if epsilon is None:
        made = engine.make_private(**{"noise_multiplier": 1.0, **arguments})
    else:
        made = engine.make_private_with_epsilon(target_epsilon=epsilon, target_delta=1e-5, epochs=3, **arguments)
    module, optimizer, *middle, loader = made
    return Training(engine, module, optimizer, loader, middle[0] if middle else criterion, noise)
