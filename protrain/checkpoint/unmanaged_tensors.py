"""What a checkpoint holds of a model besides managed parameters: buffers, and parameters that are not managed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from protrain.checkpoint.tensor_files import open_tensors
from protrain.common.errors import CheckpointError
from protrain.common.parameters import is_managed, kept_beside, made_of, same_bytes

BUFFERS = "buffers.safetensors"
BESIDE = "beside/"  # the prefix of the tensors that quantised weights need besides their numbers


def unmanaged_tensors(model: nn.Module, left_out: set[str]) -> dict[str, torch.Tensor]:
    """The unmanaged tensors of ``model`` by their names in a save, without parameters ``left_out``."""
    return {**_buffers(model), **_unmanaged(model, left_out), **_statistics(model, left_out)}


def match_saved(save: Path, model: nn.Module, left_out: set[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each buffer and unmanaged parameter of ``model`` with its saved value, without the parameters ``left_out``.

    Raises:
        CheckpointError: the save is of another model.
    """
    buffers, unmanaged, statistics = _buffers(model), _unmanaged(model, left_out), _statistics(model, left_out)
    found = []
    with open_tensors(save / BUFFERS) as tensors:
        keys = set(tensors.keys())
        saved_names = {key for key in keys if not key.startswith(BESIDE)}
        compare_names(save, "buffer", saved_names - unmanaged.keys(), set(buffers))
        compare_names(save, "frozen parameter", saved_names & unmanaged.keys(), set(unmanaged))
        for name, target in {**buffers, **unmanaged}.items():
            saved = tensors.get_tensor(name)
            if saved.shape != target.shape or saved.dtype != target.dtype:
                raise CheckpointError(
                    f"{save} is of another model: buffer {name!r} is {saved.dtype} {list(saved.shape)} there "
                    f"and {target.dtype} {list(target.shape)} here"
                )
            found.append(_without_repeats(save, name, target, saved))
        for name in sorted(keys & statistics.keys()):
            if not same_bytes(tensors.get_tensor(name), statistics[name].detach().cpu()):
                raise CheckpointError(
                    f"{save} is of another model: {name.removeprefix(BESIDE)} has other values there, so its weights "
                    "were quantised otherwise: load it into a model that was quantised from the same weights"
                )
    return found


def compare_names(save: Path, what: str, saved: set[str], present: set[str]) -> None:
    """Raise a CheckpointError unless the save and the model have the same names of ``what``."""
    for names, verb in ((saved - present, "holds"), (present - saved, "lacks")):
        if names:
            other = "the model does not have" if verb == "holds" else "the model has"
            raise CheckpointError(f"{save} is of another model: it {verb} the {what} {min(names)!r}, which {other}")


def _unmanaged(model: nn.Module, left_out: set[str]) -> dict[str, torch.Tensor]:
    """The unmanaged parameters, as the plain tensors that they are made of."""
    return {
        part: tensor
        for name, parameter in model.named_parameters()
        if not is_managed(parameter) and name not in left_out
        for part, tensor in made_of(parameter, name).items()
    }


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers, as the plain tensors that they are made of."""
    return {part: tensor for name, buffer in model.named_buffers() for part, tensor in made_of(buffer, name).items()}


def _statistics(model: nn.Module, left_out: set[str]) -> dict[str, torch.Tensor]:
    """What unmanaged parameters need besides their numbers, such as scales of quantised weights.

    These tensors are in attributes or in the module's state_dict, and are neither buffers nor parameters. They are not
    loaded, but loaded weights would mean something else if these differed.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(path, recurse=False) if not is_managed(p)}
        if own.keys() <= left_out:
            continue
        for name, parameter in own.items():
            found |= kept_beside(parameter, name)
        told: dict[str, Any] = {}
        module._save_to_state_dict(told, f"{path}." if path else "", keep_vars=True)
        known = {name for name, _ in (*module.named_parameters(path, False), *module.named_buffers(path, False))}
        found |= {n: value for n, value in told.items() if n not in known and isinstance(value, torch.Tensor)}
    return {f"{BESIDE}{name}": value for name, value in found.items()}


def _without_repeats(
    save: Path, name: str, target: torch.Tensor, saved: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors without the repetitions that ``expand`` made in ``target``: torch writes to no element twice."""
    if 0 not in target.stride():
        return target, saved
    first = tuple(slice(1) if stride == 0 else slice(None) for stride in target.stride())
    repeated = saved[first].expand_as(saved).clone(memory_format=torch.contiguous_format)
    if not same_bytes(repeated, saved):
        raise CheckpointError(
            f"{save} has several values in buffer {name!r}, which is one value repeated by expand() here: give it "
            "memory of its own with .contiguous() where the model makes it"
        )
    return target[first], saved[first]
