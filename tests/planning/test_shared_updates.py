"""Updates of what lies in host memory: by the GPU as well, and of the weight alone inside backward."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, Plan, RuntimeModel, check, evaluate, pack
from protrain.planning.rates import staging_bytes
from protrain.planning.sharing import Waiting, next_for_gpu
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, Timeline
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import MACHINE, MOVE_MS, N, chain, model_of, placed

NONE = BlockMode.NONE
SLOW = replace(MACHINE, host_adam_gparams=0.0128, streamed_adam_gparams=0.00639)  # 100 ms a chunk, and just over 200
MODES = (NONE,) * 7
COMPUTE = 3.0  # ms: forward of a block


def slow_model(**options: Any) -> RuntimeModel:
    return model_of(chain(COMPUTE, 6.0, n=7), SLOW, **options)


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


def test_host_and_gpu_share_the_updates_between_norm_and_forward() -> None:
    # Chunk 0 is persistent. The host takes 1, and the GPU the first that it finishes sooner, which is 3: after 200 ms.
    # Meanwhile the host makes 2 and takes 4. Then the GPU takes 6, and the host makes 5. Both are done after 400 ms.
    shared = slow_model().step_ms(MODES, placed(1, 6))
    assert shared == pytest.approx(4 * 100.0 + MOVE_MS + COMPUTE + 7 * 6.0, rel=0.02)
    alone = slow_model(stream=False).step_ms(MODES, placed(1, 6))
    assert alone == pytest.approx(6 * 100.0 + MOVE_MS + COMPUTE + 7 * 6.0, rel=0.02)


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
    timeline = slow_model(step_during_backward=True).timeline(MODES, placed(1, 6))
    # Only the begun update is the host's without a choice. Then it makes 1, 3 and 4 while the GPU makes 2 and 5.
    assert names(timeline, HOST) == ["speculative update 6", "update 1", "update 3", "update 4"]
    assert names(timeline, STREAM) == ["update 2", "update 5"]
    in_backward = [op for op in timeline.operations if op.name.startswith("speculative update") and op.start_ms > 0]
    assert [(op.name, op.lane) for op in in_backward] == [("speculative update 6", HOST)]
    assert timeline.forward_end_ms < in_backward[0].start_ms < timeline.backward_end_ms < in_backward[0].end_ms
    alone = slow_model(step_during_backward=True, stream=False).step_ms(MODES, placed(1, 6))
    assert timeline.step_ms < 0.75 * alone


ROOMY = replace(MACHINE, host_bytes=10**12)


def with_weights(profile: ModelProfile, hardware: HardwareProfile, n_weights: int, n_persist: int) -> HardwareProfile:
    """Host memory for that many second weights of full chunks beside all that must be there, in chunks of N."""
    memory = MemoryModel(profile, ROOMY, pack(profile, N))
    room = n_weights * N * profile.element_bytes
    return replace(hardware, host_bytes=memory.least_host_bytes(n_persist, 0) + room)


def steps_of(update_ms: float, room: int = 7) -> tuple[RuntimeModel, list[float]]:
    """The model and its steps by the number of weight-only updates, with room for so many second weights.

    Of eight blocks with a forward of 2 and a backward of 20 ms, the first persistent.
    """
    profile = chain(2.0, 20.0, n=8)
    hardware = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / update_ms)
    runtime = RuntimeModel(MemoryModel(profile, with_weights(profile, hardware, room, 1), pack(profile, N)))
    return runtime, [runtime.step_ms((NONE,) * 8, weight_only(1, 7, n)) for n in range(room + 1)]


def weight_only(n_persist: int, n_buffer: int, n_speculate: int) -> Any:
    """Counts whose speculative updates compute their weight alone."""
    return placed(n_persist, n_buffer, n_speculate, n_weight_only=n_speculate)


def test_deferred_updates_come_last_and_hold_up_the_next_gradients() -> None:
    runtime, steps = steps_of(34.0)
    found = runtime.timeline((NONE,) * 8, weight_only(1, 7, 6))
    assert found.step_ms == steps[6]
    begun = [one for one in found.operations if one.lane == HOST and one.start_ms > 0.0]
    order = [one.name for one in begun]
    deferred = [f"deferred update {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[:7] == ["update 7", *deferred]
    assert order[7:13] == [f"speculative weight {chunk}" for chunk in (6, 5, 4, 3, 2, 1)]
    assert order[13:] == order[:7]
    for one in begun:
        share = 16 / 26 if one.name.startswith("speculative weight") else 1.0
        assert one.end_ms - one.start_ms == pytest.approx(34.0 * share, rel=1e-6)
    # A backward takes 20 ms and an update 34: from the third gradient on each is flattened, and then the device waits.
    down = {one.name: one.start_ms for one in found.operations if one.lane == DOWN}
    done = {one.name: one.end_ms for one in begun[:7]}
    assert down["gradients 6"] > done["deferred update 6"]
    device = [one for one in found.operations if one.lane == GPU]
    for chunk in (5, 4, 3, 2, 1):
        end = done[f"deferred update {chunk}"]
        assert down[f"gradients {chunk}"] == end
        at = next(at for at, one in enumerate(device) if one.name == f"flatten {chunk}")
        assert device[at].end_ms < end
        assert device[at + 1].start_ms == end


def test_what_a_weight_takes_is_calibrated() -> None:
    """Calibration has bf16; another dtype takes as much longer as it moves more bytes."""
    measured = replace(MACHINE, host_adam_weight_gparams=MACHINE.host_adam_gparams * 1.25)  # 1.625 by its bytes
    for dtype, share in (
        ("bfloat16", 0.8),
        ("float16", 16 / 28 / (16 / 26) * 0.8),
        ("float32", 20 / 28 * 26 / 16 * 0.8),
    ):
        profile = replace(chain(2.0, 20.0, n=8), dtype=dtype)
        memory = MemoryModel(profile, measured, pack(profile, N))
        assert RuntimeModel(memory).steps.weight_share == pytest.approx(share)
