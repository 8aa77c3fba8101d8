"""flatten writes gradients, padding and partial sums, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, flatten, flatten_reference, padded, sum_of_squares_reference, tiles

CASES = [
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float16, torch.float16, False),
    (torch.float32, torch.float32, False),
    (torch.bfloat16, torch.float32, False),
    (torch.float16, torch.float32, False),
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float32, True),
    (torch.float32, torch.float32, True),
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


@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "accumulate"])
def test_result_is_what_it_says(backend: Any, same_bits: Callable[..., None], accumulate: bool) -> None:
    """Against slices and torch's own addition, without the reference."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(TILE + 77, generator=generator).bfloat16()
    before = torch.randn(padded(gradient.numel()), generator=generator)
    chunk = before.to(backend.device, copy=True)
    partials = torch.full((2,), torch.nan, device=backend.device)
    backend.flatten([gradient.to(backend.device)], chunk, [0], partials, [0], accumulate=accumulate)
    numel = gradient.numel()
    result = before[:numel] + gradient.float() if accumulate else gradient.float()
    same_bits(chunk[:numel], result)
    same_bits(chunk[numel:], torch.zeros(padded(numel) - numel))
    same_bits(partials, sum_of_squares_reference(result))


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_unaligned_gradients(backend: Any, same_bits: Callable[..., None], shift: int) -> None:
    whole = torch.randn(TILE + 200 + shift, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradient = whole.to(backend.device)[shift:]
    chunk = torch.full((padded(gradient.numel()),), torch.nan, dtype=torch.bfloat16, device=backend.device)
    partials = torch.full((5,), torch.nan, device=backend.device)
    backend.flatten([gradient], chunk, [0], partials, [3], accumulate=False)
    same_bits(chunk[: gradient.numel()], whole[shift:])
    same_bits(partials[3:5], sum_of_squares_reference(whole[shift:]))


def test_bits_of_every_16_bit_value_are_copied(backend: Any) -> None:
    """Infinities, subnormals and the payload of a NaN as well: the gradient's type into itself is a copy."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        gradient = patterns.view(dtype).to(backend.device)
        chunk = torch.zeros(1 << 16, dtype=dtype, device=backend.device)
        partials = torch.zeros(4, device=backend.device)
        backend.flatten([gradient], chunk, [0], partials, [0], accumulate=False)
        assert torch.equal(chunk.view(torch.int16).cpu(), patterns)


def test_every_16_bit_value_widens_as_torch_does(backend: Any, same_bits: Callable[..., None]) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        chunk = torch.zeros(1 << 16, device=backend.device)
        partials = torch.zeros(4, device=backend.device)
        gradient = patterns.view(dtype)
        backend.flatten([gradient.to(backend.device)], chunk, [0], partials, [0], accumulate=False)
        same_bits(chunk, gradient.float())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_bad_gradient_shows_in_its_partial(backend: Any, bad: float) -> None:
    gradients = [torch.ones(200, device=backend.device), torch.ones(200, device=backend.device)]
    gradients[1][150] = bad
    chunk, partials = torch.zeros(512, device=backend.device), torch.zeros(2, device=backend.device)
    backend.flatten(gradients, chunk, [0, 256], partials, [0, 1], accumulate=False)
    assert partials.isfinite().tolist() == [True, False]


def test_an_empty_gradient_writes_nothing(backend: Any) -> None:
    if backend.interpreted:
        pytest.skip("the public function leaves empty gradients out before it launches")
    chunk, partials = torch.ones(128, device=backend.device), torch.ones(1, device=backend.device)
    backend.flatten([torch.empty(0, device=backend.device)], chunk, [0], partials, [0], accumulate=False)
    assert chunk.sum() == 128
    assert partials.item() == 1


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_the_result(compiled: None, same_bits: Callable[..., None], threads: int) -> None:
    gradient = torch.randn(5 * TILE + 77, generator=torch.Generator().manual_seed(3)).bfloat16()
    chunk, partials = torch.full((padded(gradient.numel()),), torch.nan), torch.full((6,), torch.nan)
    flatten([gradient], chunk, [0], partials, [0], threads=threads)
    same_bits(chunk[: gradient.numel()], gradient.float())
    same_bits(partials, sum_of_squares_reference(gradient))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": [64]}, "offsets\\[0\\] is 64: it must be a multiple of 128"),
        ({"offsets": [256]}, "offsets\\[0\\] is 256"),
        ({"offsets": [-128]}, "offsets\\[0\\] is -128"),
        ({"partial_offsets": [1]}, "partial_offsets\\[0\\] is 1"),
        ({"offsets": []}, "1 gradients need as many offsets"),
        ({"gradients": [torch.zeros(200).half()]}, "gradients\\[0\\] is torch.float16"),
        ({"gradients": [torch.zeros(20, 10).bfloat16().t()]}, "gradients\\[0\\] must be contiguous"),
        ({"accumulate": True}, "accumulate in a float32 chunk"),
        ({"chunk": torch.zeros(300, dtype=torch.bfloat16)}, "chunk has 300 elements"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "gradients": [torch.zeros(200, dtype=torch.bfloat16)],
        "chunk": torch.zeros(256, dtype=torch.bfloat16),
        "offsets": [0],
        "partials": torch.zeros(1),
        "partial_offsets": [0],
    }
    with pytest.raises(ValueError, match=message):
        flatten(**(arguments | changes))
