"""The record of how a tensor without memory was made, and its replay.

A model that is built under ``protrain.empty_parameters`` has no values, only a record of the operations that would
have made them. The record is a graph. A ``Record`` stands for one storage and knows the last ``Operation``
that wrote it, and an operation knows those that must run before it. So the record of a parameter is what can be reached
from it, and a storage that is freed takes its record along. Nothing in a record is as large as what it stands for,
except for copies of tensors that were made outside.

[Note: keyed draws] Every random operation has a seed of its own, which recording draws from the generator that the
operation would have used. So a replay draws the same numbers whenever, wherever and however often it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from protrain.common.trees import Leaf, map_leaves, tensors_in

_ATTRIBUTE = "protrain_record"  # of a storage: it lives as long as the storage does
_numbers = itertools.count()
_aten: Any = torch.ops.aten
# Operations that are given a tensor and do not use its values.
_USES_SHAPE = frozenset(
    getattr(_aten, name) for name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
) | frozenset((_aten.new_zeros, _aten.new_ones, _aten.new_full))


@dataclass(eq=False)
class Record:
    """One storage: the operation that wrote it last, and what else is known of it without its values."""

    size_bytes: int
    device: torch.device  # where a plain construction would have allocated it
    last: Operation | None = None  # None: nothing has written it
    empty: bool = False  # it has no values, which follow from the record alone
    closed: bool = False  # it has values, and recording has ended, so that they may differ from the record
    name: str = ""  # of the parameter that has this storage


@dataclass(frozen=True)
class View(Leaf):
    """A view of a recorded storage, as an argument or a result of an operation."""

    record: Record
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements


@dataclass(frozen=True)
class Constant(Leaf):
    """A copy of a tensor that was made outside, at the time of the operation."""

    value: Tensor


@dataclass(eq=False)
class Operation:
    """A call that made or wrote recorded storages."""

    call: Callable[..., Any]
    args: tuple[Any, ...]  # with a View or a Constant in place of each tensor
    kwargs: dict[str, Any]
    seed: int | None  # of its random numbers: [Note: keyed draws]
    before: tuple[Operation, ...]  # operations that must run before
    default_dtype: torch.dtype  # torch's default when it ran, on which the dtype of its results may depend
    makes: list[View | None] = field(default_factory=list)  # its results; None for one that was an argument
    number: int = field(default_factory=lambda: next(_numbers))


def record_of(tensor: Tensor) -> Record | None:
    """The record of the storage of ``tensor``. None if there is none, or if the values may differ from it."""
    if not has_storage(tensor):
        return None
    record: Record | None = vars(tensor.untyped_storage()).get(_ATTRIBUTE)
    return None if record is None or record.closed else record


def is_empty(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a record in place of values."""
    record = record_of(tensor)
    return record is not None and record.empty


def set_record(storage: torch.UntypedStorage, record: Record) -> None:
    """Let ``record`` be the record of ``storage``."""
    setattr(storage, _ATTRIBUTE, record)


def has_storage(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary strided tensor, and no wrapper around others."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # as inside torch.vmap
        return False
    return tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)


def view_of(tensor: Tensor, record: Record) -> View:
    """The view of the storage of ``record`` that ``tensor`` is."""
    return View(record, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def parameter_names(record: Record) -> list[str]:
    """The names of the parameters from which the values of ``record`` follow, latest first."""
    names = [record.name] if record.name else []
    for operation in reversed(_steps(record)):
        for leaf in _leaves((operation.args, operation.kwargs)):
            if isinstance(leaf, View) and leaf.record.name and leaf.record.name not in names:
                names.append(leaf.record.name)
    return names


def read_records(record: Record) -> set[Record]:
    """The records of all tensors whose values are used in making the values of ``record``."""
    return {
        leaf.record
        for operation in _steps(record)
        if getattr(operation.call, "overloadpacket", None) not in _USES_SHAPE
        for leaf in _leaves((operation.args, operation.kwargs))
        if isinstance(leaf, View)
    }


def replay(view: View, device: torch.device) -> Tensor:
    """Run the operations in the record of ``view`` on ``device``. Returns the values of ``view``.

    All memory except that of the returned tensor is freed, and random generators keep their states.
    """
    steps = _steps(view.record)
    uses = [{leaf.record for leaf in _leaves((step.args, step.kwargs)) if isinstance(leaf, View)} for step in steps]
    last_use = {record: index for index, records in enumerate(uses) for record in records}
    storages: dict[Record, torch.UntypedStorage] = {}

    def tensor_of(part: View) -> Tensor:
        if part.record not in storages:
            memory = torch.zeros(part.record.size_bytes, dtype=torch.uint8, device=device)
            storages[part.record] = memory.untyped_storage()
        empty = torch.empty(0, dtype=part.dtype, device=device)
        return empty.set_(storages[part.record], part.offset, part.shape, part.stride)

    def given(leaf: Any) -> Any:
        if isinstance(leaf, View):
            return tensor_of(leaf)
        if isinstance(leaf, Constant):
            return leaf.value.to(device, copy=True)
        return device if isinstance(leaf, torch.device) else leaf

    with torch.no_grad(), _default_dtype_kept():
        for index, step in enumerate(steps):
            torch.set_default_dtype(step.default_dtype)
            args, kwargs = map_leaves(given, (step.args, step.kwargs))
            with nullcontext() if step.seed is None else seeded(step.seed, device):
                results = tensors_in(step.call(*args, **kwargs))
            for result, made in zip(results, step.makes, strict=True):
                if made is not None and (made.record in last_use or made.record is view.record):
                    storages[made.record] = _as_recorded(result, made).untyped_storage()
            for record in uses[index]:
                if last_use[record] == index and record is not view.record:
                    storages.pop(record, None)
        return tensor_of(view)


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generator of ``device`` inside, and restore its state afterwards."""
    generator = torch.default_generator
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _steps(record: Record) -> list[Operation]:
    """The operations from which the values of ``record`` follow, in the order in which they ran."""
    found: dict[int, Operation] = {}
    open_ends = [] if record.last is None else [record.last]
    while open_ends:
        operation = open_ends.pop()
        if operation.number not in found:
            found[operation.number] = operation
            open_ends += operation.before
    return [found[number] for number in sorted(found)]


def _as_recorded(result: Tensor, made: View) -> Tensor:
    """``result`` with the strides that were recorded, as an operation may use other strides on another device."""
    assert (result.shape, result.dtype) == (made.shape, made.dtype), "an operation gave another result than recorded"
    if (result.stride(), result.storage_offset()) == (made.stride, made.offset):
        return result
    whole = result.new_empty(made.record.size_bytes // result.element_size())
    return whole.as_strided(made.shape, made.stride, made.offset).copy_(result)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
