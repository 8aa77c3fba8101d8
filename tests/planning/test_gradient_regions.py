"""Regions that gradients share inside backward: how many, what they save, and what waiting for one costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, Plan, RuntimeModel, check, explain, pack, search
from protrain.planning.gradient_regions import GradientRegions
from protrain.planning.timeline import DOWN
from protrain.profiler.model_profile import ModelProfile, ParameterRecord
from tests.planning.models import MACHINE, MOVE_MS, N, chain, placed

NONE = BlockMode.NONE
SLOW_MS = 20.0  # one chunk on the host
SLOW = replace(MACHINE, host_adam_gparams=0.064, bidirectional_gbps=2.1)


def memory_of(profile: ModelProfile, hardware: HardwareProfile = SLOW, *, inside: bool = True) -> MemoryModel:
    return MemoryModel(profile, hardware, pack(profile, N), step_during_backward=inside)


def with_regions(profile: ModelProfile, n_persist: int, n_regions: int, **changes: Any) -> MemoryModel:
    """On a machine whose host memory has room for so many regions (0: for all gradients) and no byte more."""
    roomy = memory_of(profile, replace(SLOW, host_bytes=10**12, **changes))
    most = roomy.least_host_bytes(n_persist, 0) - roomy.gradients.host_bytes(n_persist, 2)
    host_bytes = most + roomy.gradients.host_bytes(n_persist, n_regions)
    memory = memory_of(profile, replace(roomy.hardware, host_bytes=host_bytes))
    assert memory.n_host_regions(n_persist, 0) == n_regions
    return memory


def odd_profile(*, within: bool = False) -> ModelProfile:
    """Chunk 0 is of u0, chunk 1 half of u1 and half of u2, chunks 2 and 3 of u3. The others may be called by u0."""
    sizes = [N, N // 2, N // 2, N, N]
    profile = chain(6.0, 6.0, n=4)
    units = tuple(
        replace(unit, parameters=members, within=(0,) if within and unit.name != "u0" else ())
        for unit, members in zip(profile.units, ((0,), (1,), (2,), (3, 4)), strict=True)
    )
    parameters = tuple(ParameterRecord(name=f"p{i}", shape=(size,), group=0) for i, size in enumerate(sizes))
    return replace(profile, parameters=parameters, units=units)


def open_at_once(profile: ModelProfile) -> tuple[list[int], list[int]]:
    layout = pack(profile, N)
    assert [chunk.elements for chunk in layout.chunks] == [N] * 4
    regions = GradientRegions(profile, SLOW, layout, step_during_backward=True)
    return regions.open_on_device, regions.open_on_host


def test_a_chunk_is_open_from_its_first_gradient_to_its_last() -> None:
    # Turns of backward yield {2, 3}, {1}, {1}, {0}.
    assert open_at_once(odd_profile()) == ([0, 1, 1, 1, 2], [2, 2, 2, 1, 0])


def test_chunks_that_may_be_held_or_never_complete_are_open_all_the_time() -> None:
    # Chunk 0, while that of the others comes.
    assert open_at_once(odd_profile(within=True)) == ([0, 1, 2, 2, 3], [3, 2, 2, 1, 0])
    # Half of chunk 1 gets no gradient.
    assert open_at_once(replace(odd_profile(), calls=(0, 1, 3))) == ([0, 1, 2, 2, 3], [3, 3, 2, 1, 0])


def test_what_does_not_fit_with_clipping_fits_inside_backward() -> None:
    profile = chain(6.0, 6.0, n=50)
    hardware = replace(SLOW, device_bytes=200 * 1024**2, host_bytes=int(50 * N * 12.3))
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


def test_refusals_and_explanations_count_what_is_really_taken() -> None:
    profile = chain(6.0, 6.0, n=12)
    with pytest.raises(PlanError) as raised:
        search(profile, replace(SLOW, device_bytes=200 * 1024**2, host_bytes=10**8), step_during_backward=True)
    assert raised.value.where == "host"
    enough = raised.value.needed_bytes
    tight = replace(SLOW, device_bytes=200 * 1024**2, host_bytes=enough)
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


def test_two_regions_make_backward_wait_as_worked_out_by_hand() -> None:
    profile, modes = chain(6.0, 6.0, n=4), (NONE,) * 4
    shared = RuntimeModel(with_regions(profile, 1, 2)).timeline(modes, placed(1, 3))
    # The third gradient waits for the first one's update; after backward two more, the upload of the last of them and
    # the forward of three blocks.
    assert shared.backward_end_ms - shared.forward_end_ms == pytest.approx(6.0 + MOVE_MS + SLOW_MS + 6.0, abs=1e-3)
    assert shared.step_ms == pytest.approx(6.0 + MOVE_MS + 3 * SLOW_MS + MOVE_MS + 3 * 6.0, abs=1e-3)
    offloads = {one.name: one.start_ms for one in shared.operations if one.lane == DOWN}
    assert offloads["gradients 1"] - shared.forward_end_ms == pytest.approx(6.0 + MOVE_MS + SLOW_MS, abs=1e-3)
    # Each with its own: nothing waits, and the host updates what forward needs first one update earlier.
    own = RuntimeModel(with_regions(profile, 1, 0)).timeline(modes, placed(1, 3))
    assert own.backward_end_ms - own.forward_end_ms == pytest.approx(24.0, abs=1e-3)
    assert own.step_ms == pytest.approx(6.0 + MOVE_MS + 3 * SLOW_MS + MOVE_MS + 2 * 6.0, abs=1e-3)
