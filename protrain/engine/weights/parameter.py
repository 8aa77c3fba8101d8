"""A managed parameter: what it knows of the engine, its gradient, and how its data may be changed.

A parameter keeps its identity: the optimizer's groups, the module and the autograd graph all hold the same object. What
changes is its data and its class. While a unit that uses it runs it is a :class:`PresentParameter`, whose data is a
view of a chunk on the device: everything works as with any parameter, except that its gradient is not in ``.grad`` but
in the chunk. The other classes are in :mod:`protrain.engine.weights.released`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.engine.gradients.kept_gradient import KeptGradient
from protrain.engine.states.chunks import Member
from protrain.engine.weights.handle import Handle

_MOVED = "protrain_moved"  # an attribute
_RAW_DATA: Any = torch.Tensor.data
_RAW_GRAD: Any = torch.Tensor.grad
_RAW_REQUIRES_GRAD: Any = torch.Tensor.requires_grad


class GradientHook:
    """The engine's own hook on a parameter, which takes the gradient away: it is the last to be called."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def __call__(self, parameter: Tensor) -> None:
        """Autograd has accumulated the whole gradient of ``parameter``."""
        self._handle.engine.gradient_ready(self._handle.index)


def _set_requires_grad(parameter: PresentParameter, value: bool) -> None:
    handle = parameter.protrain_handle
    if value and not handle.trainable:
        raise MisuseError(
            f"{handle.name} was frozen when the model was wrapped, so it has no optimizer states and would not be "
            "trained: set requires_grad before protrain.wrap, and wrap the model anew to train other parameters"
        )
    with torch._C.DisableTorchFunctionSubclass():
        _RAW_REQUIRES_GRAD.__set__(parameter, value)


def _replace_data(parameter: PresentParameter, value: Tensor) -> None:
    """``parameter.data = value``: the same values elsewhere do no harm, as the parameter stays where it is."""
    kept = parameter.detach()
    if value.dtype != kept.dtype or value.shape != kept.shape or not same_bits(value.detach().to(kept.device), kept):
        raise edit_error(parameter.protrain_handle.name, "replaced")


class PresentParameter(nn.Parameter):
    """A managed parameter that a unit uses now."""

    protrain_handle: Handle
    # As `detach` gives it, so that an edit through it counts as one of the parameter: see [Note: edits].
    data: Any = property(lambda parameter: parameter.detach(), _replace_data)
    requires_grad: Any = property(_RAW_REQUIRES_GRAD.__get__, _set_requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Freeze it, and train it again; MisuseError to train what was frozen when the model was wrapped."""
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """None while no gradient exists, a stand-in while it lies in a chunk; MisuseError when it is used up already.

        A hook (``register_post_accumulate_grad_hook``) comes before that: it has the gradient of this backward, and may
        change it.
        """
        handle = self.protrain_handle
        if (arriving := raw_gradient(self)) is not None:
            if not handle.engine.in_backward:
                raise foreign_gradient(handle.name)
            return arriving
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
        if raw_gradient(self) is not None:
            _set_raw_gradient(self, value)
            return
        handle = self.protrain_handle
        if isinstance(value, KeptGradient) and value.protrain_handle is handle and handle.gradient_pending:
            return  # parameter.grad *= factor
        if value is not None:
            raise MisuseError(f"the gradient of {handle.name} is kept in ProTrain's chunks and cannot be assigned")
        if handle.gradient_pending:
            handle.engine.forget_gradient(handle.index)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Have ``hook`` called with the gradient of a backward in ``.grad``, before that goes into a chunk."""
        handle = super().register_post_accumulate_grad_hook(hook)
        hooks: Any = self._post_accumulate_grad_hooks
        last = next((key for key, known in hooks.items() if isinstance(known, GradientHook)), None)
        if last is not None:
            hooks[last] = hooks.pop(last)  # autograd calls them in the order in which they were put in
        return handle

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


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Remove and return what autograd put into ``.grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _RAW_GRAD.__get__(parameter)
        _RAW_GRAD.__set__(parameter, None)
    return gradient


def raw_gradient(parameter: nn.Parameter) -> Tensor | None:
    """What autograd, or somebody else, has put into ``.grad``."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _RAW_GRAD.__get__(parameter)
    return gradient


def _set_raw_gradient(parameter: nn.Parameter, value: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _RAW_GRAD.__set__(parameter, value)


def raw_data(parameter: nn.Parameter) -> Tensor:
    """The data of ``parameter``, past all checks."""
    with torch._C.DisableTorchFunctionSubclass():
        data: Tensor = _RAW_DATA.__get__(parameter)
    return data


def set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Give ``parameter`` other data of its shape, past all checks: the engine's own way."""
    with torch._C.DisableTorchFunctionSubclass():
        _RAW_DATA.__set__(parameter, data)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether tensors of one dtype and shape are equal bit for bit, so that NaN equals itself."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def foreign_gradient(name: str) -> MisuseError:
    """What to say when somebody else has put a gradient into ``.grad`` of the parameter ``name``."""
    return MisuseError(
        f"something other than ProTrain has put a gradient into .grad of {name}, where no step would use it: "
        "DistributedDataParallel and its like do so. Train the model that protrain.wrap returned as it is, without "
        "another wrapper around it or inside it"
    )


def refuse_foreign_gradients(members: Iterable[Member]) -> None:
    """MisuseError where something else has left a gradient in the ``.grad`` of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        for member in members:
            if _RAW_GRAD.__get__(member.parameter) is not None:
                raise foreign_gradient(member.name)


def edit_error(name: str, how: str) -> MisuseError:
    """What to say when the data of the parameter ``name`` was ``how``."""
    return MisuseError(
        f"the data of {name} was {how} outside `with protrain.full_parameters(model):`, which is where the values of "
        "managed parameters can be edited, between steps; a forward must leave them as they are"
    )
