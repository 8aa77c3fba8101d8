"""The files of a save: those with the states of parameters, each of which one rank writes with what it has, and others.

The tensors of a parameter are named "KIND/NAME". If several ranks have parts of it, each of their files has a run of
its elements. The entry of a file in the manifest says what it has of which parameters::

    "state-00002-00001.safetensors": {..., "parameters": {NAME: {"shape": [4, 6], "elements": [9, 24], "kinds": [...]}}}

A load reads from every file what the loading rank has of it. So no rank holds more than its own part, whatever the
numbers of ranks and the plans of the save and of the load are.

All other tensors are in one file, which the first rank writes: buffers and parameters that are not managed by their
names, and with a prefix what quantised weights need besides their numbers, and what extra states of modules hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.checkpoint.manifest import EXTRA
from protrain.checkpoint.tensor_files import FILE_BYTES, TensorWriter, open_tensors
from protrain.common.errors import CheckpointError
from protrain.common.parameters import is_managed, kept_beside, made_of, same_bytes
from protrain.distributed.agreement import StoreExchange
from protrain.distributed.ranks import Ranks
from protrain.engine.states.parameter_state import Part
from protrain.optim.optimizer import ProTrainOptimizer

BUFFERS = "buffers.safetensors"
BESIDE = "beside/"  # the prefix of the tensors that quantised weights need besides their numbers


def write_parameters(
    scratch: Path, parts: Iterable[tuple[str, Part]], ranks: Ranks | StoreExchange
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write ``parts``, what this rank has of all parameters by their names, one after another.

    Returns:
        The entries of the files in the manifest, and the largest step of any parameter that this rank has.
    """
    prefix = f"state-{ranks.rank:05d}" if ranks.several else "state"
    # The ranks of a node share its memory, in which an async_save has the tensors of the file that it writes.
    writer = TensorWriter(scratch, prefix, FILE_BYTES // ranks.on_node)
    step = 0
    written: dict[str, dict[str, Any]] = {}
    for name, part in parts:
        elements = part.elements
        if elements.start == elements.stop and (ranks.rank > 0 or not part.is_whole):
            continue
        step = max(step, int(part.tensors.get("step", 0)))
        written[name] = {
            "shape": [*part.shape],
            "elements": [elements.start, elements.stop],
            "kinds": [*part.tensors],
        }
        writer.add({f"{kind}/{name}": tensor for kind, tensor in part.tensors.items()})
    writer.flush()
    entries: dict[str, dict[str, Any]] = {}
    for file in writer.files:
        names = dict.fromkeys(key.partition("/")[2] for key in file.keys)
        entries[file.name] = {**file.entry, "parameters": {name: written[name] for name in names}}
    return entries, step


@dataclass(frozen=True)
class _Part:
    """What one file has of a parameter of ``shape``: the elements ``first`` to ``stop``, of each kind of state."""

    path: Path
    name: str
    shape: torch.Size
    first: int
    stop: int
    kinds: tuple[str, ...]

    def read(self, tensors: Any, kind: str, first: int, stop: int) -> Tensor:
        """The elements ``first`` to ``stop`` of the parameter, 1-d, or its step, which the file ``tensors`` has."""
        value: Tensor = tensors.get_tensor(f"{kind}/{self.name}")
        return value if kind == "step" else value.view(-1)[first - self.first : stop - self.first]


def _parts_in(path: Path, entry: dict[str, Any]) -> Iterator[_Part]:
    """What the file at ``path`` has, by its ``entry`` in the manifest."""
    for name, part in entry["parameters"].items():
        first, stop = part["elements"]
        yield _Part(path, name, torch.Size(part["shape"]), first, stop, tuple(part["kinds"]))


def own_parts(
    save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer
) -> Iterator[tuple[str, slice, dict[str, Tensor]]]:
    """What this rank has of all parameters: names, elements and states. One file after another is open.

    The states lie in the files, and only what is used of them is read. So they take no memory of this process.
    """
    for file, entry in files.items():
        with open_tensors(save / file) as tensors:
            for part in _parts_in(save / file, entry):
                own = optimizer.own_elements(part.name)
                first = max(own.start, part.first)
                stop = max(first, min(own.stop, part.stop))
                states = {kind: part.read(tensors, kind, first, stop) for kind in part.kinds}
                yield part.name, slice(first, stop), states


@dataclass(frozen=True)
class SavedParameter:
    """The whole states of one parameter in the files of a save."""

    parts: list[_Part]  # in the order of their elements
    shape: torch.Size
    kinds: tuple[str, ...]

    def read(self, kind: str) -> Tensor:
        """The state of that ``kind``. If it lies whole in one file, memory is taken by what is used of it."""
        values = []
        for part in self.parts if kind != "step" else self.parts[:1]:
            with open_tensors(part.path) as tensors:
                values.append(part.read(tensors, kind, part.first, part.stop))
        if kind == "step":
            return values[0]
        return (values[0] if len(values) == 1 else torch.cat(values)).view(self.shape)

    def on_meta(self, kind: str) -> Tensor:
        """A float32 tensor of the shape of that state, without memory."""
        return torch.empty(() if kind == "step" else self.shape, dtype=torch.float32, device="meta")


def saved_parameters(save: Path, files: Mapping[str, dict[str, Any]]) -> dict[str, SavedParameter]:
    """The parameters in a save, by their names. None is read here.

    Raises:
        CheckpointError: the save does not have every element of them once.
    """
    found: dict[str, list[_Part]] = {}
    for file, entry in files.items():
        for part in _parts_in(save / file, entry):
            found.setdefault(part.name, []).append(part)
    saved = {}
    for name, parts in found.items():
        parts.sort(key=lambda part: (part.first, part.stop))
        shape = parts[0].shape
        if [0, *(part.stop for part in parts)] != [*(part.first for part in parts), shape.numel()]:
            raise CheckpointError(f"{save} is damaged: it does not have every element of {name} once")
        saved[name] = SavedParameter(parts, shape, parts[0].kinds)
    return saved


def check_parameters(save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer) -> None:
    """Raise a CheckpointError unless the save has every element of every parameter once, in the shapes of the model."""
    for name, saved in saved_parameters(save, files).items():
        try:
            optimizer.check_parameter(name, {kind: saved.on_meta(kind) for kind in saved.kinds})
        except ValueError as error:
            raise CheckpointError(f"{save} is of another model: {error}") from None


def unmanaged_tensors(model: nn.Module, left_out: set[str]) -> dict[str, Tensor]:
    """The unmanaged tensors of ``model`` by their names in a save, without parameters ``left_out``."""
    return {**_buffers(model), **_unmanaged(model, left_out), **_statistics(model, left_out)}


def match_saved(save: Path, model: nn.Module, left_out: set[str]) -> list[tuple[Tensor, Tensor]]:
    """Pair each buffer and unmanaged parameter of ``model`` with its saved value, without the parameters ``left_out``.

    Raises:
        CheckpointError: the save is of another model.
    """
    buffers, unmanaged, statistics = _buffers(model), _unmanaged(model, left_out), _statistics(model, left_out)
    found = []
    with open_tensors(save / BUFFERS) as tensors:
        keys = set(tensors.keys())
        saved_names = {key for key in keys if not key.startswith((BESIDE, EXTRA))}
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


def _unmanaged(model: nn.Module, left_out: set[str]) -> dict[str, Tensor]:
    """The unmanaged parameters, as the plain tensors that they are made of."""
    return {
        part: tensor
        for name, parameter in model.named_parameters()
        if not is_managed(parameter) and name not in left_out
        for part, tensor in made_of(parameter, name).items()
    }


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers, as the plain tensors that they are made of."""
    return {part: tensor for name, buffer in model.named_buffers() for part, tensor in made_of(buffer, name).items()}


def _statistics(model: nn.Module, left_out: set[str]) -> dict[str, Tensor]:
    """What unmanaged parameters need besides their numbers, such as scales of quantised weights.

    These tensors are in attributes or in the module's state_dict, and are neither buffers nor parameters. They are not
    loaded, but loaded weights would mean something else if these differed.
    """
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(path, recurse=False) if not is_managed(p)}
        if own.keys() <= left_out:
            continue
        for name, parameter in own.items():
            found |= kept_beside(parameter, name)
        told: dict[str, Any] = {}
        module._save_to_state_dict(told, f"{path}." if path else "", keep_vars=True)
        known = {name for name, _ in (*module.named_parameters(path, False), *module.named_buffers(path, False))}
        found |= {n: value for n, value in told.items() if n not in known and isinstance(value, Tensor)}
    return {f"{BESIDE}{name}": value for name, value in found.items()}


def _without_repeats(save: Path, name: str, target: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
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
