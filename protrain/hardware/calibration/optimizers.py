"""AdamW with the split master: on the host by number of threads, on the device, and by the device on host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from protrain.hardware.calibration.tensors import CPU, random_tensor
from protrain.hardware.calibration.timing import durations_s, rate
from protrain_kernels import AdamStaging, adam, adam_scalars, streamed_adam

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
