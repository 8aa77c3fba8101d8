"""Load on the links between host and GPUs: a stand-in for a machine whose GPUs have a slower link, as with PCIe 3.

Beside what is measured, processes copy pinned memory, some of them up and as many down. How many of them run on each
GPU, and for which share of the time, is chosen so that copies of 256 MiB keep a wanted rate. Each copies one way only,
because the load on one direction must not depend on the other one. A process that copied both ways, and waited for
both, left a direction free whenever the other one was slower.

The rate is that of each direction while both are in use, the slower of the two and of all GPUs at once. A PCIe link is
duplex: one of PCIe 3 x16, which an RTX 3090 has in an older host, carries 15.8 GB/s up and 15.8 GB/s down at the same
time. A training step uses it so, and a rate that one direction only has alone would flatter it. So 16 GB/s stand for
what the wires of PCIe 3 x16 carry, and 10 to 12 GB/s for what copies get of them. Copies one way alone are as fast or
faster; how much faster depends on the machine, and a calibration beside the load measures it, with whatever else the
load takes: it reads and writes the host's DRAM too, so that the host's AdamW becomes slower as well.

Copies take no multiprocessor, so that kernels should keep their rate. Whether they do is measured too, by products of
matrices beside the load and without it, and recorded.

Every process that copies has a CUDA context, which takes some hundreds of MiB of its GPU. Those that the load does not
need are ended before anything is measured beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.calibrated import apart
from bench.loaders import LoadError, Loaders, Probes, enough_loaders
from protrain.cli.options import number
from protrain.common.records import Record

MIB = 1024**2
_PROBE_BYTES = 256 * MIB  # of each copy that is measured
_PIECE_BYTES = 32 * MIB  # of each copy that a loader makes
_IN_A_ROW = 8  # copies of a loader before it waits, so that the link always has some of them in its queue
_MOST_LOADERS = 6  # on a GPU; where all get equal shares of the link, they leave a seventh
_MEASURED_S = 1.0
_MATRIX = 8192  # rows and columns
_PRODUCTS_S = 0.3
_TOLERANCE = 0.15  # a load that misses the wanted rate by more is refused


@dataclass(frozen=True, kw_only=True)
class SlowLink(Record):
    """How many loaders run on each GPU, and what they leave of its link: GB/s of each direction, both in use."""

    wanted_gbps: float
    loaders: float  # on each GPU; the last one runs for a part of the time
    alone_gbps: float  # without a load
    loaded_gbps: float
    compute_share: float  # of their rate without the load, that products of matrices keep

    def __str__(self) -> str:
        return (
            f"{self.loaders:.2f} loaders a GPU leave copies {self.loaded_gbps:.1f} of {self.alone_gbps:.1f} GB/s each "
            f"way ({self.wanted_gbps:g} wanted), and products of matrices {self.compute_share:.0%} of their rate"
        )


def add_link_rate(parser: argparse.ArgumentParser) -> None:
    """Add the option of a slower link to ``parser``."""
    parser.add_argument(
        "--link-rate",
        type=number(0, open_ended=True),
        default=None,
        metavar="GB/S",
        help="such as 16: all run beside copies that leave each GPU's link to the host so much each way",
    )


@contextmanager
def beside_copies(gbps: float | None, gpus: int) -> Iterator[SlowLink | None]:
    """A load that leaves the links of ``gpus`` GPUs ``gbps`` each way, for as long as the context lasts; None: none.

    A calibration in the context measures the machine beside the load, and is forgotten at its end. LoadError if no load
    leaves that rate.
    """
    if gbps is None:
        yield None
        return
    loaders = Loaders(_copying, _MOST_LOADERS, each=[(gpu, up) for gpu in range(gpus) for up in (True, False)])
    try:
        found = _load_leaving(gbps, gpus, loaders)
        print(found, file=sys.stderr, flush=True)
        loaders.close(beyond=found.loaders)
        with loaders.running(found.loaders), apart():
            yield found
    finally:
        loaders.close()


def _load_leaving(gbps: float, gpus: int, loaders: Loaders) -> SlowLink:
    """The load beside which copies keep ``gbps`` each way.

    LoadError when the link is not faster than that, or cannot be made so slow.
    """
    probes = Probes(_measuring, [(gpu,) for gpu in range(gpus)])
    try:
        alone = probes.measure()
        alone_gbps = min(gpu.gbps for gpu in alone)
        if alone_gbps <= gbps:
            raise LoadError(f"--link-rate {gbps:g}: the link has {alone_gbps:.1f} GB/s each way without any load")

        def beside(count: float) -> list[Rates]:
            with loaders.running(count):
                return probes.measure()

        count = enough_loaders(lambda n: min(gpu.gbps for gpu in beside(n)), gbps, most=_MOST_LOADERS)
        loaded = beside(count)
    finally:
        probes.close()
    found = SlowLink(
        wanted_gbps=gbps,
        loaders=count,
        alone_gbps=alone_gbps,
        loaded_gbps=min(gpu.gbps for gpu in loaded),
        compute_share=min(gpu.tflops / own.tflops for gpu, own in zip(loaded, alone, strict=True)),
    )
    if abs(found.loaded_gbps / gbps - 1) > _TOLERANCE:
        raise LoadError(f"--link-rate {gbps:g}: no load leaves that. {found}")
    return found


class Rates(NamedTuple):
    """What a probe finds on its GPU."""

    gbps: float  # of the slower direction, both in use
    tflops: float  # of products of matrices


class _Way:
    """One direction of a GPU's link: memory on both sides, and a stream."""

    def __init__(self, gpu: int, size_bytes: int, *, up: bool) -> None:
        torch.cuda.set_device(gpu)  # pinning memory would make a context on the first GPU
        host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
        far = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
        self._source, self._target = (host, far) if up else (far, host)
        self._size_bytes = size_bytes
        self._stream = torch.cuda.Stream()
        self._done = torch.cuda.Event(blocking=True)  # waiting takes no core from the host's AdamW
        torch.cuda.synchronize()

    def queue(self, copies: int) -> None:
        """Queue so many copies."""
        with torch.cuda.stream(self._stream):
            for _ in range(copies):
                self._target.copy_(self._source, non_blocking=True)
            self._done.record()

    def wait(self) -> None:
        """Wait for the copies that were queued."""
        self._done.synchronize()

    def gbps(self) -> float:
        """The rate of copies that follow each other."""
        self.queue(1)
        self.wait()
        begin, copies = time.perf_counter(), 0
        while time.perf_counter() - begin < _MEASURED_S:
            self.queue(2)
            self.wait()
            copies += 2
        return copies * self._size_bytes / (time.perf_counter() - begin) / 1e9


def _copying(gpu: int, up: bool) -> Callable[[], None]:
    """What copies one way on ``gpu`` for some milliseconds."""
    way = _Way(gpu, _PIECE_BYTES, up=up)

    def copy() -> None:
        way.queue(_IN_A_ROW)
        way.wait()

    return copy


def _measuring(gpu: int) -> Callable[[], Rates]:
    """What measures copies both ways at once on ``gpu``, and then products of matrices."""
    ways = [_Way(gpu, _PROBE_BYTES, up=up) for up in (True, False)]
    matrix = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)

    def measure() -> Rates:
        with ThreadPoolExecutor(len(ways)) as threads:
            gbps = min(threads.map(_Way.gbps, ways))
        return Rates(gbps, _tflops(matrix, product))

    return measure


def _tflops(matrix: Tensor, product: Tensor) -> float:
    """The rate of products of a matrix with itself."""
    torch.mm(matrix, matrix, out=product)
    torch.cuda.synchronize()
    begin, products = time.perf_counter(), 0
    while time.perf_counter() - begin < _PRODUCTS_S:
        for _ in range(10):
            torch.mm(matrix, matrix, out=product)
        torch.cuda.synchronize()
        products += 10
    return products * 2 * _MATRIX**3 / (time.perf_counter() - begin) / 1e12
