"""Traces the step that `protrain plan` plans for: on this machine, or without values where it is to run elsewhere.

Only this part of planning needs torch and transformers, whose imports take longer than a search.
"""

from __future__ import annotations

import atexit
import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from protrain.cli.models import (
    LoadedModel,
    adamw,
    check_positions,
    choose_trained,
    read_architecture,
    shape_in_4bit,
)
from protrain.cli.plan_step import ProfiledStep
from protrain.cli.shapes import SHAPES
from protrain.common.parameters import DTYPES, unmanaged_memory
from protrain.profiler.cache import cached_profile
from protrain.profiler.derived import TRACED_BLOCKS, with_blocks
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.operations import storages_in
from protrain.profiler.trace import profile
from protrain.wrapping import change_forwards


def measured(step: ProfiledStep, *, device_bytes: int, show: Callable[[str], None]) -> ModelProfile | None:
    """The profile of ``step`` on this machine. It is None if that takes more memory than the device has.

    Measuring takes at most ``device_bytes``.
    """
    loaded, device = _architecture(step), torch.device(step.device_type)
    whole: Any = loaded.model
    token_bytes = getattr(whole.get_input_embeddings(), "embedding_dim", 1) * DTYPES[step.dtype].itemsize
    if step.batch * (step.sequence or loaded.sequence) * token_bytes > device_bytes:
        return None  # before what no plan can hold is made
    model, example, how = _prepared(step, loaded, on_meta=False)
    try:
        return cached_profile(model, example, device=device, device_bytes=device_bytes, show=show, **how)
    except torch.OutOfMemoryError:
        return None


def counted(step: ProfiledStep, *, show: Callable[[str], None] | None = None) -> ModelProfile:
    """The profile of ``step`` from the shapes of its tensors, as times of another machine cannot be measured here.

    If the model is a named shape, the trace is of a few of its blocks.
    """
    n_blocks = step.layers or SHAPES.get(step.model, {}).get("num_hidden_layers", 0)
    if step.model not in SHAPES or n_blocks <= TRACED_BLOCKS or step.freeze:  # which may tell blocks apart
        return _traced(step, show)[1]
    few, buffer_bytes = _few_blocks(replace(step, layers=TRACED_BLOCKS))
    return with_blocks(few, n_blocks, buffer_bytes=buffer_bytes)


@cache
def _few_blocks(step: ProfiledStep) -> tuple[ModelProfile, int]:
    """The profile of ``step``, and the bytes of buffers and quantised weights that its last block has for itself."""
    model, found = _traced(step, None)
    *_, before, last = (storages_in(unmanaged_memory(model.get_submodule(block.name))) for block in found.blocks)
    return found, sum(size for storage, size in last.items() if storage not in before)


def _traced(step: ProfiledStep, show: Callable[[str], None] | None) -> tuple[nn.Module, ModelProfile]:
    # Nothing is computed, so there is no need for a record of how values are made.
    with torch.device("meta"):
        loaded = _architecture(step)
    if step.compile:
        torch.compiler.reset()  # there is a limit to what is kept of one function, and these may be many models
    model, example, how = _prepared(step, loaded, on_meta=True)
    return model, profile(model, example, device="meta", show=show, **how)


def _architecture(step: ProfiledStep) -> LoadedModel:
    loaded = read_architecture(step.model, layers=step.layers)
    if not gc.isenabled():  # by the program, until here
        gc.freeze()  # all that was imported stays to the end, so no collection needs to look at it
        gc.enable()
        atexit.register(gc.unfreeze)  # libraries take what is left at the end for leaks, and print a list of it
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels, and none of them runs here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # as peft reads what transformers is to lose
        if step.load_in_4bit:
            shape_in_4bit(loaded.model)
        return choose_trained(loaded, step.lora, step.freeze)


def _prepared(
    step: ProfiledStep, loaded: LoadedModel, *, on_meta: bool
) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """The model with the forwards that it trains with, the arguments of one call, and options of a profile."""
    sequence = step.sequence or loaded.sequence
    check_positions(loaded, sequence)
    ids = torch.zeros(1, 1, dtype=torch.long, device="cpu").expand(step.batch, sequence)
    example = {"input_ids": ids, "labels": ids}
    if step.packing:  # two examples a sequence
        half = sequence // 2
        example["position_ids"] = torch.cat([torch.arange(half), torch.arange(sequence - half)]).expand_as(ids)
    batch = loaded.arguments(example)
    change_forwards(loaded.model, batch, compile=step.compile, chunked_loss=step.chunked_loss, on_meta=on_meta)
    return loaded.model, batch, {"optimizer": adamw(loaded.model), "dtype": DTYPES[step.dtype]}
