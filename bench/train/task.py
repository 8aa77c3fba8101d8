"""What every contestant gets: model, batch, steps, tokens and hyperparameters."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bench.train.contestants import Contestant
from protrain.common.records import Record
from protrain.common.tables import parse_memory

BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
_SKIPPED = {"site-packages", "test", "tests", "idlelib"}  # folders of Python's library


@dataclass(frozen=True, kw_only=True)
class Task(Record):
    """One training, whoever does it."""

    model: str  # of protrain.cli.shapes, or a folder
    layers: int | None  # None: as many as the shape has
    batch: int  # sequences on each GPU
    sequence: int
    accumulation: int = 1  # such batches in a step
    steps: int  # timed
    warm_up: int  # before them
    chunked_loss: bool = False  # ProTrain's, for all or for nobody
    clip_norm: float = 1.0
    learning_rate: float = 1e-4
    device_memory: str | None = None  # of each GPU, for every contestant, cached blocks included
    host_memory: str | None = None  # of the machine, for all GPUs together
    gpus: int = 1  # a process each, with a batch of its own
    lora: str | None = None  # an adapter of peft, as for `protrain plan --lora`; the model itself is frozen
    quantised: str | None = None  # "nf4": the linear layers of the frozen blocks have 4-bit weights
    float8: bool = False  # the linear layers of the blocks multiply in float8

    def __post_init__(self) -> None:
        """Refuse sizes that are none before anything is measured."""
        for name in ("device_memory", "host_memory"):
            if getattr(self, name) is not None:
                parse_memory(getattr(self, name), name=name)

    @property
    def tokens_per_step(self) -> int:
        """On all GPUs together."""
        return self.gpus * self.accumulation * self.batch * self.sequence

    @property
    def label(self) -> str:
        """For file names."""
        model = Path(self.model).name
        depth = "" if self.layers is None else f"-{self.layers}layers"
        within = "" if self.device_memory is None else f"-within-{self.device_memory}"
        gpus = "" if self.gpus == 1 else f"-{self.gpus}gpus"
        adapter = "" if self.lora is None else "-lora"
        several = "" if self.accumulation == 1 else f"x{self.accumulation}"
        precision = f"-{self.quantised}" if self.quantised else "-float8" if self.float8 else ""
        return f"{model}{depth}{adapter}{precision}-{self.batch}x{self.sequence}{several}{within}{gpus}"


@dataclass(frozen=True, kw_only=True)
class Job(Record):
    """What a worker is told."""

    task: Task
    contestant: Contestant
    tokens: str  # file of make_tokens
    planned_by: str | None  # file with the outcome of the ProTrain row that a floor follows
    until: float  # time.time() after which no step is begun


def make_tokens(task: Task, path: Path) -> None:
    """Write int64 token ids: windows of Python's own sources, as bytes.

    Their shape is [warm_up + steps, gpus, accumulation x batch, sequence].

    Text and not noise or zeros, because the GPU draws less power, and so runs faster, on data with fewer bits set.
    """
    text = python_sources()
    size = {"batch": task.accumulation * task.batch, "sequence": task.sequence}
    numbers = range((task.warm_up + task.steps) * task.gpus)
    batches = [windows(text, seed=number, **size) for number in numbers]
    torch.save(torch.stack(batches).unflatten(0, (-1, task.gpus)), path)


def python_sources() -> NDArray[np.uint8]:
    """The bytes of Python's library without its tests, one file after another."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(library.rglob("*.py")) if _SKIPPED.isdisjoint(file.relative_to(library).parts)]
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def windows(text: NDArray[np.uint8], *, seed: int, batch: int, sequence: int) -> torch.Tensor:
    """Stretches of ``text`` that follow from ``seed``: (batch, sequence) in int64."""
    starts = np.random.default_rng(seed).integers(len(text) - sequence + 1, size=batch)
    return torch.from_numpy(np.stack([text[start : start + sequence] for start in starts])).long()
