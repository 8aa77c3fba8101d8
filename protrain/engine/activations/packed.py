"""SWAP with one copy each way: the tensors that a block saves are packed into one buffer.

At the end of forward one kernel packs the tensors. Views of one storage are packed once, bools as bits, and views with
gaps without the gaps. The originals are freed at once, as the kernel runs before any work that gets their memory. The
copies of the block before may still run beside the kernel; the GPU waits for them after it.

In backward most tensors are views of the buffer that was fetched. One kernel unpacks bits, and views with gaps, into
memory of their own. To unpack every tensor would take as long as packing, and twice the device memory. The price of
views is that the buffer stays until the last of them is used.

The plan of packing is made at the first call of a block and reused for the same layout (``protrain_kernels.pack``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from protrain.engine.activations.swap import Offload, OffloadedTensor, Storage, SwapEngine, SwapFrame
from protrain.engine.units import Unit
from protrain.engine.weights.views import ViewForm
from protrain.forward.dispatch import detached
from protrain_kernels import PackPlan, pack


@dataclass(slots=True)
class _PackedTensor(OffloadedTensor):
    """Stands for a tensor that is packed."""

    index: int  # in the order in which tensors were saved
    form: ViewForm


class PackedOffload(Offload):
    """The tensors that one call of ``unit`` keeps in host memory, packed into one buffer."""

    def __init__(self, engine: SwapEngine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self._buffer = Storage(0, None)
        self._originals: list[Tensor] = []  # the tensors, until they are packed
        self._plan: PackPlan | None = None
        self._empty = torch.empty(0, device=engine.memory.device)
        self._rebuilt: list[Tensor | None] = []  # tensors that no node of this backward has taken yet

    @override
    def __len__(self) -> int:
        return self._buffer.users

    @override
    def add(self, tensor: Tensor) -> OffloadedTensor:
        form = ViewForm.of(tensor)
        original = form.flipped(detached(tensor))  # the kernels know neither conjugate nor negative views
        watch = detached(original)
        self._engine.ledger.hold(original)
        watch.data = self._empty  # it shares the version counter of ``tensor`` but not the memory
        packed = _PackedTensor(self._buffer, len(self._originals), form)
        self._originals.append(original)
        self._watched.append((packed, watch, tensor._version))
        self._buffer.users += 1
        return packed

    def pack(self) -> None:
        """Pack the tensors that were added. No tensor may be added afterwards."""
        if not self._originals:
            return
        self._plan, buffer = pack(self._originals)
        self._engine.ledger.hold(buffer)
        self._buffer.size_bytes, self._buffer.device = buffer.numel(), buffer
        self._storages[0] = self._buffer
        self._originals.clear()

    @override
    def rebuild(self, offloaded: OffloadedTensor) -> Tensor:
        assert isinstance(offloaded, _PackedTensor)
        if self._plan is None:  # not packed yet: the block computes gradients itself
            return offloaded.form.flipped(self._originals[offloaded.index])
        buffer = self._for_one_user(self._buffer)
        tensor = self._rebuilt[offloaded.index] if self._rebuilt else None
        if tensor is None:
            unpacked = self._plan.unpack(buffer, in_place=True)
            for each in unpacked:
                self._engine.ledger.hold(each)
            self._rebuilt = [*unpacked]
            tensor = unpacked[offloaded.index]
        self._rebuilt[offloaded.index] = None  # its memory is freed with the node that takes it
        if self._buffer.device is None:
            self._rebuilt.clear()
        assert tensor is not None
        return offloaded.form.flipped(tensor)


class PackedSwapFrame(SwapFrame):
    """One call of a unit whose saved tensors are offloaded and fetched in one buffer (SWAP if the plan packs)."""

    offload_class = PackedOffload

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def and_pack(*args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            assert isinstance(self.offload, PackedOffload)
            self.offload.pack()
            return output

        return super().run(and_pack, args, kwargs)
