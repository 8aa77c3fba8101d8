"""Watches a construction: runs its operations, and records those from which the values of a parameter may follow.

Operations on tensors with values run as usual. An operation that is given an empty tensor, which has no values, runs on
the meta device, so that shapes and types are right. Its results, and the tensors that it writes, are empty too.

[Note: as on the CPU] To the code that is watched an empty tensor seems to be on the device where a plain construction
would have allocated it. Libraries skip work on tensors of the meta device (``torch.nn.init.orthogonal_`` returns at
once), and work that is skipped could not be recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from protrain.common.trees import map_leaves, tensors_in
from protrain.engine.states.construction import (
    Constant,
    Operation,
    Record,
    View,
    has_storage,
    is_empty,
    parameter_names,
    record_of,
    seeded,
    set_record,
    view_of,
)
from protrain.forward.dispatch import RuntimeMode

_META = torch.device("meta")
_CPU = torch.device("cpu")
_aten: Any = torch.ops.aten
_RAW: Any = torch.Tensor
_SET_DATA = _RAW.data.__set__
# Operations that allocate their results and do not write them.
_UNWRITTEN = frozenset(
    (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided)
)
# Operations that overwrite their first argument without reading it.
_OVERWRITE = frozenset((_aten.normal_, _aten.uniform_, _aten.zero_, _aten.fill_, _aten.copy_))
# Operations that take indices, whose values decide the shape of the result.
_INDEX = frozenset((_aten.index, _aten.index_put, _aten.index_put_))
# What an empty tensor answers when it is asked for its device: [Note: as on the CPU].
_APPEARANCE: dict[Any, Callable[[torch.device], Any]] = {
    _RAW.device.__get__: lambda device: device,
    _RAW.is_meta.__get__: lambda device: device.type == "meta",
    _RAW.is_cpu.__get__: lambda device: device.type == "cpu",
    _RAW.is_cuda.__get__: lambda device: device.type == "cuda",
    _RAW.get_device: lambda device: -1 if device.index is None else device.index,
}
# Functions that read values without a dispatch mode seeing it.
_READS = frozenset((_RAW.numpy, _RAW.tolist, _RAW.__array__, _RAW.__deepcopy__, _RAW.__format__, _RAW.__dlpack__))


class Recorder(RuntimeMode):
    """Records the operations that run inside, until ``close``."""

    def __init__(self) -> None:
        super().__init__()
        self._records: weakref.WeakSet[Record] = weakref.WeakSet()

    def close(self) -> None:
        """Forget the records of tensors that have values, as what happens to them from now on is not recorded."""
        for record in self._records:
            if not record.empty:
                record.closed, record.last = True, None

    def empty(self, tensor: Tensor) -> Tensor:
        """A tensor on the meta device that replaces ``tensor``, which must have a record. The values are given up.

        Both tensors have the same record, so an operation on either of them is recorded for both.
        """
        record = record_of(tensor)
        assert record is not None
        record.empty = True
        if tensor.is_meta:
            return tensor.detach()
        storage = torch.UntypedStorage(record.size_bytes, device="meta")
        set_record(storage, record)
        hollow = torch.empty(0, dtype=tensor.dtype, device=_META)
        return hollow.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def call(self, function: Callable[..., Any], tensor: Tensor, *args: Any, generator: Any = None) -> Tensor:
        """Run ``function(tensor, *args)``, which draws random numbers into ``tensor``, as one recorded operation."""
        with unwatched():
            seed, record = _draw(generator), record_of(tensor)
            if record is None or not record.empty:
                with seeded(seed, tensor.device):
                    function(tensor, *args)
            if record is not None:
                self._add(function, (tensor, *args), {}, [tensor], [tensor], seed, overwrites=False)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, on the meta device if an argument is empty, and record it if a parameter may need it."""
        with torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(func, "_schema", None)
        given = tensors_in((args, kwargs))
        if schema is None or func.overloadpacket is _aten.set_ or (not given and kwargs.get("device") == _META):
            return func(*args, **kwargs)  # a tensor that is made on the meta device has no values
        written = _written(schema, args, kwargs)
        if not written and any(result.alias_info is not None for result in schema.returns):
            return func(*args, **kwargs)  # a view, whose storage has a record
        if any(tensor.is_meta and record_of(tensor) is None for tensor in given):
            if any(is_empty(tensor) for tensor in written):
                raise ValueError(
                    f"{func} writes {_names(written)} with a tensor on the meta device that was not made inside "
                    "protrain.empty_parameters(), so that nothing is known of its values: make it inside"
                )
            return func(*args, **kwargs)
        seed = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generators = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
            seed = _draw(generators[0] if generators else None)
            args, kwargs = map_leaves(lambda leaf: None if isinstance(leaf, torch.Generator) else leaf, (args, kwargs))
        device = kwargs.get("device") or (_apparent_device(given[0]) if given else _CPU)
        if any(is_empty(tensor) for tensor in given):
            result = _on_meta(func, args, kwargs)
            for tensor in written:
                _lose_values(tensor, func)
        else:
            with nullcontext() if seed is None else seeded(seed, device):
                result = func(*args, **kwargs)
        if not given and any(argument.name == "device" for argument in schema.arguments):
            kwargs = {"device": _CPU, **kwargs}  # explicit, so that a replay can replace it
        known = {id(tensor) for tensor in given}
        results = tensors_in(result)
        for tensor in results:
            if id(tensor) not in known and has_storage(tensor) and record_of(tensor) is None:
                storage = tensor.untyped_storage()
                record = Record(storage.nbytes(), device, empty=tensor.is_meta)
                set_record(storage, record)
                self._records.add(record)
                known.add(id(tensor))
                if func.overloadpacket not in _UNWRITTEN:
                    written = [*written, tensor]
        if func.overloadpacket not in _UNWRITTEN:
            self._add(func, args, kwargs, written, results, seed, overwrites=func.overloadpacket in _OVERWRITE)
        return result

    def _add(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        results: list[Tensor],
        seed: int | None,
        *,
        overwrites: bool,
    ) -> None:
        """Record an operation that has run. ``written`` are the tensors that it wrote, new ``results`` included."""
        targets = {record for tensor in written if (record := record_of(tensor)) is not None}
        if not targets:
            return  # only tensors that were made outside were written, and these have values
        given = {id(tensor) for tensor in tensors_in((args, kwargs))}
        made: list[View | None] = []
        for tensor in results:
            record = record_of(tensor)
            is_new = record in targets and id(tensor) not in given and any(tensor is other for other in written)
            made.append(view_of(tensor, record) if is_new and record is not None else None)
        read: set[Record] = set()

        def freeze(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            record = record_of(leaf)
            if record is None:
                return Constant(leaf.detach().clone())
            if not (overwrites and leaf is written[0] and _covers(leaf, record)):
                read.add(record)
            return view_of(leaf, record)

        frozen_args, frozen_kwargs = map_leaves(freeze, (args, kwargs))
        operation = Operation(
            call=call,
            args=frozen_args,
            kwargs=frozen_kwargs,
            seed=seed,
            before=tuple({record.last for record in read if record.last is not None}),
            default_dtype=torch.get_default_dtype(),
            makes=made,
        )
        for tensor in written:
            if (record := record_of(tensor)) is not None:
                record.last = operation
                record.size_bytes = max(record.size_bytes, tensor.untyped_storage().nbytes())


class AsOnCpu(TorchFunctionMode):
    """Lets empty tensors look like tensors with values: [Note: as on the CPU]. To read a value is an error."""

    def __init__(self, recorder: Recorder, seen: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._recorder = recorder
        self._seen = seen  # is called with every empty tensor that is used

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and answer its questions about an empty tensor as if that had values."""
        kwargs = kwargs or {}
        record = record_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if record is not None and record.empty:
            self._seen(args[0])
            if func in _APPEARANCE:
                return _APPEARANCE[func](record.device)
            if func in _READS and not (func == _RAW.__deepcopy__ and args[0].is_meta):
                raise _no_value(func, args, None)
            if func == _RAW.cpu and record.device.type == "cpu":
                return args[0]
            if func == _RAW.to and args[0].is_meta:
                args, kwargs = _staying(record.device, args, kwargs)
            if func == _RAW.__setitem__ and not isinstance(args[2], Tensor):
                # torch would turn the number into a tensor on the meta device, and lose its value.
                args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
            if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
                value = args[1]
                with unwatched():
                    known = record_of(value) is not None
                value = value if known else value.clone()  # a tensor that was made outside is copied, which is recorded
                with unwatched():
                    args = (args[0], self._recorder.empty(value))
        try:
            return func(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower() or not any(is_empty(tensor) for tensor in tensors_in((args, kwargs))):
                raise
            raise _no_value(func, (args, kwargs), error) from error


@contextmanager
def unwatched() -> Iterator[None]:
    """A context in which no mode is active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _apparent_device(tensor: Tensor) -> torch.device:
    record = record_of(tensor)
    return tensor.device if record is None else record.device


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation of this ``schema`` writes."""
    found: list[Tensor] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _draw(generator: torch.Generator | None) -> int:
    """The seed of the next random operation: [Note: keyed draws]."""
    device = _CPU if generator is None else generator.device
    return int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on stand-ins on the meta device. If it returns a stand-in, the original is returned instead."""
    originals: dict[int, tuple[Tensor, Tensor]] = {}  # a stand-in, and what it stands for

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _META
        if not isinstance(leaf, Tensor) or leaf.is_meta:
            return leaf
        if func.overloadpacket in _INDEX and not leaf.is_floating_point() and not is_empty(leaf):
            return leaf
        stride = leaf.stride() if has_storage(leaf) else torch.empty(leaf.shape, device=_META).stride()
        made = torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=_META)
        originals[id(made)] = (made, leaf)
        return made

    args, kwargs = map_leaves(stand_in, (args, kwargs))
    result = func(*args, **kwargs)
    return map_leaves(lambda leaf: originals[id(leaf)][1] if id(leaf) in originals else leaf, result)


def _lose_values(tensor: Tensor, func: Any) -> None:
    """An operation has written ``tensor`` with a tensor that has no values, so its own values are wrong."""
    record = record_of(tensor)
    if record is None:
        raise ValueError(
            f"{func} writes the value of a parameter into a tensor that was made outside protrain.empty_parameters(), "
            "inside which parameters have none: make that tensor inside too, or build the model outside"
        )
    if not record.empty:
        record.empty = True
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # so that a read shows


def _covers(tensor: Tensor, record: Record) -> bool:
    return tensor.nbytes == record.size_bytes and tensor.is_contiguous()


def _staying(device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of ``Tensor.to`` without a device that equals ``device``, on which the tensor seems to be."""

    def same(where: Any) -> bool:
        return isinstance(where, str | torch.device) and torch.device(where).type == device.type

    target = kwargs.get("other", args[1] if len(args) > 1 else None)
    if isinstance(target, Tensor) and same(_apparent_device(target)):
        rest = {name: value for name, value in kwargs.items() if name != "other"}
        return (args[0], None, target.dtype, *args[2:]), rest
    if len(args) > 1 and same(args[1]):
        return (args[0], None, *args[2:]), kwargs
    return args, {name: None if name == "device" and same(value) else value for name, value in kwargs.items()}


def _no_value(func: Any, arguments: Any, error: Exception | None) -> ValueError:
    name = getattr(func, "__name__", str(func))
    said = "" if error is None else f" ({str(error).split('. ')[0]})"
    return ValueError(
        f"{name} needs the value of {_names(tensors_in(arguments))}, and inside protrain.empty_parameters() parameters "
        f"have none{said}: build the model outside it, or leave this step out and pass weights="
    )


def _names(tensors: list[Tensor]) -> str:
    """The names of the parameters that ``tensors`` are, or from which they follow."""
    with unwatched():
        records = [record for tensor in tensors if (record := record_of(tensor)) is not None and record.empty]
        names = list(dict.fromkeys(name for record in records for name in parameter_names(record)))
    return " and ".join(names[:2]) if names else "a tensor that follows from parameters"
