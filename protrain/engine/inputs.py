"""Batches: their way to the device, and whether there is memory for one that is larger than planned.

[Note: inputs] ``tensor.to(device)`` blocks the host until all work that was queued before is done. The device would
then begin a step with an empty queue. The copy would also wait for uploads that are under way, for example of weights
that were updated speculatively, as a copy engine takes one transfer after the other. So inputs are copied into pinned
memory, and a kernel on the compute stream reads them from there.

[Note: larger batches] A plan for a small model leaves most of the device free, and one for a model that nearly fills
the device leaves nothing. So a batch that is larger than the planned one trains as planned if its activations fit what
is free, and the plan offloads none of them, as the host may have no memory for more. Otherwise every block is
recomputed for this batch, which never changes the results. If that does not suffice, the batch is refused before its
forward.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from protrain.common import batch as batches
from protrain.common.errors import MisuseError, warn_user
from protrain.common.tables import format_bytes
from protrain.engine.states.arena import EngineMemory
from protrain.engine.streams import Event, Streams
from protrain.engine.weights.views import storage_bytes
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile
from protrain_kernels import from_host


class Inputs:
    """Copies batches to ``device``, and keeps their pinned copies alive until these were read."""

    def __init__(self, device: torch.device, streams: Streams) -> None:
        self._device = device
        self._streams = streams
        self._in_flight: deque[tuple[Event, list[Tensor]]] = deque()  # pinned inputs, free after the event

    def __del__(self) -> None:
        """Keep pinned inputs alive until the copy kernel has read them."""
        if self._in_flight and not sys.is_finalizing():
            self._in_flight[-1][0].synchronize()

    def to_device(self, tree: Any) -> Any:
        """``tree`` with every tensor on the device; ``tree`` itself if all tensors are there already.

        Kernels that are launched on the compute stream from now on find the values there. The caller may change its own
        tensors at once.
        """
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        pinned: list[Tensor] = []
        moved = batches.move(tree, self._device, lambda tensor: self._upload(tensor, pinned))
        if pinned:
            read = self._streams.event()
            self._streams.compute.record_event(read)
            self._in_flight.append((read, pinned))
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
    return not (
        tensor.requires_grad
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        or forward_ad._current_level >= 0
    )


_REMEDY = "pass an example_batch to protrain.wrap that is as long in every dimension as any batch of the training"


class PlannedBatch:
    """The shapes of the planned batch.

    Args:
        profile: of the model and that batch.
        plan: for them.
        model: the model.
        memory: of the engine. A larger batch takes what it needs of ``free_device_bytes`` for good, as later ones may
            be as large.
        names: of the arguments that the model's forward takes by position.
    """

    def __init__(
        self, profile: ModelProfile, plan: Plan, model: nn.Module, memory: EngineMemory, names: list[str]
    ) -> None:
        self._names = names
        self._tokens = profile.tokens
        self._shapes = {self._by_keyword(name): shape for name, shape in profile.batch_shapes.items()}
        # Recurrent and attention modules of torch have batch_first=False when sequences come first.
        self._rows_first = all(getattr(module, "batch_first", True) for module in model.modules())
        self._offloads = plan.n_swap + plan.n_ckpt_swap > 0
        self._memory = memory
        self._counted_bytes = memory.activations.as_planned  # of device memory, for activations
        self._warned = False

    def must_recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is memory for a training batch only if every block is recomputed.

        Args:
            args: by position, with which the batch calls the model.
            kwargs: by name.

        Raises:
            MisuseError: even so it may need more memory than there is. An OOM later would lose the step.
        """
        growth, what = self._growth(args, kwargs)
        if growth == 1:
            return False
        planned_bytes, recomputed_bytes = (math.ceil(growth * size_bytes) for size_bytes in self._memory.activations)
        if not self._offloads and self._take(planned_bytes):
            return False
        if not self._take(recomputed_bytes):
            more_bytes = recomputed_bytes - self._counted_bytes
            raise MisuseError(
                f"{what}: it may need {format_bytes(more_bytes)} more of device memory, and "
                f"{format_bytes(self._memory.free_device_bytes)} are free; {_REMEDY}"
            )
        if not self._warned:
            self._warned = True
            warn_user(
                f"{what}: every block is recomputed for it, which may take longer than a plan for such batches; "
                f"{_REMEDY}"
            )
        return True

    def _take(self, needed_bytes: int) -> bool:
        """Count ``needed_bytes`` in all for activations, from now on. False if there are not as many."""
        more_bytes = max(0, needed_bytes - self._counted_bytes)
        if more_bytes > self._memory.free_device_bytes:
            return False
        self._memory.free_device_bytes -= more_bytes
        self._counted_bytes += more_bytes
        return True

    def _growth(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str]:
        """How many times the memory of the planned batch a batch may need, and how it is larger, in words."""
        given = {self._by_keyword(str(at)): value for at, value in enumerate(args)} | kwargs
        tensors = dict(batches.named_tensors(given))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        growths = {
            name: batches.growth(shape, self._shapes[name], rows_first=self._rows_first)
            for name, shape in shapes.items()
            if name in self._shapes
        }
        if growths:
            name = max(growths, key=growths.__getitem__)
            planned = f"larger than the {self._shapes[name]} that the plan was made for"
            return growths[name], f"{name} has shape {shapes[name]}, {planned}"
        tokens = batches.tokens(tensors) if tensors else 0
        growth = max(1.0, tokens / max(1, self._tokens)) ** 2  # as if all of them were in one sequence
        return growth, f"the batch has {tokens} tokens, more than the {self._tokens} that the plan was made for"

    def _by_keyword(self, name: str) -> str:
        """``name`` of an input, which has dots if it is nested, with its keyword in place of its position."""
        position, dot, rest = name.partition(".")
        known = position.isdecimal() and int(position) < len(self._names)
        return (self._names[int(position)] if known else position) + dot + rest
