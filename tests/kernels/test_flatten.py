"""flatten and unflatten move tensors with their padding and partial sums, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import (
    TILE,
    flatten,
    flatten_reference,
    padded,
    tiles,
    unflatten,
)
from protrain_kernels.flatten import _table_of

CASES = [
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, False),
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.float32, False),
    (torch.float16, torch.float32, False),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float32, True),
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.float16, False),
    (torch.float16, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.float16, False),
]
IDS = [f"{g}-{c}{'-accumulate' * a}".replace("torch.", "") for g, c, a in CASES]
# NumPy, under Triton's interpreter, remarks on the infinities and NaN that some tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
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


@pytest.mark.parametrize(("dtype", "chunk_dtype", "accumulate"), CASES, ids=IDS)
def test_same_bits_as_the_reference_and_nothing_else_touched(
    backend: Any,
    same_bits: Callable[..., None],
    dtype: torch.dtype,
    chunk_dtype: torch.dtype,
    accumulate: bool,
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
    backend.flatten(moved, found_chunk, offsets, found_partials, starts, accumulate=accumulate)
    flatten_reference(gradients, chunk, offsets, partials, starts, accumulate=accumulate)
    same_bits(found_chunk, chunk)
    same_bits(found_partials, partials)
    written = torch.zeros(elements, dtype=torch.bool)
    for gradient, offset in zip(gradients, offsets, strict=True):
        written[offset : offset + padded(gradient.numel())] = True
    assert torch.equal(found_chunk.cpu().isnan(), ~written)


@pytest.mark.parametrize(
    ("dtype", "place", "bad"),
    [
        (torch.float32, 0, torch.inf),
        (torch.bfloat16, 5000, torch.nan),
        (torch.bfloat16, TILE, -torch.inf),
        (torch.float32, 3 * TILE + 6, torch.nan),
    ],
)
def test_a_value_that_is_not_finite_shows_in_its_partial(
    backend: Any, dtype: torch.dtype, place: int, bad: float
) -> None:
    tensors = [torch.ones(300, dtype=dtype), torch.ones(3 * TILE + 7, dtype=dtype)]
    tensors[1][place] = bad
    chunk, partials = torch.zeros(4 * TILE, device=backend.device), torch.zeros(5, device=backend.device)
    backend.flatten([tensor.to(backend.device) for tensor in tensors], chunk, [0, 384], partials, [0, 1])
    assert partials.isfinite().tolist() == [tile != 1 + place // TILE for tile in range(5)]


def test_partials_are_of_what_the_chunk_holds(backend: Any) -> None:
    """A cast or an addition that overflows shows in them."""

    def partial(value: float, chunk: torch.Tensor, **options: Any) -> float:
        partials = torch.zeros(1, device=backend.device)
        tensor = torch.full((5,), value, device=backend.device)
        backend.flatten([tensor], chunk.to(backend.device), [0], partials, [0], **options)
        return partials.item()

    assert partial(1e10, torch.zeros(128)) == pytest.approx(5e20)
    assert partial(1e10, torch.zeros(128, dtype=torch.float16)) == torch.inf
    assert partial(3e38, torch.full((128,), 3e38), accumulate=True) == torch.inf


def test_empty_tensors_write_nothing(backend: Any) -> None:
    chunk, partials = torch.ones(128, device=backend.device), torch.ones(1, device=backend.device)
    nothing = [torch.empty(0, device=backend.device), torch.empty(3, 0, 5, device=backend.device)]
    backend.flatten(nothing, chunk, [0, 0], partials, [0, 0])
    backend.unflatten(chunk, nothing, [0, 0])
    assert chunk.sum() == 128
    assert partials.item() == 1


@pytest.mark.parametrize(
    ("dtype", "chunk_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_unflatten_writes_the_tensors_and_nothing_else(
    backend: Any, same_bits: Callable[..., None], dtype: torch.dtype, chunk_dtype: torch.dtype
) -> None:
    """Each tensor lies between other elements of its memory, at multiples of 16 bytes and at odd addresses.

    Every type meets every such place, in the tensors and in the chunk.
    """
    types = (torch.bfloat16, torch.float16, torch.float32)
    first = (0, 1, 8)[(types.index(dtype) + types.index(chunk_dtype)) % 3]
    offsets, _, elements, _ = _laid_out(SHAPES, gap=128)
    chunk = (torch.randn(elements, generator=torch.Generator().manual_seed(5)) * 5).to(chunk_dtype)
    memories = [
        torch.full((first + torch.Size(shape).numel() + 3,), -7.0, dtype=dtype, device=backend.device)
        for shape in SHAPES
    ]
    expected = [memory.cpu().clone() for memory in memories]
    places = [slice(first, first + torch.Size(shape).numel()) for shape in SHAPES]
    tensors = [memory[place].view(shape) for memory, place, shape in zip(memories, places, SHAPES, strict=True)]
    backend.unflatten(chunk.to(backend.device), tensors, offsets)
    for memory, want, place, offset in zip(memories, expected, places, offsets, strict=True):
        want[place] = chunk[offset : offset + place.stop - place.start].to(dtype)
        same_bits(memory, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_there_and_back_keeps_every_bit(backend: Any, dtype: torch.dtype) -> None:
    """The payloads of NaN too, and through an fp32 chunk every number."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    back = torch.zeros(1 << 16, dtype=dtype, device=backend.device)
    chunk = torch.zeros(1 << 16, dtype=dtype, device=backend.device)
    backend.flatten([patterns.to(backend.device)], chunk, [0])
    backend.unflatten(chunk, [back], [0])
    assert torch.equal(back.view(torch.int16).cpu(), patterns.view(torch.int16))
    wide = torch.zeros(1 << 16, device=backend.device)
    backend.flatten([patterns.to(backend.device)], wide, [0])
    back.zero_()
    backend.unflatten(wide, [back], [0])
    number = ~patterns.isnan()
    assert torch.equal(back.view(torch.int16).cpu()[number], patterns.view(torch.int16)[number])
    assert back.cpu()[~number].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_round_as_torch_does(
    backend: Any, same_bits: Callable[..., None], any_bits: Callable[[int, int], torch.Tensor], dtype: torch.dtype
) -> None:
    """Random bits, and both sides of every rounding boundary of the type: ties go to even."""
    halves = torch.arange(0, 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    middles = (halves[:-1] + halves[1:]) / 2
    bits = middles.view(torch.int32)
    nudged = torch.cat([(bits + step).view(torch.float32) for step in (-1, 0, 1)])
    values = torch.cat([any_bits(6, 1 << 14), nudged, -nudged])
    chunk = torch.zeros(padded(values.numel()), dtype=dtype, device=backend.device)
    backend.flatten([values.to(backend.device)], chunk, [0])
    same_bits(chunk[: values.numel()], values.to(dtype))
    back = torch.zeros(values.numel(), dtype=dtype, device=backend.device)
    wide = torch.zeros(padded(values.numel()), device=backend.device)
    wide[: values.numel()] = values.to(backend.device)
    backend.unflatten(wide, [back], [0])
    same_bits(back, values.to(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [64]}, "offset is 64: it must be a multiple of 128"),
        ({"offsets": [256]}, "the pieces reach to element 512 of 256"),
        ({"offsets": [-128]}, "offset is -128"),
        ({"partial_offsets": [1]}, "the pieces write partials up to 2 of 1"),
        ({"partials": None}, "partials and partial_offsets come together"),
        ({"partial_offsets": [-1]}, "partial_offset is -1"),
        ({"offsets": []}, "1 tensors need as many offsets"),
        ({"tensors": [torch.zeros(200).int()]}, "tensors\\[0\\] must be torch.bfloat16 or"),
        ({"tensors": [torch.zeros(20, 10).t()]}, "tensors\\[0\\] must be contiguous"),
        ({"tensors": [torch._neg_view(torch.zeros(200))]}, r"negates what its memory holds: pass .*\.resolve_neg\(\)"),
        ({"tensors": [torch.zeros(200, device="meta")]}, "is on meta"),
        ({"accumulate": True}, "accumulate in a float32 chunk"),
        ({"chunk": torch.zeros(300, dtype=torch.bfloat16)}, "chunk has 300 elements"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "tensors": [torch.zeros(200, dtype=torch.bfloat16)],
        "chunk": torch.zeros(256, dtype=torch.bfloat16),
        "offsets": [0],
        "partials": torch.zeros(1),
        "partial_offsets": [0],
    }
    with pytest.raises(ValueError, match=message):
        flatten(**(arguments | changes))


def test_flatten_makes_a_table_once() -> None:
    tensors = [torch.zeros(20, 10), torch.zeros(2, 30)]
    _table_of.cache_clear()
    for _ in range(3):
        flatten(tensors, torch.zeros(384), [0, 256])
    assert _table_of.cache_info().misses == 1
    for offset in (128, 256, 384):
        flatten(tensors[1:], torch.zeros(512), [offset])
    assert _table_of.cache_info().misses == 4


def test_offsets_that_overlap_are_refused() -> None:
    tensors = [torch.zeros(200), torch.zeros(100)]
    with pytest.raises(ValueError, match=r"piece 1 begins at 128, where another reaches to 256"):
        flatten(tensors, torch.zeros(512), [0, 128])


def test_unlike_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors\[1\] is torch.float16, tensors\[0\] torch.float32: cast it first"):
        flatten([torch.zeros(9), torch.zeros(9).half()], torch.zeros(512), [0, 128])
    with pytest.raises(ValueError, match=r"tensors\[1\] is on meta, tensors\[0\] on cpu"):
        unflatten(torch.zeros(512), [torch.zeros(9), torch.zeros(9, device="meta")], [0, 128])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_elements_than_a_32_bit_integer_counts() -> None:
    """A tensor and a chunk of more than 2^31 elements, in place and back."""
    numel = (1 << 31) + 2 * TILE + 3
    tensor = torch.zeros(numel, dtype=torch.float16, device="cuda")
    tensor[0], tensor[(1 << 31) + 5], tensor[-1] = 1.0, 2.0, 3.0
    chunk = torch.full((padded(numel),), torch.nan, dtype=torch.float16, device="cuda")
    partials = torch.full((tiles(numel),), torch.nan, device="cuda")
    flatten([tensor], chunk, [0], partials, [0])
    assert torch.equal(chunk[:numel], tensor)
    assert chunk[numel:].abs().max().item() == 0.0
    assert partials.sum().item() == 14.0
    assert partials[-1].item() == 9.0
    chunk[(1 << 31) + 5] = 7.0
    unflatten(chunk, [tensor], [0])
    assert tensor[(1 << 31) + 5].item() == 7.0
    assert torch.equal(chunk[:numel], tensor)
