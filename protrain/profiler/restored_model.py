"""Puts modules and random states back as they were before a traced step."""

from __future__ import annotations

import operator
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
_GENERATORS = (torch.Generator, np.random.RandomState, np.random.Generator, np.random.BitGenerator, random.Random)


class _Contents(NamedTuple):
    """The contents of a container, in order; of a dictionary the keys as well."""

    container: Any
    kind: Any  # the builtin class whose methods read and write it, as those of a subclass may do anything
    keys: list[Any]
    values: list[Any]


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[Callable[[], Callable[[], None]]]:
    """Put the model in training mode inside, and restore modules' attributes and random states afterwards.

    Yields a function that takes a snapshot of these, and returns a function that goes back to the snapshot. A snapshot
    to go back to between steps must be taken with the stand-in weights in place. Recurrent modules keep lists of their
    weights, and where those are not the parameters, they flatten them again.

    What an attribute refers to is restored, and so are the contents of lists, dictionaries and sets in attributes,
    nested ones too. Other objects that forward changed are not. A model may register hooks on itself in its first
    forward and remember in an attribute that it did, as models of transformers do. If only the attribute were restored,
    the next forward would register the hooks again.
    """
    put_back = _snapshot(model, device)
    try:
        model.train()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield lambda: _snapshot(model, device)
    finally:
        put_back()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine allocates chunks next, and they need whole segments


def _snapshot(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A function that puts the modules of ``model`` and the random states back to how they are now."""
    containers = _containers(vars(module) for module in model.modules())
    sources = {id(value): value for held in containers for value in held.values if isinstance(value, _GENERATORS)}
    generators = [_random_state(source) for source in sources.values() if not isinstance(source, random.SystemRandom)]
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        for held in containers:
            _refill(held)
        for set_state in generators:
            set_state()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return put_back


def _random_state(source: Any) -> Callable[[], object]:
    """A function that puts the random number generator ``source`` back to its present state."""
    if isinstance(source, torch.Generator):
        return partial(source.set_state, source.get_state())
    if isinstance(source, np.random.RandomState):
        return partial(source.set_state, source.get_state(legacy=False))
    if isinstance(source, random.Random):
        return partial(source.setstate, source.getstate())
    bits = source.bit_generator if isinstance(source, np.random.Generator) else source
    return partial(setattr, bits, "state", bits.state)


def _containers(attributes: Iterable[dict[str, Any]]) -> list[_Contents]:
    """The contents of the modules' ``attributes`` and of all containers nested in them, each container once."""
    found: dict[int, _Contents] = {}
    level: list[Any] = list(attributes)
    while level:
        new = {id(value): value for value in level if isinstance(value, _CONTAINERS) and id(value) not in found}
        # An instance of a subclass may have attributes that must agree with its contents.
        own = [vars(value) for value in new.values() if type(value) not in _CONTAINERS and hasattr(value, "__dict__")]
        found |= {id(value): _contents(value) for value in (*new.values(), *own)}
        level = [value for key in new for value in found[key].values if isinstance(value, _CONTAINERS)]
    return list(found.values())


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
