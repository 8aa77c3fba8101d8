"""Checkpoints of a run: atomic saves, exact resumption, safetensors and JSON, no pickle.

``folder`` holds numbered saves, the newest last::

    folder/00007-step-3500/
        checkpoint.json            manifest: format, files with size and CRC-32, step, scalars, scheduler, random states
        buffers.safetensors        model.named_buffers()
        state-00001.safetensors    "master/NAME", "exp_avg/NAME", ...: about 1 GiB each, one parameter never split

A save is written to a hidden folder beside its name, flushed to the disk and renamed into place, so a process that is
killed at any moment leaves the earlier saves untouched and at most one hidden folder, which the next save removes.
Parameters are streamed one at a time: memory stays bounded by one file. State is kept under parameter names, whole, in
fp32, so that it loads under any plan.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from protrain.errors import CheckpointError
from protrain.random_state import random_state, set_random_state
from protrain.tensor_files import TensorWriter, file_crc32, open_tensors, sync_directory, write_tensors

FORMAT = 1
MANIFEST = "checkpoint.json"
BUFFERS = "buffers.safetensors"
_SAVE = re.compile(r"(\d{5,})-step-(\d+)")
_SCRATCH = re.compile(r"\.\d{5,}(-step-\d+)?\.tmp")  # a save that is not finished, or being deleted


class StreamingOptimizer(Protocol):
    """What a checkpoint needs of the optimizer that :func:`protrain.wrap` returns."""

    def parameter_names(self) -> list[str]:
        """Every managed parameter, in definition order."""
        ...

    def export_parameter(self, name: str) -> dict[str, torch.Tensor]:
        """CPU tensors of one parameter's state."""
        ...

    def import_parameter(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Set one parameter's state."""
        ...

    def scalar_state(self) -> dict[str, Any]:
        """Hyperparameters and loss scale, fit for JSON."""
        ...

    def load_scalar_state(self, state: dict[str, Any]) -> None:
        """Set what :meth:`scalar_state` returned."""
        ...


class Scheduler(Protocol):
    """A ``torch.optim.lr_scheduler``."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule's position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set what :meth:`state_dict` returned."""
        ...


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: StreamingOptimizer,
    *,
    scheduler: Scheduler | None = None,
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Save training state atomically as a new numbered save in ``folder``; returns its path.

    Parameters:
        folder: Made if missing. Saves of one run belong in one folder.
        model: The wrapped model; gives its buffers.
        optimizer: The wrapped optimizer; gives weights, masters and moments, one parameter at a time.
        scheduler: A learning rate scheduler whose state is plain numbers, lists and dictionaries.
        extra: Anything JSON can hold; :func:`load_checkpoint` returns it.
        keep: How many saves stay, this one included; older ones are deleted once it is complete.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, ``keep`` is below 1, or ``scheduler`` or ``extra`` holds what
            JSON cannot.
        OSError: The disk is full or not writable; earlier saves are intact, and nothing is left of this one.
    """
    _check_wrapped(optimizer)
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".*.tmp"):
        if _SCRATCH.fullmatch(leftover.name) and leftover.is_dir():
            shutil.rmtree(leftover)
    saves = list_saves(root)
    serial = int(saves[-1].name.partition("-")[0]) + 1 if saves else 1

    scratch = root / f".{serial:05d}.tmp"
    scratch.mkdir()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "scalars": _encode(optimizer.scalar_state(), "the optimizer's scalar state"),
        "scheduler": None if scheduler is None else _encode(scheduler.state_dict(), "the scheduler's state"),
        "extra": _encode(extra, "extra"),
        "random": random_state(),
    }
    try:
        files, step = _write_tensors(scratch, model, optimizer)
        manifest |= {"step": step, "files": files}
        with open(scratch / MANIFEST, "w") as file:
            json.dump(manifest, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError:  # a full disk gets back what this save took of it
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_directory(scratch)
    target = root / f"{serial:05d}-step-{step}"
    os.rename(scratch, target)
    sync_directory(root)

    for old in [*saves, target][:-keep]:
        # Renamed first: a half-deleted save must never look like a save.
        doomed = old.with_name(f".{old.name}.tmp")
        os.rename(old, doomed)
        shutil.rmtree(doomed)
    return target


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: StreamingOptimizer,
    *,
    scheduler: Scheduler | None = None,
) -> Any:
    """Load the newest save in ``folder``, or the save that ``folder`` itself is; returns its ``extra``.

    The state of ``model``, ``optimizer`` and ``scheduler`` and the random states of torch, CUDA, Python and numpy
    become those of the save. Every file is checked against its recorded size and CRC-32 before anything is changed.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one.
        CheckpointError: There is no save, a file of it is missing or damaged, or it is of another model.
    """
    _check_wrapped(optimizer)
    save = _find_save(Path(folder))
    manifest = _read_manifest(save)
    _verify(save, manifest)
    names = optimizer.parameter_names()
    saved_names = {name for entry in manifest["files"].values() for name in entry["parameters"]}
    _compare(save, "parameter", saved_names, set(names))
    if (scheduler is None) != (manifest["scheduler"] is None):
        has, needs = ("no ", "one was given") if scheduler is not None else ("a ", "none was given")
        raise CheckpointError(f"{save} holds {has}scheduler state and {needs}; pass the scheduler it was saved with")

    _load_buffers(save, model)
    for file, entry in manifest["files"].items():
        if entry["parameters"]:
            _load_parameters(save / file, entry["parameters"], optimizer)
    optimizer.load_scalar_state(_decode(manifest["scalars"]))
    if scheduler is not None:
        scheduler.load_state_dict(_decode(manifest["scheduler"]))
    set_random_state(manifest["random"])
    return _decode(manifest["extra"])


def list_saves(folder: str | os.PathLike[str]) -> list[Path]:
    """The complete saves in ``folder``, oldest first; empty when there is none."""
    saves = [path for path in Path(folder).glob("*") if _SAVE.fullmatch(path.name) and path.is_dir()]
    return sorted(saves, key=lambda path: int(path.name.partition("-")[0]))


def _check_wrapped(optimizer: Any) -> None:
    if not hasattr(optimizer, "scalar_state"):
        raise ValueError(
            f"optimizer must be the one that protrain.wrap returned, not a plain {type(optimizer).__name__}"
        )


def _write_tensors(
    scratch: Path, model: nn.Module, optimizer: StreamingOptimizer
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write buffers and parameters; returns the manifest's files and the largest step of any parameter."""
    # Cloned one by one: safetensors refuses tensors that share memory, as expanded and tied buffers do.
    buffers = {name: buffer.detach().cpu().clone().contiguous() for name, buffer in model.named_buffers()}
    size, crc32 = write_tensors(scratch / BUFFERS, buffers)
    files: dict[str, dict[str, Any]] = {BUFFERS: {"bytes": size, "crc32": crc32, "parameters": []}}
    writer = TensorWriter(scratch, "state")
    step = 0
    for name in optimizer.parameter_names():
        state = optimizer.export_parameter(name)
        if "step" in state:
            step = max(step, int(state["step"]))
        writer.add(name, {f"{kind}/{name}": tensor for kind, tensor in state.items()})
    writer.flush()
    for file in writer.files:
        files[file.name] = {"bytes": file.bytes, "crc32": file.crc32, "parameters": list(file.owners)}
    return files, step


def _find_save(folder: Path) -> Path:
    if (folder / MANIFEST).exists():
        return folder
    saves = list_saves(folder)
    if not saves:
        what = "holds no checkpoint" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give the folder that save_checkpoint wrote to")
    return saves[-1]


def _remedy(save: Path) -> str:
    """What to do about the damaged ``save``: the one before it, when there is one."""
    older = [other for other in list_saves(save.parent) if other.name < save.name]
    if older:
        return f"delete {save} to go on from {older[-1].name}, or load that folder"
    return "there is no older save beside it"


def _read_manifest(save: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((save / MANIFEST).read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {save / MANIFEST}: {error.strerror}; {_remedy(save)}") from None
    except ValueError:
        raise CheckpointError(f"{save / MANIFEST} is damaged; {_remedy(save)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise CheckpointError(f"{save / MANIFEST} has format {found}; this version reads format {FORMAT}")
    missing = {"step", "files", "scalars", "scheduler", "extra", "random"} - set(manifest)
    if missing:
        raise CheckpointError(f"{save / MANIFEST} lacks {min(missing)!r}; {_remedy(save)}")
    return manifest


def _verify(save: Path, manifest: dict[str, Any]) -> None:
    """Every file is there, has its size, and has its bytes: before any state is changed."""
    for name, entry in manifest["files"].items():
        if not (save / name).is_file():
            raise CheckpointError(f"{save / name} is missing; {_remedy(save)}")
        size = (save / name).stat().st_size
        if size != entry["bytes"]:
            raise CheckpointError(f"{save / name} has {size} bytes instead of {entry['bytes']}; {_remedy(save)}")
    names = list(manifest["files"])
    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, crc32 in zip(names, pool.map(lambda name: file_crc32(save / name), names), strict=True):
            if crc32 != manifest["files"][name]["crc32"]:
                raise CheckpointError(f"{save / name} is damaged: its checksum differs; {_remedy(save)}")


def _compare(save: Path, what: str, saved: set[str], present: set[str]) -> None:
    for names, verb in ((saved - present, "holds"), (present - saved, "lacks")):
        if names:
            other = "the model does not have" if verb == "holds" else "the model has"
            raise CheckpointError(f"{save} is of another model: it {verb} the {what} {min(names)!r}, which {other}")


def _load_buffers(save: Path, model: nn.Module) -> None:
    present = dict(model.named_buffers())
    with open_tensors(save / BUFFERS) as tensors:
        _compare(save, "buffer", set(tensors.keys()), set(present))
        for name, buffer in present.items():
            saved = tensors.get_tensor(name)
            if saved.shape != buffer.shape or saved.dtype != buffer.dtype:
                raise CheckpointError(
                    f"{save} is of another model: buffer {name!r} is {saved.dtype} {list(saved.shape)} there "
                    f"and {buffer.dtype} {list(buffer.shape)} here"
                )
            with torch.no_grad():
                buffer.copy_(saved)


def _load_parameters(file: Path, names: list[str], optimizer: StreamingOptimizer) -> None:
    with open_tensors(file) as tensors:
        kinds: dict[str, list[str]] = {}
        keys = tensors.keys()
        for key in keys:
            kind, _, name = key.partition("/")
            kinds.setdefault(name, []).append(kind)
        for name in names:
            state = {kind: tensors.get_tensor(f"{kind}/{name}") for kind in kinds[name]}
            try:
                optimizer.import_parameter(name, state)
            except ValueError as error:
                raise CheckpointError(f"{file} is of another model: {error}") from error


def _encode(value: Any, what: str) -> Any:
    """``value`` as JSON values that :func:`_decode` turns back exactly: tuples and non-text keys are marked."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_encode(item, what) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [_encode(item, what) for item in value]}
    if isinstance(value, Counter | dict):
        if type(value) is dict and all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: _encode(item, what) for key, item in value.items()}
        kind = "__counter__" if isinstance(value, Counter) else "__dict__"
        return {kind: [[_encode(key, what), _encode(item, what)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():  # a learning rate may be one
        return {"__scalar__": [value.item(), str(value.dtype).removeprefix("torch.")]}
    raise ValueError(f"{what} holds a {type(value).__name__}; a checkpoint keeps numbers, text, lists, dicts")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if isinstance(value, dict):
        if "__tuple__" in value:
            return tuple(_decode(item) for item in value["__tuple__"])
        if "__scalar__" in value:
            number, dtype = value["__scalar__"]
            return torch.tensor(number, dtype=getattr(torch, dtype))
        for kind, make in (("__counter__", Counter), ("__dict__", dict)):
            if kind in value:
                return make({_decode(key): _decode(item) for key, item in value[kind]})
        return {key: _decode(item) for key, item in value.items()}
    return value
