"""The what-if table: how time and memory change if an integer of a plan changes by one, or keep_attention flips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from protrain.planning.changes import Change, neighbours
from protrain.planning.plan import Counts, Plan
from protrain.planning.predict import Models
from protrain.planning.ranges import within
from protrain.profiler.model_profile import ModelProfile


def changes_of(plan: Plan, profile: ModelProfile, models: Models) -> Iterator[Change]:
    """The effect of every integer of ``plan``, one more and one less, and of keep_attention."""
    for neighbour in neighbours(plan.counts, models):
        same_modes = neighbour.knob not in ("n_swap", "n_ckpt", "n_ckpt_swap")
        yield _effect(neighbour, models, plan if same_modes else None)
    counts, others, impossible = plan.counts, models, ""
    if not any(block.attention_bytes for block in profile.blocks):
        impossible = "no block has a fused attention"
    elif not plan.n_ckpt:
        impossible = "no block is recomputed"
    else:
        switched = replace(plan, keep_attention=not plan.keep_attention)
        inside = models.memory.update_in_backward
        others = Models.of(switched, profile, models.hardware, step_during_backward=inside)
        counts = within(counts, others)
    step = -1 if plan.keep_attention else 1
    switch = Change(knob="keep_attention", step=step, counts=counts, impossible=impossible)
    yield _effect(switch, others, plan)


def _effect(change: Change, models: Models, same_modes: Plan | None) -> Change:
    """``change`` with its effect. Block modes are those of the plan ``same_modes`` if it is given."""
    if change.impossible:
        return change
    counts = Counts(*change.counts)
    modes = models.modes(counts) if same_modes is None else same_modes.block_modes
    device_bytes, host_bytes = models.device_bytes(modes, counts), models.host_bytes(modes, counts)
    return replace(
        change,
        step_ms=models.runtime.step_ms(modes, counts),
        slower_ms=models.slower_ms(modes, counts),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        device_over_bytes=max(0, device_bytes - models.hardware.device_bytes),
        host_over_bytes=max(0, host_bytes - models.hardware.host_bytes),
    )
