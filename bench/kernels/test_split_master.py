"""fp32 masters cut into bf16 weights and remainders, and put together again, in GPU memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import compiled, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import chunk_elements
from protrain_kernels import join, join_reference, split, split_reference
from protrain_kernels.split_master import launch_join, launch_split

SHAPES = ("gpt2-10b", "llama2-13b", "llama2-34b")
BYTES = 8  # an element, in either direction


def _eager_split(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    upper, lower = split_reference(master)
    weight.copy_(upper)
    remainder.copy_(lower)


def _eager_join(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    master.copy_(join_reference(weight, remainder))


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED])
@pytest.mark.parametrize("direction", ["split", "join"])
@pytest.mark.parametrize("shape", SHAPES)
def test_split_master(recorder: Recorder, shape: str, direction: str, implementation: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    generator = torch.Generator(recorder.device).manual_seed(0)
    master = torch.randn(elements, generator=generator, device=recorder.device)
    weight = torch.full_like(master, torch.nan, dtype=torch.bfloat16)
    remainder = torch.full_like(master, 12345, dtype=torch.int16)
    tensors = (master, weight, remainder) if direction == "split" else (weight, remainder, master)
    run = _implementation(recorder, direction, implementation)
    wanted = master.clone()

    def check() -> str:
        if direction == "split":
            run(*tensors)
            for name, found, own in zip(
                ("weight", "remainder"), (weight, remainder), split_reference(wanted), strict=True
            ):
                same_bits(name, found, own)
        else:
            _eager_split(wanted, weight, remainder)
            master.fill_(torch.nan)
            run(*tensors)
            same_bits("master", master, wanted)
        return "bits equal"

    recorder.measure(
        operator=direction,
        shape=f"{shape} block",
        dtype="float32",
        implementation=implementation,
        version="" if implementation == OURS else torch.__version__,
        roof=DEVICE,
        bytes_moved=BYTES * elements,
        run=lambda: run(*tensors),
        check=check,
    )


def _implementation(recorder: Recorder, direction: str, name: str) -> Callable[[Tensor, Tensor, Tensor], object]:
    if name == OURS:
        on_gpu = recorder.device.type == "cuda"  # a CPU tensor would go to the C kernel
        ways = {"split": split if on_gpu else launch_split, "join": join if on_gpu else launch_join}
        return ways[direction]
    plain = {"split": _eager_split, "join": _eager_join}[direction]
    return compiled(recorder, plain) if name == COMPILED else plain
