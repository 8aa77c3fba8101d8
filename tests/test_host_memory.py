"""How host memory is mapped: what makes it fast to place, and safe to fork beside."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from protrain.host_memory import map_host_memory

MIB = 1024**2


def _mapping_of(address: int) -> dict[str, str]:
    """What the system says of the mapping that holds ``address``."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            low, high = (int(bound, 16) for bound in first.split("-"))
            inside = low <= address < high
            if inside:
                found["permissions"] = rest.split()[0]
        elif inside:
            found[first.rstrip(":")] = rest.strip()
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_it_is_private_there_at_once_and_not_inherited() -> None:
    memory = map_host_memory(20 * MIB)
    assert memory.dtype == torch.uint8
    assert memory.numel() == 20 * MIB
    assert not memory.any()
    mapping = _mapping_of(memory.data_ptr())
    assert mapping["permissions"] == "rw-p"
    assert int(mapping["Rss"].split()[0]) >= 20 * 1024, "kB, before anything is written"
    flags = mapping["VmFlags"].split()
    assert "dc" in flags, "a forked process gets no copy"
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags, "huge pages are advised"


def test_sizes_that_are_no_pages_and_nothing() -> None:
    assert map_host_memory(5000).numel() == 5000
    assert map_host_memory(0).numel() == 0
    with pytest.raises(MemoryError, match="cannot map 1024 TiB of host memory"):
        map_host_memory(1 << 50)
