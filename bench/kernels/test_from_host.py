"""A batch from host memory to the GPU, as a step begins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import PCIE
from bench.kernels.rows import OURS
from protrain_kernels import from_host
from protrain_kernels.from_host import launch_from_host

TOKENS, IMAGES = "8 x 2048 tokens", "64 images of 224 x 224"
BATCHES = {TOKENS: (8, 2048, 8), IMAGES: (64, 3, 224, 224, 4)}  # the last is bytes
PAGEABLE, PINNED = "torch's to(device)", "torch's copy from pinned memory"


@pytest.mark.parametrize("implementation", [OURS, PINNED, PAGEABLE])
@pytest.mark.parametrize("batch", BATCHES)
def test_from_host(recorder: Recorder, batch: str, implementation: str) -> None:
    count = math.prod(BATCHES[batch]) if recorder.timed else 4096 + 8
    source = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if implementation != PAGEABLE and recorder.device.type == "cuda":
        source = source.pin_memory()
    target = torch.zeros(count, dtype=torch.uint8, device=recorder.device)
    run = _implementation(source, target, implementation)

    def check() -> str:
        same_bits("bytes", run().cpu(), source)
        return "bits equal"

    recorder.measure(
        operator="from host",
        shape=batch,
        dtype="uint8",
        implementation=implementation,
        roof=PCIE,
        bytes_moved=count,
        flops=0,
        run=run,
        check=check,
    )


def _implementation(source: Tensor, target: Tensor, name: str) -> Callable[[], Tensor]:
    if name == PAGEABLE:
        return lambda: source.to(target.device, copy=True)
    if name == PINNED:
        return lambda: target.copy_(source, non_blocking=True)
    ours = from_host if target.is_cuda else launch_from_host  # a CPU tensor would go to torch

    def run() -> Tensor:
        ours(source, target)
        return target

    return run
