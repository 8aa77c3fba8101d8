"""The start value of a parameter without memory: its initialiser is called again when the value is needed.

A model that is built under ``protrain.empty_parameters`` has no values. Of each parameter it is known which call of an
initialiser set it last, and with which arguments. This call is made again, while this parameter alone has memory.

[Note: initialisers] An initialiser is a method of a module by which libraries set start values: ``reset_parameters`` as
torch's layers have it, ``_init_weights`` of transformers, ``reset_lora_parameters`` and its like of peft,
``init_weights`` of a model; or a function that ``model.apply`` or ``empty_parameters(init=...)`` is given. Nothing is
known of how other code would make a value again, so a parameter that such code set last has no start value.

[Note: keyed by name] Random numbers are seeded by the seed that ``torch.manual_seed`` had set when the parameter was
built, and by the parameter's name. Initialisers draw nothing for other parameters meanwhile. So the value is the same
whenever it is made, by whichever rank, and whatever else is made.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain.common.adapters import base_name
from protrain.common.trees import tensors_in
from protrain.forward.dispatch import RuntimeMode

_START = "protrain_start"  # attribute of a parameter without memory, and, as a weak reference, of its storage
_METHODS = re.compile(r"_?reset_(\w+_)?parameters\w*|_?init_weights")
_FOLDERS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
REMEDY = (
    "pass weights=, set it by reset_parameters() of its module or by model.apply(function) inside `with "
    "protrain.empty_parameters():`, or build the model outside of that block"
)


@dataclass(eq=False)
class Start:
    """How the start value of a parameter without memory is made."""

    parameter: nn.Parameter
    dtype: torch.dtype  # in which it was set, before the model was converted
    seed: int = field(default_factory=torch.initial_seed)  # [Note: keyed by name]
    set_by: partial[Any] | str = ""  # the call of an initialiser that set it last, or the place of other code that did
    version: int = 0  # of the parameter when the last block ended

    def share(self, tensor: Tensor) -> None:
        """Let a write to the storage of ``tensor`` count as one to the parameter, if it does not to another one."""
        vars(tensor.untyped_storage()).setdefault(_START, weakref.ref(self))

    def record_setter(self) -> None:
        """Record who sets the parameter now, by the frames of Python."""
        self.dtype = self.parameter.dtype
        self.set_by = _call_in_progress() or _place_in_progress()


def set_start(start: Start) -> None:
    """Let ``start`` be that of its parameter, which is on the meta device."""
    vars(start.parameter)[_START] = start
    start.share(start.parameter)


def start_of(tensor: Tensor) -> Start | None:
    """The start of the parameter without memory that ``tensor`` is, or of which it is a view or a copy."""
    storage = storage_of(tensor)
    reference = None if storage is None or not tensor.is_meta else vars(storage).get(_START)
    return None if reference is None else reference()


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of ``tensor``. It is None for a wrapper around other tensors, and for one that is not strided."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # as inside torch.vmap
        return None
    is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage() if is_plain else None


def initialise(self: nn.Module, fn: Callable[[nn.Module], object]) -> None:
    """Call ``fn`` for a module. The arguments have the names that those of ``nn.Module.apply`` have."""
    fn(self)


_APPLYING = nn.Module.apply.__code__, initialise.__code__


def missing_start(parameter: nn.Parameter) -> str:
    """Why ``parameter``, which is on the meta device, has no start value. It is empty if it has one."""
    start = start_of(parameter)
    if start is None:
        return "is on the meta device and was not built under protrain.empty_parameters()"
    if start.version != parameter._version:
        return "was changed after the block of protrain.empty_parameters() in which it was built"
    if isinstance(start.set_by, partial) or not parameter.numel():
        return ""
    if start.set_by:
        return f"was set by {start.set_by}, which is no initialiser that could be called again"
    return "was set by no initialiser, such as a reset_parameters() of its module"


def held_storages(model: nn.Module) -> set[int]:
    """The ids of the storages of parameters and buffers of ``model`` that have values, for ``start_value``."""
    storages = (storage_of(tensor) for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
    return {storage._cdata for storage in storages if storage is not None}


def start_value(parameter: nn.Parameter, name: str, device: torch.device, held: Container[int]) -> Tensor:
    """The start value of ``parameter``, which is on the meta device and has memory only while its initialiser runs.

    Args:
        parameter: as it was built under ``protrain.empty_parameters``.
        name: its name in the model, from which random numbers follow: [Note: keyed by name].
        device: where the value is made.
        held: storages that the initialiser, which sets all of a module, is to leave as they are.

    Raises:
        ValueError: the initialiser does not make all of it, which is only known when it runs.
    """
    start, kind, dtype = start_of(parameter), type(parameter), parameter.dtype
    assert start is not None
    if not isinstance(start.set_by, partial):
        return torch.empty_like(parameter, device=device)  # it has no elements
    digest = hashlib.sha256(f"{start.seed} {base_name(name)}".encode()).digest()
    seed, gpus = int.from_bytes(digest[:8], "little"), [device] if device.type == "cuda" else []
    nothing = torch.full_like(parameter, float("nan"), dtype=start.dtype, device=device, requires_grad=False)
    other: Any = nn.Parameter(nothing)
    called = getattr(start.set_by.func, "__qualname__", repr(start.set_by.func))
    parameter.__class__ = nn.Parameter  # the initialiser may also replace its data
    torch._C._swap_tensor_impl(parameter, other)
    try:
        with torch.random.fork_rng(gpus), torch.no_grad(), _Keep(held):
            for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu.index] for gpu in gpus)):
                generator.manual_seed(seed)
            start.set_by()
        value = parameter.detach().to(device, dtype)
    except Exception as error:
        raise ValueError(f"parameter {name}: {called} does not run for it alone ({error}): {REMEDY}") from error
    finally:
        torch._C._swap_tensor_impl(parameter, other)
        parameter.__class__ = kind
    if value.sum().isnan():
        raise ValueError(f"parameter {name} is left without a value by {called} when called again: {REMEDY}")
    return value


class _Keep(RuntimeMode):
    """A dispatch mode that skips operators which write to any of some storages."""

    def __init__(self, storages: Container[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it writes there."""
        written = written_by(func, args, kwargs or {})
        if any(getattr(storage_of(tensor), "_cdata", None) in self._storages for tensor in written):
            return written[0] if func._schema.returns else None
        return func(*args, **(kwargs or {}))


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that the operator ``func`` writes."""
    schema = getattr(func, "_schema", None)
    return tensors_in(
        [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(schema.arguments if schema is not None else ())
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    )


def exchange(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Give ``parameter`` the data of ``other``. It stays the same object with its hooks, and has no start any more.

    ``torch.utils.swap_tensors`` would refuse parameters to which modules such as ``nn.LSTM`` have weak references.
    """
    parameter.__class__ = nn.Parameter
    vars(parameter).pop(_START, None)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # shared, so that handles remove them from both
        if (hooks := getattr(parameter, kind)) is not None:
            setattr(other, kind, hooks)
    torch._C._swap_tensor_impl(parameter, other)


def _call_in_progress() -> partial[Any] | None:
    """The innermost call of an initialiser now. Where a method calls that of its base class, it is the outer one."""
    found: partial[Any] | None = None
    for frame, _ in walk_stack(sys._getframe()):
        call = _call_of(frame)
        if found is not None and call is not None and (call.func != found.func or frame.f_code in _APPLYING):
            break
        found = call or found
    return found


def _place_in_progress() -> str:
    """The line that runs now, outside of torch and of this package."""
    places = (f for f, _ in walk_stack(sys._getframe()) if not f.f_code.co_filename.startswith(_FOLDERS))
    frame = next(places, sys._getframe())
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno} ({frame.f_code.co_name})"


def _call_of(frame: FrameType) -> partial[Any] | None:
    """The call of an initialiser that ``frame`` is. None if it is another call."""
    code, values = frame.f_code, frame.f_locals
    if code in _APPLYING:
        return partial(values["fn"], values["self"])
    owner = values.get(code.co_varnames[0]) if code.co_argcount and _METHODS.fullmatch(code.co_name) else None
    methods = (vars(kind).get(code.co_name) for kind in type(owner).__mro__ if isinstance(owner, nn.Module))
    if not any(getattr(inspect.unwrap(method), "__code__", None) is code for method in methods if method is not None):
        return None  # also a function of such a name
    names, rest, keywords, _ = inspect.getargvalues(frame)
    args = [*(values[name] for name in names[1 : code.co_argcount]), *(values[rest] if rest else ())]
    kwargs = {name: values[name] for name in names[code.co_argcount :]} | (values[keywords] if keywords else {})
    return partial(getattr(owner, code.co_name), *args, **kwargs)
