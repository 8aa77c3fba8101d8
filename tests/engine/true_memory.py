"""True memory: a small model and its step, and the bytes that the step really holds on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.batch import loss_of
from protrain.common.trees import tensors_in
from protrain.engine.engine import Engine
from protrain.optim.optimizer import ProTrainOptimizer
from protrain.profiler.memory_meter import StorageMeter
from tests.engine.families import make_of_transformers

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


def train(model: nn.Module, optimizer: ProTrainOptimizer, batch: Batch, *, backwards: int = 1) -> None:
    """A step of ``backwards`` backwards."""
    for _ in range(backwards):
        optimizer.backward(model(**batch).loss)
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
    pools = engine.gradients.pools
    tensors += [*chain.from_iterable(pools._free.values()), *pools._in_use.values(), *pools._released.values()]
    tensors += engine.model.buffers()
    found = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
    arena = {segment.memory.untyped_storage().data_ptr() for segment in engine.memory.arena._segments}
    return [tensor for address, tensor in found.items() if address not in arena]


def peak_bytes(
    optimizer: ProTrainOptimizer, forward: Callable[[], Any], inputs: Iterable[Tensor], *, backwards: int = 1
) -> int:
    """Most bytes alive in the second step: ``inputs``, outputs until the next, and all of the engine."""
    meter = DeviceMeter(optimizer._engine)
    output: Any = None
    for measured in (False, True):
        if measured:
            optimizer._engine.updates.wait()
            meter.count(resident(optimizer._engine))
            meter.count([*inputs, *tensors_in(output)])
        with meter if measured else nullcontext():
            for _ in range(backwards):
                output = forward()
                optimizer.backward(loss_of(output))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    optimizer._engine.updates.wait()
    return meter.peak_bytes
