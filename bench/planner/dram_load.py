"""Load on the host's DRAM that a benchmark switches on and off: a stand-in for a host that updates more slowly.

Other tenants of a host take DRAM bandwidth from the host optimizer. Here processes copy arrays that are far larger than
any cache; how many of them run, and for which share of the time, is chosen so that the host's AdamW reaches a wanted
share of the rate that it has alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
import torch

from protrain.hardware.calibration.optimizers import AdamChunk

_ARRAY_BYTES = 256 * 1024**2
_SLICE_S = 0.01  # a loader decides this often whether to copy or to rest
_MOST_LOADERS = 8
HOST_BYTES = 8 * 1024**3  # that all loaders and the chunk that is measured take, and more
_MEASURED_S = 1.5


def _copy(share: Synchronized[Any]) -> None:
    """Copy for ``share`` of the time, for ever."""
    source = np.ones(_ARRAY_BYTES // 8)
    target = np.zeros_like(source)
    piece = len(source) // 16
    at = 0
    while True:
        begin = time.perf_counter()
        busy_s = _SLICE_S * share.value
        while time.perf_counter() - begin < busy_s:
            at = (at + piece) % len(source)
            np.copyto(target[at : at + piece], source[at : at + piece])
        time.sleep(max(0.0, _SLICE_S - (time.perf_counter() - begin)))


class DramLoad:
    """Loaders that run while :meth:`running` is active.

    Args:
        wanted: the share of its rate that the host's AdamW is to keep.
        threads: of the host's AdamW.
        loaders: how many, where that was found out before; 0: find out.
    """

    def __init__(self, wanted: float, *, threads: int, loaders: float = 0.0) -> None:
        context = multiprocessing.get_context("spawn")
        self._shares = [context.Value("d", 0.0) for _ in range(_MOST_LOADERS)]
        self._processes = [context.Process(target=_copy, args=(share,), daemon=True) for share in self._shares]
        for process in self._processes:
            process.start()
        time.sleep(3.0)  # until they have imported and filled their arrays
        chunk = AdamChunk.on(torch.device("cpu"), 64 * 1024**2)
        self.alone_gparams = _rate(chunk, threads)
        self.loaders = loaders
        low, high = 0.0, float(_MOST_LOADERS)
        for _ in range(0 if loaders else 6):
            self.loaders = (low + high) / 2
            with self.running():
                self.loaded_gparams = _rate(chunk, threads)
            fast = self.loaded_gparams > wanted * self.alone_gparams
            low, high = (self.loaders, high) if fast else (low, self.loaders)
        with self.running():
            self.loaded_gparams = _rate(chunk, threads)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The load, for as long as the context lasts."""
        self._set(self.loaders)
        try:
            yield
        finally:
            self._set(0.0)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()

    def _set(self, loaders: float) -> None:
        for index, share in enumerate(self._shares):
            share.value = min(1.0, max(0.0, loaders - index))
        time.sleep(0.1)


def _rate(chunk: AdamChunk, threads: int) -> float:
    """Giga-parameters a second of the host's AdamW now."""
    chunk.update(threads)
    begin, updates = time.perf_counter(), 0
    while time.perf_counter() - begin < _MEASURED_S:
        chunk.update(threads)
        updates += 1
    return updates * chunk.elements / (time.perf_counter() - begin) / 1e9
