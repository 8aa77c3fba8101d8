"""The user's calibrated profiles: one file for each machine that was measured, found again by what the machine is.

They lie in ProTrain's cache, under ``hardware``. A home may serve unlike machines, and a driver may change: a profile
counts only where GPU, driver, torch, number of processes, processor and cores are those that it was measured with, in
the way that calibration measures now. A file that can't be read any more, or of an earlier form, counts as absent.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from protrain.hardware.memory import processor_name, usable_cores
from protrain.hardware.nvml import driver_version
from protrain.hardware.profile import HardwareProfile
from protrain_kernels.cache_folder import cache_folder, keeps_measurements, say_unwritable

# Raised where a figure comes to mean something else, so that older profiles are measured again.
# 2: streamed updates read their gradients from host memory, as in a step. 3: they are of a whole chunk; and the host
# updates moments in bf16 by another kernel. 4: what runs beside others goes over more memory than caches hold.
# 5: streamed updates copy the states, and never reach into host memory.
_METHOD = 5


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a measured profile depends on; fields are named as the profile's."""

    name: str
    driver: str
    torch_version: str
    world_size: int
    processor: str
    cpu_threads: int
    method: int

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        """The machine at hand with ``device``, and the run that this process belongs to."""
        return cls(
            name=device_name(device),
            driver=driver_version(device),
            torch_version=torch.__version__,
            world_size=world_size(),
            processor=processor_name(),
            cpu_threads=usable_cores(),
            method=_METHOD,
        )

    @property
    def path(self) -> Path:
        """Where its profile is kept."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        slug = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return cache_folder() / "hardware" / f"{slug}-x{self.world_size}-{digest}.json"

    def fits(self, profile: HardwareProfile) -> bool:
        """Whether ``profile`` was measured on this machine."""
        return profile.source == "measured" and all(
            getattr(profile, field) == value for field, value in vars(self).items()
        )


def device_name(device: torch.device) -> str:
    """The name of a GPU; of a CPU that plays the device, how many cores it has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {usable_cores()} cores"


def world_size() -> int:
    """Processes of this run: of the process group, or as torchrun says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def cached(device: torch.device) -> HardwareProfile | None:
    """The profile that was measured on this machine; None where there is none, or none that can be read."""
    if not keeps_measurements():
        return None
    machine = Machine.of(device)
    try:
        profile = HardwareProfile.load(machine.path)
    except ValueError:
        return None
    return profile if machine.fits(profile) else None


def store(profile: HardwareProfile, machine: Machine) -> None:
    """Keep a measured ``profile`` for the next time, where the cache can be written."""
    assert machine.fits(profile)
    if not keeps_measurements():
        return
    try:
        machine.path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(machine.path)
    except OSError as error:  # a home that is read-only costs another calibration, nothing else
        say_unwritable(cache_folder(), error.strerror or type(error).__name__)
