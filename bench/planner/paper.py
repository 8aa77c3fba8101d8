"""The paper's own estimate of a step's time (section 4), kept as the baseline that ours is compared with.

    T_forward  = sum over chunks of max(compute, upload)
    T_backward = sum over chunks of max(compute + recomputation, upload + offload)
    T          = T_forward + max(T_backward + T_device_update, T_host_update)

A persistent chunk is neither uploaded nor offloaded, and a chunk that is still in a buffer at the end of forward is not
uploaded for backward. The activations of a swapped block count as uploads and offloads of its first chunk.
"""

from __future__ import annotations

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.plan import BlockMode, Plan
from protrain.planning.rates import bytes_ms, compute_times, device_update_gparams, host_update_gparams
from protrain.profiler.model_profile import ModelProfile


def paper_step_ms(plan: Plan, profile: ModelProfile, hardware: HardwareProfile, layout: Layout) -> float:
    """Milliseconds of one step under ``plan`` by the paper's formulas."""
    times = compute_times(profile, hardware)
    n_chunks = len(layout.chunks)
    forward, backward, out, back = ([0.0] * n_chunks for _ in range(4))
    place = [0] * len(profile.blocks)
    for unit, chunks in zip(profile.units, layout.unit_chunks, strict=True):
        if unit.block is not None and chunks:
            place[unit.block] = chunks[0]
    for index, (block, mode) in enumerate(zip(profile.blocks, plan.block_modes, strict=True)):
        at = place[index]
        forward[at] += times.forward[index]
        backward[at] += times.backward[index] + (times.recompute[index] if mode.recomputes else 0.0)
        if mode is BlockMode.SWAP:
            out[at] += bytes_ms(block.saved_bytes, hardware.d2h_gbps)
            back[at] += bytes_ms(block.saved_bytes, hardware.h2d_gbps)
    for gap, (ahead, behind) in enumerate(zip(times.gap_forward, times.gap_backward, strict=True)):
        beside = place[gap] if gap < len(place) else n_chunks - 1
        forward[beside] += ahead
        backward[beside] += behind
    on_device, on_host = device_update_gparams(profile, hardware), host_update_gparams(profile, hardware)
    total_forward = total_backward = device_update = host_update = 0.0
    for chunk in layout.chunks:
        at, size = chunk.index, chunk.elements * profile.element_bytes
        trained = chunk.elements if chunk.trainable else 0
        upload = bytes_ms(size, hardware.h2d_gbps)
        offload = bytes_ms(trained * profile.element_bytes, hardware.d2h_gbps)
        if at < plan.n_persist:
            upload = offload = 0.0
            device_update += trained / on_device / 1e6
        else:
            host_update += trained / on_host / 1e6
        second_upload = 0.0 if at >= n_chunks - plan.n_buffer else upload
        total_forward += max(forward[at], upload + out[at])
        total_backward += max(backward[at], second_upload + back[at] + offload)
    before = (profile.accumulation - 1) * (total_forward + total_backward)  # micro-batches without an update
    return before + total_forward + max(total_backward + device_update, host_update)
