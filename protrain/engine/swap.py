"""SWAP: a block's saved activations go to host memory after its forward and come back before its backward.

After forward each distinct storage is copied to the host arena; the device memory is given up when the next swapped
block is done, by when the copies are. In backward the block before the current one in forward order is fetched ahead.
Inputs of the block stay on the device: its neighbours hold them anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from protrain.engine.arena import Arena
from protrain.engine.saved import Frame, storage_address, tensors_in
from protrain.engine.streams import Mark, Streams
from protrain.errors import BudgetError
from protrain.quantities import format_bytes

if TYPE_CHECKING:
    from protrain.engine.engine import Engine
    from protrain.engine.units import Unit

ALIGNMENT_BYTES = 256  # of every storage, on either side
_SMALLEST_BYTES = 512  # smaller storages (random seeds, scalars) are not worth a copy: the allocator's grain


def aligned(count: int) -> int:
    """``count`` bytes rounded up to the alignment of swapped storages."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class _Storage:
    """One distinct storage: on the device before the offload and after the fetch, on the host in between."""

    size_bytes: int
    device: Tensor | None  # 1-d uint8
    host: Tensor | None = None
    users: int = 0  # saved tensors that are views of it
    waiting: int = 0  # of those, not yet rebuilt in this backward


@dataclass(frozen=True, slots=True)
class _SwappedView:
    storage: _Storage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostSlots:
    """Host memory for swapped blocks: regions that frames take and give back, all of them within ``limit_bytes``."""

    def __init__(self, arena: Arena, streams: Streams, *, limit_bytes: int) -> None:
        self.arena = arena
        self.streams = streams
        self.limit_bytes = limit_bytes  # of the whole arena
        self._free: list[tuple[Tensor, Mark]] = []

    def take(self, size_bytes: int) -> tuple[Tensor, Mark]:
        """The smallest free region that fits, and the mark after which it may be written.

        Raises:
            BudgetError: more forwards wait for their backward than the plan was made for.
        """
        fitting = [(region.numel(), at) for at, (region, _) in enumerate(self._free) if region.numel() >= size_bytes]
        if fitting:
            return self._free.pop(min(fitting)[1])  # in place: the collector may give back another one at any time
        if size_bytes > self.arena.free_bytes and self.arena.total_bytes + size_bytes > self.limit_bytes:
            raise BudgetError(
                f"no host memory to swap another {format_bytes(size_bytes)} of activations to: "
                f"{format_bytes(self.arena.total_bytes)} of host_memory={format_bytes(self.limit_bytes)} are taken; "
                "call backward() before the next forward, or allow more host_memory"
            )
        return self.arena.take(size_bytes, torch.uint8), self.streams.mark()

    def give_back(self, region: Tensor, read: Mark) -> None:
        """Make ``region`` free once ``read`` is reached, for a frame that ends now.

        What it has fetched and not used, as its backward failed or went elsewhere, is freed with it: whatever gets that
        memory next must not be overwritten by the fetch.
        """
        self.streams.compute_waits(read)
        self._free.append((region, read))


class SwapFrame(Frame):
    """Moves what is saved to host memory and back (SWAP)."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.storages: dict[int, _Storage] = {}
        self.on_host = False
        self.fetched = False
        self.offload_done = engine.streams.mark()
        self.fetch_done = engine.streams.mark()

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._kept = {storage_address(tensor) for tensor in tensors_in((args, kwargs))}
        self._kept |= {storage_address(buffer) for buffer in self.unit.module.buffers()}
        output = super().run(function, args, kwargs)
        if self.storages:
            self._offload()
            self.engine.swaps.entered(self)
        return output

    @override
    def pack(self, tensor: Tensor) -> Any:
        view = self.engine.weight_view(tensor)
        if view is not None:
            return view
        address = storage_address(tensor)
        size_bytes = tensor.untyped_storage().nbytes()
        if size_bytes < _SMALLEST_BYTES or address in self._kept or self.engine.is_state(address):
            return super().pack(tensor)
        storage = self.storages.get(address)
        if storage is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            storage = self.storages[address] = _Storage(size_bytes, flat)
        storage.users += 1
        return _SwappedView(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @override
    def rebuild(self, packed: Any) -> Tensor:
        if not isinstance(packed, _SwappedView):
            return super().rebuild(packed)
        storage = packed.storage
        if storage.device is None:
            self.fetched = False  # others may still be there: a backward before this one did not need them
            self.fetch()
        if self.on_host:
            self.engine.streams.compute_waits(self.fetch_done)
        assert storage.device is not None
        whole = storage.device[: storage.size_bytes // packed.dtype.itemsize * packed.dtype.itemsize]
        tensor = whole.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        storage.waiting -= 1
        if storage.waiting == 0 and self.on_host:
            storage.device = None  # autograd frees what it has used node by node; so does the frame
            self.fetched = any(other.device is not None for other in self.storages.values())
        return tensor

    def fetch(self) -> None:
        """Start to bring everything back to the device."""
        if self.fetched or not self.on_host:
            return
        self.fetched = True
        streams = self.engine.streams
        allocated = streams.mark()
        missing = [storage for storage in self.storages.values() if storage.device is None]
        for storage in self.storages.values():
            storage.waiting = storage.users
        for storage in missing:
            storage.device = torch.empty(aligned(storage.size_bytes), dtype=torch.uint8, device=self.engine.device)
            self.engine.ledger.hold(storage.device)
        streams.compute_reached(allocated)
        streams.upload_waits(self.offload_done)
        for storage in missing:
            assert storage.device is not None
            assert storage.host is not None
            streams.upload(storage.device[: storage.size_bytes], storage.host, after=allocated, done=self.fetch_done)

    def _offload(self) -> None:
        streams = self.engine.streams
        total = sum(aligned(storage.size_bytes) for storage in self.storages.values())
        region, free = self.engine.swaps.slots.take(total)
        weakref.finalize(self, self.engine.swaps.slots.give_back, region, self.fetch_done)
        computed = streams.mark()
        streams.compute_reached(computed)
        streams.offload_waits(free)
        start = 0
        for storage in self.storages.values():
            assert storage.device is not None
            storage.host = region[start : start + storage.size_bytes]
            start += aligned(storage.size_bytes)
            streams.offload(storage.host, storage.device, after=computed, done=self.offload_done)

    def give_up_device_memory(self) -> None:
        """Drop the device copies; what the compute stream does next waits for the offload."""
        self.engine.streams.compute_waits(self.offload_done)
        for storage in self.storages.values():
            storage.device = None
        self.on_host = True


class Swaps:
    """The swapped blocks of the step in forward order: which one's device memory is due, which one is fetched next."""

    def __init__(self, slots: HostSlots) -> None:
        self.slots = slots
        self._order: list[weakref.ref[SwapFrame]] = []
        self._unsettled: SwapFrame | None = None

    def entered(self, frame: SwapFrame) -> None:
        """A swapped block's forward has ended and its offload is under way."""
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(frame))
        self._unsettled = frame

    def settle(self) -> None:
        """Give up the device memory of the block whose offload is under way."""
        if self._unsettled is not None:
            self._unsettled.give_up_device_memory()
            self._unsettled = None

    def fetch_ahead(self, unit: Unit) -> None:
        """Fetch the activations of ``unit``, which backward reaches next, when it is a swapped block."""
        for ref in reversed(self._order):
            frame = ref()
            if frame is not None and frame.unit is unit:
                frame.fetch()
                return
