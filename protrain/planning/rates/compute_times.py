"""Milliseconds of computing in one step, per block and between blocks, as the trace measured them or as estimated."""

from __future__ import annotations

from dataclasses import dataclass

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord

# Factors for estimates. They were fitted on an H100 to blocks of LLaMA-7B and 13B, GPT-2 10B and 15B, OPT-13B and
# Mistral-7B, most of them eager; estimates of these blocks are 2% too short to 11% too long. The factor for attention
# was fitted to sequences of 32k and 64k tokens.
_PRODUCTS = 0.86  # on the time of products by the matmul ceiling: they run faster than the calibrated product
_ATTENTION = 1.36  # on the time of attention's products by that ceiling, with half of them under a causal mask
_TRAFFIC = 1.37  # on the time of all other bytes by the copy ceiling
_BACKWARD = 1.1  # on the forward's time, for each of the two kinds of gradient
_HEAD = 1.6  # on the time of the head's products by the matmul ceiling, with the loss; these models have 1.45 to 1.9
_ODD_HEAD = 6.0  # in place of _HEAD if a row of logits is no multiple of 16 bytes, as GPT-2's 50,257 are
_CHUNKED_HEAD = 1.06  # in place of both if the loss is computed in pieces; an H200 has 1.04 to 1.07
_RECOMPUTED = 0.85  # on the forward's time: recomputation stops at the last saved tensor, unless the graph is compiled


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Milliseconds of computing in one step."""

    forward: tuple[float, ...]  # per block
    backward: tuple[float, ...]  # per block, without recomputation
    recompute: tuple[float, ...]  # per block
    gap_forward: tuple[float, ...]  # of what runs before every block, and after the last
    gap_backward: tuple[float, ...]  # by the same places in forward order


def compute_times(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    """The times that the trace measured if it ran on this type of device, else estimates from operations and bytes."""
    if profile.device == hardware.device_type:
        return _measured(profile)
    return _estimated(profile, hardware)


def _measured(profile: ModelProfile) -> ComputeTimes:
    gaps = {"forward": [0.0] * (len(profile.blocks) + 1), "backward": [0.0] * (len(profile.blocks) + 1)}
    calls = [segment for segment in profile.segments if segment.block is not None]
    if not calls:
        for segment in profile.segments:
            gaps[segment.phase][0] += segment.duration_ms
    for phase in gaps if calls else ():
        # A gap's place is that of the block that follows it in forward. In backward that block runs before the gap.
        segments = [segment for segment in profile.segments if segment.phase == phase]
        ordered = segments if phase == "forward" else segments[::-1]
        place = len(profile.blocks)
        for segment in reversed(ordered):
            if segment.block is None:
                gaps[phase][place] += segment.duration_ms
            else:
                place = segment.block
    return ComputeTimes(
        forward=tuple(block.forward_ms for block in profile.blocks),
        backward=tuple(block.backward_ms for block in profile.blocks),
        recompute=tuple(block.recompute_ms for block in profile.blocks),
        gap_forward=tuple(gaps["forward"]),
        gap_backward=tuple(gaps["backward"]),
    )


def _estimated(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    flops_per_ms = hardware.matmul_tflops * 1e9
    share = profile.n_trainable / max(1, profile.n_parameters)  # a frozen weight has no gradient to compute

    def estimated(block: BlockRecord, *, attention: bool = True) -> float:
        flops = _PRODUCTS * (block.forward_flops - block.attention_flops)
        flops += _ATTENTION * block.attention_flops * attention
        return flops / flops_per_ms + _TRAFFIC * bytes_ms(block.forward_traffic_bytes, hardware.device_copy_gbps)

    forward = tuple(estimated(block) for block in profile.blocks)
    recomputed = 1.0 if profile.compiled else _RECOMPUTED
    recompute = tuple(recomputed * estimated(block, attention=block.recomputes_attention) for block in profile.blocks)
    heads = sum(
        record.numel * (_CHUNKED_HEAD if profile.chunked_loss else _ODD_HEAD if record.shape[0] % 8 else _HEAD)
        for record in _heads(profile)
    )
    head = 2 * profile.tokens * heads / flops_per_ms
    return ComputeTimes(
        forward=forward,
        backward=tuple(time * _BACKWARD * (1 + share) for time in forward),
        recompute=recompute,
        gap_forward=(*([0.0] * len(forward)), head * (1 + (1 + share) * profile.chunked_loss)),
        gap_backward=(*([0.0] * len(forward)), head * (1 + share) * (not profile.chunked_loss)),
    )


def _heads(profile: ModelProfile) -> list[ParameterRecord]:
    """The matrices outside blocks by which every token is multiplied.

    The first matrix outside blocks is the embedding, in which tokens are looked up. A head has as many rows as the
    embedding. If no other matrix has, and the embedding is the largest, the head is tied to the embedding, and the
    other matrices are tables of positions.
    """
    outside = {index for unit in profile.units if unit.block is None for index in unit.parameters}
    matrices = [profile.parameters[index] for index in sorted(outside) if len(profile.parameters[index].shape) > 1]
    if not matrices or not profile.blocks:
        return []
    embedding, *others = matrices
    heads = [record for record in others if record.shape[0] == embedding.shape[0]]
    if heads:
        return heads
    return [embedding] if embedding.numel >= max((record.numel for record in others), default=0) else others


def bytes_ms(size_bytes: float, gbps: float) -> float:
    """Milliseconds that ``size_bytes`` take at ``gbps`` GB/s."""
    return size_bytes / gbps / 1e6


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
