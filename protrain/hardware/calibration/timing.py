"""How long calibration takes, and how much memory it uses."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2
GIB = 1024**3
FULL_SECONDS = 30.0
_ROOM_BYTES = 12 * GIB  # of free memory; full sizes take 4 GiB of it, besides the host's chunks
_MOST_CHUNKS = 12
_HOST_SHARE = 10  # chunks take at most this fraction of the host's free memory: one tenth
_CHUNK_BYTES = 14  # a parameter in bf16 with a split master and its gradient


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Times and sizes of one calibration.

    Full sizes are far beyond every cache. With less time or little memory the sizes shrink in proportion, and the
    rates of much smaller sizes include the caches.
    """

    seconds: float  # of measuring; allocation and compilation come on top
    host_room_bytes: int
    device_room_bytes: int

    @property
    def time(self) -> float:
        """The share of a full calibration's time."""
        return self.seconds / FULL_SECONDS

    @property
    def size(self) -> float:
        """The share of full sizes."""
        return min(1.0, self.time, self.host_room_bytes / _ROOM_BYTES, self.device_room_bytes / _ROOM_BYTES)

    @property
    def adam_elements(self) -> int:
        """Parameters of a chunk that AdamW updates, a multiple of 1024: 0.9 GB in bf16 with a split master."""
        return max(64, int(64 * 1024 * self.size)) * 1024

    @property
    def host_chunks(self) -> int:
        """How many such chunks the host updates one after the other."""
        room = self.host_room_bytes // _HOST_SHARE // (self.adam_elements * _CHUNK_BYTES)
        return max(1, min(room, int(_MOST_CHUNKS * self.time)))

    @property
    def tensor_bytes(self) -> int:
        """The size of the tensors that host and device copy alone, a multiple of 1 MiB.

        Copies between them, and collectives, have a quarter of it, which no cache holds: 256 MiB.
        """
        return max(1, int(1024 * self.size)) * MIB
