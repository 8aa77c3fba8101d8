"""Writes the trained model as a Hugging Face folder, one parameter at a time."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.checkpoint.tensor_files import TensorWriter, sync_directory
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.engine.states.weight_files import unmanaged
from protrain.optim.optimizer import ProTrainOptimizer
from protrain_kernels.split_master import split


def save_pretrained(
    folder: Path,
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    dtype: torch.dtype,
    ranks: Ranks,
    tokenizer: Any = None,
) -> None:
    """Write ``model`` to ``folder`` so that ``AutoModelForCausalLM.from_pretrained`` loads it.

    An existing folder is replaced once the new one is complete. All ranks call it, and the first one writes. If it
    cannot, the error is raised on all ranks.

    Args:
        folder: where to write it.
        model: a wrapped transformers model.
        optimizer: its wrapped optimizer, which gives the parameters one at a time.
        dtype: the type of the written parameters.
        ranks: those that train the model.
        tokenizer: saved beside the model, unless it is None.
    """
    scratch = folder.with_name(f".{folder.name}.tmp")
    writes = ranks.rank == 0
    with raised_on_all(ranks):
        if writes:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
            _write_config(scratch, model, dtype, tokenizer)
    writer = TensorWriter(scratch, "model")
    for name in optimizer.parameter_names():
        state = optimizer.export_parameter(name)  # by all ranks
        with raised_on_all(ranks):
            if writes:
                writer.add(name, {name: weight_of(state, dtype)})
    with raised_on_all(ranks):
        if writes:
            _write_rest(scratch, model, writer)
            sync_directory(scratch)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(scratch, folder)


def _write_config(folder: Path, model: nn.Module, dtype: torch.dtype, tokenizer: Any) -> None:
    config: Any = model.config
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    generation_config: Any = model.generation_config
    generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def weight_of(state: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype`` that training used, from the state that ``export_parameter`` returns.

    A bf16 weight is its master with ties rounded away from zero (design: numerics), which torch's own cast does not do.
    """
    if "weight" in state:
        return state["weight"].to(dtype)
    master = state["master"]
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    return split(master.contiguous().view(-1))[0].view(master.shape)


def _write_rest(folder: Path, model: nn.Module, writer: TensorWriter) -> None:
    """Write the buffers and the index of the files, after all parameters."""
    for name, tensor in unmanaged(model).items():
        writer.add(name, {name: tensor.detach().cpu().clone()})
    writer.flush()
    if len(writer.files) == 1:
        os.rename(folder / writer.files[0].name, folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(file.bytes for file in writer.files)},
        "weight_map": {key: file.name for file in writer.files for key in file.keys},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
