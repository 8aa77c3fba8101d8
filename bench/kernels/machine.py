"""What a figure depends on besides the code: GPU, driver, versions, commit."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bench.train.options import commit_of_checkout
from protrain.cli.summary import device_name
from protrain.common.records import Record
from protrain.hardware.nvml import driver_version
from protrain.profiler.kept_profiles import version_of


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
        triton=version_of("triton"),
        commit=commit_of_checkout(),
    )
