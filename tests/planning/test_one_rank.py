"""Plans for one rank stay as they are, to the last digit, whatever the planner learns about several ranks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import Plan, search
from protrain.planning.plan import Counts
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import N, as_measured, random_machine, random_profile, that_streams

# By seed: the plan, its milliseconds, and its bytes on the device and in host memory, from before there were ranks.
PLANS = [
    (0, (7, 0, 1, 0, 0, 0, 0, 0), 201.69046180029108, 2019897344, 14170624),  # two batches, updates inside backward
    (7, (3, 1, 0, 1, 1, 0, 0, 0), 9.506530438490273, 738329600, 81282048),  # on a CPU
    (8, (0, 3, 0, 4, 0, 3, 0, 4), 448.3853605496686, 1323703808, 676339200),  # three batches, streamed updates
    (11, (1, 2, 4, 0, 0, 3, 1, 0), 24.879339766657537, 527377408, 877939712),  # swapped blocks, one weight alone
    (24, (4, 4, 0, 2, 0, 1, 0, 0), 112.45383664586218, 1648802304, 571488768),  # streamed updates
    (28, (1, 1, 3, 0, 0, 3, 2, 0), 66.57074159514998, 671884800, 899695616),  # speculative updates of the weight alone
    (31, (8, 0, 0, 0, 0, 0, 0, 0), 182.18771136724746, 2068066304, 1060864),  # everything on the device
    (75, (0, 1, 0, 6, 0, 0, 0, 0), 73.44818790179453, 775828480, 873477120),  # nothing on the device
]


def case(seed: int) -> tuple[ModelProfile, HardwareProfile, bool]:
    """A random model and machine, and whether updates run inside backward."""
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, draw.choice([4, 8, 16])), random.Random(-seed - 1))
    hardware = random_machine(draw)
    if draw.random() < 0.5:
        hardware = that_streams(hardware)
    if draw.random() < 0.2:
        hardware = replace(hardware, device_type="cpu")
    accumulation, inside = draw.choice([1, 1, 2, 3]), draw.random() < 0.3
    return replace(profile, accumulation=accumulation), hardware, inside


@pytest.mark.parametrize(("seed", "counts", "step_ms", "device_bytes", "host_bytes"), PLANS)
def test_plans_of_one_rank_are_what_they_were(
    seed: int, counts: tuple[int, ...], step_ms: float, device_bytes: int, host_bytes: int
) -> None:
    profile, hardware, inside = case(seed)
    plan = search(profile, hardware, chunk_elements=N, step_during_backward=inside)
    assert plan.counts == Counts(*counts)
    # Sums of floating-point numbers may differ by rounding between versions of NumPy.
    assert plan.step_ms == pytest.approx(step_ms, rel=1e-12)
    assert (plan.device_bytes, plan.host_bytes, plan.world_size) == (device_bytes, host_bytes, 1)


def test_a_plan_from_before_there_were_ranks_is_of_one() -> None:
    profile, hardware, inside = case(11)
    plan = search(profile, hardware, chunk_elements=N, step_during_backward=inside)
    older = {name: value for name, value in plan.to_dict().items() if name != "world_size"}
    assert Plan.from_dict(older) == plan
