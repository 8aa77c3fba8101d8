"""The object that owns every CUDA stream, and its stand-in on the CPU.

There are these streams, each for a reason:

- compute: the stream that is current when the engine is made. ALL device memory is allocated there, so that the caching
  allocator has one free list. Memory that lives as long as the engine is recorded for the other streams, once.
- h2d: uploads (weights, swapped activations). There is one copy engine in each direction, which takes transfers in
  order and knows no priority. So one stream in each direction is all that can overlap.
- d2h: offloads (gradients, swapped activations).
- gather, reduce: with several ranks, collectives on weights and on gradients. They overlap with each other and with
  computing. What follows a collective on its data (the fold of gradients) runs on the same stream.
- streamed, streamed_h2d, streamed_d2h: updates that the device does on chunks in host memory. They wait for no kernel
  of the compute stream, and it does not wait for them. They have streams of their own for copies, because each piece of
  the states waits for the piece before it to have left: on h2d and d2h all later transfers would wait as well.

Host code that must know when a transfer is done waits for the ``Mark`` that came with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from typing_extensions import override

from protrain.common.errors import MisuseError
from protrain.planning.timeline import LANES
from protrain_kernels import AdamStaging

SPAN = "ProTrain "  # with it the names of all spans begin
_NO_SPAN = nullcontext()


class Mark:
    """A point in a stream. On the CPU all work before it is done already."""

    event: torch.cuda.Event  # of a point in a stream of a GPU

    def wait(self) -> None:
        """Block the calling host thread until the point is reached."""

    def reached(self) -> bool:
        """Whether the point is reached."""
        return True


class _CudaMark(Mark):
    def __init__(self) -> None:
        # With a blocking event the waiting thread sleeps, and leaves its core to the host optimizer.
        self.event = torch.cuda.Event(blocking=True)

    @override
    def wait(self) -> None:
        self.event.synchronize()

    @override
    def reached(self) -> bool:
        return bool(self.event.query())


class Stream:
    """A stream of a CPU: what is put on it is done at once."""

    stream: torch.cuda.Stream  # of a GPU

    def place(self, mark: Mark) -> None:
        """Place ``mark`` at the current end of the stream."""

    def wait_for(self, mark: Mark) -> None:
        """Work put on the stream from now on runs after ``mark``."""

    def running(self, *, after: Mark, done: Mark) -> AbstractContextManager[None]:
        """Run the body on the stream once ``after`` is reached, then place ``done``."""
        return nullcontext()


class _CudaStream(Stream):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    @override
    def place(self, mark: Mark) -> None:
        mark.event.record(self.stream)

    @override
    def wait_for(self, mark: Mark) -> None:
        self.stream.wait_event(mark.event)

    @override
    @contextmanager
    def running(self, *, after: Mark, done: Mark) -> Iterator[None]:
        with torch.cuda.stream(self.stream):
            self.wait_for(after)
            yield
            self.place(done)


class Streams:
    """The streams of a CPU, where device and host memory are the same. Every transfer is done at once."""

    def __init__(self) -> None:
        self.compute = self.h2d = self.d2h = self.gather = self.reduce = Stream()

    def mark(self) -> Mark:
        """A new mark. It may be placed again and again."""
        return Mark()

    def upload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        """Copy host ``source`` into device ``target`` once ``after`` is reached, then place ``done``."""
        self._copy(self.h2d, target, source, after, done)

    def offload(self, target: Tensor, source: Tensor, *, after: Mark, done: Mark) -> None:
        """Copy device ``source`` into host ``target`` once ``after`` is reached, then place ``done``."""
        self._copy(self.d2h, target, source, after, done)

    def _copy(self, stream: Stream, target: Tensor, source: Tensor, after: Mark, done: Mark) -> None:
        with stream.running(after=after, done=done):
            target.copy_(source, non_blocking=True)

    def record_streams(self, memory: Tensor) -> Tensor:
        """Record all streams for ``memory``: when it is freed, nothing gets it before their work is done."""
        return memory

    def computing(self) -> AbstractContextManager[Any]:
        """Run the body on the compute stream, on whatever thread it is called."""
        return nullcontext()

    def refuse_another(self) -> None:
        """MisuseError if the current stream is not the compute stream, as its kernels would not wait for copies."""

    def adam_staging(self, size_bytes: int) -> AdamStaging:
        """Device memory through which the device updates states in host memory."""
        return AdamStaging(torch.device("cpu"), size_bytes=size_bytes)

    def streaming(self, done: Mark) -> AbstractContextManager[None]:
        """Run the body on the stream for updates of states in host memory, and place ``done`` at the end of it."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block until every stream is empty."""


class CudaStreams(Streams):
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = _CudaStream(torch.cuda.current_stream(device))
        self.h2d, self.d2h, self.gather, self.reduce = (_CudaStream(torch.cuda.Stream(device)) for _ in range(4))
        self.streamed, self.streamed_h2d, self.streamed_d2h = (torch.cuda.Stream(device) for _ in range(3))

    @override
    def mark(self) -> Mark:
        return _CudaMark()

    @override
    def record_streams(self, memory: Tensor) -> Tensor:
        of_steps = self.h2d.stream, self.d2h.stream, self.gather.stream, self.reduce.stream
        for stream in (*of_steps, self.streamed, self.streamed_h2d, self.streamed_d2h):
            memory.record_stream(stream)
        return memory

    @override
    def computing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.compute.stream)

    @override
    def refuse_another(self) -> None:
        if torch.cuda.current_stream(self.device) != self.compute.stream:
            raise MisuseError(
                "the current CUDA stream is not the one that was current in protrain.wrap: run forward, backward and "
                "step() outside `with torch.cuda.stream(...)`, or wrap inside"
            )

    @override
    def adam_staging(self, size_bytes: int) -> AdamStaging:
        staging = AdamStaging(self.device, size_bytes=size_bytes, upload=self.streamed_h2d, download=self.streamed_d2h)
        self.record_streams(staging.memory)
        return staging

    @override
    @contextmanager
    def streaming(self, done: Mark) -> Iterator[None]:
        with torch.cuda.stream(self.streamed):
            yield
            self.streamed.wait_stream(self.streamed_d2h)
            done.event.record(self.streamed)

    @override
    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


def span(lane: int, name: str) -> AbstractContextManager[Any]:
    """A context that torch.profiler shows as ``name`` on a lane of the planner's timeline.

    A span of torch costs microseconds even where no profiler runs, so there is none then.
    """
    return profiler.record_function(f"{SPAN}{LANES[lane]}: {name}") if profiler._is_profiler_enabled else _NO_SPAN


def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
