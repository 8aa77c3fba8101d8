"""flatten and unflatten move tensors with their padding and partial sums, and nothing else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, flatten, flatten_reference, padded, tiles, unflatten
from tests.kernels.states import BF16, FP16, FP32, TYPES, any_bits, boundaries, every_half, same_bits

HALVES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
SHAPES = [(3, 5, 7), (128,), (1,), (TILE // 64, 64), (130, 129)]


def _laid_out(shapes: list[tuple[int, ...]], gap: int) -> tuple[list[int], list[int], int, int]:
    """(offsets, partial offsets, chunk elements, partials), with a gap of untouched elements after each gradient."""
    offsets, starts, end, partial = [], [], gap, 1
    for shape in shapes:
        numel = torch.Size(shape).numel()
        offsets.append(end)
        starts.append(partial)
        end += padded(numel) + gap
        partial += tiles(numel) + 1
    return offsets, starts, end, partial


@pytest.mark.parametrize(
    ("dtype", "chunk_dtype", "accumulate"),
    [*((*types, False) for types in product(TYPES, TYPES)), *((dtype, FP32, True) for dtype in TYPES)],
    ids=str,
)
def test_same_bits_as_the_reference_and_nothing_else_touched(
    backend: Any, dtype: torch.dtype, chunk_dtype: torch.dtype, accumulate: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    offsets, starts, elements, count = _laid_out(SHAPES, gap=128)
    chunk, partials = torch.full((elements,), torch.nan, dtype=chunk_dtype), torch.full((count,), torch.nan)
    if accumulate:
        for gradient, offset in zip(gradients, offsets, strict=True):
            chunk[offset : offset + gradient.numel()] = torch.randn(gradient.numel(), generator=generator)
    found_chunk, found_partials = chunk.to(backend.device, copy=True), partials.to(backend.device, copy=True)
    moved = [gradient.to(backend.device) for gradient in gradients]
    flatten(moved, found_chunk, offsets, found_partials, starts, accumulate=accumulate)
    flatten_reference(gradients, chunk, offsets, partials, starts, accumulate=accumulate)
    same_bits(found_chunk, chunk)
    same_bits(found_partials, partials)
    written = torch.zeros(elements, dtype=torch.bool)
    for gradient, offset in zip(gradients, offsets, strict=True):
        written[offset : offset + padded(gradient.numel())] = True
    assert torch.equal(found_chunk.cpu().isnan(), ~written)


def test_partials_are_of_what_the_chunk_holds(backend: Any) -> None:
    """A cast or an addition that overflows shows in them."""

    def partial(value: float, chunk: torch.Tensor, **options: Any) -> float:
        partials = torch.zeros(1, device=backend.device)
        tensor = torch.full((5,), value, device=backend.device)
        flatten([tensor], chunk.to(backend.device), [0], partials, [0], **options)
        return partials.item()

    assert partial(1e10, torch.zeros(128)) == pytest.approx(5e20)
    assert partial(1e10, torch.zeros(128, dtype=FP16)) == torch.inf
    assert partial(3e38, torch.full((128,), 3e38), accumulate=True) == torch.inf


def test_empty_tensors_write_nothing(backend: Any) -> None:
    chunk, partials = torch.ones(128, device=backend.device), torch.ones(1, device=backend.device)
    nothing = [torch.empty(0, device=backend.device), torch.empty(3, 0, 5, device=backend.device)]
    flatten(nothing, chunk, [0, 0], partials, [0, 0])
    unflatten(chunk, nothing, [0, 0])
    flatten([], chunk, [])
    unflatten(chunk, [], [])
    assert (chunk.sum(), partials.item()) == (128, 1)


@pytest.mark.parametrize(
    ("dtype", "chunk_dtype"), [*((a, b) for a, b in product(TYPES, TYPES) if a != b or a is BF16)], ids=str
)
def test_unflatten_writes_the_tensors_and_nothing_else(
    backend: Any, dtype: torch.dtype, chunk_dtype: torch.dtype
) -> None:
    """Each tensor lies between other elements of its memory, at multiples of 16 bytes and at odd addresses.

    Every type meets every such place, in the tensors and in the chunk.
    """
    first = (0, 1, 8)[(TYPES.index(dtype) + TYPES.index(chunk_dtype)) % 3]
    offsets, _, elements, _ = _laid_out(SHAPES, gap=128)
    chunk = (torch.randn(elements, generator=torch.Generator().manual_seed(5)) * 5).to(chunk_dtype)
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    memories = [torch.full((first + numel + 3,), -7.0, dtype=dtype, device=backend.device) for numel in numels]
    tensors = [
        memory[first : first + numel].view(shape) for memory, numel, shape in zip(memories, numels, SHAPES, strict=True)
    ]
    unflatten(chunk.to(backend.device), tensors, offsets)
    for memory, numel, offset in zip(memories, numels, offsets, strict=True):
        expected = torch.full((first + numel + 3,), -7.0, dtype=dtype)
        expected[first : first + numel] = chunk[offset : offset + numel].to(dtype)
        same_bits(memory, expected)


@HALVES
def test_there_and_back_keeps_every_bit(backend: Any, dtype: torch.dtype) -> None:
    """The payloads of NaN too, and through an fp32 chunk every number."""
    patterns = every_half(dtype)
    number = ~patterns.isnan()
    for chunk_dtype, kept in ((dtype, torch.ones_like(number)), (FP32, number)):
        back = torch.zeros(1 << 16, dtype=dtype, device=backend.device)
        chunk = torch.zeros(1 << 16, dtype=chunk_dtype, device=backend.device)
        flatten([patterns.to(backend.device)], chunk, [0])
        unflatten(chunk, [back], [0])
        assert torch.equal(back.view(torch.int16).cpu()[kept], patterns.view(torch.int16)[kept])
        assert back.cpu()[~number].isnan().all()


@HALVES
def test_casts_round_as_torch_does(backend: Any, dtype: torch.dtype) -> None:
    """Random bits, and both sides of every rounding boundary of the type: ties go to even."""
    nudged = boundaries(dtype)
    values = torch.cat([any_bits(6, 1 << 14), nudged, -nudged])
    chunk = torch.zeros(padded(values.numel()), dtype=dtype, device=backend.device)
    flatten([values.to(backend.device)], chunk, [0])
    same_bits(chunk[: values.numel()], values.to(dtype))
    back = torch.zeros(values.numel(), dtype=dtype, device=backend.device)
    wide = torch.zeros(padded(values.numel()), device=backend.device)
    wide[: values.numel()] = values.to(backend.device)
    unflatten(wide, [back], [0])
    same_bits(back, values.to(dtype))


@pytest.mark.gpu
def test_more_elements_than_a_32_bit_integer_counts() -> None:
    """A tensor and a chunk of more than 2^31 elements, in place and back."""
    numel = (1 << 31) + 2 * TILE + 3
    tensor = torch.zeros(numel, dtype=FP16, device="cuda")
    tensor[0], tensor[(1 << 31) + 5], tensor[-1] = 1.0, 2.0, 3.0
    chunk = torch.full((padded(numel),), torch.nan, dtype=FP16, device="cuda")
    partials = torch.full((tiles(numel),), torch.nan, device="cuda")
    flatten([tensor], chunk, [0], partials, [0])
    assert torch.equal(chunk[:numel], tensor)
    assert chunk[numel:].abs().max().item() == 0.0
    assert (partials.sum().item(), partials[-1].item()) == (14.0, 9.0)
    chunk[(1 << 31) + 5] = 7.0
    unflatten(chunk, [tensor], [0])
    assert tensor[(1 << 31) + 5].item() == 7.0
    assert torch.equal(chunk[:numel], tensor)
