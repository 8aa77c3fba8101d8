"""What a figure depends on besides the code: GPU, driver, versions, commit."""

from __future__ import annotations

import functools
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from protrain.cli.summary import device_name
from protrain.common.records import Record
from protrain.hardware.nvml import driver_version

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """The machine and the software that a row was measured with."""

    gpu: str  # "none" without one
    driver: str
    cpu: str
    torch: str
    triton: str
    commit: str  # with "+" where the sources differ from it


@functools.cache
def this_machine() -> Machine:
    """The machine at hand."""
    has_gpu = torch.cuda.is_available()
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else "none",
        driver=driver_version(torch.device("cuda" if has_gpu else "cpu")),
        cpu=device_name(torch.device("cpu")),
        torch=torch.__version__,
        triton=package_version("triton") or "not installed",
        commit=_commit(),
    )


def package_version(name: str) -> str | None:
    """The installed version of the package ``name``; None when it isn't."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    def git(*words: str) -> str:
        command = ["git", "-C", str(_ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
