"""A GPU made smaller: torch's allocator refuses what a smaller card would not have."""

from __future__ import annotations

import torch

from protrain.common.tables import parse_memory


def forbid_more(device_memory: str | None, device: torch.device) -> None:
    """Let the allocator have ``device_memory`` ("24GiB") of a GPU, cached blocks included; None or a CPU: all of it."""
    if device_memory is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        limit = parse_memory(device_memory, name="device_memory")
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), torch.cuda.current_device())
