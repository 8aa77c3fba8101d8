"""Models with a large vocabulary: what the search finds, and what it says where nothing fits."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from protrain.common.errors import PlanError
from protrain.common.tables import parse_memory
from protrain.planning import search
from protrain.profiler.model_profile import ModelProfile
from tests.planning.brute_force import N, as_measured, check_search, random_machine, random_profile


def large_vocabulary(draw: random.Random, *, tied: bool) -> ModelProfile:
    """Random blocks between an embedding of several of them and a head that is as large or tied."""
    profile = as_measured(random_profile(draw, draw.choice([1, 4, 16])), draw)
    parameters = list(profile.parameters)
    for at in (0,) if tied else (0, -1):
        parameters[at] = replace(parameters[at], shape=(draw.choice([2, 3, 5]) * N,))
    units = profile.units
    if tied:
        units = (*units[:-1], replace(units[-1], parameters=(0, *units[-1].parameters)))
    return replace(profile, parameters=tuple(parameters), units=units)


@pytest.mark.parametrize("seed", [15, 41, 97])
@pytest.mark.usefixtures("judged_as_calibrated")
def test_no_plan_is_better(seed: int) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=draw.random() < 0.3)
    hardware, inside = random_machine(draw), draw.random() < 0.3
    hardware = replace(hardware, device_bytes=2 * hardware.device_bytes, host_bytes=2 * hardware.host_bytes)
    check_search(profile, hardware, inside=inside)


@pytest.mark.parametrize("seed", [97, 105, 152, 205])
def test_what_would_fit_is_named_where_nothing_does(seed: int) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=False)
    hardware = random_machine(draw)
    with pytest.raises(PlanError) as caught:
        search(profile, hardware)
    amount, error = r"([\d.]+[KMG]iB)", str(caught.value)
    for text in re.findall(f"{amount} of device_memory|device_memory of at least {amount}", error):
        enough = parse_memory("".join(text), name="enough")
        assert enough > hardware.device_bytes
        host_bytes = hardware.host_bytes
        if both := re.search(f"with host_memory of at least {amount}", error):
            host_bytes = parse_memory(both[1], name="host")
        search(profile, replace(hardware, device_bytes=enough, host_bytes=host_bytes))
