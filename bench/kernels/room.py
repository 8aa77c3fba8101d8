"""Rows that take more memory than this machine has are left out, and pytest's summary says why."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from protrain.common.tables import format_bytes
from protrain.hardware.memory import available_host_bytes

_HOST_SHARE = 0.8  # of the free host memory; a step of plain torch needs some beside the states


def need_host_bytes(needed_bytes: int) -> None:
    """MemoryError unless ``needed_bytes`` of host memory are free. The system would end the process, not raise it."""
    free_bytes = available_host_bytes()
    if needed_bytes > _HOST_SHARE * free_bytes:
        raise MemoryError(f"{format_bytes(needed_bytes)} of host memory, of which {format_bytes(free_bytes)} are free")


@contextmanager
def leaving_out_what_does_not_fit() -> Iterator[None]:
    """Skip the test whose body lacks memory of the GPU or of the host."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and the next test needs the memory
        reason = " ".join(str(error).split())[:200]
    else:
        return
    # A machine without room for a row says nothing about the kernel, and its other rows are still wanted.
    pytest.skip(f"takes more memory than there is: {reason}")
