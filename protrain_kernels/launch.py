"""Launches Triton kernels in little host time, and gives them the addresses of many tensors at once.

[Note: launching] ``kernel[grid](...)`` binds, specialises and looks up its arguments in Python on every call. What it
returns, the compiled kernel, launches without that, the same in Triton 3.6 to 3.9. So the first launch of a
specialisation goes through Triton, and later ones find its compiled kernel by a key of everything that Triton
specialises on: types, constants, 16-byte alignment, whether an integer is 1, a multiple of 16 or wide, and, for AMD,
whether 31 bits address all of a tensor's storage. What ``compiled[grid](...)`` does besides is for profilers that have
set a hook: without one the launch is its ``run`` alone.

[Note: addresses] A kernel over many tensors reads their addresses from pinned host memory, which costs no copy and no
allocation. A call takes the next slots of a ring; a quarter of the ring is reused only after an event that followed the
launches that read it. A ring belongs to one stream, so one event covers a quarter, and the ring is longer than the
queue of launches that a device accepts: in the steady state the event is long past and nothing waits.

[Note: host time] Most of a launch's host time is reading facts of tensors, some 50 ns each, so each is read once, by
``map`` over a method of the class where there are many: that is a fifth faster than a comprehension.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from triton import knobs

SLOT = 16  # addresses: a slot's index is always a multiple of 16, so that Triton specialises on it once
_SEGMENTS = 4
_SEGMENT_ADDRESSES = 8192
_TELLS_SIZE = torch.version.hip is not None
_NARROW_BYTES = (1 << 31) - 1
_dtype_of = attrgetter("dtype")

_compiled: dict[tuple[Any, ...], Compiled] = {}
_rings: dict[tuple[int, int], AddressRing] = {}
_compiling = threading.Lock()  # threads may launch at once, and Triton's caches expect one


class Compiled(NamedTuple):
    """A compiled kernel and what its ``run`` is called with, looked up once."""

    kernel: Any
    run: Any
    function: Any
    metadata: Any


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as the int16 bits that the Triton kernels take, anything else as it is.

    The kernels treat bf16 as integers throughout: Triton's interpreter truncates casts to it and misreads subnormals.
    """
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[torch.Tensor],
    integer: int,
    floats: Sequence[float],
    constants: tuple[Any, ...],
    options: dict[str, Any],
    *,
    device_index: int,
    on_host: Sequence[int] = (),
) -> None:
    """Run ``programs`` programs of a Triton kernel on the current stream of a device.

    Args:
        kernel: a ``triton.jit`` function, always launched with the same ``options``. Its parameters are pointers, one
            integer, floats and constexpr ones, in this order.
        programs: at least 1.
        tensors: what the pointers point to, on the device or in pinned host memory.
        integer: see kernel.
        floats: see kernel.
        constants: its constexpr parameters.
        options: what Triton takes besides (warps, contraction).
        device_index: of the GPU; -1 for the interpreter, on the CPU.
        on_host: indices of tensors in host memory, whose address may differ on the device: the launcher looks it up.
    """
    if device_index >= 0 and device_index != torch._C._cuda_getDevice():  # Triton launches on the current device
        with torch.cuda.device(device_index):
            launch(
                kernel,
                programs,
                tensors,
                integer,
                floats,
                constants,
                options,
                device_index=device_index,
                on_host=on_host,
            )
        return
    pointers: list[Any] = [*map(torch.Tensor.data_ptr, tensors)]
    key = (
        id(kernel),
        device_index,
        constants,
        *map(_dtype_of, tensors),
        *[address & 15 == 0 for address in pointers],
        integer == 1,
        integer & 15 == 0,
        integer >= 1 << 31,
    )
    if _TELLS_SIZE:
        key += tuple([tensor.untyped_storage().nbytes() <= _NARROW_BYTES for tensor in tensors])
    compiled = _compiled.get(key)
    if compiled is None:
        typed = [as_bits(tensor) for tensor in tensors]
        with _compiling:
            made = kernel[(programs,)](*typed, integer, *floats, *constants, **options)
        if made is not None:  # by the interpreter
            _compiled[key] = Compiled(made, made.run, made.function, made.packed_metadata)
        return
    for index in on_host:
        pointers[index] = tensors[index]
    runtime = knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        compiled.kernel[(programs, 1, 1)](*pointers, integer, *floats, *constants)
        return
    stream = raw_stream(device_index)
    _, run, function, metadata = compiled
    run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, integer, *floats, *constants)


def raw_stream(device_index: int) -> int:
    """The handle of a GPU's current stream; 0 on the CPU. torch's object for it costs twenty times as much."""
    return int(torch._C._cuda_getCurrentRawStream(device_index)) if device_index >= 0 else 0


class AddressRing:
    """Host memory that kernels on one stream read addresses from. See [Note: addresses]."""

    def __init__(self, device: torch.device, segment_addresses: int) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.segment_addresses = segment_addresses
        self.memory = torch.zeros(_SEGMENTS * segment_addresses, dtype=torch.int64, pin_memory=self.on_device)
        # Its cells as a Python array: writing them through torch would cost more than the launch.
        self._cells = (ctypes.c_int64 * self.memory.numel()).from_address(self.memory.data_ptr())
        self._events: list[Any] = [torch.cuda.Event() if self.on_device else None for _ in range(_SEGMENTS)]
        self._segment = 0
        self._next = 0  # within the segment
        self._lock = threading.Lock()

    def put(self, addresses: list[int]) -> int:
        """Write ``addresses`` where no launch still reads. Returns the index of the first within ``memory``."""
        room = -(-len(addresses) // SLOT) * SLOT
        assert room <= self.segment_addresses
        with self._lock:
            if self._next + room > self.segment_addresses:
                self._enter_next_segment()
            start = self._segment * self.segment_addresses + self._next
            self._next += room
            self._cells[start : start + len(addresses)] = [*addresses]
        return start

    def _enter_next_segment(self) -> None:
        following = (self._segment + 1) % _SEGMENTS
        if self.on_device:
            # Of the ring's device, which need not be the current one.
            self._events[self._segment].record(torch.cuda.current_stream(self.device))
            self._events[following].synchronize()  # at once when it was never recorded
        self._segment, self._next = following, 0


def put_addresses(device_index: int, addresses: list[int]) -> tuple[torch.Tensor, int]:
    """(host memory, index) where a kernel launched next on the current stream of a GPU finds ``addresses``.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would read addresses that are long overwritten.
    """
    if device_index >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a kernel over a list of tensors can't be captured in a CUDA graph: launch it outside")
    place = device_index, raw_stream(device_index)
    ring = _rings.get(place)
    if ring is None or ring.segment_addresses < len(addresses):
        wanted = max(_SEGMENT_ADDRESSES, -(-len(addresses) // SLOT) * SLOT)
        device = torch.device("cuda", device_index) if device_index >= 0 else torch.device("cpu")
        if ring is not None and ring.on_device:
            torch.cuda.current_stream(device).synchronize()  # the smaller ring may go once nothing reads it
        ring = _rings[place] = AddressRing(device, wanted)
    return ring.memory, ring.put(addresses)
