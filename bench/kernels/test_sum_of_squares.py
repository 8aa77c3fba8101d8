"""Squares of a gradient summed in an order that no plan changes, in GPU memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import close, compiled, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import chunk_elements
from protrain_kernels import sum_of_squares, sum_of_squares_reference, tiles
from protrain_kernels.sum_of_squares import launch_sum_of_squares

SHAPES = ("gpt2-10b", "llama2-13b", "llama2-34b")
VECTOR_NORM = "torch.linalg.vector_norm"


def _plain(values: Tensor) -> Tensor:
    return values.float().square().sum()


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, VECTOR_NORM])
@pytest.mark.parametrize("shape", SHAPES)
def test_sum_of_squares(recorder: Recorder, shape: str, implementation: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    generator = torch.Generator(recorder.device).manual_seed(0)
    values = torch.randn(elements, generator=generator, device=recorder.device).mul_(1e-3).bfloat16()
    partials = torch.full((tiles(elements),), torch.nan, device=recorder.device)
    run = _implementation(recorder, values, partials, implementation)

    def check() -> str:
        wanted = sum_of_squares_reference(values)
        found = run()
        if implementation == OURS:
            same_bits("partials", partials, wanted)
            return "bits equal"
        assert found is not None
        total = wanted.double().sum()
        error = close("sum", found.square() if implementation == VECTOR_NORM else found, total, 1e-5)
        return f"sum within {error:.0e}"

    recorder.measure(
        operator="sum of squares",
        shape=f"{shape} block",
        dtype="bfloat16",
        implementation=implementation,
        version="" if implementation == OURS else torch.__version__,
        roof=DEVICE,
        bytes_moved=values.nbytes + partials.nbytes,
        flops=2 * elements,
        run=run,
        check=check,
    )


def _implementation(recorder: Recorder, values: Tensor, partials: Tensor, name: str) -> Callable[[], Tensor | None]:
    if name == OURS:
        ours = sum_of_squares if values.is_cuda else launch_sum_of_squares  # a CPU tensor would go to the C kernel
        return lambda: ours(values, partials)
    if name == VECTOR_NORM:
        return lambda: torch.linalg.vector_norm(values, dtype=torch.float32)
    plain = compiled(recorder, _plain) if name == COMPILED else _plain
    return lambda: plain(values)
