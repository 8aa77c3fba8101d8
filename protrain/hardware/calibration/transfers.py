"""Copies between host and device: up, down and both ways at once, by size. On a CPU both sides are host memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from protrain.hardware.calibration.tensors import CPU, random_tensor
from protrain.hardware.calibration.timing import rate

_IN_A_ROW_BYTES = 64 * 1024**2  # small copies follow each other, so that starting and joining two streams costs nothing


class Transfers:
    """A buffer on the device and a stream for each way, with the host memory on the other side.

    Args:
        device: the device that is copied to and from.
        size_bytes: the size of a buffer, and of the largest copy.
        regions: how many regions of host memory there are for each way. Copies take them in turn, because a single
            region may stay in the caches.
    """

    def __init__(self, device: torch.device, size_bytes: int, *, regions: int = 1) -> None:
        self.device = device
        sources, targets = ([random_tensor(size_bytes, torch.uint8, CPU) for _ in range(regions)] for _ in range(2))
        self.host = (*sources, *targets)  # to be pinned while anything is copied
        self._sources, self._targets = itertools.cycle(sources), itertools.cycle(targets)
        self._far = [random_tensor(size_bytes, torch.uint8, device) for _ in range(2)]
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]
        self.size_bytes = size_bytes

    def up(self, size_bytes: int | None = None) -> None:
        """Queue a copy to the device."""
        self._far[0][:size_bytes].copy_(next(self._sources)[:size_bytes], non_blocking=True)

    def down(self, size_bytes: int | None = None) -> None:
        """Queue a copy to the host."""
        next(self._targets)[:size_bytes].copy_(self._far[1][:size_bytes], non_blocking=True)

    def both(self, size_bytes: int, count: int) -> None:
        """Queue ``count`` copies each way. On a GPU both ways run at the same time."""
        for stream, copy in zip(self._streams, (self.up, self.down), strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):  # None changes nothing
                for _ in range(count):
                    copy(size_bytes)
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def gbps(self, size_bytes: int, *, budget_s: float) -> dict[str, float]:
        """The rates up, down and both ways in copies of ``size_bytes``. ``budget_s`` is the time for all three."""
        count = max(1, min(_IN_A_ROW_BYTES, self.size_bytes) // size_bytes)
        ways: dict[str, tuple[Callable[[], None], int]] = {
            "h2d_gbps": (lambda: self.up(size_bytes), size_bytes),
            "d2h_gbps": (lambda: self.down(size_bytes), size_bytes),
            "bidirectional_gbps": (lambda: self.both(size_bytes, count), 2 * count * size_bytes),
        }
        return {name: rate(run, self.device, moved / 1e9, budget_s=budget_s / 3) for name, (run, moved) in ways.items()}
