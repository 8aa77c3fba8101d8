"""The range of each integer of a plan: what the search, checks of plans, the what-if table and errors all go by.

The neighbours of a plan have one integer changed by one. The what-if table shows what such a change does to time and
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from protrain.common.records import Record
from protrain.planning.plan import Counts, Plan
from protrain.planning.predict import Models
from protrain.profiler.model_profile import ModelProfile


class Range(NamedTuple):
    """The values that one integer may have while the others are what they are."""

    least: int
    most: int
    no_more: str  # why it cannot be more
    no_less: str = "there is none to give up"

    def nearest(self, value: int) -> int:
        """The value in the range that is nearest to ``value``."""
        return min(max(value, self.least), self.most)

    def why_not(self, value: int) -> str:
        """Why the integer cannot be ``value``; "" if it can."""
        return self.no_less if value < self.least else self.no_more if value > self.most else ""


def ranges(counts: Counts, models: Models) -> dict[str, Range]:
    """By the name of each integer its range, which layout, blocks and the other integers in ``counts`` allow.

    Memory is not asked.
    """
    memory, n_chunks, n_blocks = models.memory, models.n_chunks, models.n_blocks
    n_persist = min(max(counts.n_persist, 0), n_chunks)
    offloaded, least = n_chunks - n_persist, memory.least_buffers[n_persist]
    buffered = "non-persistent chunk" if models.layout.world_size == 1 else "chunk"  # they pass through buffers
    modes = "every block is swapped or checkpointed"
    inputs = "the inputs of every recomputed block are offloaded" if counts.n_ckpt else "no block is recomputed"
    speculates = "every chunk in host memory has a speculative update"
    sums = "the sum of every chunk in host memory is on the device"
    return {
        "n_persist": Range(0, n_chunks, "all chunks are persistent"),
        "n_buffer": Range(
            least,
            memory.all_buffers[n_persist],
            f"every {buffered} has a buffer",
            f"a unit holds up to {least} {buffered}s at once",
        ),
        "n_swap": Range(0, n_blocks - counts.n_ckpt, modes),
        "n_ckpt": Range(0, n_blocks - counts.n_swap, modes),
        "n_ckpt_swap": Range(0, counts.n_ckpt, inputs),
        "n_speculate": Range(0, 0, "with step_during_backward=True no update waits for step()")
        if models.profile.step_during_backward
        else Range(0, offloaded, speculates),
        "n_weight_only": Range(0, counts.n_speculate, "no other update is speculative"),
        "n_device_sum": Range(0, offloaded, sums) if memory.accumulates else Range(0, 0, "a step has one backward()"),
    }


def check_counts(counts: Counts, models: Models) -> None:
    """ValueError for an integer that is out of its range."""
    for name, allowed in ranges(counts, models).items():
        value = getattr(counts, name)
        if why := allowed.why_not(value):
            raise ValueError(f"{name} must be {allowed.least} to {allowed.most}, not {value}: {why}")


def within(wanted: Counts, models: Models) -> Counts:
    """``wanted`` with every integer in its range, and with as few whole second copies as host memory has room for."""
    counts = wanted
    for name in Counts._fields:  # each depends on those before it alone
        allowed = ranges(counts, models)[name]
        counts = counts._replace(**{name: allowed.nearest(getattr(counts, name))})
    swapped_bytes = models.memory.activations(models.modes(counts)).swapped_bytes
    n_speculate = counts.n_speculate
    fit, least = models.memory.speculation(counts.n_persist, n_speculate, swapped_bytes, counts.n_device_sum)
    least = least if fit == n_speculate else n_speculate
    return counts._replace(n_weight_only=max(counts.n_weight_only, least))


@dataclass(frozen=True, kw_only=True)
class Change(Record):
    """One integer changed by one, or keep_attention flipped. Only the what-if table has what the change does."""

    knob: str
    step: int  # 1 or -1
    counts: tuple[int, ...]  # in the order of Counts
    impossible: str = ""  # the reason if there is no such plan; then no field below is set
    step_ms: float = 0.0
    slower_ms: float = 0.0  # on the slower host that plans are made for
    device_bytes: int = 0
    host_bytes: int = 0


def neighbours(counts: Counts, models: Models) -> Iterator[Change]:
    """All neighbours of ``counts``, whether they fit the memory or not, with a reason if there is no such plan.

    If the changed integer puts another one out of its range, that one takes the nearest value in the range: buffers
    speculative updates and sums with another number of persistent chunks, offloaded inputs with fewer recomputed
    blocks.
    """
    for knob in Counts._fields:
        if knob == "n_device_sum" and not models.memory.accumulates:
            continue  # a step of one backward has no sums
        for step in (1, -1):
            wanted = counts._replace(**{knob: getattr(counts, knob) + step})
            impossible = ranges(wanted, models)[knob].why_not(getattr(wanted, knob))
            changed = wanted if impossible else within(wanted, models)
            if knob == "n_weight_only" and wanted.n_weight_only < changed.n_weight_only:
                impossible = "host memory has no room for another whole second copy"
            yield Change(knob=knob, step=step, counts=changed, impossible=impossible)


def changes_of(plan: Plan, profile: ModelProfile, models: Models) -> Iterator[Change]:
    """The effect of every integer of ``plan``, one more and one less, and of keep_attention."""
    for neighbour in neighbours(plan.counts, models):
        yield _effect(neighbour, models, plan)
    counts, others, impossible = plan.counts, models, ""
    if not any(block.attention_bytes for block in profile.blocks):
        impossible = "no block has a fused attention"
    elif not plan.n_ckpt:
        impossible = "no block is recomputed"
    else:
        others = Models.of(replace(plan, keep_attention=not plan.keep_attention), profile, models.hardware)
        counts = within(counts, others)
    step = -1 if plan.keep_attention else 1
    switch = Change(knob="keep_attention", step=step, counts=counts, impossible=impossible)
    yield _effect(switch, others, plan)


def _effect(change: Change, models: Models, plan: Plan) -> Change:
    """``change`` with its effect. Block modes are those of ``plan`` unless the change is one of them."""
    if change.impossible:
        return change
    counts = Counts(*change.counts)
    modes = models.modes(counts) if change.knob in ("n_swap", "n_ckpt", "n_ckpt_swap") else plan.block_modes
    return replace(
        change,
        step_ms=models.step_ms(modes, counts),
        slower_ms=models.slower_ms(modes, counts),
        device_bytes=models.memory.device_bytes(counts, modes),
        host_bytes=models.memory.host_bytes(counts, modes),
    )
