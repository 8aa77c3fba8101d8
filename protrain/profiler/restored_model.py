"""Puts modules and random states back as they were before a traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from protrain.forward.module_state import SHARED, Contents, RandomState


@contextmanager
def restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in training mode inside, and restore modules' attributes and random states afterwards.

    A snapshot to go back to between steps must be taken with the stand-in weights in place. Recurrent modules keep
    lists of their weights, and where those are not the parameters, they flatten them again.

    All that [Note: contents of modules] names is restored. A model may register hooks on itself in its first forward
    and remember in an attribute that it did, as models of transformers do. If only the attribute were restored, the
    next forward would register the hooks again.
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
    contents = Contents.of(model)
    random_state = RandomState(device, (*contents.generators, *SHARED))

    def put_back() -> None:
        contents.put_back()
        random_state.set()

    return put_back
