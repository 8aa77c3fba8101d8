"""Plans with streamed updates: which of the chunks in host memory the device updates, beside the host.

[Note: looking for streamed updates] They only matter where the host is the limit, and there they change what else is
best: with two at work fewer chunks need be persistent, and fewer blocks recomputed. To search all of that as thoroughly
as the rest would take as long again. So the search begins with the fastest plan without, and with two placements far
from it, and goes on to neighbours that are faster, in steps that become smaller. What it guarantees is that no plan
becomes slower: one that streams is taken where it is faster than the fastest that does not, by a margin
(:data:`STREAMING_GAIN`). The best of all that stream it does not promise. Of 5,400 small random models on random
machines, with a margin of 2%, 260 gained from streaming, and 9 had a plan that moves nothing and is more than that
faster than what was found; the worst, by 8.5%.

What moves activations or inputs needs the link for that. Such a plan gets streamed updates where it is, or with fewer
persistent chunks where there is no room for those; plans near it are tried as if they moved nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from protrain.planning.choices import Choices
from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import Plan, block_modes
from protrain.planning.runtime.model import RuntimeModel

# Of a step's time. How much streamed updates and copies take from each other is worked out and not measured, and a plan
# that streams keeps both directions of the link busy. On H100s what is now predicted as gains of 5% and 11% was
# none and 3%, and elsewhere more came than is predicted (bench/results/h100/NOTES.md).
STREAMING_GAIN = 0.05
_LITTLE = 0.001  # what a neighbour must gain
_FAR = (0.0, 0.5)  # of the chunks persistent: where else to begin
# Steps: in the numbers of early and of streamed updates, and in those of persistent chunks and of recomputed blocks.
_UPDATES = ((0, 1), (0, -1), (-1, 1), (1, -1), (-1, 0), (1, 0))
_PLACEMENTS = ((0, -1), (0, 1), (-1, 0), (1, 0), (-1, -1), (1, 1), (-1, 1), (1, -1))


class Streamed(NamedTuple):
    """A plan, with room for states on their way through the device."""

    step_ms: float
    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    n_ckpt_swap: int
    n_speculate: int
    n_stream: int


class StreamedSearch:
    """For one model on one machine. See [Note: looking for streamed updates]."""

    def __init__(self, memory: MemoryModel, runtime: RuntimeModel) -> None:
        self._memory = memory
        self._runtime = runtime
        self._n_chunks = len(memory.layout.chunks)
        self._n_blocks = len(memory.profile.blocks)
        modes = [block_modes(self._n_blocks, 0, n_ckpt) for n_ckpt in range(self._n_blocks + 1)]
        self._margined = memory.with_margin(memory.all_activations(Choices.of(modes))[0])  # by n_ckpt
        self._tried: set[tuple[int, ...]] = set()

    def fastest(self, plan: Plan) -> Streamed | None:
        """The fastest plan that is found with streamed updates, in a search that begins with ``plan``."""
        begin = Streamed(*(getattr(plan, name) for name in Streamed._fields))
        best = self._near(begin)
        if plan.n_swap + plan.n_ckpt_swap:
            best = min(best, self._near(begin._replace(n_swap=0, n_ckpt_swap=0)))
        return best if best.n_stream else None

    def _near(self, plan: Streamed) -> Streamed:
        """The fastest on the way from ``plan``."""
        activations = self._memory.activations(block_modes(self._n_blocks, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap))
        moves, swapped_bytes = plan.n_swap + plan.n_ckpt_swap > 0, activations.swapped_bytes
        margined_bytes = np.array(self._memory.margined_bytes(activations))
        fits = False
        for n_persist in range(plan.n_persist, -1, -1):  # fewer where states on their way need the room
            room = int(self._memory.most_buffers(n_persist, margined_bytes, 1))
            host_bytes = self._memory.host_bytes_beside(n_persist, swapped_bytes)
            fits = room >= 0 and host_bytes <= self._memory.hardware.host_bytes
            if fits:
                plan = plan._replace(n_persist=n_persist, n_buffer=room)
                break
        best = self._begun(plan, plan, swapped_bytes) if fits else plan
        for share in () if moves else _FAR:
            if begin := self._placed(plan, int(share * self._n_chunks), n_buffer=0):
                best = self._begun(best, begin, 0)
        size = self._n_chunks // 2
        while size:
            before = best
            for early, stream in _UPDATES if fits or best.n_stream else ():
                n_speculate, n_stream = best.n_speculate + size * early, best.n_stream + size * stream
                if 0 <= n_speculate <= self._most_early(best.n_persist, swapped_bytes) and n_stream > 0:
                    best = self._faster(best, best._replace(n_speculate=n_speculate, n_stream=n_stream))
            for persist, ckpt in () if moves else _PLACEMENTS:
                n_persist, n_ckpt = best.n_persist + size * persist, best.n_ckpt + size * ckpt
                best = self._faster(best, self._placed(best, n_persist, n_ckpt=n_ckpt))
            for persist in () if moves else (-1, 1):
                best = self._faster(best, self._placed(best, best.n_persist + size * persist, best.n_buffer))
            if best == before:
                size //= 2
        return best

    def _begun(self, best: Streamed, plan: Streamed, swapped_bytes: int) -> Streamed:
        """``best``, or ``plan`` with as many streamed updates as let host and device end together, or one more."""
        most = self._most_early(plan.n_persist, swapped_bytes)
        for n_speculate in {min(most, plan.n_speculate), 0}:
            balanced = max(1, self._runtime.balanced(plan.n_persist, n_speculate))
            for n_stream in (balanced, balanced + 1):
                best = self._faster(best, plan._replace(n_speculate=n_speculate, n_stream=n_stream))
        return best

    def _placed(
        self, plan: Streamed, n_persist: int, n_buffer: int | None = None, *, n_ckpt: int | None = None
    ) -> Streamed | None:
        """``plan``, which moves nothing, with other chunks persistent and all buffers that fit.

        With ``n_ckpt`` recomputed blocks, or the fewest that leave room for ``n_buffer``, or for as many as are needed.
        Of the chunks that the device may update it gets the same share. None where there is no such plan.
        """
        memory = self._memory
        if not 0 <= n_persist < self._n_chunks or memory.host_bytes_beside(n_persist, 0) > memory.hardware.host_bytes:
            return None
        rooms = memory.most_buffers(n_persist, self._margined, 1)
        if n_buffer is not None:
            n_buffer = min(max(n_buffer, memory.least_buffers(n_persist)), memory.all_buffers(n_persist))
            n_ckpt = next(iter(np.flatnonzero(rooms >= n_buffer).tolist()), None)
        if n_ckpt is None or not 0 <= n_ckpt <= self._n_blocks or rooms[n_ckpt] < 0:
            return None
        n_speculate = min(plan.n_speculate, self._most_early(n_persist, 0))
        n_stream = self._runtime.balanced(n_persist, n_speculate)
        if plan.n_stream:
            before = self._runtime.streamable(plan.n_persist, plan.n_speculate)
            n_stream = round(plan.n_stream * self._runtime.streamable(n_persist, n_speculate) / before)
        return plan._replace(
            n_persist=n_persist,
            n_buffer=int(rooms[n_ckpt]),
            n_ckpt=n_ckpt,
            n_speculate=n_speculate,
            n_stream=max(1, n_stream),
        )

    def _faster(self, best: Streamed, plan: Streamed | None) -> Streamed:
        """``plan``, with no more streamed updates than there may be, if it is faster than ``best``."""
        if plan is None:
            return best
        n_stream = min(plan.n_stream, self._runtime.streamable(plan.n_persist, plan.n_speculate))
        plan = plan._replace(n_stream=n_stream)
        if not n_stream or plan[1:] in self._tried:
            return best
        self._tried.add(plan[1:])
        modes = block_modes(self._n_blocks, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
        counts = plan.n_persist, plan.n_buffer, plan.n_speculate, n_stream
        limit_ms = best.step_ms * (1 - _LITTLE)
        step_ms = self._runtime.step_ms(modes, *counts, limit_ms=limit_ms)
        return plan._replace(step_ms=step_ms) if step_ms < limit_ms else best

    def _most_early(self, n_persist: int, swapped_bytes: int) -> int:
        """Early updates that host memory has room for."""
        if not self._runtime.speculates:
            return 0
        return int(self._memory.most_early(n_persist, np.array(swapped_bytes)))
