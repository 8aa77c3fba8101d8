"""Host memory and cores that this process may use, by the system's figures and the limits of its control groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_host_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken now: the least of what the system has available and what each control group leaves.

    Some virtual machines start with less memory than they grow to. ``host_memory=`` overrides this figure.
    """
    rooms = [room for room in (_system_available(root), *_group_rooms(root)) if room is not None]
    if not rooms:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min(rooms))


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may keep busy, by its affinity and by the time that its control groups grant.

    With more threads than that, the system stops all of them for the rest of every tenth of a second.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = [cores for group, _ in _groups(root, "cpu") if (cores := _granted_cores(group)) is not None]
    return max(1, int(min([allowed, *granted])))


def _system_available(root: Path) -> int | None:
    text = _read(root / "proc/meminfo")
    for line in (text or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """Every control group above this process that may limit ``controller``, and whether it is of version 1."""
    base = root / _CGROUPS.relative_to("/")
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = (base / controller if controllers else base) / path.strip("/")
        while group != base.parent:
            yield group, bool(controllers)
            group = group.parent


def _group_rooms(root: Path) -> Iterator[int | None]:
    """How much memory every control group above this process leaves."""
    for group, is_first in _groups(root, "memory"):
        if is_first:
            yield _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            yield _room(group, "memory.max", "memory.current", "inactive_file")


def _granted_cores(group: Path) -> float | None:
    """The cores that a group grants by a quota of time in every period, in either version. None means no limit."""
    both = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, period, *_ = [*both.split(), "", ""]
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _room(group: Path, limit: str, used: str, cache: str) -> int | None:
    limit_text, used_text = _read(group / limit), _read(group / used)
    if limit_text is None or used_text is None or not limit_text.strip().isdigit():  # "max" means no limit
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
    """The processor's model as the system names it, or its architecture where the system does not name it."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
