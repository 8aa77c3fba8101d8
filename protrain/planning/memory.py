"""The memory model: what a plan takes on the device and in host memory (paper section 4).

Device memory is the sum of two parts. One part is taken for the whole training: the model's buffers, persistent chunks,
chunk buffers, gradient staging, and staging for states that are streamed through the GPU for their update. The other
part is the peak of activations over the step (``protrain.planning.segments``).

With several ranks both kinds of memory are those of one rank. All states are its shards, and the buffers for whole
weights serve every chunk. In addition there are whole gradients on their way between ranks, and what the library that
sends them takes (``protrain.planning.layout`` has the sizes).

If a step has several batches, every chunk has an fp32 sum in place of its gradient, where its other states are. The
sums of ``n_device_sum`` chunks are on the device although these are in host memory, where they then have a gradient for
the finished sum.

With updates inside backward, gradients share regions too (``protrain.planning.gradient_regions``). On the device there
are as many regions as are needed. In host memory there are as many as fit, since with more regions backward waits less.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from protrain.hardware.profile import HardwareProfile
from protrain.planning.gradient_regions import GradientRegions
from protrain.planning.layout import PARTIAL_BYTES, ChunkRecord, Layout, summed_on_device
from protrain.planning.plan import BlockMode, Counts, Modes, block_modes, offloaded_input_bytes, swapped_block_bytes
from protrain.planning.rates import choose_packed, may_stream, staging_bytes
from protrain.planning.schedule import most_held
from protrain.planning.segments import Bytes, ModeChoices, Segments
from protrain.profiler.model_profile import ModelProfile

MIB = 1024**2
SUM_BYTES = 4  # of a parameter: sums of gradients are in fp32
_HOST_SMALL_BYTES = 1 * MIB  # partial sums, and page rounding of the arena's segments
_CUDA_WORKSPACE_BYTES = 128 * MIB  # matmul workspaces that a trace may have found allocated, the engine's small tensors
_CUDA_FRAGMENTATION = 0.05  # a share of the activations, lost by the caching allocator to sizes that don't fit together
_CPU_SLACK = 0.01  # a share of the activations


@dataclass(frozen=True, kw_only=True)
class Activations:
    """The memory that a step takes beside model states under one choice of block modes."""

    peak_bytes: int
    held_bytes: int  # upper bound of the saved activations in peak_bytes
    swapped_bytes: int  # host memory of swapped activations and offloaded inputs


def state_bytes(chunk: ChunkRecord, profile: ModelProfile) -> int:
    """Bytes of ``chunk`` without its gradient: weight, and if trainable master or remainder, and both moments."""
    master = {"bfloat16": 2, "float16": 4, "float32": 0}[profile.dtype]
    return chunk.elements * (profile.element_bytes + chunk.trainable * (master + 2 * profile.moment_bytes))


class MemoryModel:
    """Predictions for one model in one layout on one machine.

    Args:
        profile: of the model and the batch.
        hardware: the machine and its limits, as one rank has them.
        layout: of the model, for as many ranks.
        pack_swaps: by block, whether what it saves is packed if it is swapped. By default the faster way is chosen.
        stream: whether the GPU may update chunks in host memory. By default it may if calibration knows how fast it is.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        layout: Layout,
        *,
        pack_swaps: tuple[bool, ...] | None = None,
        stream: bool | None = None,
    ) -> None:
        assert layout.world_size == hardware.world_size, "the layout is for another number of ranks"
        self.profile = profile
        self.hardware = hardware
        self.layout = layout
        self.stream = may_stream(hardware) if stream is None else stream
        self.pack_swaps = choose_packed(profile, hardware) if pack_swaps is None else pack_swaps
        packs = self.pack_swaps or (False,) * len(profile.blocks)
        self.gradients = GradientRegions(profile, hardware, layout)
        self.accumulates = profile.accumulation > 1  # every chunk has an fp32 sum
        element = profile.element_bytes
        placements = range(len(layout.chunks) + 1)
        # By n_persist: the fewest buffers, and those for large chunks: the most chunks that are held at one time.
        self.least_buffers, self.large_buffers = zip(*most_held(profile, layout), strict=True)
        # By n_persist: the most buffers, one for every chunk that needs one and is not large.
        firsts = map(layout.first_buffered, placements)
        self.all_buffers = [sum(not layout.is_large(chunk) for chunk in layout.chunks[first:]) for first in firsts]
        # By n_persist: bytes of one chunk buffer, and of all buffers for large chunks.
        sizes = [layout.buffer_elements(n_persist) for n_persist in placements]
        self._buffer_bytes = [usual * element for usual, _ in sizes]
        self._large_bytes = [n * size * element for n, (_, size) in zip(self.large_buffers, sizes, strict=True)]
        self._streaming_bytes = staging_bytes(layout.usual_shard_elements) if self.stream else 0
        # By n_persist, of the persistent chunks on this rank: trained elements, bytes of states, and of trained states.
        trained = [layout.shard_elements(chunk) * chunk.trainable for chunk in layout.chunks]
        states = [state_bytes(chunk, profile) // layout.world_size for chunk in layout.chunks]
        copies = [size * chunk.trainable for size, chunk in zip(states, layout.chunks, strict=True)]
        self._trained, self._state_bytes, self._copy_bytes = (
            list(accumulate(sizes, initial=0)) for sizes in (trained, states, copies)
        )
        self.partial_bytes = PARTIAL_BYTES * layout.n_tiles
        self._exchange_bytes = layout.exchange_bytes(element)
        # By block: host memory of its saved activations, and of its inputs.
        self._swapped_bytes = [(swapped_block_bytes(each), offloaded_input_bytes(each)) for each in profile.blocks]
        self._segments = Segments.of(profile, packs)
        self.activations = cache(self._activations_of)
        self.offloads = cache(self._offloads_of)

    def _summed_elements(self, n_persist: int, n_device_sum: int) -> int:
        """The elements of this rank in the sums on the device of chunks in host memory."""
        kept = summed_on_device(len(self.layout.chunks), n_persist, n_device_sum)
        return sum(self._trained[chunk + 1] - self._trained[chunk] for chunk in kept)

    def host_sum_bytes(self, n_persist: int, n_device_sum: int) -> int:
        """Host memory of sums."""
        away = self.accumulates * (self._trained[-1] - self._trained[n_persist])
        return SUM_BYTES * (away - self._summed_elements(n_persist, n_device_sum))

    def _finished_bytes(self, n_persist: int, n_device_sum: int) -> int:
        """Host memory of the gradients that finished sums on the device become."""
        return self.profile.element_bytes * self._summed_elements(n_persist, n_device_sum)

    def most_buffers(self, n_persist: int, margined_bytes: Bytes, n_device_sum: int = 0) -> Bytes:
        """The number of chunk buffers that fit beside activations of these sizes; -1 where too few fit."""
        least, most = self.least_buffers[n_persist], self.all_buffers[n_persist]
        free = self.hardware.device_bytes - self.static_bytes(n_persist, least, n_device_sum) - margined_bytes
        n_buffer = np.minimum(most, least + free // max(1, self._buffer_bytes[n_persist]))
        return np.where(free < 0, -1, n_buffer)

    def static_bytes(self, n_persist: int, n_buffer: int, n_device_sum: int = 0) -> int:
        """Device memory that is taken for the whole training."""
        return sum(self.static_parts(n_persist, n_buffer, n_device_sum).values())

    def static_parts(self, n_persist: int, n_buffer: int, n_device_sum: int = 0) -> dict[str, int]:
        """The parts of ``static_bytes``, by name."""
        summed = n_device_sum if self.accumulates else None
        element_bytes, gradient_bytes = self.profile.element_bytes, self.gradients.device_bytes(n_persist)
        parts = {"persistent chunks": self._state_bytes[n_persist]}
        parts["persistent chunks"] += SUM_BYTES * self.accumulates * self._trained[n_persist]
        if self.gradients.n_on_device(n_persist):
            parts["gradients of persistent chunks"] = gradient_bytes
        else:
            parts["persistent chunks"] += gradient_bytes
        parts |= {
            "chunk buffers": n_buffer * self._buffer_bytes[n_persist] + self._large_bytes[n_persist],
            "gradient staging": self.layout.staging_bytes(n_persist, element_bytes, summed) + self._exchange_bytes,
            "buffers and quantised weights": self.profile.buffer_bytes,
        }
        if n_device_sum:
            parts["sums of gradients"] = SUM_BYTES * self._summed_elements(n_persist, n_device_sum)
        if self._streaming_bytes and n_persist < len(self.layout.chunks):
            parts["staging for streamed updates"] = self._streaming_bytes
        if self.hardware.collective_bytes:
            parts["NCCL and its contexts"] = self.hardware.collective_bytes
        return parts

    def device_bytes(self, counts: Counts, modes: Modes) -> int:
        """Predicted peak of device memory."""
        activations = self.activations(modes)
        static_bytes = self.static_bytes(counts.n_persist, counts.n_buffer, counts.n_device_sum)
        return static_bytes + int(self._with_margin(np.array(activations.peak_bytes)))

    def device_parts(self, counts: Counts, modes: Modes) -> dict[str, int]:
        """The parts of the device memory, by name."""
        parts = self.static_parts(counts.n_persist, counts.n_buffer, counts.n_device_sum)
        parts["activations"] = self.activations(modes).peak_bytes
        return {**parts, "margin and workspaces": self.device_bytes(counts, modes) - sum(parts.values())}

    def _with_margin(self, peak_bytes: Bytes) -> Bytes:
        """Peaks of activations with the margin that this type of device needs."""
        if self.hardware.device_type == "cuda":
            return (peak_bytes * (1 + _CUDA_FRAGMENTATION)).astype(np.int64) + _CUDA_WORKSPACE_BYTES
        return (peak_bytes * (1 + _CPU_SLACK)).astype(np.int64)

    def n_host_regions(self, n_persist: int, swapped_bytes: int) -> int:
        """The number of regions that gradients in host memory share, as many as fit; 0 if each has its own."""
        return self.gradients.n_on_host(
            n_persist, self.hardware.host_bytes - self.least_host_bytes(n_persist, swapped_bytes)
        )

    def host_bytes(self, counts: Counts, modes: Modes) -> int:
        """Predicted host memory of the engine."""
        return sum(self.host_parts(counts, modes).values())

    def host_parts(self, counts: Counts, modes: Modes) -> dict[str, int]:
        """The parts of the host memory, by name."""
        n_persist, n_weight_only = counts.n_persist, counts.n_weight_only
        swapped_bytes = self.activations(modes).swapped_bytes
        sizes = zip(modes, self._swapped_bytes, strict=True)
        offloaded = sum(input_bytes for mode, (_, input_bytes) in sizes if mode is BlockMode.CKPT_SWAP)
        attention = "" if all(block.recomputes_attention for block in self.profile.blocks) else ", and attention"
        away_bytes = self._state_bytes[-1] - self._state_bytes[n_persist]
        trained_bytes = (self._trained[-1] - self._trained[n_persist]) * self.profile.element_bytes
        optimizer_bytes = self._copy_bytes[-1] - self._copy_bytes[n_persist] - trained_bytes
        whole_copies_bytes = self.copy_bytes(n_persist + n_weight_only, counts.n_speculate - n_weight_only)
        n_regions = self.n_host_regions(n_persist, swapped_bytes)
        parts = {
            "weights": away_bytes - optimizer_bytes,
            "gradients": self.gradients.host_bytes(n_persist, n_regions)
            + self._finished_bytes(n_persist, counts.n_device_sum),
            "optimizer states": optimizer_bytes,
            "swapped activations": swapped_bytes - offloaded,
        }
        optional = {
            "sums of gradients": self.host_sum_bytes(n_persist, counts.n_device_sum),
            f"offloaded inputs of recomputed blocks{attention}": offloaded,
            "second weights for speculative updates": self.copy_bytes(n_persist, n_weight_only, n_weight_only),
            "second copies for speculative updates": whole_copies_bytes,
        }
        parts |= {name: size for name, size in optional.items() if size}
        return {**parts, "other": self.partial_bytes + _HOST_SMALL_BYTES}

    def least_host_bytes(self, n_persist: int, swapped_bytes: int, n_device_sum: int = 0) -> int:
        """The least host memory of any plan that persists and swaps so much.

        Such a plan has no second copies, and the fewest regions for gradients.
        """
        states_bytes = self._state_bytes[-1] - self._state_bytes[n_persist]
        states_bytes += self.gradients.host_bytes(n_persist, self.gradients.n_on_host(n_persist))
        states_bytes += self.host_sum_bytes(n_persist, n_device_sum) + self._finished_bytes(n_persist, n_device_sum)
        return states_bytes + swapped_bytes + self.partial_bytes + _HOST_SMALL_BYTES

    def copy_bytes(self, n_persist: int, n_speculate: int, n_weight_only: int = 0) -> int:
        """Bytes of the second copies that speculative updates write. The first ``n_weight_only`` are weights alone."""
        first, last = n_persist + n_weight_only, n_persist + n_speculate
        weights_bytes = self.profile.element_bytes * (self._trained[first] - self._trained[n_persist])
        return weights_bytes + self._copy_bytes[last] - self._copy_bytes[first]

    def speculation(
        self, n_persist: int, n_speculate: int, swapped_bytes: int, n_device_sum: int = 0
    ) -> tuple[int, int]:
        """(n_speculate, n_weight_only): at most ``n_speculate`` updates, as many as host memory has room for.

        The host computes an update of the weight alone twice, so there are as few of them as possible: those of the
        first chunks in execution order. Their gradients arrive last, when the end of backward is near, and the next
        forward needs them first. Their next gradients arrive last again, which leaves the host the most time for the
        states.
        """
        room_bytes = self.hardware.host_bytes - self.least_host_bytes(n_persist, swapped_bytes, n_device_sum)
        most = max(0, room_bytes) // self.profile.element_bytes  # elements of weights
        fit = bisect_right(self._trained, self._trained[n_persist] + most) - 1 - n_persist
        n_speculate = max(0, min(n_speculate, fit, len(self.layout.chunks) - n_persist))
        n_weight_only = bisect_left(
            range(n_speculate), True, key=lambda n: self.copy_bytes(n_persist, n_speculate, n) <= room_bytes
        )
        return n_speculate, n_weight_only

    def _activations_of(self, modes: Modes) -> Activations:
        """The memory that the step takes beside model states under ``modes``."""
        peak, held, swapped = (int(array[0]) for array in self.all_activations(ModeChoices.of([modes])))
        return Activations(peak_bytes=peak, held_bytes=held, swapped_bytes=swapped)

    def _offloads_of(self, n_swap: int, n_ckpt: int) -> tuple[Bytes, Bytes]:
        """Device bytes with their margin, and host bytes, by the number of input offloads: from 0 to ``n_ckpt``."""
        modes = [block_modes(len(self.profile.blocks), n_swap, n_ckpt, n) for n in range(n_ckpt + 1)]
        peak_bytes, _, swapped_bytes = self.all_activations(ModeChoices.of(modes))
        return self._with_margin(peak_bytes), swapped_bytes

    def all_activations(self, choices: ModeChoices) -> tuple[Bytes, Bytes, Bytes]:
        """The fields of ``Activations`` in their order, each as an array by choice."""
        peak, held = self._segments.peaks(choices)
        saved_bytes, input_bytes = np.array(self._swapped_bytes, dtype=np.int64).reshape(-1, 2).T
        return peak, np.minimum(held, peak), saved_bytes @ choices.swap + input_bytes @ choices.ckpt_swap
