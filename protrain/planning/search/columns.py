"""All plans, in columns, and which of them need not be simulated because they cannot win.

Block modes fix the activations, so per choice of modes only the placement of chunks is left. For one number of
persistent chunks more buffers never make a step slower, so all that fit are taken, and of the early updates that fit as
many as the simulation finds best; bounds are of all of them. Inside backward gradients have what host memory is left:
what swaps or moves leaves them less, and backward is no shorter for it. What is left is a number of checkpointed blocks
for every column: a number of swapped blocks and of persistent chunks. Columns go in the order of a bound; what a column
holds is simulated (:mod:`protrain.planning.runtime.simulate`) unless

- ``Bounds.bound_ms`` is too long, or what its number of persistent chunks takes with nothing recomputed or
  swapped;
- that bound or the step with every chunk in a buffer is, which ends the column: from as many checkpointed as swapped
  blocks on, one more block is recomputed and nothing else changes, and neither that nor fewer buffers makes a step
  faster;
- such a step is hardly faster than with the buffers that fit: what more checkpointing makes room for gains nothing;
- ``Bounds.placed_bound_ms``, which knows the order of uploads, is too long. Then steps with every chunk in a
  buffer wait as well: that a column had ended before matters only once something else is found in it.

Inputs of recomputed blocks that move to host memory make a column of their own beside each of these, for what moves
only makes a step longer: what it gains is room for buffers (:mod:`protrain.planning.search.moves`). So bounds are those
of the same step with as many buffers as fit when all inputs move, and none of that costs anything. A choice of block
modes is left out unless that is more buffers than fit with all inputs kept and such a step is fast enough; only then
numbers of moved inputs are tried, from the most buffers down, until as many buffers would be too slow at no cost. As
with swapping, what moves must pay.

Plans whose early updates make weights alone are walked after the others, in the same way: the bounds hold for them, and
what is not faster than the fastest of the others by WEIGHTS_GAIN is left out.

Bounds are worked out for all choices of block modes at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.choices import Choices
from protrain.planning.memory.model import Bytes, MemoryModel
from protrain.planning.plan import BlockMode, block_modes
from protrain.planning.runtime.bounds import Times
from protrain.planning.runtime.model import RuntimeModel
from protrain.planning.search.moves import Moves
from protrain.planning.search.relaxed import Relaxed
from protrain.profiler.model_profile import ModelProfile

# What is at most this much faster than the fastest found isn't looked for: the prediction is no better.
_GAIN = 0.003
# The same of early updates of weights alone, for which the host does more in all.
WEIGHTS_GAIN = 0.01
# Steps tried among those, after which no further column is begun: most find their best within 20, and where bounds
# say little, showing that nothing else is faster took hundreds.
_WEIGHTS_TRIED = 80
_ROUNDING = 1e-9  # what sums in another order differ by, and more


class Candidate(NamedTuple):
    """A plan that fits."""

    step_ms: float
    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    n_ckpt_swap: int
    n_speculate: int


class _Column(NamedTuple):
    """Plans with one number of swapped blocks and of persistent chunks, whose inputs all stay or some of them move."""

    bound_ms: float  # none is faster
    n_swap: int
    n_persist: int
    moves: bool
    first: int  # of its choices of block modes: it fits
    end: int


class _Placed(NamedTuple):
    """What holds for every choice of block modes under one number of persistent chunks.

    Where inputs move: if all of them did at no cost.
    """

    n_buffer: NDArray[np.int64]  # negative where the choice doesn't fit, or fits as many with all inputs kept
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
        moves: what fits when inputs move.
        tolerance: plans this much slower than the fastest are kept, unless they swap or move inputs.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        memory: MemoryModel,
        runtime: RuntimeModel,
        moves: Moves,
        *,
        tolerance: float,
    ) -> None:
        self._hardware = hardware
        self._kinds = {False: (memory, runtime), True: (memory.making_weights(), runtime.making_weights())}
        self._memory, self._runtime = memory, runtime
        self._moves = moves
        self._tolerance = tolerance
        self._n_chunks = len(memory.layout.chunks)
        n_blocks = len(profile.blocks)
        counts = [
            (n_swap, n_ckpt)
            for n_swap in range(n_blocks + 1)
            for n_ckpt in range(n_blocks - n_swap + 1)
            if memory.kept_bytes(n_swap + n_ckpt) <= hardware.device_bytes
        ]
        self._n_swap, self._n_ckpt = np.array(counts, dtype=np.int64).reshape(-1, 2).T
        self._choices = Choices.of_counts(n_blocks, self._n_swap, self._n_ckpt)
        peak, _, self._swapped = memory.all_activations(self._choices)
        peak_moved, _, _ = memory.all_activations(self._choices._replace(ckpt_swap=self._choices.ckpt))
        self._margined = memory.with_margin(peak), memory.with_margin(peak_moved)  # all inputs kept, all moved
        self._undisturbed = runtime.undisturbed(self._choices)
        self._n_blocks = n_blocks
        self._begin()

    def _begin(self, *, weights: bool = False, limit_ms: float = inf) -> None:
        self._limit_ms, self._fastest_ms = limit_ms, inf
        self._memory, self._runtime = self._kinds[weights]
        self._gain = WEIGHTS_GAIN if weights else _GAIN
        self._placed: dict[tuple[int, bool], _Placed] = {}  # by n_persist and moves
        self._relaxed = Relaxed(self._runtime, self._choices, self._n_swap)
        self._found: list[Candidate] = []
        self._n_simulated = 0

    def walk(self, *, weights: bool = False, limit_ms: float = inf) -> list[Candidate]:
        """Whatever was the fastest when it was found, or hardly slower; empty when nothing fits.

        Args:
            weights: of the plans whose early updates are of weights alone; without, of all others.
            limit_ms: what is not faster is of no interest.
        """
        self._begin(weights=weights, limit_ms=limit_ms)
        # A good plan early leaves little to simulate: first what does not swap, and of that what moves no inputs.
        for column in sorted(self._columns(), key=lambda column: (column.n_swap > 0, column.moves, column)):
            if weights and self._n_simulated > _WEIGHTS_TRIED:
                break
            if self._may_win(column.bound_ms) and self._may_win(self._free_ms(column)):
                (self._walk_moves if column.moves else self._walk)(column)
        return self._found

    def _free_ms(self, column: _Column) -> float:
        """What no plan with that many persistent chunks is faster than, or as much as can't win.

        With the most buffers and early updates that any of them has room for. Worked out once there is a plan to beat.
        """
        if self._paying_ms == inf:
            return 0.0
        placed = self._place(column.n_persist, column.moves)
        most = int(placed.n_buffer.max()), int(placed.most_early.max())
        return self._relaxed.untouched_ms((column.n_persist, *most), self._paying_ms)

    def _may_win(self, bound_ms: float) -> bool:
        return bound_ms < self._paying_ms

    @property
    def _paying_ms(self) -> float:
        """What is not faster isn't worth looking for."""
        return min(self._limit_ms, self._fastest_ms * (1 - self._gain))

    def _columns(self) -> Iterator[_Column]:
        """Those that hold any plan that fits."""
        n_swaps, starts = np.unique(self._n_swap, return_index=True)
        if not starts.size:
            return
        ends = np.append(starts[1:], len(self._n_swap))
        rows = np.arange(len(self._n_swap))
        of_column = np.repeat(np.arange(len(starts)), ends - starts)
        # More checkpointed than swapped blocks only add; fewer give swapping room, which may take less.
        balanced = (starts + n_swaps - self._n_ckpt[starts])[of_column]
        for n_persist, moves in product(range(self._n_chunks + 1), (False, True)):
            fits = self._most_buffers(n_persist, moves) >= 0
            # Nothing may fit here and yet with more persistent chunks: after the last one none is staged or buffered.
            if not fits.any():
                continue
            firsts = np.minimum.reduceat(np.where(fits, rows, len(rows)), starts)
            first = firsts[of_column]
            counts = (rows >= first) & (rows <= np.maximum(first, balanced))
            all_buffers, most_early = self._memory.all_buffers(n_persist), self._most_early(n_persist)
            bound_ms = self._runtime.bound_ms(self._undisturbed, n_persist, all_buffers, most_early)
            bounds_ms = np.minimum.reduceat(np.where(counts, bound_ms, np.inf), starts).tolist()
            for at in np.flatnonzero(firsts < len(rows)).tolist():
                yield _Column(bounds_ms[at], int(n_swaps[at]), n_persist, moves, int(firsts[at]), int(ends[at]))

    def _most_buffers(self, n_persist: int, moves: bool) -> Bytes:
        """``_Placed.n_buffer``."""
        kept, moved = (self._memory.most_buffers(n_persist, margined) for margined in self._margined)
        swaps = self._n_swap > 0
        n_buffer = np.where(swaps | (moved > kept), moved, -1) if moves else np.where(swaps, -1, kept)
        return np.where(self._fits_host(n_persist), n_buffer, -1)

    def _fits_host(self, n_persist: int) -> NDArray[np.bool_]:
        """Whether host memory has room, by choice: which blocks are swapped depends on what lies between them."""
        return self._memory.host_bytes_beside(n_persist, 0) + self._swapped <= self._hardware.host_bytes

    def _most_early(self, n_persist: int) -> NDArray[np.int64]:
        """Early updates that host memory has room for, by choice."""
        return self._early(n_persist, self._swapped)

    def _early(self, n_persist: int, swapped_bytes: Bytes) -> NDArray[np.int64]:
        if not self._runtime.speculates:
            return np.zeros_like(swapped_bytes)
        return self._memory.most_early(n_persist, swapped_bytes)

    def _place(self, n_persist: int, moves: bool) -> _Placed:
        placed = self._placed.get((n_persist, moves))
        if placed is None:
            runtime, all_buffers = self._runtime, self._memory.all_buffers(n_persist)
            n_buffer = self._most_buffers(n_persist, moves)
            most_early = self._most_early(n_persist)
            placed = self._placed[n_persist, moves] = _Placed(
                n_buffer=n_buffer,
                most_early=most_early,
                bound_ms=runtime.bound_ms(self._undisturbed, n_persist, n_buffer, most_early),
                all_bound_ms=runtime.bound_ms(self._undisturbed, n_persist, all_buffers, most_early),
                least_ms=np.full(len(n_buffer), np.nan),
            )
        return placed

    def _least_ms(self, row: int, n_persist: int, moves: bool) -> float:
        """A tighter bound of what a choice of block modes takes with all buffers that fit."""
        placed = self._place(n_persist, moves)
        if np.isnan(placed.least_ms[row]):
            n_buffer = int(placed.n_buffer[row])
            # Of all that it will be asked of, as limits only fall.
            same = np.flatnonzero((placed.n_buffer == n_buffer) & (placed.bound_ms < self._paying_ms))
            choices, step = self._choices.some(same), self._undisturbed.some(same)
            early = placed.most_early[same]
            placed.least_ms[same] = self._runtime.placed_bound_ms(step, choices, n_persist, n_buffer, early)
        return float(placed.least_ms[row])

    def _walk(self, column: _Column) -> None:
        """Where nothing moves."""
        n_persist = column.n_persist
        placed, all_buffers = self._place(n_persist, moves=False), self._memory.all_buffers(n_persist)
        postponed: list[int] = []
        before = -1
        for row in range(column.first, column.end):
            n_buffer = int(placed.n_buffer[row])
            if not self._may_win(float(placed.all_bound_ms[row])):
                return
            if n_buffer < 0 or n_buffer == before:
                continue  # one more is recomputed for nothing
            before = n_buffer
            if not self._may_win(float(placed.bound_ms[row])):
                continue
            limit_ms = min(self._limit_ms, self._fastest_ms * (1 + self._tolerance))
            step_ms, n_speculate = self._step_ms(row, n_persist, limit_ms, moves=False)
            if step_ms >= limit_ms:
                if n_buffer == all_buffers:
                    return
                postponed.append(row)
                continue
            # Whether the column ended before matters only now that it would change anything.
            if any(self._ends_column(one, n_persist, limit_ms) for one in postponed):
                return
            postponed.clear()
            unlimited_ms = step_ms
            if n_buffer < all_buffers:
                unlimited_ms, _ = self._simulated_ms(row, n_persist, all_buffers, limit_ms, moves=False)
                if unlimited_ms >= limit_ms:
                    return
            self._add(Candidate(step_ms, n_persist, n_buffer, 0, int(self._n_ckpt[row]), 0, n_speculate))
            if step_ms <= unlimited_ms * (1 + self._gain):
                return

    def _walk_moves(self, column: _Column) -> None:
        """Where blocks are swapped or inputs move, which must pay: what it frees isn't worth having for the same time.

        See the second list above.
        """
        n_persist = column.n_persist
        placed, all_buffers = self._place(n_persist, moves=True), self._memory.all_buffers(n_persist)
        lost = -1  # with as many buffers or fewer it is too slow, and so it is with more recomputed
        tested = False
        undecided = -1  # a row whose step with every chunk in a buffer tells whether the column ends with it
        for row in range(column.first, column.end):
            n_buffer, only_adds = int(placed.n_buffer[row]), int(self._n_ckpt[row]) >= column.n_swap
            if only_adds and not self._may_win(float(placed.all_bound_ms[row])):
                return
            if n_buffer <= lost or not self._may_win(float(placed.bound_ms[row])):
                continue
            # Only now that more would be simulated. What is to beat is what it was then.
            if undecided >= 0 and not self._may_win(self._unlimited_ms(undecided, n_persist)):
                return
            undecided = -1
            least = self._step_ms(row, n_persist, self._paying_ms, moves=True)
            wins = self._may_win(least[0])
            found = wins and self._try_rooms(row, n_persist, least)
            if not only_adds:
                continue
            if not wins:
                lost = n_buffer
            if n_buffer == all_buffers:
                if not self._may_win(least[0]):
                    return
            # Whether the column ends here is worth a simulation where one was needed, once, and when it may end.
            elif found or not (tested or least[0] == inf):
                tested, undecided = True, row
                self._n_simulated += 1

    def _try_rooms(self, row: int, n_persist: int, least: tuple[float, int]) -> bool:
        """Whether a number of moved inputs is found with which a choice is faster than all before.

        ``least`` is the step with the most buffers, if moving inputs cost nothing, and its early updates.
        """
        n_swap, n_ckpt = int(self._n_swap[row]), int(self._n_ckpt[row])
        known, n_found = int(self._place(n_persist, moves=True).n_buffer[row]), len(self._found)
        for n_ckpt_swap, n_buffer, swapped_bytes in reversed(self._moves.rooms(n_swap, n_ckpt, n_persist)):
            if not self._may_win(least[0]):
                break
            if n_buffer < known:
                known, least = n_buffer, self._simulated_ms(row, n_persist, n_buffer, self._paying_ms, moves=True)
            step_ms, n_speculate = least
            if n_ckpt_swap and self._may_win(step_ms):
                modes = block_modes(self._n_blocks, n_swap, n_ckpt, n_ckpt_swap)
                most_early = int(self._early(n_persist, np.array(swapped_bytes)))
                self._n_simulated += 1
                step_ms, n_speculate = self._runtime.fitted_ms(
                    modes, n_persist, n_buffer, most_early, limit_ms=self._paying_ms
                )
            if self._may_win(step_ms):
                self._add(Candidate(step_ms, n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate))
        return len(self._found) > n_found

    def _add(self, candidate: Candidate) -> None:
        self._found.append(candidate)
        self._fastest_ms = min(self._fastest_ms, candidate.step_ms)

    def _step_ms(self, row: int, n_persist: int, limit_ms: float, *, moves: bool) -> tuple[float, int]:
        """Of a choice of block modes with all buffers that fit, and its early updates; moving inputs costs nothing.

        Infinite when it cannot be below ``limit_ms``.
        """
        if self._least_ms(row, n_persist, moves) * (1 - _ROUNDING) >= limit_ms:
            return inf, 0
        placed = self._place(n_persist, moves)
        n_buffer = int(placed.n_buffer[row])
        if self._n_swap[row] and self._relaxed.is_too_slow(
            row, n_persist, placed.n_buffer, placed.most_early, limit_ms
        ):
            return inf, 0
        return self._simulated_ms(row, n_persist, n_buffer, limit_ms, moves=moves)

    def _simulated_ms(
        self, row: int, n_persist: int, n_buffer: int, limit_ms: float = inf, *, moves: bool
    ) -> tuple[float, int]:
        self._n_simulated += 1
        most_early = int(self._place(n_persist, moves).most_early[row])
        return self._runtime.fitted_ms(self._modes(row), n_persist, n_buffer, most_early, limit_ms=limit_ms)

    def _unlimited_ms(self, row: int, n_persist: int) -> float:
        """With every chunk in a buffer, where inputs move; counted as tried when that was asked."""
        most_early = int(self._place(n_persist, moves=True).most_early[row])
        all_buffers = self._memory.all_buffers(n_persist)
        return self._runtime.fitted_ms(self._modes(row), n_persist, all_buffers, most_early, limit_ms=self._paying_ms)[
            0
        ]

    def _modes(self, row: int) -> tuple[BlockMode, ...]:
        """Of a choice, where no inputs move."""
        return block_modes(self._n_blocks, int(self._n_swap[row]), int(self._n_ckpt[row]))

    def _ends_column(self, row: int, n_persist: int, limit_ms: float) -> bool:
        """Whether a choice that takes ``limit_ms`` or more leaves nothing to find in its column."""
        n_buffer = int(self._place(n_persist, moves=False).n_buffer[row])
        unlimited_ms, _ = self._simulated_ms(row, n_persist, self._memory.all_buffers(n_persist), limit_ms, moves=False)
        if unlimited_ms >= limit_ms:
            return True
        hardly_slower_ms = unlimited_ms * (1 + self._gain)
        return (
            hardly_slower_ms >= limit_ms
            and self._simulated_ms(row, n_persist, n_buffer, moves=False)[0] <= hardly_slower_ms
        )
