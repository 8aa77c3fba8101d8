"""All plans, in columns, and which of them need not be simulated because they cannot win.

Block modes fix the activations, so per choice of modes only the placement of chunks is left. For one number of
persistent chunks more buffers never make a step slower, so all that fit are taken, and of the early updates that fit as
many as the simulation finds best, as of the streamed ones; bounds are of all of them. What is left is a number of
checkpointed blocks for every column: a number of swapped blocks and of persistent chunks. Columns go in the order of a
bound; what a column holds is simulated (:mod:`protrain.planning.simulate`) unless

- ``RuntimeModel.bound_ms`` is too long, or what its number of persistent chunks takes with nothing recomputed or
  swapped;
- that bound or the step with every chunk in a buffer is, which ends the column: from as many checkpointed as swapped
  blocks on, one more block is recomputed and nothing else changes, and neither that nor fewer buffers makes a step
  faster;
- such a step is hardly faster than with the buffers that fit: what more checkpointing makes room for gains nothing;
- ``RuntimeModel.placed_bound_ms``, which knows the order of uploads, is too long. Then steps with every chunk in a
  buffer wait as well: that a column had ended before matters only once something else is found in it.

Bounds are worked out for all choices of block modes at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.choices import Choices
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import block_modes
from protrain.planning.runtime import RuntimeModel, Times
from protrain.profiler.model_profile import ModelProfile

# What is at most this much faster than the fastest found isn't looked for: the prediction is no better.
MUST_GAIN = 0.003
_ROUNDING = 1e-9  # what sums in another order differ by, and more


class Candidate(NamedTuple):
    """A plan that fits."""

    step_ms: float
    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    n_speculate: int
    n_stream: int


class _Column(NamedTuple):
    """Plans with one number of swapped blocks and of persistent chunks."""

    bound_ms: float  # none is faster
    n_swap: int
    n_persist: int
    first: int  # of its choices of block modes: it fits
    end: int


class _Placed(NamedTuple):
    """What holds for every choice of block modes under one number of persistent chunks."""

    n_buffer: NDArray[np.int64]  # negative where the choice doesn't fit
    most_early: NDArray[np.int64]
    bound_ms: Times
    all_bound_ms: Times  # with every chunk in a buffer
    least_ms: Times  # a tighter bound, as far as it is known


class Columns:
    """One search.

    Args:
        profile: of the model.
        hardware: the limits.
        memory: the memory model of both.
        runtime: the runtime model.
        tolerance: plans this much slower than the fastest are kept, unless they swap.
        streams: the device may update some of the chunks in host memory, for which it has the room.
        n_swaps: the numbers of swapped blocks to look at; all when None.
        fastest_ms: of a plan known already; those found must be faster.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        memory: MemoryModel,
        runtime: RuntimeModel,
        *,
        tolerance: float,
        streams: bool = False,
        n_swaps: Collection[int] | None = None,
        fastest_ms: float = float("inf"),
    ) -> None:
        self._hardware = hardware
        self._memory = memory
        self._runtime = runtime
        self._tolerance = tolerance
        self._streams = streams
        self._to_beat = fastest_ms < float("inf")
        self._n_chunks = len(memory.layout.chunks)
        n_blocks = len(profile.blocks)
        counts = [
            (n_swap, n_ckpt)
            for n_swap in range(n_blocks + 1)
            for n_ckpt in range(n_blocks - n_swap + 1)
            if memory.kept_bytes(n_swap + n_ckpt) <= hardware.device_bytes and (n_swaps is None or n_swap in n_swaps)
        ]
        self._modes = [block_modes(n_blocks, *pair) for pair in counts]
        self._n_swap, self._n_ckpt = np.array(counts, dtype=np.int64).reshape(-1, 2).T
        self._choices = Choices.of(self._modes)
        peak, _, self._swapped = memory.all_activations(self._choices)
        self._margined = memory.with_margin(peak)
        self._undisturbed = runtime.undisturbed(self._choices)
        self._placed: dict[int, _Placed] = {}
        self._untouched = block_modes(n_blocks, 0, 0)
        self._untouched_of: dict[tuple[int, int, int], float] = {}  # by n_persist, n_buffer, most early updates
        self._fastest_ms = fastest_ms
        self._found: list[Candidate] = []

    def walk(self) -> list[Candidate]:
        """Whatever was the fastest when it was found, or hardly slower; empty when nothing fits."""
        # A good plan early leaves little to simulate: first what does not swap.
        for column in sorted(self._columns(), key=lambda column: (column.n_swap > 0, column)):
            if self._may_win(column.bound_ms) and self._may_win(self._free_ms(column.n_persist)):
                self._walk(column)
        return self._found

    def _free_ms(self, n_persist: int) -> float:
        """What no plan with ``n_persist`` persistent chunks is faster than, or as much as can't win.

        With the most buffers and early updates that any of them has room for. Worked out once there is a plan to beat.
        """
        if self._fastest_ms == float("inf"):
            return 0.0
        placed = self._place(n_persist)
        most = int(placed.n_buffer.max()), int(placed.most_early.max())
        return self._untouched_ms((n_persist, *most), self._fastest_ms * (1 - MUST_GAIN))

    def _untouched_ms(self, placement: tuple[int, int, int], limit_ms: float) -> float:
        """The step with no block recomputed or swapped, as if there were memory for it, or at least ``limit_ms``.

        What has not been worked out to its end is known to take the limit of then, and limits only fall.
        """
        known = self._untouched_of.get(placement)
        if known is None:
            known, *_ = self._runtime.fitted_ms(self._untouched, *placement, streams=self._streams, limit_ms=limit_ms)
            self._untouched_of[placement] = known
        return known

    def _may_win(self, bound_ms: float) -> bool:
        return bound_ms < self._fastest_ms * (1 - MUST_GAIN)

    def _columns(self) -> Iterator[_Column]:
        """Those that hold any plan that fits."""
        memory, hardware = self._memory, self._hardware
        n_swaps, starts = np.unique(self._n_swap, return_index=True)
        if not starts.size:
            return
        ends = np.append(starts[1:], len(self._modes))
        rows = np.arange(len(self._modes))
        of_column = np.repeat(np.arange(len(starts)), ends - starts)
        # More checkpointed than swapped blocks only add; fewer give swapping room, which may take less.
        balanced = (starts + n_swaps - self._n_ckpt[starts])[of_column]
        for n_persist in range(self._n_chunks + 1):
            left = hardware.device_bytes - self._static_bytes(n_persist, memory.least_buffers(n_persist))
            fits = (self._margined <= left) & self._fits_host(n_persist)
            # Nothing may fit here and yet with more persistent chunks: after the last one none is staged or buffered.
            if not fits.any():
                continue
            firsts = np.minimum.reduceat(np.where(fits, rows, len(rows)), starts)
            first = firsts[of_column]
            counts = (rows >= first) & (rows <= np.maximum(first, balanced))
            all_buffers, most_early = self._n_chunks - n_persist, self._most_early(n_persist)
            bound_ms = self._bound_ms(n_persist, all_buffers, most_early)
            bounds_ms = np.minimum.reduceat(np.where(counts, bound_ms, np.inf), starts).tolist()
            for at in np.flatnonzero(firsts < len(rows)).tolist():
                yield _Column(bounds_ms[at], int(n_swaps[at]), n_persist, int(firsts[at]), int(ends[at]))

    def _static_bytes(self, n_persist: int, n_buffer: int) -> int:
        return self._memory.static_bytes(n_persist, n_buffer, n_stream=int(self._streams))

    def _bound_ms(self, n_persist: int, n_buffer: NDArray[np.int64] | int, most_early: NDArray[np.int64]) -> Times:
        return self._runtime.bound_ms(self._undisturbed, n_persist, n_buffer, most_early, streams=self._streams)

    def _fits_host(self, n_persist: int) -> NDArray[np.bool_]:
        """Whether host memory has room, by choice: which blocks are swapped depends on what lies between them."""
        return self._memory.host_bytes_beside(n_persist, 0) + self._swapped <= self._hardware.host_bytes

    def _most_early(self, n_persist: int) -> NDArray[np.int64]:
        """Early updates that host memory has room for, by choice."""
        if not self._runtime.speculates:
            return np.zeros(len(self._modes), dtype=np.int64)
        return self._memory.most_speculated(n_persist, self._swapped)

    def _place(self, n_persist: int) -> _Placed:
        placed = self._placed.get(n_persist)
        if placed is None:
            memory, all_buffers = self._memory, self._n_chunks - n_persist
            least_buffers = memory.least_buffers(n_persist)
            spare = self._hardware.device_bytes - self._static_bytes(n_persist, least_buffers) - self._margined
            n_buffer = np.minimum(all_buffers, least_buffers + spare // memory.buffer_bytes)
            n_buffer = np.where((spare < 0) | ~self._fits_host(n_persist), -1, n_buffer)
            most_early = self._most_early(n_persist)
            placed = self._placed[n_persist] = _Placed(
                n_buffer=n_buffer,
                most_early=most_early,
                bound_ms=self._bound_ms(n_persist, n_buffer, most_early),
                all_bound_ms=self._bound_ms(n_persist, all_buffers, most_early),
                least_ms=np.full(len(n_buffer), np.nan),
            )
        return placed

    def _least_ms(self, row: int, n_persist: int) -> float:
        """A tighter bound of what a choice of block modes takes with all buffers that fit."""
        placed = self._place(n_persist)
        if np.isnan(placed.least_ms[row]):
            n_buffer = int(placed.n_buffer[row])
            same = np.flatnonzero(placed.n_buffer == n_buffer)
            choices, step = self._choices.some(same), self._undisturbed.some(same)
            early = placed.most_early[same]
            placed.least_ms[same] = self._runtime.placed_bound_ms(
                step, choices, n_persist, n_buffer, early, streams=self._streams
            )
        return float(placed.least_ms[row])

    def _walk(self, column: _Column) -> None:
        n_swap, n_persist = column.n_swap, column.n_persist
        placed, all_buffers = self._place(n_persist), self._n_chunks - n_persist
        postponed: list[int] = []
        before = -1
        for row in range(column.first, column.end):
            n_ckpt, n_buffer = int(self._n_ckpt[row]), int(placed.n_buffer[row])
            if n_ckpt >= n_swap and not self._may_win(float(placed.all_bound_ms[row])):
                return
            if n_buffer < 0:
                continue
            if n_buffer == before and n_ckpt > n_swap:
                continue  # one more is recomputed for nothing
            before = n_buffer
            if not self._may_win(float(placed.bound_ms[row])):
                continue
            # Swapping and streaming must pay: what they free is not worth having for the same time.
            must_gain = self._to_beat or (n_swap and self._found)
            limit_ms = self._fastest_ms * (1 - MUST_GAIN if must_gain else 1 + self._tolerance)
            step_ms, n_speculate, n_stream = self._step_ms(row, n_persist, limit_ms)
            ends_column = n_ckpt >= n_swap
            if step_ms >= limit_ms:
                if ends_column and n_buffer == all_buffers:
                    return
                if ends_column:
                    postponed.append(row)
                continue
            # Whether the column ended before matters only now that it would change anything.
            if any(self._ends_column(one, n_persist, limit_ms) for one in postponed):
                return
            postponed.clear()
            unlimited_ms = step_ms
            if ends_column and n_buffer < all_buffers:
                unlimited_ms, *_ = self._simulated_ms(row, n_persist, all_buffers, limit_ms)
                if unlimited_ms >= limit_ms:
                    return
            self._found.append(Candidate(step_ms, n_persist, n_buffer, n_swap, n_ckpt, n_speculate, n_stream))
            self._fastest_ms = min(self._fastest_ms, step_ms)
            if ends_column and step_ms <= unlimited_ms * (1 + MUST_GAIN):
                return

    def _step_ms(self, row: int, n_persist: int, limit_ms: float) -> tuple[float, int, int]:
        """Of a choice of block modes with all buffers that fit, and its early and its streamed updates.

        Infinite when it cannot be below ``limit_ms``.
        """
        if self._least_ms(row, n_persist) * (1 - _ROUNDING) >= limit_ms:
            return float("inf"), 0, 0
        placed = self._place(n_persist)
        n_buffer = int(placed.n_buffer[row])
        # Without swapping most placements are met once. With it, again and again.
        if self._n_swap[row]:
            placement = n_persist, n_buffer, int(placed.most_early[row])
            if self._untouched_ms(placement, limit_ms) >= limit_ms:
                return float("inf"), 0, 0
        return self._simulated_ms(row, n_persist, n_buffer, limit_ms)

    def _simulated_ms(
        self, row: int, n_persist: int, n_buffer: int, limit_ms: float = float("inf")
    ) -> tuple[float, int, int]:
        most_early = int(self._place(n_persist).most_early[row])
        return self._runtime.fitted_ms(
            self._modes[row], n_persist, n_buffer, most_early, streams=self._streams, limit_ms=limit_ms
        )

    def _ends_column(self, row: int, n_persist: int, limit_ms: float) -> bool:
        """Whether a choice that takes ``limit_ms`` or more leaves nothing to find in its column."""
        n_buffer = int(self._place(n_persist).n_buffer[row])
        unlimited_ms, *_ = self._simulated_ms(row, n_persist, self._n_chunks - n_persist, limit_ms)
        if unlimited_ms >= limit_ms:
            return True
        hardly_slower_ms = unlimited_ms * (1 + MUST_GAIN)
        return hardly_slower_ms >= limit_ms and self._simulated_ms(row, n_persist, n_buffer)[0] <= hardly_slower_ms
