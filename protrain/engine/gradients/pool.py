"""Memory that the gradients of several chunks share while updates run inside backward.

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

from protrain.engine.states.chunks import Chunk


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
