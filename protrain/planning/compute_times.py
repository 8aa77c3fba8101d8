"""Milliseconds of computing in one step, per block and between blocks: measured by the trace, or estimated."""

from __future__ import annotations

from dataclasses import dataclass

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import ModelProfile

_MATMUL_SHARE = 0.75  # of the matmul ceiling: blocks of LLaMA and GPT-2 10B, 8,192 tokens, eager, on an H100


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Milliseconds of computing in one step."""

    forward: tuple[float, ...]  # per block
    backward: tuple[float, ...]  # per block, without recomputation
    recompute: tuple[float, ...]  # per block
    gap_forward: tuple[float, ...]  # before every block, and after the last
    gap_backward: tuple[float, ...]  # the same places

    @property
    def total(self) -> float:
        """Without recomputation."""
        return sum(self.forward) + sum(self.backward) + sum(self.gap_forward) + sum(self.gap_backward)


def compute_times(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    """As the trace measured them when it ran on such a device; otherwise estimated from operations and bytes."""
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
        # Backward runs the other way, so that a gap is named by the block before it in time there and after it in
        # forward.
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
        recompute=tuple(
            block.forward_ms if block.recompute_ms is None else block.recompute_ms for block in profile.blocks
        ),
        gap_forward=tuple(gaps["forward"]),
        gap_backward=tuple(gaps["backward"]),
    )


def _estimated(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    flops_per_ms = hardware.matmul_tflops * _MATMUL_SHARE * 1e9
    share = profile.n_trainable / max(1, profile.n_parameters)  # a frozen weight has no gradient to compute
    forward, recompute = (
        tuple(
            max(flops / flops_per_ms, _ms(3 * block.saved_bytes, hardware.device_copy_gbps))
            for block, flops in zip(profile.blocks, computed, strict=True)
        )
        for computed in (
            [block.forward_flops for block in profile.blocks],
            [
                block.forward_flops if block.recompute_flops is None else block.recompute_flops
                for block in profile.blocks
            ],
        )
    )
    outside = {index for unit in profile.units if unit.block is None for index in unit.parameters}
    # The first outer matrix is the embedding, which is looked up and not multiplied.
    lookup = next((index for index in sorted(outside) if len(profile.parameters[index].shape) > 1), None)
    matrices = [index for index in outside if index != lookup and len(profile.parameters[index].shape) > 1]
    if not matrices and lookup is not None and profile.blocks:
        matrices = [lookup]  # tied: the head multiplies the embedding
    head = sum(2 * profile.tokens * profile.parameters[index].numel for index in matrices) / flops_per_ms
    gradients = head * (1 + share)
    return ComputeTimes(
        forward=forward,
        backward=tuple(time * (1 + share) for time in forward),
        recompute=recompute,
        gap_forward=(*([0.0] * len(forward)), head + gradients * profile.chunked_loss),
        gap_backward=(*([0.0] * len(forward)), gradients * (not profile.chunked_loss)),
    )


def _ms(size_bytes: float, gbps: float) -> float:
    return size_bytes / gbps / 1e6
