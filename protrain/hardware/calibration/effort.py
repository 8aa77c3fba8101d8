"""How long calibration takes, and how much memory it uses for that."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024**2
GIB = 1024**3
FULL_SECONDS = 30.0
_ROOM_BYTES = 12 * GIB  # free memory that full sizes, 3 GiB at the most but for the host's chunks, are modest beside
_LARGEST_TRANSFER_MIB = 256
_MOST_CHUNKS = 12
_HOST_SHARE = 10  # of the host's free memory is what chunks may take
_CHUNK_BYTES = 14  # a parameter, bf16 with a split master and its gradient


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Times and sizes of one calibration.

    Full sizes are far beyond every cache. Less time or little memory makes them smaller in proportion, and figures of
    much smaller ones include the caches.
    """

    seconds: float  # of measuring; allocation and compilation come on top
    host_room_bytes: int
    device_room_bytes: int

    @property
    def time(self) -> float:
        """Of what a full calibration takes."""
        return self.seconds / FULL_SECONDS

    @property
    def size(self) -> float:
        """Of full sizes."""
        return min(1.0, self.time, self.host_room_bytes / _ROOM_BYTES, self.device_room_bytes / _ROOM_BYTES)

    @property
    def adam_elements(self) -> int:
        """Parameters of the chunk that AdamW updates, a multiple of 1024: 0.9 GB in bf16 with a split master."""
        return max(64, int(64 * 1024 * self.size)) * 1024

    @property
    def host_chunks(self) -> int:
        """How many such chunks the host updates one after the other."""
        room = self.host_room_bytes // _HOST_SHARE // (self.adam_elements * _CHUNK_BYTES)
        return max(1, min(room, int(_MOST_CHUNKS * self.time)))

    @property
    def tensor_bytes(self) -> int:
        """Of tensors that host and device copy, a multiple of 1 MiB."""
        return max(1, int(1024 * self.size)) * MIB

    @property
    def hidden(self) -> int:
        """Width of the block whose gradients are flattened and whose activations are packed, a multiple of 128."""
        return max(1, int(32 * self.size**0.5)) * 128

    @property
    def transfer_bytes(self) -> list[int]:
        """Sizes of copies between host and device, and of collectives: powers of two from 1 to 256 MiB."""
        largest = max(1, int(_LARGEST_TRANSFER_MIB * self.size))
        return [MIB << bit for bit in range(largest.bit_length())]
