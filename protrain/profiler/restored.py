"""The model as it was: what a traced step changes of modules and random states is put back."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_LISTS = (list, deque)
_TABLES = (dict, OrderedDict, defaultdict)


class _Module(NamedTuple):
    """A module's attributes, and what those held that can be added to: lists of values, and hooks above all."""

    now: dict[str, Any]
    held: dict[str, Any]
    containers: list[tuple[Any, Any]]


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[Callable[[], Callable[[], None]]]:
    """Training mode inside; afterwards modules' attributes and random states as before.

    Yields what takes a picture of these and returns a rewind to it. A rewind between steps needs one that was taken
    with the stand-ins for weights in place: recurrent modules have lists of their weights, and where those are not the
    parameters they flatten these anew.

    What an attribute refers to is put back, and what a list, a dictionary or a set among them holds, not what forward
    did to other objects. A model may register hooks on itself in its first forward and remember that it did, as those
    of transformers do: with the memory alone put back, the next forward would register them again.
    """
    put_back = _picture(model, device)
    try:
        model.train()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            yield lambda: _picture(model, device)
    finally:
        put_back()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the engine's chunks come next and want whole segments


def _picture(model: nn.Module, device: torch.device) -> Callable[[], None]:
    """What puts the modules of ``model`` and random states back to how they are now."""
    modules = _attributes(model)
    values = {id(value): value for module in modules for value in module.held.values()}.values()
    generators = [(value, value.get_state()) for value in values if isinstance(value, torch.Generator)]
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back() -> None:
        for module in modules:
            _refill(module.now, module.held)
            for now, held in module.containers:
                _refill(now, held)
        for generator, state in generators:
            generator.set_state(state)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return put_back


def _attributes(model: nn.Module) -> list[_Module]:
    return [
        _Module(
            now=vars(module),
            held=vars(module).copy(),
            containers=[
                (value, value.copy()) for value in vars(module).values() if type(value) in (*_LISTS, *_TABLES, set)
            ],
        )
        for module in model.modules()
    ]


def _refill(now: Any, held: Any) -> None:
    """Have ``now`` hold again what its copy ``held`` does; values are compared by identity, as tensors may be."""
    if isinstance(now, dict):
        if now.keys() != held.keys() or any(now[name] is not value for name, value in held.items()):
            now.clear()
            now.update(held)
    elif isinstance(now, set):
        if now != held:
            now.clear()
            now.update(held)
    elif len(now) != len(held) or any(value is not kept for value, kept in zip(now, held, strict=True)):
        now.clear()
        now.extend(held)
