"""Plans go by what calibration measured on this machine, as the README advises; a benchmark sees to it."""

from __future__ import annotations

import subprocess
import sys

import torch

# In a process of its own: a CUDA context here would take memory from those that are measured.
_CALIBRATE = """
import sys
import torch
from protrain.hardware import detect
if detect(torch.device("cuda")).source == "measured":
    sys.exit()
print("calibrating this machine first", file=sys.stderr, flush=True)
import protrain
protrain.calibrate("cuda")
"""


_THREADS = """
import torch
from protrain.hardware import detect
print(detect(torch.device("cuda")).host_adam_threads or 1)
"""


def calibrate_once() -> None:
    """Calibrate this machine's GPU, if it has one, unless that was done before. CalledProcessError when it fails."""
    if torch.cuda.is_available():
        subprocess.run([sys.executable, "-c", _CALIBRATE], check=True)


def host_adam_threads() -> int:
    """The threads of the host's AdamW on this machine, which has a GPU. CalledProcessError when it fails."""
    done = subprocess.run([sys.executable, "-c", _THREADS], check=True, capture_output=True, text=True)
    return int(done.stdout)
