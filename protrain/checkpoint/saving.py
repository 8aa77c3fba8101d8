"""Checkpoints of a run: atomic saves for exact resumption, in safetensors and JSON, without pickle.

``folder`` holds numbered saves, the newest last::

    folder/00007-step-3500/
        checkpoint.json            manifest: format, files with size and CRC-32, step, scalars, scheduler, random states
        buffers.safetensors        model.named_buffers(), parameters that are not managed, and tensors of
                                   get_extra_state(), whose rest is in the manifest
        state-00001.safetensors    "master/NAME", "exp_avg/NAME", ...: about 1 GiB each; several ranks each write files
                                   of their own, state-RANK-00001.safetensors, ...

A save is written to a hidden folder, flushed to the disk and then renamed. So a process that is killed at any moment
leaves the earlier saves untouched and at most one hidden folder, which the next save removes. States are read and
written in pieces, so a rank needs some MiB for it, however large the parameters are. State is kept in fp32, by
parameter name and element, so it loads under any plan and on any number of ranks.

With several ranks, each writes and reads what it has of every parameter (``protrain.checkpoint.parameter_files``).
The first rank does all else alone: it makes the hidden folder, and when all ranks have said that their files are on the
disk, it writes the manifest and renames the folder.

[Note: saves beside the training] ``async_save`` takes all that can change at once, and a thread of each rank writes it.
The threads must not issue collectives, so they exchange values by ``protrain.distributed.agreement.StoreExchange``.
The next save to that folder, or a load, waits for them first, because it would take their hidden folder for one that
was left behind.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from protrain.checkpoint.manifest import MANIFEST, encode, list_saves, random_state, write_manifest
from protrain.checkpoint.parameter_files import BUFFERS, base_weights, unmanaged_tensors, write_parameters
from protrain.checkpoint.tensor_files import delete, put_in_place, used_alone, write_tensors
from protrain.common.errors import BudgetError, user_line
from protrain.common.tables import format_bytes
from protrain.distributed.agreement import StoreExchange, raised_on_all
from protrain.distributed.ranks import Ranks
from protrain.engine.states.parameter_state import Part
from protrain.engine.weights.parameter import PresentParameter
from protrain.optim.optimizer import ProTrainOptimizer

_SCRATCH = ".save.tmp"  # the hidden folder in which a save is written, and then one that is deleted

# What the manifest says, and tensors that are of no parameter.
Contents = tuple[dict[str, Any], dict[str, torch.Tensor]]

_of_run: WeakKeyDictionary[ProTrainOptimizer, list[Path]] = WeakKeyDictionary()

# The last async_save of each, and the folder that it saves to.
_beside: WeakKeyDictionary[ProTrainOptimizer, tuple[str, Future[Path]]] = WeakKeyDictionary()


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    scheduler: LRScheduler | None = None,
    extra: Any = None,
    keep: int = 2,
    base: str | None = None,
) -> Path:
    """Save the training state atomically as a new numbered save in ``folder``. Returns the path of the save.

    With several ranks all of them must call it. Buffers, scheduler, extra state and ``extra`` are those of the first
    rank; random states are kept of every rank.

    Parameters:
        folder: It is made if missing. Saves of one run belong in one folder, which all ranks must see.
        model: The wrapped model; gives its buffers, and the extra state of modules that have one.
        optimizer: The wrapped optimizer; gives weights, masters and moments.
        scheduler: A learning rate scheduler whose state is plain numbers, lists and dictionaries.
        extra: Anything JSON can hold; ``load_checkpoint`` returns it.
        keep: How many saves of this run stay, this one included. Older ones are deleted once it is complete. Those of
            the run are what ``optimizer`` has saved, what it has loaded, and what was in that folder before. No others
            are deleted.
        base: A name for the weights that an adapter was added to, such as that of the model on the Hub. They are then
            left out of the save, and a load needs a model that has them, and the same name.

    Raises:
        ValueError: ``optimizer`` is not the wrapped one, ``folder`` is itself a save, ``keep`` is no whole number from
            1 on, or ``scheduler``, ``extra`` or a module's extra state holds what JSON cannot. Tensors in extra state
            are allowed.
        OSError: The disk is full or not writable, or another process is saving to ``folder``. Earlier saves are
            intact, and no part of this one is left.
        MisuseError: Not all ranks have called it.

    An error on one rank is raised on all of them.
    """
    check_wrapped(model, optimizer)
    ranks, root = optimizer.ranks, Path(folder).absolute()
    ranks.meet("save_checkpoint()")
    wait_for_async_saves(optimizer, root)
    contents = _contents(model, optimizer, scheduler, extra, keep, base)
    parts = optimizer.export_parts(_saved_names(model, optimizer, base))
    return write_save(root, contents, parts, ranks, own_saves(optimizer), keep)


def async_save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    *,
    scheduler: LRScheduler | None = None,
    extra: Any = None,
    keep: int = 2,
    base: str | None = None,
) -> Future[Path]:
    """Do what ``save_checkpoint`` does, and train on while a thread writes a copy of the state.

    The copy takes 12 bytes of host memory for each parameter that is trained, of which each rank has its share, until
    it is written. The first rank also copies buffers and quantised weights.

    Returns:
        The path of the save, when that is complete: ``result()`` waits for it, and raises the OSError of a full disk.
        Such an error is also given as a warning, as is that of a folder in which nothing can be saved. A process that
        ends waits for its save, unless it is killed.

    Raises:
        BudgetError: the plan leaves too little of the host memory for the copy. It says how much that is.
        DistError: of torch.distributed, if the process has ended that has the store of the process group.
        ValueError, MisuseError: as ``save_checkpoint`` does.
    """
    check_wrapped(model, optimizer)
    ranks, root = optimizer.ranks, Path(folder).absolute()  # whatever folder the process works in by then
    ranks.meet("async_save()")
    wait_for_async_saves(optimizer, root)
    name = ranks.of_first(f"async_save {uuid4()}")
    manifest, tensors = _contents(model, optimizer, scheduler, extra, keep, base)
    with raised_on_all(ranks):
        aside = StoreExchange(ranks, name)
        in_place = list(optimizer.export_parts(_saved_names(model, optimizer, base)))
        states = [tensor for _, part in in_place for tensor in part.tensors.values()]
        needed_bytes = sum(tensor.nbytes for tensor in (*states, *tensors.values()))
        free_bytes = optimizer.hardware.host_bytes - optimizer.plan.host_bytes
        if needed_bytes > free_bytes:
            raise BudgetError(
                f"async_save needs {format_bytes(needed_bytes)} of host memory for a copy of the state, and the plan "
                f"leaves {format_bytes(max(0, free_bytes))}: use save_checkpoint, which needs no copy, "
                "or give protrain.wrap a larger host_memory"
            )
        contents = manifest, {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        parts = [(name, replace(part, tensors=part.copies())) for name, part in in_place]
    given_up = (parts.pop() for _ in range(len(parts)))  # whose memory is free as soon as they are written
    thread = ThreadPoolExecutor(1, "protrain async_save")
    write = partial(write_save, root, contents, given_up, aside, own_saves(optimizer), keep)
    saved = thread.submit(_warning_of_errors, write, user_line())
    thread.shutdown(wait=False)
    _beside[optimizer] = os.path.realpath(root), saved
    return saved


def wait_for_async_saves(optimizer: ProTrainOptimizer, folder: Path) -> None:
    """Wait until each ``async_save`` of ``optimizer``, or of another one to ``folder``, has written or failed."""
    for other, (root, saved) in list(_beside.items()):
        if other is optimizer or root == os.path.realpath(folder):  # which takes a link to itself, too
            wait([saved])
            del _beside[other]


def own_saves(optimizer: ProTrainOptimizer) -> list[Path]:
    """The saves of the run of ``optimizer``: those that it has made, the one that it has loaded, and those before."""
    return _of_run.setdefault(optimizer, [])


def _saved_names(model: nn.Module, optimizer: ProTrainOptimizer, base: str | None) -> list[str]:
    """The names of the parameters that a save holds: all but those of ``base``."""
    left_out = base_weights(model, base)
    return [name for name in optimizer.parameter_names() if name not in left_out]


def write_save(
    root: Path,
    contents: Contents,
    parts: Iterable[tuple[str, Part]],
    ranks: Ranks | StoreExchange,
    of_run: list[Path],
    keep: int,
) -> Path:
    """Write a save to ``root``, of which each rank has ``parts`` of parameters, and the first one all other contents.

    It is complete when all ranks have written. Then it is one of the saves ``of_run``, and ``keep`` of these stay.

    Raises:
        ValueError, OSError: as ``save_checkpoint`` does.
    """
    manifest, tensors = contents
    scratch, target, first = root / _SCRATCH, root, ranks.rank == 0
    with ExitStack() as unfinished:
        with raised_on_all(ranks):
            if first:
                _begin(root, unfinished)
                written = write_tensors(scratch / BUFFERS, tensors)
                manifest["files"] = {BUFFERS: {**written, "parameters": {}}}
        with raised_on_all(ranks):
            own = write_parameters(scratch, parts, ranks)
        of_ranks = ranks.all_values(own)
        with raised_on_all(ranks):
            if first:
                for files, _ in of_ranks:
                    manifest["files"] |= files
                unseen = [name for name in manifest["files"] if not (scratch / name).exists()]
                if unseen:
                    raise OSError(f"rank 0 does not see {unseen[0]} in {root}: give a folder that all ranks see")
                manifest["step"] = max(step for _, step in of_ranks)
                write_manifest(scratch, manifest)
                target = root / f"{_next_number(root):05d}-step-{manifest['step']}"
                put_in_place(scratch, target)
                of_run.append(target)
                for old in [each for each in list_saves(root) if each in of_run][:-keep]:
                    os.rename(old, scratch)  # because a half-deleted save must never look like a save
                    delete(scratch)
    return ranks.all_values(target)[0]


def _warning_of_errors(write: Callable[[], Path], warn: Callable[[str], None]) -> Path:
    """Do ``write`` in a thread whose result the script may never ask for. So ``warn`` of an error, too."""
    try:
        return write()
    except Exception as error:
        with suppress(UserWarning):  # a script may turn warnings into errors, and the result is this error
            warn(f"an async_save has failed: {type(error).__name__}: {error}")
        raise


def _contents(
    model: nn.Module,
    optimizer: ProTrainOptimizer,
    scheduler: LRScheduler | None,
    extra: Any,
    keep: int,
    base: str | None,
) -> Contents:
    """What the first rank writes besides parameters. The other ranks have nothing."""
    ranks = optimizer.ranks
    randoms = ranks.all_values(encode(random_state(), "the random states"))
    tensors: dict[str, torch.Tensor] = {}
    with raised_on_all(ranks):
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep must be at least 1, and a whole number, not {keep!r}")
        if ranks.rank > 0:
            return {}, tensors
        dtypes = {model.get_parameter(name).dtype for name in optimizer.parameter_names()}
        manifest = {
            "dtype": str(dtypes.pop()).removeprefix("torch."),  # of weights, all of which have one
            "scalars": encode(optimizer.scalar_state(), "the optimizer's scalar state"),
            "scheduler": None if scheduler is None else encode(scheduler.state_dict(), "the scheduler's state"),
            "scheduler_class": None if scheduler is None else class_of(scheduler),
            "extra": encode(extra, "extra"),
            "modules": {
                name: encode(module.get_extra_state(), f"the extra state of module {name!r}", tensors)
                for name, module in with_extra_state(model).items()
            },
            "random": randoms,  # of each rank
            "base": base,
        }
        return manifest, tensors | unmanaged_tensors(model, base_weights(model, base))


def _begin(root: Path, unfinished: ExitStack) -> None:
    """Make the hidden folder of a save in ``root``, without what a killed save has left in it.

    Until ``unfinished`` is closed, which removes the folder if it is still hidden, no other process can do so there.

    Raises:
        ValueError: ``root`` is itself a save, so a load from it would not look for others in it.
        OSError: another process is saving there, or it is no folder.
    """
    if (root / MANIFEST).exists():
        raise ValueError(f"{root} is itself a save: give the folder that it is in, {root.absolute().parent}")
    Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)  # a link may lead to a folder to be made
    unfinished.enter_context(used_alone(root, "give each run a folder of its own"))
    scratch = root / _SCRATCH
    if os.path.lexists(scratch):
        delete(scratch)
    unfinished.callback(shutil.rmtree, scratch, ignore_errors=True)
    scratch.mkdir()


def _next_number(root: Path) -> int:
    saves = list_saves(root)
    return int(saves[-1].name.partition("-")[0]) + 1 if saves else 1


def check_wrapped(model: nn.Module, optimizer: Any) -> None:
    """Raise a ValueError unless ``optimizer`` is the one that protrain.wrap returned with ``model``."""
    if not hasattr(optimizer, "trains") or not optimizer.trains(model):
        raise ValueError("model and optimizer must be the two that protrain.wrap returned together")


def has_plan(model: nn.Module) -> bool:
    """Whether weights of ``model`` lie in chunks. Before there is a plan, each rank has all of them."""
    return any(isinstance(parameter, PresentParameter) for parameter in model.parameters())


def with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of ``model`` that have extra state, as ``state_dict`` finds them."""
    none = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not none}


def class_of(scheduler: Any) -> str:
    """The class name of ``scheduler`` with those of its parts: ``SequentialLR(LinearLR, CosineAnnealingLR)``."""
    name, parts = type(scheduler).__name__, getattr(scheduler, "_schedulers", None)
    return f"{name}({', '.join(map(class_of, parts))})" if isinstance(parts, list | tuple) else name
