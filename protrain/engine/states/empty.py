"""Models that are built without memory for their parameters, and what sets these meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from protrain.common.errors import MisuseError
from protrain.common.parameters import is_managed
from protrain.common.trees import tensors_in
from protrain.engine.states.initialisers import (
    REMEDY,
    Start,
    exchange,
    initialise,
    missing_start,
    set_start,
    start_of,
    storage_of,
    written_by,
)
from protrain.forward.dispatch import RuntimeMode

_INSIDE = "protrain_inside"  # attribute of a storage that was made inside of a block
_RAW: Any = torch.Tensor
_SET_DATA, _IS_META = _RAW.data.__set__, _RAW.is_meta.__get__
_META = torch.device("meta")
_aten: Any = torch.ops.aten


class EmptyParameter(nn.Parameter):
    """A parameter on the meta device that was built in a block."""

    def _set_data(self, value: Tensor) -> None:
        if value is self:  # as in `model.float()` when there is nothing to convert
            return
        if _active is None:
            raise MisuseError(
                "a parameter that was built under protrain.empty_parameters() has no data to replace: do that inside "
                "`with protrain.empty_parameters():`, or after protrain.wrap"
            )
        _active.replace(self, value)

    # The data is what `detach` returns, so that a change of it counts as a change of the parameter.
    data: Any = property(lambda parameter: parameter.detach(), _set_data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy without a start value: as it has another name it would get another one than the original."""
        copied: Any = super().__deepcopy__(memo)
        set_start(Start(copied, copied.dtype, set_by="copy.deepcopy()", version=copied._version))
        return copied


_active: _Watch | None = None


@contextmanager
def empty_parameters(*, init: Callable[[nn.Module], object] | None = None) -> Iterator[None]:
    """Models that are built inside take no memory for their parameters.

    They are on the meta device until ``protrain.wrap`` gives each the value from ``weights=``, or else the one that its
    initialiser makes: ``reset_parameters`` of its module, ``_init_weights`` of transformers, what peft initialises its
    adapters by, the model's own ``init_weights``, or a function that ``model.apply`` or ``init`` is given. The last of
    these is called again, with the arguments that it had, for one parameter at a time. Buffers have values at once, and
    so have parameters whose values were made outside.

    Random values follow from the seed of ``torch.manual_seed`` and the name of the parameter, so that they are the same
    under every plan and on any number of ranks. They have the same distribution as those of a model that is built
    plainly with that seed, but are others. On a GPU they differ from those on the CPU.

    Without ``weights=`` a parameter that anything else has set is an error of ``wrap``: one that is scaled or filled
    after it was initialised, that is copied, or a constant that only ``nn.Parameter(torch.ones(n))`` says. So is one of
    which its last initialiser sets only a part.

    Args:
        init: is called with every module that was given parameters inside, at the end of the block, in the order of
            their first parameters. It is given here, because here the model is built: whoever makes the values later
            needs not know of it.
    """
    global _active
    module: Any = nn.Module
    before, register = _active, module.register_parameter
    watch = _Watch()
    owners: dict[int, nn.Module] = {}  # of parameters that are registered inside

    def register_empty(owner: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            watch.empty(param)
            owners.setdefault(id(owner), owner)
        register(owner, name, param)

    _active, module.register_parameter = watch, register_empty
    try:
        with watch, _Unseen(watch):
            yield
            for owner in list(owners.values()):
                if init is not None:
                    initialise(owner, init)
    finally:
        _active, module.register_parameter = before, register
        for start in watch.changed:
            start.version = start.parameter._version


def check_start_values(model: nn.Module, *, loaded: bool) -> None:
    """ValueError if a parameter of ``model`` has no start value.

    Args:
        model: the model that is to be wrapped.
        loaded: whether its parameters are loaded from files, so that they need none.
    """
    if _active is not None:
        raise ValueError(
            "protrain.wrap inside protrain.empty_parameters(), where parameters have no values: call it after the block"
        )
    if loaded:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta and (why := missing_start(parameter)):
            raise ValueError(f"parameter {name} {why}: {REMEDY}")


class _Watch(RuntimeMode):
    """Empties the parameters of one block, and records who sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = set[Start]()  # that may have changed inside

    def empty(self, parameter: nn.Parameter) -> None:
        """Take the memory of ``parameter``, unless its values were made outside."""
        if type(parameter) is not nn.Parameter or not is_managed(parameter):
            return  # another class may have more than values, and a tied parameter has a start already
        if not parameter.is_meta:
            if _INSIDE not in vars(parameter.untyped_storage()):
                return
            exchange(parameter, nn.Parameter(torch.empty_like(parameter, device=_META), parameter.requires_grad))
        set_start(Start(parameter, parameter.dtype, version=parameter._version))
        parameter.__class__ = EmptyParameter

    def replace(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Let ``parameter``, which has no memory, have the shape and the type of ``value``."""
        start = start_of(parameter)
        if start_of(value) is not start or value.shape != parameter.shape:  # it is no conversion
            self.about_to_set(parameter)
        with torch._C.DisableTorchFunction():
            _SET_DATA(parameter, torch.empty_like(value, device=_META))
        if start is not None:
            start.share(parameter)

    def about_to_set(self, tensor: Tensor) -> None:
        """Record that ``tensor``, if it is a parameter without memory, is about to be set, whole or in part."""
        start = start_of(tensor)
        if start is not None:
            start.record_setter()
            self.changed.add(start)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``. Record what it writes, and which storages it makes."""
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            self.about_to_set(tensor)
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is not None and all(made.alias_info is None for made in schema.returns):
            for tensor in tensors_in(result):
                if (storage := storage_of(tensor)) is not None:
                    vars(storage)[_INSIDE] = True
            # A parameter may become its copy in another type, or in transformers one that is padded by nothing.
            is_copy = func is _aten._to_copy.default or (func is _aten.constant_pad_nd.default and not any(args[1]))
            if is_copy and (start := start_of(args[0])) is not None:
                start.share(result)
        return result


class _Unseen(TorchFunctionMode):
    """Records what is no operation: what ``torch.nn.init`` leaves out on the meta device.

    Its functions that do so set the whole tensor, and ask for its device first.
    """

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and record what follows if it is that question."""
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            self._watch.about_to_set(args[0])
        return func(*args, **(kwargs or {}))
