"""Checkpoints of a run: atomic saves and exact resumption, in safetensors and JSON, without pickle.

``folder`` holds numbered saves, the newest last::

    folder/00007-step-3500/
        checkpoint.json            manifest: format, files with size and CRC-32, step, scalars, scheduler, random states
        buffers.safetensors        model.named_buffers(), and parameters that are not managed
        modules.safetensors        tensors of get_extra_state(), whose rest is in the manifest; only if there are any
        state-00001.safetensors    "master/NAME", "exp_avg/NAME", ...: about 1 GiB each; several ranks each write files
                                   of their own, state-RANK-00001.safetensors, ...

A save is written to a hidden folder, flushed to the disk and then renamed. So a process that is killed at any moment
leaves the earlier saves untouched and at most one hidden folder, which the next save removes. Parameters are streamed
one at a time, so memory stays bounded by one file. State is kept in fp32, by parameter name and element, so it loads
under any plan and on any number of ranks.

With several ranks, each writes and reads what it has of every parameter (:mod:`protrain.checkpoint.parameter_files`).
The first rank does all else alone: it makes the hidden folder, and when all ranks have said that their files are on the
disk, it writes the manifest and renames the folder.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from protrain.checkpoint.json_values import decode, encode
from protrain.checkpoint.manifest import check_files, find_save, list_saves, read_manifest, verify_bytes, write_manifest
from protrain.checkpoint.parameter_files import check_parameters, load_parameters, write_parameters
from protrain.checkpoint.random_state import check_random_state, random_state, set_random_state
from protrain.checkpoint.tensor_files import open_tensors, sync_directory, write_tensors
from protrain.checkpoint.unmanaged_tensors import BUFFERS, compare_names, match_saved, unmanaged_tensors
from protrain.common.errors import CheckpointError
from protrain.common.parameters import is_managed
from protrain.distributed.agreement import raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.optim.optimizer import ProTrainOptimizer

MODULES = "modules.safetensors"
_OTHER_RANDOMS = "random_of_other_ranks"  # the random states of rank 1 and those after it
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

    With several ranks all of them must call it. Buffers, scheduler, extra state and ``extra`` are those of the first
    rank; random states are kept of every rank.

    Parameters:
        folder: It is made if missing. Saves of one run belong in one folder, which all ranks must see.
        model: The wrapped model; gives its buffers, and the extra state of modules that have one.
        optimizer: The wrapped optimizer; gives weights, masters and moments, one parameter at a time.
        scheduler: A learning rate scheduler whose state is plain numbers, lists and dictionaries.
        extra: Anything JSON can hold; :func:`load_checkpoint` returns it.
        keep: How many saves stay, this one included. Older ones are deleted once it is complete.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, ``keep`` is below 1, or ``scheduler``, ``extra`` or a module's
            extra state holds what JSON cannot. Tensors in extra state are allowed.
        OSError: The disk is full or not writable. Earlier saves are intact, and no part of this one is left.
        MisuseError: Not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    _check_wrapped(model, optimizer)
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    ranks = optimizer.ranks
    ranks.meet("save_checkpoint()")
    first, root = ranks.rank == 0, Path(folder)
    tensors: dict[str, torch.Tensor] = {}
    manifest: dict[str, Any] = {}
    saves: list[Path] = []
    serial = 0
    with raised_on_all(ranks):
        if first:
            manifest = _manifest(model, optimizer, scheduler, extra, tensors)  # an error in it leaves no trace
            root.mkdir(parents=True, exist_ok=True)
            saves, serial = _begin_save(root)
    serial = ranks.of_first(serial)
    scratch, name = root / f".{serial:05d}.tmp", ""
    try:
        with raised_on_all(ranks):
            if not first and not scratch.is_dir():
                raise OSError(f"{scratch}, which rank 0 has made, is not there on rank {ranks.rank}: all must see it")
            files, step = write_parameters(scratch, optimizer)
            if first:
                files = {**_write_others(scratch, model, tensors), **files}
        written = ranks.all_values((files, step, random_state()))
        with raised_on_all(ranks):
            if first:
                manifest |= _merged(written)
                name = f"{serial:05d}-step-{manifest['step']}"
                _publish(scratch, root / name, manifest)
    except BaseException:  # a full disk gets the space back, and Ctrl-C leaves nothing half done
        if first:
            shutil.rmtree(scratch, ignore_errors=True)
        raise
    with raised_on_all(ranks):
        if first:
            _delete_all_but([*saves, root / name], keep)
    return root / ranks.of_first(name)


def _manifest(
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    scheduler: LRScheduler | None,
    extra: Any,
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """What a manifest says of the state that is the same on all ranks. Tensors of extra state go to ``tensors``."""
    return {
        "scalars": encode(optimizer.scalar_state(), "the optimizer's scalar state"),
        "scheduler": None if scheduler is None else encode(scheduler.state_dict(), "the scheduler's state"),
        "scheduler_class": None if scheduler is None else _class_of(scheduler),
        "extra": encode(extra, "extra"),
        "modules": {
            name: encode(module.get_extra_state(), f"the extra state of module {name!r}", tensors)
            for name, module in _with_extra_state(model).items()
        },
    }


def _begin_save(root: Path) -> tuple[list[Path], int]:
    """Remove what killed saves have left, and make the hidden folder of a new one.

    Returns:
        The saves in ``root``, and the number of the new one.
    """
    for leftover in root.glob(".*.tmp"):
        if _SCRATCH.fullmatch(leftover.name) and leftover.is_dir():
            shutil.rmtree(leftover)
    saves = list_saves(root)
    serial = int(saves[-1].name.partition("-")[0]) + 1 if saves else 1
    (root / f".{serial:05d}.tmp").mkdir()
    return saves, serial


def _write_others(scratch: Path, model: nn.Module, extra: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Write buffers and ``extra``. Returns the entries of the files in the manifest."""
    files: dict[str, dict[str, Any]] = {}
    for name, tensors in {BUFFERS: unmanaged_tensors(model), **({MODULES: extra} if extra else {})}.items():
        size, crc32 = write_tensors(scratch / name, tensors)
        files[name] = {"bytes": size, "crc32": crc32, "parameters": []}
    return files


def _merged(written: list[tuple[dict[str, dict[str, Any]], int, dict[str, Any]]]) -> dict[str, Any]:
    """What a manifest says of the files, largest step and random states of all ranks."""
    randoms = [random for _, _, random in written]
    return {
        "random": randoms[0],
        **({_OTHER_RANDOMS: randoms[1:]} if len(written) > 1 else {}),
        "step": max(step for _, step, _ in written),
        "files": {name: entry for files, _, _ in written for name, entry in files.items()},
    }


def _publish(scratch: Path, target: Path, manifest: dict[str, Any]) -> None:
    """Make a save of ``scratch``, all of whose other files are on the disk. After an error there is none."""
    write_manifest(scratch, manifest)
    sync_directory(scratch)
    try:
        os.rename(scratch, target)
        sync_directory(target.parent)
    except BaseException:
        with suppress(OSError):
            os.rename(target, scratch)
        raise


def _delete_all_but(saves: list[Path], keep: int) -> None:
    for old in saves[:-keep]:
        # It is renamed first, because a half-deleted save must never look like a save.
        doomed = old.with_name(f".{old.name}.tmp")
        os.rename(old, doomed)
        shutil.rmtree(doomed)


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

    With several ranks all of them must call it. The number of ranks may be another than that of the save. Then rank r
    takes the random states that rank r had, and one that the save does not have keeps its own, with a warning.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, or not that of ``model``.
        CheckpointError: There is no save, a file of it is missing or damaged, or it is of another model,
            optimizer or scheduler.
        MisuseError: Not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    _check_wrapped(model, optimizer)
    ranks, root = optimizer.ranks, Path(folder)
    ranks.meet("load_checkpoint()")
    name, manifest = Path(), dict[str, Any]()
    with raised_on_all(ranks):
        if ranks.rank == 0:
            save = find_save(root)
            name, manifest = save.relative_to(root), read_manifest(save)
    name, manifest = ranks.of_first((name, manifest))
    save = root / name
    files, modules = manifest["files"], _with_extra_state(model)
    with raised_on_all(ranks):
        _check(save, manifest, model, optimizer.parameter_names())
        verify_bytes(save, dict(list(files.items())[ranks.rank :: ranks.size]))  # a share of the files each
        scheduler_state, extra = decode(manifest["scheduler"]), decode(manifest["extra"])
        _check_scheduler(save, manifest.get("scheduler_class"), scheduler_state, scheduler)
        buffers = match_saved(save, model)
        scalars = decode(manifest["scalars"])
        try:
            optimizer.check_scalar_state(scalars)
        except ValueError as error:
            raise CheckpointError(f"{save} is of another optimizer: {error}") from None
        check_parameters(save, files, optimizer)
        random = _random_of(ranks, save, manifest)

    def load_own() -> None:
        with raised_on_all(ranks):
            load_parameters(save, files, optimizer)

    optimizer.when_begun(load_own)  # first, because inside full_parameters() this raises
    with torch.no_grad():
        for target, saved in buffers:
            target.copy_(saved)
    optimizer.load_scalar_state(scalars)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    _load_extra_state(save, modules, manifest.get("modules", {}), has_tensors=MODULES in files)
    if random is not None:
        set_random_state(random)
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
    save = find_save(Path(folder))
    manifest = read_manifest(save)
    _check(save, manifest, model, managed)
    return decode(manifest["extra"])


def _check(save: Path, manifest: dict[str, Any], model: nn.Module, names: list[str]) -> None:
    """Raise a CheckpointError unless the files are those of ``manifest``, and of a model with these parameters."""
    check_files(save, manifest)
    saved_names = {name for entry in manifest["files"].values() for name in entry["parameters"]}
    compare_names(save, "parameter", saved_names, set(names))
    compare_names(save, "extra state of module", set(manifest.get("modules", {})), set(_with_extra_state(model)))


def _random_of(ranks: Ranks, save: Path, manifest: dict[str, Any]) -> dict[str, Any] | None:
    """The random states that the save has of this rank, checked. None, and a warning, if it has none."""
    states = [manifest["random"], *manifest.get(_OTHER_RANDOMS, [])]
    if ranks.rank >= len(states):
        warnings.warn(
            f"{save} was made by {len(states)} processes, so it has no random states of rank {ranks.rank}, which keeps "
            "its own",
            stacklevel=3,
        )
        return None
    state: dict[str, Any] = states[ranks.rank]
    try:
        check_random_state(state)
    except ValueError as error:
        remedy = "load another save, or this one with the versions of torch and numpy that wrote it"
        raise CheckpointError(f"{save} holds {error}; {remedy}") from None
    return state


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
