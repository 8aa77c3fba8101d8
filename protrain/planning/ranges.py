"""The range of each integer of a plan: what the search, checks of plans, the what-if table and errors all go by."""

from __future__ import annotations

from typing import NamedTuple

from protrain.planning.plan import Counts
from protrain.planning.predict import Models


class Range(NamedTuple):
    """The values that one integer may have while the others are what they are."""

    least: int
    most: int
    no_more: str  # why it cannot be more
    no_less: str = "there is none to give up"

    def why_not(self, value: int) -> str:
        """Why the integer cannot be ``value``; "" if it can."""
        return self.no_less if value < self.least else self.no_more if value > self.most else ""


def ranges(counts: Counts, models: Models) -> dict[str, Range]:
    """By the name of each integer its range, which layout, blocks and the other integers in ``counts`` allow.

    Memory is not asked.
    """
    memory, n_chunks, n_blocks = models.memory, models.n_chunks, models.n_blocks
    n_persist = min(max(counts.n_persist, 0), n_chunks)
    offloaded, least = n_chunks - n_persist, memory.least_buffers(n_persist)
    modes = "every block is swapped or checkpointed"
    inputs = "the inputs of every recomputed block are offloaded" if counts.n_ckpt else "no block is recomputed"
    speculates = "every chunk in host memory has a speculative update"
    sums = "the sum of every chunk in host memory is on the device"
    return {
        "n_persist": Range(0, n_chunks, "all chunks are persistent"),
        "n_buffer": Range(
            least,
            memory.all_buffers(n_persist),
            f"every {memory.buffered} has a buffer",
            f"a unit holds up to {least} {memory.buffered}s at once",
        ),
        "n_swap": Range(0, n_blocks - counts.n_ckpt, modes),
        "n_ckpt": Range(0, n_blocks - counts.n_swap, modes),
        "n_ckpt_swap": Range(0, counts.n_ckpt, inputs),
        "n_speculate": Range(0, 0, "with step_during_backward=True no update waits for step()")
        if memory.update_in_backward
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
        counts = counts._replace(**{name: min(max(getattr(counts, name), allowed.least), allowed.most)})
    swapped_bytes = models.memory.swapped_bytes(models.modes(counts))
    n_speculate = counts.n_speculate
    fit, least = models.memory.speculation(counts.n_persist, n_speculate, swapped_bytes, counts.n_device_sum)
    least = least if fit == n_speculate else n_speculate
    return counts._replace(n_weight_only=max(counts.n_weight_only, least))
