"""The same model for every contestant: weights filled piece by piece where they will live, blocks made alike."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.train.task import Task
from protrain.chunked_loss import chunk_loss
from protrain.cli.models import fit_positions, load_model
from protrain.compilation import compile_blocks
from protrain.profiler import find_blocks


def build_model(task: Task) -> Any:
    """The model with its parameters on the meta device, and without key/value caches: in training they only cost.

    In one dtype, whoever draws its start values, and in whatever order, draws the same: losses can be compared.
    """
    loaded = load_model(task.model, layers=task.layers)
    fit_positions(loaded, task.sequence)
    loaded.config.use_cache = False
    _seed_by_name(loaded.model)
    return loaded.model.train()


def _seed_by_name(model: nn.Module) -> None:
    """Have the rule that initialises a module of ``model`` begin at a seed of that module's own."""
    seeds = {module: zlib.crc32(name.encode()) for name, module in model.named_modules()}

    def seeded(module: nn.Module, *, rule: Callable[[nn.Module], None]) -> None:
        torch.manual_seed(seeds[module])
        rule(module)

    for module in seeds:
        if (rule := getattr(module, "_init_weights", None)) is not None:
            vars(module)["_init_weights"] = partial(seeded, rule=rule)


def replace_loss(model: nn.Module, task: Task, device: torch.device) -> None:
    """The loss that ProTrain gets from ``wrap(chunked_loss=True)``, where the task asks for it.

    Before anything is sharded: the head's own forward then computes it, inside the hooks that gather its weight.
    """
    if task.chunked_loss:
        chunk_loss(model, device)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, those that ProTrain finds."""
    return [model.get_submodule(path) for path in find_blocks(model)]


def fill(model: Any, module: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
    """Give the meta parameters of ``module``, a part of ``model``, memory on ``device`` and their start values.

    What the model's own rules do not set stays NaN, and so does the loss, which the worker refuses.
    """
    made: dict[int, nn.Parameter] = {}  # a tied parameter is made once
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                values = torch.full(parameter.shape, float("nan"), dtype=dtype, device=device)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            owner._parameters[name] = made[id(parameter)]
    fresh = {id(parameter) for parameter in made.values()}
    drawn: set[int] = set()

    def initialise(owner: nn.Module) -> None:
        own = {id(parameter) for parameter in owner.parameters(recurse=False)}
        parts = {id(parameter) for parameter in owner.parameters()}
        if not parts or parts - fresh or (own and own <= drawn):  # a tied one is drawn by its first owner, as in wrap
            return
        model._init_weights(owner)
        drawn.update(own)

    with torch.no_grad():
        module.apply(initialise)  # children first: rules of parents may set their children's parameters


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
    """AdamW's groups: matrices decay, vectors (norms, biases) do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
