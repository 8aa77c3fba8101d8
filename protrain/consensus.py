"""What the ranks agree on before they train: the machine, the profile and the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from protrain.distributed.agreement import raised_on_all
from protrain.distributed.joining import nodes_of
from protrain.distributed.ranks import Ranks
from protrain.hardware.calibration.activities import Collectives, on_device, product
from protrain.hardware.calibration.contention import (
    groups_of,
    most_contended,
    rates_alone,
    rates_on_ranks,
    shares_of,
    slowest,
)
from protrain.hardware.profile import HardwareProfile
from protrain.planning.plan import Plan
from protrain.profiler.model_profile import ModelProfile
from protrain.profiler.step_times import COMPILED, LASTED, MISSING, Together

_MEASURED_BYTES = 64 * 1024**2  # of a tensor that is gathered and exchanged to see how fast that is
_WIDTH, _PRODUCTS = 4096, 4  # rows and columns of matrices that are multiplied beside collectives, so often in a unit
_MEASURED_S = 0.05  # of products and collectives, alone and beside each other
_COLLECTIVES = "the timing of collectives"


def of_all(ranks: Ranks, own: HardwareProfile, device: torch.device) -> HardwareProfile:
    """The machine of each rank, for a plan that fits all of them: the least memory, and otherwise that of the first.

    The ranks of a node share its host memory and its cores. If as many processes as train now have calibrated the
    machine, their figures are used as they are. If one process has, or none, nothing is known of collectives. Then GPUs
    measure them now, in less than a second, because NVLink is ten times as fast as what would have to be assumed.
    """
    if not ranks.several:
        return own
    share = replace(own.shared_by(ranks.on_node), world_size=ranks.size, n_nodes=nodes_of(ranks.size))
    if device.type == "cuda" and not all(
        ranks.all_values(share.all_gather_gbps is not None, "whether collectives are measured")
    ):
        with torch.random.fork_rng([device]):  # what is multiplied and sent is random
            share = _with_collectives(ranks, share, device)
    every = ranks.all_values(share, "the machine of all ranks")
    return replace(
        every[0],
        device_bytes=min(each.device_bytes for each in every),
        host_bytes=min(each.host_bytes for each in every),
        all_gather_gbps=_least([each.all_gather_gbps for each in every]),
        all_to_all_gbps=_least([each.all_to_all_gbps for each in every]),
    )


def _least(rates_gbps: list[float | None]) -> float | None:
    known = [rate for rate in rates_gbps if rate is not None]
    return min(known) if len(known) == len(rates_gbps) else None


def _with_collectives(ranks: Ranks, own: HardwareProfile, device: torch.device) -> HardwareProfile:
    """``own`` with the rates of collectives on this rank, and with the shares that they and matrix products keep.

    They are measured as calibration measures them, and are the least of all ranks.
    """
    activities = {
        **Collectives(ranks, device, _MEASURED_BYTES).activities(),
        "matmul": on_device(product(device, _WIDTH), 1.0, device, times=_PRODUCTS),
    }
    runs = {}
    for group in groups_of([*activities]):
        together = {name: activities[name] for name in group}
        runs[group] = [rates_on_ranks(ranks, together, _COLLECTIVES, duration_s=_MEASURED_S)]
    torch.cuda.synchronize(device)  # the last units use memory that is freed here
    of_ranks, groups = zip(*ranks.all_values((rates_alone(runs), shares_of(runs)), _COLLECTIVES), strict=True)
    rates = slowest(of_ranks)
    others = (group for group in own.contention if "collective" not in group.activities)
    return replace(
        own,
        all_gather_gbps=rates["all_gather_gbps"],
        all_to_all_gbps=rates["all_to_all_gbps"],
        contention=(*others, *most_contended(groups)),
    )


class ProfilingTogether(Together):
    """Decides on all ranks alike how they profile, by the largest number that any of them has.

    A model may have collectives of its own in its forward, so the ranks run equally many steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[str, float] = {}

    def largest(self, what: str, number: float) -> float:
        """The largest ``number`` of all ranks. One that profiles again, with less memory, goes by what is known."""
        if what not in self._known:
            self._known[what] = max(self._ranks.all_values(number, what))
        return self._known[what]

    def caught(self, error: Exception) -> None:
        """``error`` has ended a step of this rank. Others, which may wait for it inside the model, can name it."""
        self._ranks.raised(error, "the profile of the model")

    def leave(self, error: Exception) -> None:
        """``error`` ends the profile of this rank, and the others go on without it."""
        self.caught(error)
        for what in (MISSING, COMPILED, LASTED):
            self.largest(what, 0.0)


def largest_of_all(ranks: Ranks, own: ModelProfile) -> ModelProfile:
    """The profile of the rank whose batch calls most units and takes most memory."""
    every = ranks.all_values(own, "the profile of all ranks")
    return max(every, key=lambda each: (len(each.calls), each.tokens, _peak_bytes(each)))


def plan_of_first(ranks: Ranks, plan: Callable[[], Plan]) -> Plan:
    """The plan of the first rank. An error in it is raised on every rank."""
    found: Plan | None = None
    with raised_on_all(ranks):
        if ranks.rank == 0:
            found = plan()
    found = ranks.of_first(found, "the plan of rank 0")
    assert found is not None
    return found


def _peak_bytes(profile: ModelProfile) -> int:
    return max((segment.live_bytes + segment.peak_bytes for segment in profile.segments), default=0)
