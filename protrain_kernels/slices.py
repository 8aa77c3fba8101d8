"""Parts of parameters as a shard cuts them, and the table by which a kernel finds them.

[Note: row tables] One launch serves any number of slices, and a program takes two tiles of one slice's parameter. Two
small tables on the device say which slice each program works on, and describe each slice by a row of int64:

    row = [offset - first, first, stop, elements of the parameter, offset of its partials, first program]

They are made once for given slices. A later call launches once, without an allocation, a copy or a synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from protrain_kernels.checks import PADDING, TILE, TILE_GROUP, check_vector, padded, tiles


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The part of one parameter that lies in a range of a chunk. All counts are in elements unless they say otherwise.

    A range may begin or end inside a parameter, at a multiple of 128 elements. Only where the parameter itself ends
    does the slice end anywhere, and padding up to the next multiple of 128 follows it in the range.

    Attributes:
        offset: where the slice begins in the range: a multiple of 128.
        numel: how many elements of the parameter it has, without padding; 0 is allowed.
        first: which element of the parameter it begins with: a multiple of 128, and 0 where the parameter begins.
        parameter_numel: how many elements the whole parameter has.
        partial_offset: where the partial sums of squares of the whole parameter begin among all partials, in partials.

    Raises:
        ValueError: no shard can cut a parameter so.
    """

    offset: int
    numel: int
    first: int
    parameter_numel: int
    partial_offset: int

    def __post_init__(self) -> None:
        for name, unit in (("offset", PADDING), ("first", PADDING), ("numel", 1), ("partial_offset", 1)):
            value = getattr(self, name)
            if value < 0 or value % unit:
                raise ValueError(f"{name} is {value}: it must be at least 0 and a multiple of {unit}")
        if self.stop > self.parameter_numel:
            raise ValueError(
                f"a slice of {self.numel} elements from element {self.first} on reaches beyond its parameter, "
                f"which has {self.parameter_numel}: end it there"
            )
        if self.stop < self.parameter_numel and self.numel % PADDING:
            raise ValueError(
                f"numel is {self.numel}: it must be a multiple of {PADDING} where the slice ends before its parameter"
            )

    @property
    def stop(self) -> int:
        """The element of the parameter that follows the slice."""
        return self.first + self.numel

    @property
    def padded(self) -> int:
        """How many elements of the range the slice takes, with its padding."""
        return padded(self.numel)

    @property
    def whole_tiles(self) -> range:
        """Which tiles of the parameter lie wholly in the slice, counted from the parameter's start.

        The last tile of a parameter may be short. It is whole where the slice has all of its elements.
        """
        begin = -(-self.first // TILE)
        end = tiles(self.stop) if self.stop == self.parameter_numel else self.stop // TILE
        return range(begin, max(begin, end))

    @property
    def partial_stop(self) -> int:
        """Where the partials of its whole tiles end among all partials; 0 without such tiles."""
        return self.partial_offset + self.whole_tiles.stop if self.whole_tiles else 0


class RowTable:
    """Slices in a range, as a kernel reads them. See [Note: row tables].

    Args:
        slices: without overlap in the range.
        device: where the kernel runs.

    Raises:
        ValueError: slices overlap.
    """

    def __init__(self, slices: Sequence[Slice], device: torch.device) -> None:
        end = 0
        for index, part in sorted(enumerate(slices), key=lambda item: (item[1].offset, item[1].numel)):
            if part.numel and part.offset < end:
                raise ValueError(
                    f"piece {index} begins at {part.offset}, where another reaches to {end}: leave each room for its "
                    f"elements padded to a multiple of {PADDING}"
                )
            end = max(end, part.offset + part.padded)
        self._elements = end
        self._partials = max((part.partial_stop for part in slices), default=0)
        rows: list[list[int]] = []
        slice_of: list[int] = []
        for index, part in enumerate(slices):
            place = part.offset - part.first
            rows.append([place, part.first, part.stop, part.parameter_numel, part.partial_offset, len(slice_of)])
            touched = tiles(part.stop) - part.first // TILE if part.numel else 0
            slice_of += [index] * -(-touched // TILE_GROUP)
        self.device = device
        self.rows = torch.tensor(rows, dtype=torch.int64).to(device)
        self.slice_of = torch.tensor(slice_of, dtype=torch.int32).to(device)
        self.programs = len(slice_of)
        self.device_index = self.rows.get_device()

    def check_room(self, elements: int, partials: torch.Tensor | None) -> None:
        """ValueError unless a range of ``elements`` holds all slices, and ``partials`` those of their whole tiles."""
        if self._elements > elements:
            raise ValueError(
                f"the pieces reach to element {self._elements} of {elements}: leave each room for its elements padded "
                f"to a multiple of {PADDING}"
            )
        if partials is None:
            return
        check_vector("partials", partials, dtypes=(torch.float32,), device=self.device)
        if self._partials > partials.numel():
            raise ValueError(
                f"the pieces write partials up to {self._partials} of {partials.numel()}: make partials longer"
            )


@lru_cache(maxsize=4096)
def in_parts(slices: tuple[Slice, ...], most: int) -> list[tuple[slice, tuple[Slice, ...]]]:
    """The range of ``slices``, in their order, in parts of at most ``most`` elements, at least two tiles.

    Each part is a piece of the range with the slices in it. No part cuts a tile of a parameter.
    """
    found: list[tuple[slice, tuple[Slice, ...]]] = []
    own: list[Slice] = []  # of the part that begins at ``start``
    start = slices[0].offset
    for each in slices:
        done = 0  # elements of the slice that parts have
        while done < each.numel:
            taken, room = each.numel - done, start + most - each.offset - done
            if padded(taken) > room:
                taken = (each.first + done + room) // TILE * TILE - each.first - done
            if taken > 0:
                own.append(replace(each, offset=each.offset + done - start, numel=taken, first=each.first + done))
                done += taken
            if done < each.numel:
                found.append(_part(start, own))
                own, start = [], each.offset + done
    if own:
        found.append(_part(start, own))
    return found


def _part(start: int, own: list[Slice]) -> tuple[slice, tuple[Slice, ...]]:
    return slice(start, start + own[-1].offset + own[-1].padded), tuple(own)
