"""How long calibration takes, how much memory it uses, and how it times a run."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

MIB = 1024**2
GIB = 1024**3
FULL_SECONDS = 30.0
_ROOM_BYTES = 12 * GIB  # of free memory; full sizes take 4 GiB of it, besides the host's chunks
_TRANSFER_MIB = 256
_MOST_CHUNKS = 12
_HOST_SHARE = 10  # chunks take at most this fraction of the host's free memory: one tenth
_CHUNK_BYTES = 14  # a parameter in bf16 with a split master and its gradient
_PIECE = bytes(256 * 1024)  # stays in a core's own cache


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
        """The size of the tensors that host and device copy, a multiple of 1 MiB."""
        return max(1, int(1024 * self.size)) * MIB

    @property
    def hidden(self) -> int:
        """The width of the block whose gradients are flattened: a multiple of 128."""
        return max(1, int(32 * self.size**0.5)) * 128

    @property
    def transfer_bytes(self) -> int:
        """The size of copies between host and device, and of collectives, that no cache holds: 256 MiB."""
        return max(1, int(_TRANSFER_MIB * self.size)) * MIB


def run_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, by the clock of ``device``."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def load(run: Callable[[], object], device: torch.device, seconds: float) -> None:
    """Queue about ``seconds`` of ``run`` on a GPU, without waiting for it. On a CPU nothing is run."""
    if device.type == "cuda":
        for _ in range(int(seconds / max(run_s(run, device), 1e-6))):
            run()


@contextlib.contextmanager
def one_core_taken(*, wanted: bool) -> Iterator[None]:
    """Keep one core busy inside the context, without using its memory or the GIL.

    In a step one core is taken by the thread that launches kernels and then spins until they are done.
    """
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hashlib.sha256(_PIECE)  # releases the GIL

    thread = threading.Thread(target=work, daemon=True)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if wanted:
            thread.join()
