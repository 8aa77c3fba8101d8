"""What the ranks agree on before they train: the machine, the profile and the plan."""

from __future__ import annotations

from collections.abc import Callable
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
    every = ranks.all_values(replace(share, world_size=ranks.size), "the machine of all ranks")
    return replace(
        every[0],
        device_bytes=min(each.device_bytes for each in every),
        host_bytes=min(each.host_bytes for each in every),
    )


def largest_of_all(ranks: Ranks, own: ModelProfile) -> ModelProfile:
    """The profile of the rank whose batch calls most units and takes most memory."""
    every = ranks.all_values(own, "the profile of all ranks")
    return max(every, key=lambda each: (len(each.calls), each.tokens, _peak_bytes(each)))


def plan_of_first(ranks: Ranks, plan: Callable[[], Plan]) -> Plan:
    """The plan of the first rank. An error in it is raised on every rank."""
    if not ranks.several:
        return plan()
    result: Plan | Exception | None = None
    if ranks.rank == 0:
        try:
            result = plan()
        except Exception as error:  # all ranks must hear of it
            result = error
    result = ranks.of_first(result, "the plan of rank 0")
    if isinstance(result, Exception):
        raise result
    assert result is not None
    return result


def _peak_bytes(profile: ModelProfile) -> int:
    return max((segment.live_bytes + segment.peak_bytes for segment in profile.segments), default=0)
