"""Load on the host's DRAM that a benchmark switches on and off: a stand-in for a host that updates more slowly.

Other tenants of a host take DRAM bandwidth from the host optimizer. Here processes copy arrays that are far larger than
any cache; how many of them run, and for which share of the time, is chosen so that the host's AdamW reaches a wanted
share of the rate that it has alone.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch

from bench.loaders import Loaders, enough_loaders
from protrain.common.records import Record
from protrain.hardware.calibration.rates import AdamChunk

MIB = 1024**2
_ARRAY_BYTES = 256 * MIB
_PIECES = 16  # of an array, which a loader copies one at a time
_MOST_LOADERS = 8
_MEASURED_S = 1.5


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


class DramLoad:
    """Loaders, of which some run while ``running`` is active.

    Args:
        threads: of the host's AdamW.
    """

    def __init__(self, *, threads: int) -> None:
        self._chunk, self._threads = AdamChunk.on(torch.device("cpu"), 64 * MIB), threads
        self._loaders = Loaders(_copying, _MOST_LOADERS)

    def leaving(self, share: float, *, loaders: float = 0.0) -> Load:
        """The load beside which the host's AdamW keeps ``share`` of its rate.

        With ``loaders``, which were found before on this machine, only their effect is measured.
        """
        alone = self._alone_gparams
        loaders = loaders or enough_loaders(self._rate, share * alone, most=_MOST_LOADERS)
        return Load(share=share, loaders=loaders, alone_gparams=alone, loaded_gparams=self._rate(loaders))

    def running(self, loaders: float) -> AbstractContextManager[None]:
        """So many loaders, for as long as the context lasts."""
        return self._loaders.running(loaders)

    def close(self) -> None:
        """End the processes."""
        self._loaders.close()

    @functools.cached_property
    def _alone_gparams(self) -> float:
        return self._rate(0.0)

    def _rate(self, loaders: float) -> float:
        """Giga-parameters a second of the host's AdamW beside so many loaders."""
        with self.running(loaders):
            self._chunk.update(self._threads)
            begin, updates = time.perf_counter(), 0
            while time.perf_counter() - begin < _MEASURED_S:
                self._chunk.update(self._threads)
                updates += 1
            return updates * self._chunk.elements / (time.perf_counter() - begin) / 1e9


def _copying() -> Callable[[], None]:
    """Arrays of a loader, and what copies the next piece of them."""
    source = np.ones(_ARRAY_BYTES // 8)
    target = np.ones_like(source)  # not zeros, whose pages would be mapped by the first copy
    size = len(source) // _PIECES
    pieces = itertools.cycle(slice(at, at + size) for at in range(0, len(source), size))

    def copy() -> None:
        piece = next(pieces)
        np.copyto(target[piece], source[piece])

    return copy
