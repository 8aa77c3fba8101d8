"""The same model for every contestant: weights filled piece by piece where they will live, blocks made alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.train.low_precision import multiply_in_float8, quantise_later, quantised, unquantised
from bench.train.task import Task
from protrain.cli.models import check_positions, choose_trained, read_architecture
from protrain.common.parameters import is_managed
from protrain.common.tables import format_bytes
from protrain.engine.states.initialisers import held_storages, start_value
from protrain.forward.chunked_loss import chunk_loss
from protrain.forward.compilation import compile_blocks
from protrain.hardware.memory import available_host_bytes
from protrain.profiler.blocks import find_blocks

_NAME = "bench_name"  # attribute of a parameter: its name in the whole model, as contestants fill one block by itself


def build_model(task: Task) -> Any:
    """The model with its parameters on the meta device, and without key/value caches: in training they only cost.

    Its start values follow from their names in it, so whoever makes them, and in whatever order, makes the same: losses
    can be compared.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loaded = read_architecture(task.model, layers=task.layers)
        if task.quantised is not None:
            quantise_later(loaded.model)
        loaded = choose_trained(loaded, task.lora, ())
    if task.float8:
        multiply_in_float8(loaded.model, emulate=not torch.cuda.is_available())
    check_positions(loaded, task.sequence)
    loaded.config.use_cache = False
    for name, parameter in loaded.model.named_parameters():
        vars(parameter)[_NAME] = name
    return loaded.model.train()


def refuse_too_large(model: nn.Module, task: Task) -> None:
    """Raise a ValueError if this machine, which has no GPU, cannot hold ``model`` and what training adds to it.

    Without that the system would end the benchmark, and perhaps other programs, once its memory is full. Activations
    come on top.
    """
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in parameters) - trained
    needed = 16 * trained + (frozen // 2 if task.quantised else 4 * frozen)  # all in fp32, but 4-bit weights
    available = available_host_bytes()
    if needed > available:
        raise ValueError(
            f"--model {task.model}: without a GPU the weights, gradients and moments take {format_bytes(needed)} of "
            f"this machine's memory, of which {format_bytes(available)} are available: give fewer --layers, or --model "
            "tiny, or run this where there is a GPU"
        )


def replace_loss(model: nn.Module, task: Task) -> None:
    """The loss that ProTrain gets from ``wrap(chunked_loss=True)``, where the task asks for it.

    Before anything is sharded: the head's own forward then computes it, inside the hooks that gather its weight.
    """
    if task.chunked_loss:
        chunk_loss(model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, those that ProTrain finds."""
    return [model.get_submodule(path) for path in find_blocks(model)]


def fill(
    module: nn.Module,
    *,
    device: torch.device,
    dtype: torch.dtype,
    chosen: Callable[[nn.Parameter], bool] = lambda parameter: True,
) -> None:
    """Give the ``chosen`` meta parameters of ``module`` memory on ``device`` and the start values that wrap makes."""
    names, held = {id(parameter): name for name, parameter in module.named_parameters()}, held_storages(module)
    made: dict[int, nn.Parameter] = {}  # a tied parameter is made once
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta or not chosen(parameter):
                continue
            if id(parameter) not in made:
                full_name = vars(parameter).get(_NAME, names[id(parameter)])
                values = start_value(unquantised(parameter), full_name, device, held).to(dtype)
                made[id(parameter)] = (
                    nn.Parameter(values, requires_grad=parameter.requires_grad)
                    if is_managed(parameter)
                    else quantised(parameter, values)
                )
            places.append((owner, name, made[id(parameter)]))
    for owner, name, parameter in places:
        owner._parameters[name] = parameter


def shape_blocks(blocks: Sequence[nn.Module], *, compile: bool, checkpointed: Sequence[bool]) -> None:
    """Compile the forward of every block, as ProTrain does, and checkpoint those that are to be."""
    if compile:
        compile_blocks(blocks)
    for block, wanted in zip(blocks, checkpointed, strict=True):
        if wanted:
            # There is no dropout, so no random numbers to preserve.
            forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            vars(block)["forward"] = forward


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups of what is trained: matrices decay, vectors (norms, biases) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
