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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.checkpoint.manifest import EXTRA
from protrain.checkpoint.tensor_files import FILE_BYTES, TensorWriter, open_tensors
from protrain.common.adapters import adapter_names
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
    for name, part in parts:
        elements = part.elements
        if elements.start == elements.stop and (ranks.rank or 0 not in part.shape):
            continue
        step = max(step, int(part.tensors.get("step", 0)))
        about = {"shape": [*part.shape], "elements": [elements.start, elements.stop], "kinds": [*part.tensors]}
        writer.add(name, {f"{kind}/{name}": tensor for kind, tensor in part.tensors.items()}, about)
    writer.flush()
    return writer.files, step


def local_parts(
    save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer
) -> Iterator[tuple[str, slice, dict[str, Tensor]]]:
    """What this rank has of all parameters: names, elements and states. One file after another is open.

    The states lie in the files, and only what is used of them is read. So they take no memory of this process.
    """
    for file, entry in files.items():
        with open_tensors(save / file) as tensors:
            for name, part in entry["parameters"].items():
                local, (begin, end) = optimizer.local_elements(name), part["elements"]
                first = max(local.start, begin)
                stop = max(first, min(local.stop, end))
                elements = slice(first - begin, stop - begin)
                yield name, slice(first, stop), {kind: _read(tensors, kind, name, elements) for kind in part["kinds"]}


def _read(tensors: Any, kind: str, name: str, elements: slice) -> Tensor:
    """These ``elements`` of the run of a parameter that the file ``tensors`` has, 1-d, or the parameter's step."""
    value: Tensor = tensors.get_tensor(f"{kind}/{name}")
    return value if kind == "step" else value.view(-1)[elements]


@dataclass(frozen=True)
class SavedParameter:
    """The whole states of one parameter in the files of a save."""

    name: str
    shape: torch.Size
    kinds: tuple[str, ...]
    runs: list[tuple[int, int, Path]] = field(default_factory=list)  # of its elements: first, stop, and the file

    def read(self, kind: str) -> Tensor:
        """The state of that ``kind``. If it lies whole in one file, memory is taken by what is used of it."""
        values = []
        for _, _, path in self.runs:
            with open_tensors(path) as tensors:
                values.append(_read(tensors, kind, self.name, slice(None)))
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
    saved: dict[str, SavedParameter] = {}
    for file, entry in files.items():
        for name, part in entry["parameters"].items():
            one = saved.setdefault(name, SavedParameter(name, torch.Size(part["shape"]), tuple(part["kinds"])))
            one.runs.append((*part["elements"], save / file))
    for name, one in saved.items():
        one.runs.sort()
        if [0, *(stop for _, stop, _ in one.runs)] != [*(first for first, _, _ in one.runs), one.shape.numel()]:
            raise CheckpointError(f"{save} is damaged: it does not have every element of {name} once")
    return saved


def check_parameters(save: Path, files: Mapping[str, dict[str, Any]], optimizer: ProTrainOptimizer) -> None:
    """Raise a CheckpointError unless the save has every element of every parameter once, in the shapes of the model."""
    for name, saved in saved_parameters(save, files).items():
        try:
            optimizer.check_parameter(name, {kind: saved.on_meta(kind) for kind in saved.kinds})
        except ValueError as error:
            raise CheckpointError(f"{save} is of another model: {error}") from None


def base_weights(model: nn.Module, base: str | None) -> set[str]:
    """The names of the parameters that a save with ``base`` leaves out: all that is neither trained nor an adapter's.

    Quantised weights are among them, as they follow from the files of the base. Without a base there are none.
    """
    if base is None:
        return set()
    own = adapter_names(model)
    return {name for name, p in model.named_parameters() if not p.requires_grad and name not in own}


def unmanaged_tensors(model: nn.Module, left_out: set[str]) -> dict[str, Tensor]:
    """The unmanaged tensors of ``model`` by their names in a save, without parameters ``left_out``."""
    return {**_plain(model, left_out), **_statistics(model, left_out)}


def match_saved(save: Path, model: nn.Module, left_out: set[str]) -> list[tuple[Tensor, Tensor]]:
    """Pair each buffer and unmanaged parameter of ``model`` with its saved value, without the parameters ``left_out``.

    Raises:
        CheckpointError: the save is of another model.
    """
    plain, statistics = _plain(model, left_out), _statistics(model, left_out)
    found = []
    with open_tensors(save / BUFFERS) as tensors:
        keys = set(tensors.keys())
        saved_names = {key for key in keys if not key.startswith((BESIDE, EXTRA))}
        compare_names(save, "buffer or frozen parameter", saved_names, set(plain))
        for name, target in plain.items():
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


def _plain(model: nn.Module, left_out: set[str]) -> dict[str, Tensor]:
    """The buffers and the unmanaged parameters, as the plain tensors that they are made of."""
    frozen = {n: each for n, each in model.named_parameters() if not is_managed(each) and n not in left_out}
    whole = {**dict(model.named_buffers()), **frozen}
    return {part: tensor for name, each in whole.items() for part, tensor in made_of(each, name).items()}


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
