"""flatten and unflatten move tensors of any layout, padding, partial sums and the finite check, and nothing else."""

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
    sum_of_squares_reference,
    tiles,
    unflatten,
)

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


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize(("dtype", "chunk_dtype", "accumulate"), CASES, ids=IDS)
def test_same_bits_as_the_reference_and_nothing_else_touched(
    backend: Any,
    same_bits: Callable[..., None],
    dtype: torch.dtype,
    chunk_dtype: torch.dtype,
    accumulate: bool,
    scaled: bool,
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
    scale = torch.tensor([0.3]) if scaled else None
    here = None if scale is None else scale.to(backend.device)
    backend.flatten(moved, found_chunk, offsets, found_partials, starts, accumulate=accumulate, scale=here)
    flatten_reference(gradients, chunk, offsets, partials, starts, accumulate=accumulate, scale=scale)
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
    whole = torch.randn(2 * TILE + 200 + shift, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradient = whole.to(backend.device)[shift:]
    chunk = torch.full((padded(gradient.numel()),), torch.nan, dtype=torch.bfloat16, device=backend.device)
    partials = torch.full((6,), torch.nan, device=backend.device)
    backend.flatten([gradient], chunk, [0], partials, [3], accumulate=False)
    same_bits(chunk[: gradient.numel()], whole[shift:])
    same_bits(partials[3:6], sum_of_squares_reference(whole[shift:]))


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


def test_empty_tensors_write_nothing(backend: Any) -> None:
    chunk, partials = torch.ones(128, device=backend.device), torch.ones(1, device=backend.device)
    nothing = [torch.empty(0, device=backend.device), torch.empty(3, 0, 5, device=backend.device)]
    backend.flatten(nothing, chunk, [0, 0], partials, [0, 0])
    backend.unflatten(chunk, nothing, [0, 0])
    assert chunk.sum() == 128
    assert partials.item() == 1


def test_an_empty_tensor_between_others(backend: Any) -> None:
    tensors = [torch.ones(3), torch.empty(0), torch.full((2,), 2.0)]
    chunk = torch.full((256,), torch.nan, device=backend.device)
    backend.flatten([tensor.to(backend.device) for tensor in tensors], chunk, [0, 128, 128])
    assert chunk.cpu().tolist() == [1.0] * 3 + [0.0] * 125 + [2.0] * 2 + [0.0] * 126


def _strided(dtype: torch.dtype) -> list[torch.Tensor]:
    """Transposed, sliced, expanded, permuted in five dimensions, misaligned, 0-d, and one plain tensor of two tiles."""
    values = (torch.randn(4 * TILE, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    return [
        values[: 30 * 20].view(30, 20).t(),
        values[: 40 * 64].view(40, 64)[3:, 5:60:3],
        values[:7].view(7, 1).expand(7, 33),
        values[: 2 * 3 * 4 * 5 * 6].view(2, 3, 4, 5, 6).permute(4, 1, 0, 3, 2),
        values[1 : 1 + TILE + 50],
        values[17],
        values[: 2 * TILE],
        values[: 3 * 130 * 130].view(3, 130, 130).transpose(0, 2),
    ]


def _copies(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Each with its strides and its odd address, in memory of its own."""
    found = []
    for tensor in tensors:
        offset = tensor.storage_offset() % 8
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.full((offset + extent + 3,), -7.0, dtype=tensor.dtype, device=device)
        copy = memory.as_strided(tensor.shape, tensor.stride(), offset)
        if 0 in tensor.stride():
            memory[offset : offset + tensor.shape[0]] = tensor[:, 0].to(device)
        else:
            copy.copy_(tensor)
        found.append(copy)
    return found


@pytest.mark.parametrize("chunk_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "mixed types"])
def test_any_strides_and_types_in_one_call(
    backend: Any, same_bits: Callable[..., None], chunk_dtype: torch.dtype, mixed: bool
) -> None:
    types = [torch.bfloat16, torch.float16, torch.float32] if mixed else [torch.bfloat16]
    tensors = [_strided(types[index % len(types)])[index] for index in range(8)]
    offsets, starts, elements, count = _laid_out([tuple(tensor.shape) for tensor in tensors], gap=128)
    chunk, partials = torch.full((elements,), torch.nan, dtype=chunk_dtype), torch.full((count,), torch.nan)
    found_chunk, found_partials = chunk.to(backend.device, copy=True), partials.to(backend.device, copy=True)
    backend.flatten(_copies(tensors, backend.device), found_chunk, offsets, found_partials, starts)
    for tensor, offset, start in zip(tensors, offsets, starts, strict=True):
        numel = tensor.numel()
        chunk[offset : offset + padded(numel)] = 0.0
        chunk[offset : offset + numel] = tensor.contiguous().view(-1).to(chunk_dtype)
        partials[start : start + tiles(numel)] = sum_of_squares_reference(chunk[offset : offset + numel])
    same_bits(found_chunk, chunk)
    same_bits(found_partials, partials)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("chunk_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["one type", "mixed types"])
def test_unflatten_writes_the_tensors_and_nothing_else(
    backend: Any, same_bits: Callable[..., None], chunk_dtype: torch.dtype, mixed: bool, scaled: bool
) -> None:
    types = [torch.bfloat16, torch.float16, torch.float32] if mixed else [torch.float32]
    expanded = 2  # can't be written
    shapes = [tensor for index, tensor in enumerate(_strided(torch.float32)) if index != expanded]
    tensors = _copies([tensor.to(types[index % len(types)]) for index, tensor in enumerate(shapes)], backend.device)
    expected = [tensor.cpu().clone() for tensor in tensors]
    offsets, _, elements, _ = _laid_out([tuple(tensor.shape) for tensor in tensors], gap=128)
    chunk = (torch.randn(elements, generator=torch.Generator().manual_seed(5)) * 5).to(chunk_dtype)
    scale = torch.tensor([0.7]) if scaled else None
    memories = [
        tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0) for tensor in tensors
    ]
    before = [memory.cpu().clone() for memory in memories]
    backend.unflatten(
        chunk.to(backend.device), tensors, offsets, scale=None if scale is None else scale.to(backend.device)
    )
    for tensor, memory, old, offset, want in zip(tensors, memories, before, offsets, expected, strict=True):
        values = chunk[offset : offset + want.numel()]
        values = values if scale is None else values.float() * scale
        place = old.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        place.copy_(values.to(want.dtype).view(want.shape))
        same_bits(memory, old)


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


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("place", [0, 5000, TILE, 3 * TILE + 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_value_that_is_not_finite_sets_the_flag(backend: Any, dtype: torch.dtype, place: int, bad: float) -> None:
    tensors = [torch.ones(300, dtype=dtype), torch.ones(3 * TILE + 7, dtype=dtype)]
    nonfinite = torch.zeros(1, dtype=torch.int32, device=backend.device)
    chunk = torch.zeros(4 * TILE, device=backend.device)
    backend.flatten([tensor.to(backend.device) for tensor in tensors], chunk, [0, 384], nonfinite=nonfinite)
    assert nonfinite.item() == 0
    tensors[1][place] = bad
    backend.flatten([tensor.to(backend.device) for tensor in tensors], chunk, [0, 384], nonfinite=nonfinite)
    assert nonfinite.item() == 1
    tensors[1][place] = 1.0
    backend.flatten([tensor.to(backend.device) for tensor in tensors], chunk, [0, 384], nonfinite=nonfinite)
    assert nonfinite.item() == 1, "the flag accumulates until its owner clears it"


def test_the_flag_is_about_what_the_chunk_holds(backend: Any) -> None:
    """Squares that overflow don't set it; a cast, a scale or an addition that overflows does."""

    def flag(value: float, chunk: torch.Tensor, **options: Any) -> int:
        nonfinite = torch.zeros(1, dtype=torch.int32, device=backend.device)
        partials = torch.zeros(1, device=backend.device)
        tensor = torch.full((5,), value, device=backend.device)
        backend.flatten([tensor], chunk.to(backend.device), [0], partials, [0], nonfinite=nonfinite, **options)
        return int(nonfinite.item())

    wide, half = torch.zeros(128), torch.zeros(128, dtype=torch.float16)
    scale = torch.tensor([3.0], device=backend.device)
    assert flag(1e30, wide) == 0
    assert flag(1e30, half) == 1
    assert flag(3e38, wide) == 0
    assert flag(3e38, wide, scale=scale) == 1
    assert flag(3e38, torch.full((128,), 3e38), accumulate=True) == 1


def test_a_scale_that_is_not_finite_leaves_the_padding_zero(backend: Any) -> None:
    chunk = torch.full((128,), torch.nan, device=backend.device)
    scale = torch.tensor([torch.inf], device=backend.device)
    backend.flatten([torch.ones(5, device=backend.device)], chunk, [0], scale=scale)
    assert chunk.cpu().tolist() == [torch.inf] * 5 + [0.0] * 123


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
        ({"partials": None}, "partials and partial_offsets come together"),
        ({"partial_offsets": [-1]}, "partial_offsets\\[0\\] is -1"),
        ({"scale": torch.zeros(2)}, "scale must be one float32"),
        ({"nonfinite": torch.zeros(1)}, "nonfinite must be one int32"),
        ({"offsets": []}, "1 tensors need as many offsets"),
        ({"tensors": [torch.zeros(200).int()]}, "tensors\\[0\\] must be torch.bfloat16 or"),
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


def test_offsets_that_overlap_are_refused() -> None:
    tensors = [torch.zeros(200), torch.zeros(100)]
    with pytest.raises(ValueError, match=r"offsets\[1\] is 128, where another tensor reaches to 256"):
        flatten(tensors, torch.zeros(512), [0, 128])


def test_elements_that_share_memory_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"elements of tensors\[0\] share memory"):
        unflatten(torch.zeros(128), [torch.zeros(3, 1).expand(3, 4)], [0])
    with pytest.raises(ValueError, match=r"elements of tensors\[0\] share memory"):
        unflatten(torch.zeros(128), [torch.zeros(10).as_strided((4, 4), (1, 2))], [0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_elements_than_a_32_bit_integer_counts() -> None:
    """A strided source and a chunk of more than 2^31 elements, in place and back."""
    numel = (1 << 31) + 2 * TILE + 3
    tensor = torch.zeros(numel, 2, dtype=torch.float16, device="cuda")[:, 1]
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
