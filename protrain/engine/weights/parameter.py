"""A managed parameter: its gradient, and how its data may be changed.

A parameter keeps its identity, so that the optimizer's groups, the module and the autograd graph all have the same
object. What changes is its data and its class. While a unit that uses it runs it is a ``PresentParameter``, whose
data is a view of a chunk on the device. Everything works then as with any parameter, except that its gradient is in the
chunk and not in ``.grad``. The other classes are in ``protrain.engine.weights.released``.

[Note: pending loads] Where ``protrain.wrap`` is given no example batch, there are no chunks to load a checkpoint into
before the first call of the model. Until then a parameter has the value from before the load. Nothing may read that,
and what is written to it would be lost, so both are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from protrain.common.errors import NO_WRITES, MisuseError
from protrain.common.parameters import same_bytes
from protrain.common.trees import tensors_in
from protrain.engine.states.chunks import Member
from protrain.engine.weights.handle import AUTOGRAD, HOOKS, LAYOUT, METADATA, GradientProxy, Handle, describe, on_itself

_MOVED = "protrain_moved"  # name of an attribute
# It gives a parameter other data of its shape, without any check. Only the engine may call it, where torch functions of
# subclasses are disabled.
set_data: Any = cast(Any, torch.Tensor.data).__set__
_RAW_GRAD: Any = torch.Tensor.grad
# What may be asked of a parameter before its values are loaded, or done to it: see [Note: pending loads].
_ALLOWED = frozenset([*METADATA, *AUTOGRAD, *HOOKS, *LAYOUT, _RAW_GRAD.__get__, _RAW_GRAD.__set__])


def _replace_data(parameter: PresentParameter, value: Tensor) -> None:
    """``parameter.data = value``. Equal values are accepted, and the parameter stays where it is."""
    if not same_bytes(value.detach().to(parameter.device), parameter.detach()):
        raise edit_error(parameter.protrain_handle.name, "replaced")


class PresentParameter(nn.Parameter):
    """A managed parameter that a unit uses now."""

    protrain_handle: Handle
    # The data is what `detach` returns, so that an edit of it counts as an edit of the parameter: see [Note: edits].
    data: Any = property(lambda parameter: parameter.detach(), _replace_data)

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The memory of the parameter is its chunk's. Only its own is accepted: ``register_parametrization`` gives it.

        peft does so in the forward of a layer with ``target_parameters``.
        """
        if source is not self:
            raise memory_error(self.protrain_handle.name, "set_")
        return self

    @property
    def grad(self) -> Tensor | None:
        """None if there is no gradient, and a stand-in if the gradient lies in a chunk.

        In a hook (``register_post_accumulate_grad_hook``) it is the gradient of the first backward of a step, which the
        hook may change. A second backward would need the sum there, as in torch, and is refused.

        Raises:
            MisuseError: an update inside backward has used the gradient up, something else has put one here, or this is
                a hook and the gradient is not the first one of the step.
        """
        if (arriving := self._arriving()) is not None:
            return arriving
        handle = self.protrain_handle
        pending, member = handle.engine.gradient_pending(handle.index), handle.engine.members[handle.index]
        refuse_foreign_gradients([member])
        if pending:
            return GradientProxy.of(handle, self.shape)
        if member.chunk.index in handle.engine.updates.updated_inside:
            raise MisuseError(
                f"the gradient of {handle.name} is gone: with step_during_backward=True its update was made inside "
                "backward. To clip or read gradients wrap with step_during_backward=False"
            )
        return None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._arriving() is not None or raw_gradient(self) is not None:
            on_itself(_RAW_GRAD.__set__, (self, value))
            return
        handle = self.protrain_handle
        pending = handle.engine.gradient_pending(handle.index)
        if isinstance(value, GradientProxy) and value.protrain_handle is handle and pending:
            return  # parameter.grad *= factor
        if value is not None:
            raise MisuseError(
                f"the gradient of {handle.name} is kept in ProTrain's chunks and cannot be assigned: let "
                "loss.backward() make it, and change it in parameter.register_post_accumulate_grad_hook, or in "
                "parameter.register_hook where a step has several backward() calls"
            )
        if pending:
            handle.engine.forget_gradient(handle.index)

    def _arriving(self) -> Tensor | None:
        """The gradient with which a hook is called now. MisuseError if torch would add it to an earlier one first."""
        gradient, handle = raw_gradient(self), self.protrain_handle
        if gradient is None or torch._C._current_graph_task_id() == -1:
            return None
        handle.engine.begin_backward()  # the hook may come before everything else that tells of this backward
        # A backward inside this one, as of a checkpoint, may have brought an earlier gradient.
        if handle.engine.gradient_pending(handle.index):
            refuse_hooks_on_sums(handle.engine.members, {handle.index})
        return gradient

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Have ``hook`` called with the first gradient of a step in ``.grad``, before it goes into a chunk."""
        handle = super().register_post_accumulate_grad_hook(hook)
        hooks: Any = self._post_accumulate_grad_hooks
        for key in [key for key, known in hooks.items() if known == self.protrain_handle.gradient_ready]:
            hooks[key] = hooks.pop(key)  # autograd calls hooks in the order of insertion
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> PresentParameter:
        raise MisuseError(
            f"{self.protrain_handle.name} is managed by ProTrain, so the model cannot be copied or pickled whole: "
            "use model.state_dict(), which has the names and shapes of the unwrapped model, make copies before "
            "protrain.wrap, and average weights (EMA) with protrain.AveragedWeights"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({})

    __repr__: Any = describe


def mark_moved(parameter: nn.Parameter) -> None:
    """Note that the value of ``parameter`` lies in a chunk only, so that it is gone if the wrap fails."""
    vars(parameter)[_MOVED] = True


def has_moved(parameter: nn.Parameter) -> bool:
    """Whether the value was moved into a chunk by a wrap that then failed, so that it is gone."""
    return _MOVED in vars(parameter)


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Remove the tensor in ``.grad`` and return it."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient: Tensor | None = _RAW_GRAD.__get__(parameter)
        _RAW_GRAD.__set__(parameter, None)
    return gradient


def receives_gradient(parameter: nn.Parameter) -> bool:
    """Whether the backward that runs now, and calls this, accumulates a gradient of ``parameter`` in ``.grad``."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(parameter).node))
    except RuntimeError:  # it is frozen, or torch.autograd.grad was asked for its gradient and returns it
        return False


def refuse_hooks_on_sums(members: Sequence[Member], summed: set[int]) -> None:
    """MisuseError if the backward that runs now would call a hook of the user for any of the ``summed`` members.

    They have gradients, to which torch would add those of this backward before it calls the hooks. The sums lie in
    chunks, perhaps on other ranks, and are not whole while backward runs.
    """
    with torch._C.DisableTorchFunctionSubclass():
        hooked = [m for m in members if m.index in summed and len(m.parameter._post_accumulate_grad_hooks or ()) > 1]
    for member in hooked:  # by more than the engine
        if receives_gradient(member.parameter):
            for each in members:  # nothing is left behind, even if a hook is just called
                take_gradient(each.parameter)
            raise MisuseError(
                f"{member.name} has a hook (register_post_accumulate_grad_hook) and a gradient of an earlier "
                "backward(), to which torch would add this one before it calls the hook. ProTrain keeps such sums in "
                "its chunks, so the hook cannot have them: see or change the gradient of each backward() in a tensor "
                "hook (parameter.register_hook), make one backward() between calls of zero_grad(), or clip the sums "
                "with optimizer.clip_grad_norm_()"
            )


def raw_gradient(parameter: nn.Parameter) -> Tensor | None:
    """The tensor that autograd, or other code, has put into ``.grad``."""
    gradient: Tensor | None = on_itself(_RAW_GRAD.__get__, (parameter,))
    return gradient


def refuse_foreign_gradients(members: Iterable[Member]) -> None:
    """MisuseError if other code has left a gradient in the ``.grad`` of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        for member in members:
            if _RAW_GRAD.__get__(member.parameter) is not None:
                raise MisuseError(
                    f"something other than ProTrain has put a gradient into .grad of {member.name}, which no step "
                    "would use. DistributedDataParallel and similar wrappers do so: train the model that protrain.wrap "
                    "returned as it is, without another wrapper around it or inside it"
                )


def edit_error(name: str, how: str) -> MisuseError:
    """The error for the parameter ``name`` whose data was ``how`` (replaced, or changed in place)."""
    return MisuseError(
        f"the data of {name} was {how} outside `with protrain.full_parameters(model):`. Edit the values of parameters "
        "inside it, which takes one parameter in place of the model, too, between steps, and never in a forward. Where "
        f"the model itself does so: {NO_WRITES}"
    )


def memory_error(name: str, what: str) -> MisuseError:
    """The error for ``what``, a method that reads or replaces the memory of the parameter ``name``."""
    return MisuseError(
        f"the memory of {name} cannot be read or replaced ({what}), as it moves in every step: read the values with "
        "parameter.detach().clone(), or edit them in place inside `with protrain.full_parameters(model):`"
    )


class PendingParameter(nn.Parameter):
    """A parameter that can be frozen, and asked for its shape and the like, and nothing else."""

    protrain_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALLOWED:
            return on_itself(func, args, kwargs)
        used = next(each for each in tensors_in((args, kwargs)) if isinstance(each, PendingParameter))
        raise pending_error(used.protrain_name)

    __repr__: Any = describe


class PendingLoad:
    """The ``parameters`` of ``model`` by name, whose values are loaded in its first call."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._kinds = {name: type(parameter) for name, parameter in parameters.items()}
        self._mark()

    def _mark(self) -> None:
        for name, parameter in self._parameters.items():
            vars(parameter)["protrain_name"] = name
            parameter.__class__ = PendingParameter
        # torch would load the buffers before it comes to the parameters.
        self._hooks = [module.register_load_state_dict_pre_hook(_refuse_load) for module in self._model.modules()]

    @contextmanager
    def undone(self) -> Iterator[None]:
        """A context in which they are ordinary parameters. If it raises an error, the load is pending once more."""
        for hook in self._hooks:
            hook.remove()
        for name, parameter in self._parameters.items():
            del vars(parameter)["protrain_name"]
            parameter.__class__ = self._kinds[name]
        try:
            yield
        except BaseException:
            if all(type(parameter) is self._kinds[name] for name, parameter in self._parameters.items()):
                self._mark()  # none has moved into a chunk
            raise


def _refuse_load(*_: Any) -> None:
    raise pending_error("load_state_dict()")


def pending_error(what: str) -> MisuseError:
    """The error for a use of ``what`` between a load and the first call."""
    return MisuseError(
        f"{what} was used between load_checkpoint() and the first call of the model, in which the values of the "
        "checkpoint are read, as protrain.wrap was given no example_batch: use it after that call or before "
        "load_checkpoint(), or pass example_batch to protrain.wrap"
    )
