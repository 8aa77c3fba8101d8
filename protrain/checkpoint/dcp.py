"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for scripts without ProTrain, and back.

The tensors have the names that torch.distributed.checkpoint.state_dict.get_state_dict gives those of a plain model, so
``dcp.load({"model": ..., "optim": ...})`` of a script with FSDP2 reads them::

    model.NAME                                   fp32 master of a parameter; a frozen parameter, or a buffer, as it is
    optim.state.NAME.{exp_avg,exp_avg_sq,step}   fp32
    optim.param_groups                           hyperparameters, and the names of parameters
    protrain                                     JSON: the rest of the manifest, and which of all tensors is what
    protrain.KEY                                 tensors that only ProTrain knows

One process converts, and holds one parameter at a time. The planner of DCP gets tensors without memory, and reads a
parameter when that is written.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from protrain.checkpoint.manifest import (
    EXTRA,
    check_files,
    decode,
    find_save,
    read_manifest,
    verify_bytes,
)
from protrain.checkpoint.parameter_files import BESIDE, BUFFERS, saved_parameters
from protrain.checkpoint.saving import write_save
from protrain.checkpoint.tensor_files import complete_folder, open_tensors
from protrain.common.errors import CheckpointError
from protrain.common.parameters import DTYPES
from protrain.distributed.ranks import Ranks
from protrain.engine.states.parameter_state import Part

_METADATA = ".metadata"  # the file by which a folder of DCP is known
_OWN = "protrain"


def convert(source: Path, target: Path) -> Path:
    """Write the checkpoint ``source`` as a folder of DCP, or the other way round.

    Args:
        source: a folder of DCP that this has written, a checkpoint, or a folder of checkpoints, of which the newest is
            taken.
        target: a folder of DCP, which must be empty or missing; or a folder of checkpoints, which gets another one.

    Returns:
        The folder that was written. The folder is there when all of it is on the disk, and otherwise not at all.

    Raises:
        CheckpointError: ``source`` is no checkpoint, or damaged.
        ValueError: ``target`` is in use.
        OSError: the disk is full or not writable, or another process is writing to ``target``.
    """
    return _from_dcp(source, target) if (source / _METADATA).exists() else _to_dcp(find_save(source), target)


def _to_dcp(save: Path, target: Path) -> Path:
    manifest = read_manifest(save)
    files = manifest.pop("files")
    check_files(save, {"files": files})
    verify_bytes(save, files)
    parameters = saved_parameters(save, files)
    state, reads = dict[str, Any](), dict[str, Callable[[], Tensor]]()
    dtype = DTYPES[manifest["dtype"]]
    for name, saved in parameters.items():
        for kind in saved.kinds:
            empty = saved.on_meta(kind)
            state[_key(name, kind)] = empty.to(dtype) if kind == "weight" else empty
            reads[_key(name, kind)] = partial(saved.read, kind)
    with open_tensors(save / BUFFERS) as tensors:
        others = list(tensors.keys())
        state |= {_other_key(key): tensors.get_tensor(key) for key in others}
    scalars = decode(manifest["scalars"])
    state["optim.param_groups"] = [
        {**group, "params": names} for group, names in zip(scalars["param_groups"], scalars["parameters"], strict=True)
    ]
    kinds = {name: saved.kinds for name, saved in parameters.items()}
    state[_OWN] = json.dumps({"manifest": manifest, "parameters": kinds, "others": others})

    with complete_folder(target, "converted checkpoint") as scratch, _alone():
        writer = dcp.FileSystemWriter(scratch, thread_count=1)
        dcp.save(state, storage_writer=writer, planner=_Reading(reads), no_dist=True)
    return target


class _Reading(DefaultSavePlanner):
    """Plans a save of tensors without memory, and reads each when it is written. ``reads`` has how, by its key."""

    def __init__(self, reads: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._reads = reads

    def lookup_object(self, index: MetadataIndex) -> Any:
        read = self._reads.get(index.fqn)
        return super().lookup_object(index) if read is None else read()


def _from_dcp(source: Path, root: Path) -> Path:
    with _reading(source):
        metadata = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    if _OWN not in metadata:
        raise CheckpointError(
            f"{source} was not written by `protrain convert`, so it lacks what a training needs to go on: read it with "
            "torch.distributed.checkpoint.load into whole tensors, and pass these to load_state_dict of the wrapped "
            "model and optimizer"
        )

    def load(keys: list[str]) -> list[Any]:
        state = {key: _room_for(metadata.get(key)) for key in keys}
        with _reading(source):
            dcp.load(state, storage_reader=dcp.FileSystemReader(source), no_dist=True)
        return [state[key] for key in keys]

    own = json.loads(load([_OWN])[0])

    def parts() -> Iterator[tuple[str, Part]]:
        for name, kinds in own["parameters"].items():
            states = dict(zip(kinds, load([_key(name, kind) for kind in kinds]), strict=True))
            shape = next(value.shape for kind, value in states.items() if kind != "step")
            yield name, Part(shape, slice(0, shape.numel()), states)

    others = dict(zip(own["others"], load([_other_key(key) for key in own["others"]]), strict=True))
    return write_save(root, (own["manifest"], others), parts(), Ranks(None), [], 1)


def _room_for(entry: Any) -> Tensor | None:
    """What DCP fills with the tensor of which ``entry`` tells. It needs nothing for other values."""
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None


def _key(name: str, kind: str) -> str:
    return f"model.{name}" if kind in ("master", "weight") else f"optim.state.{name}.{kind}"


def _other_key(key: str) -> str:
    return f"{_OWN}.{key}" if key.startswith((BESIDE, EXTRA)) else f"model.{key}"


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """A context for DCP that reads ``source``. A CheckpointError names what it cannot read."""
    try:
        with _alone():
            yield
    except Exception as error:  # pickle, zip files and DCP raise many kinds
        raise CheckpointError(f"{source} is damaged: {error}; convert the checkpoint again") from None


@contextmanager
def _alone() -> Iterator[None]:
    """A context for DCP, which does not warn that there is one process, and raises the errors of that process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except dcp.CheckpointException as error:
        raise error.failures[0][0] from None
