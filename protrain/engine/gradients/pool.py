"""Memory that the gradients of several chunks share while updates run inside backward.

A buffer here is what the planner calls a region (``protrain.planning.memory.gradient_regions``), and a plan has
``n_device_gradient`` and ``n_host_gradient`` of them.

A chunk needs its gradient from when that arrives until the chunk is updated. Inside backward this is a short time, so
in place of two bytes for every parameter a few buffers of one chunk each suffice. A chunk acquires a buffer for its
first gradient and releases it when its update is queued. On the device the stream keeps the order of uses. In host
memory the next chunk waits until the update is done.

Where parameters get no gradient, more chunks than planned may have a buffer at once, as their updates come when
backward ends. Then more buffers are allocated, as far as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from protrain.common.errors import PlanError
from protrain.engine.states.arena import whole_pages
from protrain.engine.states.chunks import Chunk
from protrain.engine.units import ManagedModel


class GradientPool:
    """The shared gradient buffers on the device, or those in host memory.

    Args:
        buffers: each large enough for the gradient of any chunk that shares them.
        more: allocates another buffer, or raises PlanError.
    """

    def __init__(self, buffers: Iterable[Tensor], *, more: Callable[[], Tensor]) -> None:
        self._free = list(buffers)
        self._more = more
        self._in_use: dict[Chunk, Tensor] = {}
        self._released: dict[Chunk, Tensor] = {}  # in the order of release; an update may still read them

    def acquire(self, chunk: Chunk) -> None:
        """Give ``chunk`` memory for its gradient until ``release``. Waits for an update if no buffer is free.

        A chunk gets the buffer that it has released itself without a wait for the updates that read it.
        """
        if chunk in self._in_use:
            return
        buffer = self._released.pop(chunk) if chunk in self._released else self._next()
        self._in_use[chunk] = buffer
        chunk.grad = buffer[: chunk.shard_elements]
        if not chunk.persistent:
            chunk.host_grad = chunk.grad

    def release(self, chunk: Chunk) -> None:
        """Take back the buffer of ``chunk``. What reads the gradient is queued."""
        if chunk in self._in_use:
            self._released[chunk] = self._in_use.pop(chunk)

    def release_all(self) -> None:
        """Take back all buffers, as all gradients are forgotten."""
        self._released.update(self._in_use)
        self._in_use.clear()

    def _next(self) -> Tensor:
        if self._free:
            return self._free.pop()
        if not self._released:
            return self._more()
        # The device may still be updating the first of them when the host is done with later ones.
        chunk = next((one for one in self._released if one.is_free()), next(iter(self._released)))
        chunk.wait()
        chunk.grad = None
        if not chunk.persistent:
            chunk.host_grad = None
        return self._released.pop(chunk)


class GradientPools:
    """The pool of persistent chunks and the pool of chunks in host memory, each if the plan has it."""

    def __init__(self, managed: ManagedModel) -> None:
        plan = managed.plan
        self._memory = memory = managed.memory
        self._elements = on_device, on_host = managed.layout.region_elements(plan.n_persist)  # of one buffer
        self._pools: dict[bool, GradientPool] = {}  # by whether the chunks that share it are persistent
        if plan.n_device_gradient:
            buffers: Iterable[Tensor] = memory.zeros(plan.n_device_gradient, on_device)
            self._pools[True] = GradientPool(buffers, more=self._more_on_device)
        if plan.n_host_gradient:
            buffers = [memory.arena.take(on_host, memory.dtype) for _ in range(plan.n_host_gradient)]
            self._pools[False] = GradientPool(buffers, more=self._more_in_host_memory)

    def of(self, chunk: Chunk) -> GradientPool | None:
        """The pool in which ``chunk`` shares memory for its gradient. None: it has a gradient of its own."""
        return None if chunk.large and not chunk.persistent else self._pools.get(chunk.persistent)

    def acquire(self, chunk: Chunk) -> None:
        """Give ``chunk`` memory for its gradient, if it has none of its own."""
        if (pool := self.of(chunk)) is not None:
            pool.acquire(chunk)

    def release(self, chunk: Chunk) -> None:
        """The update of ``chunk`` is queued, and nothing else needs its gradient."""
        if (pool := self.of(chunk)) is not None:
            pool.release(chunk)

    def release_all(self) -> None:
        """All gradients are forgotten."""
        for pool in self._pools.values():
            pool.release_all()

    def _more_on_device(self) -> Tensor:
        memory, elements = self._memory, self._elements[0]
        size_bytes = elements * memory.dtype.itemsize
        _check_room("device", size_bytes, memory.free_device_bytes)
        memory.free_device_bytes -= size_bytes
        return memory.zeros(elements)

    def _more_in_host_memory(self) -> Tensor:
        memory, elements = self._memory, self._elements[1]
        _check_room("host", whole_pages(elements * memory.dtype.itemsize), memory.free_host_bytes)
        return memory.arena.take(elements, memory.dtype)


def _check_room(where: str, needed_bytes: int, available_bytes: int) -> None:
    """PlanError if there is no room for the gradient of another chunk."""
    if needed_bytes > available_bytes:
        raise PlanError(
            where=where,
            needed_bytes=needed_bytes,
            available_bytes=max(0, available_bytes),
            largest_part="another chunk's gradients",
            remedy="Parameters without a gradient in this backward keep more chunks waiting for its end than "
            f"planned: allow more {where}_memory, or set requires_grad=False for parameters that are never used.",
        )
