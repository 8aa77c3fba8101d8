"""The tensors that the forward of a unit saves for its backward.

[Note: saved weights] Autograd saves views of weights (``F.linear`` saves ``weight.t()``), and a weight in a chunk
buffer is gone by the time backward runs. So every tensor that a unit saves passes through hooks. If its storage is a
chunk buffer, the hooks save the chunk beside the view. If backward finds the chunk in another buffer, they make a view
of the same form (type, shape, stride, offset) there. This copies nothing and works for any operator.

[Note: written over] Autograd raises if a backward needs a saved tensor that was changed in place since, but it does not
check tensors that go through hooks. So the engine checks the version of every tensor that stays on the device, or is
copied to the host later, when it is used. The inputs of a block that is recomputed are checked likewise. A profile
checks them, too, so that no plan decides whether they may change.

A ``Frame`` stands for one call of a unit. Its class is the activation mode: keep saved tensors (NONE), keep the
inputs only and run forward again (CKPT), move saved tensors to host memory and back (SWAP), or keep the inputs in host
memory and run forward again (CKPT_SWAP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from protrain.common.errors import MisuseError
from protrain.common.parameters import made_of, split_up
from protrain.common.trees import tensors_in
from protrain.engine.activations.kept_attention import KeptAttention
from protrain.engine.units import Unit
from protrain.engine.weights.buffers import BufferPool
from protrain.engine.weights.handle import Engine
from protrain.engine.weights.views import ViewForm, storage_address
from protrain.forward.dispatch import detached
from protrain.forward.recomputation import Recomputation, written_over

SAVED = "tensors that it saved"


class SavedParts(NamedTuple):
    """A saved tensor that consists of others (a sparse one of indices and values), some of them views of weights."""

    parts: dict[str, Any]  # by name, what is saved in place of each
    remade: Callable[[dict[str, Tensor]], Tensor]


def end_left_hooks(buffers: BufferPool) -> None:
    """End the hooks for saved tensors that Ctrl-C has left, as it came when their context was just entered or left.

    ``buffers`` are those of the engine whose hooks they are. None of its units may run.
    """
    torch_hooks: Any = torch._C._autograd
    while (top := torch_hooks._top_saved_tensors_default_hooks(True)) is not None:
        if getattr(getattr(top[0], "__self__", None), "buffers", None) is not buffers:
            return
        torch_hooks._pop_saved_tensors_default_hooks()


def copy_with_strides(tensor: Tensor) -> Tensor:
    """A copy with the strides of the original, including those of expanded dimensions. It is in no graph."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        copy.as_strided((span,), (1,)).copy_(tensor.detach().as_strided((span,), (1,)))
    return copy


class Frame:
    """One call of a unit whose saved tensors stay on the device (NONE)."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.engine = engine
        self.unit = unit
        self.weights_version = engine.weights_version  # backward must come before weights change
        self.updated_before = engine.updates.updated_inside.copy()  # chunks that backward had updated before this call
        self.shared: set[int] = set()  # storages of arguments that the unit before was given, too
        # Whether the unit runs now, forward or again. A backward that comes here then is one of its own.
        self.running = False
        self.buffers = engine.buffers

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` so that what it saves goes through this frame."""
        self.shared = self.engine.swaps.offload_deferred((args, kwargs))
        self.running = True
        try:
            with self.hooks():
                output = function(*args, **kwargs)
        finally:
            self.running = False
        self.engine.swaps.free_offloaded()  # the offload of the block before had the time of this forward
        return output

    def hooks(self) -> saved_tensors_hooks:
        """A context in which what autograd saves goes through this frame."""
        return saved_tensors_hooks(self.keep, self.restore)

    def keep(self, tensor: Tensor) -> Any:
        """What keeps ``tensor`` until backward needs it.

        Returns:
            (tensor, version, buffer, chunk): the version is autograd's count of changes in place, for [Note: written
            over]. Buffer and chunk say where the weight lies now of which the tensor is a view; they are None for any
            other tensor. This is a tuple for speed, as every saved tensor makes one.
        """
        address, buffers = storage_address(tensor), self.buffers.by_address
        if (
            not address
            and (parts := split_up(tensor)) is not None
            and any(storage_address(part) in buffers for part in made_of(tensor).values())
        ):
            return self.keep_parts(*parts)
        buffer = buffers.get(address)
        saved = detached(tensor)
        if buffer is None:
            self.engine.ledger.hold(saved, address)
            return saved, saved._version, None, None
        assert buffer.users > 0, "a weight is used while no unit uses its chunk"
        buffer.known_views += 1
        return saved, saved._version, buffer, buffer.chunk

    def keep_parts(self, parts: dict[str, Tensor], remade: Callable[[dict[str, Tensor]], Tensor]) -> SavedParts:
        """What keeps a tensor that consists of ``parts``, and that ``remade`` makes of such."""
        return SavedParts({name: self.keep(part) for name, part in parts.items()}, remade)

    def restore(self, kept: Any) -> Tensor:
        """Give autograd the saved tensor that ``kept`` keeps. MisuseError if its values have changed."""
        self.reach()
        return self.tensor_of(kept)

    def reach(self) -> None:
        """Tell the engine that backward has reached this unit, unless it knows."""
        if self.running or self.engine.in_backward_of(self):
            return
        if self.weights_version != self.engine.weights_version:
            raise MisuseError(
                f"backward through {self.unit.label}, whose weights optimizer.step() or an edit has changed since its "
                "forward: call backward() before that, or run the forward once more"
            )
        self.engine.begin_backward()
        self.engine.visits.enter_backward(self)

    def tensor_of(self, kept: Any) -> Tensor:
        """The tensor that ``kept`` keeps. MisuseError if its values have changed."""
        if type(kept) is SavedParts:
            return kept.remade({name: self.tensor_of(part) for name, part in kept.parts.items()})
        saved, version, buffer, chunk = kept
        if saved._version != version:
            raise written_over(self.unit.label, SAVED)
        if buffer is None:
            return saved
        updated = self.engine.updates.updated_inside
        if updated and chunk.index in updated - self.updated_before:
            raise MisuseError(
                f"backward through {self.unit.label} needs a weight that step_during_backward=True updated already, "
                "because another backward() came before, or because the weight is detached here and all of its "
                "gradients had arrived: wrap with step_during_backward=False"
            )
        if chunk.resident:
            return saved
        memory = self.buffers.used(chunk).memory
        weight = saved if memory is buffer.memory else ViewForm.of(saved).on(memory)
        # With create_graph=True the graph outlives the content of the buffer. That of a unit that runs is saved here.
        if torch.is_grad_enabled() and not self.running:
            weight = copy_with_strides(weight)
            self.engine.ledger.hold(weight)
        return weight


class CheckpointFrame(Frame, Recomputation):
    """One call of a unit that keeps its inputs and is recomputed in backward (CKPT): [Note: a second run].

    torch's own checkpoint would keep views of weights from the second run. Those would outlive the content of their
    buffers when backward alternates between units, so here they are saved as [Note: saved weights] says. With
    ``Plan.keep_attention`` the outputs of attention are kept beside the inputs: [Note: what is not computed twice].
    """

    def __init__(self, engine: Engine, unit: Unit) -> None:
        Frame.__init__(self, engine, unit)
        Recomputation.__init__(self, unit.label, unit.modules, engine.memory.device)
        self.attention = KeptAttention(engine.memory.device) if engine.plan.keep_attention else None

    # What the second run saves is kept as if it were the first run of a block that is not recomputed.
    keep = Frame.keep
    tensor_of = Frame.tensor_of

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if not isinstance(tensor, nn.Parameter):  # parameters lie in chunks
                self.engine.ledger.hold(tensor, within=self)
        self.first_run_begins(function, args, kwargs)
        for copy in self.modules.copies.values():
            self.engine.ledger.hold(copy, within=self)
        with nullcontext() if self.attention is None else self.attention.first_run():
            output = super().run(function, args, kwargs)
        for tensor in () if self.attention is None else self.attention.keep():
            self.engine.ledger.hold(tensor)
        self.first_run_ends()
        return output

    @override
    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self.count_saved, self.restore)

    @override
    def count_saved(self, tensor: Tensor) -> int:
        if self.attention is not None:
            self.attention.record_saved(tensor)
        return super().count_saved(tensor)

    @override
    def restore(self, kept: int) -> Tensor:
        self.reach()
        return self.tensor_of(self.restored(kept))

    @override
    @contextmanager
    def around_second_run(self) -> Iterator[None]:
        before, self.running = self.running, True
        try:
            with nullcontext() if self.attention is None else self.attention.second_run(self.fresh_input):
                yield
        finally:
            self.running = before
