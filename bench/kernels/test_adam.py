"""AdamW on chunks in GPU memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.kernels import adam_states
from bench.kernels.adam_states import BYTES, NARROW_BYTES, SCALARS, OptimizerStep, States
from bench.kernels.peers import built, compiled, installed
from bench.kernels.recorder import Recorder
from bench.kernels.roofs import DEVICE
from bench.kernels.rows import COMPILED, EAGER, OURS
from bench.kernels.shapes import MODELS, chunk_elements
from protrain_kernels import adam
from protrain_kernels.adam import launch_adam

PEERS = (EAGER, COMPILED, "torch.optim fused AdamW", "DeepSpeed FusedAdam", "torchao AdamW")


@pytest.mark.parametrize("implementation", [OURS, *PEERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["split-master", "fp32-master"])
@pytest.mark.parametrize("shape", MODELS)
def test_adam(recorder: Recorder, shape: str, dtype: torch.dtype, implementation: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    states = States.random(elements, dtype, recorder.device, split_master=implementation == OURS)
    run, version = _implementation(recorder, states, implementation)
    adam_states.measure(
        recorder,
        states,
        run,
        operator="adam, split master" if dtype == torch.bfloat16 else "adam, fp32 master",
        shape=f"{shape} block",
        dtype=str(dtype).removeprefix("torch."),
        implementation=implementation,
        version=version,
        roof=DEVICE,
        bytes_each=BYTES[dtype],
    )


@pytest.mark.parametrize("shape", MODELS)
def test_adam_with_bf16_moments(recorder: Recorder, shape: str) -> None:
    elements = chunk_elements(shape, whole=recorder.timed)
    states = States.random(elements, torch.bfloat16, recorder.device, split_master=True, moment_dtype=torch.bfloat16)
    run, _ = _implementation(recorder, states, OURS)
    adam_states.measure(
        recorder,
        states,
        run,
        operator="adam, split master, bf16 moments",
        shape=f"{shape} block",
        implementation=OURS,
        roof=DEVICE,
        bytes_each=BYTES[torch.bfloat16] - NARROW_BYTES,
    )


def _implementation(recorder: Recorder, states: States, name: str) -> tuple[Callable[[], None], str]:
    if name == OURS:
        step = adam if states.weight.is_cuda else launch_adam  # a CPU tensor would go to the C kernel
        return lambda: step(*states.tensors, SCALARS), ""
    if name in (EAGER, COMPILED):
        plain = compiled(recorder, adam_states.plain_step) if name == COMPILED else adam_states.plain_step
        return lambda: plain(*states.tensors), torch.__version__
    if name == "torch.optim fused AdamW":
        return OptimizerStep(states, torch.optim.AdamW, fused=True), torch.__version__
    if not recorder.timed:
        pytest.skip(f"{name} needs a GPU")
    if name == "torchao AdamW":
        module, version = installed("torchao", "torchao.optim")
        return OptimizerStep(states, module._AdamW), version
    module, version = installed("deepspeed", "deepspeed.ops.adam")
    return built(f"{name} {version}", lambda: OptimizerStep(states, module.FusedAdam, adam_w_mode=True)), version
