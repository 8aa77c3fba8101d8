"""Checkpoints of a run: atomic saves and exact resumption, in safetensors and JSON, without pickle.

``folder`` holds numbered saves, the newest last::

    folder/00007-step-3500/
        checkpoint.json            manifest: format, files with size and CRC-32, step, scalars, scheduler, random states
        buffers.safetensors        model.named_buffers(), and parameters that are not managed
        modules.safetensors        tensors of get_extra_state(), whose rest is in the manifest; only if there are any
        state-00001.safetensors    "master/NAME", "exp_avg/NAME", ...: about 1 GiB each; a parameter is never split

A save is written to a hidden folder, flushed to the disk and then renamed. So a process that is killed at any moment
leaves the earlier saves untouched and at most one hidden folder, which the next save removes. Parameters are streamed
one at a time, so memory stays bounded by one file. State is kept whole, in fp32 and by parameter name, so it loads
under any plan.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from protrain.checkpoint.json_values import decode, encode
from protrain.checkpoint.manifest import check_files, find_save, list_saves, read_manifest, verify_bytes, write_manifest
from protrain.checkpoint.random_state import check_random_state, random_state, set_random_state
from protrain.checkpoint.tensor_files import TensorWriter, open_tensors, sync_directory, write_tensors
from protrain.checkpoint.unmanaged_tensors import BUFFERS, compare_names, match_saved, unmanaged_tensors
from protrain.common.errors import CheckpointError
from protrain.common.parameters import is_managed
from protrain.optim.optimizer import ProTrainOptimizer

MODULES = "modules.safetensors"
_SCRATCH = re.compile(r"\.\d{5,}(-step-\d+)?\.tmp")  # an unfinished save, or one that is being deleted


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    scheduler: LRScheduler | None = None,
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Save the training state atomically as a new numbered save in ``folder``. Returns the path of the save.

    Parameters:
        folder: It is made if missing. Saves of one run belong in one folder.
        model: The wrapped model; gives its buffers, and the extra state of modules that have one.
        optimizer: The wrapped optimizer; gives weights, masters and moments, one parameter at a time.
        scheduler: A learning rate scheduler whose state is plain numbers, lists and dictionaries.
        extra: Anything JSON can hold; :func:`load_checkpoint` returns it.
        keep: How many saves stay, this one included. Older ones are deleted once it is complete.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, ``keep`` is below 1, or ``scheduler``, ``extra`` or a module's
            extra state holds what JSON cannot. Tensors in extra state are allowed.
        OSError: The disk is full or not writable. Earlier saves are intact, and no part of this one is left.
    """
    _check_wrapped(model, optimizer)
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    tensors: dict[str, torch.Tensor] = {}
    manifest: dict[str, Any] = {  # built first, so that an error in it leaves no trace on the disk
        "scalars": encode(optimizer.scalar_state(), "the optimizer's scalar state"),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict(), "the scheduler's state"),
        "scheduler_class": None if scheduler is None else _class_of(scheduler),
        "extra": encode(extra, "extra"),
        "modules": {
            name: encode(module.get_extra_state(), f"the extra state of module {name!r}", tensors)
            for name, module in _with_extra_state(model).items()
        },
        "random": random_state(),
    }
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".*.tmp"):
        if _SCRATCH.fullmatch(leftover.name) and leftover.is_dir():
            shutil.rmtree(leftover)
    saves = list_saves(root)
    serial = int(saves[-1].name.partition("-")[0]) + 1 if saves else 1
    scratch = root / f".{serial:05d}.tmp"
    scratch.mkdir()
    target = scratch
    try:
        files, step = _write_tensors(scratch, model, optimizer, tensors)
        write_manifest(scratch, {**manifest, "step": step, "files": files})
        sync_directory(scratch)
        target = root / f"{serial:05d}-step-{step}"
        os.rename(scratch, target)
        sync_directory(root)
    except BaseException:  # a full disk gets the space back, and Ctrl-C leaves nothing half done
        with suppress(OSError):
            os.rename(target, scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        raise

    for old in [*saves, target][:-keep]:
        # It is renamed first, because a half-deleted save must never look like a save.
        doomed = old.with_name(f".{old.name}.tmp")
        os.rename(old, doomed)
        shutil.rmtree(doomed)
    return target


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    scheduler: LRScheduler | None = None,
) -> Any:
    """Load the newest save in ``folder``, or ``folder`` itself if it is a save. Returns the ``extra`` of the save.

    The states of ``model``, ``optimizer`` and ``scheduler`` and the random states of torch, CUDA, Python and numpy
    become those of the save. Before anything is changed, every file is checked against its recorded size and CRC-32,
    and its contents against ``model``, ``optimizer`` and ``scheduler``. If the model was wrapped without an example
    batch and was not called yet, the states of its parameters are read in its first call, so ``folder`` must stay.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, or not that of ``model``.
        CheckpointError: There is no save, a file of it is missing or damaged, or it is of another model,
            optimizer or scheduler.
    """
    _check_wrapped(model, optimizer)
    save, manifest = _checked(Path(folder), model, optimizer.parameter_names())
    verify_bytes(save, manifest)
    scheduler_state, extra = decode(manifest["scheduler"]), decode(manifest["extra"])
    _check_scheduler(save, manifest.get("scheduler_class"), scheduler_state, scheduler)

    modules, states = _with_extra_state(model), manifest.get("modules", {})
    buffers = match_saved(save, model)
    with_parameters = {save / file: entry["parameters"] for file, entry in manifest["files"].items()}
    scalars = decode(manifest["scalars"])
    try:
        optimizer.check_scalar_state(scalars)
    except ValueError as error:
        raise CheckpointError(f"{save} is of another optimizer: {error}") from None
    for file, parameters in with_parameters.items():
        _check_parameters(file, parameters, optimizer)
    try:
        check_random_state(manifest["random"])
    except ValueError as error:
        remedy = "load another save, or this one with the versions of torch and numpy that wrote it"
        raise CheckpointError(f"{save} holds {error}; {remedy}") from None

    def load_parameters() -> None:
        for file, parameters in with_parameters.items():
            _load_parameters(file, parameters, optimizer)

    optimizer.when_begun(load_parameters)  # first, because inside full_parameters() this raises
    with torch.no_grad():
        for target, saved in buffers:
            target.copy_(saved)
    optimizer.load_scalar_state(scalars)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    _load_extra_state(save, modules, states, has_tensors=MODULES in manifest["files"])
    set_random_state(manifest["random"])
    return extra


def check_checkpoint(folder: str | os.PathLike[str], model: nn.Module) -> Any:
    """Raise early what :func:`load_checkpoint` would refuse, as far as that takes no time.

    Returns the save's ``extra``.

    It is called before ``model`` is wrapped, which may take minutes. It looks at existence, sizes and headers of the
    files.

    Raises:
        CheckpointError: There is no save, a file of it is missing or damaged, or it is of another model.
    """
    managed = [name for name, parameter in model.named_parameters() if is_managed(parameter)]
    return decode(_checked(Path(folder), model, managed)[1]["extra"])


def _checked(folder: Path, model: nn.Module, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """The save that ``folder`` means and its manifest, checked against its files and a model with these parameters."""
    save = find_save(folder)
    manifest = read_manifest(save)
    check_files(save, manifest)
    saved_names = {name for entry in manifest["files"].values() for name in entry["parameters"]}
    compare_names(save, "parameter", saved_names, set(names))
    compare_names(save, "extra state of module", set(manifest.get("modules", {})), set(_with_extra_state(model)))
    return save, manifest


def _check_wrapped(model: nn.Module, optimizer: Any) -> None:
    if not hasattr(optimizer, "scalar_state"):
        raise ValueError(
            f"optimizer must be the one that protrain.wrap returned, not a plain {type(optimizer).__name__}"
        )
    if not optimizer.trains(model):
        raise ValueError("optimizer is of another model: pass the two that protrain.wrap returned together")


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that have extra state, as ``state_dict`` finds them."""
    none = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not none}


def _write_tensors(
    scratch: Path, model: nn.Module, optimizer: ProTrainOptimizer, extra: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write buffers, ``extra`` and parameters.

    Returns:
        The files of the manifest, and the largest step of any parameter.
    """
    buffers = unmanaged_tensors(model)
    files: dict[str, dict[str, Any]] = {}
    for file_name, tensors in {BUFFERS: buffers, **({MODULES: extra} if extra else {})}.items():
        size, crc32 = write_tensors(scratch / file_name, tensors)
        files[file_name] = {"bytes": size, "crc32": crc32, "parameters": []}
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


def _class_of(scheduler: Any) -> str:
    """The class name of ``scheduler`` with those of its parts: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    name, parts = type(scheduler).__name__, getattr(scheduler, "_schedulers", None)
    return f"{name}({', '.join(map(_class_of, parts))})" if isinstance(parts, list | tuple) else name


def _check_scheduler(
    save: Path, saved_class: str | None, state: dict[str, Any] | None, scheduler: LRScheduler | None
) -> None:
    """Raise a CheckpointError unless ``state`` is of a scheduler like ``scheduler``.

    A scheduler itself would load the state of any other scheduler without an error.
    """
    remedy = "pass the scheduler it was saved with"
    if scheduler is None or state is None:
        if scheduler is not state:
            has, needs = ("no ", "one was given") if state is None else ("a ", "none was given")
            raise CheckpointError(f"{save} holds {has}scheduler state and {needs}; {remedy}")
        return
    present_class = _class_of(scheduler)
    if saved_class is not None and saved_class != present_class:
        raise CheckpointError(f"{save} holds the state of a {saved_class}, not of a {present_class}; {remedy}")
    if saved_class is None:  # an old save has no class name; private keys depend on the version of torch
        keys = {key for key in {*state} ^ {*scheduler.state_dict()} if not str(key).startswith("_")}
        if keys:
            key = min(keys, key=str)
            has = "has" if key in state else "lacks"
            raise CheckpointError(
                f"{save} holds the state of another scheduler than a {present_class}: it {has} {key!r}; {remedy}"
            )


def _load_extra_state(save: Path, modules: dict[str, nn.Module], states: dict[str, Any], *, has_tensors: bool) -> None:
    found: dict[str, torch.Tensor] = {}
    if has_tensors:
        with open_tensors(save / MODULES) as tensors:
            found = {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118 - it is no mapping
    for name, module in modules.items():
        module.set_extra_state(decode(states[name], found))


def _check_parameters(file: Path, names: list[str], optimizer: ProTrainOptimizer) -> None:
    if not names:
        return
    with open_tensors(file) as tensors:
        for name, kinds in _kinds(tensors).items():
            try:
                optimizer.check_parameter(name, {kind: _shape_of(tensors, f"{kind}/{name}") for kind in kinds})
            except ValueError as error:
                raise CheckpointError(f"{file} is of another model: {error}") from None


def _load_parameters(file: Path, names: list[str], optimizer: ProTrainOptimizer) -> None:
    if not names:
        return
    with open_tensors(file) as tensors:
        kinds = _kinds(tensors)
        for name in names:
            optimizer.import_parameter(name, {kind: tensors.get_tensor(f"{kind}/{name}") for kind in kinds[name]})


def _kinds(tensors: Any) -> dict[str, list[str]]:
    """The kinds of state that a file holds, by parameter."""
    kinds: dict[str, list[str]] = {}
    for key in tensors.keys():  # noqa: SIM118 - it is no mapping
        kind, _, name = key.partition("/")
        kinds.setdefault(name, []).append(kind)
    return kinds


def _shape_of(tensors: Any, key: str) -> torch.Tensor:
    """A meta tensor with the shape of ``key``."""
    return torch.empty(tensors.get_slice(key).get_shape(), device="meta")
