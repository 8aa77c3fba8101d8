"""Launches Triton kernels in little host time, and gives them the addresses of many tensors at once.

[Note: launching] ``kernel[grid](...)`` binds, specialises and looks up its arguments in Python on every call. What it
returns, the compiled kernel, launches without that: ``compiled[grid](...)``, the same in Triton 3.6 to 3.9. So the
first launch of a specialisation goes through Triton, and later ones find its compiled kernel by a key of everything
that Triton specialises on: types, constants, 16-byte alignment, whether an integer is 1, a multiple of 16 or wide, and,
for AMD, whether 31 bits address all of a tensor's storage.

[Note: addresses] A kernel over many tensors reads their addresses from pinned host memory, which costs no copy and no
allocation. A call takes the next slots of a ring; a quarter of the ring is reused only after an event that followed the
launches that read it. A ring belongs to one stream, so one event covers a quarter, and the ring is longer than the
queue of launches that a device accepts: in the steady state the event is long past and nothing waits.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch

from protrain_kernels.checks import current_device

SLOT = 16  # addresses: a slot's index is always a multiple of 16, so that Triton specialises on it once
_SEGMENTS = 4
_SEGMENT_ADDRESSES = 8192
_TELLS_SIZE = torch.version.hip is not None
_NARROW_BYTES = (1 << 31) - 1

_compiled: dict[tuple[Any, ...], Any] = {}
_rings: dict[tuple[int, int], AddressRing] = {}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A bf16 tensor as the int16 bits that the Triton kernels take, anything else as it is.

    The kernels treat bf16 as integers throughout: Triton's interpreter truncates casts to it and misreads subnormals.
    """
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[torch.Tensor | int | float],
    constants: Sequence[Any],
    options: dict[str, Any],
    *,
    device: torch.device | None = None,
) -> None:
    """Run ``programs`` programs of a Triton kernel on the current stream of a device.

    Args:
        kernel: a ``triton.jit`` function, always launched with the same ``options``.
        programs: at least 1.
        arguments: its arguments in order: tensors on one GPU or in pinned host memory, integers and floats.
        constants: its constexpr parameters, which come last.
        options: what Triton takes besides (warps, contraction).
        device: that of the first argument when None.
    """
    if device is None:
        first = arguments[0]
        assert isinstance(first, torch.Tensor)
        device = first.device
    with current_device(device):
        key: list[Any] = [id(kernel), device.index, *constants]
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                key += (argument.dtype, address % 16 == 0)
                if _TELLS_SIZE:
                    key.append(argument.untyped_storage().nbytes() <= _NARROW_BYTES)
                # A device address needs no look-up by the launcher; that of host memory may differ on the device.
                values.append(address if argument.is_cuda else argument)
            else:
                if isinstance(argument, int):
                    key += (argument == 1, argument % 16 == 0, argument >= 1 << 31)
                values.append(argument)
        compiled = _compiled.get(tuple(key))
        if compiled is not None:
            compiled[(programs, 1, 1)](*values, *constants)
            return
        typed = [as_bits(argument) if isinstance(argument, torch.Tensor) else argument for argument in arguments]
        compiled = kernel[(programs,)](*typed, *constants, **options)
        if hasattr(compiled, "__getitem__"):  # the interpreter returns nothing
            _compiled[tuple(key)] = compiled


class AddressRing:
    """Host memory that kernels on one stream read addresses from. See [Note: addresses]."""

    def __init__(self, device: torch.device, segment_addresses: int) -> None:
        self.on_device = device.type == "cuda"
        self.segment_addresses = segment_addresses
        self.memory = torch.zeros(_SEGMENTS * segment_addresses, dtype=torch.int64, pin_memory=self.on_device)
        # Its cells as a Python array: writing them through torch would cost more than the launch.
        self._cells = (ctypes.c_int64 * self.memory.numel()).from_address(self.memory.data_ptr())
        self._events: list[Any] = [torch.cuda.Event() if self.on_device else None for _ in range(_SEGMENTS)]
        self._segment = 0
        self._next = 0  # within the segment
        self._lock = threading.Lock()

    def put(self, addresses: Sequence[int]) -> int:
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
            self._events[self._segment].record()
            self._events[following].synchronize()  # at once when it was never recorded
        self._segment, self._next = following, 0


def put_addresses(device: torch.device, addresses: list[int]) -> tuple[torch.Tensor, int]:
    """(host memory, index) where a kernel launched next on the current stream of ``device`` finds ``addresses``.

    Raises:
        RuntimeError: a CUDA graph is being captured; its replays would read addresses that are long overwritten.
    """
    index, stream = -1, 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a kernel over a list of tensors can't be captured in a CUDA graph: launch it outside")
        current = torch.cuda.current_stream(device)
        index, stream = current.device_index, current.cuda_stream
    ring = _rings.get((index, stream))
    if ring is None or ring.segment_addresses < len(addresses):
        wanted = max(_SEGMENT_ADDRESSES, -(-len(addresses) // SLOT) * SLOT)
        if ring is not None and ring.on_device:
            torch.cuda.current_stream(device).synchronize()  # the smaller ring may go once nothing reads it
        ring = _rings[index, stream] = AddressRing(device, wanted)
    return ring.memory, ring.put(addresses)
