"""Models that are built without memory: their parameters have a record of their construction in place of values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.errors import MisuseError
from protrain.common.parameters import is_managed
from protrain.engine.states.construction import is_empty, record_of, replay, view_of
from protrain.engine.states.recorder import AsOnCpu, Recorder, unwatched

_VERSION = "protrain_version"  # attribute of an empty tensor: its version when recording ended
_EMPTY = "protrain_empty"  # attribute of a tensor with memory: the empty tensor that replaced it
_INSIDE = "inside `with protrain.empty_parameters():`, which records it, or after protrain.wrap"


class EmptyParameter(nn.Parameter):
    """A parameter on the meta device whose values follow from a record, and recording has ended.

    A later write to it would be lost, so its version is checked, and ``check_recorded`` refuses the write.
    """

    def _refuse_data(self, value: Tensor) -> None:
        if value is self:  # as in `model.float()` when there is nothing to convert
            return
        record = record_of(self)
        raise MisuseError(
            f"parameter {record.name if record is not None else ''} was built under protrain.empty_parameters(), so it "
            f"has no data to replace: do that {_INSIDE}"
        )

    # The data is what `detach` returns, so that a change of it counts as a change of the parameter.
    data: Any = property(lambda parameter: parameter.detach(), _refuse_data)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with empty_parameters():
            assert _active is not None
            _active.reopen(self)
            return nn.Parameter.__deepcopy__(self, memo)


_active: _Construction | None = None


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Models that are built inside take no memory for their parameters, and train as if they had been built plainly.

    The operations that make the values of each parameter are recorded: those of its module's constructor, of later
    calls such as ``model.apply(init)``, and of copies and computations from other parameters. ``protrain.wrap``
    replays them for one parameter at a time, where the values are needed, or loads weights with ``weights=``. After the
    ``with`` block parameters are on the meta device. Buffers have values, except those computed from parameters. A
    parameter whose values were made outside (a tensor that was loaded, a numpy array) has them at once.

    Constants, and values that are computed from other parameters, are exactly those of a model that is built plainly.
    Random numbers have the same distribution but other values: every random operation draws one number from the
    generator that it would have used (``torch.manual_seed`` seeds it), and uses that number as its own seed. So the
    values are the same under every plan. On a GPU they differ from those on the CPU.

    Raises:
        ValueError: inside, when code needs the value of a parameter (``.item()``, ``if weight.any():``).
    """
    global _active
    if _active is not None:
        yield
        return
    construction = _Construction()
    _active = construction
    try:
        with construction.watched():
            yield
    finally:
        _active = None
        construction.close()


def check_recorded(model: nn.Module, *, loaded: bool) -> None:
    """ValueError if a parameter of ``model`` has neither values nor a record of them.

    Args:
        model: the model that is to be wrapped.
        loaded: whether its parameters are loaded from files, so that they need neither.
    """
    if _active is not None:
        raise ValueError(
            "protrain.wrap inside protrain.empty_parameters(), where parameters have no values: call it after the block"
        )
    if loaded:
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        record = record_of(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        what = f"parameter {name}" if is_parameter else f"buffer {name}"
        if record is None:
            if tensor.is_meta and is_parameter:
                raise ValueError(
                    f"{what} is on the meta device, so it has no values: build it under `with "
                    "protrain.empty_parameters():`, which records them, or pass weights="
                )
        elif record.empty:
            _refuse_change(what, tensor)
            if record.last is None and tensor.numel():
                raise ValueError(
                    f"{what} is left without values by its constructor: initialise it inside `with "
                    "protrain.empty_parameters():`, or pass weights="
                )


def fill_buffers(model: nn.Module, device: torch.device) -> None:
    """Give the buffers of ``model`` that were computed from empty parameters their values, on the CPU.

    They are computed on ``device``, as the values of parameters are.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_empty(buffer):
                if id(buffer) not in made:
                    made[id(buffer)] = values_of(buffer, device).cpu()
                module._buffers[name] = made[id(buffer)]


def values_of(tensor: Tensor, device: torch.device) -> Tensor:
    """The values of ``tensor`` according to its record, made on ``device`` and in its dtype."""
    record = record_of(tensor)
    assert record is not None
    return replay(view_of(tensor, record), device)


class _Construction:
    """The parameters and buffers that are built inside one ``empty_parameters``."""

    def __init__(self) -> None:
        self._recorder = Recorder()
        self._parameters: list[nn.Parameter] = []  # the empty ones
        self._buffers: list[tuple[nn.Module, str]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record all operations inside."""
        module: Any = nn.Module
        init: Any = nn.init
        register_parameter, register_buffer = module.register_parameter, module.register_buffer
        deepcopy, truncated = nn.Parameter.__deepcopy__, init._no_grad_trunc_normal_

        def empty_parameter(owner: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register_parameter(owner, name, self._emptied(param, f"{type(owner).__name__}.{name}"))

        def noted_buffer(owner: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
            register_buffer(owner, name, tensor, persistent)
            self._buffers.append((owner, name))

        def deep_copied(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
            found = deepcopy(parameter, memo)
            self._parameters.append(found)
            return found

        def trunc_normal_(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
        ) -> Tensor:
            # It draws until all values are within bounds, so that its operations depend on values: record it as one.
            return self._recorder.call(truncated, tensor, mean, std, a, b, generator=generator)

        with ExitStack() as stack:
            for owner, name, value in (
                (module, "register_parameter", empty_parameter),
                (module, "register_buffer", noted_buffer),
                (nn.Parameter, "__deepcopy__", deep_copied),
                (init, "_no_grad_trunc_normal_", trunc_normal_),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            stack.enter_context(self._recorder)
            stack.enter_context(AsOnCpu(self._recorder, self.reopen))
            yield

    def reopen(self, tensor: Tensor) -> None:
        """Continue to record ``tensor``, if it is a parameter that was built in an earlier context.

        Raises:
            ValueError: it was changed in between.
        """
        if isinstance(tensor, EmptyParameter):
            record = record_of(tensor)
            _refuse_change(f"parameter {record.name if record is not None else ''}", tensor)
            tensor.__class__ = nn.Parameter  # type: ignore[assignment]
            self._parameters.append(tensor)

    def close(self) -> None:
        """Stop recording. Tensors without values are on the meta device afterwards."""
        for owner, name in self._buffers:
            buffer = owner._buffers.get(name)
            if buffer is not None and is_empty(buffer):
                if not buffer.is_meta:
                    buffer = vars(buffer).setdefault(_EMPTY, self._recorder.empty(buffer))
                owner._buffers[name] = buffer
                vars(buffer)[_VERSION] = buffer._version
        for parameter in self._parameters:
            if is_empty(parameter):
                vars(parameter)[_VERSION] = parameter._version
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = EmptyParameter
        self._recorder.close()

    def _emptied(self, parameter: nn.Parameter | None, name: str) -> nn.Parameter | None:
        """The parameter to register in place of ``parameter``, which is itself if its values were made outside."""
        with unwatched():
            if type(parameter) is not nn.Parameter or not is_managed(parameter):
                return parameter  # another class may have more than values
            record = record_of(parameter)
            if record is None:
                return parameter
            record.name = record.name or name
            if parameter.is_meta:
                record.empty = True
                self._parameters.append(parameter)
                return parameter
            if _EMPTY not in vars(parameter):
                empty = nn.Parameter(self._recorder.empty(parameter), requires_grad=parameter.requires_grad)
                vars(empty).update(vars(parameter))
                _keep_hooks(empty, parameter)
                vars(parameter)[_EMPTY] = empty
                self._parameters.append(empty)
            found: nn.Parameter = vars(parameter)[_EMPTY]
            return found


def _refuse_change(what: str, tensor: Tensor) -> None:
    if tensor._version != vars(tensor).get(_VERSION, tensor._version):
        raise ValueError(
            f"{what} was changed after it had been built under protrain.empty_parameters(), and it has no values that "
            f"could change: do that {_INSIDE}"
        )


def exchange(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``parameter``, which is empty, the data of ``other``. It stays the same object with its hooks.

    ``torch.utils.swap_tensors`` would refuse parameters to which modules such as ``nn.LSTM`` have weak references.
    """
    parameter.__class__ = nn.Parameter
    vars(parameter).pop(_VERSION, None)
    _keep_hooks(other, parameter)
    torch._C._swap_tensor_impl(parameter, other)


def _keep_hooks(target: Any, source: Any) -> None:
    """Let ``target`` share the hooks of ``source``. The handles of hooks remove them from both."""
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(source, kind)) is not None:
            setattr(target, kind, hooks)
