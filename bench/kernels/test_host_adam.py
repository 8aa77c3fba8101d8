"""AdamW on chunks in host memory, and what it leaves of the main thread's time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels import adam_states
from bench.kernels.adam_states import BYTES, NARROW_BYTES, SCALARS, OptimizerStep, States
from bench.kernels.peers import built, compiled, installed
from bench.kernels.recorder import ON_HOST, Recorder
from bench.kernels.roofs import DRAM, NO_ROOF
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import QUICK, chunk_elements
from protrain.engine.states.arena import Arena
from protrain_kernels import adam

pytestmark = ON_HOST

SHAPES = ("gpt2-10b", "llama2-13b", "mistral-7b")
FUSED = "torch.optim fused AdamW"
FUSED_FP32 = "torch.optim fused AdamW, fp32 without casts"
DEEPSPEED = "DeepSpeed CPUAdam"
NOTHING = "nothing beside"
_ON_HOST: dict[str, Any] = {"roof": DRAM, "on_host": True, "tune_threads": True}
_LAUNCHES = 2000
_LEAST = 2.0**-149  # that fp32 has beside zero
_END_OF_MOMENTUM, _END_OF_VARIANCE = 4 * _LEAST, 9 * _LEAST  # times BETA1 and BETA2 they round to themselves


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, FUSED, FUSED_FP32, DEEPSPEED])
@pytest.mark.parametrize("shape", SHAPES)
def test_host_adam(recorder: Recorder, shape: str, implementation: str) -> None:
    if implementation == COMPILED and shape != SHAPES[0]:
        pytest.skip("torch.compile for the host takes a minute and is compared at one shape")
    elements = chunk_elements(shape, whole=recorder.timed)
    states, fp32_grad = host_states(recorder, elements, split_master=implementation == OURS)
    _measure(recorder, states, fp32_grad, implementation, operator="host adam", shape=shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_host_adam_with_bf16_moments(recorder: Recorder, shape: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    states, fp32_grad = host_states(recorder, elements, split_master=True, moment_dtype=torch.bfloat16)
    run, _ = _implementation(recorder, states, fp32_grad, OURS)
    adam_states.measure(
        recorder,
        states,
        run,
        operator="host adam, bf16 moments",
        shape=f"{shape} block",
        implementation=OURS,
        bytes_each=BYTES[torch.bfloat16] - NARROW_BYTES,
        **_ON_HOST,
    )


@pytest.mark.parametrize("implementation", [OURS, FUSED_FP32])
def test_host_adam_on_rare_words(recorder: Recorder, implementation: str) -> None:
    """Rows of an embedding that no batch has had for hundreds of steps: zero gradients, and moments as they end.

    Subnormal numbers that decay rounds to themselves, which some processors treat apart.
    """
    shape = QUICK[0]
    elements = chunk_elements(shape, whole=recorder.timed)
    states, fp32_grad = host_states(recorder, elements, split_master=implementation == OURS)
    states.grad.zero_()
    states.exp_avg.fill_(_END_OF_MOMENTUM)
    states.exp_avg_sq.fill_(_END_OF_VARIANCE)
    ends = ((states.exp_avg, _END_OF_MOMENTUM), (states.exp_avg_sq, _END_OF_VARIANCE))

    def stay() -> None:
        assert all(bool((moment == end).all()) for moment, end in ends), "the moments have not come to their end"

    _measure(recorder, states, fp32_grad, implementation, operator="host adam, rare words", shape=shape, after=stay)


def _measure(
    recorder: Recorder,
    states: States,
    fp32_grad: Tensor,
    implementation: str,
    *,
    operator: str,
    shape: str,
    after: Callable[[], None] = lambda: None,
) -> None:
    """A row of one implementation; ``after`` checks more of the states when they took a step."""
    run, version = _implementation(recorder, states, fp32_grad, implementation)
    adam_states.measure(
        recorder,
        states,
        run,
        operator=operator,
        shape=f"{shape} block",
        implementation=implementation,
        version=version,
        writes_weight=implementation != FUSED_FP32,
        after=after,
        **_ON_HOST,
    )


def host_states(
    recorder: Recorder, elements: int, *, split_master: bool, moment_dtype: torch.dtype = torch.float32
) -> tuple[States, Tensor]:
    """States of ``elements`` parameters in host memory mapped as the engine does, and room for an fp32 gradient."""
    arena = Arena(torch.device("cpu"))
    # Drawn on the GPU where there is one: the host takes long to draw billions.
    drawn = States.random(
        elements, torch.bfloat16, recorder.device, split_master=split_master, moment_dtype=moment_dtype
    )
    return drawn.on_host(arena), arena.take(0 if split_master else elements, torch.float32)


def _implementation(
    recorder: Recorder, states: States, fp32_grad: Tensor, name: str
) -> tuple[Callable[[], object], str]:
    if name == OURS:
        return lambda: adam(*states.tensors, SCALARS), ""
    if name in (EAGER, COMPILED):
        plain = compiled(recorder, adam_states.plain_step) if name == COMPILED else adam_states.plain_step
        return lambda: plain(*states.tensors), torch.__version__
    if name in (FUSED, FUSED_FP32):
        casts = name == FUSED
        return OptimizerStep(states, torch.optim.AdamW, grad=fp32_grad, casts=casts, fused=True), torch.__version__
    if not recorder.timed:
        pytest.skip(f"{name} is compared beside a GPU alone: it compiles for minutes")
    module, version = installed("deepspeed", "deepspeed.ops.adam")
    make = functools.partial(OptimizerStep, states, module.DeepSpeedCPUAdam, grad=fp32_grad, adamw_mode=True)
    return built(f"{name} {version}", make), version


@pytest.mark.parametrize("implementation", [OURS, NOTHING, FUSED_FP32])
def test_launches_beside_host_adam(recorder: Recorder, implementation: str) -> None:
    """How fast the main thread launches kernels while a thread updates states on the host."""
    if not recorder.timed:
        pytest.skip("launches of GPU kernels need a GPU")
    shape = QUICK[0]
    threads = max(1, torch.get_num_threads() - 2)  # as the engine leaves cores to those that launch
    small = torch.zeros(128, device=recorder.device)

    def run() -> None:
        for _ in range(_LAUNCHES):
            small.add_(1.0)

    def check() -> str:
        small.zero_()
        run()
        assert bool((small == _LAUNCHES).all()), "launches were lost"
        return "all launched"

    with _beside(recorder, shape, implementation, threads):
        recorder.measure(
            operator=f"{_LAUNCHES} kernel launches beside host adam",
            shape=f"{shape} block",
            implementation=implementation,
            roof=NO_ROOF,
            bytes_moved=0,
            on_host=True,
            run=run,
            check=check,
            note="" if implementation == NOTHING else f"host adam with {threads} threads in a thread of its own",
        )


@contextmanager
def _beside(recorder: Recorder, shape: str, implementation: str, threads: int) -> Iterator[None]:
    """One implementation's updates again and again in another thread."""
    if implementation == NOTHING:
        yield
        return
    elements = chunk_elements(shape, whole=True)
    states, fp32_grad = host_states(recorder, elements, split_master=implementation == OURS)
    run, _ = _implementation(recorder, states, fp32_grad, implementation)
    running, ends = threading.Event(), threading.Event()

    def work() -> None:
        torch.set_num_threads(threads)  # of this thread and of new ones: OpenMP keeps the count by thread
        while not ends.is_set():
            run()
            running.set()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        running.wait()
        yield
    finally:
        ends.set()
        worker.join()
        torch.set_num_threads(torch.get_num_threads())  # new threads are to have the main thread's count again
