"""Batches that come in host memory, on their way to the device.

[Note: inputs] ``tensor.to(device)`` has the thread wait until all that was queued before is done, so it has nothing
queued when the device begins the step. And its copy waits for whatever goes up at that time, weights that were updated
early for example, as a copy engine takes one thing after another. So inputs are put aside in pinned memory, and a
kernel that runs in its turn reads them from there.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from protrain.common import batch as batches
from protrain.engine.streams import Mark, Streams
from protrain_kernels import from_host


class Inputs:
    """What is on its way to ``device``."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._aside: deque[tuple[Mark, list[Tensor]]] = deque()  # what is being read, until which point

    def __del__(self) -> None:
        """Nobody else may get what is still being read."""
        if self._aside and not sys.is_finalizing():
            self._aside[-1][0].wait()

    def to_device(self, tree: Any) -> Any:
        """``tree`` with every tensor on the device, or itself where they all are there.

        Kernels launched on the compute stream from now on find the values there, and the caller may change its own at
        once.
        """
        while self._aside and self._aside[0][0].reached():
            self._aside.popleft()
        aside: list[Tensor] = []
        moved = batches.move(tree, self._device, lambda tensor: self._moved(tensor, aside))
        if aside:
            mark = self._streams.mark()
            self._streams.compute_reached(mark)
            self._aside.append((mark, aside))
        return moved

    def _moved(self, tensor: Tensor, aside: list[Tensor]) -> Tensor:
        if self._is_here(tensor):
            return tensor
        if not _is_plain(tensor):
            return tensor.to(self._device)
        # Not of the arena: nobody knows beforehand how large the next batch is.
        source = torch.empty_like(tensor, pin_memory=self._device.type == "cuda").copy_(tensor)
        target = torch.empty_like(source, pin_memory=False, device=self._device)
        from_host(_bytes(source), _bytes(target))
        aside.append(source)
        return target

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self._device


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of ``tensor``, in host memory, are all there is to it."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or forward_ad._current_level >= 0
    return not tensor.requires_grad and not transformed


def _bytes(tensor: Tensor) -> Tensor:
    """Of its storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
