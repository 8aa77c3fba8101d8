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
# What a chunk holds: the type of its weights and of its moments.
HELD = {
    "split master": (torch.bfloat16, torch.float32),
    "fp32 master": (torch.float16, torch.float32),
    "split master, bf16 moments": (torch.bfloat16, torch.bfloat16),
}
WITH_PEERS = ("split master", "fp32 master")


@pytest.mark.parametrize(
    ("held", "implementation"),
    [*((held, OURS) for held in HELD), *((held, peer) for held in WITH_PEERS for peer in PEERS)],
)
@pytest.mark.parametrize("shape", MODELS)
def test_adam(recorder: Recorder, shape: str, held: str, implementation: str) -> None:
    dtype, moment_dtype = HELD[held]
    elements = chunk_elements(shape, whole=recorder.timed)
    ours = implementation == OURS
    states = States.random(elements, dtype, recorder.device, split_master=ours, moment_dtype=moment_dtype)
    run, version = _implementation(recorder, states, implementation)
    adam_states.measure(
        recorder,
        states,
        run,
        operator=f"adam, {held}",
        shape=f"{shape} block",
        dtype=str(dtype).removeprefix("torch."),
        implementation=implementation,
        version=version,
        roof=DEVICE,
        bytes_each=BYTES[dtype] - (NARROW_BYTES if moment_dtype == torch.bfloat16 else 0),
    )


def _implementation(recorder: Recorder, states: States, name: str) -> tuple[Callable[[], None], str]:
    if name == OURS:
        step = adam if states.weight.is_cuda else launch_adam  # a CPU tensor would go to the C kernel
        return lambda: step(*states, SCALARS), ""
    if name in (EAGER, COMPILED):
        plain = compiled(recorder, adam_states.plain_step) if name == COMPILED else adam_states.plain_step
        return lambda: plain(*states), torch.__version__
    if name == "torch.optim fused AdamW":
        return OptimizerStep(states, torch.optim.AdamW, fused=True), torch.__version__
    if not recorder.timed:
        pytest.skip(f"{name} needs a GPU")
    if name == "torchao AdamW":
        module, version = installed("torchao", "torchao.optim")
        return OptimizerStep(states, module._AdamW), version
    module, version = installed("deepspeed", "deepspeed.ops.adam")
    return built(f"{name} {version}", lambda: OptimizerStep(states, module.FusedAdam, adam_w_mode=True)), version
