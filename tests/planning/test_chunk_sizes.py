"""Two sizes of chunks to choose from: what a search of both finds, and what it says where neither has a plan."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from protrain.errors import PlanError
from protrain.hardware import HardwareProfile
from protrain.planning import search
from protrain.planning.layout import chunk_sizes
from protrain.profiler.model_profile import ModelProfile
from protrain.quantities import parse_bytes
from tests.planning.test_brute_force import N, as_measured, random_machine, random_profile


def large_vocabulary(draw: random.Random, *, tied: bool) -> ModelProfile:
    """Random blocks between an embedding of several of them and a head that is as large or tied."""
    profile = as_measured(random_profile(draw, draw.choice([1, 4, 16])), draw)
    parameters = list(profile.parameters)
    for at in (0,) if tied else (0, -1):
        parameters[at] = replace(parameters[at], shape=(draw.choice([2, 3, 5]) * N,))
    return replace(profile, parameters=tuple(parameters))


def machine_of(draw: random.Random) -> HardwareProfile:
    """With streamed updates."""
    hardware = replace(random_machine(draw), streamed_adam_gparams=draw.choice([1.0, 3.0, 6.0]))
    return replace(hardware, device_bytes=draw.choice([1, 2]) * hardware.device_bytes)


@pytest.mark.parametrize("seed", [53, 135])
def test_the_faster_of_both_is_found_though_it_is_faster_only_with_streamed_updates(seed: int) -> None:
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=draw.random() < 0.5)
    hardware = machine_of(draw)
    sizes = chunk_sizes(profile)
    assert len(sizes) == 2
    each = [search(profile, hardware, chunk_elements=size).step_ms for size in sizes]
    assert search(profile, hardware).step_ms <= 1.01 * min(each), each


@pytest.mark.parametrize("seed", [4, 20, 47, 80, 159, 325])
def test_what_would_fit_is_what_is_missing_least(seed: int) -> None:
    """Chunks of one size may lack device memory where those of the other lack host memory."""
    draw = random.Random(seed)
    profile = large_vocabulary(draw, tied=False)
    hardware = random_machine(draw)
    errors = []
    for size in (*chunk_sizes(profile), None):
        with pytest.raises(PlanError) as caught:
            search(profile, hardware, chunk_elements=size)
        errors.append(caught.value)
    *each, found = errors
    assert {error.where for error in each} == {"GPU", "host"}
    missing = [error.needed_bytes - error.available_bytes for error in each]
    assert str(found) == str(each[missing.index(min(missing))])
    amount = r"([\d.]+[KMG]iB)"
    for error in each:
        for text in re.findall(f"{amount} of device_memory|device_memory of at least {amount}", str(error)):
            enough = parse_bytes("".join(text))
            assert enough > hardware.device_bytes
            host_bytes = hardware.host_bytes
            if both := re.search(f"with host_memory of at least {amount}", str(error)):
                host_bytes = parse_bytes(both[1])
            search(profile, replace(hardware, device_bytes=enough, host_bytes=host_bytes))
