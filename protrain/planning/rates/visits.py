"""What every turn of a unit computes, and which gradients it yields."""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.rates.compute_times import ComputeTimes
from protrain.profiler.model_profile import ModelProfile


def computing_by_visit(profile: ModelProfile, times: ComputeTimes) -> tuple[list[float], list[float]]:
    """Milliseconds per visit, forward and backward, both in forward order, without recomputation.

    A block's share is its time over its calls. What runs between blocks goes to the outer units visited there, by the
    size of their parameters (an embedding, a norm and the head take very different times), or where there are none to
    the block that follows.
    """
    blocks = [profile.units[unit].block for unit in profile.calls]
    n_calls = {block: blocks.count(block) for block in blocks}
    forward = [0.0 if block is None else times.forward[block] / n_calls[block] for block in blocks]
    backward = [0.0 if block is None else times.backward[block] / n_calls[block] for block in blocks]
    gap_start, gap = 0, 0
    for at, block in enumerate((*blocks, None)):
        ends = at == len(blocks)
        if not ends and (block is None or block < gap):
            continue
        first = gap if ends else min(gap, len(profile.blocks))
        last = len(profile.blocks) if ends else int(block or 0)
        outer = list(range(gap_start, at)) or [min(at, len(blocks) - 1)]
        sizes = [
            1 + sum(profile.parameters[p].numel for p in profile.units[profile.calls[v]].parameters) for v in outer
        ]
        for place in range(first, last + 1):
            for visit, size in zip(outer, sizes, strict=True):
                forward[visit] += times.gap_forward[place] * size / sum(sizes)
                backward[visit] += times.gap_backward[place] * size / sum(sizes)
        gap_start, gap = at + 1, last + 1
    return forward, backward


def gradients_by_visit(
    profile: ModelProfile, hardware: HardwareProfile, layout: Layout
) -> tuple[list[tuple[int, float, float]], list[list[int]]]:
    """(chunk, flatten ms, offload ms), and which of them each visit of backward yields.

    A parameter's gradient is whole when backward leaves the unit that used it first.
    """
    left: dict[int, int] = {}  # parameter -> last visit in backward
    for at, unit in enumerate(reversed(profile.calls)):
        for parameter in profile.units[unit].parameters:
            left[parameter] = at
    elements: dict[tuple[int, int], int] = {}
    for slot in layout.slots:
        if profile.parameters[slot.parameter].group >= 0 and slot.parameter in left:
            key = (left[slot.parameter], slot.chunk)
            elements[key] = elements.get(key, 0) + slot.numel
    flatten_gbps = hardware.flatten_gbps or hardware.device_copy_gbps
    gradients: list[tuple[int, float, float]] = []
    of_visit: list[list[int]] = [[] for _ in profile.calls]
    for (at, chunk), count in sorted(elements.items()):
        size = count * profile.element_bytes
        of_visit[at].append(len(gradients))
        gradients.append((chunk, _ms(2 * size, flatten_gbps), _ms(size, hardware.d2h_gbps)))
    return gradients, of_visit


def _ms(size_bytes: float, gbps: float) -> float:
    return size_bytes / gbps / 1e6
