"""What calibration works on, and the rates that it measures by themselves: of device, link and host, one at a time.

Tensors have random values, and lie in host memory as the engine maps it or on the device. The kernels of a step move
the gradients of a transformer block into a chunk, and its activations into a buffer. AdamW has the split master, on the
host, on the device, and by the device on host memory. On a CPU both sides of a copy are host memory.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.common.host_memory import HostMapping, register
from protrain.hardware.calibration.timing import Effort, batch_s, durations_s, rate
from protrain_kernels import AdamStaging, adam, adam_scalars, flatten, pack, padded, streamed_adam, tiles

CPU = torch.device("cpu")
_RANDOM_BLOCK = 1 << 20  # elements that repeat, because drawing gigabytes of random numbers takes longer than measuring


def random_tensor(elements: int, dtype: torch.dtype, device: torch.device, *, positive: bool = False) -> Tensor:
    """A 1-d tensor of normal floats or uniform integers.

    On the host it lies in a ``HostMapping``, as in the engine. Zeros would cost less power and let the device clock
    higher, and a memory controller may treat them specially.
    """
    size = min(elements, _RANDOM_BLOCK)
    if dtype.is_floating_point:
        block = torch.randn(size, device=device)
        block = (block.abs() if positive else block).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        block = torch.randint(limits.min, limits.max + 1, (size,), dtype=dtype, device=device)
    tensor = (
        HostMapping(elements * dtype.itemsize).tensor().view(dtype)
        if device.type == "cpu"
        else torch.empty(elements, dtype=dtype, device=device)
    )
    for piece in tensor.split(_RANDOM_BLOCK):
        piece.copy_(block[: piece.numel()])
    return tensor


@contextlib.contextmanager
def pinned(*tensors: Tensor, device: torch.device) -> Iterator[bool]:
    """Register host ``tensors`` with the driver of ``device`` inside the context. Yields whether it accepted all.

    On a CPU there is nothing to do.
    """
    if device.type != "cuda":
        yield True
        return
    registered: list[int] = []
    accepted = True
    try:
        for tensor in tensors:
            if register(tensor, device) != 0:
                accepted = False
                break
            registered.append(tensor.data_ptr())
        yield accepted
    finally:
        torch.cuda.synchronize(device)
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)


_SETTLED = 0.02  # the relative difference of two windows that agree
_WINDOW_S = 0.25
_MOST_WINDOWS = 12
_LONGEST_PRODUCT_S = 0.1  # of which calibration makes several hundred
_LEAST_WIDTH = 256


class Products:
    """Square matrix products: bf16 on a GPU, fp32 on a CPU. On a slow device they are smaller than usual."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        if device.type == "cuda":
            self.width = 8192 if effort.size > 0.25 else 4096
        else:
            self.width = 1024 if effort.size > 0.25 else 256
        self._make()
        while self.width > _LEAST_WIDTH and self._takes_long():
            self.width //= 2
            self._make()

    def _make(self) -> None:
        """Make the matrices. Those before are given back first."""
        self._left = self._right = self._out = torch.empty(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self._left, self._right = (
            random_tensor(self.width**2, dtype, self.device).view(self.width, self.width) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)

    def _takes_long(self) -> bool:
        self.run()  # loads the kernel
        return batch_s(self.run, self.device, 1) > _LONGEST_PRODUCT_S

    def run(self, count: int = 1) -> None:
        """Queue ``count`` products."""
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._out)

    def settle(self, *, time_share: float) -> None:
        """Compute until two windows in a row agree, because a cold card clocks higher than it does in a long run.

        Args:
            time_share: the share of the usual window of a quarter of a second.
        """
        before = 0.0
        for _ in range(_MOST_WINDOWS):
            now = statistics.median(durations_s(self.run, self.device, budget_s=_WINDOW_S * time_share))
            if abs(now - before) < _SETTLED * now:
                return
            before = now

    def tflops(self, *, budget_s: float) -> float:
        """The rate of the products."""
        return rate(self.run, self.device, 2 * self.width**3 / 1e12, budget_s=budget_s)


def copy_gbps(device: torch.device, size_bytes: int, *, budget_s: float) -> float:
    """Bytes a second that a copy or an elementwise kernel reads and writes, whichever is faster."""
    source, target = (random_tensor(size_bytes // 4, torch.float32, device) for _ in range(2))
    ways: list[Callable[[], object]] = [lambda: target.copy_(source), lambda: torch.mul(source, 1.0, out=target)]
    return max(rate(run, device, 2 * size_bytes / 1e9, budget_s=budget_s / 2) for run in ways)


def dram_gbps(size_bytes: int, *, budget_s: float) -> float:
    """What torch's threads move through the host's memory, with tensors of ``size_bytes``, far beyond the caches.

    It is the better of an update in place, which is what AdamW does, and a triad, whose written lines are read first.
    """
    one, other, third = (random_tensor(size_bytes // 4, torch.float32, CPU) for _ in range(3))
    ways: list[tuple[Callable[[], object], int]] = [
        (lambda: one.mul_(1.0), 2 * size_bytes),
        (lambda: torch.add(third, one, alpha=0.5, out=other), 4 * size_bytes),
    ]
    return max(rate(run, CPU, moved / 1e9, budget_s=budget_s / 2) for run, moved in ways)


def _random(device: torch.device, *shape: int) -> Tensor:
    return random_tensor(math.prod(shape), torch.bfloat16, device).view(shape)


def flatten_gbps(device: torch.device, hidden: int, *, budget_s: float) -> float:
    """Bytes a second that ``flatten`` with squares reads and writes, on the bf16 gradients of a LLaMA block."""
    wide = hidden * 7 // 2 // 128 * 128
    shapes = [(hidden, hidden)] * 2 + [(hidden // 4, hidden)] * 2 + [(wide, hidden)] * 2 + [(hidden, wide)]
    gradients = [_random(device, *shape) for shape in shapes] + [_random(device, hidden) for _ in range(2)]
    *offsets, end = accumulate((padded(gradient.numel()) for gradient in gradients), initial=0)
    *starts, partials = accumulate((tiles(gradient.numel()) for gradient in gradients), initial=0)
    chunk = torch.empty(end, dtype=torch.bfloat16, device=device)
    squares = torch.empty(partials, dtype=torch.float32, device=device)

    def run() -> None:
        flatten(gradients, chunk, offsets, squares, starts)

    moved = sum(gradient.nbytes for gradient in gradients) + chunk.nbytes
    return rate(run, device, moved / 1e9, budget_s=budget_s)


def pack_gbps(device: torch.device, hidden: int, *, budget_s: float) -> float:
    """Bytes a second that ``pack`` reads and writes, on what a block of 4096 tokens saves, with views and a mask."""
    tokens = hidden
    fused = _random(device, tokens, 3 * hidden)
    saved = [
        *(_random(device, tokens, hidden) for _ in range(6)),
        *fused.split(hidden, dim=1),
        *(_random(device, tokens, 7 * hidden // 2) for _ in range(2)),
        _random(device, tokens, hidden) > 0,
    ]
    return rate(lambda: pack(saved), device, 2 * pack(saved).buffer.nbytes / 1e9, budget_s=budget_s)


class Transfers:
    """A buffer on the device and a stream for each way, with the host memory on the other side.

    Args:
        device: the device that is copied to and from.
        size_bytes: the size of a buffer, and of the largest copy.
        regions: how many regions of host memory there are for each way. Copies take them in turn, because a single
            region may stay in the caches.
    """

    def __init__(self, device: torch.device, size_bytes: int, *, regions: int = 1) -> None:
        self.device = device
        sources, targets = ([random_tensor(size_bytes, torch.uint8, CPU) for _ in range(regions)] for _ in range(2))
        self.host = (*sources, *targets)  # to be pinned while anything is copied
        self._sources, self._targets = itertools.cycle(sources), itertools.cycle(targets)
        self._far = [random_tensor(size_bytes, torch.uint8, device) for _ in range(2)]
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if on_gpu else None for _ in range(2)]

    def up(self, size_bytes: int | None = None) -> None:
        """Queue a copy to the device."""
        self._far[0][:size_bytes].copy_(next(self._sources)[:size_bytes], non_blocking=True)

    def down(self, size_bytes: int | None = None) -> None:
        """Queue a copy to the host."""
        next(self._targets)[:size_bytes].copy_(self._far[1][:size_bytes], non_blocking=True)

    def both(self, size_bytes: int) -> None:
        """Queue a copy each way. On a GPU both ways run at the same time."""
        for stream, copy in zip(self._streams, (self.up, self.down), strict=True):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):  # None changes nothing
                copy(size_bytes)
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def gbps(self, size_bytes: int, *, budget_s: float) -> dict[str, float]:
        """The rates up, down and both ways in copies of ``size_bytes``. ``budget_s`` is the time for all three."""
        ways = {"h2d_gbps": (self.up, 1), "d2h_gbps": (self.down, 1), "bidirectional_gbps": (self.both, 2)}
        return {
            name: rate(partial(run, size_bytes), self.device, times * size_bytes / 1e9, budget_s=budget_s / 3)
            for name, (run, times) in ways.items()
        }


ADAM_BYTES = 26  # read and written a parameter, bf16 with the split master
_ENOUGH = 0.97  # of the best rate: more threads than reach it are better left to others
_STEP = adam_scalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, decoupled=True)


class AdamChunk(NamedTuple):
    """A chunk of model states with the split master, and its gradient; random, so that no step meets special values."""

    weight: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor

    @classmethod
    def on(cls, device: torch.device, elements: int) -> AdamChunk:
        """A chunk in memory of ``device``. ``elements`` is a multiple of 128."""
        return cls(
            random_tensor(elements, torch.bfloat16, device),
            random_tensor(elements, torch.int16, device),
            random_tensor(elements, torch.float32, device),
            random_tensor(elements, torch.float32, device, positive=True),
            random_tensor(elements, torch.bfloat16, device),
        )

    @property
    def elements(self) -> int:
        """How many parameters the chunk has."""
        return self.weight.numel()

    def part(self, first: int, elements: int) -> AdamChunk:
        """``elements`` of the chunk from ``first`` on. Both are multiples of 128."""
        return AdamChunk(*(tensor[first : first + elements] for tensor in self))

    def update(self, threads: int = 0, moments: tuple[Tensor, Tensor] | None = None) -> None:
        """One AdamW step where the chunk lies. ``moments`` take the place of the chunk's own where they are given."""
        exp_avg, exp_avg_sq = moments or (self.exp_avg, self.exp_avg_sq)
        adam(self.weight, self.master, exp_avg, exp_avg_sq, self.grad, _STEP, threads=threads)

    def make_weight(self, new_weight: Tensor, threads: int = 0) -> None:
        """Write the weight that a step in host memory would leave to ``new_weight``, and nothing else."""
        adam(*self, _STEP, threads=threads, out=new_weight)


def adam_durations_s(
    chunks: Sequence[AdamChunk], update: Callable[[AdamChunk], None], device: torch.device, *, budget_s: float
) -> list[float]:
    """Seconds in which ``update`` goes over all ``chunks``, one after the other: a sample for each time."""

    def update_all() -> None:
        for chunk in chunks:
            update(chunk)

    return durations_s(update_all, device, budget_s=budget_s)


def thread_counts(cores: int, *, taken: int = 0) -> list[int]:
    """The numbers of threads to try: powers of two, as many as there are cores that are not ``taken``, and one fewer.

    More are not tried. Of 16 threads on 15 free cores one would wait until the owner of the 16th core has used up its
    time slice, and the other threads would wait for that one.
    """
    free = max(1, cores - taken)
    powers = {1 << bit for bit in range(free.bit_length())}
    return sorted(powers | {free, max(1, free - 1)})


def best_threads(seconds: dict[int, float]) -> int:
    """The fewest threads that reach 97% of the best rate, by the seconds that each number of threads takes."""
    best = min(seconds.values())
    return min(count for count, taken in seconds.items() if _ENOUGH * taken <= best)


class StreamedChunk:
    """States and gradient in host memory, to be pinned as in a step, which the device updates over the link.

    They are as many as a whole chunk has. They go in pieces of about 5 million parameters. The first piece comes before
    anything is updated and the last one goes after, so a few pieces alone would be slower.
    """

    def __init__(self, device: torch.device, elements: int) -> None:
        self.device = device
        self.chunk = AdamChunk.on(CPU, elements)
        self._staging = AdamStaging(device)

    def update(self) -> None:
        """Queue one step on the current stream, which then waits for it."""
        done = streamed_adam(*self.chunk, _STEP, self._staging)
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def gparams(self, *, budget_s: float) -> float:
        """The rate of the steps, in 1e9 parameters a second."""
        return rate(self.update, self.device, self.chunk.elements / 1e9, budget_s=budget_s)
