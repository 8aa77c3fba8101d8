"""The two classes a managed parameter switches between, so that no access goes wrong in silence.

A parameter keeps its identity: the optimizer's groups, the module and the autograd graph all hold the same object. What
changes is its data and its class:

- :class:`PresentParameter`: its data is a view of a chunk on the device. Everything works, except that gradients are
  not in ``.grad`` but in the chunk: what is there instead knows its norm and takes a factor.
- :class:`ReleasedParameter`: its data is one NaN element expanded to its shape, so shape, dtype and device stay true
  and cost nothing. Any operation on it raises an error that names the parameter and the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from protrain.engine.gradients.kept_gradient import KeptGradient
from protrain.engine.weights.metadata import METADATA
from protrain.errors import MisuseError
from protrain.trees import tensors_in

if TYPE_CHECKING:
    from protrain.engine.engine import Engine

_MOVED = "protrain_moved"  # an attribute
_RAW_DATA: Any = torch.Tensor.data
_RAW_GRAD: Any = torch.Tensor.grad
_RAW_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class Handle:
    """What a managed parameter knows of the engine.

    The reference is weak, like that of the gradient hooks: Python's collector does not see through a tensor that C++
    holds, and a model that the user drops must take its chunks with it.
    """

    def __init__(self, name: str, index: int, engine: Engine, *, trainable: bool) -> None:
        self.name = name
        self.index = index
        self.trainable = trainable  # required a gradient when the model was wrapped
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Engine:
        """The engine; MisuseError when model and optimizer are gone."""
        engine = self._engine()
        if engine is None:
            raise MisuseError(f"{self.name} belongs to a model that no longer exists: keep the model that was wrapped")
        return engine

    @property
    def gradient_pending(self) -> bool:
        """Whether the parameter has a gradient. What a backward that raised has not stored is none."""
        self.engine.abandon_backward()
        return self.engine.gradients.is_pending(self.index)

    @property
    def updated_inside(self) -> bool:
        """Whether backward has used the gradient up, and the step is not over."""
        return self.engine.members[self.index].chunk.index in self.engine.updated_inside


def _set_requires_grad(parameter: PresentParameter, value: bool) -> None:
    handle = parameter.protrain_handle
    if value and not handle.trainable:
        raise MisuseError(
            f"{handle.name} was frozen when the model was wrapped, so it has no optimizer states and would not be "
            "trained: set requires_grad before protrain.wrap, and wrap the model anew to train other parameters"
        )
    with torch._C.DisableTorchFunctionSubclass():
        _RAW_REQUIRES_GRAD.__set__(parameter, value)


class PresentParameter(nn.Parameter):
    """A managed parameter whose data is on the device now."""

    protrain_handle: Handle
    # As `detach` gives it, so that an edit through it counts as one of the parameter: see [Note: edits].
    data: Any = property(lambda parameter: parameter.detach(), _RAW_DATA.__set__)
    requires_grad: Any = property(_RAW_REQUIRES_GRAD.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze it, and train it again; MisuseError to train what was frozen when the model was wrapped."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """None while no gradient exists, a stand-in while it lies in a chunk; MisuseError when it is used up already.

        A hook that was registered before protrain.wrap (``register_post_accumulate_grad_hook``) comes before that: it
        has the gradient of this backward, and may change it.
        """
        if (arriving := _raw_grad(self)) is not None:
            return arriving
        handle = self.protrain_handle
        if handle.gradient_pending:
            return KeptGradient.of(handle, self.shape)
        if handle.updated_inside:
            raise MisuseError(
                f"the gradient of {handle.name} is gone: with step_during_backward=True its update was made inside "
                "backward. To clip or read gradients wrap with step_during_backward=False"
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if _raw_grad(self) is not None:
            _set_raw_grad(self, value)
            return
        handle = self.protrain_handle
        if isinstance(value, KeptGradient) and value.protrain_handle is handle and handle.gradient_pending:
            return  # parameter.grad *= factor
        if value is not None:
            raise MisuseError(f"the gradient of {handle.name} is kept in ProTrain's chunks and cannot be assigned")
        if handle.gradient_pending:
            handle.engine.forget_gradient(handle.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> PresentParameter:
        raise MisuseError(
            f"{self.protrain_handle.name} is managed by ProTrain, so the model cannot be copied or pickled whole: "
            "use model.state_dict(), which has the names and shapes of the unwrapped model"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})

    def _describe(self, **_: Any) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            return f"{type(self).__name__}({self.protrain_handle.name}, {tuple(self.shape)}, {self.dtype})"

    __repr__: Any = _describe


class ReleasedParameter(PresentParameter):
    """A managed parameter whose data is elsewhere: metadata works, everything else raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let metadata through; name the parameter and the remedy for anything else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            return _gradients(*args, **(kwargs or {}))
        if func is torch.autograd.backward:
            return _backward(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, ReleasedParameter):
                return cls.intercept(tensor, func, args, kwargs or {})
        raise AssertionError("a released parameter was dispatched without being an argument")

    @classmethod
    def intercept(cls, parameter: ReleasedParameter, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What happens on an operation that needs data."""
        operation = getattr(func, "__name__", str(func))
        raise MisuseError(
            f"parameter {parameter.protrain_handle.name} is not on the device here ({operation}): its values live in "
            "ProTrain's chunks between the modules that use it. Use `with protrain.full_parameters(model):` to read or "
            "edit it"
        )


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """``torch.autograd.grad``: of a released parameter only the place in the graph is needed."""
    places = _place(inputs) if isinstance(inputs, Tensor) else [_place(parameter) for parameter in inputs]
    return torch.autograd.grad(outputs, places, *args, **kwargs)


def _backward(tensors: Any, *, inputs: Any, **kwargs: Any) -> None:
    """``backward(inputs=...)``: likewise. What arrives there is taken as from any backward."""
    places = _place(inputs) if isinstance(inputs, Tensor) else [_place(parameter) for parameter in inputs]
    torch.autograd.backward(tensors, inputs=places, **kwargs)


def _place(parameter: Any) -> Any:
    if not isinstance(parameter, ReleasedParameter):
        return parameter
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(parameter)


def mark_moved(parameter: nn.Parameter) -> None:
    """The value of ``parameter`` lies in a chunk, and nowhere else. Until it is managed that may still fail."""
    vars(parameter)[_MOVED] = True


def has_moved(parameter: nn.Parameter) -> bool:
    """Whether the value went into a chunk of a wrap that failed afterwards, and is gone."""
    return _MOVED in vars(parameter)


def manage(parameter: nn.Parameter, handle: Handle) -> None:
    """Turn an ordinary parameter into a managed one."""
    vars(parameter).pop(_MOVED, None)
    parameter.__class__ = PresentParameter
    assert isinstance(parameter, PresentParameter)
    parameter.protrain_handle = handle


def point_at(parameter: nn.Parameter, data: Tensor) -> None:
    """Give ``parameter`` the device data ``data`` of its shape."""
    parameter.__class__ = PresentParameter
    parameter.data = data


def release(parameter: nn.Parameter, placeholder: Tensor) -> None:
    """Take the data of ``parameter`` away; ``placeholder`` is one NaN element on its device."""
    parameter.__class__ = PresentParameter
    parameter.data = placeholder.expand(parameter.shape)
    parameter.__class__ = ReleasedParameter


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Remove and return what autograd put into ``.grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _RAW_GRAD.__get__(parameter)
        _RAW_GRAD.__set__(parameter, None)
    return gradient


def _raw_grad(parameter: nn.Parameter) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _RAW_GRAD.__get__(parameter)
    return gradient


def _set_raw_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _RAW_GRAD.__set__(parameter, value)
