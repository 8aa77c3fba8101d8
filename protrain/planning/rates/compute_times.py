"""Milliseconds of computing in one step, per block and between blocks: measured by the trace, or estimated."""

from __future__ import annotations

from dataclasses import dataclass

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord

# Fitted to blocks of LLaMA-7B and 13B, GPT-2 10B and 15B, OPT-13B and Mistral-7B, most of them eager, on an H100, where
# they are within -2% and +11%; attention to sequences of 32k and 64k tokens there.
_PRODUCTS = 0.86  # of the time of products by the matmul ceiling: they are faster than the one that was calibrated
_ATTENTION = 1.36  # of attention's, where a causal mask counts half
_TRAFFIC = 1.37  # of the time of all other bytes by the copy ceiling
_BACKWARD = 1.1  # of the forward's time for either kind of gradient
_HEAD = 1.6  # of the same of the head's products, with the loss: 1.45 to 1.9 of these models
_ODD_HEAD = 6.0  # where a row of logits is no multiple of 16 bytes: GPT-2's 50,257 words
_RECOMPUTED = 0.85  # of the forward's time, until the last saved tensor is there; a compiled graph runs to its end


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
    flops_per_ms = hardware.matmul_tflops * 1e9
    share = profile.n_trainable / max(1, profile.n_parameters)  # a frozen weight has no gradient to compute

    def estimated(block: BlockRecord, *, attention: bool = True) -> float:
        flops = _PRODUCTS * (block.forward_flops - block.attention_flops)
        flops += _ATTENTION * block.attention_flops * attention
        return flops / flops_per_ms + _TRAFFIC * _ms(block.forward_traffic_bytes, hardware.device_copy_gbps)

    forward = tuple(estimated(block) for block in profile.blocks)
    recomputed = 1.0 if profile.compiled else _RECOMPUTED
    recompute = tuple(recomputed * estimated(block, attention=block.recomputes_attention) for block in profile.blocks)
    head = sum(
        2 * profile.tokens * record.numel * (_ODD_HEAD if _is_odd(record, profile) else _HEAD)
        for record in _heads(profile)
    ) / (hardware.matmul_tflops * 1e9)
    gradients = head * (1 + share)
    return ComputeTimes(
        forward=forward,
        backward=tuple(time * _BACKWARD * (1 + share) for time in forward),
        recompute=recompute,
        gap_forward=(*([0.0] * len(forward)), head + gradients * profile.chunked_loss),
        gap_backward=(*([0.0] * len(forward)), gradients * (not profile.chunked_loss)),
    )


def _heads(profile: ModelProfile) -> list[ParameterRecord]:
    """Matrices outside blocks that multiply every token.

    The first is the embedding, which is looked up. The head has as many rows; where no other has, the two are tied, if
    the embedding is the largest: others are tables of positions.
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


def _is_odd(head: ParameterRecord, profile: ModelProfile) -> bool:
    """Whether rows of its logits are no multiple of 16 bytes, which the chunked loss widens."""
    return bool(head.shape[0] % 8) and not profile.chunked_loss


def _ms(size_bytes: float, gbps: float) -> float:
    return size_bytes / gbps / 1e6
