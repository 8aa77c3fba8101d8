"""The runtime model: how long a step takes under a plan (paper section 4).

    T_forward  = sum over chunks of max(compute, upload, swapped activations out)
    T_backward = sum over chunks of max(compute + recomputation, upload + swapped activations in, gradient offload)
    T          = T_backward + T_device_update + max(T_forward, T_host_update)

A persistent chunk moves nothing; a chunk still in a buffer at the end of forward isn't uploaded again for backward. The
host's updates stand beside forward and not, as in the paper, beside backward, because they run after step() under the
next forward. Beyond the paper the host's DRAM bounds what its updates and the uploads move together. Without a buffer
to spare nothing can be fetched ahead, and transfers add to compute; on a CPU everything does.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from operator import add

from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout
from protrain.planning.plan import BlockMode
from protrain.profiler.model_profile import ModelProfile

_MATMUL_SHARE = 0.6  # of the matmul ceiling: what whole layers reach, for times estimated from counted operations
_HOST_ADAM_BYTES = {"bfloat16": 26, "float16": 28, "float32": 28}  # DRAM traffic per parameter of one host update


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """Milliseconds of computing in one step."""

    forward: tuple[float, ...]  # per block
    backward: tuple[float, ...]  # per block, without recomputation
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


class RuntimeModel:
    """Predictions for one model in one layout on one machine."""

    def __init__(self, profile: ModelProfile, hardware: HardwareProfile, layout: Layout) -> None:
        self.times = compute_times(profile, hardware)
        self._profile = profile
        self._hardware = hardware
        self._elements = [chunk.elements for chunk in layout.chunks]
        self._trainable = [chunk.elements if chunk.trainable else 0 for chunk in layout.chunks]
        element = profile.element_bytes
        self._upload = [_ms(elements * element, hardware.h2d_gbps) for elements in self._elements]
        self._offload = [_ms(elements * element, hardware.d2h_gbps) for elements in self._trainable]
        self._trainable_before = [0, *accumulate(self._trainable)]
        self._elements_before = [0, *accumulate(self._elements)]
        n_chunks = len(layout.chunks)
        self._chunks_of: list[tuple[int, ...]] = [(0,)] * len(profile.blocks)
        for unit, chunks in zip(profile.units, layout.unit_chunks, strict=True):
            if unit.block is not None:
                self._chunks_of[unit.block] = chunks or (0,)
        self._forward = self._spread(self.times.forward, n_chunks)
        self._backward = self._spread(self.times.backward, n_chunks)
        for gap, (forward, backward) in enumerate(zip(self.times.gap_forward, self.times.gap_backward, strict=True)):
            place = self._chunks_of[gap][0] if gap < len(profile.blocks) else n_chunks - 1
            self._forward[place] += forward
            self._backward[place] += backward

    def least_ms(self, modes: tuple[BlockMode, ...]) -> float:
        """What no placement of chunks goes below: computing alone."""
        again = sum(t for t, mode in zip(self.times.forward, modes, strict=True) if mode is BlockMode.CKPT)
        return self.times.total + again

    def under(self, modes: tuple[BlockMode, ...]) -> StepTimes:
        """Step times by placement, for blocks treated as ``modes`` says."""
        n_chunks = len(self._elements)
        pairs = list(zip(self._profile.blocks, modes, strict=True))
        swapped = [block.saved_bytes if mode is BlockMode.SWAP else 0 for block, mode in pairs]
        again = [t if mode is BlockMode.CKPT else 0.0 for t, (_, mode) in zip(self.times.forward, pairs, strict=True)]
        out = self._spread([_ms(size, self._hardware.d2h_gbps) for size in swapped], n_chunks)
        back = self._spread([_ms(size, self._hardware.h2d_gbps) for size in swapped], n_chunks)
        recomputed = self._spread(again, n_chunks)
        computing = [time + more for time, more in zip(self._backward, recomputed, strict=True)]
        return StepTimes(self, computing, out, back)

    def joined(self, compute: list[float], up: list[float], down: list[float], *, ahead: bool) -> list[float]:
        """Sums over the first chunks of computing and transfers: hidden when fetched ``ahead``, else added."""
        hardware = self._hardware
        both = (hardware.h2d_gbps + hardware.d2h_gbps) / hardware.bidirectional_gbps / 2
        transfers = [max(u, d, (u + d) * both) for u, d in zip(up, down, strict=True)]
        if hardware.device_type == "cpu" or not ahead:
            return [0.0, *accumulate(map(add, compute, transfers))]
        return [0.0, *accumulate(map(max, compute, transfers))]

    def _spread(self, of_blocks: tuple[float, ...] | list[float], n_chunks: int) -> list[float]:
        """Per chunk, what is given per block."""
        result = [0.0] * n_chunks
        for time, chunks in zip(of_blocks, self._chunks_of, strict=True):
            for chunk in chunks:
                result[chunk] += time / len(chunks)
        return result


class StepTimes:
    """T(n_persist, n_buffer) for fixed block modes, in constant time by sums from the first chunk on."""

    def __init__(self, model: RuntimeModel, computing: list[float], out: list[float], back: list[float]) -> None:
        self._model = model
        nothing = [0.0] * len(computing)
        fetched_and_swapped = [u + b for u, b in zip(model._upload, back, strict=True)]
        self._forward_kept = model.joined(model._forward, nothing, out, ahead=True)
        self._backward_kept = model.joined(computing, back, nothing, ahead=True)
        self._backward_buffered = model.joined(computing, back, model._offload, ahead=True)
        self._forward_fetched = [
            model.joined(model._forward, model._upload, out, ahead=ahead) for ahead in (False, True)
        ]
        self._backward_fetched = [
            model.joined(computing, fetched_and_swapped, model._offload, ahead=ahead) for ahead in (False, True)
        ]

    def step_ms(self, n_persist: int, n_buffer: int, *, spare_buffer: bool) -> float:
        """Predicted time of one step; ``spare_buffer``: one more than the units at work hold, to fetch ahead into."""
        model, hardware = self._model, self._model._hardware
        n_chunks = len(model._elements)
        buffered = max(n_persist, n_chunks - n_buffer)
        fetched = self._forward_fetched[spare_buffer]
        forward = self._forward_kept[n_persist] + fetched[-1] - fetched[n_persist]
        refetched, kept = self._backward_fetched[spare_buffer], self._backward_buffered
        backward = (
            self._backward_kept[n_persist] + refetched[buffered] - refetched[n_persist] + kept[-1] - kept[buffered]
        )
        on_device = model._trainable_before[n_persist]
        on_host = model._trainable_before[-1] - on_device
        device_update = on_device / hardware.device_adam_gparams / 1e6
        host_update = on_host / hardware.host_adam_gparams / 1e6
        if hardware.device_type == "cpu":
            return forward + backward + device_update + host_update
        uploaded = (model._elements_before[-1] - model._elements_before[n_persist]) * model._profile.element_bytes
        dram = _ms(on_host * _HOST_ADAM_BYTES[model._profile.dtype] + uploaded, hardware.host_dram_gbps)
        return backward + device_update + max(forward, host_update, dram)


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
        gap_forward=tuple(gaps["forward"]),
        gap_backward=tuple(gaps["backward"]),
    )


def _estimated(profile: ModelProfile, hardware: HardwareProfile) -> ComputeTimes:
    flops_per_ms = hardware.matmul_tflops * _MATMUL_SHARE * 1e9
    share = profile.n_trainable / max(1, profile.n_parameters)  # a frozen weight has no gradient to compute
    forward = tuple(
        max(block.forward_flops / flops_per_ms, _ms(3 * block.saved_bytes, hardware.device_copy_gbps))
        for block in profile.blocks
    )
    outside = {index for unit in profile.units if unit.block is None for index in unit.parameters}
    # The first outer matrix is the embedding, which is looked up and not multiplied.
    lookup = next((index for index in sorted(outside) if len(profile.parameters[index].shape) > 1), None)
    matrices = [index for index in outside if index != lookup and len(profile.parameters[index].shape) > 1]
    if not matrices and lookup is not None and profile.blocks:
        matrices = [lookup]  # tied: the head multiplies the embedding
    head = sum(2 * profile.tokens * profile.parameters[index].numel for index in matrices) / flops_per_ms
    return ComputeTimes(
        forward=forward,
        backward=tuple(time * (1 + share) for time in forward),
        gap_forward=(*([0.0] * len(forward)), head),
        gap_backward=(*([0.0] * len(forward)), head * (1 + share)),
    )


def _ms(size_bytes: float, gbps: float) -> float:
    return size_bytes / gbps / 1e6
