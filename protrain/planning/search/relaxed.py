"""Steps that do only what several choices of block modes have in common: none of those is faster.

What a step takes with no block recomputed or swapped, as if there were memory for it, is such a bound of all choices
under one placement of the chunks. Where blocks are swapped it is far from most of them.

[Note: many that swap] Neighbours in the number of swapped blocks differ in few of them, and where the link or the host
is the limit all are too slow for much the same reason. So before one is simulated, a step is that all from 1, 2, 4, 8,
... swapped blocks to less than twice as many take at least the time of: it recomputes what all of them recompute, swaps
what all of them swap, leaves every other block alone, and has the most buffers and the most early updates of any. It is
simulated once for all numbers of buffers; where that leaves open who is too slow, for those with as many.

Each of them does all of it in the same order, and more, so at full rates all that they do ends later, early updates
being as many. Three things can make a step with more to do faster in the simulation: copies and updates disturb each
other less (:data:`_DISTURBED`), a longer backward may have time for one more early update, which is a whole chunk, and
their number is chosen by waits at full rates, which is not always best. So such a step counts only where it takes so
much more than the limit with every number of early updates. (Of 5,216 pairs of random models four were faster by 0.8%
to 1.04%, all others by less than 0.5%.) Weights alone bring deferred updates with them, where one more in time may be
worse, by up to 6% there: of them it is a whole update more than the limit. Between that and the limit the step with
nothing recomputed or swapped decides.
"""

from __future__ import annotations

from collections import defaultdict
from math import inf

import numpy as np
from numpy.typing import NDArray

from protrain.planning.choices import Choices
from protrain.planning.plan import BlockMode
from protrain.planning.runtime.model import Modes, RuntimeModel
from protrain.planning.search.early_times import takes_at_least

_DISTURBED = 0.011  # of a step's time: more than in any of those pairs


class _Common:
    """What several choices have in common, with the most buffers and early updates of any."""

    def __init__(self, runtime: RuntimeModel, modes: Modes, placement: tuple[int, int, int], step_ms: float) -> None:
        self.step_ms = step_ms
        self._runtime = runtime
        self._modes = modes
        self._placement = placement
        self._always_ms = 0.0  # it takes that much with every number of early updates
        self._once_ms = inf  # with one of them it takes less
        self._n_asked = 0

    def always_takes(self, limit_ms: float) -> bool:
        """Whether it is known to take ``limit_ms`` with every number of early updates; never so of weights alone.

        To find out takes about as many simulations as there are numbers, so it is not done before as many choices have
        been simulated one by one.
        """
        if self._runtime.early_weights or limit_ms >= self._once_ms:
            return False
        if limit_ms > self._always_ms:
            self._n_asked += 1
            if self._n_asked <= self._placement[2] + 1:
                return False
            if takes_at_least(limit_ms, self._runtime, self._modes, *self._placement):
                self._always_ms = limit_ms
            else:
                self._once_ms = limit_ms
        return limit_ms <= self._always_ms


class Relaxed:
    """For one search.

    Args:
        runtime: the runtime model.
        choices: all choices of block modes.
        n_swap: by choice, its swapped blocks.
    """

    def __init__(self, runtime: RuntimeModel, choices: Choices, n_swap: NDArray[np.int64]) -> None:
        self._runtime = runtime
        self._choices = choices
        self._n_swap = n_swap
        self._untouched = (BlockMode.NONE,) * choices.ckpt.shape[0]
        self._untouched_of: dict[tuple[int, int, int], float] = {}  # by n_persist, n_buffer, most early updates
        # By n_persist, of those that took less than the limit: step time and n_buffer.
        self._quick: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        self._common_of: dict[tuple[int, int, int], _Common] = {}  # by n_persist, n_buffer or -1, least n_swap

    def untouched_ms(self, placement: tuple[int, int, int], limit_ms: float) -> float:
        """The step with no block recomputed or swapped, as if there were memory for it, or at least ``limit_ms``.

        What has not been worked out to its end is known to take the limit of then, and limits only fall.

        Args:
            placement: n_persist, n_buffer and the most early updates.
            limit_ms: what is of interest.
        """
        known = self._untouched_of.get(placement)
        if known is None:
            known, _ = self._runtime.fitted_ms(self._untouched, *placement, limit_ms=limit_ms)
            self._untouched_of[placement] = known
            if known < limit_ms:
                self._quick[placement[0]].append((known, placement[1]))
        return known

    def _common(self, modes: Modes, placement: tuple[int, int, int], limit_ms: float) -> _Common:
        step_ms, _ = self._runtime.fitted_ms(modes, *placement, limit_ms=limit_ms)
        return _Common(self._runtime, modes, placement, step_ms)

    def is_too_slow(
        self,
        row: int,
        n_persist: int,
        n_buffer: NDArray[np.int64],
        most_early: NDArray[np.int64],
        limit_ms: float,
    ) -> bool:
        """Whether a choice that swaps is known to take ``limit_ms``. See [Note: many that swap].

        Args:
            row: the choice.
            n_persist: the number of persistent chunks.
            n_buffer: by choice, the buffers that fit; negative where the choice does not.
            most_early: by choice, the early updates that fit.
            limit_ms: what is of interest.
        """
        buffers, most = int(n_buffer[row]), int(most_early[row])
        disturbed_ms = limit_ms * (1 + _DISTURBED)
        surely_ms = disturbed_ms + self._runtime.longest_update_ms
        first = 1 << (int(self._n_swap[row]).bit_length() - 1)
        for alike in (-1, buffers):
            common = self._common_of.get((n_persist, alike, first))
            if common is None:
                fit = n_buffer >= 0 if alike < 0 else n_buffer == alike
                near = np.flatnonzero(fit & (self._n_swap >= first) & (self._n_swap < 2 * first))
                placement = n_persist, int(n_buffer[near].max()), int(most_early[near].max())
                common = self._common(self._choices.some(near).common(), placement, surely_ms)
                self._common_of[n_persist, alike, first] = common
            common_ms = common.step_ms
            if common_ms >= surely_ms or (common_ms >= disturbed_ms and common.always_takes(disturbed_ms)):
                return True
            # Untouched it takes no more, nor with more buffers; where room for early updates matters, it is simulated.
            quick = (ms < limit_ms and fewer <= buffers for ms, fewer in self._quick[n_persist])
            undecided = common_ms >= limit_ms and not any(quick)
            if undecided and self.untouched_ms((n_persist, buffers, most), limit_ms) >= limit_ms:
                return True
        return False
