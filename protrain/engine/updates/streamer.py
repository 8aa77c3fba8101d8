"""Updates by the device of chunks whose states lie in host memory. See [Note: streamed updates] in updates.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from protrain.engine.states.chunks import Chunk, Piece
from protrain.engine.streams import Mark, Streams
from protrain.engine.updates.worker import Job


class Scale(NamedTuple):
    """The factor on gradients (clipping, loss scale): one fp32."""

    on_device: Tensor
    on_host: Tensor
    ready: Mark  # on_host is


class Streamer:
    """Has the device update chunks in host memory, one at a time.

    Args:
        streams: of the engine. On the CPU the host's kernel does the work, on the thread that calls.
        staging_bytes: device memory that the states are copied through.
    """

    def __init__(self, streams: Streams, *, staging_bytes: int) -> None:
        self.staging_bytes = staging_bytes
        self._streams = streams
        self._staging = streams.adam_staging(staging_bytes)
        self._done = streams.mark()

    def update(
        self, chunk: Chunk, pieces: list[Piece], gradient: Tensor, scale: Scale | None, accumulation: Job | None
    ) -> None:
        """Update ``pieces`` of ``chunk`` and wait until the host sees them.

        Args:
            chunk: in host memory, all of it pinned.
            pieces: the runs of elements and what holds for them.
            gradient: in host memory, complete when the last offload and ``accumulation`` are.
            scale: factor on it.
            accumulation: what the host worker may still be adding to it.
        """
        if scale is not None:
            scale.ready.wait()
        if accumulation is not None:
            accumulation.wait()
        chunk.offloaded.wait()
        chunk.uploaded.wait()  # as in an update on the host
        with self._streams.streaming(self._done):
            factor = None if scale is None else scale.on_device
            chunk.step_streamed(pieces, gradient, factor, self._staging)
        self._done.wait()
