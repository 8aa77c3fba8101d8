"""All clients by name."""

from __future__ import annotations

from importlib.util import find_spec

from bench.clients import loops, trainers
from bench.clients.run import Client

CLIENTS = {
    "loop": Client(train=loops.loop, packages=(), lines=loops.LOOP_LINES),
    "trainer": Client(train=trainers.trainer, packages=("accelerate", "datasets"), lines=trainers.TRAINER_LINES),
    "sft": Client(train=trainers.sft, packages=("trl", "datasets"), lines=trainers.SFT_LINES),
    "dpo": Client(train=trainers.dpo, packages=("trl", "datasets"), lines=trainers.DPO_LINES, sequences=2),
    "sentences": Client(
        train=trainers.sentences,
        packages=("sentence_transformers", "datasets"),
        lines=trainers.SENTENCES_LINES,
        sequences=2,
    ),
    "lightning": Client(train=loops.lightning_trainer, packages=("lightning",), lines=loops.LIGHTNING_LINES),
    "fabric": Client(train=loops.fabric, packages=("lightning",), lines=loops.FABRIC_LINES),
    "accelerate": Client(train=loops.accelerate, packages=("accelerate",), lines=loops.ACCELERATE_LINES),
}


def parse_clients(text: str) -> tuple[str, ...]:
    """Comma-separated names. ValueError for one that is unknown or named twice."""
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in CLIENTS:
            raise ValueError(f"--clients: there is no {name!r}; known: {', '.join(CLIENTS)}")
        if names.count(name) > 1:
            raise ValueError(f"--clients: {name} is there twice")
    return names


def missing(client: str) -> str:
    """Why ``client`` cannot be started here: a package that is not installed; "" if all are."""
    absent = [package for package in CLIENTS[client].packages if find_spec(package) is None]
    return f"skipped: {absent[0]} is not installed (pip install {absent[0].replace('_', '-')})" if absent else ""
