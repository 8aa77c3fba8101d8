"""Plans that somebody who tunes by hand would try next: a searched plan with one integer moved, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan
from protrain.planning.plan import Counts
from protrain.planning.predict import Models
from protrain.planning.ranges import within
from protrain.profiler.model_profile import ModelProfile

_BY = 2  # chunks or blocks


def moves(
    plan: Plan, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
) -> Iterator[tuple[str, Plan]]:
    """The moves of ``plan`` that fit ``hardware``, each with a name.

    Persistent chunks and recomputed blocks compete for device memory. So with two more or fewer of the one, the other
    follows: as few blocks are recomputed, or as many chunks persist, as leave room for the buffers of ``plan``. At last
    the GPU does not update chunks in host memory, where it may in ``plan``.
    """
    models = Models.of(plan, profile, hardware, step_during_backward=step_during_backward)
    for knob, other, values in (
        ("n_persist", "n_ckpt", range(models.n_blocks - plan.n_swap + 1)),
        ("n_ckpt", "n_persist", range(models.n_chunks, -1, -1)),
    ):
        for by in (-_BY, _BY):
            tried = (
                _fitted(plan.counts._replace(**{knob: getattr(plan, knob) + by, other: value}), models)
                for value in values
            )
            if (counts := next((one for one in tried if one is not None), None)) is not None:
                yield f"{knob} {by:+d}", models.plan(counts)
    if plan.stream:
        alone = Models.of(replace(plan, stream=False), profile, hardware, step_during_backward=step_during_backward)
        if (counts := _fitted(plan.counts, alone)) is not None:
            yield "no streamed updates", alone.plan(counts)


def _fitted(wanted: Counts, models: Models) -> Counts | None:
    """``wanted`` with all buffers that fit, and with fewer speculative updates where the host lacks memory for them.

    None if there is no such plan, or if it would have fewer buffers than ``wanted``.
    """
    memory, n_persist = models.memory, wanted.n_persist
    n_blocks = wanted.n_swap + wanted.n_ckpt
    if min(wanted) < 0 or n_persist > models.n_chunks or n_blocks > models.n_blocks:
        return None
    counts = within(wanted, models)
    margined_bytes, swapped_bytes = memory.offloads(counts.n_swap, counts.n_ckpt)
    n_buffer = int(memory.most_buffers(n_persist, margined_bytes)[counts.n_ckpt_swap])
    if n_buffer < counts.n_buffer:
        return None
    n_speculate, least = memory.speculation(n_persist, counts.n_speculate, int(swapped_bytes[counts.n_ckpt_swap]))
    n_weight_only = min(max(wanted.n_weight_only, least), n_speculate)
    counts = counts._replace(n_buffer=n_buffer, n_speculate=n_speculate, n_weight_only=n_weight_only)
    modes = models.modes(counts)
    on_device = models.device_bytes(modes, counts) <= models.hardware.device_bytes
    on_host = models.host_bytes(modes, counts) <= models.hardware.host_bytes
    return counts if on_device and on_host else None
