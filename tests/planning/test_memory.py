"""The memory model by hand: states, sums and copies. Tests of the engine compare it with steps that really run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, block_modes, pack
from protrain.planning.memory import state_bytes
from protrain.planning.plan import Counts
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import H100, MACHINE, MIB, N, chain, make_profile, placed

NONE = BlockMode.NONE


@pytest.mark.parametrize(
    ("dtype", "trainable", "frozen"), [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)]
)
def test_states_per_parameter_without_the_gradient(dtype: str, trainable: int, frozen: int) -> None:
    profile = replace(chain(3.0, 6.0), dtype=dtype)
    profile = replace(profile, parameters=(replace(profile.parameters[0], group=-1), *profile.parameters[1:]))
    still, *trained = pack(profile, N).chunks
    narrow = replace(profile, moment_dtype="bfloat16")
    assert [state_bytes(still, each) for each in (profile, narrow)] == [N * frozen] * 2
    for chunk in trained:
        assert [state_bytes(chunk, each) for each in (profile, narrow)] == [N * trainable, N * (trainable - 4)]


def test_sums_of_several_batches_take_four_bytes_where_gradients_take_two() -> None:
    """Sums in host memory pass through three buffers on the device."""
    profile, modes = chain(3.0, 6.0), (NONE,) * 4
    one, several = (MemoryModel(each, MACHINE, pack(each, N)) for each in (profile, replace(profile, accumulation=2)))
    assert one.static_bytes(0, 3) - one.static_bytes(0, 2) == 2 * N
    assert one.static_parts(4, 0)["gradient staging"] == one.partial_bytes
    for n_persist in range(5):
        for n_sum in range(5 - n_persist):
            n_away = 4 - n_persist - n_sum
            assert several.host_sum_bytes(n_persist, n_sum) == 4 * N * n_away
            more_bytes = several.static_bytes(n_persist, 1, n_sum) - one.static_bytes(n_persist, 1)
            assert more_bytes == 2 * N * n_persist + 4 * N * n_sum + 12 * N * (n_away > 0)
            counts = placed(n_persist, 1)
            more_bytes = several.host_bytes(counts._replace(n_device_sum=n_sum), modes) - one.host_bytes(counts, modes)
            assert more_bytes == 2 * N * n_away


CHUNK = 8 * MIB  # elements of a chunk of make_profile


def memory_of(world_size: int, profile: ModelProfile, hardware: HardwareProfile = H100, **options: Any) -> MemoryModel:
    machine = replace(hardware, world_size=world_size)
    return MemoryModel(profile, machine, pack(profile, CHUNK, world_size), **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_rank_has_its_part_of_the_states(world_size: int, accumulation: int) -> None:
    profile = replace(make_profile(4), accumulation=accumulation)
    memory = memory_of(world_size, profile, replace(H100, streamed_adam_gparams=None))
    layout, modes = memory.layout, block_modes(4, 0, 4)
    per_element = 16 if accumulation > 1 else 14
    everything = per_element * sum(chunk.elements for chunk in layout.chunks)
    for n_persist in range(7):
        away = layout.chunks[n_persist:]
        on_device = memory.static_parts(n_persist, 1)["persistent chunks"]
        in_host = per_element * sum(chunk.elements for chunk in away) // world_size
        assert on_device + in_host == everything // world_size
        if accumulation == 1:
            counts = Counts(n_persist, 1, 0, 4)
            least = memory.host_bytes(Counts(6, 1, 0, 4), modes)
            assert memory.host_bytes(counts, modes) - least == in_host
            copies = memory.copy_bytes(n_persist, len(away), 1 if away else 0)
            shards = [chunk.elements // world_size for chunk in away]
            assert copies == 12 * sum(shards[1:]) + 2 * sum(shards[:1])


def test_the_parts_of_device_memory_by_hand() -> None:
    profile = make_profile(4)  # six chunks of 8 Mi elements
    one, two, three = (memory_of(world_size, profile).static_parts(2, 4) for world_size in (1, 2, 3))
    assert one == {
        "persistent chunks": 2 * CHUNK * 14,
        "chunk buffers": 4 * CHUNK * 2,
        "gradient staging": 2 * CHUNK * 2 + 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
    }
    assert two == {
        "persistent chunks": 2 * CHUNK * 14 // 2,
        "chunk buffers": 4 * CHUNK * 2,
        "gradient staging": 3 * CHUNK * 2 + 2 * CHUNK // 2 * 2 + 2 * 4 * 6 * 512,
        "buffers and quantised weights": 0,
        "staging for streamed updates": 128 * MIB,
        "NCCL and its contexts": (1016 + 2 * 384) * MIB,
    }
    padded = 21846 * 384  # elements; a third of it is no whole number of tiles, so two tiles of every chunk are cut
    assert padded - 384 < CHUNK < padded
    assert three == {
        "persistent chunks": 2 * padded * 14 // 3,
        "chunk buffers": 4 * padded * 2,
        "gradient staging": 3 * padded * 2 + 2 * (padded // 3) * 2 + 2 * (4 * 6 * 512 + 2 * 16384 * 2 * 6),
        "buffers and quantised weights": 0,
        "staging for streamed updates": 2 * 18 * (padded // 3),
        "NCCL and its contexts": (1016 + 3 * 384) * MIB,
    }
    on_cpu = memory_of(2, profile, replace(H100, device_type="cpu")).static_parts(2, 4)
    assert "NCCL and its contexts" not in on_cpu


ROOMY = replace(MACHINE, host_bytes=10**12)
# Bytes a parameter of a whole second copy, and of one of the weight alone.
SIZES = [("bfloat16", 12, 2), ("float16", 14, 2), ("float32", 12, 4)]


@pytest.mark.parametrize(("dtype", "whole", "weight"), SIZES)
def test_as_few_are_weight_only_as_host_memory_allows(dtype: str, whole: int, weight: int) -> None:
    profile = replace(chain(3.0, 6.0, n=8), dtype=dtype)
    memory = MemoryModel(profile, ROOMY, pack(profile, N))
    for n_weight_only in range(6):
        room = N * ((5 - n_weight_only) * whole + n_weight_only * weight)
        assert memory.copy_bytes(2, 5, n_weight_only) == room
        more = memory.host_bytes(placed(2, 2, 5, n_weight_only), (NONE,) * 8)
        assert more - memory.host_bytes(placed(2, 2), (NONE,) * 8) == room
        memory.hardware = replace(ROOMY, host_bytes=memory.least_host_bytes(2, 4000) + room)
        assert memory.speculation(2, 5, 4000) == (5, n_weight_only)
        memory.hardware = replace(ROOMY, host_bytes=memory.hardware.host_bytes - 1)
        assert memory.speculation(2, 5, 4000) == ((5, n_weight_only + 1) if n_weight_only < 5 else (4, 4))
