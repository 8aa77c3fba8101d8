"""AdamW by the GPU on states in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.kernels import adam_states
from bench.kernels.adam_states import SCALARS, OptimizerStep, States
from bench.kernels.recorder import ON_HOST, Recorder
from bench.kernels.roofs import PCIE_BOTH
from bench.kernels.rows import EAGER, OURS
from bench.kernels.shapes import chunk_elements
from bench.kernels.timing import host_timer
from protrain.engine.states.arena import Arena
from protrain_kernels import AdamStaging, streamed_adam

pytestmark = ON_HOST

SHAPES = ("gpt2-10b", "llama2-13b")
FUSED = "torch.optim fused AdamW and copies"
LINK_BYTES = 26  # a parameter: weight, remainder and moments up and down, and the gradient up
_STAGING_BYTES = {True: 512 << 20, False: 1 << 16}  # by whether the sizes are whole


def streamed_step(states: States, device: torch.device, *, staging_bytes: int) -> Callable[[], None]:
    """A step by the GPU on ``states`` in pinned host memory, for whose end the current stream waits."""
    staging = AdamStaging(device, size_bytes=staging_bytes)
    return lambda: streamed_adam(*states, SCALARS, staging).wait(staging.api.current_stream())


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
        for host, device in [*pairs, (here.grad, there.grad)]:
            assert host is not None
            assert device is not None
            device.copy_(host, non_blocking=True)
        if self._optimizer is None:
            adam_states.plain_step(*there)
        else:
            self._optimizer()
        for host, device in [*pairs, (here.weight, there.weight)]:
            assert host is not None
            assert device is not None
            host.copy_(device, non_blocking=True)


@pytest.mark.parametrize("implementation", [OURS, EAGER, FUSED])
@pytest.mark.parametrize("shape", SHAPES)
def test_streamed_adam(recorder: Recorder, shape: str, implementation: str) -> None:
    """States and gradient on the host."""
    ours, device = implementation == OURS, recorder.device
    elements, arena = chunk_elements(shape, whole=recorder.timed), Arena(device)
    states = States.random(elements, torch.bfloat16, device, split_master=ours).on_host(arena)
    if ours:
        run = streamed_step(states, device, staging_bytes=_STAGING_BYTES[recorder.timed])
    else:
        run = CopiedStep(states, device, fused=implementation == FUSED)
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
