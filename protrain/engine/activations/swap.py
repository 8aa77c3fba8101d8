"""SWAP and CKPT_SWAP: tensors of a block are offloaded after its forward and fetched before its backward.

After forward each distinct storage is copied to the host arena. Its device memory is freed when the next unit is done,
by when the copies usually are, too. Backward fetches the offload of the block before the current one ahead.

SWAP offloads the tensors that a block saves. Its inputs stay on the device, where other units have them anyway.
CKPT_SWAP offloads the inputs, which are all that a recomputed block keeps.

[Note: packed swaps] A swapped block may have one copy each way. At the end of forward one kernel packs the storages of
the tensors that it saves into one buffer, which is their storage from then on. The originals are freed at once, as the
kernel runs before any work that gets their memory. The buffer that backward fetches stays until the last of the tensors
is used. Where backward makes a graph, they are copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from protrain.common.parameters import is_plain, made_of, split_up, unmanaged_memory
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.saved import SAVED, CheckpointFrame, Frame
from protrain.engine.states.arena import HostSlots
from protrain.engine.streams import span
from protrain.engine.units import Unit
from protrain.engine.weights.handle import Engine
from protrain.engine.weights.views import ViewForm, storage_address, storage_bytes
from protrain.forward.dispatch import detached
from protrain.forward.recomputation import INPUTS, written_over
from protrain.planning.plan import SWAP_ALIGNMENT_BYTES, BlockMode
from protrain.planning.timeline import DOWN, UP
from protrain_kernels import Packed, pack, unpack


@dataclass(eq=False)
class Storage:
    """A storage that is offloaded: on the device before the offload and after the fetch, on the host in between."""

    size_bytes: int
    device: Tensor | None  # 1-d uint8
    host: Tensor | None = None
    waiting: int = 0  # tensors in it that this backward has not rebuilt yet
    packed: bool = False


@dataclass(eq=False)
class OffloadedTensor:
    """Stands for a tensor that is offloaded."""

    storage: Storage
    watch: Tensor  # shares the tensor's version counter, but not its memory
    version: int  # of the tensor when it was saved
    form: ViewForm  # in the storage
    written_over: bool = False  # the tensor was changed before the copy to the host was done


class Offload:
    """The tensors that one call of ``unit`` keeps in host memory between forward and backward, by storage.

    It belongs to the frame of that call. When the frame is freed the host memory is released. Tensors belong to whoever
    saves them, and until the offload starts storages belong to their tensors. So if the unit computes gradients itself,
    nothing is offloaded of the graph that ends with that.
    """

    def __init__(self, engine: Engine, unit: Unit, *, packs: bool = False) -> None:
        self.unit = unit
        self._engine = engine
        self._packs = packs  # see [Note: packed swaps]
        # By address. Until the offload starts they belong to their tensors, and then to this.
        self._storages: MutableMapping[int, Storage] = weakref.WeakValueDictionary()
        self.tensors = weakref.WeakValueDictionary[int, OffloadedTensor]()  # by id, in the order of saving
        self._empty = torch.empty(0, device=engine.memory.device)
        self._is_offloaded = False  # on the device is no more than what was fetched
        self._offload_done = engine.streams.event()
        self._fetch_done = engine.streams.event()

    def accepts(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can be offloaded, and this frees device memory, as it does not for weights in chunks."""
        address = storage_address(tensor)
        return (
            tensor.device.type == self._engine.memory.device.type
            and address != 0
            and address not in self._engine.buffers.by_address
        )

    def add(self, tensor: Tensor) -> OffloadedTensor:
        """Offload the storage of ``tensor``. Returns what to keep in place of it."""
        watch = detached(tensor)
        watch.data = self._empty
        address = storage_address(tensor)
        storage = self._storages.get(address)
        if storage is None:
            flat = storage_bytes(tensor)
            self._engine.ledger.hold(flat)
            storage = self._storages[address] = Storage(flat.nbytes, flat)
        offloaded = OffloadedTensor(storage, watch, tensor._version, ViewForm.of(tensor))
        self.tensors[id(offloaded)] = offloaded
        return offloaded

    def _packed(self) -> Storage:
        """The storage of one buffer that has the content of all storages, and all tensors from now on."""
        storages = list(self._storages.values())
        buffer, views = pack([storage.device for storage in storages if storage.device is not None])
        self._engine.ledger.hold(buffer)
        packed = Storage(buffer.nbytes, buffer, packed=True)
        starts = {storage: view[-1] for storage, view in zip(storages, views, strict=True)}
        for tensor in self.tensors.values():
            form, start = tensor.form, starts[tensor.storage]
            tensor.form = form._replace(offset=form.offset + start // form.dtype.itemsize)
            tensor.storage = packed
        return packed

    def start(self) -> None:
        """Start to copy all storages to host memory. No tensor may be added afterwards."""
        streams = self._engine.streams
        self._storages = {0: self._packed()} if self._packs else dict(self._storages)
        aligned = SWAP_ALIGNMENT_BYTES
        sizes_bytes = [-(-storage.size_bytes // aligned) * aligned for storage in self._storages.values()]
        slot, free = self._engine.swaps.slots.take(sum(sizes_bytes))
        weakref.finalize(self, self._engine.swaps.slots.release, slot, self._fetch_done)
        computed = streams.event()
        streams.compute.record_event(computed)
        streams.d2h.wait_event(free)
        places = slot[: sum(sizes_bytes)].split(sizes_bytes)
        for storage, place in zip(self._storages.values(), places, strict=True):
            assert storage.device is not None
            storage.host = place[: storage.size_bytes]
            with span(DOWN, "activations"):
                streams.offload(storage.host, storage.device, after=computed, done=self._offload_done)
        self._engine.swaps.started(self)

    def free_device_memory(self) -> None:
        """Free the device memory. Later work on the compute stream waits for the offload, as it may get that memory."""
        self._engine.streams.compute.wait_event(self._offload_done)
        for tensor in self.tensors.values():
            tensor.written_over = tensor.watch._version != tensor.version
        for storage in self._storages.values():
            storage.device = None
        self._is_offloaded = True

    def fetch(self) -> None:
        """Start to copy all storages back to the device, unless some are there."""
        if self._is_offloaded and all(storage.device is None for storage in self._storages.values()):
            self._fetch()

    def _fetch(self) -> None:
        """Start to copy back to the device what is on the host alone."""
        missing = [storage for storage in self._storages.values() if storage.device is None]
        for storage in self._storages.values():
            storage.waiting = 0
        for tensor in self.tensors.values():
            tensor.storage.waiting += 1
        streams, device = self._engine.streams, self._engine.memory.device
        fresh = [torch.empty(storage.size_bytes, dtype=torch.uint8, device=device) for storage in missing]
        for memory in fresh:
            self._engine.ledger.hold(memory)
        allocated = streams.event()
        streams.compute.record_event(allocated)
        streams.h2d.wait_event(self._offload_done)
        for storage, memory in zip(missing, fresh, strict=True):
            assert storage.host is not None
            with span(UP, "activations"):
                streams.upload(memory, storage.host, after=allocated, done=self._fetch_done)
            storage.device = memory  # not before, as an error, also out of memory, must leave none without its content

    def rebuild(self, offloaded: OffloadedTensor) -> Tensor:
        """The tensor on the device that ``offloaded`` stands for. It is a leaf that requires no gradient."""
        memory, form = self._for_one_user(offloaded.storage), offloaded.form
        itemsize = form.dtype.itemsize
        if offloaded.storage.packed and torch.is_grad_enabled():  # a graph of gradients must not hold the whole buffer
            view = form.shape, form.stride, form.dtype, form.offset * itemsize
            (copy,) = unpack(Packed(memory, (view,)), copies=True)
            self._engine.ledger.hold(copy)
            return form.flipped(copy)
        return form.on(memory[: offloaded.storage.size_bytes // itemsize * itemsize])

    def _for_one_user(self, storage: Storage) -> Tensor:
        """The device memory of ``storage``, for one of its users. The frame drops it with the last user."""
        if storage.device is None:
            self._fetch()  # others may still be on the device, as the last backward did not need them
        if self._is_offloaded:
            self._engine.streams.compute.wait_event(self._fetch_done)
        memory = storage.device
        assert memory is not None
        storage.waiting -= 1
        if storage.waiting == 0 and self._is_offloaded:
            storage.device = None  # as autograd frees saved tensors node by node
        return memory


class SwapFrame(Frame):
    """One call of a unit whose saved tensors are offloaded and fetched (SWAP)."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.offload = Offload(engine, unit, packs=unit.packs)

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [part for tensor in tensors_in((args, kwargs)) for part in made_of(tensor).values()]
        self._stays = {*map(storage_address, (*given, *unmanaged_memory(self.unit.module)))}
        output = super().run(function, args, kwargs)
        if self.offload.tensors:
            self.offload.start()
        return output

    @override
    def keep(self, tensor: Tensor) -> Any:
        if not is_plain(tensor) and (parts := split_up(tensor)) is not None:
            return self.keep_parts(*parts)
        # A nested tensor of the older layout, which has no shape, stays.
        if tensor.is_nested or storage_address(tensor) in self._stays or not self.offload.accepts(tensor):
            return super().keep(tensor)
        return self.offload.add(tensor)

    @override
    def tensor_of(self, kept: Any) -> Tensor:
        if not isinstance(kept, OffloadedTensor):
            return super().tensor_of(kept)
        if kept.written_over:
            raise written_over(self.unit.label, SAVED)
        return self.offload.rebuild(kept)


class _OffloadedInput:
    """Stands for an input among the arguments. It is no dataclass, which walks of arguments would look into."""

    def __init__(self, view: OffloadedTensor, requires_grad: bool) -> None:
        self.view, self.requires_grad = view, requires_grad


class CheckpointSwapFrame(CheckpointFrame):
    """One call of a unit whose inputs are offloaded and fetched, and which is recomputed in backward (CKPT_SWAP).

    [Note: inputs that stay] An input is offloaded if it was computed with gradients and the units before and after are
    not given it, too. Masks and position tables need no gradient and are made once for all blocks, leaves belong to the
    caller, and the output of an encoder is needed by every block of a decoder. To offload such a tensor would free
    nothing, and would take the link and host memory once for each block. Whether the next unit is given an input shows
    when that is called. Until then the inputs are kept, so that their addresses stay unique, and then the copies start.
    A shared tensor that is not given to two units in a row is offloaded for each of them, which costs time and changes
    no result. Kept outputs of attention belong to this unit alone, and are offloaded with the inputs.
    """

    def __init__(self, engine: Engine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.offload = Offload(engine, unit)

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = super().run(function, args, kwargs)
        if self.needed:
            self.engine.swaps.deferred = weakref.ref(self)
        return output

    def offload_inputs(self, given: set[int]) -> set[int]:
        """Offload the inputs that no other unit has. ``given`` are storages that the next unit is given.

        Returns the inputs among ``given``.
        """
        tensors = _plain_tensors((self.args, self.kwargs))
        shared = given.intersection(map(storage_address, tensors))
        computed = {storage_address(tensor) for tensor in tensors if tensor.grad_fn is not None}
        alone = computed - shared - self.shared
        gone = set[int]()  # the inputs that are offloaded, by id

        def offloaded(leaf: Any) -> Any:
            if type(leaf) is Tensor and storage_address(leaf) in alone and self.offload.accepts(leaf):
                gone.add(id(leaf))
                return _OffloadedInput(self.offload.add(leaf), leaf.requires_grad)
            return leaf

        self.args, self.kwargs = map_leaves(offloaded, (self.args, self.kwargs))
        self.watched = [(t, version) for t, version in self.watched if id(t) not in gone or t._version != version]
        if self.attention is not None:
            self.attention.move(
                lambda tensor: (
                    _OffloadedInput(self.offload.add(tensor), False) if self.offload.accepts(tensor) else tensor
                )
            )
        if self.offload.tensors:
            self.offload.start()
        return shared

    @override
    def fresh_input(self, leaf: Any) -> Any:
        if isinstance(leaf, _OffloadedInput):
            if leaf.view.written_over:
                raise written_over(self.unit.label, INPUTS)
            return self.offload.rebuild(leaf.view).requires_grad_(leaf.requires_grad)
        return super().fresh_input(leaf)


_FRAMES: dict[BlockMode, type[Frame]] = {
    BlockMode.NONE: Frame,
    BlockMode.CKPT: CheckpointFrame,
    BlockMode.SWAP: SwapFrame,
    BlockMode.CKPT_SWAP: CheckpointSwapFrame,
}


def frame_of(engine: Engine, unit: Unit) -> Frame:
    """The frame for a call of ``unit`` now, by its mode, or with ``engine.recompute_all`` as a recomputed block."""
    return _FRAMES[BlockMode.CKPT if engine.recompute_all and unit.is_block else unit.mode](engine, unit)


def _plain_tensors(tree: Any) -> list[Tensor]:
    """The tensors in ``tree`` that have an ordinary storage, without parameters and other subclasses."""
    return [tensor for tensor in tensors_in(tree) if is_plain(tensor)]


class Swaps:
    """The offloads of one step: which start, which free device memory, and which are fetched."""

    def __init__(self, slots: HostSlots) -> None:
        self.slots = slots
        self._last = weakref.WeakValueDictionary[int, Offload]()  # the last one of each unit, by its index
        self._under_way: Offload | None = None
        # A frame whose forward has ended. Its inputs are offloaded when those of the next unit are known.
        self.deferred: weakref.ref[CheckpointSwapFrame] | None = None

    def offload_deferred(self, arguments: Any) -> set[int]:
        """Offload deferred inputs, except those among the ``arguments`` of the next unit. Returns these, by storage."""
        frame = self.deferred() if self.deferred is not None else None
        self.deferred = None
        if frame is None:
            return set()
        return frame.offload_inputs({storage_address(tensor) for tensor in _plain_tensors(arguments)})

    def started(self, offload: Offload) -> None:
        """Record that the offload of a block is under way."""
        self._last[offload.unit.index] = offload
        self._under_way = offload

    def free_offloaded(self) -> None:
        """Free the device memory of the block whose offload is under way."""
        if self._under_way is not None:
            self._under_way.free_device_memory()
            self._under_way = None

    def begin_backward(self) -> None:
        """Start every offload that was deferred, as no unit follows, and free its device memory."""
        self.offload_deferred(())
        self.free_offloaded()

    def fetch_ahead(self, unit: Unit) -> None:
        """Fetch the tensors that ``unit``, which backward reaches next, has offloaded."""
        offload = self._last.get(unit.index)
        if offload is not None:
            offload.fetch()
