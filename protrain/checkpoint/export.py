"""Writes a trained model as a Hugging Face folder, one parameter at a time."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.checkpoint.manifest import verify_bytes
from protrain.checkpoint.parameter_files import SavedTensor, saved_parameters
from protrain.checkpoint.tensor_files import TensorWriter, open_tensors, sync
from protrain.checkpoint.unmanaged_tensors import BUFFERS, compare_names
from protrain.common.errors import CheckpointError
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.engine.states.values import read_weight
from protrain.engine.states.weight_files import unmanaged
from protrain.engine.weights.parameter import PresentParameter
from protrain.engine.weights.state_hooks import members_of
from protrain_kernels.split_master import split


def export(model: nn.Module, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> None:
    """Write ``model`` to ``folder`` so that ``from_pretrained`` of transformers, or ``wrap(weights=...)``, loads it.

    The folder has the configuration, if ``model`` is one of transformers, and the weights that training uses, in
    safetensors with an index. The folder is there when all of it is on the disk, and otherwise not at all. No rank
    holds more than one parameter and a file of about 1 GiB.

    With several ranks all of them must call it, and the first one writes.

    Args:
        model: a wrapped model.
        folder: where to write it. It must be empty or missing.
        tokenizer: saved beside the model, unless it is None.

    Raises:
        ValueError: ``model`` is not wrapped, or ``folder`` has something in it.
        OSError: the disk is full or not writable. There is no folder then.
        MisuseError: not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    engine, _ = members_of(model, "protrain.export")
    engine.bindings.refuse_inside_full_parameters("protrain.export()")
    engine.ranks.meet("protrain.export()")
    managed = {name: p for name, p in model.named_parameters() if isinstance(p, PresentParameter)}
    with engine.quiet():
        weights = ((name, read_weight(engine.members[p.protrain_handle.index])) for name, p in managed.items())
        _write(Path(folder), model, weights, unmanaged(model), engine.dtype, tokenizer, engine.ranks)


def export_save(
    save: Path, manifest: dict[str, Any], model: nn.Module, folder: Path, *, dtype: torch.dtype, tokenizer: Any = None
) -> None:
    """Do what :func:`export` does with the weights of ``save`` in ``dtype``. ``model`` may be on the meta device.

    Raises:
        CheckpointError: a file of the save is damaged, or it is of another model.
        ValueError, OSError: as :func:`export` does.
    """
    verify_bytes(save, manifest["files"])
    parameters = saved_parameters(save, manifest["files"])
    for name, states in parameters.items():
        shape = model.get_parameter(name).shape
        for found in (saved.on_meta().shape for kind, saved in states.items() if kind != "step"):
            if found != shape:
                raise CheckpointError(f"{save} is of another model: {name} is {[*found]} there and {[*shape]} here")
    weights = ((name, weight_of(states, dtype)) for name, states in parameters.items())
    with open_tensors(save / BUFFERS) as buffers:
        names = set(unmanaged(model))
        compare_names(save, "buffer", names & set(buffers.keys()), names)
        others = {name: buffers.get_tensor(name) for name in names}
        _write(folder, model, weights, others, dtype, tokenizer, Ranks(None))


def weight_of(states: dict[str, SavedTensor], dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype`` that training used, from the states of a parameter in a save.

    A bf16 weight is its master with ties rounded away from zero (design: numerics), which torch's own cast does not do.
    """
    if "weight" in states:
        return states["weight"].read().to(dtype)
    master = states["master"].read()
    if dtype is not torch.bfloat16:
        return master.to(dtype)
    return split(master.contiguous().view(-1))[0].view(master.shape)


def _write(
    folder: Path,
    model: nn.Module,
    weights: Iterable[tuple[str, Tensor]],
    others: dict[str, Tensor],
    dtype: torch.dtype,
    tokenizer: Any,
    ranks: Ranks,
) -> None:
    """Write the folder. All ranks go through ``weights``, and the first one writes them."""
    folder = folder.absolute()
    scratch = folder.with_name(f".{folder.name}.tmp")
    first = ranks.rank == 0
    try:
        with raised_on_all(ranks):
            if first:
                if folder.exists() and any(folder.iterdir()):
                    raise ValueError(f"{folder} is not empty: give a folder of its own for the exported model")
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
                _write_config(scratch, model, dtype, tokenizer)
        writer = TensorWriter(scratch, "model")
        for name, weight in weights:
            with raised_on_all(ranks):
                if first:
                    writer.add(name, {name: weight})
        with raised_on_all(ranks):
            if first:
                for name, tensor in others.items():
                    writer.add(name, {name: tensor.detach().cpu().clone()})
                writer.flush()
                _write_index(scratch, writer)
                for path in (*scratch.iterdir(), scratch):
                    sync(path)
                os.rename(scratch, folder)
                sync(folder.parent)
    except BaseException:
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_config(folder: Path, model: nn.Module, dtype: torch.dtype, tokenizer: Any) -> None:
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.dtype = dtype
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    for part in (getattr(model, "generation_config", None), tokenizer):
        if part is not None:
            part.save_pretrained(folder)


def _write_index(folder: Path, writer: TensorWriter) -> None:
    """Write which file has which tensor, or give the only file the name that needs no index."""
    if len(writer.files) == 1:
        os.rename(folder / writer.files[0].name, folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(file.bytes for file in writer.files)},
        "weight_map": {key: file.name for file in writer.files for key in file.keys},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
