"""All plans, in columns, and which of them need not be simulated because they cannot win.

Block modes fix the activations, so per choice of modes only the placement of chunks is left; for one number of
persistent chunks more buffers never make a step slower, so all that fit are taken. What is left is a number of
checkpointed blocks for every column: a number of swapped blocks and of persistent chunks. Columns go in the order of a
bound; what a column holds is simulated (:mod:`protrain.planning.simulate`) unless

- ``RuntimeModel.bound_ms`` is too long;
- that bound or the step with every chunk in a buffer is, which ends the column: from as many checkpointed as swapped
  blocks on, one more block is recomputed and nothing else changes, and neither that nor fewer buffers makes a step
  faster;
- such a step is hardly faster than with the buffers that fit: what more checkpointing makes room for gains nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.planning.memory import Activations, MemoryModel
from protrain.planning.plan import BlockMode, block_modes
from protrain.planning.runtime import RuntimeModel, Undisturbed
from protrain.profiler.model_profile import ModelProfile

# What is at most this much faster than the fastest found isn't looked for: the prediction is no better.
_GAIN = 0.003


class Candidate(NamedTuple):
    """A plan that fits."""

    step_ms: float
    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int


class _Choice(NamedTuple):
    """A choice of block modes with a column's number of swapped blocks."""

    n_ckpt: int
    modes: tuple[BlockMode, ...]
    activations: Activations
    step: Undisturbed


class _Column(NamedTuple):
    n_swap: int
    n_persist: int
    choices: list[_Choice]  # by n_ckpt, ascending; the first fits
    bound_ms: float  # no plan of the column is faster


class Columns:
    """One search.

    Args:
        profile: of the model.
        hardware: the limits.
        memory: the memory model of both.
        runtime: the runtime model.
        tolerance: plans this much slower than the fastest are kept.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        memory: MemoryModel,
        runtime: RuntimeModel,
        *,
        tolerance: float,
    ) -> None:
        self._hardware = hardware
        self._memory = memory
        self._runtime = runtime
        self._tolerance = tolerance
        self._n_blocks = len(profile.blocks)
        self._n_chunks = len(memory.layout.chunks)
        self._fastest_ms = float("inf")
        self._found: list[Candidate] = []

    def walk(self) -> list[Candidate]:
        """Whatever was the fastest when it was found, or hardly slower; empty when nothing fits."""
        columns = [column for n_swap in range(self._n_blocks + 1) for column in self._columns(n_swap)]
        # A good plan early leaves little to simulate: first what does not swap.
        for column in sorted(columns, key=lambda column: (column.n_swap > 0, column.bound_ms)):
            if self._may_win(column.bound_ms):
                self._walk(column)
        return self._found

    def _may_win(self, bound_ms: float) -> bool:
        return bound_ms < self._fastest_ms * (1 - _GAIN)

    def _columns(self, n_swap: int) -> list[_Column]:
        """Those of ``n_swap`` that hold any plan that fits."""
        memory, hardware = self._memory, self._hardware
        choices = []
        for n_ckpt in range(self._n_blocks - n_swap + 1):
            if memory.kept_bytes(n_swap + n_ckpt) <= hardware.device_bytes:
                modes = block_modes(self._n_blocks, n_swap, n_ckpt)
                choices.append(_Choice(n_ckpt, modes, memory.activations(modes), self._runtime.undisturbed(modes)))
        columns = []
        for n_persist in range(self._n_chunks + 1):
            left = hardware.device_bytes - memory.static_bytes(n_persist, memory.least_buffers(n_persist))
            fits = (at for at, one in enumerate(choices) if memory.margined_bytes(one.activations) <= left)
            first = next(fits, None)
            if first is None:
                break  # more persistent chunks need only more
            if memory.host_bytes(n_persist, choices[first].activations) <= hardware.host_bytes:
                # More checkpointed than swapped blocks only add; fewer give swapping room, which may take less.
                last = max(first, n_swap - choices[0].n_ckpt)
                bound_ms = min(
                    self._runtime.bound_ms(one.step, n_persist, self._n_chunks - n_persist)
                    for one in choices[first : last + 1]
                )
                columns.append(_Column(n_swap, n_persist, choices[first:], bound_ms))
        return columns

    def _walk(self, column: _Column) -> None:
        memory, runtime = self._memory, self._runtime
        n_swap, n_persist = column.n_swap, column.n_persist
        least_buffers, all_buffers = memory.least_buffers(n_persist), self._n_chunks - n_persist
        room = self._hardware.device_bytes - memory.static_bytes(n_persist, least_buffers)
        before = -1
        for n_ckpt, modes, activations, step in column.choices:
            if n_ckpt >= n_swap and not self._may_win(runtime.bound_ms(step, n_persist, all_buffers)):
                return
            spare = room - memory.margined_bytes(activations)
            if spare < 0:
                continue
            n_buffer = min(all_buffers, least_buffers + spare // memory.buffer_bytes)
            if n_buffer == before and n_ckpt > n_swap:
                continue  # one more is recomputed for nothing
            before = n_buffer
            if not self._may_win(runtime.bound_ms(step, n_persist, n_buffer)):
                continue
            limit_ms = self._fastest_ms * (1 + self._tolerance)
            unlimited_ms = None
            if n_ckpt >= n_swap:
                unlimited_ms = runtime.step_ms(modes, n_persist, all_buffers, limit_ms=limit_ms)
                if unlimited_ms >= limit_ms:
                    return
            if unlimited_ms is not None and n_buffer == all_buffers:
                step_ms = unlimited_ms
            else:
                step_ms = runtime.step_ms(modes, n_persist, n_buffer, limit_ms=limit_ms)
            if step_ms < limit_ms:
                self._found.append(Candidate(step_ms, n_persist, n_buffer, n_swap, n_ckpt))
                self._fastest_ms = min(self._fastest_ms, step_ms)
            if unlimited_ms is not None and step_ms <= unlimited_ms * (1 + _GAIN):
                return
