"""Profiles that come with ProTrain, as JSON in ``profiles/``: whole machines as they are usually found."""

from __future__ import annotations

import os
from importlib.resources import files

from protrain.hardware.profile import HardwareProfile

# What a GPU's name contains -> its profile. Those of H100 and H200 are measured; the others scale the datasheets by
# what an H100 reached of its own.
_BY_GPU = {"H100": "h100", "H200": "h200", "A100": "a100", "RTX 3090": "rtx3090"}


def shipped_names() -> list[str]:
    """Names that :func:`load` takes without a file."""
    return sorted(_BY_GPU.values())


def load(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The shipped profile of that name ("h100"), or the one in that JSON file. ValueError when there is neither."""
    text = os.fspath(name_or_path)
    if text.lower() in shipped_names():
        resource = files("protrain.hardware").joinpath("profiles", f"{text.lower()}.json")
        return HardwareProfile.from_json(resource.read_text())
    if not os.path.exists(text):
        raise ValueError(f"no hardware profile {text!r}: give a JSON file, or one of {', '.join(shipped_names())}")
    return HardwareProfile.load(text)


def of_gpu(gpu_name: str) -> HardwareProfile | None:
    """The shipped profile of the GPU that the driver calls ``gpu_name``, if there is one."""
    return next((load(name) for part, name in _BY_GPU.items() if part in gpu_name), None)
