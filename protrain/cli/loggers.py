"""`--logger`: the figures of every step for TensorBoard or Weights & Biases, beside metrics.jsonl."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protrain.cli.run_files import TENSORBOARD_FOLDER, WANDB_FILE

Log = Callable[[dict[str, Any]], None]

LOGGERS = ("tensorboard", "wandb")  # each is the name of its package


def logger(name: str | None, folder: Path, *, resumed_step: int, options: dict[str, Any]) -> Log:
    """A function that logs a row of metrics.jsonl to the logger ``name``. Without a name it does nothing.

    A run that goes on from ``resumed_step`` continues its curve there. Its ``options`` are shown beside the curve.
    """
    if name == "tensorboard":
        return _tensorboard(folder, resumed_step)
    if name == "wandb":
        return _wandb(folder, options)
    return lambda row: None


def _tensorboard(folder: Path, resumed_step: int) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier process logged after the save, TensorBoard leaves out.
    writer = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resumed_step + 1)

    def log(row: dict[str, Any]) -> None:
        for name, value in _figures(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()  # a run may be killed at any time

    return log


def _wandb(folder: Path, options: dict[str, Any]) -> Log:
    import wandb

    file = folder / WANDB_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = wandb.init(
        project="protrain",
        name=folder.name,
        id=file.read_text(encoding="utf-8"),
        resume="allow",
        dir=str(folder),
        config=options,
    )

    def log(row: dict[str, Any]) -> None:
        # wandb takes no step twice. Those after the save have the same figures when they run again.
        run.log(dict(_figures(row)), step=row["step"])

    return log


def _figures(row: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in row.items() if name != "step" and value is not None]
