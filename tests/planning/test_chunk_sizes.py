"""Two sizes of chunks to choose from: what a search of both finds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from protrain.hardware import HardwareProfile
from protrain.planning import search
from protrain.planning.layout import chunk_sizes
from protrain.profiler.model_profile import ModelProfile
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
