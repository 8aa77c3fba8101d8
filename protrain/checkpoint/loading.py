"""Loads what ``protrain.checkpoint.saving`` has saved, checked before anything is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from protrain.checkpoint.manifest import (
    check_files,
    decode,
    find_save,
    list_saves,
    read_manifest,
    set_random_state,
    verify_bytes,
)
from protrain.checkpoint.parameter_files import (
    BUFFERS,
    base_weights,
    check_parameters,
    compare_names,
    local_parts,
    match_saved,
)
from protrain.checkpoint.saving import (
    check_wrapped,
    class_of,
    own_saves,
    wait_for_async_saves,
    with_extra_state,
)
from protrain.checkpoint.tensor_files import open_tensors
from protrain.common.errors import CheckpointError, warn_user
from protrain.distributed.agreement import raised_on_all
from protrain.optim.optimizer import ProTrainOptimizer


def load_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    scheduler: LRScheduler | None = None,
    base: str | None = None,
) -> Any:
    """Load the newest save in ``folder``, or ``folder`` itself if it is a save. Returns the ``extra`` of the save.

    The states of ``model``, ``optimizer`` and ``scheduler`` and the random states of torch, CUDA, Python and numpy
    become those of the save. Before anything is changed, every file is checked against its recorded size and CRC-32,
    and its contents against ``model``, ``optimizer`` and ``scheduler``. If the model was wrapped without an example
    batch and was not called yet, the states of its parameters are read in its first call. So ``folder`` must stay, and
    until then parameters and states can be neither read nor written.

    A save that was made with a ``base`` needs the same one, and a ``model`` that has those weights.

    With several ranks all of them must call it. The number of ranks may be another than that of the save. Then rank r
    takes the random states that rank r had, and one that the save does not have keeps its own, with a warning.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, or not that of ``model``.
        CheckpointError: There is no save, a file of it is missing or damaged, or it is of another model,
            optimizer or scheduler.
        MisuseError: Not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    check_wrapped(model, optimizer)
    ranks, root = optimizer.ranks, Path(folder).absolute()  # the first call may read it from another working folder
    ranks.meet("load_checkpoint()")
    wait_for_async_saves(optimizer, root)
    name, manifest = Path(), dict[str, Any]()
    with raised_on_all(ranks):
        if ranks.rank == 0:
            save = find_save(root)
            name, manifest = save.relative_to(root), read_manifest(save)
    name, manifest = ranks.of_first((name, manifest))
    save = root / name
    files, modules = manifest["files"], with_extra_state(model)
    with raised_on_all(ranks):
        check_model(save, manifest, model, optimizer.parameter_names(), base)
        verify_bytes(save, dict(list(files.items())[ranks.rank :: ranks.size]))  # a share of the files each
        scheduler_state, extra = decode(manifest["scheduler"]), decode(manifest["extra"])
        _check_scheduler(save, manifest["scheduler_class"], scheduler)
        buffers = match_saved(save, model, base_weights(model, manifest["base"]))
        scalars = decode(manifest["scalars"])
        try:
            optimizer.groups.check_state(scalars)
        except ValueError as error:
            raise CheckpointError(f"{save} is of another optimizer: {error}") from None
        check_parameters(save, files, optimizer)

    def load_own() -> None:
        with raised_on_all(ranks):
            optimizer.import_parts(local_parts(save, files, optimizer))

    optimizer.on_attach(load_own, loads=model)  # first, because inside full_parameters() this raises
    with torch.no_grad():
        for target, saved in buffers:
            target.copy_(saved)
    optimizer.load_scalar_state(scalars)
    if scheduler is not None:
        scheduler.load_state_dict(scheduler_state)
    with open_tensors(save / BUFFERS) as tensors:
        for path, module in modules.items():
            module.set_extra_state(decode(manifest["modules"][path], tensors.get_tensor))
    if ranks.rank < len(manifest["random"]):
        set_random_state(decode(manifest["random"][ranks.rank]))
    else:
        warn_user(
            f"{save} was made by {len(manifest['random'])} processes, so it has no random states of rank {ranks.rank}, "
            "which keeps its own"
        )
    own_saves(optimizer).extend(each for each in list_saves(save.parent) if each.name <= save.name)
    return extra


def check_model(save: Path, manifest: dict[str, Any], model: nn.Module, names: list[str], base: str | None) -> None:
    """Raise a CheckpointError unless ``save`` has the files of ``manifest``, and the parameters ``names`` of ``model``.

    No file is read, however large the save is.
    """
    check_files(save, manifest)
    saved_base = manifest["base"]
    if saved_base not in (None, base):
        raise CheckpointError(
            f"{save} holds an adapter and not the weights of {saved_base!r}, and base={base!r} was given: give the "
            f"model that the adapter was trained for, and base={saved_base!r}"
        )
    left_out = base_weights(model, saved_base)
    saved_names = {name for entry in manifest["files"].values() for name in entry["parameters"]}
    compare_names(save, "parameter", saved_names, set(names) - left_out)
    compare_names(save, "extra state of module", set(manifest["modules"]), set(with_extra_state(model)))


def _check_scheduler(save: Path, saved_class: str | None, scheduler: LRScheduler | None) -> None:
    """Raise a CheckpointError unless the save has the state of a scheduler like ``scheduler``, or of none as here.

    A scheduler itself would load the state of any other scheduler without an error.
    """
    present_class = None if scheduler is None else class_of(scheduler)
    if saved_class != present_class:
        raise CheckpointError(
            f"{save} holds the state of {saved_class or 'no scheduler'}, and {present_class or 'none'} was given; pass "
            "the scheduler it was saved with"
        )
