"""Load on the host's DRAM that a benchmark switches on and off: a stand-in for a host that updates more slowly.

Other tenants of a host take DRAM bandwidth from the host optimizer. Here processes copy arrays that are far larger than
any cache; how many of them run, and for which share of the time, is chosen so that the host's AdamW reaches a wanted
share of the rate that it has alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np
import torch

from protrain.common.records import Record
from protrain.hardware.calibration.optimizers import AdamChunk

GIB, MIB = 1024**3, 1024**2
_ARRAY_BYTES = 256 * MIB
_SLICE_S = 0.01  # a loader decides this often whether to copy or to rest
_MOST_LOADERS = 8
_HALVINGS = 6  # of the range in which the number of loaders lies
HOST_BYTES = 8 * GIB  # that all loaders and the chunk that is measured take, and more
_MEASURED_S = 1.5
_READY_S = 120


@dataclass(frozen=True, kw_only=True)
class Load(Record):
    """How many loaders run, and what they leave of the host's AdamW."""

    share: float  # of its rate that AdamW is to keep
    loaders: float  # the last one runs for a part of the time
    alone_gparams: float  # without a load
    loaded_gparams: float

    def __str__(self) -> str:
        return (
            f"{self.loaders:.2f} loaders leave the host's AdamW {self.loaded_gparams:.2f} of {self.alone_gparams:.2f} "
            f"G parameters a second ({self.loaded_gparams / self.alone_gparams:.0%})"
        )


def enough_loaders(rate: Callable[[float], float], wanted: float) -> float:
    """The number of loaders beside which ``rate``, which falls with their number, is about ``wanted``."""
    low, high = 0.0, float(_MOST_LOADERS)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > wanted else (low, middle)
    return (low + high) / 2


class DramLoad:
    """Loaders, of which some run while ``running`` is active.

    Args:
        threads: of the host's AdamW.
    """

    def __init__(self, *, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._shares = [context.Value("d", 0.0) for _ in range(_MOST_LOADERS)]
        ready = context.Semaphore(0)
        self._processes = [context.Process(target=_copy, args=(share, ready), daemon=True) for share in self._shares]
        for process in self._processes:
            process.start()
        for _ in self._processes:  # what they import and fill takes the host's time as well
            if not ready.acquire(timeout=_READY_S):
                raise RuntimeError(f"the processes that load the host's DRAM were not ready within {_READY_S} s")
        self._chunk, self._threads = AdamChunk.on(torch.device("cpu"), 64 * MIB), threads
        self._alone_gparams = self._rate(0.0)

    def leaving(self, share: float, *, loaders: float = 0.0) -> Load:
        """The load beside which the host's AdamW keeps ``share`` of its rate.

        With ``loaders``, which were found before on this machine, only their effect is measured.
        """
        loaders = loaders or enough_loaders(self._rate, share * self._alone_gparams)
        return Load(share=share, loaders=loaders, alone_gparams=self._alone_gparams, loaded_gparams=self._rate(loaders))

    @contextmanager
    def running(self, loaders: float) -> Iterator[None]:
        """So many loaders, for as long as the context lasts."""
        self._set(loaders)
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

    def _rate(self, loaders: float) -> float:
        """Giga-parameters a second of the host's AdamW beside so many loaders."""
        with self.running(loaders):
            self._chunk.update(self._threads)
            begin, updates = time.perf_counter(), 0
            while time.perf_counter() - begin < _MEASURED_S:
                self._chunk.update(self._threads)
                updates += 1
            return updates * self._chunk.elements / (time.perf_counter() - begin) / 1e9


def _copy(share: Synchronized[Any], ready: Semaphore) -> None:
    """Copy for ``share`` of the time, for ever."""
    source = np.ones(_ARRAY_BYTES // 8)
    target = np.ones_like(source)  # not zeros, whose pages would be mapped by the first copy
    piece = len(source) // 16
    at = 0
    ready.release()
    while True:
        begin = time.perf_counter()
        busy_s = _SLICE_S * share.value
        while time.perf_counter() - begin < busy_s:
            at = (at + piece) % len(source)
            np.copyto(target[at : at + piece], source[at : at + piece])
        time.sleep(max(0.0, _SLICE_S - (time.perf_counter() - begin)))
