"""What the kernels share: tile and padding sizes, launch options, and argument checks that name the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

TILE_ROWS = 16
TILE_LANES = 1024
TILE = TILE_ROWS * TILE_LANES  # elements under one partial sum of squares
PADDING = 128  # every length and offset inside a chunk is a multiple of this many elements
ALIGNMENT_BYTES = 256  # where a slice may start inside its allocation
# Every operation is rounded once, as Triton must not contract multiplies and adds. With four warps a thread has 8
# elements of a 1024-wide block, which are 16 bytes of a 16-bit type.
LAUNCH_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
# With eight warps on two tiles a thread has 16 bytes of a 16-bit type as well, and two trees of additions share their
# barriers.
TILE_OPTIONS: dict[str, Any] = {**LAUNCH_OPTIONS, "num_warps": 8}
TILE_GROUP = 2  # how many tiles of one tensor a program takes
TILE_UNROLL = 4  # how many rows are loaded together: all 16 at once would spill registers
TILE_CONSTANTS = (TILE_GROUP, TILE_ROWS, TILE_LANES, TILE_UNROLL)
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DEVICES = ("cpu", "cuda")  # whose memory the kernels reach


def tiles(numel: int) -> int:
    """The number of partial sums of squares for ``numel`` elements: one for each started tile of ``TILE`` elements."""
    return -(-numel // TILE)


def padded(numel: int) -> int:
    """``numel`` rounded up to a multiple of ``PADDING`` elements."""
    return -(-numel // PADDING) * PADDING


def check_memory(name: str, *, device: torch.device, negates: bool) -> None:
    """ValueError unless a kernel can read memory of ``device``, and finds the values of the tensor ``name`` there."""
    if device.type not in DEVICES:
        raise ValueError(f"{name} is on {device}: the kernels take tensors on {' and '.join(DEVICES)}")
    if negates:
        raise ValueError(f"{name} is a view that negates what its memory holds: pass {name}.resolve_neg()")


def check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """ValueError if two of ``tensors`` share memory, as one of them is written while the other is used."""
    names, reached, last = list(tensors), 0, 0
    for start, size, index in sorted([(t.data_ptr(), t.nbytes, index) for index, t in enumerate(tensors.values())]):
        if size and start < reached:
            raise ValueError(f"{names[max(index, last)]} overlaps {names[min(index, last)]}: pass memory of its own")
        if start + size > reached:
            reached, last = start + size, index


def check_vector(
    name: str, tensor: torch.Tensor, *, dtypes: Collection[torch.dtype], device: torch.device, numel: int | None = None
) -> None:
    """ValueError unless ``tensor`` is 1-d, contiguous, of one of ``dtypes``, on ``device``, with ``numel`` elements."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(str(d) for d in dtypes)}, not {tensor.dtype}: cast it first")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}: move it there")
    check_memory(name, device=device, negates=tensor.is_neg())
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-d and contiguous: pass {name}.contiguous().view(-1)")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements and needs {numel}")


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """ValueError unless ``tensor`` starts at a multiple of 256 bytes in its storage and has a padded length."""
    if tensor.numel() % PADDING:
        raise ValueError(f"{name} has {tensor.numel()} elements: pad it to a multiple of {PADDING}")
    if tensor.storage_offset() * tensor.element_size() % ALIGNMENT_BYTES:
        raise ValueError(f"{name} must start at a multiple of {ALIGNMENT_BYTES} bytes in its storage")


def check_scalar(name: str, scalar: torch.Tensor | None, *, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError unless ``scalar`` is None or one value of ``dtype`` on ``device``."""
    if scalar is not None and (scalar.dtype != dtype or scalar.numel() != 1 or scalar.device != device):
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} must be one {kind} on {device}, not {scalar.numel()} {scalar.dtype} on {scalar.device}"
        )
