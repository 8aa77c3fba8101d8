"""A block's gradients into one chunk, with squares for the norm in the same pass.

A gradient that is not finite makes its squares, or its norm, not finite, so both are a finite check as well. The sum
over a step's squares and its root belong to clipping, once a step, and no implementation is timed with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels.peers import close, compiled, same_bits
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import MODELS, QUICK, SMALL_TENSORS
from bench.kernels.tensors import Places, views_of
from protrain_kernels import flatten, flatten_reference
from protrain_kernels.flatten import launch_flatten, table_for

FOREACH = "torch._foreach_copy_ + _foreach_norm"
FOREACH_ADD = "torch._foreach_add_ + _foreach_norm"


def _plain(tensors: list[Tensor], chunk: Tensor, offsets: list[int], *, add: bool) -> Tensor:
    """What one writes in plain torch. Returns the norms of what the places hold."""
    views = views_of(chunk, tensors, offsets)
    for tensor, view in zip(tensors, views, strict=True):
        if add:
            view.add_(tensor)
        else:
            view.copy_(tensor)
    return torch.stack([torch.linalg.vector_norm(view, dtype=torch.float32) for view in views])


def _foreach(tensors: list[Tensor], chunk: Tensor, offsets: list[int], *, add: bool) -> Tensor:
    """One call for all tensors. Returns the norms of what the places hold."""
    views = views_of(chunk, tensors, offsets)
    if add:
        torch._foreach_add_(views, tensors)
    else:
        torch._foreach_copy_(views, tensors)
    return torch.stack(torch._foreach_norm(views, 2, dtype=torch.float32))


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, FOREACH])
@pytest.mark.parametrize("shape", [*MODELS, SMALL_TENSORS])
def test_flatten(recorder: Recorder, shape: str, implementation: str) -> None:
    _measure(recorder, shape, implementation, add=False)


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, FOREACH_ADD])
@pytest.mark.parametrize("shape", QUICK)
def test_flatten_accumulates(recorder: Recorder, shape: str, implementation: str) -> None:
    _measure(recorder, shape, implementation, add=True)


def _measure(recorder: Recorder, shape: str, implementation: str, *, add: bool) -> None:
    chunk_dtype = torch.float32 if add else torch.bfloat16
    places = Places.of(shape, chunk_dtype, recorder.device, whole=recorder.timed)
    run = _implementation(recorder, places, implementation, add=add)

    def check() -> str:
        ours = implementation == OURS
        if add:
            places.chunk.fill_(1e-3)
        elif ours:
            places.chunk.fill_(torch.nan)  # what nobody writes must not look right
        wanted, squares = places.chunk.clone(), torch.full_like(places.partials, torch.nan)
        options = _ours(add) if ours else {"accumulate": add}
        flatten_reference(places.tensors, wanted, places.offsets, squares, places.starts, **options)
        norms = run()
        _check_chunk(places, wanted, whole=ours or not add)
        if ours:
            same_bits("partials", places.partials, squares)
        else:
            assert norms is not None
            close("norm", norms.norm(), squares.double().sum().sqrt(), 1e-4)
        _check_infinity(places, run)
        return "bits equal" if ours else "chunk equal, norm within 1e-04"

    recorder.measure(
        operator="flatten, fp32 accumulation" if add else "flatten, norm",
        shape=shape if shape == SMALL_TENSORS else f"{shape} block",
        implementation=implementation,
        roof=DEVICE,
        # Read twice where values are added: the gradient, and the place that is written.
        bytes_moved=(10 if add else 4) * places.elements + places.partials.nbytes,
        flops=(3 if add else 2) * places.elements,
        run=run,
        check=check,
    )


def _check_chunk(places: Places, wanted: Tensor, *, whole: bool) -> None:
    """``whole``: with the padding, which a peer leaves as it is."""
    if whole:
        same_bits("chunk", places.chunk, wanted)
        return
    for tensor, offset in zip(places.tensors, places.offsets, strict=True):
        own = slice(offset, offset + tensor.numel())
        same_bits("chunk", places.chunk[own], wanted[own])


def _check_infinity(places: Places, run: Callable[[], Tensor | None]) -> None:
    """An infinity in the last tensor must be seen."""
    last = places.tensors[-1].view(-1)
    kept = last[-1].clone()
    last[-1] = torch.inf
    norms = run()
    last[-1] = kept
    seen = places.partials if norms is None else norms
    assert not seen.isfinite().all(), "an infinity in the last gradient isn't seen"
    places.chunk.zero_()


def _ours(add: bool) -> dict[str, Any]:
    """Options of ours. It rounds sums for their squares, as in training, and no peer does."""
    return {"accumulate": add, "weight_dtype": torch.bfloat16}


def _implementation(recorder: Recorder, places: Places, name: str, *, add: bool) -> Callable[[], Tensor | None]:
    if name == OURS:
        if recorder.device.type == "cuda":
            where = places.chunk, places.offsets, places.partials, places.starts
            return lambda: flatten(places.tensors, *where, **_ours(add))
        table = table_for(places.tensors, places.offsets, places.starts)  # flatten would run torch on the CPU
        return lambda: launch_flatten(table, places.tensors, places.chunk, places.partials, **_ours(add))
    plain = _plain if name in (EAGER, COMPILED) else _foreach
    peer = compiled(recorder, plain) if name == COMPILED else plain
    return lambda: peer(places.tensors, places.chunk, places.offsets, add=add)
