"""AdamW by the GPU on states in pinned host memory, alone and beside the host's own AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from bench.kernels import adam_states
from bench.kernels.adam_states import SCALARS, OptimizerStep, States
from bench.kernels.recorder import ON_HOST, Recorder
from bench.kernels.roofs import DRAM, PCIE_BOTH
from bench.kernels.rows import EAGER, OURS
from bench.kernels.shapes import chunk_elements
from bench.kernels.timing import host_timer
from protrain.engine.states.arena import Arena
from protrain_kernels import AdamStaging, adam, padded, streamed_adam

pytestmark = ON_HOST

SHAPES = ("gpt2-10b", "llama2-13b")
FUSED = "torch.optim fused AdamW and copies"
HOST_ALONE = "protrain host_adam alone"
LINK_BYTES = 24  # a parameter: weight, remainder and moments up and down; the gradient is on the GPU
_STAGING_BYTES = {True: 512 << 20, False: 1 << 16}  # by whether the sizes are whole
_SHARES = (0.3, 0.4, 0.5)  # of the parameters that the GPU may take
_FREE_CORES = (0, 2, 4)  # that the host's update may leave to whoever feeds the GPU


@dataclass(frozen=True)
class Streamed:
    """States in pinned host memory, their gradient where a backward leaves it, and what updates them from the GPU."""

    states: States
    staging: AdamStaging
    arena: Arena

    @classmethod
    def of(cls, recorder: Recorder, elements: int, *, split_master: bool) -> Streamed:
        """Random ones."""
        arena = Arena(recorder.device)
        drawn = States.random(elements, torch.bfloat16, recorder.device, split_master=split_master)
        states = drawn.on_host(arena)
        states.grad = drawn.grad
        staging = AdamStaging(recorder.device, size_bytes=_STAGING_BYTES[recorder.timed], slots=4)
        return cls(states, staging, arena)

    def step(self) -> None:
        """Queue an update of all; the current stream waits for its end."""
        done = streamed_adam(*self.states.tensors, SCALARS, self.staging)
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


class CopiedStep:
    """States copied to the device whole, a step there, and the copies back: what one writes without a kernel for it."""

    def __init__(self, states: States, device: torch.device, *, fused: bool) -> None:
        self._states, self._there = states, states.to(device)
        self._optimizer = OptimizerStep(self._there, torch.optim.AdamW, fused=True) if fused else None

    def start(self) -> None:
        """As ``OptimizerStep.start``."""
        if self._optimizer is not None:
            self._optimizer.start()

    def __call__(self) -> None:
        here, there = self._states, self._there
        pairs = [(here.master, there.master), (here.exp_avg, there.exp_avg), (here.exp_avg_sq, there.exp_avg_sq)]
        for host, device in pairs:
            assert host is not None
            assert device is not None
            device.copy_(host, non_blocking=True)
        if self._optimizer is None:
            adam_states.plain_step(*there.tensors)
        else:
            self._optimizer()
        for host, device in [*pairs, (here.weight, there.weight)]:
            assert host is not None
            assert device is not None
            host.copy_(device, non_blocking=True)


@pytest.mark.parametrize("implementation", [OURS, EAGER, FUSED])
@pytest.mark.parametrize("shape", SHAPES)
def test_streamed_adam(recorder: Recorder, shape: str, implementation: str) -> None:
    """States on the host, the gradient on the GPU."""
    ours = implementation == OURS
    elements = chunk_elements(shape, whole=recorder.timed)
    streamed = Streamed.of(recorder, elements, split_master=ours)
    states = streamed.states
    run = streamed.step if ours else CopiedStep(states, recorder.device, fused=implementation == FUSED)

    adam_states.measure(
        recorder,
        states,
        run,
        operator="streamed adam",
        shape=f"{shape} block",
        implementation=implementation,
        roof=PCIE_BOTH,
        bytes_each=LINK_BYTES,
        on_host=True,
        after=host_timer,
    )


class Both:
    """The first part of the parameters updated by the host, the rest by the GPU, at once."""

    def __init__(self, recorder: Recorder, elements: int) -> None:
        self._whole = Streamed.of(recorder, elements, split_master=True)
        self._on_device = self._whole.states.grad
        # Each side reads its gradient where it is: the host's part has been copied down when its update starts.
        self._on_host = self._whole.arena.take(elements, torch.bfloat16).copy_(self._on_device)
        self._elements = elements
        self._worker = ThreadPoolExecutor(1)  # ends when it is collected
        self.share, self.threads = 0.0, 0  # of the GPU; of the host

    @property
    def states(self) -> States:
        """All of them."""
        return self._whole.states

    def __call__(self) -> None:
        first = self._elements - padded(int(self.share * self._elements))
        host = self.states.at(slice(0, first))
        host.grad = self._on_host[:first]
        update = self._worker.submit(lambda: adam(*host.tensors, SCALARS, threads=self.threads))
        if first < self._elements:
            Streamed(self.states.at(slice(first, self._elements)), self._whole.staging, self._whole.arena).step()
        update.result()
        host_timer()

    def choose(self, shares: Sequence[float]) -> None:
        """Take the share of ``shares`` and the number of threads with which both are done first."""
        taken_s = {}
        for self.share in shares:
            for free in _FREE_CORES:
                self.threads = max(1, torch.get_num_threads() - free)
                self()
                taken_s[self.share, self.threads] = min(self._seconds() for _ in range(2))
        self.share, self.threads = min(taken_s, key=lambda choice: taken_s[choice])

    def _seconds(self) -> float:
        start = host_timer()
        self()
        return host_timer() - start


@pytest.mark.parametrize("implementation", [OURS, HOST_ALONE])
@pytest.mark.parametrize("shape", SHAPES)
def test_host_and_streamed_adam(recorder: Recorder, shape: str, implementation: str) -> None:
    """As many parameters updated by the host and the GPU together as by the host alone."""
    elements = chunk_elements(shape, whole=recorder.timed)
    both = Both(recorder, elements)
    both.choose(_SHARES if implementation == OURS else [0.0])

    share = f"{both.share:.0%} of the parameters by the GPU, " if both.share else ""
    adam_states.measure(
        recorder,
        both.states,
        both,
        operator="host and streamed adam at once",
        shape=f"{shape} block",
        implementation=implementation,
        roof=DRAM,
        on_host=True,
        note=f"{share}{both.threads} host threads",
    )
