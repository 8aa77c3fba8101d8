"""How long ranks take to gather a tensor from its shards, or to reduce a tensor to shards of the sum."""

from __future__ import annotations

from protrain.planning.rates.compute_times import bytes_ms

# The time of a collective beyond the time of its bytes. On two H100s with NVLink, gathering 64 MiB takes 162 us and
# gathering 1 GiB takes 2.00 ms. On eight, 16 MiB take 73 us and 64 MiB take 175 us. Straight lines through these times
# begin at 39 us.
COLLECTIVE_MS = 0.04


def collective_ms(size_bytes: int, gbps: float) -> float:
    """Milliseconds of a collective on a tensor of ``size_bytes`` in all, at ``gbps`` GB/s of the whole tensor."""
    return COLLECTIVE_MS + bytes_ms(size_bytes, gbps)
