"""What torch.autocast does to operators on a device at this moment.

The meta device has no autocast. What is counted there has the types that the model's tensors have without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The type to which torch.autocast casts now, or None where it is off or does not exist."""
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_of_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes a context in which torch.autocast does to operators what it does now."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cache_enabled = torch.is_autocast_cache_enabled()

    def again() -> AbstractContextManager[Any]:
        # There is nearly always none, so this must be fast.
        if not (enabled or torch.is_autocast_enabled(device_type)):
            return nullcontext()
        return torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)

    return again
