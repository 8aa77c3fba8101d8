"""Sums of squares of gradients, from which norms are made.

Every tile of a parameter has a partial sum, which the pass that flattens or adds up its gradients leaves. All partial
sums are added in one fixed order, so a norm has the same bits under every plan. An fp32 sum of several gradients is
rounded to the type of the weights before it is squared, as the update rounds it.

[Note: cut tiles] With several ranks, each computes the sums of the tiles that lie wholly in its shards. A shard may
begin or end in the middle of a tile, at most size - 1 times in a chunk. The ranks exchange the values of such tiles,
and all compute their sums. So every rank ends with all sums, and they have the bits of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Member
from protrain_kernels import Slice, flatten, tiles
from protrain_kernels.checks import TILE


class SquareSums:
    """The partial sums of squares of all trainable parameters, on the device.

    Args:
        memory: where they are allocated.
        members: all managed parameters.
        cut_tiles: the tiles that shards cut, as (parameter, tile of it).
    """

    def __init__(self, memory: EngineMemory, members: list[Member], cut_tiles: Sequence[tuple[int, int]]) -> None:
        self._tiles = {member.index: tiles(member.numel) for member in members if member.group >= 0}
        *starts, n_tiles = accumulate(self._tiles.values(), initial=0)
        self.offsets = dict(zip(self._tiles, starts, strict=True))  # where the partial sums of a parameter begin
        self.partials = memory.zeros(n_tiles, dtype=torch.float32)
        self._ranks = memory.ranks
        cut = [self.offsets[parameter] + tile for parameter, tile in cut_tiles]
        self._row_of_cut = {partial: row for row, partial in enumerate(cut)}
        self._cut_partials_on_device = torch.tensor(cut, dtype=torch.int64, device=memory.device)
        self._cut = memory.zeros(len(cut), TILE)
        # The sums of all ranks. ``partials`` stay those of this rank, to which another backward may add.
        self._all = memory.zeros(n_tiles, dtype=torch.float32) if memory.ranks.several else self.partials
        self._all_cut = memory.zeros(len(cut), TILE)
        self._cut_sums = memory.streams.record_streams(torch.zeros(len(cut), dtype=torch.float32, device=memory.device))

    def reset(self) -> None:
        """Forget all gradients."""
        self.partials.zero_()
        self._cut.zero_()

    def keep_cut_tiles(self, slices: Sequence[Slice], values: Tensor) -> None:
        """Keep what ``values``, the reduced gradients of ``slices``, has of cut tiles. See [Note: cut tiles]."""
        for part in slices:
            ends = {part.first // TILE, tiles(part.stop) - 1} if part.numel else set()
            for tile in (tile for tile in ends if tile not in part.whole_tiles):
                begin, stop = max(part.first, tile * TILE), min(part.stop, (tile + 1) * TILE)
                row = self._cut[self._row_of_cut[part.partial_offset + tile]]
                row[begin - tile * TILE : stop - tile * TILE].copy_(
                    values[part.offset + begin - part.first : part.offset + stop - part.first]
                )

    def combine(self) -> None:
        """Make all sums known to this rank. All ranks call it when their gradients are reduced."""
        self._all.copy_(self.partials)
        self._ranks.add_disjoint(self._all, "the norm of the gradients")
        if self._row_of_cut:
            self._all_cut.copy_(self._cut)
            self._ranks.add_disjoint(self._all_cut, "the norm of the gradients")
            # The values stay where they are, and are summed up.
            flatten([self._all_cut], self._all_cut.view(-1), [0], self._cut_sums, [0])
            self._all[self._cut_partials_on_device] = self._cut_sums

    def total(self) -> Tensor:
        """The sum of squares of all gradients: fp64, 0-d, on the device."""
        return self._all.double().sum()

    def by_parameter(self) -> tuple[list[int], Tensor]:
        """The indices of all trainable parameters, and the sums of squares of their gradients: fp64, on the device."""
        parts = self._all.double().split(list(self._tiles.values()))
        # The 1-norm of squares is their sum, as they are positive.
        return list(self.offsets), torch.stack(torch._foreach_norm(parts, 1))
