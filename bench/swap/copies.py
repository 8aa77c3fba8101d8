"""Swapped blocks packed and storage by storage, in steps that take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from bench.swap.training import WARM_UP, Case, Measured, Training, profiled
from protrain.common.records import Record
from protrain.hardware.detection import detect
from protrain.planning import check, evaluate, pack

COPIES = tuple(
    Case(family=family, hidden=2048, layers=8, batch=batch, dropout=dropout)
    for family, dropout in (("gpt2", 0.1), ("llama", 0.0))
    for batch in (1, 16)
)


@dataclass(frozen=True, kw_only=True)
class Way(Record):
    """Blocks swapped in one way. Counts are of one step; 0 on a CPU."""

    packed: bool
    measured: Measured
    copies_down: int
    copies_up: int
    pack_launches: int
    unpack_launches: int
    kernels: int


@dataclass(frozen=True, kw_only=True)
class CopiesRow(Record):
    """Both ways for one model."""

    case: Case
    saved_bytes: int  # by a block
    saved_tensors: int
    saved_bool_bytes: int
    chosen: bool  # whether the runtime model packs these blocks
    same_losses: bool
    ways: tuple[Way, ...]


def measure_copies(case: Case, device: torch.device, *, rounds: int, steps: int) -> CopiesRow:
    """Direct and packed, in turns of some steps."""
    profile, hardware = profiled(case, device), detect(device)
    n_chunks, n_blocks = len(pack(profile).chunks), len(profile.blocks)
    plan = evaluate(profile, hardware, n_persist=n_chunks, n_buffer=0, n_swap=n_blocks - 2, n_ckpt=0)
    trainings = {}
    for packed in (False, True):
        forced = check(replace(plan, pack_swaps=(packed,) * n_blocks), profile, hardware)
        trainings[packed] = Training(case, forced, device)
        with _deterministic():
            trainings[packed].run(0, untimed=WARM_UP)
    for _ in range(rounds):
        for training in trainings.values():
            training.run(steps)
    # The backward of fused attention adds in no fixed order when it is timed, so later steps may differ in any case.
    losses = [[float(loss) for loss in training.losses[:WARM_UP]] for training in trainings.values()]
    block = profile.blocks[0]
    return CopiesRow(
        case=case,
        saved_bytes=block.saved_bytes,
        saved_tensors=block.saved_tensors,
        saved_bool_bytes=block.saved_bool_bytes,
        chosen=any(plan.pack_swaps),
        same_losses=losses[0] == losses[1],
        ways=tuple(
            Way(packed=packed, measured=Measured.of(training), **counts_of(training))
            for packed, training in trainings.items()
        ),
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Operators are deterministic. With warn_only=True fused attention would not be, although it can."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def counts_of(training: Training) -> dict[str, int]:
    """Copies and launches of one step, by a trace of what the device did."""
    counts: Counter[str] = Counter()
    if training.device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as trace:
            training.run(0, untimed=1)
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counts[_kind_of(event.name)] += 1
    names = ("copies_down", "copies_up", "pack_launches", "unpack_launches", "kernels")
    kernels = counts["kernels"] + counts["pack_launches"] + counts["unpack_launches"]
    return {name: counts[name] for name in names} | {"kernels": kernels}


def _kind_of(name: str) -> str:
    begins = {
        "Memcpy DtoH": "copies_down",
        "Memcpy HtoD": "copies_up",
        "Memcpy": "others",
        "Memset": "others",
        "flatten_kernel": "pack_launches",  # those of gradients among them
    }
    return next((kind for begin, kind in begins.items() if name.startswith(begin)), "kernels")
