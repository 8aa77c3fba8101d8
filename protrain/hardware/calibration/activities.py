"""What calibration measures: units of work, on the memory that they need.

Tensors have random values, and lie in host memory as the engine maps it or on the device. Zeros would cost less power
and let the device clock higher. AdamW has the split master, on the host, on the device, and by the device on host
memory. On a CPU both sides of a copy are host memory. Collectives go by the calls and through the communicators that
training uses: ranks gather the weights of a chunk, and exchange its gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from protrain.common.host_memory import HostMapping, register
from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration.timing import Effort
from protrain_kernels import PADDING, AdamStaging, adam, adam_scalars, streamed_adam

CPU = torch.device("cpu")
_REGIONS = 4  # of host memory for each direction of copies, 1 GiB together, because a host may have a cache of 300 MiB
_LONGEST_PRODUCT_S = 0.1  # of which calibration makes several hundred
_LEAST_WIDTH = 256
_PRODUCTS_IN_UNIT = 4
_KERNELS_IN_UNIT = 16  # of kernels that take less than a millisecond each
_STEP = adam_scalars(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10, decoupled=True)

_COLLECTIVES = "the timing of collectives"
_RANDOM_BLOCK = 1 << 20  # elements that repeat, because drawing gigabytes of random numbers takes longer than measuring

Run = Callable[[], object]  # does some work, or queues it on the current stream of a GPU


class Activity(NamedTuple):
    """A unit of work that is repeated, and how much work it is."""

    unit: Run  # returns when this unit or the one before is done
    amount: float  # 1e9 bytes, 1e9 parameters or 1e12 operations


# In a step one core is taken by the thread that launches kernels and then spins until they are done. This keeps a core
# busy too, without the GIL, on bytes that stay in its cache.
LAUNCHING = Activity(partial(hashlib.sha256, bytes(256 * 1024)), 1.0)


def on_device(run: Run, amount: float, device: torch.device, *, times: int = 1) -> Activity:
    """``run``, which does ``amount`` of work on ``device``. On a GPU a unit is so many ``times`` that, on a stream."""
    return Activity(OnStream(run, device, times), times * amount) if device.type == "cuda" else Activity(run, amount)


class OnStream:
    """Units of work on a stream of their own. Two are in flight, so that the device never waits for the host."""

    def __init__(self, queue: Run, device: torch.device, times: int) -> None:
        self._queue = queue
        self._times = times
        self._stream = torch.cuda.Stream(device)
        # The events block, because a thread that spins would take a core from the host's AdamW.
        self._events = [torch.cuda.Event(blocking=True) for _ in range(2)]
        self._units = 0

    def __call__(self) -> None:
        """Queue a unit and wait for the one before."""
        torch.cuda.set_device(self._stream.device)  # see [Note: the current GPU] in engine/updates/worker.py
        with torch.cuda.stream(self._stream):
            for _ in range(self._times):
                self._queue()
            self._events[self._units % 2].record()
        self._units += 1
        self._events[self._units % 2].synchronize()  # returns at once for an event that was never recorded


def random_tensor(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-d tensor of normal floats or uniform integers. On the host it lies in a ``HostMapping``, as in the engine."""
    size = min(elements, _RANDOM_BLOCK)
    if dtype.is_floating_point:
        block = torch.randn(size, device=device).to(dtype)
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
    try:
        for tensor in tensors:
            if register(tensor, device) != 0:
                break
            registered.append(tensor.data_ptr())
        yield len(registered) == len(tensors)
    finally:
        torch.cuda.synchronize(device)
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)


def product(device: torch.device, width: int) -> Run:
    """A square matrix product: bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (random_tensor(width**2, dtype, device).view(width, width) for _ in range(2))
    return partial(torch.mm, left, right, out=torch.empty_like(left))


def largest_product(device: torch.device, effort: Effort) -> tuple[Run, int]:
    """A product, and its width. On a slow device it is smaller than usual."""
    width = (8192 if device.type == "cuda" else 1024) // (1 if effort.size > 0.25 else 2)
    while True:
        run = product(device, width)
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        if width <= _LEAST_WIDTH or timer.timeit(1).mean <= _LONGEST_PRODUCT_S:
            return run, width
        width //= 2


def copying(device: torch.device, size_bytes: int) -> Activity:
    """An elementwise operation in place, which reads and writes memory as AdamW does. Its amount is in 1e9 bytes."""
    values = random_tensor(size_bytes // 4, torch.float32, device)
    return on_device(lambda: values.mul_(1.0), 2 * values.nbytes / 1e9, device, times=_KERNELS_IN_UNIT)


class Transfers:
    """A buffer on the device for each direction, with regions of host memory on the other side.

    Copies take the regions in turn, because a single one may stay in the caches.
    """

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        self.device = device
        sources, targets = ([random_tensor(size_bytes, torch.uint8, CPU) for _ in range(_REGIONS)] for _ in range(2))
        self.host = (*sources, *targets)  # to be pinned while anything is copied
        self._sources, self._targets = itertools.cycle(sources), itertools.cycle(targets)
        self._far = [random_tensor(size_bytes, torch.uint8, device) for _ in range(2)]

    def up(self) -> None:
        """Queue a copy to the device."""
        self._far[0].copy_(next(self._sources), non_blocking=True)

    def down(self) -> None:
        """Queue a copy to the host."""
        next(self._targets).copy_(self._far[1], non_blocking=True)

    def activities(self) -> dict[str, Activity]:
        """The copies in both directions. Their amounts are in 1e9 bytes."""
        amount = self._far[0].nbytes / 1e9
        return {"h2d": on_device(self.up, amount, self.device), "d2h": on_device(self.down, amount, self.device)}


class Collectives:
    """A tensor that ranks gather and exchange. All of them must use it in the same way.

    Args:
        ranks: several, which use the device.
        device: of this rank.
        size_bytes: the size of the whole tensor, of which each rank has a part.
    """

    def __init__(self, ranks: Ranks, device: torch.device, size_bytes: int) -> None:
        self._ranks = ranks
        self._device = device
        self._part_bytes = size_bytes // ranks.size
        self._whole = random_tensor(self._part_bytes * ranks.size, torch.uint8, device)
        self._received = torch.empty_like(self._whole)

    def gather(self) -> None:
        """Queue a gather of the tensor."""
        self._ranks.gather(self._whole, _COLLECTIVES)

    def exchange(self) -> None:
        """Queue an exchange of the tensor of each rank, of which the other ranks get their parts."""
        counts = [self._part_bytes] * self._ranks.size
        self._ranks.exchange(self._received, self._whole, counts, _COLLECTIVES)

    def both(self) -> None:
        """Queue a gather and an exchange."""
        self.gather()
        self.exchange()

    def activities(self) -> dict[str, Activity]:
        """Each alone, in 1e9 bytes that a rank receives from others or sends to them, and both in turn."""
        moved = (self._whole.nbytes - self._part_bytes) / 1e9
        return {
            "gather": on_device(self.gather, moved, self._device),
            "exchange": on_device(self.exchange, moved, self._device),
            "collective": on_device(self.both, 2 * moved, self._device),
        }


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
            random_tensor(elements, torch.float32, device).abs_(),
            random_tensor(elements, torch.bfloat16, device),
        )

    def part(self, first: int, elements: int) -> AdamChunk:
        """``elements`` of the chunk from ``first`` on. Both are multiples of 128."""
        return AdamChunk(*(tensor[first : first + elements] for tensor in self))

    def update(self, threads: int = 0) -> None:
        """One AdamW step where the chunk lies."""
        adam(*self, _STEP, threads=threads)

    def make_weight(self, new_weight: Tensor, threads: int = 0) -> None:
        """Write the weight that a step in host memory would leave to ``new_weight``, and nothing else."""
        adam(*self, _STEP, threads=threads, out=new_weight)


def portions_of(chunks: Sequence[AdamChunk]) -> list[list[AdamChunk]]:
    """As many portions as ``chunks``, each with a part of every chunk.

    In steps on the host of a virtual machine some chunks took a third longer than others, always the same ones. The
    portions are alike.
    """
    count = len(chunks)
    elements = chunks[0].weight.numel() // count // PADDING * PADDING
    return [[chunk.part(index * elements, elements) for chunk in chunks] for index in range(count)]


def host_updates(chunks: Sequence[AdamChunk], threads: int) -> dict[str, Activity]:
    """AdamW by the host on a portion of ``chunks`` at a time. The amounts are in 1e9 parameters.

    It updates all states, or makes the weight alone, or has moments in bf16.
    """
    portions = portions_of(chunks)
    elements, bf16 = portions[0][0].weight.numel(), torch.bfloat16
    new_weight = torch.empty(elements, dtype=bf16)
    narrow = {
        "exp_avg": random_tensor(elements, bf16, CPU),
        "exp_avg_sq": random_tensor(elements, bf16, CPU).abs_(),
    }
    ways: dict[str, Callable[[AdamChunk], None]] = {
        "host_adam": lambda part: part.update(threads),
        "host_adam_weight": lambda part: part.make_weight(new_weight, threads),
        "host_adam_narrow": lambda part: part._replace(**narrow).update(threads),
    }

    def turns(update: Callable[[AdamChunk], None]) -> Run:
        left = itertools.cycle(portions)

        def update_portion() -> None:
            for part in next(left):
                update(part)

        return update_portion

    return {name: Activity(turns(update), len(chunks) * elements / 1e9) for name, update in ways.items()}


def streaming(device: torch.device, chunk: AdamChunk) -> Activity:
    """AdamW by the device on a pinned ``chunk`` of the host. Its amount is in 1e9 parameters.

    The chunk is a whole one. It goes in pieces of about 5 million parameters. The first piece comes before anything is
    updated and the last one goes after, so a few pieces alone would be slower.
    """
    staging = AdamStaging(device)

    def update() -> None:
        streamed_adam(*chunk, _STEP, staging).wait(staging.api.current_stream(device))

    return on_device(update, chunk.weight.numel() / 1e9, device)


class Work:
    """The activities of one machine by name, with the memory that they work on.

    Args:
        device: the device.
        effort: the sizes.
        chunks: what the host's AdamW updates.
        threads: how many it has.
    """

    def __init__(self, device: torch.device, effort: Effort, chunks: Sequence[AdamChunk], *, threads: int) -> None:
        run, width = largest_product(device, effort)
        copies = Transfers(device, effort.tensor_bytes // 4)
        own, tflop = AdamChunk.on(device, effort.adam_elements), 2 * width**3 / 1e12
        self.activities = {
            "matmul": on_device(run, tflop, device, times=_PRODUCTS_IN_UNIT),
            **copies.activities(),
            **host_updates(chunks, threads),
            "device_copy": copying(device, effort.tensor_bytes),
            "device_adam": on_device(own.update, own.weight.numel() / 1e9, device, times=_KERNELS_IN_UNIT),
            "dram": copying(CPU, effort.tensor_bytes),
        }
        self.pinned: list[Tensor] = [*copies.host]  # to be registered with the driver
        if device.type == "cuda":
            streamed = AdamChunk.on(CPU, effort.adam_elements)
            self.pinned += streamed
            self.activities["streamed_adam"] = streaming(device, streamed)
            torch.cuda.synchronize(device)  # other streams work on memory that this stream has filled
