"""Launches Triton kernels in little host time, and gives them the addresses of many tensors at once.

[Note: launching] ``kernel[grid](...)`` binds its arguments, specialises on them and looks up the result in Python on
every call. It returns the compiled kernel, whose ``run`` launches without that work, in the same way in Triton 3.6 to
3.9. So the first launch of a specialisation goes through Triton. Later launches find the compiled kernel by a key of
everything that Triton specialises on: types, constants, 16-byte alignment, whether an integer is 1, a multiple of 16 or
wider than 31 bits, and, on AMD, whether 31 bits address all of a tensor's storage.

[Note: addresses] A kernel over many tensors reads their addresses from pinned host memory, which costs no copy and no
allocation. Each call takes the next slots of a ring. A quarter of the ring is reused only after an event that was
recorded behind the launches that read it. A ring belongs to one stream, so one event covers a quarter. The ring is
longer than the queue of launches that a device accepts, so in the steady state the event is long past and nothing
waits.

[Note: host time] Most of the host time of a launch goes into reading attributes of tensors, at about 50 ns each. So
each is read once, and where there are many tensors by ``map`` over a method of the class, which is a fifth faster than
a comprehension.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

SLOT = 16  # addresses; the index of a slot is a multiple of 16, so that Triton specialises on it only once
_SEGMENTS = 4
_SEGMENT_ADDRESSES = 8192
_TELLS_SIZE = torch.version.hip is not None
_NARROW_BYTES = (1 << 31) - 1
_dtype_of = attrgetter("dtype")

_compiled: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}  # the launch function and its two constant arguments
_rings: dict[tuple[int, int], AddressRing] = {}
_compiling = threading.Lock()  # several threads may launch at the same time, and Triton's caches expect one


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as the int16 bits that the Triton kernels take, and any other tensor unchanged.

    The kernels treat bf16 as integers, because Triton's interpreter truncates casts to bf16 and misreads subnormals.
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
        kernel: a ``triton.jit`` function that is always launched with the same ``options``. Its parameters are
            pointers, one integer, floats and constexpr parameters, in this order.
        programs: how many; with 0 nothing is launched.
        tensors: what the pointers point to, on the device or in pinned host memory.
        integer: the integer argument.
        floats: the float arguments.
        constants: the constexpr arguments.
        options: further options of Triton (warps, contraction).
        device_index: the index of the GPU, or -1 for the interpreter on the CPU.
        on_host: indices of the tensors in host memory. Their address may differ on the device, and Triton's launcher
            looks it up.
    """
    if not programs:
        return
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
        if made is not None:  # the interpreter makes nothing
            _compiled[key] = made.run, made.function, made.packed_metadata
        return
    for index in on_host:
        pointers[index] = tensors[index]
    stream = raw_stream(device_index)
    run, function, metadata = compiled
    run(programs, 1, 1, stream, function, metadata, None, None, None, *pointers, integer, *floats, *constants)


def raw_stream(device_index: int) -> int:
    """The handle of a GPU's current stream, or 0 on the CPU. Making a torch stream costs twenty times as much."""
    return int(torch._C._cuda_getCurrentRawStream(device_index)) if device_index >= 0 else 0


class AddressRing:
    """Host memory from which the kernels on one stream read addresses. See [Note: addresses]."""

    def __init__(self, device: torch.device, segment_addresses: int) -> None:
        self.device = device
        self.api: Any = torch.get_device_module(device)  # streams and events, which do nothing on the CPU
        self.segment_addresses = segment_addresses
        self.memory = torch.zeros(_SEGMENTS * segment_addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
        # The same cells as a Python array, because writing them through torch would cost more than the launch.
        self._cells = (ctypes.c_int64 * self.memory.numel()).from_address(self.memory.data_ptr())
        self._events: list[Any] = [self.api.Event() for _ in range(_SEGMENTS)]
        self._segment = 0
        self._next = 0  # the next free address within the segment
        self._lock = threading.Lock()

    def put(self, addresses: list[int]) -> int:
        """Write ``addresses`` where no launch reads any more. Returns the index of the first within ``memory``."""
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
        # The device of the ring need not be the current device.
        self._events[self._segment].record(self.api.current_stream(self.device))
        self._events[following].synchronize()  # returns at once for an event that was never recorded
        self._segment, self._next = following, 0


def put_addresses(device_index: int, addresses: list[int]) -> tuple[torch.Tensor, int]:
    """Host memory and the index in it where the next kernel on a GPU's current stream finds ``addresses``.

    Raises:
        RuntimeError: a CUDA graph is being captured, whose replays would read addresses that are long overwritten.
    """
    if device_index >= 0 and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a kernel over a list of tensors can't be captured in a CUDA graph: launch it outside")
    place = device_index, raw_stream(device_index)
    ring = _rings.get(place)
    if ring is None or ring.segment_addresses < len(addresses):
        wanted = max(_SEGMENT_ADDRESSES, -(-len(addresses) // SLOT) * SLOT)
        device = torch.device("cuda", device_index) if device_index >= 0 else torch.device("cpu")
        if ring is not None:
            ring.api.synchronize(device)  # the smaller ring goes once nothing reads it
        ring = _rings[place] = AddressRing(device, wanted)
    return ring.memory, ring.put(addresses)
