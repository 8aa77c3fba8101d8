"""How long every visit computes, and which gradients it yields.

A visit is one call of a unit in forward, or the backward of that call.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.rates.compute_times import ComputeTimes, bytes_ms
from protrain.profiler.model_profile import ModelProfile


def computing_by_visit(profile: ModelProfile, times: ComputeTimes) -> tuple[list[float], list[float]]:
    """Milliseconds per visit, of forward and of backward, both in forward order, without recomputation.

    The time of a block is divided evenly among its calls. The time between blocks is divided among the units outside
    blocks that are called there, by the size of their parameters, as an embedding, a norm and the head take very
    different times. If no such unit is called there, the block that follows has that time.
    """
    blocks = [profile.units[unit].block for unit in profile.calls]
    n_calls = {block: blocks.count(block) for block in blocks}
    forward = [0.0 if block is None else times.forward[block] / n_calls[block] for block in blocks]
    backward = [0.0 if block is None else times.backward[block] / n_calls[block] for block in blocks]
    gap_start, gap = 0, 0
    for at, block in enumerate((*blocks, len(profile.blocks))):  # what follows the last block ends with the calls
        if block is None or block < gap:
            continue
        outer = list(range(gap_start, at)) or [min(at, len(blocks) - 1)]
        sizes = [
            1 + sum(profile.parameters[p].numel for p in profile.units[profile.calls[v]].parameters) for v in outer
        ]
        for place in range(gap, block + 1):
            for visit, size in zip(outer, sizes, strict=True):
                forward[visit] += times.gap_forward[place] * size / sum(sizes)
                backward[visit] += times.gap_backward[place] * size / sum(sizes)
        gap_start, gap = at + 1, block + 1
    return forward, backward


def gradients_by_visit(
    profile: ModelProfile, hardware: HardwareProfile, layout: Layout
) -> tuple[list[tuple[int, float, float]], list[list[int]]]:
    """The gradients as (chunk, flatten ms, offload ms), and by visit of backward the indices of those it yields.

    A parameter's gradient is complete when backward leaves the unit that used the parameter first. Several ranks reduce
    the gradient of a whole chunk, and then a rank offloads its shard, once for all gradients of the chunk.
    """
    left: dict[int, int] = {}  # by parameter: its last visit in backward
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
        size = offloaded = count * profile.element_bytes
        if layout.world_size > 1:
            offloaded = layout.shard_elements(layout.chunks[chunk]) * profile.element_bytes
        of_visit[at].append(len(gradients))
        gradients.append((chunk, bytes_ms(2 * size, flatten_gbps), bytes_ms(offloaded, hardware.d2h_gbps)))
    return gradients, of_visit
