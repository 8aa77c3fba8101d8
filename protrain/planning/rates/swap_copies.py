"""How what a swapped block saves is copied: every storage by itself, or packed into one buffer that is copied once.

Directly, each distinct storage is a copy of its own, out and back, and the GPU computes nothing for it. Packed, one
kernel writes all of them into one buffer, with bools as bits, which goes out and back as one copy; in backward tensors
are views of that buffer, and only the bits are unpacked.

Packing costs a pass over the GPU's memory. It saves the begin of all copies but one each way, and seven eighths of the
bools' transfer. What the GPU computes for a block, with packing and unpacking, runs beside the copies of its neighbour:
those on the way out have until the end of the next forward, when the memory is given up, those on the way back begin
with the backward of the block behind. So in a row of swapped blocks each takes as long as its computing or its copies,
whichever is longer. Blocks of many small tensors, or with masks, gain by packing; of few large tensors direct copies
are as fast, and where computing hides them faster.
"""

from __future__ import annotations

from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.planning.rates.compute_times import compute_times
from protrain.profiler.model_profile import BlockRecord, ModelProfile

# What a copy takes beside its bytes. From the rows "activations to the host and back" of
# bench/results/h100/kernels-another-machine.json: where 961 MiB in 23 tensors and 1234 MiB in 31 go out and back by a
# copy each, that takes 37.0 and 47.5 ms; 901 MiB in one copy each way take 34.1, packing and unpacking apart. That is
# 12 us a copy beyond the time of the bytes.
COPY_MS = 0.012
_LEAST_GAIN = 0.02  # of the time; a packed block takes more device memory, as its buffer stays all through its backward


class SwapCopies(NamedTuple):
    """Milliseconds that the copies of one call of a swapped block take."""

    out_ms: float  # of the link, after forward
    back_ms: float  # of the link, before backward
    pack_ms: float = 0.0  # of the GPU, at the end of forward
    unpack_ms: float = 0.0  # of the GPU, at the begin of backward

    def in_a_row_ms(self, forward_ms: float, backward_ms: float) -> float:
        """What one of several such blocks in a row takes of a step, with this computing."""
        return max(self.out_ms, forward_ms + self.pack_ms) + max(self.back_ms, backward_ms + self.unpack_ms)


def direct_copies(block: BlockRecord, n_calls: int, hardware: HardwareProfile) -> SwapCopies:
    """Of each storage by itself; ``n_calls`` is of the block in one forward."""
    return SwapCopies(*_link_ms(block.saved_bytes / n_calls, block.saved_tensors / n_calls, hardware))


def packed_copies(block: BlockRecord, n_calls: int, hardware: HardwareProfile) -> SwapCopies:
    """Of one buffer that everything is packed into."""
    gbps = hardware.pack_gbps or hardware.device_copy_gbps  # which it comes close to where it was not measured
    read_and_written = block.saved_bytes + block.packed_bytes
    expanded = block.saved_bool_bytes * 9 / 8
    return SwapCopies(
        *_link_ms(block.packed_bytes / n_calls, 1, hardware),
        pack_ms=read_and_written / n_calls / gbps / 1e6,
        unpack_ms=expanded / n_calls / gbps / 1e6,
    )


def swap_copies(block: BlockRecord, n_calls: int, hardware: HardwareProfile, *, packed: bool) -> SwapCopies:
    """Of either way."""
    return (packed_copies if packed else direct_copies)(block, n_calls, hardware)


def choose_packed(profile: ModelProfile, hardware: HardwareProfile) -> tuple[bool, ...]:
    """By block, whether a row of such blocks takes clearly less time with packing; empty: of none it does.

    On a CPU, where device and host memory are one, packing would only copy once more.
    """
    if hardware.device_type == "cpu":
        return ()
    times = compute_times(profile, hardware)
    packs = []
    for index, (block, n_calls) in enumerate(zip(profile.blocks, _calls(profile), strict=True)):
        computing_ms = times.forward[index] / n_calls, times.backward[index] / n_calls
        direct, packed = direct_copies(block, n_calls, hardware), packed_copies(block, n_calls, hardware)
        packs.append(packed.in_a_row_ms(*computing_ms) < (1 - _LEAST_GAIN) * direct.in_a_row_ms(*computing_ms))
    return tuple(packs) if any(packs) else ()


def _calls(profile: ModelProfile) -> list[int]:
    """By block, its calls in one forward, 1 at least."""
    counts = [0] * len(profile.blocks)
    for unit in profile.calls:
        if (block := profile.units[unit].block) is not None:
            counts[block] += 1
    return [max(1, count) for count in counts]


def _link_ms(size_bytes: float, n_copies: float, hardware: HardwareProfile) -> tuple[float, float]:
    """Out and back; nothing where there is nothing."""
    if not size_bytes:
        return 0.0, 0.0
    begin_ms = n_copies * COPY_MS if hardware.device_type == "cuda" else 0.0
    return size_bytes / hardware.d2h_gbps / 1e6 + begin_ms, size_bytes / hardware.h2d_gbps / 1e6 + begin_ms
