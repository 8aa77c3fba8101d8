"""Host memory and cores that this process may use: the system's figures and its control groups' limits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken now: the least of what the system has available and what each control group leaves.

    Some virtual machines start with less than they grow to: ``host_memory=`` overrides this.
    """
    rooms = [room for room in (_system_available(root), *_group_rooms(root)) if room is not None]
    if not rooms:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(rooms))


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _system_available(root: Path) -> int | None:
    text = _read(root / "proc/meminfo")
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_rooms(root: Path) -> Iterator[int | None]:
    """What every control group above this process leaves, in version 2's files and in version 1's."""
    base = root / _CGROUPS.relative_to("/")
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        group = (base / "memory" if controllers else base) / path.strip("/")
        limit, used, cache = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        while group != base.parent:
            yield _room(group, limit, used, cache)
            group = group.parent


def _room(group: Path, limit: str, used: str, cache: str) -> int | None:
    limit_text, used_text = _read(group / limit), _read(group / used)
    if limit_text is None or used_text is None or not limit_text.strip().isdigit():  # "max": no limit
        return None
    fields = (line.split() for line in (_read(group / "memory.stat") or "").splitlines())
    reclaimable = next((int(field[1]) for field in fields if field[0] == cache), 0)
    return int(limit_text) - int(used_text) + reclaimable


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def processor_name(root: Path = Path("/")) -> str:
    """The processor's model as the system names it; its architecture where it doesn't."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
