"""Sets up torch's CUDA allocator so that a plan fits where the memory model predicts that it fits."""

from __future__ import annotations

import os

import torch


def use_expandable_segments() -> None:
    """Let the allocator grow segments in place instead of caching blocks of fixed sizes.

    A plan that fills the card leaves no room for cached blocks of sizes that no longer fit. With fixed segments they
    took 2 GiB in a step that used 75 GiB. A setting that the user made in the environment is kept.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
