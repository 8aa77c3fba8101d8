"""Regions that gradients of persistent chunks share inside backward: how many, and what they save."""

from __future__ import annotations

from dataclasses import replace

from protrain.planning import Plan, check, explain, pack, search
from protrain.planning.gradient_regions import shared_regions
from protrain.profiler.model_profile import ModelProfile, ParameterRecord
from tests.planning.models import MACHINE, N, chain


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


def regions(profile: ModelProfile) -> list[int]:
    layout = pack(profile, N)
    assert [chunk.elements for chunk in layout.chunks] == [N] * 4
    return shared_regions(profile, MACHINE, layout)


def test_there_are_as_many_as_gradients_are_open_at_once_if_that_saves_memory() -> None:
    # Turns of backward yield {2, 3}, {1}, {1}, {0}.
    assert regions(odd_profile()) == [0, 0, 1, 1, 2]


def test_chunks_that_may_be_held_or_never_complete_are_open_all_the_time() -> None:
    # Chunk 0, while that of the others comes.
    assert regions(odd_profile(within=True)) == [0, 0, 0, 2, 3]
    # Half of chunk 1 gets no gradient.
    assert regions(replace(odd_profile(), calls=(0, 1, 3))) == [0, 0, 0, 2, 3]


def test_a_plan_says_how_many_there_are_and_explanations_count_them() -> None:
    profile = chain(6.0, 6.0, n=12)
    slow = replace(MACHINE, host_adam_gparams=0.064, device_bytes=600 * 1024**2, host_bytes=10**12)
    plan = search(profile, slow, step_during_backward=True)
    assert plan.n_device_gradient == 1 < plan.n_persist
    assert Plan.from_json(plan.to_json()) == plan
    assert check(plan, profile, slow, step_during_backward=True) == plan
    assert check(plan, profile, replace(slow, device_bytes=10**10)).n_device_gradient == 0, "with clipping"
    parts = explain(plan, profile, slow, step_during_backward=True).device_bytes
    assert sum(parts.values()) == 2 * plan.device_bytes, "the whole, and its parts"
    assert parts["gradients of persistent chunks"] == plan.chunk_elements * 2
    assert parts["persistent chunks"] == plan.n_persist * plan.chunk_elements * 12
