"""What the device decides about a run or a plan where no option does. It is known by its type, without torch."""

from __future__ import annotations

import re

_DEVICE = re.compile(r"(cuda|cpu)(:\d|:[1-9]\d)?")


def device_type_of(name: str) -> str:
    """The type of the device ``name`` of --device, which is like "cuda", "cuda:1" or "cpu", on this machine or another.

    Raises:
        ValueError: ``name`` is no such device.
    """
    found = _DEVICE.fullmatch(name)
    if found is None:
        raise ValueError(f"--device {name!r} is no device for training: give cuda or cpu")
    return found[1]


def choose_compile(compile: bool | None, device_type: str) -> bool:
    """Whether blocks are compiled. By default they are on a GPU."""
    return device_type == "cuda" if compile is None else compile
