"""The files of a save that hold the states of parameters, each of which one rank writes with what it has.

The tensors of a parameter are named "KIND/NAME". One that lies whole on one rank has its shape there. If several ranks
have parts of it, each of their files has a run of its elements, 1-d, and the entry of the file in the manifest says
which::

    "state-00002-00001.safetensors": {..., "parts": {NAME: {"shape": [4, 6], "elements": [9, 24]}}}

A load reads from every file what the loading rank has of it. So no rank holds more than its own part, whatever the
numbers of ranks and the plans of the save and of the load are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from protrain.checkpoint.tensor_files import FILE_BYTES, TensorWriter, open_tensors
from protrain.common.errors import CheckpointError
from protrain.distributed.processes import local_processes
from protrain.optim.optimizer import ProTrainOptimizer


def write_parameters(scratch: Path, optimizer: ProTrainOptimizer) -> tuple[dict[str, dict[str, Any]], int]:
    """Write what this rank has of all parameters, one after another.

    Returns:
        The entries of the files in the manifest, and the largest step of any parameter that this rank has.
    """
    ranks = optimizer.ranks
    prefix = f"state-{ranks.rank:05d}" if ranks.several else "state"
    # The ranks of a node share its memory.
    writer = TensorWriter(scratch, prefix, FILE_BYTES // min(ranks.size, local_processes()))
    step = 0
    parts: dict[str, dict[str, Any]] = {}
    for name in optimizer.parameter_names():
        part = optimizer.export_part(name)
        elements = part.elements
        if elements.start == elements.stop and (ranks.rank > 0 or not part.is_whole):
            continue
        if "step" in part.tensors:
            step = max(step, int(part.tensors["step"]))
        if not part.is_whole:
            parts[name] = {"shape": list(part.shape), "elements": [elements.start, elements.stop]}
        writer.add(name, {f"{kind}/{name}": tensor for kind, tensor in part.tensors.items()})
    writer.flush()
    entries: dict[str, dict[str, Any]] = {}
    for file in writer.files:
        entry = {"bytes": file.bytes, "crc32": file.crc32, "parameters": list(file.owners)}
        cut = {name: parts[name] for name in file.owners if name in parts}
        entries[file.name] = entry | ({"parts": cut} if cut else {})
    return entries, step


def check_parameters(save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer) -> None:
    """Raise a CheckpointError unless the save has every element of every parameter once, in the shapes of the model.

    Args:
        save: the folder of the save.
        files: the entries of its files in the manifest.
        optimizer: has the parameters.
    """
    found: dict[str, list[_Stored]] = {}
    for file, entry in files.items():
        if entry["parameters"]:
            with open_tensors(save / file) as tensors:
                for stored in _stored(save / file, entry, tensors):
                    found.setdefault(stored.name, []).append(stored)
                    try:
                        optimizer.check_parameter(stored.name, stored.on_meta())
                    except ValueError as error:
                        raise CheckpointError(f"{save / file} is of another model: {error}") from None
    for name, parts in found.items():
        _check_complete(save, name, parts)


def load_parameters(save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer) -> None:
    """Set what this rank has of all parameters. One file after another is open, and only what is needed is read."""
    for file, entry in files.items():
        if not entry["parameters"]:
            continue
        with open_tensors(save / file) as tensors:
            for stored in _stored(save / file, entry, tensors):
                own = optimizer.own_elements(stored.name)
                first = max(own.start, stored.first)
                stop = max(first, min(own.stop, stored.stop))
                values = {kind: stored.read(tensors, kind, first, stop) for kind in stored.kinds}
                optimizer.import_part(stored.name, slice(first, stop), values)


@dataclass(frozen=True)
class _Stored:
    """What one file has of a parameter of ``shape``: the elements ``first`` to ``stop``, of each kind of state."""

    name: str
    shape: tuple[int, ...]
    first: int
    stop: int
    kinds: tuple[str, ...]

    def on_meta(self) -> dict[str, torch.Tensor]:
        """Tensors with the shapes of the whole states and no memory."""
        return {kind: torch.empty(() if kind == "step" else self.shape, device="meta") for kind in self.kinds}

    def read(self, tensors: Any, kind: str, first: int, stop: int) -> torch.Tensor:
        """The elements ``first`` to ``stop`` of the parameter, or its step. Rows without any are not read."""
        stored = tensors.get_slice(f"{kind}/{self.name}")
        shape = stored.get_shape()
        if not shape:  # a step, or a parameter of one element
            value: torch.Tensor = tensors.get_tensor(f"{kind}/{self.name}")
            return value if kind == "step" else value.view(-1)[first:stop]
        row = max(1, math.prod(shape[1:]))
        first_row = (first - self.first) // row
        rows = stored[first_row : -(-(stop - self.first) // row)]
        begin = self.first + first_row * row
        found: torch.Tensor = rows.reshape(-1)[first - begin : stop - begin]
        return found


def _stored(path: Path, entry: dict[str, Any], tensors: Any) -> Iterator[_Stored]:
    """What the file at ``path`` has, checked against the shapes of its tensors."""
    kinds: dict[str, list[str]] = {}
    for key in tensors.keys():  # noqa: SIM118 - it is no mapping
        kind, _, name = key.partition("/")
        kinds.setdefault(name, []).append(kind)
    for name in entry["parameters"]:
        shapes = {kind: tuple(tensors.get_slice(f"{kind}/{name}").get_shape()) for kind in kinds[name]}
        shapes.pop("step", None)
        part = entry.get("parts", {}).get(name)
        if part is None:
            shape = next(iter(shapes.values()), ())
            first, stop, expected = 0, math.prod(shape), shape
        else:
            shape, (first, stop) = tuple(part["shape"]), part["elements"]
            expected = (stop - first,)
        for kind, present in shapes.items():
            if present != expected:
                raise CheckpointError(
                    f"{path} is damaged: {kind} of {name} has the shape {list(present)} there, not {list(expected)}"
                )
        yield _Stored(name, shape, first, stop, tuple(kinds[name]))


def _check_complete(save: Path, name: str, parts: list[_Stored]) -> None:
    """Raise a CheckpointError unless ``parts`` have every element of the parameter once, of the same kinds of state."""
    reached, shape, kinds = 0, parts[0].shape, set(parts[0].kinds)
    for part in sorted(parts, key=lambda part: (part.first, part.stop)):
        if part.first != reached or part.shape != shape or set(part.kinds) != kinds:
            raise CheckpointError(
                f"{save} is damaged: the parts of {name} do not fit together at element {min(part.first, reached)}"
            )
        reached = part.stop
    if reached != math.prod(shape):
        raise CheckpointError(f"{save} is damaged: it lacks the elements of {name} from {reached} on")
