"""Profiles that come with ProTrain, as JSON in ``profiles/``. Each is of a whole machine as it is usually found."""

from __future__ import annotations

import os
from importlib.resources import files

from protrain.hardware.profile import HardwareProfile

# From what the name of a GPU contains to its profile. The profiles of H100 and H200 are measured. The others are their
# datasheets times the share of its own datasheet that an H100 reached.
_BY_GPU = {"H100": "h100", "H200": "h200", "A100": "a100", "RTX 3090": "rtx3090"}


def shipped_names() -> list[str]:
    """The names that :func:`load` takes without a file."""
    return sorted(_BY_GPU.values())


def load(name_or_path: str | os.PathLike[str]) -> HardwareProfile:
    """The shipped profile of a name such as "h100", or the profile in a JSON file. ValueError when there is neither."""
    text = os.fspath(name_or_path)
    if text.lower() in shipped_names():
        resource = files("protrain.hardware").joinpath("profiles", f"{text.lower()}.json")
        return HardwareProfile.from_json(resource.read_text())
    if not os.path.exists(text):
        raise ValueError(f"no hardware profile {text!r}: give a JSON file, or one of {', '.join(shipped_names())}")
    return HardwareProfile.load(text)


def of_gpu(gpu_name: str) -> HardwareProfile | None:
    """The shipped profile of the GPU that the driver calls ``gpu_name``, or None."""
    return next((load(name) for part, name in _BY_GPU.items() if part in gpu_name), None)
