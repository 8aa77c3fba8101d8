"""Stand-ins for a model's parameters and buffers during a trace: on the device, in the training dtype, on demand.

The model can be far larger than the device, and it must come out of the trace bit for bit as it went in. So the trace
never touches its tensors. Every parameter is replaced by a stand-in whose storage is filled before it is needed and
emptied afterwards. Every buffer is replaced by a copy. [Note: emptied storages] A storage that is emptied and filled
again is the same storage to autograd. So views that an operation saved (F.linear saves weight.t()) stay valid without
any hook.

[Note: uses outside blocks] A model may use weights outside the calls of the blocks that own them. The trace finds such
uses and fills these weights, too. ``Uses`` watches the operations that take parameters, and so finds which unit uses
which parameter. A model may also run a backward inside its own forward (torch.autograd.grad), which belongs to the
segment that it runs in. The weights of a block that it goes through are then filled, and stay so until the trace ends.
With ``create_graph=True`` the graph of the gradients holds the weights until the backward of the step. Then they count
as activations, because the engine copies weights that lie in chunk buffers
(``protrain.engine.activations.saved.Frame.tensor_of``).
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from protrain.common.errors import NO_WRITES
from protrain.common.parameters import is_managed, moved, plain_tensors
from protrain.common.trees import replace_leaves, tensors_in
from protrain.forward.compilation import replace_attributes
from protrain.forward.module_state import TABLE_ELEMENTS
from protrain.profiler.memory_meter import Meter
from protrain.profiler.operations import memory_in, storage_key

# Where the code lies whose frames see each operation: this package, and torch's calls of operators.
_WATCHING = os.path.join(os.path.dirname(os.path.dirname(__file__)), ""), str(torch._ops.__file__)


def _accept_own_memory(stand_in: Tensor) -> Callable[..., Tensor]:
    """What ``set_`` of ``stand_in`` is: as of a managed parameter (``PresentParameter.set_``).

    It is no method of a class, because torch.compile treats other classes than Parameter in another way.
    """
    own = weakref.ref(stand_in)  # so that the stand-in goes with its last user

    def set_(source: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        tensor = own()
        assert tensor is not None
        return tensor if source is tensor else Tensor.set_(tensor, source, *args, **kwargs)

    return set_


class StandInWeights:
    """The stand-ins of ``model``'s managed (floating-point) parameters, by index in definition order.

    Use it as a context manager: inside, the model holds the stand-ins, and afterwards its own tensors, untouched. Up to
    ``spare_bytes`` of stand-ins stay filled when they should be emptied, because filling takes time.

    On a GPU matrices have random values, which takes less time than to copy them from the host. Vectors have the
    model's own. A forward may need these, such as a scale that is positive.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, *, spare_bytes: int = 0) -> None:
        self.originals = [parameter for parameter in model.parameters() if is_managed(parameter)]
        self.device = device
        self.meter: Meter | None = None  # what measures the memory of the step now
        self._model = model
        self.dtype = dtype
        self._filled: set[int] = set()
        self._kept: set[int] = set()  # what stays filled until the end
        self._held: set[int] = set()  # what the meter counts
        self._spare_bytes = spare_bytes
        self.stand_ins = [self._stand_in_for(parameter) for parameter in self.originals]
        self.index = {id(stand_in): index for index, stand_in in enumerate(self.stand_ins)}
        self._of_weights = {storage_key(stand_in) for stand_in in self.stand_ins}
        # from the id of each of the model's own tensors to what takes its place
        self._replacements: dict[int, Tensor] = dict(zip(map(id, self.originals), self.stand_ins, strict=True))
        self._unmanaged: list[Tensor] = []  # copies of buffers and of unmanaged parameters
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in self._replacements:
                self._replacements[id(tensor)] = self._copied(tensor)
                self._unmanaged.append(self._replacements[id(tensor)])
        pairs = [(buffer, self._replacements[id(buffer)]) for buffer in model.buffers()]
        self._buffers = [(original, buffer, buffer._version) for original, buffer in pairs]

    def measured_by(self, meter: Meter | None) -> None:
        """Use ``meter`` from now on, which does not count the stand-ins."""
        self.meter = meter
        if meter is not None:
            meter.ignore((*self.stand_ins, *self.originals, *self.unmanaged_memory()))

    def fill(self, indexes: Iterable[int]) -> None:
        """Fill the stand-ins of the parameters ``indexes``."""
        wanted = [index for index in indexes if index not in self._filled]
        if not wanted or self.device.type == "meta":
            return
        with self.unobserved():
            self._fill(wanted)

    def empty(self, indexes: Iterable[int]) -> None:
        """Empty the stand-ins of the parameters ``indexes``, except those to keep and those that spare memory holds."""
        unwanted = []
        for index in indexes:
            if index not in self._filled or index in self._kept:
                continue
            size_bytes = self.stand_ins[index].nbytes
            if size_bytes <= self._spare_bytes:
                self._spare_bytes -= size_bytes
                self._kept.add(index)
            else:
                unwanted.append(index)
        if unwanted:
            with self.unobserved():
                self._free(unwanted)

    def filled(self, index: int) -> bool:
        """Whether the stand-in of the parameter ``index`` is filled."""
        return index in self._filled

    def keep(self, indexes: Collection[int]) -> None:
        """Fill the parameters ``indexes`` and never empty them."""
        self._kept.update(indexes)
        self.fill(indexes)

    def hold(self, indexes: Collection[int]) -> None:
        """Keep the parameters ``indexes`` for a graph of gradients. The meter counts them, once each, until the end."""
        self.keep(indexes)
        if self.meter is not None:
            self.meter.hold(sum(self.stand_ins[index].nbytes for index in {*indexes} - self._held))
            self._held.update(indexes)

    def put_back_buffers(self) -> None:
        """Give buffers that a step has changed the values of the model's own again, for the next step to start alike.

        Large buffers are nearly always masks and tables, so they are put back only if autograd counted a change.
        """
        with torch.no_grad(), self.unobserved():
            for original, buffer, version in self._buffers:
                if not buffer.is_meta and (buffer._version != version or buffer.numel() <= TABLE_ELEMENTS):
                    buffer.data = self._copied(original)

    def handed_on(self, output: Any) -> Any:
        """``output`` of a block with copies of the views of weights in it, as the engine makes them.

        The weights have no memory while the next block runs, and to read them would end the process.
        """

        def one(leaf: Any) -> Any:
            is_view = not self._of_weights.isdisjoint(map(storage_key, memory_in(leaf)))
            return leaf.clone() if is_view else leaf

        return replace_leaves(one, output)

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Inside, the meter counts nothing, and an operation is not taken for the model's use of a parameter."""
        with torch._C.DisableTorchFunction(), nullcontext() if self.meter is None else self.meter.managed():
            yield

    def refuse_writes(self) -> None:
        """Raise a ValueError if the model changed a parameter in place, as autograd counts changes.

        A parameter that was given other data is not refused here, as recurrent modules do that with equal values. The
        engine, which has the values, checks it.
        """
        written = {id(stand_in) for stand_in in self.stand_ins if stand_in._version}
        # cuDNN gives the weights of recurrent modules one storage, and that may count as a change.
        recurrent = (module for module in self._model.modules() if isinstance(module, nn.RNNBase))
        written -= {id(parameter) for module in recurrent for parameter in module.parameters(recurse=False)}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in written:
                raise ValueError(
                    f"the forward of {type(self._model).__name__} changes its parameter {name} in place, and other "
                    f"copies of the parameter would not get the change. Remove the change ({NO_WRITES}), or make it "
                    "after step(), inside `with protrain.full_parameters(model):`. If only the first forward makes it, "
                    "call the model once before"
                )

    def unmanaged_memory(self) -> list[Tensor]:
        """The plain tensors that buffers and unmanaged parameters consist of, or keep in attributes."""
        return plain_tensors(self._unmanaged)

    def storages(self) -> set[StorageWeakRef]:
        """The storages of all stand-ins, buffers and unmanaged parameters."""
        return {storage_key(tensor) for tensor in (*self.stand_ins, *self.unmanaged_memory())}

    def __enter__(self) -> StandInWeights:
        held = [replaced for module in self._model.modules() for replaced in self._held_by(module)]
        self._put_back = replace_attributes(held)
        if self.device.type == "cuda":
            self.keep([index for index, original in enumerate(self.originals) if original.ndim < 2])
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        self._put_back()
        self._free(list(self._filled))
        if trace is not None:
            self._hide_emptied(trace)

    def _held_by(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
        """What ``module`` holds meanwhile, each with the attribute. Its own dictionaries and lists stay as they are."""
        for kind in ("_parameters", "_buffers"):
            yield module, kind, {name: self._in_place_of(tensor) for name, tensor in vars(module)[kind].items()}
        if isinstance(module, nn.RNNBase):
            weights = [self._in_place_of(tensor) for tensor in module._flat_weights]
            yield module, "_flat_weights", weights
            # If these change, the module gives its weights a storage of their own.
            yield module, "_flat_weight_refs", [tensor if tensor is None else weakref.ref(tensor) for tensor in weights]

    def _in_place_of(self, tensor: Tensor | None) -> Tensor | None:
        return self._replacements.get(id(tensor), tensor)

    def _hide_emptied(self, trace: TracebackType) -> None:
        """Let pytest and debuggers print the frames of an error. To print a tensor whose storage is empty is a crash.

        Frames of the model have stand-ins, and those of what watches operations have other tensors of their storages.
        """
        for stand_in in self.stand_ins:
            stand_in.data = stand_in.data.new_empty(0)
        for frame, _ in walk_tb(trace):
            if frame.f_code.co_filename.startswith(_WATCHING):
                with suppress(RuntimeError):  # it is still running
                    frame.clear()

    def _fill(self, indexes: list[int]) -> None:
        for index in indexes:
            stand_in, original = self.stand_ins[index], self.originals[index]
            stand_in.untyped_storage().resize_(stand_in.numel() * stand_in.element_size())
            # It writes to .data, because autograd must not take filling for a change of a saved tensor.
            if original.is_meta or (self.device.type == "cuda" and original.ndim > 1):
                # Every fill gives the same values. Otherwise a router would choose other experts in the recomputation.
                generator = torch.Generator(self.device).manual_seed(index)
                stand_in.data.normal_(0.0, 0.02, generator=generator)
            else:
                stand_in.data.copy_(original.data)
            self._filled.add(index)

    def _free(self, indexes: list[int]) -> None:
        for index in indexes:
            self.stand_ins[index].untyped_storage().resize_(0)
            self._filled.discard(index)

    def _stand_in_for(self, parameter: nn.Parameter) -> nn.Parameter:
        data = torch.empty(parameter.shape, dtype=self.dtype, device=self.device)
        if self.device.type != "meta":
            data.untyped_storage().resize_(0)
        stand_in = nn.Parameter(data, requires_grad=parameter.requires_grad)
        stand_in.__dict__.update(parameter.__dict__, set_=_accept_own_memory(stand_in))
        return stand_in

    def _copied(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):  # nothing writes to it
            # Moving may change the objects that its attributes refer to, and the model must keep those.
            return tensor if tensor.device == self.device else moved(_with_attributes(tensor), self.device)
        if tensor.is_meta and self.device.type != "meta":
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)
        return tensor.detach().clone().to(self.device)


def _with_attributes(parameter: nn.Parameter) -> nn.Parameter:
    """A copy of ``parameter`` with copies of its attributes."""
    copied = copy.deepcopy(parameter)
    for name, value in vars(parameter).items():
        if name not in vars(copied):  # deepcopy() of an ordinary parameter leaves out all attributes
            vars(copied)[name] = copy.deepcopy(value)
    return copied


# Functions that need only the place of a parameter in the graph, not its values.
_PLACES = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
# Attributes that are tensors made of the values. All others, such as the shape, describe the parameter.
_VALUES = frozenset([getattr(Tensor, name).__get__ for name in ("data", "T", "H", "mT", "mH", "real", "imag")])
_DATA: Any = Tensor.data


class Uses(TorchFunctionMode):
    """Calls ``used`` for every parameter in ``index`` (by id) that an operation takes, whoever calls the operation.

    ``Uses`` also calls ``differentiated`` when gradients are computed with ``create_graph=True``.
    """

    def __init__(self, index: dict[int, int], used: Callable[[int], None], differentiated: Callable[[], None]) -> None:
        super().__init__()
        self._index = index
        self._used = used
        self._differentiated = differentiated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` after its parameters are filled."""
        kwargs = kwargs or {}
        if func is torch.autograd.grad and kwargs.get("create_graph"):
            self._differentiated()
        found = [self._index[id(tensor)] for tensor in tensors_in((args, kwargs)) if id(tensor) in self._index]
        if not found or func in _PLACES:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__" or func in _VALUES:
            for index in found:
                self._used(index)
        # Autograd counts no in-place changes of .data. A detached tensor shares the parameter's count of them.
        return args[0].detach() if func == _DATA.__get__ else func(*args, **kwargs)
