"""Memory that the gradients of several chunks share while updates run inside backward.

A buffer here is what the planner calls a region (``protrain.planning.gradient_regions``), and a plan has
``n_device_gradient`` and ``n_host_gradient`` of them.

A chunk needs its gradient from when that arrives until the chunk is updated. Inside backward this is a short time, so
in place of two bytes for every parameter a few buffers of one chunk each suffice. A chunk acquires a buffer for its
first gradient and releases it when its update is queued. On the device the stream keeps the order of uses. In host
memory the next chunk waits until the update is done.

Where parameters get no gradient, more chunks than planned may have a buffer at once, as their updates come when
backward ends. Then more buffers are allocated, as far as memory allows.
"""

from __future__ import annotations

from torch import Tensor

from protrain.common.errors import PlanError
from protrain.engine.states.arena import whole_pages
from protrain.engine.states.chunks import Chunk
from protrain.engine.units import ManagedModel


class GradientPools:
    """The buffers that persistent chunks share, and those that chunks in host memory share, each if the plan has them.

    Args:
        managed: the model.
    """

    def __init__(self, managed: ManagedModel) -> None:
        plan = managed.plan
        self._memory = memory = managed.memory
        on_device, on_host = managed.layout.region_elements(plan.n_persist)
        # Both by whether the chunks that share buffers are persistent.
        self._elements = {True: on_device, False: on_host}  # of one buffer
        self._free: dict[bool, list[Tensor]] = {}
        if plan.n_device_gradient:
            self._free[True] = list(memory.zeros(plan.n_device_gradient, on_device))
        if plan.n_host_gradient:
            self._free[False] = [memory.arena.take(on_host, memory.dtype) for _ in range(plan.n_host_gradient)]
        self._in_use: dict[Chunk, Tensor] = {}
        self._released: dict[Chunk, Tensor] = {}  # in the order of release; an update may still read them

    def acquire(self, chunk: Chunk) -> None:
        """Give ``chunk`` memory for its gradient until ``release``, if it has none of its own.

        This waits for an update if no buffer is free. A chunk gets the buffer that it has released itself without a
        wait for the updates that read it.
        """
        if chunk in self._in_use or chunk.persistent not in self._free or (chunk.large and not chunk.persistent):
            return
        buffer = self._released.pop(chunk) if chunk in self._released else self._next(chunk.persistent)
        self._in_use[chunk] = buffer
        chunk.grad = buffer[: chunk.shard_elements]

    def release(self, chunk: Chunk) -> None:
        """Take back the buffer of ``chunk``, if it has one. What reads the gradient is queued."""
        if chunk in self._in_use:
            self._released[chunk] = self._in_use.pop(chunk)

    def release_all(self) -> None:
        """Take back all buffers, as all gradients are forgotten."""
        self._released.update(self._in_use)
        self._in_use.clear()

    def _next(self, persistent: bool) -> Tensor:
        if self._free[persistent]:
            return self._free[persistent].pop()
        released = [chunk for chunk in self._released if chunk.persistent is persistent]
        if not released:
            return self._more(persistent)
        # The device may still be updating the first of them when the host is done with later ones.
        chunk = next((one for one in released if one.is_free()), released[0])
        chunk.wait()
        chunk.grad = None
        return self._released.pop(chunk)

    def _more(self, persistent: bool) -> Tensor:
        """Another buffer. PlanError if there is no room for it."""
        memory, elements = self._memory, self._elements[persistent]
        size_bytes = elements * memory.dtype.itemsize
        where, needed_bytes, available_bytes = "host", whole_pages(size_bytes), memory.free_host_bytes
        if persistent:
            where, needed_bytes, available_bytes = "device", size_bytes, memory.free_device_bytes
        if needed_bytes > available_bytes:
            raise PlanError(
                where=where,
                needed_bytes=needed_bytes,
                available_bytes=max(0, available_bytes),
                largest_part="another chunk's gradients",
                remedy="Parameters without a gradient in this backward keep more chunks waiting for its end than "
                f"planned: allow more {where}_memory, or set requires_grad=False for parameters that are never used.",
            )
        if not persistent:
            return memory.arena.take(elements, memory.dtype)
        memory.free_device_bytes -= size_bytes
        return memory.zeros(elements)
