"""Updates that the device does on chunks in host memory. See [Note: streamed updates] in updates.py."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from protrain.engine.states.chunks import Chunk, Piece
from protrain.engine.streams import Mark, Streams
from protrain.engine.updates.worker import HostWorker


class Scale(NamedTuple):
    """The factor on gradients, for clipping and loss scaling: one fp32 number."""

    on_device: Tensor
    on_host: Tensor
    ready: Mark  # on_host has its value


class Streaming(NamedTuple):
    """What it takes to have the device update chunks in host memory."""

    streamer: Streamer
    worker: HostWorker  # the thread that calls it


class Streamer:
    """Has the device update chunks in host memory, one at a time.

    Args:
        streams: of the engine. On the CPU the host's kernel does the work, on the thread that calls.
        staging_bytes: device memory that states are copied through.
    """

    def __init__(self, streams: Streams, *, staging_bytes: int) -> None:
        self.staging_bytes = staging_bytes
        self._streams = streams
        self._staging = streams.adam_staging(staging_bytes)
        self._done = streams.mark()

    def update(self, chunk: Chunk, pieces: list[Piece], gradient: Tensor, scale: Scale | None) -> None:
        """Update ``pieces`` of ``chunk``, and wait until the host sees the result.

        Args:
            chunk: a chunk in host memory whose states are all pinned.
            pieces: runs of elements with their hyperparameters.
            gradient: the gradient in host memory.
            scale: factor on the gradient.
        """
        with self._streams.streaming(self._done):
            factor = None if scale is None else scale.on_device
            chunk.step_streamed(pieces, gradient, factor, self._staging)
        self._done.wait()
