"""What results state of the machine and of the packages that made them."""

from __future__ import annotations

import platform

import torch

from protrain.hardware.memory import processor_name
from protrain.profiler.kept_profiles import version_of


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that results depend on."""
    others = "triton", "transformers", "protrain"  # of which this one may run from a checkout
    found = {package: version_of(package) for package in others}
    return {"python": platform.python_version(), "torch": torch.__version__, **found}


def device_name(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' * (threads > 1)}"
