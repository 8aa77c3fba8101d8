"""Load on the host's DRAM that a benchmark switches on and off: a stand-in for a host that updates more slowly.

Other tenants of a host take DRAM bandwidth from the host optimizer. Here processes copy arrays that are far larger than
any cache; how many of them run, and for which share of the time, is chosen so that the host's AdamW reaches a wanted
share of the rate that it has alone.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from bench.calibrated import host_adam_threads
from bench.loaders import Loaders, enough_loaders
from protrain.common.records import Record
from protrain.hardware.calibration.activities import AdamChunk

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


@contextmanager
def beside_dram_load(share: float) -> Iterator[Load | None]:
    """A load that leaves the host's AdamW ``share`` of its rate, for as long as the context lasts; 1: none.

    The loaders are the same for the whole context, so that all that runs in it has one and the same load.
    """
    if share == 1.0:
        yield None
        return
    chunk, threads = AdamChunk.on(torch.device("cpu"), 64 * MIB), host_adam_threads()
    loaders = Loaders(_copying, _MOST_LOADERS)

    def gparams(count: float) -> float:
        """Giga-parameters a second of the host's AdamW beside so many loaders."""
        with loaders.running(count):
            chunk.update(threads)
            begin, updates = time.perf_counter(), 0
            while time.perf_counter() - begin < _MEASURED_S:
                chunk.update(threads)
                updates += 1
            return updates * chunk.elements / (time.perf_counter() - begin) / 1e9

    try:
        alone = gparams(0.0)
        count = enough_loaders(gparams, share * alone, most=_MOST_LOADERS)
        found = Load(share=share, loaders=count, alone_gparams=alone, loaded_gparams=gparams(count))
        print(found, file=sys.stderr, flush=True)
        with loaders.running(count):
            yield found
    finally:
        loaders.close()


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
