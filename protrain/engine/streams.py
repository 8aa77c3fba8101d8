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

Host code that must know when a transfer is done waits for the event that came with it.
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


class Event:
    """The interface of ``torch.cuda.Event`` that the engine uses. On a CPU all work before an event is done already."""

    def synchronize(self) -> None:
        """Block the calling host thread until the point is reached."""

    def query(self) -> bool:
        """Whether the point is reached."""
        return True


class Stream:
    """The interface of ``torch.cuda.Stream`` that the engine uses. On a CPU a stream does its work at once."""

    def record_event(self, event: Event) -> None:
        """Let ``event`` stand for the current end of the stream. An event may be recorded again and again."""

    def wait_event(self, event: Event) -> None:
        """Work put on the stream from now on runs after ``event``."""


class Streams:
    """The streams of a CPU, where device and host memory are the same. Every transfer is done at once."""

    def __init__(self) -> None:
        self.compute = self.h2d = self.d2h = self.gather = self.reduce = Stream()

    def event(self) -> Event:
        """A new event, which is not recorded."""
        return Event()

    def running(self, stream: Stream, *, after: Event, done: Event) -> AbstractContextManager[None]:
        """Run the body on ``stream`` once ``after`` is reached, then record ``done``."""
        return nullcontext()

    def upload(self, target: Tensor, source: Tensor, *, after: Event, done: Event) -> None:
        """Copy host ``source`` into device ``target`` once ``after`` is reached, then record ``done``."""
        self._copy(self.h2d, target, source, after, done)

    def offload(self, target: Tensor, source: Tensor, *, after: Event, done: Event) -> None:
        """Copy device ``source`` into host ``target`` once ``after`` is reached, then record ``done``."""
        self._copy(self.d2h, target, source, after, done)

    def _copy(self, stream: Stream, target: Tensor, source: Tensor, after: Event, done: Event) -> None:
        with self.running(stream, after=after, done=done):
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

    def streaming(self, done: Event) -> AbstractContextManager[None]:
        """Run the body on the stream for updates of states in host memory, and record ``done`` at the end of it."""
        return nullcontext()

    def synchronize(self) -> None:
        """Block until every stream is empty."""


class CudaStreams(Streams):
    """The streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute: Any = torch.cuda.current_stream(device)
        self._others: list[Any] = [torch.cuda.Stream(device) for _ in range(7)]
        self.h2d, self.d2h, self.gather, self.reduce, self.streamed, self.streamed_h2d, self.streamed_d2h = self._others

    @override
    def event(self) -> Any:
        # With a blocking event the waiting thread sleeps, and leaves its core to the host optimizer.
        return torch.cuda.Event(blocking=True)

    @override
    @contextmanager
    def running(self, stream: Any, *, after: Event, done: Event) -> Iterator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            yield
            stream.record_event(done)

    @override
    def record_streams(self, memory: Tensor) -> Tensor:
        for stream in self._others:
            memory.record_stream(stream)
        return memory

    @override
    def computing(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.compute)

    @override
    def refuse_another(self) -> None:
        if torch.cuda.current_stream(self.device) != self.compute:
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
    def streaming(self, done: Any) -> Iterator[None]:
        with torch.cuda.stream(self.streamed):
            yield
            self.streamed.wait_stream(self.streamed_d2h)
            self.streamed.record_event(done)

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
