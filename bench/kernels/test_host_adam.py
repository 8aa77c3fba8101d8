"""AdamW on chunks in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.kernels import adam_states
from bench.kernels.adam_states import BYTES, NARROW_BYTES, SCALARS, OptimizerStep, States
from bench.kernels.peers import built, compiled, installed
from bench.kernels.recorder import ON_HOST, Recorder
from bench.kernels.roofs import DRAM
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import chunk_elements
from protrain.engine.states.arena import Arena
from protrain_kernels import adam

pytestmark = ON_HOST

SHAPES = ("gpt2-10b", "llama2-13b", "mistral-7b")
FUSED = "torch.optim fused AdamW"
FUSED_FP32 = "torch.optim fused AdamW, fp32 without casts"
DEEPSPEED = "DeepSpeed CPUAdam"
_ON_HOST: dict[str, Any] = {"roof": DRAM, "on_host": True, "tune_threads": True}


@pytest.mark.parametrize("implementation", [OURS, EAGER, COMPILED, FUSED, FUSED_FP32, DEEPSPEED])
@pytest.mark.parametrize("shape", SHAPES)
def test_host_adam(recorder: Recorder, shape: str, implementation: str) -> None:
    if implementation == COMPILED and shape != SHAPES[0]:
        pytest.skip("torch.compile for the host takes a minute and is compared at one shape")
    elements = chunk_elements(shape, whole=recorder.timed)
    states, fp32_grad = _host_states(recorder, elements, split_master=implementation == OURS)
    run, version = _implementation(recorder, states, fp32_grad, implementation)
    adam_states.measure(
        recorder,
        states,
        run,
        operator="host adam",
        shape=f"{shape} block",
        implementation=implementation,
        version=version,
        writes_weight=implementation != FUSED_FP32,
        **_ON_HOST,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_host_adam_with_bf16_moments(recorder: Recorder, shape: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    states, fp32_grad = _host_states(recorder, elements, split_master=True, moment_dtype=torch.bfloat16)
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


def _host_states(
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
