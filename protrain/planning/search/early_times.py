"""Step times by the number of early updates, where all else is given: only those that are close to the least."""

from __future__ import annotations

from math import inf

import numpy as np

from protrain.planning.choices import Choices
from protrain.planning.runtime.model import Modes, RuntimeModel

_ROUNDED = 1 + 1e-9  # what sums in another order differ by, and more


def times_by_early(
    runtime: RuntimeModel, modes: Modes, n_persist: int, n_buffer: int, most: int, *, likely: int, tolerance: float
) -> list[float]:
    """``RuntimeModel.step_ms`` of every number of early updates from none to ``most``, in milliseconds.

    Infinite where it is more than a share of ``tolerance`` above the least of them: what is bound to be is not
    simulated, and nothing to its end that turns out to be. ``likely`` is tried first.
    """
    bounds_ms = _bounds_ms(runtime, modes, n_persist, n_buffer, most)
    times, limit_ms = [inf] * (most + 1), inf
    for n_speculate in (likely, *(other for other in range(most, -1, -1) if other != likely)):
        if bounds_ms[n_speculate] < limit_ms:
            step_ms = runtime.step_ms(modes, n_persist, n_buffer, n_speculate, limit_ms=limit_ms)
            if step_ms < limit_ms:
                times[n_speculate] = step_ms
                limit_ms = min(limit_ms, step_ms * (1 + tolerance) * _ROUNDED)
    return times


def takes_at_least(
    limit_ms: float, runtime: RuntimeModel, modes: Modes, n_persist: int, n_buffer: int, most: int
) -> bool:
    """Whether a step does, whatever the number of its early updates, from none to ``most``."""
    bounds_ms = _bounds_ms(runtime, modes, n_persist, n_buffer, most)
    likely_first = sorted((bound_ms, early) for early, bound_ms in enumerate(bounds_ms) if bound_ms < limit_ms)
    return all(
        runtime.step_ms(modes, n_persist, n_buffer, early, limit_ms=limit_ms) >= limit_ms for _, early in likely_first
    )


def _bounds_ms(runtime: RuntimeModel, modes: Modes, n_persist: int, n_buffer: int, most: int) -> list[float]:
    """By the number of early updates."""
    step = runtime.undisturbed(Choices.of([modes]))
    bounds_ms = runtime.bound_ms(step, n_persist, n_buffer, np.arange(most + 1))
    return [float(bound_ms) for bound_ms in np.broadcast_to(bounds_ms, most + 1)]
