"""A training run that may be killed; run as ``python killed.py NAMESPACE FOLDER NAME [CHECKPOINT]``."""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from spaces import CERTIFICATE, Space, floor_after

from opacus_reconbound.leakage.ledger import Ledger

NAMESPACE, NAME = sys.argv[1], sys.argv[3]
FOLDER = Path(sys.argv[2])


def main() -> None:
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", message="The random generator")
    torch.set_num_threads(1)
    space = Space(
        importlib.import_module(NAMESPACE), importlib.import_module(f"opacus_reconbound.{NAMESPACE.split('.')[0]}")
    )
    path = FOLDER / "ledger.jsonl"
    if not path.exists():
        Ledger(path, fingerprint="records")
    space.L.seed_everything(0)
    model = space.module()

    class Slow(space.L.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            time.sleep(0.03)

        def on_before_optimizer_step(self, trainer: object, *_: object) -> None:
            state = torch.get_rng_state()
            with (FOLDER / f"{NAME}.noise").open("a") as file:  # the noise that this step is about to draw
                file.write(f"{float(torch.randn(1, dtype=torch.float64)):.17g}\n")
            torch.set_rng_state(state)

        def on_train_batch_end(self, *_: object) -> None:
            with (FOLDER / f"{NAME}.steps").open("a") as file:
                file.write("x\n")

    callback = space.callback(CERTIFICATE, floor_after(CERTIFICATE, 38.5), ledger=path, run="a")
    checkpoints = importlib.import_module(f"{NAMESPACE}.callbacks").ModelCheckpoint(
        FOLDER, filename="{step}", every_n_train_steps=5, save_top_k=-1
    )
    # the ledger reserves steps in advance: few here, so that something is left for the second run
    reserve = model.engine.accountant.use_ledger
    model.engine.accountant.use_ledger = lambda ledger, run: reserve(ledger, run=run, reserve_steps=8)
    trainer = space.trainer(FOLDER, callback, checkpoints, Slow(), max_epochs=50, enable_checkpointing=True)
    if len(sys.argv) > 4:
        trainer.fit(model, ckpt_path=sys.argv[4], weights_only=True)
    else:
        trainer.fit(model)
    result = {
        "history": model.engine.accountant.history,
        "steps": len(model.engine.accountant),
        "updates": model.updates,
        "total": Ledger(path).total_bits,
        "reason": callback.stopping_reason,
    }
    (FOLDER / f"{NAME}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
