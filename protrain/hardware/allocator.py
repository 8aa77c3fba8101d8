"""torch's CUDA allocator, set up so that what the memory model predicts is what fits."""

from __future__ import annotations

import os

import torch


def use_expandable_segments() -> None:
    """Let the allocator grow segments in place instead of caching blocks of fixed sizes.

    A plan that fills the card leaves no room for blocks cached in sizes that no longer fit; with fixed segments that
    was 2 GiB on a step that used 75. A choice that the user made in the environment stands.
    """
    if not any(name in os.environ for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
