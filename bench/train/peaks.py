"""The memory that a worker may take and takes, and the end of its work on the device."""

from __future__ import annotations

import resource
from typing import Any

import torch

from protrain.common.tables import parse_memory


def forbid_more(device_memory: str | None, device: torch.device) -> None:
    """Let the allocator have ``device_memory`` ("24GiB") of a GPU, cached blocks included; None or a CPU: all of it."""
    if device_memory is not None and device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        limit_bytes = parse_memory(device_memory, name="device_memory")
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), torch.cuda.current_device())


def peaks(device: torch.device, beside_torch: int = 0) -> dict[str, Any]:
    """The most memory of this process: of the device since its statistics were reset, of the host since it began.

    ``beside_torch`` are bytes of the device that the contestant has from an allocator of its own.
    """
    on_gpu = device.type == "cuda"
    free, total = torch.cuda.mem_get_info(device) if on_gpu else (0, 0)
    return {
        "device_allocated_bytes": torch.cuda.max_memory_allocated(device) + beside_torch if on_gpu else 0,
        "device_reserved_bytes": torch.cuda.max_memory_reserved(device) + beside_torch if on_gpu else 0,
        "device_other_bytes": total - free - torch.cuda.memory_reserved(device) - beside_torch if on_gpu else 0,
        "host_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def pinned_by_torch(device: torch.device) -> int:
    """The most bytes of host memory that torch's own allocator has pinned."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)) if device.type == "cuda" else 0


def finish(device: torch.device) -> None:
    """Wait for the compute stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
