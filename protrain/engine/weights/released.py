"""A managed parameter that no unit uses now: it can be read, and it cannot be written.

[Note: reading] Scripts read parameters between forwards: for a term of the loss that is made of weights, an average of
them, a norm to print, or a fused head. The weight may then lie on the device or in host memory, and what is allowed
must not depend on that. So every operation that needs values is given a copy of the weight on the device, under every
plan. The copy is differentiable, and its gradient reaches the parameter as any other gradient does. If autograd saves a
view of the copy, the parameter and the form of the view (shape, stride, offset) are saved in its place, and backward
makes a new copy, so that no graph keeps weights on the device. A write into a copy would be lost, so it is an error. To
use a copy after a step has changed the weight is an error as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from protrain.common.errors import MisuseError
from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.states.parameter_state import read_weight
from protrain.engine.weights.handle import AUTOGRAD, HOOKS, LAYOUT, METADATA, PATTERNS, Handle, as_contiguous, on_itself
from protrain.engine.weights.parameter import PresentParameter, edit_error, memory_error, set_data
from protrain.engine.weights.views import ViewForm, storage_address
from protrain.forward.dispatch import RuntimeMode

# Methods that give a tensor other memory, or hand out its own.
_MEMORY = frozenset(getattr(Tensor, name) for name in ("share_memory_", "untyped_storage", "storage", "_typed_storage"))


class ReleasedParameter(PresentParameter):
    """A managed parameter that no unit uses now. See [Note: reading]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions for metadata; give copies of the weight to everything else."""
        if func in METADATA or func in HOOKS or _reads_no_values(func, args, kwargs):
            return on_itself(func, args, kwargs)
        if func in (torch.autograd.grad, torch.autograd.backward):  # they need no values of inputs but their edges
            args, kwargs = map_leaves(_edge, (args, kwargs or {}))
            return func(*args, **kwargs)
        tensor = next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, ReleasedParameter))
        return tensor.intercept(func, args, kwargs or {})

    def intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``, which needs more than metadata, on a copy of the weight."""
        if func in LAYOUT:  # the copy is contiguous
            return as_contiguous(func, *args, **kwargs)
        handle = self.protrain_handle
        if func is Tensor.data_ptr:  # libraries recognise tied parameters by it
            member = handle.engine.members[handle.index]
            return member.view(member.chunk.weight).data_ptr()
        if func is torch._cudnn_rnn_flatten_weight:  # it would move the weights
            return None
        if func is Tensor.view_as and args[1] is args[0] and torch.is_grad_enabled() and self.requires_grad:
            # Autograd asks so for the node of a parameter (register_multi_grad_hook, get_gradient_edge), and expects
            # that what it gets has been made by one operation.
            return _read(lambda parameter: parameter, args[:1], {})
        if func in _MEMORY:
            raise memory_error(handle.name, func.__name__)
        return _read(func, args, kwargs)


def _set_full_data(parameter: FullParameter, data: Tensor) -> None:
    parameter.protrain_full = data.detach()


class FullParameter(PresentParameter):
    """A managed parameter inside full_parameters: it stands for a copy of the weight on the CPU that may be edited.

    The copy is an attribute and not the data of the parameter, because autograd forgets where to accumulate a gradient
    when the data of a parameter changes to another device. A graph that is made inside has views of the copy, and its
    gradient is moved to the device of the parameter.

    If the model is on a GPU, all operations are given one view of the copy. Backward runs them on the CPU while another
    thread runs the GPU's operations. So their gradients are added up first, as autograd does for one view. If each of
    them were added to the GPU's gradient when it is there, the sum would have other bits whenever the other thread is
    faster.
    """

    protrain_full: Tensor
    protrain_view: tuple[Tensor, int, Tensor] | None = None  # the copy, the version of the weights, and the view of it
    data: Any = property(lambda parameter: parameter.protrain_full.detach(), _set_full_data)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the copies of the weights."""
        if func in HOOKS or func in AUTOGRAD:
            return on_itself(func, args, kwargs)
        args, kwargs = map_leaves(_viewed, (args, kwargs or {}))
        return func(*args, **kwargs)


class WeightCopy(Tensor):
    """A copy of a weight, or a view of such a copy, that a script has got. It may be read until the weight changes."""

    protrain_source: _Source

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``. MisuseError if it writes into the copy, or if the weight has changed since."""
        if func in METADATA:
            return on_itself(func, args, kwargs)
        return _read(func, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class _Source:
    """The parameter of which a copy was made, and the version of the weights that the copy has."""

    handle: Handle
    weights_version: int

    @classmethod
    def now(cls, handle: Handle) -> _Source:
        return cls(handle, handle.engine.weights_version)

    def check(self, what: str) -> None:
        """MisuseError if the weight has changed since."""
        if self.handle.engine.weights_version != self.weights_version:
            raise MisuseError(
                f"{what} {self.handle.name}, which optimizer.step() or an edit has changed since: read the parameter "
                "anew, or keep parameter.detach().clone() if old values are needed, and call backward() before step()"
            )


def weight_of(handle: Handle) -> Tensor:
    """A copy of the weight on the device. Waits for the update of its chunk."""
    engine = handle.engine
    engine.reset()
    member = engine.members[handle.index]
    chunk = member.chunk
    if engine.buffers.in_use(chunk):
        return engine.buffers.used(chunk).view(member).clone()
    if chunk.ranks.several and engine.collective_reads:
        chunk.ranks.meet(f"a read of {handle.name}")
        with engine.quiet():
            return read_weight(member).to(engine.memory.device)
    if chunk.ranks.several:
        raise MisuseError(
            f"{handle.name} is read outside of its forward, and each rank has a part of it: read it inside `with "
            "protrain.full_parameters(...)`, which all ranks enter. DistributedDataParallel reads it too: do without "
            "that, as protrain.wrap reduces gradients over all ranks"
        )
    chunk.wait_for_update()
    return member.view(chunk.current_weight).to(engine.memory.device, copy=True)


class _OnCPU(torch.autograd.Function):
    """A view of ``full``, the copy of a weight on the CPU. Its gradient, moved to the device, is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, full: Tensor, source: _Source) -> Tensor:
        ctx.device, ctx.source = parameter.device, source
        return full.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.source.check("backward through a copy of")
        return gradients[0].to(ctx.device), None, None


def _viewed(leaf: Any) -> Any:
    if not isinstance(leaf, FullParameter):
        return leaf
    if not (torch.is_grad_enabled() and leaf.requires_grad):
        return leaf.protrain_full.detach()
    full, source = leaf.protrain_full, _Source.now(leaf.protrain_handle)
    known = leaf.protrain_view
    if known is not None and known[0] is full and known[1] == source.weights_version:
        return known[2]
    view = _OnCPU.apply(leaf, full, source)
    if source.handle.engine.memory.device.type != "cpu":
        leaf.protrain_view = full, source.weights_version, view
    return view


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` with copies in place of the released parameters among its arguments."""
    copies = _Copies()
    args, kwargs = map_leaves(copies.given, (args, kwargs))
    with copies.saving(), RuntimeMode():
        result = func(*args, **kwargs)
    copies.refuse_writes()
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return map_leaves(copies.handed_out, result)


def _reads_no_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Whether ``func`` reads the shape, the type and the device of a released parameter, and values of none."""
    at = PATTERNS.get(func)
    if at is None:
        return False
    others = tensors_in((*args[:at], *args[at + 1 :], kwargs))
    return not any(isinstance(tensor, ReleasedParameter | WeightCopy) for tensor in others)


class _Copies:
    """The copies of weights that one operation is given."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}  # by the id of the released parameter
        self._sources: dict[int, _Source] = {}  # by the address of the storage
        self._versions: list[tuple[Tensor, int, _Source]] = []
        self.buffers: Any = None  # of the engine, by which it knows its hooks

    def given(self, leaf: Any) -> Any:
        """What the operation is given in place of ``leaf``."""
        if isinstance(leaf, ReleasedParameter):
            if id(leaf) not in self._made:
                self._made[id(leaf)] = self._copy(leaf)
            return self._made[id(leaf)]
        if isinstance(leaf, WeightCopy):
            leaf.protrain_source.check("a use of a copy of")
            with torch._C.DisableTorchFunctionSubclass():
                plain = leaf.as_subclass(Tensor)
            return self._watched(plain, leaf.protrain_source)
        return leaf

    def saving(self) -> Any:
        """A context in which autograd saves no copies of weights. Inside a unit the hooks of its frame do that."""
        graph = any(tensor.requires_grad for tensor, _, _ in self._versions)
        hooks: Any = torch._C._autograd
        free = hooks._saved_tensors_hooks_is_enabled() and hooks._top_saved_tensors_default_hooks(True) is None
        return saved_tensors_hooks(self._pack, _unpack) if graph and free else nullcontext()

    def refuse_writes(self) -> None:
        """MisuseError if the operation has written into a copy, as the weight would not change."""
        for tensor, version, source in self._versions:
            if _version(tensor) != version:
                raise edit_error(source.handle.name, "changed in place")

    def handed_out(self, leaf: Any) -> Any:
        """What the script gets for a result of the operation: a WeightCopy if that shares memory with a copy."""
        source = self._source_of(leaf)
        if source is not None:
            leaf.__class__ = WeightCopy
            leaf.protrain_source = source
        return leaf

    def _copy(self, parameter: ReleasedParameter) -> Tensor:
        source = _Source.now(parameter.protrain_handle)
        # Tensors that are made in inference mode have no versions.
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            copy = weight_of(source.handle)
            if torch.is_grad_enabled() and parameter.requires_grad:
                # This takes no memory, and is no view for autograd, so that it has a version of its own.
                in_graph = torch.ops.aten._unsafe_view(parameter, parameter.shape)
                set_data(in_graph, copy)
                copy = in_graph
        return self._watched(copy, source)

    def _watched(self, tensor: Tensor, source: _Source) -> Tensor:
        self._sources[storage_address(tensor)] = source
        self.buffers = source.handle.engine.buffers
        self._versions.append((tensor, _version(tensor), source))
        return tensor

    def _source_of(self, leaf: Any) -> _Source | None:
        return self._sources.get(storage_address(leaf)) if isinstance(leaf, Tensor) and leaf.numel() else None

    def _pack(self, tensor: Tensor) -> Any:
        source = self._source_of(tensor)
        return tensor.detach() if source is None else (source, ViewForm.of(tensor))


def _version(tensor: Tensor) -> int:
    """The version of ``tensor``. A view of another type that is made in inference mode has none."""
    return 0 if tensor.is_inference() else tensor._version


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    source, form = packed
    source.check("backward through a copy of")
    return form.on(weight_of(source.handle).view(-1))


def _edge(parameter: Any) -> Any:
    """The edge in the graph that stands for ``parameter``; anything else as it is."""
    if not isinstance(parameter, ReleasedParameter):
        return parameter
    return on_itself(get_gradient_edge, (parameter,))


def make_full(parameter: nn.Parameter, copy: Tensor) -> None:
    """Let ``parameter`` stand for ``copy`` on the CPU, inside full_parameters."""
    vars(parameter)["protrain_full"] = copy
    parameter.__class__ = FullParameter


def end_full(parameter: nn.Parameter) -> None:
    """End what ``make_full`` began."""
    for name in ("protrain_full", "protrain_view"):  # one is absent if there was no memory for it, one if nobody asked
        vars(parameter).pop(name, None)
    parameter.__class__ = ReleasedParameter
