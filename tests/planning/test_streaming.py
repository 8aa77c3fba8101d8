"""Updates by the device of what lies in host memory: which chunks, how long they take, what they leave to others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from protrain.hardware import HardwareProfile
from protrain.hardware.profile import Contention
from protrain.planning import BlockMode, RuntimeModel, pack
from protrain.planning.layout import streamed_chunks, updated_chunks
from protrain.planning.rates.contention import OTHERS, rates
from protrain.planning.rates.streaming import staging_bytes
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP
from tests.planning.counts import placed
from tests.planning.machines import H100
from tests.planning.test_runtime import MACHINE, MOVE, N, make_profile, model_of

NONE = BlockMode.NONE
SLOW = replace(MACHINE, host_adam_gparams=0.0128, streamed_adam_gparams=0.0064)  # 100 and 200 ms a chunk
MODES = (NONE,) * 7
COMPUTE = 3.0  # ms: forward of a block


def slow_model(**options: Any) -> RuntimeModel:
    return model_of(make_profile(COMPUTE, 6.0, n=7), SLOW, **options)


def test_the_last_of_every_few_is_streamed() -> None:
    assert streamed_chunks(range(3, 12), 3) == [5, 8, 11]
    assert streamed_chunks([1, 2, 5, 7, 8], 2) == [5, 8]
    assert streamed_chunks(range(4), 4) == [0, 1, 2, 3]
    assert streamed_chunks(range(4), 0) == streamed_chunks([], 0) == []
    for count in range(1, 20):
        for n_stream in range(count + 1):
            found = streamed_chunks(range(count), n_stream)
            assert len(set(found)) == n_stream
            # Of the first so many it has its even share at most.
            for first in range(count + 1):
                assert -1 < sum(chunk < first for chunk in found) - first * n_stream / count <= 0 or not n_stream


def test_chunks_that_no_unit_uses_and_frozen_ones_are_not_updated() -> None:
    profile = make_profile(1.0, 1.0)
    frozen = tuple(replace(record, group=-1 if at == 1 else 0) for at, record in enumerate(profile.parameters))
    found = updated_chunks(replace(profile, parameters=frozen, calls=(0, 1, 3)), pack(profile, N))
    assert found == [0, 1, 3], "the layout says what is trainable"
    partly = replace(profile, parameters=frozen, calls=(0, 1, 3))
    layout = pack(partly, N)
    assert [layout.chunks[chunk].trainable for chunk in updated_chunks(partly, layout)] == [True, True]


def test_host_and_device_share_the_updates_between_norm_and_forward() -> None:
    model = slow_model()
    # Chunk 0 is persistent; 1, 2, 4, 5 are the host's, 3 and 6 the device's, which takes twice as long for one.
    found = model.step_ms(MODES, placed(1, 6, 0, 2))
    assert found == pytest.approx(4 * 100.0 + MOVE + COMPUTE + 7 * 6.0, rel=0.02)
    alone = model.step_ms(MODES, placed(1, 6))
    assert alone == pytest.approx(6 * 100.0 + MOVE + COMPUTE + 7 * 6.0, rel=0.02)
    # One is too few, three are too many.
    assert model.step_ms(MODES, placed(1, 6, 0, 1)) > found + 90
    assert model.step_ms(MODES, placed(1, 6, 0, 3)) > found + 190


def test_the_timeline_names_streamed_updates() -> None:
    timeline = slow_model().timeline(MODES, placed(1, 6, 0, 2))
    by_lane = {
        lane: [op.name for op in timeline.operations if op.lane == lane and op.start_ms < timeline.forward_end_ms]
        for lane in (HOST, STREAM)
    }
    assert timeline.lanes[STREAM] == "streamed updates"
    assert by_lane[STREAM] == ["update 3", "update 6"]
    assert by_lane[HOST] == ["update 1", "update 2", "update 4", "update 5"]
    assert len(slow_model().timeline(MODES, placed(1, 6)).lanes) == STREAM
    for lane in (HOST, STREAM):
        operations = [operation for operation in timeline.operations if operation.lane == lane]
        assert all(a.end_ms <= b.start_ms + 1e-9 for a, b in pairwise(operations))


def test_speculative_updates_stay_with_the_host() -> None:
    timeline = slow_model().timeline(MODES, placed(1, 6, 2, 2))
    streamed = {operation.name for operation in timeline.operations if operation.lane == STREAM}
    assert streamed == {"update 4", "update 6"}


def test_inside_backward_streamed_updates_begin_with_their_gradients() -> None:
    timeline = slow_model(update_in_backward=True).timeline(MODES, placed(1, 6, 0, 2))
    streamed = [operation for operation in timeline.operations if operation.lane == STREAM and operation.start_ms > 0]
    first = next(operation for operation in streamed if operation.name.startswith("speculative update"))
    assert first.name == "speculative update 6"
    arrived = next(op for op in timeline.operations if op.name == "gradients 6")
    assert arrived.end_ms <= first.start_ms < timeline.backward_end_ms


def test_on_a_cpu_whoever_updates_takes_as_long() -> None:
    profile = replace(make_profile(3.0, 6.0), device="cpu")
    model = model_of(profile, replace(SLOW, device_type="cpu"))
    assert model.step_ms((NONE,) * 4, placed(1, 3, 0, 1)) == model.step_ms((NONE,) * 4, placed(1, 3))


@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", 26), ("float16", 30), ("float32", 28)])
def test_wider_states_take_as_much_longer_as_they_have_bytes(dtype: str, sizes: int) -> None:
    """Calibration has bfloat16, with the gradient in host memory as here: 26 bytes a parameter in both directions."""
    model = model_of(replace(make_profile(COMPUTE, 6.0, n=7), dtype=dtype), SLOW)
    timeline = model.timeline(MODES, placed(1, 6, 0, 6))
    lengths = [operation.end_ms - operation.start_ms for operation in timeline.operations if operation.lane == STREAM]
    assert min(lengths) == pytest.approx(200.0 * sizes / 26, rel=0.01)


def left(hardware: HardwareProfile, lane: int, *beside: int) -> float:
    found = rates(hardware, 130.0, (42.0, 36.0))
    return found[lane][tuple(other in beside for other in OTHERS[lane])]


def test_the_link_is_shared_by_what_is_wanted() -> None:
    machine = replace(H100, h2d_gbps=50.0, d2h_gbps=50.0, bidirectional_gbps=80.0, host_dram_gbps=300.0, contention=())
    assert left(machine, STREAM) == left(machine, STREAM, GPU) == left(machine, STREAM, HOST) == 1.0
    # 40 GB/s a direction, of which uploads want 50 and states 42.
    assert left(machine, STREAM, UP) == left(machine, UP, STREAM) == pytest.approx(40 / 92)
    assert left(machine, DOWN, STREAM) == pytest.approx(40 / 86)
    assert left(machine, STREAM, UP, DOWN) == pytest.approx(40 / 92)
    assert left(machine, UP, STREAM, HOST, GPU, DOWN) <= left(machine, UP, STREAM)
    assert left(replace(machine, host_dram_gbps=104.0), STREAM, HOST) == pytest.approx(0.5)
    assert left(replace(machine, host_dram_gbps=200.0), HOST, STREAM) == left(
        replace(machine, host_dram_gbps=200.0), HOST, UP, DOWN
    )


def test_what_was_measured_beside_streamed_updates_counts() -> None:
    group = Contention(activities=("streamed_adam", "host_adam", "matmul"), shares=(0.7, 0.9, 0.95))
    machine = replace(
        H100, h2d_gbps=50.0, d2h_gbps=50.0, bidirectional_gbps=80.0, host_dram_gbps=300.0, contention=(group,)
    )
    assert left(machine, STREAM, HOST, GPU) == 0.7
    assert left(machine, HOST, STREAM, GPU) == 0.9
    assert left(machine, GPU, STREAM, HOST) == 0.95
    assert left(machine, STREAM, HOST) == left(machine, HOST, STREAM) == 1.0, "nothing was measured for these two alone"
    assert left(machine, STREAM, HOST, GPU, UP) == pytest.approx(40 / 92)
    assert left(machine, HOST, UP, STREAM, GPU) == 0.9


def test_beside_copies_the_link_has_what_calibration_found_for_both_ways() -> None:
    """Uploads of a 13 B LLaMA shape took 38 to 45 ms on an H100 beside streamed and host updates: 11.5 ms alone."""
    both_ways = Contention(activities=("h2d", "d2h", "host_adam"), shares=(0.6, 0.86, 0.8))
    streamed = Contention(activities=("streamed_adam", "host_adam"), shares=(0.87, 0.9))
    machine = replace(H100, h2d_gbps=54.0, d2h_gbps=54.0, bidirectional_gbps=94.0, contention=(both_ways, streamed))
    assert left(machine, UP, STREAM, HOST) == pytest.approx(0.6 * 54 / (54 + 42)), "11.5 ms become 34"
    assert left(machine, STREAM, UP, HOST) == pytest.approx(0.6 * 54 / (54 + 42))
    assert left(machine, STREAM, HOST) == 0.87
    assert left(machine, HOST, STREAM) == 0.9
    assert left(machine, HOST, STREAM, UP) == 0.8


def test_streamed_states_need_room_on_the_device() -> None:
    assert staging_bytes(N) == 2 * 18 * N, "no more than for two whole chunks"
    assert staging_bytes(100 * N) == 128 * 1024**2
