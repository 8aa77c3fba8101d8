"""Checkpoints in the format of torch.distributed.checkpoint (DCP), for scripts without ProTrain.

The tensors have the names that torch.distributed.checkpoint.state_dict.get_state_dict gives those of a plain model, so
``dcp.load({"model": ..., "optim": ...})`` of a script with FSDP2 reads them::

    model.NAME                                   fp32 master of a parameter; a frozen parameter, or a buffer, as it is
    optim.state.NAME.{exp_avg,exp_avg_sq,step}   fp32
    optim.param_groups                           hyperparameters, and the names of parameters
    weight.NAME                                  the 16-bit weight, which is no state: it follows from the master

One process converts, and holds one parameter at a time. The planner of DCP gets tensors without memory, and reads a
parameter when that is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from protrain.checkpoint.export import weight_of
from protrain.checkpoint.manifest import check_files, decode, find_save, read_manifest, verify_bytes
from protrain.checkpoint.parameter_files import BESIDE, BUFFERS, saved_parameters
from protrain.checkpoint.tensor_files import complete_folder, open_tensors
from protrain.common.parameters import DTYPES


def convert(source: Path, target: Path) -> None:
    """Write the checkpoint ``source`` as a folder of DCP, which is there when all of it is on the disk, or not at all.

    Args:
        source: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        target: a folder, which must be empty or missing.

    Raises:
        CheckpointError: ``source`` is no checkpoint, or damaged.
        ValueError: ``target`` is in use.
        OSError: the disk is full or not writable, or another process is writing to ``target``.
    """
    save = find_save(source)
    manifest = read_manifest(save)
    files = manifest["files"]
    check_files(save, manifest)
    verify_bytes(save, files)
    state, reads = dict[str, Any](), dict[str, Callable[[], Tensor]]()
    dtype = DTYPES[manifest["dtype"]]
    for name, states in saved_parameters(save, files).items():
        for kind, saved in states.items():
            key = f"model.{name}" if kind in ("master", "weight") else f"optim.state.{name}.{kind}"
            state[key], reads[key] = saved.on_meta(), saved.read
        if "master" in states and dtype is not torch.float32:
            state[f"weight.{name}"] = torch.empty_like(state[f"model.{name}"], dtype=dtype)
            reads[f"weight.{name}"] = partial(weight_of, states, dtype)
    with open_tensors(save / BUFFERS) as tensors:
        keys = [key for key in tensors.keys() if not key.startswith(BESIDE)]  # noqa: SIM118 - it is no mapping
        state |= {f"model.{key}": tensors.get_tensor(key) for key in keys}
    scalars = decode(manifest["scalars"])
    state["optim.param_groups"] = [
        {**group, "params": names} for group, names in zip(scalars["param_groups"], scalars["parameters"], strict=True)
    ]
    with complete_folder(target, "converted checkpoint") as scratch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # there is one process
        writer = dcp.FileSystemWriter(scratch, thread_count=1)
        try:
            dcp.save(state, storage_writer=writer, planner=_Reading(reads), no_dist=True)
        except dcp.CheckpointException as error:
            raise error.failures[0][0] from None  # the error of that process


class _Reading(DefaultSavePlanner):
    """Plans a save of tensors without memory, and reads each when it is written. ``reads`` has how, by its key."""

    def __init__(self, reads: dict[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._reads = reads

    def lookup_object(self, index: MetadataIndex) -> Any:
        read = self._reads.get(index.fqn)
        return super().lookup_object(index) if read is None else read()
