"""Early updates some of which are whole and some of weights alone.

See [Note: both kinds] in :mod:`protrain.planning.runtime.updating`. Plans of one kind are searched through whole; this
tries what their fastest leaves: any number of early updates in its place, each time as many of them whole as there is
room for, and of the best number fewer whole ones. So it simulates little more steps than there are chunks.
"""

from __future__ import annotations

from itertools import count

from protrain.planning.memory.model import MemoryModel
from protrain.planning.plan import Plan
from protrain.planning.runtime.model import RuntimeModel

_TRIED = 3  # whole ones fewer than what was best so far


def both_kinds(plan: Plan, memory: MemoryModel, runtime: RuntimeModel, *, limit_ms: float) -> tuple[int, int] | None:
    """n_speculate and n_whole of the fastest that takes less than ``limit_ms``; None where there is none.

    ``memory`` and ``runtime`` are of early updates that make weights alone.
    """
    if not plan.n_speculate:
        return None
    modes, n_persist, swapped_bytes = plan.block_modes, plan.n_persist, memory.swapped_bytes(plan.block_modes)
    found: tuple[int, int] | None = None

    def try_out(n_speculate: int, n_whole: int) -> None:
        nonlocal found, limit_ms
        counts = n_persist, plan.n_buffer, n_speculate, plan.n_stream, n_whole
        step_ms = runtime.step_ms(modes, *counts, limit_ms=limit_ms)
        if step_ms < limit_ms:
            found, limit_ms = (n_speculate, n_whole), step_ms

    for n_speculate in range(len(memory.layout.chunks) - n_persist, 1, -1):
        n_whole = min(memory.most_whole(n_persist, n_speculate, swapped_bytes), n_speculate - 1)
        if n_whole > 0 and runtime.streamable(n_persist, n_speculate) >= plan.n_stream:
            try_out(n_speculate, n_whole)
    if found is None:
        return None
    n_speculate, most = found
    for n_whole in count(most - 1, -1):
        if n_whole <= 0 or n_whole < found[1] - _TRIED:
            return found
        try_out(n_speculate, n_whole)
    return found
