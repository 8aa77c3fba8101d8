"""The user's calibrated profiles: one file for each machine that was measured, named by what the machine is.

The files lie in ProTrain's cache, under ``hardware``. A home may serve unlike machines, and a driver may change. So a
profile counts only where GPU, driver, torch, number of processes and of machines, processor and cores are those that it
was measured with, and where calibration still measures in the same way. A file that cannot be read, or has an earlier
form, counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from protrain.common.cache import cache_folder, keeps_measurements, say_unwritable
from protrain.distributed.joining import announced_processes, nodes_of
from protrain.hardware.memory import processor_name, usable_cores
from protrain.hardware.nvml import driver_version
from protrain.hardware.profile import HardwareProfile

# Raised when a figure comes to mean something else, so that older profiles are measured again.
# 2: streamed updates read their gradients from host memory, as in a step.
# 3: streamed updates are of a whole chunk, and the host updates moments in bf16 by another kernel.
# 4: what runs beside other work goes over more memory than caches hold.
# 5: streamed updates copy the states, and never reach into host memory.
# 6: a rate alone is measured as the rates beside others are.
_METHOD = 6

_P2P = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a measured profile depends on. The fields are named as those of the profile."""

    name: str
    driver: str
    torch_version: str
    world_size: int
    n_nodes: int
    nccl_p2p: str
    processor: str
    cpu_threads: int
    method: int

    @classmethod
    def of(cls, device: torch.device, *, processes: int | None = None) -> Machine:
        """This machine with ``device``, in a run of so many ``processes`` here. None: the run of this process."""
        world_size = announced_processes() if processes is None else processes
        return cls(
            name=device_name(device),
            driver=driver_version(device),
            torch_version=torch.__version__,
            world_size=world_size,
            n_nodes=nodes_of(world_size) if processes is None else 1,
            nccl_p2p=_told_nccl() if world_size > 1 else "",
            processor=processor_name(),
            cpu_threads=usable_cores(),
            method=_METHOD,
        )

    @property
    def path(self) -> Path:
        """The file of the machine's profile."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        return cache_folder() / "hardware" / f"{self.stem}-{digest}.json"

    @property
    def stem(self) -> str:
        """What the names of files of machines with such a GPU and as many processes begin with."""
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return f"{slug}-x{self.world_size}"


def _told_nccl() -> str:
    """What the environment tells NCCL of copies between GPUs. Without them all goes through the host's memory."""
    return " ".join(f"{name}={os.environ[name]}" for name in _P2P if name in os.environ)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the number of cores of a CPU that plays the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {usable_cores()} cores"


def cached(device: torch.device) -> HardwareProfile | None:
    """The profile that was measured on this machine, or None where no file can be read.

    One that as many processes measured as train now comes first, and then one that a single process measured.
    """
    if not keeps_measurements():
        return None
    for machine in dict.fromkeys((Machine.of(device), Machine.of(device, processes=1))):
        with contextlib.suppress(ValueError):
            return HardwareProfile.load(machine.path)
    return None


def why_not_cached(device: torch.device) -> str | None:
    """Why the newest profile that is kept of such a GPU does not count here: a sentence, or None where none is kept."""
    here = Machine.of(device)
    kept = here.path.parent.glob(f"{here.stem}-{'?' * 12}.json") if keeps_measurements() else ()
    newest = max(kept, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return None
    try:
        profile = HardwareProfile.load(newest)
    except ValueError as error:
        return f"the last calibration cannot be used: {error}"
    changes = [
        f"{field} was {before!r} and is {now!r}"
        for field, now in vars(here).items()
        if (before := getattr(profile, field)) != now
    ]
    if not changes:
        return None
    return f"the last calibration, {newest}, is of another machine or software: {', '.join(changes)}"


def store(profile: HardwareProfile, machine: Machine) -> None:
    """Keep a measured ``profile`` for later runs, where the cache can be written."""
    if not keeps_measurements():
        return
    try:
        machine.path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(machine.path)
    except OSError as error:  # with a read-only home the next run calibrates again
        say_unwritable(cache_folder(), error.strerror or type(error).__name__)
