"""Trains for real, again and again, in processes that are killed; run as a script, in a folder of its own.

Each process resumes from the last whole checkpoint, charges the ledger, announces every step that it has applied, and
writes a checkpoint after every third one. The parent, which never trains, kills it at a random moment and prints one
line of JSON for each: the steps announced so far, and what the ledger and the checkpoint account for.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from engines import make_training

from opacus_reconbound import Ledger

LEDGER, CHECKPOINT = Path("ledger.jsonl"), Path("checkpoint.pt")
RESERVE = 4


def train(announce: int) -> None:
    run = make_training("rdp+mi")
    run.engine.accountant.use_ledger(Ledger(LEDGER), run="restarted", reserve_steps=RESERVE)
    applied = 0
    if CHECKPOINT.exists():
        content = run.engine.load_checkpoint(path=CHECKPOINT, module=run.module, optimizer=run.optimizer)
        applied = content["applied"]
    os.write(announce, b"r")  # ready
    while True:
        for x, y in run.loader:
            run.backward(x, y)
            run.optimizer.step()
            applied += 1
            os.write(announce, b".")
            if applied % 3 == 0:
                new = CHECKPOINT.with_suffix(".new")
                run.engine.save_checkpoint(
                    path=new, module=run.module, optimizer=run.optimizer, checkpoint_dict={"applied": applied}
                )
                new.replace(CHECKPOINT)


def main(attempts: int) -> None:
    Ledger(LEDGER, fingerprint="records")
    announced = 0
    for wait in np.random.default_rng(0).random(attempts).tolist():
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                train(write)
            finally:
                os._exit(1)
        os.close(write)
        assert os.read(read, 1) == b"r"
        time.sleep(0.15 * wait)
        os.kill(child, 9)
        assert os.waitpid(child, 0)[1] == 9
        while piece := os.read(read, 65536):
            announced += piece.count(b".")
        os.close(read)
        content = torch.load(CHECKPOINT, weights_only=False) if CHECKPOINT.exists() else None
        state = None if content is None else content["privacy_accountant_state_dict"]
        saved = [0, 0] if content is None else [content["applied"], sum(steps for _, _, steps in state["history"])]
        print(json.dumps({"announced": announced, "total": Ledger(LEDGER).total_bits, "saved": saved}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
