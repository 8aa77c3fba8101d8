"""Sums of squares of gradients, from which norms are made.

Every tile of a parameter has a partial sum. Gradients that are flattened on the device leave theirs in the same pass.
The partial sums of gradients that are summed in host memory are computed there when a norm is asked for. All partial
sums are added in one fixed order, so a norm has the same bits under every plan. An fp32 sum of several gradients is
rounded to the type of the weights before it is squared, as the update rounds it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from protrain.engine.states.arena import EngineMemory
from protrain.engine.states.chunks import Member
from protrain_kernels import sum_of_squares, tiles


class SquareSums:
    """The partial sums of squares of all trainable parameters, on the device.

    Args:
        memory: where they are allocated.
        members: all managed parameters.
    """

    def __init__(self, memory: EngineMemory, members: list[Member]) -> None:
        self._memory = memory
        self._members = [member for member in members if member.group >= 0]
        self.offsets: dict[int, int] = {}  # where the partial sums of a parameter begin, by its index
        n_tiles = 0
        for member in self._members:
            self.offsets[member.index] = n_tiles
            n_tiles += tiles(member.numel)
        self.partials = torch.zeros(n_tiles, dtype=torch.float32, device=memory.device)
        self._computed = memory.streams.mark()
        self._uploaded = memory.streams.mark()
        self._host_partials: Tensor | None = None

    def reset(self) -> None:
        """Forget all gradients."""
        self.partials.zero_()

    def total(self, present: list[bool]) -> Tensor:
        """The sum of squares of all gradients: fp64, 0-d, on the device. ``present`` tells who has a gradient."""
        self._complete(present)
        return self.partials.double().sum()

    def by_parameter(self, present: list[bool]) -> tuple[list[int], Tensor]:
        """The indices of all trainable parameters, and the sums of squares of their gradients: fp64, on the device."""
        self._complete(present)
        parts = self.partials.double().split([tiles(member.numel) for member in self._members])
        # The 1-norm of squares is their sum, as they are positive.
        return list(self.offsets), torch.stack(torch._foreach_norm(parts, 1))

    def _complete(self, present: list[bool]) -> None:
        """Bring the partial sums of gradients that are summed in host memory to the device."""
        members = [member for member in self._members if member.chunk.accumulator_on_host]
        if not members:
            return
        streams = self._memory.streams
        if self._host_partials is None:
            self._host_partials = self._memory.arena.take(self.partials.numel(), torch.float32)
            self._from_host = torch.empty_like(self.partials)
            self._on_host = torch.zeros_like(self.partials, dtype=torch.bool)
        host_partials = self._host_partials
        host_partials.zero_()
        for member in members:
            start = self.offsets[member.index]
            stop = start + tiles(member.numel)
            self._on_host[start:stop] = True
            if present[member.index]:
                member.chunk.wait_for_sum()
                assert member.chunk.accumulator is not None
                values = member.chunk.accumulator[member.offset : member.offset + member.numel]
                sum_of_squares(values, host_partials[start:stop], weight_dtype=self._memory.dtype)
        streams.compute_reached(self._computed)
        streams.upload(self._from_host, host_partials, after=self._computed, done=self._uploaded)
        streams.compute_waits(self._uploaded)
        self._uploaded.wait()  # the next call overwrites the host memory
        torch.where(self._on_host, self._from_host, self.partials, out=self.partials)
