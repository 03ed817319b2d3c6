"""Two gloo processes under a Trainer; run as ``python two_ranks.py NAMESPACE FOLDER``, which starts the second one."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from spaces import CERTIFICATE, DATA, Space, floor_after
from torch.utils.data import DataLoader

from opacus_reconbound.errors import AccountingError

NAMESPACE, FOLDER = sys.argv[1:]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    space = Space(
        importlib.import_module(NAMESPACE), importlib.import_module(f"opacus_reconbound.{NAMESPACE.split('.')[0]}")
    )
    space.L.seed_everything(0)  # the same seed on both ranks, as everyone does
    rank = int(os.environ.get("LOCAL_RANK", 0))
    found: dict[str, object] = {}

    def run(model: object, data: object, callback: object, name: str, **options: object) -> None:
        trainer = space.trainer(
            FOLDER,
            callback,
            **{"strategy": "ddp", "devices": 2, "use_distributed_sampler": False, "max_epochs": 3, **options},
        )
        try:
            trainer.fit(model, datamodule=data)
            said = trainer.state.status.value
        except (AccountingError, TypeError) as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = {
            "said": said,
            "updates": model.updates,
            "steps": len(model.engine.accountant),
            "global_step": trainer.global_step,
            "history": model.engine.accountant.history,
            "weights": [p.detach().cpu().tolist() for p in model.parameters()],
            "sizes": model.sizes,
            "batch": getattr(next(iter(trainer.optimizers), None), "expected_batch_size", None),
        }

    def model(**private: object) -> object:
        made = space.module(**private)
        made.sizes = []
        step = made.training_step

        def training_step(batch: object, batch_idx: int) -> object:
            made.sizes.append(len(batch[0]))
            return step(batch, batch_idx)

        made.training_step = training_step
        return made

    def data(**options: object) -> object:
        return space.ours.PrivateDataModule(
            DataLoader(DATA, batch_size=8), val=DataLoader(DATA, batch_size=64), **options
        )

    floor = floor_after(CERTIFICATE, 11.5)
    run(model(), data(), space.callback(CERTIFICATE, floor), "stops together")
    run(model(), data(generator=torch.Generator().manual_seed(4)), space.callback(CERTIFICATE), "one generator")
    run(model(), None, space.callback(CERTIFICATE), "each from all records")
    run(model(grad_sample_mode="ghost"), data(), space.callback(CERTIFICATE), "ghost")
    run(model(), data(), space.callback(CERTIFICATE), "injected", use_distributed_sampler=True)
    (Path(FOLDER) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
