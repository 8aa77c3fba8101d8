"""Profiles that follow from those of the same model with fewer blocks.

[Note: more blocks] The blocks of most language models differ in nothing but their numbers, so a trace of four of them
has seen all that there is to see. What it recorded of the third is repeated, under the names and at the places that
further blocks have. Each block adds the same to what is alive after it. The result is, number by number, the profile of
a trace of all blocks. If the second and the third block turn out to differ, all of them must be traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from protrain.common.parameters import unmanaged_memory
from protrain.profiler.blocks import find_blocks
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from protrain.profiler.operations import storages_in

TRACED_BLOCKS = 4  # enough for one that has neighbours of its kind on both sides, and another to compare it with
_REPEATED = 2
_Item = TypeVar("_Item")
_Named = TypeVar("_Named", ParameterRecord, BlockRecord)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def keep_few_blocks(model: nn.Module) -> int:
    """Cut ``model`` down to ``TRACED_BLOCKS`` blocks if all of its blocks are alike: see [Note: more blocks].

    Returns:
        The number of blocks that it has lost.
    """
    paths = find_blocks(model)
    found = model.get_submodule(paths[0].rpartition(".")[0]) if paths else None
    if not isinstance(found, nn.ModuleList) or len(found) != len(paths) or len(paths) <= TRACED_BLOCKS:
        return 0
    n_parameters = len(list(found.parameters()))  # fewer if blocks share any
    shares = n_parameters != len(found) * len(list(found[0].parameters()))
    if shares or not all(_alike(found[0], block, number) for number, block in enumerate(found)):
        return 0
    del found[TRACED_BLOCKS:]
    return len(paths) - TRACED_BLOCKS


def _alike(first: nn.Module, block: nn.Module, number: int) -> bool:
    """Whether the modules of ``block`` differ from those of the ``first`` in nothing but its ``number``."""
    ones, others = dict(first.named_modules()), dict(block.named_modules())
    if ones.keys() != others.keys() or any(_form(ones[path]) != _form(others[path]) for path in ones):
        return False
    values = (
        (value, vars(others[path]).get(name))
        for path, module in ones.items()
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
    )
    return all(one == other or (one, other) == (0, number) for one, other in values)


def _form(module: nn.Module) -> tuple[Any, ...]:
    """The class of ``module``, and the names, shapes and types of its tensors."""
    held = {**module._parameters, **module._buffers}.items()
    return type(module), [(name, each.shape, each.dtype, each.requires_grad) for name, each in held if each is not None]


def repeats(profile: ModelProfile) -> bool:
    """Whether the blocks of ``profile``, of a model that was cut down, are equal and can be repeated."""
    before, repeated = profile.blocks[_REPEATED - 1 : _REPEATED + 1]
    return replace(before, name=repeated.name) == repeated and len(profile.calls) == len({*profile.calls})


def with_more_blocks(profile: ModelProfile, more: int, model: nn.Module) -> ModelProfile:
    """``profile``, of ``TRACED_BLOCKS`` blocks unless ``more`` is 0, as that of the same model with ``more`` blocks.

    See [Note: more blocks].

    Args:
        profile: counted on the meta device. Blocks are numbered in their names, and it ``repeats``.
        more: how many blocks the deeper model has beyond these.
        model: of which the profile is.
    """
    if not more:
        return profile
    *_, before, last = (storages_in(unmanaged_memory(model.get_submodule(block.name))) for block in profile.blocks)
    buffer_bytes = sum(size for storage, size in last.items() if storage not in before)
    repeated = profile.blocks[_REPEATED]
    path = re.escape(repeated.name.rpartition(".")[0])

    def renamed(name: str, by: int) -> str:
        return re.sub(rf"^({path}\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + by}", name)

    (unit,) = (at for at, record in enumerate(profile.units) if record.block == _REPEATED)
    used = profile.units[unit].parameters

    def later(record: _Named, by: int) -> _Named:
        return replace(record, name=renamed(record.name, by))

    def later_unit(record: UnitRecord, by: int) -> UnitRecord:
        parameters = tuple(at if at < used[0] else at + by * len(used) for at in record.parameters)
        block = None if record.block is None else record.block + by
        return replace(record, name=renamed(record.name, by), block=block, parameters=parameters)

    repeat: Callable[..., Any] = partial(_repeated, more=more)
    call = profile.calls.index(unit)
    return replace(
        profile,
        buffer_bytes=profile.buffer_bytes + more * buffer_bytes,
        parameters=repeat(profile.parameters, used[0], used[-1] + 1, later),
        units=repeat(profile.units, unit, unit + 1, later_unit),
        calls=repeat(profile.calls, call, call + 1, lambda at, by: at + by if at >= unit else at),
        blocks=repeat(profile.blocks, _REPEATED, _REPEATED + 1, later),
        segments=_segments(profile.segments, more),
    )


def _segments(segments: Sequence[SegmentRecord], more: int) -> tuple[SegmentRecord, ...]:
    """The segments of a model with ``more`` blocks. Backward is that of forward from its end to its beginning."""
    forward = [segment for segment in segments if segment.phase == "forward"]
    backward = [segment for segment in reversed(segments) if segment.phase == "backward"]
    deeper = []
    for phase in (forward, backward):
        blocks = [segment.block for segment in phase]
        first, last = blocks.index(_REPEATED), blocks.index(_REPEATED + 1)
        alive_bytes = phase[last].live_bytes - phase[first].live_bytes
        repeated = _repeated(phase, first, last, partial(_later_segment, alive_bytes=alive_bytes), more=more)
        deeper.append([_held_longer(segment, last, more * (last - first)) for segment in repeated])
    return (*deeper[0], *reversed(deeper[1]))


def _later_segment(segment: SegmentRecord, by: int, *, alive_bytes: int) -> SegmentRecord:
    block = None if segment.block is None else segment.block + by
    return replace(segment, block=block, live_bytes=segment.live_bytes + by * alive_bytes)


def _held_longer(segment: SegmentRecord, since: int, more: int) -> SegmentRecord:
    return replace(segment, held_until=segment.held_until + more) if segment.held_until >= since else segment


def _repeated(
    items: Sequence[_Item], first: int, last: int, later: Callable[[_Item, int], _Item], *, more: int
) -> tuple[_Item, ...]:
    """``items``, where ``more`` copies of those from ``first`` to before ``last`` follow them.

    ``later`` gives an item of a block that is so many blocks further on.
    """
    copies = [later(item, by) for by in range(1, more + 1) for item in items[first:last]]
    return (*items[:last], *copies, *(later(item, more) for item in items[last:]))
