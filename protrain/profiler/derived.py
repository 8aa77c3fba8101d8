"""Profiles that follow from others: of the same model with more blocks, and of another batch.

[Note: more blocks] The blocks of a named shape are equal, so a trace of four of them has seen all that there is to see.
What it recorded of the third is repeated, under the names and at the places that further blocks have. Each block adds
the same to what is alive after it. The result is, number by number, the profile of a trace of all blocks.

[Note: other batches] Operations grow in proportion to the sequences of a batch, and so do bytes, on top of what does
not depend on the batch. So two traces, of 2 and 16 sequences, give the profile of any batch. Operations are exact.
Peaks are not where the loss is computed in pieces, whose number changes with the batch. With seven blocks of llama3-8b
and gpt2-10b and 1 to 32 sequences of 1,024 tokens, the peak of a segment was up to 25% off, and the highest peak of the
step up to 6% (gpt2-10b, one sequence) but otherwise 0.2%. The batch that is chosen is therefore traced itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from protrain.common.records import Record
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


def at_batch(low: ModelProfile, high: ModelProfile, share: float) -> ModelProfile:
    """The profile of a batch that lies by ``share`` of the way between those of ``low`` and ``high``.

    Below 0 it lies before ``low``. See [Note: other batches].
    """
    return cast(ModelProfile, _between(low, high, share))


def _between(low: Any, high: Any, share: float) -> Any:
    """Every number in ``low`` and ``high`` at ``share`` of the way between them, and what is no number as it is."""
    if isinstance(low, Record):
        return replace(cast(Any, low), **_between(vars(low), vars(high), share))
    if isinstance(low, dict):
        return {name: _between(value, high[name], share) for name, value in low.items()}
    if isinstance(low, tuple):
        return tuple(_between(*pair, share) for pair in zip(low, high, strict=True))
    if isinstance(low, int) and low != high:
        return max(0, round(low + (high - low) * share))
    return low
