"""Writes a trained model as a Hugging Face folder, one parameter at a time."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.checkpoint.loading import check_model
from protrain.checkpoint.manifest import read_manifest, verify_bytes
from protrain.checkpoint.parameter_files import BUFFERS, SavedParameter, compare_names, saved_parameters
from protrain.checkpoint.tensor_files import FILE_BYTES, TensorWriter, complete_folder, open_tensors
from protrain.common.adapters import adapter_names, in_peft_model, is_peft_model
from protrain.common.errors import CheckpointError
from protrain.common.parameters import DTYPES, is_managed
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.engine.states.parameter_state import read_weight
from protrain.engine.states.weight_files import unmanaged
from protrain.engine.weights.parameter import PresentParameter
from protrain.engine.weights.state_hooks import members_of
from protrain_kernels.split_master import split


def has_adapter(model: nn.Module) -> bool:
    """Whether peft has added an adapter to ``model``. Some adapters are no layers: prompts, and prefixes."""
    return bool(getattr(model, "peft_config", None)) and (is_peft_model(model) or bool(adapter_names(model)))


def export(model: nn.Module, folder: str | os.PathLike[str], *, tokenizer: Any = None) -> None:
    """Write ``model`` to ``folder`` so that ``from_pretrained`` of transformers, or ``wrap(weights=...)``, loads it.

    The folder has the configuration, if ``model`` is one of transformers, and the weights that training uses, in
    safetensors with an index. The folder is there when all of it is on the disk, and otherwise not at all. No rank
    holds more than one parameter and a file of about 256 MiB.

    If peft has added an adapter to the model, only the adapter is written, as the folder that
    ``PeftModel.from_pretrained`` loads.

    With several ranks all of them must call it, and the first one writes.

    Args:
        model: a wrapped model.
        folder: where to write it. It must be empty or missing.
        tokenizer: saved beside the model, unless it is None.

    Raises:
        ValueError: ``model`` is not wrapped, ``folder`` has something in it, or the adapter is not all that is trained.
        OSError: the disk is full or not writable. There is no folder then.
        MisuseError: not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    engine, _ = members_of(model, "protrain.export")
    ranks, dtype = engine.memory.ranks, engine.memory.dtype
    engine.bindings.refuse_inside_full_parameters("protrain.export()")
    ranks.meet("protrain.export()")
    managed = {name: p for name, p in model.named_parameters() if isinstance(p, PresentParameter)}
    with engine.quiet():

        def read(name: str) -> Tensor:
            return read_weight(engine.members[managed[name].protrain_handle.index])

        _write(Path(folder), model, managed, read, unmanaged(model), dtype, tokenizer, ranks)


def export_save(
    save: Path,
    model: nn.Module,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
) -> None:
    """Do what ``export`` does with the weights of ``save`` in ``dtype``, or in the type in which they were trained.

    ``model`` may be on the meta device.

    Raises:
        CheckpointError: a file of the save is damaged, or it is of another model.
        ValueError, OSError: as ``export`` does.
    """
    manifest = read_manifest(save)
    managed = {name: parameter for name, parameter in model.named_parameters() if is_managed(parameter)}
    check_model(save, manifest, model, list(managed), manifest["base"])
    verify_bytes(save, manifest["files"])
    parameters = saved_parameters(save, manifest["files"])
    for name, saved in parameters.items():
        shape = managed[name].shape
        if saved.shape != shape:
            raise CheckpointError(f"{save} is of another model: {name} is {[*saved.shape]} there and {[*shape]} here")
    wanted = dtype or DTYPES[manifest["dtype"]]

    def read(name: str) -> Tensor:
        return weight_of(parameters[name], wanted)

    others = set(unmanaged(model))
    with open_tensors(save / BUFFERS) as buffers:
        compare_names(save, "buffer", others & set(buffers.keys()), others)
        tensors = {name: buffers.get_tensor(name) for name in others}
        _write(folder, model, parameters, read, tensors, wanted, tokenizer, Ranks(None))


def weight_of(saved: SavedParameter, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype`` that training used, of a parameter in a save.

    A bf16 weight is its master with ties rounded away from zero (design: numerics), which torch's own cast does not do.
    """
    if "weight" in saved.kinds:
        return saved.read("weight").to(dtype)
    master = saved.read("master")
    return split(master)[0] if dtype is torch.bfloat16 else master.to(dtype)


def _write(
    folder: Path,
    model: nn.Module,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    others: dict[str, Tensor],
    dtype: torch.dtype,
    tokenizer: Any,
    ranks: Ranks,
) -> None:
    """Write the folder. All ranks ``read`` the parameters ``names``, and the first one writes what they have become."""
    alone = has_adapter(model)  # only the adapter is written
    if alone:
        weights, others = _adapter_weights(model, names, read, others), {}
    else:
        weights = ((name, read(name)) for name in names)
    stem = "adapter_model" if alone else "model"
    first, scratch = ranks.rank == 0, folder
    with ExitStack() as unfinished:
        with raised_on_all(ranks):
            if first:
                scratch = unfinished.enter_context(complete_folder(folder, "exported model"))
                _write_configs(scratch, model, dtype, tokenizer, alone)
        # The first rank holds the tensors of a file. peft reads one file, and adapters are small.
        writer = TensorWriter(scratch, stem, sys.maxsize if alone else FILE_BYTES // 4)
        for name, weight in weights:
            with raised_on_all(ranks):
                if first:
                    writer.add(name, {name: weight})
        with raised_on_all(ranks):
            if first:
                for name, tensor in others.items():
                    writer.add(name, {name: tensor})
                writer.flush()
                _write_index(scratch, writer, stem)
                unfinished.close()


def _write_configs(folder: Path, model: Any, dtype: torch.dtype, tokenizer: Any, alone: bool) -> None:
    """Write the configuration of the model, or of the adapter if that is ``alone``, and the tokenizer."""
    parts = [tokenizer]
    if alone:
        _write_adapter_config(model, folder)
    else:
        config: Any = copy.deepcopy(getattr(model, "config", None))
        if hasattr(config, "save_pretrained"):
            config.dtype = dtype
            config.architectures = [type(model).__name__]
            config.save_pretrained(folder)
        parts.append(getattr(model, "generation_config", None))
    for part in parts:
        if part is not None:
            part.save_pretrained(folder)


def _write_index(folder: Path, writer: TensorWriter, stem: str) -> None:
    """Write which file has which tensor, or give the only file the name that needs no index."""
    if len(writer.files) == 1:
        os.rename(folder / next(iter(writer.files)), folder / f"{stem}.safetensors")
        return
    index = {
        "metadata": {"total_size": sum(entry["bytes"] for entry in writer.files.values())},
        "weight_map": {name: file for file, entry in writer.files.items() for name in entry["parameters"]},
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _adapter_weights(
    model: Any, names: Iterable[str], read: Callable[[str], Tensor], others: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that peft saves of the adapter of ``model``, by the names that ``PeftModel.from_pretrained`` expects.

    ``read`` gives the value of each parameter in ``names``, so ``model`` may be on the meta device. ``others`` are its
    buffers. What the adapter trains is held at once, as adapters are small.

    Raises:
        ValueError: ``model`` has several adapters, or trains what peft does not save and would be lost.
    """
    from peft import get_peft_model_state_dict

    adapter, own = _only_adapter(model), adapter_names(model)
    every = {name: p.requires_grad for name, p in model.named_parameters()}
    values = {name: read(name) if every[name] or name in own else torch.empty(0, device="meta") for name in names}
    values.update(others)
    names_of = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tied = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first_names = {name: names_of[id(tensor)] for name, tensor in tied}
    state = {name: values[first] for name, first in first_names.items() if first in values}
    saved = get_peft_model_state_dict(model, state, adapter)
    kept = {id(value) for value in saved.values()}
    lost = [name for name, trained in every.items() if trained and name not in own and id(values.get(name)) not in kept]
    if lost and not model.peft_config[adapter].is_prompt_learning:  # of which peft saves what the trained modules make
        raise ValueError(
            f"{lost[0]} is trained and is no part of the adapter, so exporting the adapter would lose it: name "
            "its module in modules_to_save of the adapter's configuration, or freeze it"
        )
    left = {id(value): name for name, value in values.items() if value.is_meta}
    for name, value in saved.items():  # a tied value is saved under several names
        whole = read(left[id(value)]) if value.is_meta else value.clone()
        yield name if is_peft_model(model) else in_peft_model(name), whole


def _write_adapter_config(model: Any, folder: Path) -> None:
    """Write the adapter_config.json of ``model``, for use of the adapter and not for more training, as peft does."""
    config = copy.deepcopy(model.peft_config[_only_adapter(model)])
    config.inference_mode = True
    config.save_pretrained(folder)


def _only_adapter(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) > 1:
        raise ValueError(f"the model has the adapters {', '.join(names)}: export one that has a single adapter")
    return str(names[0])
