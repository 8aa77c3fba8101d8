"""AdamW on chunks in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable

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
MOMENTS = {torch.float32: "host adam", torch.bfloat16: "host adam, bf16 moments"}


@pytest.mark.parametrize(
    ("moment_dtype", "implementation"),
    [
        *((moment_dtype, OURS) for moment_dtype in MOMENTS),
        *((torch.float32, peer) for peer in (EAGER, COMPILED, FUSED, FUSED_FP32, DEEPSPEED)),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_host_adam(recorder: Recorder, shape: str, moment_dtype: torch.dtype, implementation: str) -> None:
    if implementation == COMPILED and shape != SHAPES[0]:
        pytest.skip("torch.compile for the host takes a minute and is compared at one shape")
    elements, ours = chunk_elements(shape, whole=recorder.timed), implementation == OURS
    arena = Arena(torch.device("cpu"))  # mapped as the engine does
    # Drawn on the GPU where there is one: the host takes long to draw billions.
    drawn = States.random(elements, torch.bfloat16, recorder.device, split_master=ours, moment_dtype=moment_dtype)
    states, fp32_grad = drawn.on_host(arena), arena.take(0 if ours else elements, torch.float32)
    run, version = _implementation(recorder, states, fp32_grad, implementation)
    adam_states.measure(
        recorder,
        states,
        run,
        operator=MOMENTS[moment_dtype],
        shape=f"{shape} block",
        implementation=implementation,
        version=version,
        bytes_each=BYTES[torch.bfloat16] - (NARROW_BYTES if moment_dtype == torch.bfloat16 else 0),
        writes_weight=implementation != FUSED_FP32,
        roof=DRAM,
        on_host=True,
        tune_threads=True,
    )


def _implementation(
    recorder: Recorder, states: States, fp32_grad: Tensor, name: str
) -> tuple[Callable[[], object], str]:
    if name == OURS:
        return lambda: adam(*states, SCALARS), ""
    if name in (EAGER, COMPILED):
        plain = compiled(recorder, adam_states.plain_step) if name == COMPILED else adam_states.plain_step
        return lambda: plain(*states), torch.__version__
    if name in (FUSED, FUSED_FP32):
        casts = name == FUSED
        return OptimizerStep(states, torch.optim.AdamW, grad=fp32_grad, casts=casts, fused=True), torch.__version__
    if not recorder.timed:
        pytest.skip(f"{name} is compared beside a GPU alone: it compiles for minutes")
    module, version = installed("deepspeed", "deepspeed.ops.adam")
    make = functools.partial(OptimizerStep, states, module.DeepSpeedCPUAdam, grad=fp32_grad, adamw_mode=True)
    return built(f"{name} {version}", make), version
