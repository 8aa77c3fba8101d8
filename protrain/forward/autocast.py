"""What torch.autocast does to operators on a device at this moment."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type to which torch.autocast casts now, or None where it is off or does not exist."""
    kind = _kind(device_type)
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a context in which torch.autocast does to operators what it does now."""
    kind = _kind(device_type)
    if not torch.amp.is_autocast_available(kind):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    cache_enabled = torch.is_autocast_cache_enabled()

    def again() -> AbstractContextManager[Any]:
        # There is nearly always none, so this must be fast.
        if not (enabled or torch.is_autocast_enabled(kind)):
            return nullcontext()
        return torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    return again


def _kind(device_type: str) -> str:
    """The device whose autocast counts. The meta device stands for whichever a step is counted for."""
    if device_type != "meta":
        return device_type
    return "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
