"""Memory that gradients of several chunks take turns in, while updates run inside backward.

A gradient is needed from when it arrives until its chunk is updated. Inside backward that is a short time, and of two
bytes a parameter a few regions of one chunk each are left. A chunk borrows one for its first gradient and gives it back
when its update is queued: on the device the stream keeps the order, in host memory the next borrower waits until the
update is done.

More chunks than planned may be open at once, where parameters get no gradient: their updates come when backward ends.
Then there are more regions, as far as memory goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from protrain.engine.states.chunks import Chunk


class Regions:
    """Those of the chunks on the device, or of those in host memory.

    Args:
        memory: the regions, each of a whole chunk.
        more: makes another one, or raises.
    """

    def __init__(self, memory: Iterable[Tensor], *, more: Callable[[], Tensor]) -> None:
        self._free = list(memory)
        self._more = more
        self._borrowed: dict[Chunk, Tensor] = {}
        self._returned: dict[Chunk, Tensor] = {}  # in the order of that; something may still read them

    def borrow(self, chunk: Chunk) -> None:
        """Give ``chunk`` room for its gradient until :meth:`give_back`. Waits for an update where none is free.

        In what was its own before something may still be reading.
        """
        if chunk in self._borrowed:
            return
        region = self._returned.pop(chunk) if chunk in self._returned else self._next()
        self._borrowed[chunk] = region
        chunk.grad = region[: chunk.elements]
        if not chunk.persistent:
            chunk.landing = chunk.grad

    def give_back(self, chunk: Chunk) -> None:
        """What reads the gradient of ``chunk`` is queued."""
        if chunk in self._borrowed:
            self._returned[chunk] = self._borrowed.pop(chunk)

    def give_all_back(self) -> None:
        """Gradients are forgotten."""
        self._returned.update(self._borrowed)
        self._borrowed.clear()

    def _next(self) -> Tensor:
        if self._free:
            return self._free.pop()
        if not self._returned:
            return self._more()
        # The device may be behind with a chunk that it updates while the host is done with later ones.
        chunk = next((one for one in self._returned if one.landing_is_free()), next(iter(self._returned)))
        chunk.wait_for_landing()
        chunk.grad = None
        if not chunk.persistent:
            chunk.landing = None
        return self._returned.pop(chunk)
