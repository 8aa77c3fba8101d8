"""Plans go by what calibration measured on this machine, as the README advises; a benchmark sees to it."""

from __future__ import annotations

import subprocess
import sys

import torch

# In a process of its own: a CUDA context here would take memory from those that are measured.
_IS_CALIBRATED = """
import sys
import torch
from protrain.hardware.cache import Machine
print(Machine.of(torch.device(sys.argv[1]), processes=int(sys.argv[2])).path.exists())
"""


def calibrate_once(gpus: int = 1) -> None:
    """Calibrate ``gpus`` of this machine, if it has one, unless that was done before. CalledProcessError on failure."""
    if torch.cuda.is_available() and not _is_calibrated("cuda", gpus):
        print("calibrating this machine first", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "protrain", "calibrate", "--gpus", str(gpus)], check=True)


def _is_calibrated(device: str, processes: int) -> bool:
    """Whether ranks that train on ``device`` here, so many together, find a profile that as many have measured."""
    command = [sys.executable, "-c", _IS_CALIBRATED, device, str(processes)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() == "True"
