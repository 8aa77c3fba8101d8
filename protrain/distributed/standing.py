"""Where the thread that trains stands, as the watcher of its rank sees it, for ranks that wait for this one.

[Note: two that wait for each other] A rank that is absent may be slow, and nobody can tell how long it will be. One
case is certain: rank 1 is inside a collective of the script, such as ``dist.barrier()``, that cannot end without rank
0, and rank 0 has not begun it, as it waits for rank 1 in the model. Neither can go on. Torch counts the collectives
that a rank has begun on a process group, which tells whether it has begun this one: it may have done so by
``async_op=True`` before it called the model. Some backends count send and receive, too. So where ranks exchange
messages through the same group, rank 0 may seem to have begun it, and both wait for the timeout.

Only calls of functions of ``torch.distributed`` can be recognised from outside. A rank that waits in ``work.wait()`` of
a script, or in ``loss.item()`` for a GPU, is like a slow one. The warning about it names the place.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# How the names of collectives begin that no rank leaves before all have come.
_OF_ALL = ("barrier", "all_", "reduce_scatter")
_FROM_ONE = ("broadcast", "broadcast_object_list", "scatter", "scatter_object_list")
_TO_ONE = ("reduce", "gather", "gather_object")
_OWN = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.join(os.path.dirname(torch.__file__), ""), os.path.join(_OWN, ""), "<frozen"}
)


class Call(NamedTuple):
    """A collective that a rank has begun and not left. All ranks are those of the default group."""

    group: str  # the name that torch has given it
    members: list[int]  # of the group
    needed: list[int]  # the ranks without which it cannot end
    begun: int  # how many collectives the rank has begun on the group, this one among them


class Stand(NamedTuple):
    """Where a thread stands."""

    place: str  # in words that follow "is"
    call: Call | None

    @classmethod
    def of_message(cls, values: Sequence[Any] | None) -> Stand | None:
        """The stand that came as ``values`` from another rank."""
        if values is None:
            return None
        place, call = values
        return cls(place, call and Call(*call))


def stand_of(thread: int) -> Stand | None:
    """Where the Python thread of this number stands. None: there is no such thread."""
    frames = list(_frames(sys._current_frames().get(thread)))
    if not frames:
        return None
    own = next((frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)), frames[0])
    function = own.f_code.co_name
    inside = "" if function == "<module>" else f", in {function}()"
    line = f"{own.f_code.co_filename}, line {own.f_lineno}{inside}"
    # A collective may be made of others. The outermost is that which the script has called.
    calls = [frame for frame in frames if frame.f_code.co_filename == c10d.__file__ and _is_collective(frame)]
    if not calls:
        return Stand(f"at {line}", None)
    return Stand(f"in torch.distributed.{calls[-1].f_code.co_name}(), called at {line}", _call(calls[-1]))


def waits_for_this_rank(call: Call) -> bool:
    """Whether another rank, which is in ``call``, waits there for this one, which has not begun it."""
    try:
        group = _group(call)
        is_same = dist.get_process_group_ranks(group) == call.members
        return is_same and dist.get_rank() in call.needed and _begun(group) < call.begun
    except Exception:  # this rank has no such group, or has ended it
        return False


def end_call(call: Call) -> None:
    """End ``call`` of this rank, if it goes through NCCL, which waits for ever. gloo ends as other ranks do."""
    with suppress(Exception):  # it may have ended meanwhile
        group = _group(call)
        if any(group._get_backend(device).name() == "nccl" for device in group._device_types):
            group.abort()


def _group(call: Call) -> Any:
    resolve: Any = c10d._resolve_process_group  # its type has changed between versions of torch
    return resolve(call.group)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_collective(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    return name.startswith(_OF_ALL) or name in _FROM_ONE or name in _TO_ONE


def _call(frame: FrameType) -> Call | None:
    """The collective whose function of ``torch.distributed`` runs in ``frame``. None: torch does not say enough."""
    arguments, name = frame.f_locals, frame.f_code.co_name
    try:
        group: Any = arguments.get("group") or dist.group.WORLD
        members = dist.get_process_group_ranks(group)
        needed = members
        if name in _FROM_ONE:
            needed = [members[arguments["group_src"]]]
        elif name in _TO_ONE and arguments["group_dst"] != dist.get_rank(group):
            needed = []  # it only sends
        return Call(group.group_name, members, needed, _begun(group))
    except Exception:  # such as that of a backend which counts nothing: the watcher goes on
        return None


def _begun(group: Any) -> int:
    """How many collectives this rank has begun on ``group``, with all of its backends."""
    backends = {group._get_backend(device) for device in group._device_types}
    return sum(backend._get_sequence_number_for_group() for backend in backends)
