"""What NVIDIA's management library says of a card and its link, without touching CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_FAULTS = 0x08 | 0x20 | 0x40 | 0x80  # hardware slowdown, software and hardware thermal slowdown, power brake


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """A card as its driver describes it. A value that the driver does not tell is None; virtual machines hide many."""

    driver: str
    pcie_generation: int | None  # at this moment; an idle link may slow down, so it is read after a copy
    pcie_width: int | None
    pcie_generation_max: int | None  # what card and slot allow together
    pcie_width_max: int | None
    throttled: bool  # at this moment, by heat or by the hardware; a power limit alone is no fault


def gpu_facts(device: torch.device) -> GpuFacts | None:
    """Facts of ``device``, or None if it is no GPU, or without NVIDIA's library or driver."""
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # without the library; an old package of the same name also fails by other errors than its own
        return None
    try:
        handle = _handle(pynvml, str(torch.cuda.get_device_properties(device).uuid))
        return GpuFacts(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            pcie_generation=_ask(pynvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_width=_ask(pynvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            pcie_generation_max=_ask(pynvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width_max=_ask(pynvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
            throttled=bool((_ask(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0) & _FAULTS),
        )
    except Exception:  # the same
        return None
    finally:
        pynvml.nvmlShutdown()


def driver_version(device: torch.device) -> str:
    """Version of the driver of a CUDA ``device``: "unknown" where nothing tells it, and "none" for a CPU."""
    if device.type != "cuda":
        return "none"
    facts = gpu_facts(device)
    return facts.driver if facts else "unknown"


def _handle(pynvml: Any, identifier: str) -> Any:
    """The card or MIG slice with this identifier, as CUDA_VISIBLE_DEVICES renumbers cards for CUDA but not for NVML."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{identifier}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{identifier}")


def _ask(pynvml: Any, name: str, handle: Any) -> int | None:
    try:
        return int(getattr(pynvml, name)(handle)) or None
    except (pynvml.NVMLError, AttributeError):  # a version of the library may lack a function
        return None
