"""How a swapped block's saved activations are copied: every storage by itself, or packed into one buffer.

Copied directly, each distinct storage is one copy out and one copy back, and the GPU computes nothing for it. Packed,
one kernel writes all storages into one buffer, with bools as bits, and the buffer is one copy each way. In backward the
tensors are views of that buffer, and only the bits are unpacked.

Packing costs a pass over the GPU's memory. It saves the start of every copy but one each way, and seven eighths of the
transfer of bools. The GPU's computing for a block, packing and unpacking included, runs beside the copies of the block
next to it. Copies out have until the end of the next forward, when the memory is given up. Copies back begin with the
backward of the block before in backward order. So in a row of swapped blocks each block takes as long as its computing
or its copies, whichever is longer. Packing is faster for blocks of many small tensors or with masks. For blocks of few
large tensors direct copies are as fast, and where computing hides the copies they are faster.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.planning.rates.compute_times import bytes_ms, compute_times
from protrain.profiler.model_profile import BlockRecord, ModelProfile

# The time of a copy beyond the time of its bytes, 12 us. It comes from the rows "activations to the host and back" of
# bench/results/h100/kernels-another-machine.json. There 961 MiB in 23 tensors, copied one by one out and back, take
# 37.0 ms, and 1234 MiB in 31 tensors 47.5 ms. 901 MiB in one copy each way take 34.1 ms without packing and unpacking.
COPY_MS = 0.012
# The share of the time that packing must save, since a packed block takes more device memory: its buffer stays
# throughout its backward.
_LEAST_GAIN = 0.02


class SwapCopies(NamedTuple):
    """Milliseconds that the copies of one call of a block take, if it is swapped or its inputs are offloaded."""

    out_ms: float  # on the link, after forward
    back_ms: float  # on the link, before backward
    pack_ms: float = 0.0  # on the GPU, at the end of forward
    unpack_ms: float = 0.0  # on the GPU, at the begin of backward

    def in_a_row_ms(self, forward_ms: float, backward_ms: float) -> float:
        """Milliseconds that one of several such blocks in a row adds to a step, with this computing."""
        return max(self.out_ms, forward_ms + self.pack_ms) + max(self.back_ms, backward_ms + self.unpack_ms)


NO_COPIES = SwapCopies(0.0, 0.0)


def swap_copies(block: BlockRecord, n_calls: int, hardware: HardwareProfile, *, packed: bool) -> SwapCopies:
    """The copies if everything is packed into one buffer, or if each storage is copied by itself.

    ``n_calls`` are the block's calls in one forward.
    """
    if not packed:
        return SwapCopies(*_link_ms(block.saved_bytes / n_calls, block.saved_tensors / n_calls, hardware))
    gbps = hardware.pack_gbps or hardware.device_copy_gbps  # the rate of packing is close to that of a copy
    read_and_written = block.saved_bytes + block.packed_bytes
    expanded = block.saved_bool_bytes * 9 / 8
    return SwapCopies(
        *_link_ms(block.packed_bytes / n_calls, 1, hardware),
        pack_ms=bytes_ms(read_and_written / n_calls, gbps),
        unpack_ms=bytes_ms(expanded / n_calls, gbps),
    )


def choose_packed(profile: ModelProfile, hardware: HardwareProfile) -> tuple[bool, ...]:
    """By block, whether a row of such blocks takes clearly less time with packing. Empty if no block is packed.

    On a CPU device memory is host memory, and packing would only be one more copy.
    """
    if hardware.device_type == "cpu":
        return ()
    times = compute_times(profile, hardware)
    n_calls = Counter(profile.units[unit].block for unit in profile.calls)

    def row_ms(index: int, *, packed: bool) -> float:
        calls = max(1, n_calls[index])
        copies = swap_copies(profile.blocks[index], calls, hardware, packed=packed)
        return copies.in_a_row_ms(times.forward[index] / calls, times.backward[index] / calls)

    packs = tuple(
        row_ms(index, packed=True) < (1 - _LEAST_GAIN) * row_ms(index, packed=False)
        for index in range(len(profile.blocks))
    )
    return packs if any(packs) else ()


def _link_ms(size_bytes: float, n_copies: float, hardware: HardwareProfile) -> tuple[float, float]:
    """Milliseconds out and back; none for no bytes."""
    if not size_bytes:
        return 0.0, 0.0
    start_ms = n_copies * COPY_MS if hardware.device_type == "cuda" else 0.0
    return bytes_ms(size_bytes, hardware.d2h_gbps) + start_ms, bytes_ms(size_bytes, hardware.h2d_gbps) + start_ms
