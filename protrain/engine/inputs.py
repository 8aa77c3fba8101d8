"""Batches in host memory, on their way to the device.

[Note: inputs] ``tensor.to(device)`` blocks the host until all work that was queued before is done. The device would
then begin a step with an empty queue. The copy would also wait for uploads that are under way, for example of weights
that were updated speculatively, as a copy engine takes one transfer after the other. So inputs are copied into pinned
memory, and a kernel on the compute stream reads them from there.
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
from protrain.engine.weights.views import storage_bytes
from protrain_kernels import from_host


class Inputs:
    """Copies batches to ``device``, and keeps their pinned copies alive until these were read."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._in_flight: deque[tuple[Mark, list[Tensor]]] = deque()  # pinned inputs, free after the mark

    def __del__(self) -> None:
        """Keep pinned inputs alive until the copy kernel has read them."""
        if self._in_flight and not sys.is_finalizing():
            self._in_flight[-1][0].wait()

    def to_device(self, tree: Any) -> Any:
        """``tree`` with every tensor on the device; ``tree`` itself if all tensors are there already.

        Kernels that are launched on the compute stream from now on find the values there. The caller may change its own
        tensors at once.
        """
        while self._in_flight and self._in_flight[0][0].reached():
            self._in_flight.popleft()
        pinned: list[Tensor] = []
        moved = batches.move(tree, self._device, lambda tensor: self._upload(tensor, pinned))
        if pinned:
            mark = self._streams.mark()
            self._streams.compute.place(mark)
            self._in_flight.append((mark, pinned))
        return moved

    def _upload(self, tensor: Tensor, pinned: list[Tensor]) -> Tensor:
        if self._is_here(tensor):
            return tensor
        if not _is_plain(tensor):
            return tensor.to(self._device)
        # The arena has no memory for it, as the size of the next batch is not known beforehand.
        source = torch.empty_like(tensor, pin_memory=self._device.type == "cuda").copy_(tensor)
        target = torch.empty_like(source, pin_memory=False, device=self._device)
        from_host(storage_bytes(source), storage_bytes(target))
        pinned.append(source)
        return target

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device == self._device


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` lies in host memory and consists of its bytes alone, without a graph or a transformation."""
    if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    transformed = torch._C._functorch.is_functorch_wrapped_tensor(tensor) or forward_ad._current_level >= 0
    return not tensor.requires_grad and not transformed
