"""Host memory is mapped so that it is fast to place and safe beside forked processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protrain.common.host_memory import HostMapping

MIB = 1024**2


def _mapping_of(address: int) -> dict[str, str]:
    """What the system reports on the mapping that contains ``address``."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        (bounds, permissions, *_), *rest = (line.split(maxsplit=2) for line in mapping.splitlines())
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            return {"permissions": permissions, **{name.rstrip(":"): " ".join(value) for name, *value in rest}}
    raise AssertionError("there is no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_it_is_private_there_at_once_and_not_inherited() -> None:
    memory = HostMapping(20 * MIB).tensor()
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
    assert HostMapping(5000).tensor().numel() == 5000
    assert HostMapping(0).tensor().numel() == 0
    with pytest.raises(MemoryError, match="cannot map 1024 TiB of host memory"):
        HostMapping(1 << 50).tensor()


_FORKS = """
import ctypes, gc, mmap, os
from protrain.common.host_memory import HostMapping
mapping, dropped = HostMapping(1 << 20), HostMapping(1 << 20)
addresses = [one.tensor().data_ptr() for one in (mapping, dropped)]
cycle = [dropped]
cycle.append(cycle)
gc.disable()
del dropped, cycle  # nobody's, and not collected yet
if os.fork() == 0:
    libc = ctypes.CDLL(None)
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10
    for address in addresses:  # free here: what the child maps may lie there
        assert libc.mmap(address, 1 << 20, 3, fixed, -1, 0) == address
    del mapping
    gc.collect()
    for address in addresses:
        ctypes.memset(address, 1, 1 << 20)
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what is forked is Linux's")
def test_a_forked_process_never_unmaps_what_it_did_not_inherit() -> None:
    found = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
