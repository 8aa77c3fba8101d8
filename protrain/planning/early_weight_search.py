"""Plans whose early updates make weights alone, where host memory has no room for second copies of all states.

[Note: looking for early weights] They only matter where the host is the limit and short of memory, and there they
change what else is best: with more chunks updated in time fewer inputs need move and fewer chunks be persistent. As
with streamed updates the search begins with the fastest plan without and goes on to neighbours that are faster, in
steps that become smaller. No plan becomes slower; that the best of all is found is not promised.
"""

from __future__ import annotations

import numpy as np

from protrain.planning.columns import Candidate
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Plan, block_modes
from protrain.planning.runtime import RuntimeModel

_GAIN = 0.01  # of a step's time: the host does more for it
_LITTLE = 0.001  # what a neighbour must gain
# Steps in the numbers of persistent chunks, of recomputed blocks, of moved inputs and of early updates.
_STEPS = (
    *((0, 0, 0, 1), (0, 0, 0, -1), (0, 0, -1, 0), (0, 0, 1, 0), (1, 0, 0, 0), (-1, 0, 0, 0), (0, -1, 0, 0)),
    *((0, 1, 0, 0), (0, 0, -1, 1), (-1, 0, 0, -1), (-1, -1, 0, 0), (1, 1, 1, 0)),
)


class EarlyWeightSearch:
    """For one model on one machine. See [Note: looking for early weights]."""

    def __init__(self, memory: MemoryModel, runtime: RuntimeModel) -> None:
        self._memory = memory
        self._runtime = runtime
        self._n_chunks = len(memory.layout.chunks)
        self._n_blocks = len(memory.profile.blocks)
        self._tried: set[tuple[float, ...]] = set()  # what follows step_ms

    def fastest(self, plan: Plan) -> tuple[int, ...] | None:
        """The integers of the fastest plan found.

        None unless it is faster than ``plan``, the fastest with whole early updates, by _GAIN.
        """
        begin = best = Candidate(*(getattr(plan, name) for name in Candidate._fields))
        swapped_bytes = self._memory.swapped_bytes(plan.block_modes)
        if self._memory.most_whole(begin.n_persist, np.array(swapped_bytes)) >= self._n_chunks - begin.n_persist:
            return None  # there is room for all
        most = int(self._memory.most_speculated(begin.n_persist, np.array(swapped_bytes)))
        for n_speculate in (most, (begin.n_speculate + most) // 2):
            best = self._faster(best, begin._replace(n_speculate=n_speculate))
        size = max(1, self._n_chunks // 4)
        while size:
            before = best
            for steps in _STEPS:
                best = self._faster(best, self._stepped(best, *(size * step for step in steps)))
            if best == before:
                size //= 2
        return best[1:] if best.step_ms < plan.step_ms * (1 - _GAIN) else None

    def _stepped(self, of: Candidate, persist: int, ckpt: int, moved: int, early: int) -> Candidate | None:
        """A neighbour with all buffers that fit; None where there is none."""
        memory = self._memory
        n_persist, n_ckpt = of.n_persist + persist, of.n_ckpt + ckpt
        n_moved = min(max(0, of.n_ckpt_swap + moved), n_ckpt)
        if not 0 <= n_persist <= self._n_chunks or not 0 <= n_ckpt <= self._n_blocks - of.n_swap:
            return None
        activations = memory.activations(block_modes(self._n_blocks, of.n_swap, n_ckpt, n_moved))
        swapped_bytes = activations.swapped_bytes
        if memory.host_bytes_beside(n_persist, swapped_bytes) > memory.hardware.host_bytes:
            return None
        n_buffer = int(memory.most_buffers(n_persist, np.array(memory.margined_bytes(activations))))
        most = int(memory.most_speculated(n_persist, np.array(swapped_bytes)))
        n_speculate = min(max(0, of.n_speculate + early), most)
        if n_buffer < 0:
            return None
        return of._replace(
            n_persist=n_persist, n_buffer=n_buffer, n_ckpt=n_ckpt, n_ckpt_swap=n_moved, n_speculate=n_speculate
        )

    def _faster(self, best: Candidate, other: Candidate | None) -> Candidate:
        if other is None or other[1:] in self._tried:
            return best
        self._tried.add(other[1:])
        modes = block_modes(self._n_blocks, other.n_swap, other.n_ckpt, other.n_ckpt_swap)
        limit_ms = best.step_ms * (1 - _LITTLE)
        counts = other.n_persist, other.n_buffer, other.n_speculate
        step_ms = self._runtime.step_ms(modes, *counts, limit_ms=limit_ms)
        return other._replace(step_ms=step_ms) if step_ms < limit_ms else best
