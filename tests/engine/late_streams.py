"""A GPU's freedom to be late, on the CPU and deterministic: copies and host updates at the worst moment allowed.

On a GPU a copy may run at any time between its issue and the point where somebody waits for it, and tests on real
hardware meet the harmful moments by luck alone. ``LateStreams`` takes both extremes at once. From its issue on, a
copy's target holds garbage, as it could be half written; its source is read only when somebody has waited, and must be
unchanged by then. Two kinds of waiting are told apart: what the compute stream has waited for is true of device memory
(the host may still be ahead of it), what a host thread has waited for is true of all memory. Device memory that is
freed while neither knows of the copy's end is an error, as the allocator could have given it away.

Work of the compute stream itself runs at once. That it may run later than its issue shows in what the host knows, and
in ``Watch``: a copy must come after the last operation that used its device memory.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from protrain.common.trees import tensors_in
from protrain.engine.streams import Event, Stream, Streams

_UPLOAD, _OFFLOAD = 0, 1
_NAMES = ("upload", "offload")
_GARBAGE = b"\xff"  # NaN in every floating-point type
Clock = tuple[int, int]  # how many uploads and offloads are over


def _joined(one: Clock, other: Clock) -> Clock:
    return max(one[0], other[0]), max(one[1], other[1])


class _LateEvent(Event):
    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams
        self.clock: Clock = (0, 0)  # of an event that was never recorded: nobody waits
        self.operations = 0  # of the compute stream before it

    @override
    def synchronize(self) -> None:
        self.streams.host_waits(self.clock)

    @override
    def query(self) -> bool:
        if self.streams.choice is None or self.streams.choice.random() < 0.5:
            return False  # not before somebody waits
        self.streams.host_waits(self.clock)  # the host that sees it may rely on it
        return True


class _Memory:
    """A tensor's memory, without keeping it alive unless told to. It is read and written as it is, without tensors."""

    def __init__(self, tensor: Tensor, *, keep: bool) -> None:
        assert tensor.is_contiguous()
        storage = tensor.untyped_storage()
        self._weak: Any = StorageWeakRef(storage)
        self._kept = storage if keep else None
        self.start = tensor.data_ptr()
        self.size = tensor.nbytes
        self.stop = self.start + self.size

    @property
    def alive(self) -> bool:
        return not self._weak.expired()

    def read(self) -> bytes:
        assert self.alive
        return ctypes.string_at(self.start, self.size)

    def write(self, bits: bytes) -> None:
        assert self.alive
        assert len(bits) == self.size
        ctypes.memmove(self.start, bits, self.size)

    def overlaps(self, other: _Memory) -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(eq=False)
class _Copy:
    direction: int
    clock: Clock  # of its end: itself and all that comes before it
    source: _Memory
    target: _Memory
    before: bytes | None = None  # of the source when the copy could first have begun
    left: bytes | None = None  # that the target must still have when the copy ends
    taken: bytes | None = None  # what an offload has read; the host does not see it yet
    done: bool = False
    device_knows: bool = False  # the compute stream or the host has waited for it

    @property
    def device_memory(self) -> _Memory:
        return self.target if self.direction == _UPLOAD else self.source

    def within(self, clock: Clock) -> bool:
        return self.clock[self.direction] <= clock[self.direction]

    def __str__(self) -> str:
        name, number = _NAMES[self.direction], self.clock[self.direction]
        return f"{name} {number} of {self.source.size} bytes"


class _LateCompute(Stream):
    def __init__(self, streams: LateStreams) -> None:
        self.streams = streams

    @override
    def record_event(self, event: Event) -> None:
        self.streams.record_in_computing(_late(event))

    @override
    def wait_event(self, event: Event) -> None:
        self.streams.computing_waits(_late(event).clock)


class _LateCopies(Stream):
    def __init__(self) -> None:
        self.clock: Clock = (0, 0)  # the end of the stream
        self.reached = 0  # operations of the compute stream that it has waited for

    @override
    def record_event(self, event: Event) -> None:
        _late(event).clock, _late(event).operations = self.clock, self.reached

    @override
    def wait_event(self, event: Event) -> None:
        self.clock = _joined(self.clock, _late(event).clock)
        self.reached = max(self.reached, _late(event).operations)


class LateStreams(Streams):
    """Copies in the order that the engine asked for, and no earlier or later than it can rely on."""

    def __init__(self, choice: random.Random | None = None) -> None:
        self.choice = choice  # some copies run before anybody waits
        self.between: Callable[[], None] = lambda: None  # called wherever the host's other thread could come in
        self.faults: list[str] = []  # those raised in finalizers would go unseen
        self.issued: list[int] = [0, 0]
        self.compute = self.reduce = _LateCompute(self)  # both run at once, in the order of their calls
        self.copies = (_LateCopies(), _LateCopies())
        self.h2d, self.d2h = self.copies
        self._compute: Clock = (0, 0)
        self._pending: list[_Copy] = []  # in the order of issue, which is one that the events allow
        self._lasting: dict[int, torch.UntypedStorage] = {}
        self._operations = 0  # of the compute stream so far
        self._used: dict[int, int] = {}  # by the address of a storage: the last of them that used it

    def used(self, tensor: Tensor) -> None:
        """An operation of the compute stream reads or writes ``tensor``."""
        self._operations += 1
        self._used[tensor.untyped_storage().data_ptr()] = self._operations

    @override
    def event(self) -> Event:
        return _LateEvent(self)

    def record_in_computing(self, event: _LateEvent) -> None:
        """Record ``event`` at the end of the compute stream."""
        self._between()
        event.clock, event.operations = self._compute, self._operations

    def computing_waits(self, clock: Clock) -> None:
        """The compute stream waits for what ``clock`` counts."""
        self._between()
        self._compute = _joined(self._compute, clock)
        for copy in self._pending:
            if copy.within(self._compute) and not copy.device_knows:
                if copy.direction == _UPLOAD:
                    self._run(copy)
                else:
                    self._take(copy)
                copy.device_knows = True

    @override
    @contextmanager
    def running(self, stream: Stream, *, after: Event, done: Event) -> Iterator[None]:
        stream.wait_event(after)
        yield
        stream.record_event(done)

    @override
    def upload(self, target: Tensor, source: Tensor, *, after: Event, done: Event) -> None:
        self._issue(_UPLOAD, target, source, after, done)

    @override
    def offload(self, target: Tensor, source: Tensor, *, after: Event, done: Event) -> None:
        self._issue(_OFFLOAD, target, source, after, done)

    @override
    def record_streams(self, memory: Tensor) -> Tensor:
        self._lasting[memory.untyped_storage().data_ptr()] = memory.untyped_storage()
        return memory

    @override
    def synchronize(self) -> None:
        self.host_waits(_joined(self._compute, _joined(*(stream.clock for stream in self.copies))))

    def host_waits(self, clock: Clock) -> None:
        """A host thread has waited for what ``clock`` counts."""
        self._between()
        for copy in self._pending:
            if copy.within(clock):
                self._run(copy)
                copy.device_knows = True
                if copy.direction == _UPLOAD:
                    self._compare(copy.before, copy.source, f"host memory was rewritten while {copy} could read it")
        self._pending = [copy for copy in self._pending if not copy.within(clock)]

    def _issue(self, direction: int, target: Tensor, source: Tensor, after: Event, done: Event) -> None:
        self._between()
        device = source if direction == _OFFLOAD else target
        lasts = device.untyped_storage().data_ptr() in self._lasting
        stream = self.copies[direction]
        stream.wait_event(after)
        clock, reached = stream.clock, stream.reached
        self.issued[direction] += 1
        number = self.issued[direction]
        copy = _Copy(
            direction,
            (number, clock[1]) if direction == _UPLOAD else (clock[0], number),
            # The host's memory lives until everything is over: it is unpinned only then.
            _Memory(source, keep=lasts or direction == _UPLOAD),
            _Memory(target, keep=lasts or direction == _OFFLOAD),
        )
        stream.clock = _late(done).clock = copy.clock
        _late(done).operations = reached
        if self._used.get(device.untyped_storage().data_ptr(), 0) > reached:
            self._fail(f"{copy} does not wait for the last operation that used its device memory")
        self._begin(copy)
        self._pending.append(copy)

    def _begin(self, copy: _Copy) -> None:
        """From its issue on a copy could run, unless another is to bring what it reads or to use what it writes."""
        read, write = True, True
        for other in self._pending:
            brings, uses = other.target.overlaps(copy.source), other.source.overlaps(copy.target)
            same = other.target.overlaps(copy.target)
            if brings or uses or same:
                if not other.within(copy.clock):
                    self._fail(f"{copy} does not wait for {other}, which uses the same memory")
                if other.direction == _UPLOAD and other.done and uses:
                    self._compare(other.before, other.source, f"host memory was rewritten while {other} could read it")
                    other.before = None
                read = read and (other.done or not brings)
                write = write and (other.done or not same) and (other.done or not uses or other.taken is not None)
        if read:
            copy.before = copy.source.read()
        if write:
            copy.left = _GARBAGE * copy.target.size
            copy.target.write(copy.left)

    def _between(self) -> None:
        for copy in self._pending:
            self._check_alive(copy)
        if self.choice is not None:
            unfinished = [copy for copy in self._pending if not copy.done]
            for copy in unfinished[: self.choice.randint(-2, len(unfinished))]:
                self._run(copy)
        self.between()

    def _take(self, copy: _Copy) -> None:
        """Let an offload read; what it brings arrives on the host when the host has waited."""
        if copy.taken is None and not copy.done:
            self._check_alive(copy)
            self._compare(copy.before, copy.source, f"device memory was rewritten while {copy} could read it")
            copy.taken = copy.source.read()

    def _run(self, copy: _Copy) -> None:
        if copy.done:
            return
        for other in self._pending:
            if other is copy:
                break
            if other.within(copy.clock):
                needed = other.target.overlaps(copy.source) or other.target.overlaps(copy.target)
                if other.direction == _UPLOAD or needed:
                    self._run(other)
                else:
                    self._take(other)
        if copy.direction == _OFFLOAD:
            self._take(copy)
            brought = copy.taken
        else:
            self._check_alive(copy)
            self._compare(copy.before, copy.source, f"host memory was rewritten while {copy} could read it")
            brought = copy.before = copy.source.read()
        assert brought is not None
        self._compare(copy.left, copy.target, f"the target of {copy} was written by something else meanwhile")
        copy.target.write(brought)
        copy.left, copy.taken, copy.done = None, None, True

    def _check_alive(self, copy: _Copy) -> None:
        if not copy.device_knows and not copy.device_memory.alive:
            self._fail(f"device memory was freed before {copy} was over: it could have been given away")

    def _compare(self, expected: bytes | None, memory: _Memory, fault: str) -> None:
        if expected is not None and expected != memory.read():
            self._fail(fault)

    def _fail(self, fault: str) -> None:
        self.faults.append(fault)
        raise AssertionError(fault)


def _late(event: Event) -> _LateEvent:
    assert isinstance(event, _LateEvent)
    return event


class Watch(TorchDispatchMode):
    """Tells each of ``streams`` which memory the operations inside use. Streams may be added meanwhile."""

    def __init__(self, streams: list[LateStreams]) -> None:
        super().__init__()
        self.streams = streams

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for tensor in tensors_in((args, kwargs)):
                for streams in self.streams:
                    streams.used(tensor)
        return func(*args, **(kwargs or {}))
