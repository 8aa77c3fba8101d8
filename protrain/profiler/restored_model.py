"""Puts modules and random states back as they were before a traced step."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from protrain.common.caches import is_part
from protrain.forward.rng import GENERATORS, BlockRandomState

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)


class _Contents(NamedTuple):
    """The contents of a container, in order; of a dictionary the keys as well."""

    container: Any
    kind: Any  # the builtin class whose methods read and write it, as those of a subclass may do anything
    keys: list[Any]
    values: list[Any]


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in training mode inside, and restore modules' attributes and random states afterwards.

    A snapshot to go back to between steps must be taken with the stand-in weights in place. Recurrent modules keep
    lists of their weights, and where those are not the parameters, they flatten them again.

    What an attribute refers to is restored, and so are the contents of lists, dictionaries, sets and key/value caches
    in attributes, nested ones too. Other objects that forward changed are not. A model may register hooks on itself in
    its first forward and remember in an attribute that it did, as models of transformers do. If only the attribute were
    restored, the next forward would register the hooks again.
    """
    put_back = snapshot(model, device)
    try:
        model.train()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield
    finally:
        put_back()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates chunks next, and they need whole segments
            # While it tunes a kernel, the compiler pins copies of what the kernel changes, and torch keeps that memory.
            torch._C._host_emptyCache()


def snapshot(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A function that puts the modules of ``model`` and the random states back to how they are now."""
    containers = _containers(vars(module) for module in model.modules())
    generators = {id(value): value for held in containers for value in held.values if isinstance(value, GENERATORS)}
    random_state = BlockRandomState(device, generators.values())

    def put_back() -> None:
        for held in containers:
            _refill(held)
        random_state.set()

    return put_back


def _containers(attributes: Iterable[dict[str, Any]]) -> list[_Contents]:
    """The contents of the modules' ``attributes`` and of all containers nested in them, each container once."""
    found: dict[int, _Contents] = {}
    seen: dict[int, Any] = {}
    level: list[Any] = list(attributes)
    while level:
        new = {id(value): value for value in level if id(value) not in seen and _is_restored(value)}
        seen |= new
        held = [_contents(container) for value in new.values() for container in _consists_of(value)]
        found |= {id(contents.container): contents for contents in held}
        level = [value for contents in held for value in contents.values]
    return list(found.values())


def _is_restored(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) or is_part(value)


def _consists_of(value: Any) -> list[Any]:
    """``value`` if it is a container, and its attributes if it is more, as these must agree with its contents."""
    found = [value] if isinstance(value, _CONTAINERS) else []
    if type(value) not in _CONTAINERS and hasattr(value, "__dict__"):
        found.append(vars(value))
    return found


def _contents(container: Any) -> _Contents:
    kind = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    table = issubclass(kind, dict)
    return _Contents(
        container,
        kind,
        keys=list(kind.keys(container)) if table else [],
        values=list(kind.values(container) if table else kind.__iter__(container)),
    )


def _refill(held: _Contents) -> None:
    """Restore the container's contents and their order. They are compared by identity, as values may be tensors."""
    now = _contents(held.container)
    if _same(now.keys, held.keys) and _same(now.values, held.values):
        return
    held.kind.clear(held.container)
    if issubclass(held.kind, dict):
        for key, value in zip(held.keys, held.values, strict=True):
            held.kind.__setitem__(held.container, key, value)
    elif held.kind is set:
        set.update(held.container, held.values)
    else:
        held.kind.extend(held.container, held.values)


def _same(values: list[Any], others: list[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))
