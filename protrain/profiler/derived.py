"""Profiles that follow from those of the same model with fewer blocks.

[Note: more blocks] The blocks of a named shape are equal, so a trace of four of them has seen all that there is to see.
What it recorded of the third is repeated, under the names and at the places that further blocks have. Each block adds
the same to what is alive after it. The result is, number by number, the profile of a trace of all blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord

TRACED_BLOCKS = 4  # enough for one that has neighbours of its kind on both sides, and another to compare it with
_REPEATED = 2
_Item = TypeVar("_Item")
_Named = TypeVar("_Named", ParameterRecord, BlockRecord)


def with_blocks(profile: ModelProfile, n_blocks: int, *, buffer_bytes: int = 0) -> ModelProfile:
    """``profile``, of ``TRACED_BLOCKS`` blocks, as that of the same model with ``n_blocks``, which are no fewer.

    See [Note: more blocks].

    Args:
        profile: counted on the meta device. Blocks are numbered in their names, and each is called once.
        n_blocks: of the deeper model.
        buffer_bytes: of one block.
    """
    more = n_blocks - TRACED_BLOCKS
    before, repeated = profile.blocks[_REPEATED - 1 : _REPEATED + 1]
    assert replace(before, name=repeated.name) == repeated, f"{before.name} and {repeated.name} are not equal"
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
