"""Parameters between a load and the first call of the model, in which their values are read.

Where ``protrain.wrap`` is given no example batch, there are no chunks to load a checkpoint into before the first call.
Until then a parameter has the value from before the load. Nothing may read that, and what is written to it would be
lost, so both are errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.common.trees import tensors_in
from protrain.engine.weights.handle import AUTOGRAD, HOOKS, LAYOUT, METADATA

_GRADIENT: Any = torch.Tensor.grad
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_OF_TRAINING = _GRADIENT.__get__, _GRADIENT.__set__, _REQUIRES_GRAD.__set__, torch.Tensor.requires_grad_
_ALLOWED = frozenset([*METADATA, *AUTOGRAD, *HOOKS, *LAYOUT, *_OF_TRAINING])


def _describe(parameter: Any, **_: Any) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        return f"Parameter({parameter.protrain_name}, {tuple(parameter.shape)}, {parameter.dtype}, not loaded yet)"


class _AwaitedParameter(nn.Parameter):
    """A parameter that can be frozen, and asked for its shape and the like, and nothing else."""

    protrain_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ALLOWED:
            for tensor in tensors_in((args, kwargs)):
                if isinstance(tensor, _AwaitedParameter):
                    raise awaited_error(tensor.protrain_name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    __repr__: Any = _describe


class Awaited:
    """The ``parameters`` of ``model`` by name, whose values are loaded in its first call."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._model = model
        self._parameters = parameters
        self._kinds = {name: type(parameter) for name, parameter in parameters.items()}
        self._await()

    def _await(self) -> None:
        for name, parameter in self._parameters.items():
            vars(parameter)["protrain_name"] = name
            parameter.__class__ = _AwaitedParameter
        # torch would load the buffers before it comes to the parameters.
        self._hooks = [module.register_load_state_dict_pre_hook(_refuse_load) for module in self._model.modules()]

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """A context in which they are what they were before. If it raises an error, they are awaited again."""
        for hook in self._hooks:
            hook.remove()
        for name, parameter in self._parameters.items():
            del vars(parameter)["protrain_name"]
            parameter.__class__ = self._kinds[name]
        try:
            yield
        except BaseException:
            if all(type(parameter) is self._kinds[name] for name, parameter in self._parameters.items()):
                self._await()  # none has moved into a chunk
            raise


def _refuse_load(*_: Any) -> None:
    raise awaited_error("load_state_dict()")


def awaited_error(what: str) -> MisuseError:
    """The error for a use of ``what`` between a load and the first call."""
    return MisuseError(
        f"{what} was used between load_checkpoint() and the first call of the model, in which the values of the "
        "checkpoint are read, as protrain.wrap was given no example_batch: use it after that call or before "
        "load_checkpoint(), or pass example_batch to protrain.wrap"
    )
