"""A chunk's pieces back into a block's tensors, in GPU memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import compiled, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import MODELS, SMALL_TENSORS
from bench.kernels.tensors import Places, views_of
from protrain_kernels import unflatten
from protrain_kernels.flatten import launch_unflatten, table_for

FOREACH = "torch._foreach_copy_"


def _plain(chunk: Tensor, tensors: list[Tensor], offsets: list[int]) -> None:
    for tensor, view in zip(tensors, views_of(chunk, tensors, offsets), strict=True):
        tensor.copy_(view)


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, FOREACH])
@pytest.mark.parametrize("shape", [*MODELS, SMALL_TENSORS])
def test_unflatten(recorder: Recorder, shape: str, implementation: str) -> None:
    places = Places.of(shape, torch.bfloat16, recorder.device, whole=recorder.timed)
    generator = torch.Generator(recorder.device).manual_seed(1)
    places.chunk.normal_(generator=generator)
    run = _implementation(recorder, places, implementation)

    def check() -> str:
        for tensor in places.tensors:
            tensor.fill_(torch.nan)  # what nobody writes must not look right
        run()
        for tensor, view in zip(places.tensors, places.views(), strict=True):
            same_bits("tensor", tensor, view)
        return "bits equal"

    recorder.measure(
        operator="unflatten",
        shape=shape if shape == SMALL_TENSORS else f"{shape} block",
        implementation=implementation,
        roof=DEVICE,
        bytes_moved=4 * places.elements,
        run=run,
        check=check,
    )


def _implementation(recorder: Recorder, places: Places, name: str) -> Callable[[], None]:
    if name == OURS:
        if recorder.device.type == "cuda":
            return lambda: unflatten(places.chunk, places.tensors, places.offsets)
        table = table_for(places.tensors, places.offsets, None)  # unflatten would run torch on the CPU
        return lambda: launch_unflatten(table, places.chunk, places.tensors)
    if name == FOREACH:
        views = places.views()
        return lambda: torch._foreach_copy_(places.tensors, views)
    plain = compiled(recorder, _plain) if name == COMPILED else _plain
    return lambda: plain(places.chunk, places.tensors, places.offsets)
