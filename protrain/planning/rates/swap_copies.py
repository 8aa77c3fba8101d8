"""How what a swapped block saves is copied: every storage by itself, or packed into one buffer that is copied once.

Directly, each distinct storage is a copy of its own, out and back, and the GPU computes nothing for it. Packed, one
kernel writes all of them into one buffer, with bools as bits, which goes out and back as one copy; in backward tensors
are views of that buffer, and only the bits are unpacked. Packing so costs a pass over the GPU's memory, and saves the
begin of every copy but one each way, and seven eighths of the bools' transfer. Small blocks and blocks with masks gain
by it; of a few large tensors the direct copies are faster.
"""

from __future__ import annotations

from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import BlockRecord, ModelProfile

# What a copy takes beside its bytes. From the rows "activations to the host and back" of
# bench/results/h100/kernels-another-machine.json: where 961 MiB in 23 tensors and 1234 MiB in 31 go out and back by a
# copy each, these take 37.0 and 47.5 ms, and 901 MiB in one copy each way 34.1: 12 us a copy beyond the bytes' time.
COPY_MS = 0.012


class SwapCopies(NamedTuple):
    """Milliseconds that the copies of one call of a swapped block take."""

    out_ms: float  # of the link, after forward
    back_ms: float  # of the link, before backward
    pack_ms: float = 0.0  # of the GPU, at the end of forward
    unpack_ms: float = 0.0  # of the GPU, at the begin of backward

    @property
    def total_ms(self) -> float:
        """All of it."""
        return sum(self)


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
    """By block, whether packing takes less time than direct copies; empty where it does for none.

    On a CPU, where device and host memory are one, packing would only copy once more.
    """
    if hardware.device_type == "cpu":
        return ()
    calls = n_calls_of(profile)
    packs = tuple(
        packed_copies(block, n_calls, hardware).total_ms < direct_copies(block, n_calls, hardware).total_ms
        for block, n_calls in zip(profile.blocks, calls, strict=True)
    )
    return packs if any(packs) else ()


def n_calls_of(profile: ModelProfile) -> list[int]:
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
