"""SWAP and CKPT_SWAP: what a block keeps goes to host memory after its forward and comes back before its backward.

After forward each distinct storage is copied to the host arena; the device memory is given up when the next unit is
done, by when the copies are. In backward the block before the current one in forward order is fetched ahead.

SWAP moves what the block saves, each storage by itself or, where the plan says so, packed into one buffer
(:mod:`protrain.engine.activations.packed`). Its inputs stay on the device: its neighbours hold them anyway. CKPT_SWAP
moves the inputs, which are all that a recomputed block keeps; where neighbours are recomputed too, nobody else holds
them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from protrain.common.errors import BudgetError
from protrain.common.quantities import format_bytes
from protrain.common.trees import Leaf, map_leaves, tensors_in
from protrain.engine.activations.saved import INPUTS, SAVED, CheckpointFrame, Frame, FrameEngine, storage_address, watch
from protrain.engine.states.arena import Arena
from protrain.engine.streams import Mark, Streams
from protrain.engine.units import Unit
from protrain.planning.plan import SWAP_ALIGNMENT_BYTES

_SMALLEST_BYTES = 512  # smaller storages (random seeds, scalars) are not worth a copy: the allocator's grain


def aligned(count: int) -> int:
    """``count`` bytes rounded up to the alignment of swapped storages."""
    return -(-count // SWAP_ALIGNMENT_BYTES) * SWAP_ALIGNMENT_BYTES


@dataclass(slots=True)
class Storage:
    """One thing that is copied: on the device before the offload and after the fetch, on the host in between."""

    size_bytes: int
    device: Tensor | None  # 1-d uint8
    host: Tensor | None = None
    users: int = 0  # tensors that lie in it
    waiting: int = 0  # of those, not yet rebuilt in this backward


@dataclass(slots=True)
class MovedTensor:
    """What stands for a tensor that is moved."""

    storage: Storage
    written_over: bool = field(default=False, init=False)  # before the copy to the host was done


@dataclass(slots=True)
class _MovedView(MovedTensor):
    """A tensor whose storage is moved by itself."""

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


class SwapEngine(FrameEngine, Protocol):
    """What a frame that moves tensors to host memory asks of the engine."""

    @property
    def swaps(self) -> Swaps:
        """What is on its way to host memory."""


class Moved:
    """What one call of ``unit`` keeps in host memory between forward and backward, by storage.

    Belongs to that call's frame and ends with it, and then gives its host memory back.
    """

    def __init__(self, engine: SwapEngine, unit: Unit) -> None:
        self.unit = unit
        self._engine = engine
        self._storages: dict[int, Storage] = {}
        self._watched: list[tuple[MovedTensor, Tensor, int]] = []  # until the copies are done: [Note: written over]
        self._on_host = False
        self._fetched = False
        self._offload_done = engine.streams.mark()
        self._fetch_done = engine.streams.mark()

    def __len__(self) -> int:
        return len(self._storages)

    def worthwhile(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can be moved, and it saves device memory: a persistent weight stays where it is."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        if tensor.device.type != self._engine.device.type:
            return False
        address, size_bytes = storage_address(tensor), tensor.untyped_storage().nbytes()
        return address != 0 and size_bytes >= _SMALLEST_BYTES and address not in self._engine.weight_storages

    def add(self, tensor: Tensor) -> MovedTensor:
        """Have the storage of ``tensor`` moved. Returns what to keep in its place."""
        address = storage_address(tensor)
        storage = self._storages.get(address)
        if storage is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self._engine.ledger.hold(flat)
            storage = self._storages[address] = Storage(tensor.untyped_storage().nbytes(), flat)
        storage.users += 1
        view = _MovedView(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        self._watched.append((view, tensor.detach(), tensor._version))
        return view

    def offload(self) -> None:
        """Start to copy everything to host memory: nothing more is added."""
        streams = self._engine.streams
        total = sum(aligned(storage.size_bytes) for storage in self._storages.values())
        region, free = self._engine.swaps.slots.take(total)
        weakref.finalize(self, self._engine.swaps.slots.give_back, region, self._fetch_done)
        computed = streams.mark()
        streams.compute_reached(computed)
        streams.offload_waits(free)
        start = 0
        for storage in self._storages.values():
            assert storage.device is not None
            storage.host = region[start : start + storage.size_bytes]
            start += aligned(storage.size_bytes)
            streams.offload(storage.host, storage.device, after=computed, done=self._offload_done)
        self._engine.swaps.offloading(self)

    def give_up_device_memory(self) -> None:
        """Drop the device copies; what the compute stream does next waits for the offload."""
        self._engine.streams.compute_waits(self._offload_done)
        for view, tensor, version in self._watched:
            view.written_over = tensor._version != version
        self._watched.clear()
        for storage in self._storages.values():
            storage.device = None
        self._on_host = True

    def fetch(self) -> None:
        """Start to bring everything back to the device."""
        if self._fetched or not self._on_host:
            return
        missing = [storage for storage in self._storages.values() if storage.device is None]
        for storage in self._storages.values():
            storage.waiting = storage.users
        try:
            self._upload(missing)
        except BaseException:  # memory ran out, or Ctrl-C: what has no content yet must not be taken for the tensor
            self._engine.streams.upload_reached(self._fetch_done)
            self._engine.streams.compute_waits(self._fetch_done)  # before the memory goes to somebody else
            for storage in missing:
                storage.device = None
            raise
        self._fetched = True

    def _upload(self, missing: list[Storage]) -> None:
        streams = self._engine.streams
        allocated = streams.mark()
        for storage in missing:
            storage.device = torch.empty(aligned(storage.size_bytes), dtype=torch.uint8, device=self._engine.device)
            self._engine.ledger.hold(storage.device)
        streams.compute_reached(allocated)
        streams.upload_waits(self._offload_done)
        for storage in missing:
            assert storage.device is not None
            assert storage.host is not None
            streams.upload(storage.device[: storage.size_bytes], storage.host, after=allocated, done=self._fetch_done)

    def rebuild(self, moved: MovedTensor) -> Tensor:
        """The tensor as it was, on the device: a leaf that requires no gradient."""
        assert isinstance(moved, _MovedView)
        memory = self._for_one_user(moved.storage)
        whole = memory[: moved.storage.size_bytes // moved.dtype.itemsize * moved.dtype.itemsize]
        return whole.view(moved.dtype).as_strided(moved.shape, moved.stride, moved.offset)

    def _for_one_user(self, storage: Storage) -> Tensor:
        """The device memory of ``storage``, for a tensor that lies in it. With the last one the frame drops it."""
        if storage.device is None:
            self._fetched = False  # others may still be there: a backward before this one did not need them
            self.fetch()
        if self._on_host:
            self._engine.streams.compute_waits(self._fetch_done)
        memory = storage.device
        assert memory is not None
        storage.waiting -= 1
        if storage.waiting == 0 and self._on_host:
            storage.device = None  # autograd frees what it has used node by node; so does the frame
            self._fetched = any(other.device is not None for other in self._storages.values())
        return memory


class SwapFrame(Frame):
    """Moves what is saved to host memory and back (SWAP)."""

    moved_class: ClassVar[type[Moved]] = Moved

    def __init__(self, engine: SwapEngine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.moved = self.moved_class(engine, unit)

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._stays = {storage_address(tensor) for tensor in tensors_in((args, kwargs))}
        self._stays |= {storage_address(buffer) for buffer in self.unit.module.buffers()}
        output = super().run(function, args, kwargs)
        if self.moved:
            self.moved.offload()
        return output

    @override
    def pack(self, tensor: Tensor) -> Any:
        address = storage_address(tensor)
        if address in self.engine.weight_storages or address in self._stays or not self.moved.worthwhile(tensor):
            return super().pack(tensor)
        return self.moved.add(tensor)

    @override
    def rebuild(self, packed: Any) -> Tensor:
        if not isinstance(packed, MovedTensor):
            return super().rebuild(packed)
        if packed.written_over:
            raise self.written_over(SAVED)
        return self.moved.rebuild(packed)


@dataclass(frozen=True, slots=True)
class _MovedInput(Leaf):
    view: MovedTensor
    requires_grad: bool


class CheckpointSwapFrame(CheckpointFrame):
    """Moves the inputs to host memory and back, and recomputes the rest from them (CKPT_SWAP).

    [Note: inputs that stay] An input is moved when it was computed with gradients and no neighbour is given it too.
    Masks, position tables and whatever else needs no gradient are made once for all blocks, leaves belong to the
    caller, and what an encoder hands to every block of a decoder is held for all of them: to move such a tensor would
    free nothing, and take the link and host memory once a block. That a tensor is shared shows when the next unit is
    called: until then the inputs wait here, so that their addresses are theirs alone, and only then the copies start.
    A shared tensor that no two units in a row are given is moved for each, which costs time but changes no result.
    Outputs of attention that are kept are nobody else's and move with the inputs.
    """

    engine: SwapEngine

    def __init__(self, engine: SwapEngine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.moved = Moved(engine, unit)

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().run(function, args, kwargs)
        if self.forms:
            self.engine.swaps.inputs_wait(self)
        return output

    def offload_inputs(self, given: set[int]) -> set[int]:
        """Move what is the block's alone; ``given`` are the storages that the next unit gets. Returns the shared."""
        self.look_at_inputs()
        tensors = _plain_tensors((self.args, self.kwargs))
        shared = given.intersection(map(storage_address, tensors))
        computed = {storage_address(tensor) for tensor in tensors if tensor.grad_fn is not None}
        alone = computed - shared - self.shared

        def move(leaf: Any) -> Any:
            if type(leaf) is Tensor and self.moved.worthwhile(leaf) and storage_address(leaf) in alone:
                return _MovedInput(self.moved.add(leaf), leaf.requires_grad)
            return leaf

        def move_attention(tensor: Tensor) -> Any:
            return _MovedInput(self.moved.add(tensor), False) if self.moved.worthwhile(tensor) else tensor

        self.args, self.kwargs = map_leaves(move, (self.args, self.kwargs))
        self.watched = watch(tensors_in((self.args, self.kwargs)))
        if self.attention is not None:
            self.attention.move(move_attention)
        if self.moved:
            self.moved.offload()
        return shared

    @override
    def fresh_input(self, leaf: Any) -> Any:
        if isinstance(leaf, _MovedInput):
            if leaf.view.written_over:
                raise self.written_over(INPUTS)
            return self.moved.rebuild(leaf.view).requires_grad_(leaf.requires_grad)
        return super().fresh_input(leaf)


def _plain_tensors(tree: Any) -> list[Tensor]:
    """Tensors with a storage of the usual kind; parameters and other subclasses never move."""
    return [tensor for tensor in tensors_in(tree) if type(tensor) is Tensor and tensor.layout == torch.strided]


class Swaps:
    """The moved storages of the step in forward order: what is due to go, whose device memory, what is fetched next."""

    def __init__(self, slots: HostSlots) -> None:
        self.slots = slots
        self._order: list[weakref.ref[Moved]] = []
        self._unsettled: Moved | None = None
        self._waiting: weakref.ref[CheckpointSwapFrame] | None = None  # dead when its graph was dropped

    def inputs_wait(self, frame: CheckpointSwapFrame) -> None:
        """The forward of ``frame`` has ended; its inputs go once the next unit's are known."""
        self._waiting = weakref.ref(frame)

    def called(self, arguments: Any) -> set[int]:
        """A unit is called: inputs that wait may go. Returns the storages among ``arguments`` that stay for it too."""
        frame = self._waiting() if self._waiting is not None else None
        self._waiting = None
        if frame is None:
            return set()
        return frame.offload_inputs({storage_address(tensor) for tensor in _plain_tensors(arguments)})

    def offloading(self, moved: Moved) -> None:
        """The offload of what a block keeps is under way."""
        self._order = [ref for ref in self._order if ref() is not None]
        self._order.append(weakref.ref(moved))
        self._unsettled = moved

    def settle(self) -> None:
        """Give up the device memory of the block whose offload is under way."""
        if self._unsettled is not None:
            self._unsettled.give_up_device_memory()
            self._unsettled = None

    def begin_backward(self) -> None:
        """No unit follows: everything that was to go goes, and its device memory is given up."""
        self.called(())
        self.settle()

    def fetch_ahead(self, unit: Unit) -> None:
        """Fetch what ``unit``, which backward reaches next, has moved."""
        for ref in reversed(self._order):
            moved = ref()
            if moved is not None and moved.unit is unit:
                moved.fetch()
                return
