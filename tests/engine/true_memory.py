"""True memory: a small model and its step, and the bytes that the step really holds on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import protrain
from protrain.common.batch import loss_of
from protrain.common.errors import PlanError
from protrain.common.trees import tensors_in
from protrain.engine.engine import Engine
from protrain.hardware.detection import detect
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.planning import Plan
from protrain.profiler.memory_meter import StorageMeter
from tests.engine.families import make_of_transformers
from tests.engine.harness import adamw
from tests.engine.profiles import shared_profile

VOCABULARY = 256
Batch = dict[str, Tensor]


SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4},
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "head_dim": 16},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "decoder_start_token_id": 0},
}


def make_model(family: str, vocabulary: int = VOCABULARY) -> nn.Module:
    """Small, but its activations are many times what the planner leaves as a margin."""
    torch.manual_seed(0)
    head = "AutoModelForSeq2SeqLM" if family == "t5" else "AutoModelForCausalLM"
    return make_of_transformers(family, head, {**SIZES[family], "vocab_size": vocabulary})


def make_batch(size: int = 2) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (size, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


def plans_within_budgets(
    make: Callable[[], nn.Module], batch: Batch, dtype: torch.dtype, *, count: int, least_ratio: float = 1.0
) -> list[Plan]:
    """Plans under ``count`` budgets, from what anything needs to all that helps: none takes more, or hardly less.

    The last budget must be ``least_ratio`` times the first.
    """
    model = make()
    profile = shared_profile(model, batch, optimizer=adamw(model), device=torch.device("cpu"), dtype=dtype)

    def machine(device_bytes: int) -> protrain.HardwareProfile:
        return detect("cpu", device_memory=device_bytes, host_memory="1GiB")

    most = protrain.search(profile, machine(1 << 40)).device_bytes
    with pytest.raises(PlanError) as caught:
        protrain.search(profile, machine(1024))
    least, plans = caught.value.needed_bytes, []
    assert most > least_ratio * least, "nothing to choose from"
    for step in range(count):
        budget = least + (most - least) * step // (count - 1)
        model = make()
        model, optimizer = protrain.wrap(
            model,
            adamw(model),
            example_batch=batch,
            device="cpu",
            dtype=dtype,
            device_memory=budget,
            host_memory="1GiB",
            progress=False,
        )
        plan, report = optimizer.plan, optimizer.report
        plans.append(plan)
        peak = true_peak_bytes(model, optimizer, batch)
        assert peak <= budget, str(plan)
        assert peak > 0.9 * plan.device_bytes, f"{plan} was predicted to take {plan.device_bytes}, took {peak}"
        assert report().device_bytes <= plan.device_bytes
        assert report().host_bytes <= plan.host_bytes
    return plans


def train(
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    batch: Mapping[str, Tensor],
    *,
    steps: int = 1,
    backwards: int = 1,
    inside: bool = False,
) -> None:
    """With what the model returns held until it returns the next; ``inside`` the last backward of a step it is made."""
    for _ in range(steps):
        for left in reversed(range(backwards)):
            only_adds: Any = model.no_sync if inside and left else nullcontext
            with only_adds():
                output = model(**batch)
                optimizer.backward(output.loss)
        if not inside:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


class DeviceMeter(StorageMeter):
    """Counts every storage that operations return, other than the host arena's."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ignore(segment.memory for segment in self._engine.memory.arena._segments)  # it may have grown
        return super().__torch_dispatch__(func, types, args, kwargs)


def resident(engine: Engine) -> list[Tensor]:
    """What lies on the device from step to step: one tensor of every storage."""
    persistent = [chunk for chunk in engine.chunks if chunk.persistent]
    tensors = [state for chunk in persistent for state in (chunk.weight, chunk.exp_avg) if state is not None]
    tensors += [chunk.accumulator for chunk in engine.chunks if chunk.accumulator is not None]
    lanes = engine.gradients.reduction
    tensors += [part for lane in (*lanes._usual, lanes._large) for part in (lane.sent, lane.shard)]
    tensors += [buffer.memory for buffer in lanes._sums]
    tensors += [buffer.memory for buffer in engine.buffers.buffers]
    tensors += [tensor for tensor in vars(engine.gradients.reduction).values() if isinstance(tensor, Tensor)]
    tensors += [*engine.gradients.pool._free, *engine.gradients.pool._in_use.values()]
    tensors += engine.model.buffers()
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
    arena = {segment.memory.untyped_storage().data_ptr() for segment in engine.memory.arena._segments}
    return [tensor for address, tensor in found.items() if address not in arena]


def true_peak_bytes(
    model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch, *, backwards: int = 1, inside: bool = False
) -> int:
    """Most device memory during a step: what lies there, the batch, and whatever operations allocate."""
    engine = optimizer._engine
    train(model, optimizer, batch, backwards=backwards, inside=inside)
    engine.updates.wait()
    meter = DeviceMeter(engine)
    meter.count(resident(engine))
    meter.count(batch.values())
    with meter:
        train(model, optimizer, batch, steps=2, backwards=backwards, inside=inside)
    engine.updates.wait()
    return meter.peak_bytes


def peak_of_second_step(
    optimizer: ProTrainOptimizer,
    forward: Callable[[], Any],
    inputs: list[Tensor],
    *,
    loss: Callable[[Any], Tensor] = loss_of,
) -> int:
    """Most bytes alive on the simulated device, with ``inputs`` there throughout and outputs until the next."""
    meter = DeviceMeter(optimizer._engine)
    output: Any = None
    for measured in (False, True):
        if measured:
            optimizer._engine.updates.wait()
            meter.count(resident(optimizer._engine))
            meter.count([*inputs, *tensors_in(output)])
        with meter if measured else nullcontext():
            output = forward()
            loss(output).backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_bytes
