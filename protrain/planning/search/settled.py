"""Of plans hardly slower than the fastest the one to take: it moves least and has the early updates it needs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from protrain.planning.plan import Plan, block_modes
from protrain.planning.search.columns import Candidate
from protrain.planning.search.early_times import times_by_early
from protrain.planning.search.models import Models

# Of plans within this of the fastest, the one with most persistent chunks, then fewest swapped blocks and then fewest
# moved inputs wins: what is not moved cannot be late.
TOLERANCE = 0.005
_NEAR = 0.03  # of plans within this of the fastest other numbers of early updates are tried
_NOTHING = 0.001  # what early updates must save at least


class Counts(NamedTuple):
    """The integers of a plan without streamed updates."""

    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    n_ckpt_swap: int
    n_speculate: int


def settled(models: Models, found: list[Candidate]) -> Plan:
    """The plan to take of ``found``, whose early updates are whole."""
    near = min(found)[0] * (1 + _NEAR)
    found = [_refined(models, candidate) for candidate in found if candidate.step_ms <= near]
    fastest = min(found)[0]
    close = [candidate for candidate in found if candidate[0] <= fastest * (1 + TOLERANCE)]
    chosen = min(
        close, key=lambda candidate: (-candidate.n_persist, candidate.n_swap, candidate.n_ckpt_swap, candidate)
    )
    limit_ms = fastest * (1 + TOLERANCE)
    counts = _fewer_moved(models, _more_persistent(models, chosen, limit_ms), limit_ms)
    return models.plan(*best_early(models, counts))


def _more_persistent(models: Models, plan: Candidate, limit_ms: float) -> Counts:
    """The plan with most persistent chunks that fits and takes at most ``limit_ms``; ``plan`` does."""
    memory, n_chunks = models.memory, len(models.layout.chunks)
    modes = block_modes(len(models.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    activations = memory.activations(modes)
    margined_bytes = np.array(memory.margined_bytes(activations))
    for more in range(n_chunks, plan.n_persist, -1):
        buffers = int(memory.most_buffers(more, margined_bytes))
        if buffers < 0:
            continue
        step_ms, early = models.runtime.fitted_ms(
            modes, more, buffers, models.most_early(more, activations.swapped_bytes), limit_ms=limit_ms
        )
        if step_ms < limit_ms:
            return Counts(more, buffers, plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap, early)
    return Counts(*plan[1:])


def _fewer_moved(models: Models, plan: Counts, limit_ms: float) -> Counts:
    """The same with the fewest moved inputs, and the buffers that then fit, that take at most ``limit_ms``."""
    for fewer, buffers, swapped_bytes in models.moves.rooms(plan.n_swap, plan.n_ckpt, plan.n_persist):
        if fewer >= plan.n_ckpt_swap:
            break
        modes = block_modes(len(models.profile.blocks), plan.n_swap, plan.n_ckpt, fewer)
        most_early = models.most_early(plan.n_persist, swapped_bytes)
        step_ms, early = models.runtime.fitted_ms(modes, plan.n_persist, buffers, most_early, limit_ms=limit_ms)
        if step_ms < limit_ms:
            return plan._replace(n_buffer=buffers, n_ckpt_swap=fewer, n_speculate=early)
    return plan


def _refined(models: Models, plan: Candidate) -> Candidate:
    """The same with none, all or one more or less of the early updates where that is faster.

    The simulation chooses their number by waits alone; they also slow down what runs beside them.
    """
    modes = block_modes(len(models.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    most = models.most_early(plan.n_persist, models.memory.activations(modes).swapped_bytes)
    best = plan
    for early in sorted({0, most, max(0, plan.n_speculate - 1), min(most, plan.n_speculate + 1)}):
        limit_ms = best.step_ms
        step_ms = models.runtime.step_ms(modes, plan.n_persist, plan.n_buffer, early, limit_ms=limit_ms)
        if step_ms < limit_ms:
            best = best._replace(step_ms=step_ms, n_speculate=early)
    return best


def best_early(models: Models, plan: Counts, *, early_weights: bool = False) -> Counts:
    """The same with the best number of early updates, or fewer where those save nothing: they take memory.

    Half as many again as are needed, should the host be slower than it was when it was calibrated.
    """
    modes = block_modes(len(models.profile.blocks), plan.n_swap, plan.n_ckpt, plan.n_ckpt_swap)
    swapped_bytes, runtime = models.memory.activations(modes).swapped_bytes, models.kinds[early_weights][1]
    most = models.most_early(plan.n_persist, swapped_bytes, early_weights=early_weights)
    likely = min(most, plan.n_speculate)
    times = times_by_early(runtime, modes, plan.n_persist, plan.n_buffer, most, likely=likely, tolerance=_NOTHING)
    limit_ms = min(times) * (1 + _NOTHING)
    needed = next(early for early, step_ms in enumerate(times) if step_ms <= limit_ms)
    enough = (early for early in range(min(most, -(-3 * needed // 2)), needed - 1, -1) if times[early] <= limit_ms)
    return plan._replace(n_speculate=next(enough))
