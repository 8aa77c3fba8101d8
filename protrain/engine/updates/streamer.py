"""Updates that the device does on chunks in host memory. See [Note: streamed updates] in updates.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from math import inf

from torch import Tensor

from protrain.engine.states.chunks import Chunk, Piece
from protrain.engine.streams import Mark, Streams, span
from protrain.engine.updates.host_updates import HostUpdate, Rate, Scale
from protrain.engine.updates.worker import HostWorker
from protrain.planning.sharing import Sharing, Waiting, next_for_gpu
from protrain.planning.timeline import STREAM


class Streamer:
    """Has the device update chunks in host memory, with which the host would be late, on a thread of its own.

    Args:
        streams: of the engine. On the CPU the host's kernel does the work, on the thread.
        sharing: when the forward needs each chunk, and the predicted rates.
        worker: the thread.
    """

    def __init__(self, streams: Streams, sharing: Sharing, worker: HostWorker) -> None:
        self.worker = worker
        self.rate = Rate(sharing.device_gparams)
        self.host_rate = Rate(sharing.host_gparams)
        self.updates = 0
        self._needed_ms = sharing.needed_ms
        self._upload_ms, self._states_ms = sharing.upload_ms, sharing.states_ms
        self._host_kept = sharing.host_kept
        self._streams = streams
        self._staging = streams.adam_staging(sharing.staging_bytes)
        self._done = streams.mark()

    def update(self, chunk: Chunk, pieces: list[Piece], gradient: Tensor, scale: Scale | None) -> None:
        """Update ``pieces`` of ``chunk``, and wait until the host sees the result.

        Args:
            chunk: a chunk in host memory whose states are all pinned.
            pieces: runs of elements with their hyperparameters.
            gradient: the gradient in host memory.
            scale: factor on the gradient.
        """
        begin = time.perf_counter()
        with span(STREAM, f"update {chunk.index}"):
            with self._streams.streaming(self._done):
                factor = None if scale is None else scale.on_device
                chunk.step_streamed(pieces, gradient, factor, self._staging)
            self._done.wait()
        if self.updates:  # the first one also compiles the kernel, and would say for good that the device is slow
            self.rate.add(pieces, time.perf_counter() - begin)
        self.updates += 1

    def share(self, updates: Sequence[HostUpdate], norm: Mark) -> None:
        """Have the device do those of ``updates`` with which the host would be late.

        Args:
            updates: in the order in which the host does them.
            norm: where the norm is known, from which on forward runs.
        """
        if updates:
            self.worker.submit(functools.partial(self._share, updates, norm))

    def _share(self, updates: Sequence[HostUpdate], norm: Mark) -> None:
        norm.wait()
        begin, before = time.perf_counter(), self.updates
        while True:
            at_work = {update: job for update in updates if (job := update.host_job()) is not None}
            left = [update for update in updates if not update.job.begun and update not in at_work]
            if all(update.can_commit() for update in left):
                break
            now_ms = (time.perf_counter() - begin) * 1e3
            free_ms = now_ms + sum(map(self._host_ms, at_work))
            index = next_for_gpu([self._waiting(update) for update in left], now_ms, free_ms, self._host_kept)
            if index is None:
                next(iter(at_work.values()), left[0].job).end()  # then the host's rate and what is left are known anew
                continue
            update = left[index]
            update.job.run(functools.partial(update.run_with, self.update))
        if self.updates == before:
            self.rate.forget()

    def _waiting(self, update: HostUpdate) -> Waiting:
        device_ms = inf if update.can_commit() else self.rate.milliseconds(update.chunk.shard_elements)
        at = update.chunk.index
        return Waiting(self._host_ms(update), device_ms, self._needed_ms[at], self._upload_ms[at], self._states_ms[at])

    def _host_ms(self, update: HostUpdate) -> float:
        return 0.0 if update.can_commit() else self.host_rate.milliseconds(update.chunk.shard_elements)
