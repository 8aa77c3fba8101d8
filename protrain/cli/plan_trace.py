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
from protrain.common.parameters import DTYPES
from protrain.profiler.cache import cached_profile
from protrain.profiler.derived import TRACED_BLOCKS, keep_few_blocks, repeats, with_more_blocks
from protrain.profiler.model_profile import ModelProfile
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


def counted(step: ProfiledStep) -> ModelProfile:
    """The profile of ``step`` from the shapes of its tensors, as times of another machine cannot be measured here.

    If the blocks of the model are alike, the trace is of a few of them.
    """
    n_blocks = step.layers or SHAPES.get(step.model, {}).get("num_hidden_layers", 0)
    if n_blocks <= TRACED_BLOCKS or step.freeze:  # which may tell blocks apart
        return with_more_blocks(*_traced(step))
    few, _, model = _traced_once(replace(step, layers=TRACED_BLOCKS))
    return with_more_blocks(few, n_blocks - TRACED_BLOCKS, model)


def _traced(step: ProfiledStep, *, whole: bool = False) -> tuple[ModelProfile, int, nn.Module]:
    """The profile, how many blocks were left out, which are as those that are there, and the model."""
    # Nothing is computed, so there is no need for a record of how values are made.
    with torch.device("meta"):
        loaded = _architecture(step)
    if step.compile:
        torch.compiler.reset()  # there is a limit to what is kept of one function, and these may be many models
    more = 0 if whole else keep_few_blocks(loaded.model)
    model, example, how = _prepared(step, loaded, on_meta=True)
    found = profile(model, example, device="meta", **how)
    if more and not repeats(found):
        return _traced(step, whole=True)
    return found, more, model


_traced_once = cache(_traced)  # of a named shape, as a folder may change


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
