"""Regions that gradients share inside backward: how many, what they save, and what waiting for one costs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import (
    BlockMode,
    MemoryModel,
    Plan,
    RuntimeModel,
    block_modes,
    check,
    explain,
    frontier,
    largest,
    pack,
    search,
)
from protrain.planning.gradient_regions import GradientRegions
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, Timeline
from protrain.profiler.model_profile import ModelProfile, ParameterRecord
from tests.planning.counts import placed
from tests.planning.machines import H100
from tests.planning.test_runtime import MOVE, N
from tests.planning.test_runtime import make_profile as blocks_of

NONE, SWAP = BlockMode.NONE, BlockMode.SWAP
UPDATE = 20.0  # ms: one chunk on the host
DEVICE_UPDATE = 0.01
MACHINE = replace(
    H100,
    contention=(),
    streamed_adam_gparams=None,
    flatten_gbps=None,
    host_adam_gparams=0.064,
    device_adam_gparams=128.0,
    device_copy_gbps=1e6,
    h2d_gbps=1.0,
    d2h_gbps=1.0,
    bidirectional_gbps=2.1,
    host_dram_gbps=1e6,
)


def make_profile(n: int, *, forward: float = 6.0, backward: float = 6.0, **sizes: int) -> ModelProfile:
    return blocks_of(forward, backward, n=n, **sizes)


def memory_of(profile: ModelProfile, hardware: HardwareProfile = MACHINE, *, inside: bool = True) -> MemoryModel:
    return MemoryModel(profile, hardware, pack(profile, N), update_in_backward=inside)


def with_regions(profile: ModelProfile, n_persist: int, n_regions: int, **changes: Any) -> MemoryModel:
    """On a machine whose host memory has room for so many regions (0: for all gradients) and no byte more."""
    roomy = memory_of(profile, replace(MACHINE, host_bytes=10**12, **changes))
    most = roomy.least_host_bytes(n_persist, 0) - roomy.gradients.host_bytes(n_persist, 2)
    host_bytes = most + roomy.gradients.host_bytes(n_persist, n_regions)
    memory = memory_of(profile, replace(roomy.hardware, host_bytes=host_bytes))
    assert memory.n_host_regions(n_persist, 0) == n_regions
    return memory


# -- how many ----------------------------------------------------------------------------------------------------------


def odd_profile(*, within: bool = False) -> ModelProfile:
    """Chunk 0 is of u0, chunk 1 half of u1 and half of u2, chunks 2 and 3 of u3. The others may be called by u0."""
    sizes = [N, N // 2, N // 2, N, N]
    profile = make_profile(4)
    units = tuple(
        replace(unit, parameters=members, within=(0,) if within and unit.name != "u0" else ())
        for unit, members in zip(profile.units, ((0,), (1,), (2,), (3, 4)), strict=True)
    )
    parameters = tuple(ParameterRecord(name=f"p{i}", shape=(size,), group=0) for i, size in enumerate(sizes))
    return replace(profile, parameters=parameters, units=units)


def open_at_once(profile: ModelProfile) -> tuple[list[int], list[int]]:
    layout = pack(profile, N)
    assert [chunk.elements for chunk in layout.chunks] == [N] * 4
    regions = GradientRegions(profile, MACHINE, layout, update_in_backward=True)
    return regions.open_on_device, regions.open_on_host


def test_a_chunk_is_open_from_its_first_gradient_to_its_last() -> None:
    # Turns of backward yield {2, 3}, {1}, {1}, {0}.
    assert open_at_once(odd_profile()) == ([0, 1, 1, 1, 2], [2, 2, 2, 1, 0])


def test_chunks_that_may_be_held_or_never_complete_are_open_all_the_time() -> None:
    # Chunk 0, while that of the others comes.
    assert open_at_once(odd_profile(within=True)) == ([0, 1, 2, 2, 3], [3, 2, 2, 1, 0])
    # Half of chunk 1 gets no gradient.
    assert open_at_once(replace(odd_profile(), calls=(0, 1, 3))) == ([0, 1, 2, 2, 3], [3, 3, 2, 1, 0])


def test_a_region_is_that_of_the_chunk_that_is_complete_for_the_longest_time() -> None:
    profile = odd_profile()
    regions = memory_of(profile).gradients
    assert [regions.n_on_host(n_persist) for n_persist in range(5)] == [3, 0, 0, 0, 0]
    # By the order of gradients: of 2 and 3, of 1 in two parts, of 0.
    assert regions.handed_on(0, 3) == [(4, 2)]
    assert regions.handed_on(0, 0) == regions.handed_on(1, 3) == []
    longer = make_profile(6)
    assert memory_of(longer).gradients.handed_on(1, 3) == [(3, 5), (4, 4)]
    # What may be held until the end gives no region to others.
    inner = tuple(replace(unit, within=(3,) if unit.name in ("u4", "u5") else ()) for unit in longer.units)
    held = memory_of(replace(longer, units=inner)).gradients
    assert held.n_on_host(0) == 3
    assert held.handed_on(0, 3) == [(3, 5), (4, 4), (5, 2)]


def test_frozen_chunks_have_no_gradient() -> None:
    profile = odd_profile(within=True)
    frozen = replace(profile, parameters=tuple(replace(record, group=-1) for record in profile.parameters))
    assert open_at_once(frozen) == ([0] * 5, [0] * 5)


def test_gradients_take_two_bytes_a_parameter_only_while_there_is_room() -> None:
    profile = make_profile(50)
    tight, roomy = (replace(MACHINE, host_bytes=size) for size in (50 * N * 12 + 12 * N, 50 * N * 15))
    for hardware, inside, least, taken in (
        (tight, True, 12.08, 12.20),
        (roomy, True, 12.08, 14.0),
        (tight, False, 14.0, 14.0),
        (roomy, False, 14.0, 14.0),
    ):
        memory = memory_of(profile, hardware, inside=inside)
        activations = memory.activations(block_modes(50, 0, 50))
        beside = memory.least_host_bytes(50, 0)
        assert (memory.least_host_bytes(0, 0) - beside) / 50 / N == pytest.approx(least)
        assert (memory.host_bytes(placed(0, 1), activations) - beside) / 50 / N == pytest.approx(taken)
        # On the device they share one, wherever there are more.
        device = memory.static_bytes(50, 0) - memory.static_bytes(0, 0) + memory.static_parts(0, 0)["gradient staging"]
        device -= memory.partial_bytes
        assert device / 50 / N == pytest.approx(12.04 if inside else 14.0)
        assert [memory.gradients.n_on_device(n) for n in (0, 1, 2, 50)] == ([0, 0, 1, 1] if inside else [0] * 4)


def test_as_many_regions_as_host_memory_has_room_for() -> None:
    profile = make_profile(8)
    profile = replace(profile, parameters=(*profile.parameters[:7], replace(profile.parameters[7], shape=(N // 4,))))
    roomy = memory_of(profile, replace(MACHINE, host_bytes=10**12))
    for n_persist, swapped_bytes in ((0, 0), (2, 5_000_000), (5, 0), (6, 0), (7, 0), (8, 0)):
        own = roomy.gradients.own_bytes(n_persist)[1]
        least_bytes, counts = roomy.least_host_bytes(n_persist, swapped_bytes), []
        states = least_bytes - min(own, 2 * 2 * N)
        for more in range(0, 9 * 2 * N, N // 2):
            memory = memory_of(profile, replace(MACHINE, host_bytes=least_bytes + more))
            n_regions = memory.n_host_regions(n_persist, swapped_bytes)
            taken = memory.host_gradient_bytes(n_persist, swapped_bytes)
            assert taken == (n_regions * 2 * N or own)
            assert states + taken <= memory.hardware.host_bytes
            if n_regions:
                assert n_regions >= 2
                assert states + min(own, taken + 2 * N) > memory.hardware.host_bytes, "there is room for more"
            counts.append(n_regions or 99)
        assert counts == sorted(counts)
        assert counts[-1] == 99
        assert counts[0] == (2 if own > 2 * 2 * N else 99)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_with_clipping_fits_inside_backward() -> None:
    profile = make_profile(50)
    hardware = replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=int(50 * N * 12.3))
    with pytest.raises(PlanError, match="host memory"):
        search(profile, hardware, chunk_elements=N)
    plan = search(profile, hardware, chunk_elements=N, step_during_backward=True)
    assert plan.n_host_gradient >= 2
    assert plan.host_bytes <= hardware.host_bytes
    assert str(plan).endswith(f" n_host_gradient={plan.n_host_gradient}")
    assert Plan.from_json(plan.to_json()) == plan
    assert check(plan, profile, hardware, step_during_backward=True) == plan
    # They are facts of the machine at hand: with more memory there are more, and with clipping none.
    wider = replace(hardware, host_bytes=hardware.host_bytes + 10 * 2 * N)
    assert check(plan, profile, wider, step_during_backward=True).n_host_gradient == plan.n_host_gradient + 10
    roomy = check(plan, profile, replace(hardware, device_bytes=10**9, host_bytes=10**12))
    assert (roomy.n_host_gradient, roomy.n_device_gradient) == (0, 0)


def test_all_chunks_on_the_device_share_one_region() -> None:
    profile = make_profile(50, saved=1000)
    for inside, per_parameter in ((True, 12.04), (False, 14.0)):
        room = int(50 * N * per_parameter) + 200 * 1024**2
        hardware = replace(MACHINE, device_bytes=room, host_bytes=10**12)
        plan = search(profile, hardware, chunk_elements=N, step_during_backward=inside)
        assert (plan.n_persist, plan.n_device_gradient) == (50, int(inside))
        if inside:
            assert search(profile, hardware, chunk_elements=N).n_persist < 50


def test_a_deeper_model_fits_inside_backward() -> None:
    hardware = replace(MACHINE, device_bytes=300 * 1024**2, host_bytes=600_000_000)
    clipped, inside = (
        largest(lambda layers: make_profile(layers, saved=1000), hardware, step_during_backward=mode)
        for mode in (False, True)
    )
    assert inside.layers > 1.12 * clipped.layers  # 14 bytes a parameter become 12 and a little
    assert inside.plan.n_host_gradient >= 2
    assert inside.plan.host_bytes <= hardware.host_bytes


def test_refusals_and_explanations_count_what_is_really_taken() -> None:
    profile = make_profile(12)
    with pytest.raises(PlanError) as raised:
        search(profile, replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=10**8), step_during_backward=True)
    assert raised.value.where == "host"
    enough = raised.value.needed_bytes
    tight = replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=enough)
    plan = search(profile, tight, step_during_backward=True)
    assert plan.host_bytes == enough
    with pytest.raises(PlanError):
        search(profile, replace(tight, host_bytes=enough - 1), step_during_backward=True)
    why = explain(plan, profile, tight, step_during_backward=True)
    assert sum(why.host_bytes.values()) == 2 * plan.host_bytes  # the whole, and its parts
    assert why.host_bytes["gradients"] == plan.n_host_gradient * plan.chunk_elements * 2
    device = replace(tight, device_bytes=600 * 1024**2)
    plan = search(profile, device, step_during_backward=True)
    parts = explain(plan, profile, device, step_during_backward=True).device_bytes
    assert plan.n_device_gradient == 1 < plan.n_persist
    assert sum(parts.values()) == 2 * plan.device_bytes
    assert parts["gradients of persistent chunks"] == plan.chunk_elements * 2
    assert parts["persistent chunks"] == plan.n_persist * plan.chunk_elements * 12


def test_the_frontier_begins_with_the_least_that_works_inside_backward() -> None:
    profile = make_profile(8)
    hardware = replace(MACHINE, device_bytes=400 * 1024**2, host_bytes=int(7 * N * 12.5))
    limits = [
        frontier(profile, hardware, n_limits=3, step_during_backward=mode).points[0].device_limit_bytes
        for mode in (False, True)
    ]
    assert limits[1] < limits[0]  # more of the states have room on the host
    search(profile, replace(hardware, device_bytes=limits[1]), step_during_backward=True)
    with pytest.raises(PlanError):
        search(profile, replace(hardware, device_bytes=limits[1] - 1), step_during_backward=True)


# -- time --------------------------------------------------------------------------------------------------------------


def test_two_regions_make_backward_wait_as_worked_out_by_hand() -> None:
    profile, modes = make_profile(4), (NONE,) * 4
    shared = RuntimeModel(with_regions(profile, 1, 2)).timeline(modes, placed(1, 3))
    # The third gradient waits for the first one's update; after backward two more, the upload of the last of them and
    # the forward of three blocks.
    assert shared.backward_end_ms - shared.forward_end_ms == pytest.approx(6.0 + MOVE + UPDATE + 6.0, abs=1e-3)
    assert shared.step_ms == pytest.approx(6.0 + MOVE + 3 * UPDATE + MOVE + 3 * 6.0, abs=1e-3)
    offloads = {one.name: one.start_ms for one in shared.operations if one.lane == DOWN}
    assert offloads["gradients 1"] - shared.forward_end_ms == pytest.approx(6.0 + MOVE + UPDATE, abs=1e-3)
    # Each with its own: nothing waits, and the host updates what forward needs first one update earlier.
    own = RuntimeModel(with_regions(profile, 1, 0)).timeline(modes, placed(1, 3))
    assert own.backward_end_ms - own.forward_end_ms == pytest.approx(24.0, abs=1e-3)
    assert own.step_ms == pytest.approx(6.0 + MOVE + 3 * UPDATE + MOVE + 2 * 6.0, abs=1e-3)


def test_nothing_is_issued_while_the_engine_waits() -> None:
    profile = make_profile(4)
    found = RuntimeModel(with_regions(profile, 0, 2)).timeline((NONE,) * 4, placed(0, 1))
    # With a single buffer every upload is issued when its block's turn comes.
    waited = 6.0 + MOVE + UPDATE
    uploads = [one for one in found.operations if one.name == "weights 0" and one.start_ms > found.forward_end_ms]
    assert [one.start_ms - found.forward_end_ms for one in uploads] == [pytest.approx(waited, abs=1e-3)]


def test_an_update_that_a_gradient_waits_for_is_the_hosts_however_fast_the_gpu_would_be() -> None:
    profile = make_profile(4)
    memory = with_regions(profile, 0, 2, streamed_adam_gparams=0.5)
    found = RuntimeModel(memory).timeline((NONE,) * 4, placed(0, 4))
    update = next(one for one in found.operations if one.lane == HOST and one.name == "speculative update 3")
    offload = next(one for one in found.operations if one.name == "gradients 1" and one.start_ms > update.start_ms)
    assert offload.start_ms == update.end_ms > found.forward_end_ms + UPDATE
    # No gradient waits for the updates of chunks 0 and 1. The GPU makes the second, which the host would make last.
    assert [one.name for one in found.operations if one.lane == STREAM and one.start_ms > 0] == ["update 1"]


def random_step(
    draw: random.Random, *, contention: bool, parts: int = 1, streams: bool = False
) -> tuple[MemoryModel, tuple[BlockMode, ...], int, int]:
    """A model of up to 9 blocks on a machine with room for every gradient; block modes, n_persist, n_buffer."""
    n = draw.choice([3, 5, 9])
    profile = make_profile(
        n, forward=draw.uniform(0.1, 5), backward=draw.uniform(0.1, 9), saved=draw.choice([10**5, 10**7]), parts=parts
    )
    link = draw.choice([0.5, 1.0, 5.0])
    hardware = replace(
        MACHINE,
        host_bytes=10**12,
        h2d_gbps=link,
        d2h_gbps=link * draw.choice([0.5, 1.0]),
        bidirectional_gbps=(1.7 if contention else 2.1) * link,
        host_dram_gbps=3.0 if contention else 1e6,
        host_adam_gparams=draw.choice([0.05, 0.2, 1.0]),
        streamed_adam_gparams=draw.choice([0.03, 0.1]) if streams else None,
    )
    modes = tuple(draw.choice([NONE, BlockMode.CKPT, SWAP]) for _ in range(n))
    memory, n_persist = memory_of(profile, hardware), draw.randint(0, n * parts)
    return memory, modes, n_persist, draw.randint(memory.least_buffers(n_persist), n * parts - n_persist)


def with_more_and_more(
    roomy: MemoryModel, n_persist: int, modes: tuple[BlockMode, ...]
) -> list[tuple[int, MemoryModel]]:
    """From the least regions to none, for all have their own."""
    found: list[tuple[int, MemoryModel]] = []
    host_bytes = roomy.least_host_bytes(n_persist, roomy.swapped_bytes(modes))
    while not found or found[-1][0]:
        memory = memory_of(roomy.profile, replace(roomy.hardware, host_bytes=host_bytes))
        found.append((memory.n_host_regions(n_persist, memory.swapped_bytes(modes)), memory))
        host_bytes += roomy.layout.gradient_elements(0)[0] * roomy.profile.element_bytes
    return found


def test_more_regions_make_backward_shorter_and_hardly_ever_a_step_longer() -> None:
    draw = random.Random(0)
    helped, longer, n_steps = 0, 0, 0
    for _ in range(60):
        roomy, modes, n_persist, n_buffer = random_step(draw, contention=False)
        update_ms = N / roomy.hardware.host_adam_gparams / 1e6
        found = [
            RuntimeModel(memory).timeline(modes, placed(n_persist, n_buffer))
            for _, memory in with_more_and_more(roomy, n_persist, modes)
        ]
        assert found[-1] == RuntimeModel(roomy).timeline(modes, placed(n_persist, n_buffer))
        for fewer, more in pairwise(found):
            fewer_ms, more_ms = (one.backward_end_ms - one.forward_end_ms for one in (fewer, more))
            assert more_ms <= fewer_ms * (1 + 1e-9)
            # A shorter backward may end just behind the begin of an update that the next forward needs last.
            assert more.step_ms < fewer.step_ms + update_ms
            longer += more.step_ms > fewer.step_ms * (1 + 1e-9)
            helped += more.step_ms < 0.99 * fewer.step_ms
            n_steps += 1
    assert helped > 10 * longer
    assert longer < 0.02 * n_steps


def lanes_of(found: Timeline) -> dict[int, list[tuple[float, float]]]:
    lanes = defaultdict(list)
    for operation in found.operations:
        lanes[operation.lane].append((operation.start_ms, operation.end_ms))
    return lanes


def test_timelines_name_every_update_once_and_do_one_thing_at_a_time() -> None:
    draw = random.Random(1)
    waited = streamed = 0
    for _ in range(60):
        roomy, modes, n_persist, n_buffer = random_step(
            draw, contention=True, parts=draw.choice([1, 2]), streams=draw.random() < 0.5
        )
        n_chunks = len(roomy.layout.chunks)
        for n_regions, memory in with_more_and_more(roomy, n_persist, modes):
            runtime = RuntimeModel(memory)
            found = runtime.timeline(modes, placed(n_persist, n_buffer))
            assert found.step_ms == runtime.step_ms(modes, placed(n_persist, n_buffer))
            for intervals in lanes_of(found).values():
                assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(sorted(intervals)))
            updates = [
                one
                for one in found.operations
                if one.lane in (HOST, STREAM) and one.end_ms > found.forward_end_ms + 1e-9
            ]
            streamed += any(one.lane == STREAM for one in updates)
            named = Counter(int(one.name.split()[-1]) for one in updates)
            assert named == Counter(range(n_persist, n_chunks))
            # A gradient's offload begins when there is a region for it: never are more taken than there are.
            offloads = {int(one.name.split()[-1]): one for one in found.operations if one.name.startswith("gradients")}
            ends = {int(one.name.split()[-1]): one.end_ms for one in updates}
            for offload in offloads.values():
                taken = [at for at, one in offloads.items() if one.start_ms <= offload.start_ms < ends[at] - 1e-9]
                assert len(taken) <= (n_regions or n_chunks)
            gpu = [one for one in found.operations if one.lane == GPU and one.start_ms >= found.forward_end_ms]
            for first, second in pairwise(sorted(gpu, key=lambda one: one.start_ms)):
                room = [one for one in updates if first.end_ms + 1e-6 < one.end_ms == second.start_ms]
                waited += bool(n_regions and room)
    assert waited > 10
    assert streamed > 10
