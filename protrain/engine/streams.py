"""The one owner of every CUDA stream, and its CPU stand-in.

Three streams, each for a reason:

- compute: the stream that is current when the engine is made. ALL device memory is allocated there, so that the caching
  allocator has one free list; only memory that lives as long as the engine is marked for the other streams, once.
- h2d: uploads (weights, swapped activations). Copy engines are FIFO and blind to priority, one per direction, so a
  stream of its own per direction is all that can overlap.
- d2h: offloads (gradients, swapped activations).

Host code that must know when a transfer is done waits for the :class:`Mark` that came with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override


class Mark:
    """A point in a stream. On the CPU everything before it has already happened."""

    def wait(self) -> None:
        """Block the calling host thread until the point is reached."""

    def reached(self) -> bool:
        """Whether it is."""
        return True


class _CudaMark(Mark):
    def __init__(self) -> None:
        # Blocking events let the waiting thread sleep: the cores belong to the host optimizer.
        self.event = torch.cuda.Event(blocking=True)

    @override
    def wait(self) -> None:
        self.event.synchronize()

    @override
    def reached(self) -> bool:
        return bool(self.event.query())


class Streams:
    """Transfers in program order, done at once: the CPU, where device and host memory are the same."""

    def mark(self) -> Mark:
        """A reusable point in time."""
        return Mark()

    def compute_reached(self, mark: Mark) -> None:
        """Place ``mark`` at the current end of the compute stream."""

    def compute_waits(self, mark: Mark) -> None:
        """Work put on the compute stream from now on runs after ``mark``."""

    def upload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        """Copy host ``source`` into device ``target`` once ``after`` is reached, then place ``done``."""
        target.copy_(source)

    def offload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        """Copy device ``source`` into host ``target`` once ``after`` is reached, then place ``done``."""
        target.copy_(source)

    def upload_reached(self, mark: Mark) -> None:
        """Place ``mark`` at the current end of the upload stream."""

    def offload_reached(self, mark: Mark) -> None:
        """Place ``mark`` at the current end of the offload stream."""

    def upload_waits(self, mark: Mark) -> None:
        """Uploads issued from now on run after ``mark``."""

    def offload_waits(self, mark: Mark) -> None:
        """Offloads issued from now on run after ``mark``."""

    def lasting(self, memory: Tensor) -> Tensor:
        """``memory``, which copies use; when it is freed nothing else gets it before they have run."""
        return memory

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Run the body on the compute stream whatever thread this is."""
        yield

    def synchronize(self) -> None:
        """Wait on the host until every stream is empty."""


class CudaStreams(Streams):
    """The three streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = torch.cuda.current_stream(device)
        self.h2d = torch.cuda.Stream(device)
        self.d2h = torch.cuda.Stream(device)

    @override
    def mark(self) -> Mark:
        return _CudaMark()

    @override
    def compute_reached(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        mark.event.record(self.compute)

    @override
    def compute_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.compute.wait_event(mark.event)

    @override
    def upload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        self._copy(self.h2d, target, source, after, done)

    @override
    def offload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        self._copy(self.d2h, target, source, after, done)

    @override
    def upload_reached(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        mark.event.record(self.h2d)

    @override
    def offload_reached(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        mark.event.record(self.d2h)

    @override
    def upload_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.h2d.wait_event(mark.event)

    @override
    def offload_waits(self, mark: Mark) -> None:
        assert isinstance(mark, _CudaMark)
        self.d2h.wait_event(mark.event)

    @override
    def lasting(self, memory: Tensor) -> Tensor:
        memory.record_stream(self.h2d)
        memory.record_stream(self.d2h)
        return memory

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, after: Mark, done: Mark) -> None:
        assert isinstance(after, _CudaMark)
        assert isinstance(done, _CudaMark)
        with torch.cuda.stream(stream):
            stream.wait_event(after.event)
            target.copy_(source, non_blocking=True)
            done.event.record(stream)

    @override
    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self.compute):
            yield

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
