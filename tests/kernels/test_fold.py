"""fold adds pieces in rank order, rounds once, sums the squares of whole tiles, and touches nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, product
from typing import Any

import pytest
import torch

from protrain_kernels import TILE, Slice, fold, fold_reference, in_parts, padded, sum_of_squares_reference, tiles
from tests.kernels.states import BF16, FP16, FP32, TYPES, any_bits, same_bits


def _slices() -> tuple[list[Slice], int, int]:
    """(slices, elements of the range, partials): every way in which a range may meet a parameter.

    An untouched 128 elements follow each slice, and an untouched partial the partials of each parameter.
    """
    parts = [  # (first, numel, elements of the parameter)
        (TILE + 128, TILE + 500, 2 * TILE + 628),  # begins inside a tile and ends with its parameter
        (0, 1, 1),
        (0, 0, 300),  # the range ends where the parameter begins
        (0, 300, 300),
        (2 * TILE, TILE, 4 * TILE),  # begins and ends between tiles
        (256, 384, 1024),  # begins and ends inside one tile
        (0, TILE + 256, 3 * TILE + 5),  # ends inside a tile
    ]
    return _laid_out(parts, gap=128)


def _laid_out(parts: Sequence[tuple[int, int, int]], *, gap: int = 0) -> tuple[list[Slice], int, int]:
    """Slices of (first, numel, elements of the parameter) one behind another; see ``_slices``."""
    slices, offset, partial = [], gap, int(gap > 0)
    for first, numel, parameter in parts:
        slices.append(Slice(offset=offset, numel=numel, first=first, parameter_numel=parameter, partial_offset=partial))
        offset += padded(numel) + gap
        partial += tiles(parameter) + int(gap > 0)
    return slices, offset, partial


def _whole(numel: int) -> list[Slice]:
    """A parameter that fills the range."""
    return _laid_out([(0, numel, numel)])[0]


def _shards(numel: int, ranks: int) -> list[tuple[slice, Slice]]:
    """(elements, slice) of each rank's shard of a chunk that holds one parameter, where the shard has any of it."""
    length = padded(-(-padded(numel) // ranks))
    shards = []
    for first in range(0, numel, length):
        stop = min(first + length, numel)
        part = Slice(offset=0, numel=stop - first, first=first, parameter_numel=numel, partial_offset=0)
        shards.append((slice(first, stop), part))
    return shards


def _left_fold(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total


def _spread(ranks: int, elements: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of unlike magnitude, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ranks, elements, generator=generator)
    return (values * torch.randint(-9, 9, values.shape, generator=generator).float().exp2()).to(dtype)


COMBINATIONS = [
    *zip(product(TYPES, TYPES), (4, 3, 5, 3, 2, 3, 2, 16, 1), cycle((False, True))),  # types, ranks, accumulate
    ((BF16, BF16), 1, True),
    ((BF16, BF16), 16, False),
]


@pytest.mark.parametrize(("dtypes", "ranks", "accumulate"), COMBINATIONS, ids=str)
def test_same_bits_as_the_reference_and_nothing_else_touched(
    backend: Any, dtypes: tuple[torch.dtype, torch.dtype], ranks: int, accumulate: bool
) -> None:
    slices, elements, count = _slices()
    pieces = _spread(ranks, elements, dtypes[0])
    gradient = torch.full((elements,), torch.nan, dtype=dtypes[1])
    accumulator, partials = torch.full((elements,), torch.nan), torch.full((count,), torch.nan)
    for part in slices:  # what lies in the padding and between slices must not be read
        accumulator[part.offset : part.offset + part.numel] = _spread(1, part.numel, FP32, seed=1)[0]
        pieces[:, part.offset + part.numel : part.offset + part.padded + 128] = torch.nan
    found = [tensor.to(backend.device, copy=True) for tensor in (gradient, accumulator, partials)]
    for how, outputs in ((fold, found), (fold_reference, [gradient, accumulator, partials])):
        total = outputs[1] if accumulate else None
        options: Any = {"gradient": outputs[0], "accumulator": total, "partials": outputs[2]}
        how(pieces.to(outputs[0].device), slices, **options, factor=torch.tensor(1 / 3).item())
    for ours, reference in zip(found, (gradient, accumulator, partials), strict=True):
        same_bits(ours, reference)
    written, summed = torch.zeros(elements, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    for part in slices:
        written[part.offset : part.offset + part.padded] = True
        for tile in part.whole_tiles:
            summed[part.partial_offset + tile] = True
    assert torch.equal(found[0].cpu().isnan(), ~written)
    assert torch.equal(found[2].cpu().isnan(), ~summed)
    assert 0 < summed.sum() < count
    if accumulate:
        assert torch.equal(found[1].cpu().isnan(), ~written)


@pytest.mark.parametrize(("numel", "ranks"), [(3 * TILE + 77, 3), (100, 2)])
def test_shards_together_have_the_gradient_and_its_partials(backend: Any, numel: int, ranks: int) -> None:
    """Every rank folds its own shard of a parameter. Whole tiles have the partials of the whole gradient."""
    local = _spread(ranks, numel, BF16)
    expected = (_left_fold([*local]) * torch.tensor(1 / ranks)).bfloat16()
    wanted = sum_of_squares_reference(expected)
    partials = torch.full((tiles(numel),), torch.nan, device=backend.device)
    for own, part in _shards(numel, ranks):
        pieces = torch.full((ranks, part.padded), torch.nan, dtype=BF16)
        pieces[:, : part.numel] = local[:, own]
        gradient = torch.full((pieces.shape[1],), torch.nan, dtype=BF16, device=backend.device)
        factor = torch.tensor(1 / ranks).item()
        fold(pieces.to(backend.device), [part], gradient=gradient, factor=factor, partials=partials)
        same_bits(gradient[: part.numel], expected[own])
    whole = sorted({tile for _, part in _shards(numel, ranks) for tile in part.whole_tiles})
    same_bits(partials[whole], wanted[whole])
    assert (~partials.isnan()).nonzero().flatten().tolist() == whole
    cut = {own.stop // TILE for own, _ in _shards(numel, ranks) if own.stop < numel}
    assert whole == [tile for tile in range(tiles(numel)) if tile not in cut]


@pytest.mark.parametrize("begin", ["fp32 gradient", "filled with -0.0"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_micro_batches_are_one_left_fold_that_is_rounded_once(backend: Any, dtype: torch.dtype, begin: str) -> None:
    """Three micro-batches of two ranks, as six micro-batches of one rank."""
    numel = TILE + 128
    rows = _spread(6, numel, dtype)
    rows[:, :2] = torch.tensor([0.0, -0.0])
    batches = [rows[first : first + 2].to(backend.device) for first in (0, 2, 4)]
    accumulator = torch.full((numel,), torch.nan, device=backend.device)
    if begin == "fp32 gradient":
        fold(batches[0], _whole(numel), gradient=accumulator, factor=1.0)
    else:
        accumulator.fill_(-0.0)
        fold(batches[0], _whole(numel), gradient=None, accumulator=accumulator, factor=1.0)
    same_bits(accumulator, _left_fold([*rows[:2]]))
    fold(batches[1], _whole(numel), gradient=None, accumulator=accumulator, factor=1.0)
    gradient = torch.full((numel,), torch.nan, dtype=dtype, device=backend.device)
    partials = torch.full((2,), torch.nan, device=backend.device)
    options: Any = {"gradient": gradient, "accumulator": accumulator, "partials": partials}
    fold(batches[2], _whole(numel), **options, factor=torch.tensor(1 / 6).item())
    total = _left_fold([*rows])
    assert not torch.equal(total, _left_fold([*rows.flip(0)])), "another order would do"
    same_bits(accumulator, total)
    same_bits(gradient, (total * torch.tensor(1 / 6)).to(dtype))
    same_bits(partials, sum_of_squares_reference(gradient.cpu()))


@pytest.mark.parametrize(("dtype", "absent"), [(BF16, (0,)), (FP16, (1, 2)), (FP32, (0, 1))])
def test_a_rank_without_a_gradient_changes_nothing(backend: Any, dtype: torch.dtype, absent: tuple[int, ...]) -> None:
    """Its piece is -0.0. Values of the others may be zeros of either sign, subnormal, infinite or NaN."""
    numel = TILE
    pieces = torch.stack([any_bits(7, numel)] * 3).to(dtype)
    pieces[1] = pieces[1].roll(numel // 2)
    pieces[2] = -pieces[2]
    pieces[:, -4:] = torch.tensor([[0.0, -0.0, 0.0, -0.0], [0.0, -0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0]])
    for rank in absent:
        pieces[rank] = -0.0
    expected = _left_fold([piece for rank, piece in enumerate(pieces) if rank not in absent])
    for kind in (FP32, dtype):
        gradient = torch.full((numel,), torch.nan, dtype=kind, device=backend.device)
        fold(pieces.to(backend.device), _whole(numel), gradient=gradient, factor=1.0)
        same_bits(gradient, expected.to(kind))


def test_nothing_to_fold(backend: Any) -> None:
    gradient, partials = torch.ones(128, device=backend.device), torch.ones(1, device=backend.device)
    pieces = torch.zeros(2, 128, device=backend.device)
    nothing = [Slice(offset=0, numel=0, first=0, parameter_numel=300, partial_offset=0)]
    for slices in ([], nothing):
        fold(pieces, slices, gradient=gradient, partials=partials, factor=1.0)
        assert gradient.cpu().tolist() == [1.0] * 128
        assert partials.item() == 1.0
    fold(pieces[:, :0], nothing, gradient=gradient[:0], partials=partials, factor=1.0)
    assert partials.item() == 1.0


@pytest.mark.gpu
def test_more_elements_than_a_32_bit_integer_counts() -> None:
    """Pieces of more than 2^31 elements together, and then a single one of that many."""
    for ranks, numel in ((3, (1 << 30) + TILE + 128), (1, (1 << 31) + TILE + 128)):
        pieces = torch.zeros(ranks, numel, dtype=BF16, device="cuda")
        pieces[-1, 0], pieces[-1, -1] = 1.0, 3.0
        gradient = torch.full((numel,), torch.nan, dtype=BF16, device="cuda")
        partials = torch.full((tiles(numel),), torch.nan, device="cuda")
        fold(pieces, _whole(numel), gradient=gradient, factor=1.0, partials=partials)
        assert torch.equal(gradient, pieces[-1])
        assert (partials[0].item(), partials[-1].item(), partials.sum().item()) == (1.0, 9.0, 10.0)


@pytest.mark.parametrize("most", [2 * TILE, 5 * TILE + 128, 1 << 25])
def test_a_range_in_parts_has_the_bits_of_the_whole(backend: Any, most: int) -> None:
    """Also of pieces that are parts of longer rows, and with a parameter that begins before the range."""
    begun = 3 * TILE + 256
    numels = (100, 4 * TILE, 7, 128, 9 * TILE + 5)
    slices, offset, partial = _laid_out([(begun, 2 * TILE - 256, 5 * TILE), *((0, n, n) for n in numels)])
    generator = torch.Generator().manual_seed(0)
    pieces = torch.randn(3, offset, generator=generator).bfloat16().to(backend.device)
    start = torch.randn(offset, generator=generator).to(backend.device)
    found = []
    for parts in ([(slice(0, offset), tuple(slices))], in_parts(tuple(slices), most)):
        assert [part.start for part, _ in parts] == [0, *(part.stop for part, _ in parts[:-1])]
        assert parts[-1][0].stop == offset
        total, gradient = start.clone(), torch.zeros(offset, dtype=BF16, device=backend.device)
        partials = torch.zeros(partial, device=backend.device)
        for part, own in parts:
            assert part.stop - part.start <= max(most, offset * (len(parts) == 1))
            options: Any = {"gradient": gradient[part], "accumulator": total[part], "partials": partials}
            fold(pieces[:, part], own, factor=0.5, **options)
        found.append((total, gradient, partials))
    for ours, theirs in zip(*found, strict=True):
        same_bits(ours, theirs)


def test_partials_of_tiles_that_are_cut_need_no_room() -> None:
    """Only the first of the parameter's three tiles is whole, so one partial is enough."""
    part = Slice(offset=0, numel=TILE + 128, first=0, parameter_numel=3 * TILE, partial_offset=0)
    gradient, partials = torch.zeros(part.padded), torch.zeros(1)
    fold(torch.ones(2, part.padded), [part], gradient=gradient, factor=1.0, partials=partials)
    assert partials.tolist() == [4.0 * TILE]
