"""The tensors that the forward of a unit saves for its backward.

[Note: saved weights] Autograd saves views of weights (``F.linear`` saves ``weight.t()``), and a weight in a chunk
buffer is gone by the time backward runs. So every tensor that a unit saves passes through hooks. If its storage is a
chunk buffer, the hooks save the chunk beside the view. If backward finds the chunk in another buffer, they make a view
of the same form (type, shape, stride, offset) there. This copies nothing and works for any operator.

[Note: written over] Autograd raises if a backward needs a saved tensor that was changed in place since, but it does not
check tensors that go through hooks. So the engine checks the version of every tensor that stays on the device, or is
copied to the host later, when it is used. The inputs of a block that is recomputed are checked likewise.

A :class:`Frame` stands for one call of a unit. Its class is the activation mode: keep saved tensors (NONE), keep the
inputs only and run forward again (CKPT), move saved tensors to host memory and back (SWAP), or keep the inputs in host
memory and run forward again (CKPT_SWAP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from protrain.common.errors import MisuseError
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.activations.caches import copied, is_cache, tensors_of
from protrain.engine.activations.kept_attention import KeptAttention
from protrain.engine.activations.ledger import Ledger
from protrain.engine.activations.rng import BlockRandomState
from protrain.engine.states.chunks import Chunk
from protrain.engine.streams import Streams
from protrain.engine.units import Unit
from protrain.engine.weights.buffers import Buffer, BufferPool
from protrain.engine.weights.parameter import PresentParameter
from protrain.engine.weights.views import ViewForm, storage_address
from protrain.planning.plan import Plan

INPUTS = "its inputs, as it is recomputed"
SAVED = "tensors that it saved"
GIVEN = "parameters that it was given, as it is recomputed"

_ORDINARY = frozenset({Tensor, nn.Parameter, PresentParameter})


class SavedTensor(NamedTuple):
    """A saved tensor that stays on the device, or a view of a weight. See [Note: written over]."""

    tensor: Tensor
    version: int  # autograd's count of changes in place when it was saved
    buffer: Buffer | None  # where it is a view of a weight: see [Note: saved weights]
    chunk: Chunk | None  # whose weight was in ``buffer`` then


class Copy(torch.autograd.Function):
    """A copy with the strides of the original, including those of expanded dimensions."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        """The copy, in memory of its own."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if tensor.numel():
            copy.as_strided((span,), (1,)).copy_(tensor.as_strided((span,), (1,)))
        return copy

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        """The gradient as it is."""
        return gradients[0]


class Offloads(Protocol):
    """What a frame asks of :class:`protrain.engine.activations.swap.Swaps`."""

    def unit_called(self, arguments: Any) -> set[int]:
        """A unit is called with ``arguments``. Returns the storages among them that the unit before was given, too."""

    def free_offloaded(self) -> None:
        """Free the device memory of the block whose offload is under way."""


class FrameEngine(Protocol):
    """What a frame asks of :class:`protrain.engine.engine.Engine`."""

    device: torch.device
    plan: Plan
    streams: Streams
    ledger: Ledger
    buffers: BufferPool
    steps: int  # how often weights have changed
    updated_inside: set[int]  # chunks that backward has updated

    @property
    def swaps(self) -> Offloads:
        """The offloads of this step, from a block's forward to its backward."""

    def in_backward_of(self, frame: Frame) -> bool:
        """Whether backward has reached the call of a unit that ``frame`` stands for."""

    def enter_backward(self, frame: Frame) -> None:
        """Backward reaches the call of a unit that ``frame`` stands for."""


class Frame:
    """One call of a unit whose saved tensors stay on the device (NONE)."""

    def __init__(self, engine: FrameEngine, unit: Unit) -> None:
        self.engine = engine
        self.unit = unit
        self.steps = engine.steps  # backward must come before the next step, which changes weights
        self.updated = engine.updated_inside.copy()  # chunks that backward had updated before this call
        self.shared: set[int] = set()  # storages of arguments that the unit before was given, too

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` so that what it saves goes through this frame."""
        self.shared = self.engine.swaps.unit_called((args, kwargs))
        with saved_tensors_hooks(self.pack, self.unpack):
            output = function(*args, **kwargs)
        self.engine.swaps.free_offloaded()  # the offload of the block before had the time of this forward
        return output

    def pack(self, tensor: Tensor) -> Any:
        """What autograd saves in place of ``tensor``."""
        buffer = self.engine.buffers.by_address.get(storage_address(tensor))
        saved = detached(tensor)
        if buffer is None:
            self.engine.ledger.hold(saved)
            return SavedTensor(saved, saved._version, None, None)
        assert buffer.users > 0, "a weight is used while no unit uses its chunk"
        buffer.view_counter.known += 1
        return SavedTensor(saved, saved._version, buffer, buffer.chunk)

    def unpack(self, packed: Any) -> Tensor:
        """The tensor on the device that ``packed`` stands for."""
        if not self.engine.in_backward_of(self):
            self._enter_backward()
        return self.rebuild(packed)

    def _enter_backward(self) -> None:
        """Tell the engine that backward has reached this unit."""
        if self.steps != self.engine.steps:
            raise MisuseError(
                f"backward through {self.unit.label} after optimizer.step(), or an edit, changed its weights: call "
                "backward() before that, or run the forward again"
            )
        self.engine.enter_backward(self)

    def rebuild(self, packed: Any) -> Tensor:
        """The saved tensor that ``packed`` stands for. MisuseError if its values have changed."""
        saved, version, buffer, chunk = packed
        if saved._version != version:
            raise self.written_over(SAVED)
        if buffer is None:
            return saved
        updated = self.engine.updated_inside
        if updated and chunk.index in updated - self.updated:
            raise MisuseError(
                f"backward through {self.unit.label} needs a weight that step_during_backward=True updated already, "
                "because another backward() came before, or because the weight is detached here and all of its "
                "gradients had arrived: wrap with step_during_backward=False"
            )
        if buffer.resident:
            return saved
        memory = self.engine.buffers.content(chunk)
        weight = saved if memory is buffer.memory else ViewForm.of(saved).on(memory)
        if torch.is_grad_enabled():  # with create_graph=True the graph outlives the content of the buffer
            weight = Copy.apply(weight)
            self.engine.ledger.hold(weight)
        return weight

    def written_over(self, what: str) -> MisuseError:
        """The error for a backward that needs values which were changed since forward: [Note: written over]."""
        return MisuseError(
            f"backward through {self.unit.label} needs {what}, but one was changed in place since: change a copy "
            "(tensor.clone())"
        )


class _Stop(Exception):
    """Recomputation has saved all that the first run saved, so the rest of the unit need not run again."""


class CheckpointFrame(Frame):
    """One call of a unit that keeps its inputs and is recomputed in backward (CKPT).

    The second run has the same random numbers, the same autocast state and the same saved tensors. torch's own
    checkpoint would keep views of weights from the second run. Those would outlive the content of their buffers when
    backward alternates between units, so here they are saved as [Note: saved weights] says. With
    ``Plan.keep_attention`` the outputs of attention are kept beside the inputs: [Note: what is not computed twice].
    """

    def __init__(self, engine: FrameEngine, unit: Unit) -> None:
        super().__init__(engine, unit)
        self.forms: list[tuple[torch.Size, torch.dtype]] = []  # of the tensors that the first run saved
        self.recomputed: dict[int, Any] = {}  # the tensors that the second run saved, by their number
        self.attention = KeptAttention(engine.device) if engine.plan.keep_attention else None
        self.watched: list[tuple[Tensor, int]] = []  # inputs, with their versions when the first run began
        self.inputs_changed = False  # whether an input has changed since
        self.cached: list[tuple[Tensor, int]] = []  # the tensors in key/value caches, with their versions

    @override
    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Lists and dictionaries are copied, as the model may put more into them later.
        self.function, (self.args, self.kwargs) = function, map_leaves(self._as_given, (args, kwargs))
        given = tensors_in((args, kwargs))
        for tensor in given:
            if not isinstance(tensor, nn.Parameter):  # parameters lie in chunks
                self.engine.ledger.hold(tensor)
        self.watched = watch(given)
        self.autocast = _Autocast.of(self.engine.device.type)
        self.modules = self.unit.modules.called()
        self.random_state = BlockRandomState(self.engine.device, self.unit.modules.generators)
        if self.attention is None:
            output = super().run(function, args, kwargs)
        else:
            output = super().run(self.attention.noting(function), args, kwargs)
            for tensor in self.attention.keep():
                self.engine.ledger.hold(tensor)
        self.modules.over()
        self.recomputed.clear()  # it has entries if the block has computed gradients itself
        self._look_at_caches()
        return output

    def _as_given(self, leaf: Any) -> Any:
        if is_cache(leaf):
            self.cached += watch(tensors_of(leaf))
            return copied(leaf)
        return leaf

    def _look_at_caches(self) -> None:
        """MisuseError if the copies of key/value caches are no longer what the first run was given."""
        if any(tensor._version != version for tensor, version in self.cached):
            raise MisuseError(
                f"{self.unit.label} was given a key/value cache whose tensors were written to since, so it cannot be "
                "recomputed: pass use_cache=False, or a cache that grows (transformers.DynamicCache)"
            )

    @override
    def pack(self, tensor: Tensor) -> int:
        if self.attention is not None and tensor.layout == torch.strided:
            self.attention.note_saved(tensor)
        self.forms.append((tensor.shape, tensor.dtype))
        return len(self.forms) - 1

    @override
    def rebuild(self, packed: int) -> Tensor:
        if packed not in self.recomputed:
            self._recompute()
        found = self.recomputed.pop(packed, None)
        if found is None:
            raise self._other_operations(f"saved {len(self.forms)} tensors in forward but fewer when recomputed")
        return Frame.rebuild(self, found)

    def _other_operations(self, what: str) -> MisuseError:
        return MisuseError(
            f"{self.unit.label} {what}: to be checkpointed its forward must do the same operations each time, and "
            "sdpa_kernel and requires_grad must be the same when backward runs"
        )

    def fresh_input(self, leaf: Any) -> Any:
        """What the second run is given in place of ``leaf``, so that it is no part of the first run's graph."""
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
            return leaf.detach().requires_grad_(leaf.requires_grad)
        return copied(leaf) if is_cache(leaf) else leaf

    def look_at_inputs(self) -> None:
        """Note whether an input has changed since the first run."""
        self.inputs_changed |= any(tensor._version != version for tensor, version in self.watched)

    def _recompute(self) -> None:
        self.look_at_inputs()
        if self.inputs_changed:
            raise self.written_over(INPUTS)
        self._look_at_caches()
        if self.modules.given_changed():
            raise self.written_over(GIVEN)
        if (name := self.modules.changed_table()) is not None:
            raise MisuseError(
                f"backward through {self.unit.label} needs its buffer {name} as it was in forward, but the buffer has "
                "changed since. This had not happened before, so no copy was made: run this step again, for which a "
                "copy will be made"
            )
        self.recomputed.clear()
        args, kwargs = map_leaves(self.fresh_input, (self.args, self.kwargs))
        attention = nullcontext() if self.attention is None else self.attention.again(self.fresh_input)
        running = [self]  # the second run's graph may outlive it, and must not keep the frame alive

        def unpack(index: int) -> Tensor:  # the block computes gradients itself
            assert running, "the recomputed graph has no backward of its own"
            return Frame.rebuild(running[0], running[0].recomputed[index])

        try:
            with (
                self.modules.again(),
                torch.enable_grad(),
                self.random_state,
                self.autocast.again(),
                saved_tensors_hooks(self._keep, unpack),
                attention,
                suppress(_Stop),  # the innermost, as contexts end sooner without an error
            ):
                self.function(*args, **kwargs)
        finally:
            running.clear()

    def _keep(self, tensor: Tensor) -> int:
        """Keep a tensor that the second run saves. Returns its number, which autograd saves in place of it."""
        recomputed, forms = self.recomputed, self.forms
        index = len(recomputed)
        if (tensor.shape, tensor.dtype) != forms[index]:
            first, second = self._form(*forms[index]), self._form(tensor.shape, tensor.dtype)
            raise self._other_operations(f"saved {first} in forward and {second} in its place when recomputed")
        recomputed[index] = Frame.pack(self, tensor)
        if index + 1 == len(forms):
            raise _Stop
        return index

    @staticmethod
    def _form(shape: torch.Size, dtype: torch.dtype) -> str:
        return f"a {dtype} tensor of shape {tuple(shape)}"


def watch(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """``tensors`` with their versions, without tensors that have none, and without parameters: see [Note: edits]."""
    return [(t, t._version) for t in tensors if not isinstance(t, nn.Parameter) and not t.is_inference()]


def detached(tensor: Tensor) -> Tensor:
    """``tensor`` without its graph, as an output that refers to its own node would never be freed.

    Dispatch modes do not see this operation. The engine has such a mode while a block is recomputed, and a call of it
    would take longer than everything else here.
    """
    if not torch._C._len_torch_dispatch_stack() or type(tensor) not in _ORDINARY:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


class _Autocast(NamedTuple):
    """What torch.autocast does to operators on one kind of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool

    @classmethod
    def of(cls, device_type: str) -> _Autocast:
        """The state now."""
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def again(self) -> AbstractContextManager[Any]:
        """A context in which the state is this one."""
        if not self.enabled and not torch.is_autocast_enabled(self.device_type):  # nearly always, so it must be fast
            return nullcontext()
        return torch.autocast(
            self.device_type, enabled=self.enabled, dtype=self.dtype, cache_enabled=self.cache_enabled
        )
