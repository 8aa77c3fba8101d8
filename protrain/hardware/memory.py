"""Host memory and cores that this process may use, by the system's figures and the limits of its control groups."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")  # of the files in which the system describes itself
HOST_SHARE = 0.9  # of the available host memory; the rest is left to the data loader and the page cache
_PROCESS_BYTES = 3 * 1024**3  # what Python, torch and CUDA take in the host memory, for each process of a training


def for_training(ram_bytes: int, n_processes: int) -> int:
    """What ``n_processes`` that train may take of a machine with so much RAM.

    The processes themselves take 3 GiB each, but no more than an eighth of the RAM in all. Of what is left a tenth is
    for the data loader, the page cache and the tables of pinned memory.
    """
    return int((ram_bytes - min(n_processes * _PROCESS_BYTES, ram_bytes // 8)) * HOST_SHARE)


def ram_for(host_bytes: int, n_processes: int) -> int:
    """The RAM of a machine of which ``n_processes`` may take ``host_bytes``: the inverse of ``for_training``."""
    left_bytes = host_bytes / HOST_SHARE
    return math.ceil(min(left_bytes + n_processes * _PROCESS_BYTES, left_bytes * 8 / 7))


def available_host_bytes() -> int:
    """Memory that can be taken now: the least of what the system has available and what each control group leaves.

    Some virtual machines start with less memory than they grow to. ``host_memory=`` overrides this figure.
    """
    system = _field(_ROOT / "proc/meminfo", "MemAvailable:")  # in KiB
    rooms = [] if system is None else [int(system.split()[0]) * 1024]
    rooms += [room for group, is_first in _groups("memory") if (room := _room(group, is_first)) is not None]
    if not rooms:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(rooms))


def usable_cores() -> int:
    """How many cores this process may keep busy, by its affinity and by the time that its control groups grant.

    With more threads than that, the system stops all of them for the rest of every tenth of a second.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = [cores for group, _ in _groups("cpu") if (cores := _granted_cores(group)) is not None]
    return max(1, int(min([allowed, *granted])))


def update_threads(cores: int, *, beside_gpu: bool) -> int:
    """The threads of the host's optimizer: all cores but two, or half of them where the CPU plays the device.

    One of the two cores launches kernels. A thread that shared it would have all others wait for it.
    """
    return max(1, cores - 2 if beside_gpu else cores // 2)


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Every control group above this process that may limit ``controller``, and whether it is of version 1."""
    base = _ROOT / "sys/fs/cgroup"
    for line in (_read(_ROOT / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = (base / controller if controllers else base) / path.strip("/")
        while group != base.parent:
            yield group, bool(controllers)
            group = group.parent


def _granted_cores(group: Path) -> float | None:
    """The cores that a group grants by a quota of time in every period, in either version. None means no limit."""
    both = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, period, *_ = [*both.split(), "", ""]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _room(group: Path, is_first: bool) -> int | None:
    """How much memory a group leaves, of version 1 if ``is_first``. None means no limit."""
    limit = _read(group / ("memory.limit_in_bytes" if is_first else "memory.max"))
    used = _read(group / ("memory.usage_in_bytes" if is_first else "memory.current"))
    if limit is None or used is None or not limit.strip().isdigit():  # "max" means no limit
        return None
    reclaimable = _field(group / "memory.stat", "total_inactive_file " if is_first else "inactive_file ")
    return int(limit) - int(used) + int(reclaimable or 0)


def _field(path: Path, name: str) -> str | None:
    """What follows ``name`` on the first line that begins with it, or None where there is no such line."""
    lines = (_read(path) or "").splitlines()
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def processor_name() -> str:
    """The processor's model as the system names it, or its architecture where the system does not name it."""
    named = _field(_ROOT / "proc/cpuinfo", "model name")
    return named.removeprefix(":").strip() if named is not None else platform.processor() or platform.machine()
