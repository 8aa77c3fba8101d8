"""Updates of what lies in host memory: by the GPU as well, of the weight alone, and inside backward."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from protrain.common.errors import PlanError
from protrain.planning import BlockMode, Models, Plan, check, evaluate, explain, pack, search
from protrain.planning.gradient_regions import GradientRegions
from protrain.planning.rates import staging_bytes
from protrain.planning.sharing import Waiting, next_for_gpu
from protrain.planning.timeline import DOWN, HOST, STREAM, Timeline
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import MACHINE, N, chain, model_of, of_units, placed

NONE = BlockMode.NONE
SLOW = replace(MACHINE, host_adam_gparams=0.0128, streamed_adam_gparams=0.00639)  # 100 ms a chunk, and just over 200
MODES = (NONE,) * 7
COMPUTE = 3.0  # ms: forward of a block


def slow_model(*, inside: bool = False, **options: Any) -> Models:
    return model_of(replace(chain(COMPUTE, 6.0, n=7), step_during_backward=inside), SLOW, **options)


def waiting(*updates: tuple[float, float, float], upload_ms: float = 0.0, states_ms: float = 0.0) -> list[Waiting]:
    """Updates by how long the host and the GPU take for them, and when the forward needs them, on a fast link."""
    return [Waiting(*update, upload_ms, states_ms) for update in updates]


def test_a_host_that_the_gpu_slows_down_makes_others_later() -> None:
    # The last update is late by 10. On the GPU it is late by 5, and the host does the others meanwhile: at 90% of its
    # rate they are late by 3.3, and at 75% by 8.75.
    updates = waiting((10, inf, 10), (10, inf, 20), (10, inf, 30), (10, 35, 30))
    assert next_for_gpu(updates, 0.0, 0.0, 0.9) == 3
    assert next_for_gpu(updates, 0.0, 0.0, 0.75) is None


def test_states_on_a_slow_link_keep_weights_from_it() -> None:
    # The host ends at 10, 20, 30, 40, and forward needs another chunk every 5: it waits for the last until 40, 20 more
    # than it would. If the GPU does that one by 32, the host is done at 30, and forward waits for 15.
    updates = (10, inf, 5), (10, inf, 10), (10, inf, 15), (10, 32, 20)
    assert next_for_gpu(waiting(*updates, upload_ms=2, states_ms=14), 0.0, 0.0, 1.0) == 3
    # Uploads of 7 follow the states from 26 on, and the last begins at 47.
    assert next_for_gpu(waiting(*updates, upload_ms=7, states_ms=26), 0.0, 0.0, 1.0) is None
    # If no states were in their way, it would begin at 37, as the third one begins when it is updated.
    assert next_for_gpu(waiting(*updates, upload_ms=7), 0.0, 0.0, 1.0) == 3


def names(timeline: Timeline, lane: int) -> list[str]:
    """What ``lane`` does between the begin of the step and the end of its forward, in order."""
    return [op.name for op in timeline.operations if op.lane == lane and op.start_ms < timeline.forward_end_ms]


def test_the_gpu_may_help_unless_the_plan_says_otherwise_or_its_rate_is_unknown() -> None:
    profile = chain(COMPUTE, 6.0, n=7)
    counts: dict[str, Any] = {"n_persist": 1, "n_buffer": 6, "n_swap": 0, "n_ckpt": 0, "chunk_elements": N}
    plan, without = (evaluate(profile, SLOW, **counts, stream=stream) for stream in (None, False))
    assert (plan.stream, without.stream) == (True, False)
    assert plan.step_ms < without.step_ms
    assert plan.device_bytes == without.device_bytes + staging_bytes(N)
    for found in (plan, without):
        assert check(found, profile, SLOW) == found
        assert Plan.from_json(found.to_json()) == found
    assert not evaluate(profile, replace(SLOW, streamed_adam_gparams=None), **counts).stream
    assert not evaluate(replace(profile, device="cpu"), replace(SLOW, device_type="cpu"), **counts).stream
    resident: dict[str, Any] = {**counts, "n_persist": 7, "n_buffer": 0}
    nothing_away, alone = (evaluate(profile, SLOW, **resident, stream=stream) for stream in (None, False))
    assert nothing_away.device_bytes == alone.device_bytes, "there is nothing to update in host memory"


def test_inside_backward_updates_that_the_host_begins_there_are_its_own_and_the_rest_is_shared() -> None:
    # A backward of 42 ms is over while the host makes the first update, of the chunk whose gradient arrives first.
    timeline = slow_model(inside=True).timeline(MODES, placed(1, 6))
    # Only the begun update is the host's without a choice. Then it makes 1, 3 and 4 while the GPU makes 2 and 5.
    assert names(timeline, HOST) == ["speculative update 6", "update 1", "update 3", "update 4"]
    assert names(timeline, STREAM) == ["update 2", "update 5"]
    in_backward = [op for op in timeline.operations if op.name.startswith("speculative update") and op.start_ms > 0]
    assert [(op.name, op.lane) for op in in_backward] == [("speculative update 6", HOST)]
    assert timeline.forward_end_ms < in_backward[0].start_ms < timeline.backward_end_ms < in_backward[0].end_ms
    alone = slow_model(inside=True, stream=False).step_ms(MODES, placed(1, 6))
    assert timeline.step_ms < 0.75 * alone


def test_deferred_updates_come_last_and_hold_up_the_next_gradients() -> None:
    """A backward takes 20 ms and a whole update 34, so each gradient from the third on waits for a deferred one."""
    profile, hardware = chain(2.0, 20.0, n=8), replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 34.0)
    counts = placed(1, 7, n_speculate=6, n_weight_only=6)
    found = model_of(profile, hardware).timeline((NONE,) * 8, counts)
    begun = [one for one in found.operations if one.lane == HOST and one.start_ms > 0.0]
    updates = ["update 7", *(f"deferred update {chunk}" for chunk in (6, 5, 4, 3, 2, 1))]
    weights = [f"speculative weight {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert [one.name for one in begun] == [*updates, *weights, *updates]
    for one in begun:
        share = 16 / 26 if one.name in weights else 1.0
        assert one.end_ms - one.start_ms == pytest.approx(34.0 * share, rel=1e-6)
    down = {one.name: one.start_ms for one in found.operations if one.lane == DOWN}
    done = {one.name: one.end_ms for one in begun[:7]}
    assert down["gradients 6"] > done["deferred update 6"]
    for chunk in (5, 4, 3, 2, 1):
        assert down[f"gradients {chunk}"] == done[f"deferred update {chunk}"]


# -- regions that gradients share inside backward ----------------------------------------------------------------------


def test_what_does_not_fit_with_clipping_fits_inside_backward() -> None:
    profile = chain(6.0, 6.0, n=50)
    hardware = replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=int(50 * N * 12.3))
    with pytest.raises(PlanError, match="host memory"):
        search(profile, hardware, chunk_elements=N)
    inside = replace(profile, step_during_backward=True)
    plan = search(inside, hardware, chunk_elements=N)
    assert plan.n_host_gradient >= 2
    assert str(plan).endswith(f" n_host_gradient={plan.n_host_gradient}")
    assert check(plan, inside, hardware) == plan
    # They are facts of the machine at hand: with more memory there are more, and with clipping none.
    wider = replace(hardware, host_bytes=hardware.host_bytes + 10 * 2 * N)
    assert check(plan, inside, wider).n_host_gradient == plan.n_host_gradient + 10
    roomy = check(plan, profile, replace(hardware, device_bytes=10**9, host_bytes=10**12))
    assert (roomy.n_host_gradient, roomy.n_device_gradient) == (0, 0)


def test_refusals_and_explanations_count_the_regions_that_are_really_taken() -> None:
    profile = replace(chain(6.0, 6.0, n=12), step_during_backward=True)
    with pytest.raises(PlanError) as raised:
        search(profile, replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=10**8))
    assert raised.value.where == "host"
    tight = replace(MACHINE, device_bytes=200 * 1024**2, host_bytes=raised.value.needed_bytes)
    plan = search(profile, tight)
    assert plan.host_bytes == tight.host_bytes
    with pytest.raises(PlanError):
        search(profile, replace(tight, host_bytes=tight.host_bytes - 1))
    gradients = explain(plan, profile, tight).host_bytes["gradients"]
    assert gradients == plan.n_host_gradient * plan.chunk_elements * 2
    device = replace(tight, device_bytes=600 * 1024**2)
    plan = search(profile, device)
    parts = explain(plan, profile, device).device_bytes
    assert plan.n_device_gradient == 1 < plan.n_persist
    assert parts["gradients of persistent chunks"] == plan.chunk_elements * 2
    assert parts["persistent chunks"] == plan.n_persist * plan.chunk_elements * 12


def test_a_gradient_is_open_from_its_first_part_to_its_last_or_as_long_as_parts_may_come() -> None:
    """Chunk 0 is of u0, chunk 1 half of u1 and half of u2, chunks 2 and 3 of u3. By the number of persistent chunks."""
    usual = of_units([(0, [(N, 0)]), (1, [(N // 2, 0)]), (2, [(N // 2, 0)]), (3, [(N, 0), (N, 0)])])

    def most_open(profile: ModelProfile) -> tuple[list[int], list[int]]:
        profile = replace(profile, step_during_backward=True)
        regions = GradientRegions(profile, MACHINE, pack(profile, N))
        return regions.open_on_device, regions.open_on_host

    # Turns of backward yield {2, 3}, {1}, {1}, {0}.
    assert most_open(usual) == ([0, 1, 1, 1, 2], [2, 2, 2, 1, 0])
    # The gradient of chunk 0 comes at any time, as its unit encloses the others.
    within = tuple(replace(unit, within=(0,) if unit.name != "u0" else ()) for unit in usual.units)
    assert most_open(replace(usual, units=within)) == ([0, 1, 2, 2, 3], [3, 2, 2, 1, 0])
    # Half of chunk 1 gets no gradient.
    assert most_open(replace(usual, calls=(0, 1, 3))) == ([0, 1, 2, 2, 3], [3, 3, 2, 1, 0])
