"""How calibration times work, how long it takes, and how much memory it uses.

Work is timed in many batches of runs, whose median counts. Work on a GPU is timed by
events, in batches of a few milliseconds, so that launching is hidden as it is in a step. Work on the host is timed by
the host's clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

MIB = 1024**2
GIB = 1024**3
FULL_SECONDS = 30.0
_ROOM_BYTES = 12 * GIB  # of free memory; full sizes take 3 GiB of it, besides the host's chunks
_LARGEST_TRANSFER_MIB = 256
_MOST_CHUNKS = 12
_HOST_SHARE = 10  # chunks take at most this fraction of the host's free memory: one tenth
_CHUNK_BYTES = 14  # a parameter in bf16 with a split master and its gradient
_BATCH_S = 2e-3  # of one timed batch: far above the resolution of events, and long enough to hide launches
_MOST_IN_BATCH = 256
_MOST_BATCHES = 500
_LEAST_BATCHES = 5
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
        """The width of the block whose gradients are flattened and whose activations are packed: a multiple of 128."""
        return max(1, int(32 * self.size**0.5)) * 128

    @property
    def transfer_bytes(self) -> list[int]:
        """Sizes of copies between host and device, and of collectives, that no cache holds: 64, 128 and 256 MiB."""
        largest = max(1, int(_LARGEST_TRANSFER_MIB * self.size))
        return [MIB << bit for bit in range(largest.bit_length())][-3:]


def quintiles_of(samples: Sequence[float]) -> tuple[float, float]:
    """The values below and above which a fifth of the ``samples`` lie."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return ordered[math.floor(0.2 * last)], ordered[math.ceil(0.8 * last)]


def durations_s(run: Callable[[], object], device: torch.device, *, budget_s: float) -> list[float]:
    """Seconds of one ``run`` on ``device``: one sample a batch, as many as ``budget_s`` holds but at least five.

    Args:
        run: does the work, or queues it on the current stream of a GPU.
        device: the device whose clock counts.
        budget_s: the time for all samples; the warm-up comes on top.
    """
    run()  # compiles and allocates
    once_s = batch_s(run, device, 1)
    runs = max(1, min(_MOST_IN_BATCH, math.ceil(_BATCH_S / max(once_s, 1e-7))))
    begin = time.perf_counter()
    samples: list[float] = []
    while len(samples) < _LEAST_BATCHES or (time.perf_counter() - begin < budget_s and len(samples) < _MOST_BATCHES):
        samples.append(batch_s(run, device, runs))
    return samples


def batch_s(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Seconds of one run, by the clock of ``device``, when ``runs`` runs follow each other."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / runs
    begin = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - begin) / runs


def rate(run: Callable[[], object], device: torch.device, work: float, *, budget_s: float) -> float:
    """The median rate of ``run``, which does ``work`` each time: in the unit of the rate times seconds."""
    return work / max(median(durations_s(run, device, budget_s=budget_s)), 1e-12)


def load(run: Callable[[], object], device: torch.device, seconds: float) -> None:
    """Queue about ``seconds`` of ``run`` on a GPU, without waiting for it. On a CPU nothing is run."""
    if device.type == "cuda":
        for _ in range(int(seconds / max(batch_s(run, device, 1), 1e-6))):
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
