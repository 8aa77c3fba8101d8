"""A training script that torchrun starts again after a rank was killed: it goes on from its newest checkpoint.

torchrun ... -m tests.distributed.restarted FOLDER
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import protrain

STEPS, KILLED_AT = 4, 2


def main(folder: Path) -> None:
    """Train, and write what the weights are in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    batches = torch.randn(STEPS, 2, 8, 16)[:, rank]
    model, wrapped = protrain.wrap(
        model,
        optimizer,
        example_batch=(batches[0],),
        device="cpu",
        device_memory="64MiB",
        host_memory="1GiB",
        progress=False,
    )
    save = folder / "save"
    begin = KILLED_AT if attempt == "1" else 0
    if begin:
        protrain.load_checkpoint(save, model, wrapped)
    for step in range(begin, STEPS):
        if step == KILLED_AT and attempt == "0" and "killed" in sys.argv:
            protrain.save_checkpoint(save, model, wrapped)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        model(batches[step]).square().mean().backward()
        wrapped.step()
        wrapped.zero_grad()
    values = model.state_dict()
    if rank == 0:
        torch.save(values, folder / "weights.pt")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(60)  # long before the test gives up
    main(Path(sys.argv[1]))
