"""A process trains on its own GPU, and takes no memory of the others."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import protrain
from tests.distributed.apart import Group
from tests.distributed.test_bits import batches
from tests.distributed.training import train_under
from tests.engine.harness import Spec
from tests.tiny_models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def _say_where() -> None:
    """Print the GPUs on which this process has a context."""
    driver, flags, active, used = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int(), []
    for index in range(torch.cuda.device_count()):
        assert driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0
        if active.value:
            used.append(index)
    print(f"uses {used}", flush=True)


def _offload(rank: int, size: int) -> None:
    """Chunks are uploaded and updated by threads of the engine, on the host and on the GPU."""
    specs = (Spec("none", "least", "in", speculate=True), Spec("none", "least", "c", stream=True))
    how = {"make": partial(tiny, "llama"), "batches": batches, "micro_batches": size, "reduction": "mean"}
    train_under(rank, size, specs, 4, {**how, "dtype": "bfloat16", "device": "cuda"})
    _say_where()


def _train(rank: int, size: int, device: str | None) -> None:
    """Three steps under wrap, to which the script may leave the choice of the GPU."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    wrapped, optimizer = protrain.wrap(model, torch.optim.AdamW(model.parameters()), device=device, progress=False)
    for _ in range(3):
        wrapped(torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _say_where()


def _see(rank: int, size: int, numbers: Sequence[int]) -> None:
    """Each process sees the GPU of its number alone, as srun --gpus-per-task=1 does."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible[numbers[rank]]
    _train(rank, size, "cuda")


@pytest.mark.parametrize(
    ("train", "used"),
    [(_offload, (0, 1)), (partial(_train, device=None), (0, 1)), (partial(_see, numbers=(0, 1)), (0, 0))],
)
def test_a_process_uses_its_own_gpu_alone(tmp_path: Path, train: Callable[..., None], used: Sequence[int]) -> None:
    with Group(2, train, folder=tmp_path) as group:
        for rank, ending in group.endings(range(2)).items():
            assert f"uses [{used[rank]}]" in ending.text.splitlines(), ending.text


def test_two_processes_on_one_gpu_are_refused(tmp_path: Path) -> None:
    with Group(2, _see, (0, 0), folder=tmp_path) as group:
        for ending in group.endings(range(2)).values():
            assert ending.status == 1
            (error,) = ending.errors
            assert error.startswith("ValueError: ranks 0 and 1 are on the same GPU, GPU-"), ending.text
