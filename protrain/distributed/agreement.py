"""What the ranks agree on: the machine, the profile and the plan before they train, and whether an action succeeded."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from protrain.distributed.processes import local_processes
from protrain.distributed.ranks import Ranks
from protrain.hardware.profile import HardwareProfile
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile


def of_all(ranks: Ranks, own: HardwareProfile) -> HardwareProfile:
    """The machine of each rank, for a plan that fits all of them: the least memory and the rates of the first rank.

    The ranks of a node share its host memory and its cores.
    """
    if not ranks.several:
        return own
    share = own.shared_by(min(local_processes(), ranks.size))
    every = ranks.all_values(replace(share, world_size=ranks.size))
    return replace(
        every[0],
        device_bytes=min(each.device_bytes for each in every),
        host_bytes=min(each.host_bytes for each in every),
    )


def largest_of_all(ranks: Ranks, own: ModelProfile) -> ModelProfile:
    """The profile of the rank whose batch calls most units and takes most memory."""
    every = ranks.all_values(own)
    return max(every, key=lambda each: (len(each.calls), each.tokens, _peak_bytes(each)))


def plan_of_first(ranks: Ranks, plan: Callable[[], Plan]) -> Plan:
    """The plan of the first rank. An error in it is raised on every rank."""
    found: Plan | None = None
    with raised_on_all(ranks):
        if ranks.rank == 0:
            found = plan()
    found = ranks.of_first(found)
    assert found is not None
    return found


@contextmanager
def raised_on_all(ranks: Ranks) -> Iterator[None]:
    """An error inside, on any rank, is raised on all of them when the last one has come to the end of the block.

    So no rank goes on alone with something that has failed on another. Each rank raises its own error if it has one,
    and otherwise that of the first rank that has.
    """
    if not ranks.several:
        yield
        return
    own: BaseException | None = None
    try:
        yield
    except BaseException as error:  # Ctrl-C, too: the others wait for this rank
        own = error
    errors = ranks.all_values(None if own is None else _sendable(own))
    if own is not None:
        raise own
    for rank, other in enumerate(errors):
        if other is not None:
            other.add_note(f"This error was raised on rank {rank}, and rank {ranks.rank} was told of it.")
            raise other


def _sendable(error: BaseException) -> Exception:
    """``error`` as an exception that another process can load and raise."""
    if isinstance(error, Exception):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # the constructors of some exceptions need more arguments than they keep
            pass
        else:
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _peak_bytes(profile: ModelProfile) -> int:
    return max((segment.live_bytes + segment.peak_bytes for segment in profile.segments), default=0)
