"""Plans go by what calibration measured on this machine, as the README advises; a benchmark sees to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# In a process of its own: a CUDA context here would take memory from those that are measured.
_IS_CALIBRATED = """
import sys
import torch
from protrain.hardware.cache import Machine
print(Machine.of(torch.device(sys.argv[1]), processes=int(sys.argv[2])).path.exists())
"""


_THREADS = """
import torch
from protrain.hardware.detection import detect
print(detect(torch.device("cuda")).host_adam_threads or 1)
"""


def calibrate_once(gpus: int = 1) -> None:
    """Calibrate ``gpus`` of this machine, if it has one, unless that was done before. CalledProcessError on failure."""
    if torch.cuda.is_available() and not is_calibrated("cuda", gpus):
        print("calibrating this machine first", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "protrain", "calibrate", "--gpus", str(gpus)], check=True)


def is_calibrated(device: str, processes: int) -> bool:
    """Whether ranks that train on ``device`` here, so many together, find a profile that as many have measured."""
    command = [sys.executable, "-c", _IS_CALIBRATED, device, str(processes)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() == "True"


@contextmanager
def apart() -> Iterator[None]:
    """ProTrain's cache is an empty folder, for this process and those that it starts, as long as the context lasts.

    A machine that is slowed for a while is measured anew, and what is measured does not become the machine's own.
    """
    before = os.environ.get("PROTRAIN_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROTRAIN_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["PROTRAIN_CACHE"]
            if before is not None:
                os.environ["PROTRAIN_CACHE"] = before


def host_adam_threads() -> int:
    """The threads of the host's AdamW on this machine, which has a GPU. CalledProcessError when it fails."""
    done = subprocess.run([sys.executable, "-c", _THREADS], check=True, capture_output=True, text=True)
    return int(done.stdout)
