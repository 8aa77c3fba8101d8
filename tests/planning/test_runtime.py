"""The runtime model: steps that can be worked out by hand, and fetches that the engine really issues."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import protrain
from bench.planner.paper import paper_step_ms
from protrain.engine.states.chunks import Chunk
from protrain.engine.weights.buffers import BufferPool
from protrain.hardware.detection import detect
from protrain.hardware.profile import HardwareProfile
from protrain.planning import BlockMode, MemoryModel, RuntimeModel, evaluate, pack
from protrain.planning.rates import COPY_MS, ComputeTimes, compute_times
from protrain.planning.schedule import Fetches
from protrain.planning.timeline import DOWN, GPU, HOST, UP, Timeline
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord, SegmentRecord, UnitRecord
from tests.planning.counts import busy_ms, placed
from tests.planning.machines import H100

NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP
Modes = tuple[BlockMode, ...]
N = 1_280_000  # elements of a chunk: 2.56 MB of weights
MACHINE = replace(
    H100,
    contention=(),
    streamed_adam_gparams=None,
    flatten_gbps=None,
    host_adam_gparams=1.28,
    device_adam_gparams=128.0,
    device_copy_gbps=1e6,
    h2d_gbps=1.0,
    d2h_gbps=1.0,
    bidirectional_gbps=2.0,
    host_dram_gbps=1e6,
)
MOVE = 2.56  # ms: one chunk over the link
UPDATE = 1.0  # ms: one chunk on the host
DEVICE_UPDATE = 0.01


def make_profile(
    forward: float, backward: float, *, n: int = 4, saved: int = 10_000_000, parts: int = 1
) -> ModelProfile:
    """Equal blocks of a chunk each, or of some."""

    def segment(phase: str, block: int, duration: float) -> SegmentRecord:
        return SegmentRecord(phase=phase, block=block, live_bytes=0, peak_bytes=0, duration_ms=duration)

    return ModelProfile(
        model="M",
        dtype="bfloat16",
        device="cuda",
        batch_shapes={"x": (1,)},
        tokens=100,
        buffer_bytes=0,
        parameters=tuple(ParameterRecord(name=f"p{i}", shape=(N // 128, 128), group=0) for i in range(n * parts)),
        units=tuple(
            UnitRecord(name=f"u{i}", block=i, parameters=tuple(range(i * parts, (i + 1) * parts))) for i in range(n)
        ),
        calls=tuple(range(n)),
        blocks=tuple(
            BlockRecord(
                name=f"b{i}",
                saved_bytes=saved,
                saved_tensors=1,
                forward_peak_bytes=0,
                input_bytes=0,
                output_bytes=0,
                forward_ms=forward,
                backward_ms=backward,
                recompute_ms=forward,
                forward_flops=10**9,
            )
            for i in range(n)
        ),
        segments=(
            *(segment("forward", i, forward) for i in range(n)),
            *(segment("backward", i, backward + forward) for i in reversed(range(n))),
        ),
    )


def model_of(profile: ModelProfile, hardware: HardwareProfile = MACHINE, **options: Any) -> RuntimeModel:
    return RuntimeModel(MemoryModel(profile, hardware, pack(profile, N), **options))


def step_ms(profile: ModelProfile, modes: Modes, n_persist: int, n_buffer: int, **changes: Any) -> float:
    return model_of(profile, replace(MACHINE, **changes)).step_ms(modes, placed(n_persist, n_buffer))


def test_everything_resident_is_computing_and_the_device_update() -> None:
    assert step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 4, 0) == pytest.approx(4 * (9.0 + DEVICE_UPDATE), rel=1e-4)


def test_checkpointing_adds_a_forward() -> None:
    profile = make_profile(3.0, 6.0)
    assert step_ms(profile, (CKPT, CKPT, NONE, NONE), 4, 0) - step_ms(profile, (NONE,) * 4, 4, 0) == pytest.approx(6.0)


def test_frozen_chunks_stay_in_their_buffers() -> None:
    profile = make_profile(3.0, 6.0)
    frozen = tuple(replace(record, group=-1) for record in profile.parameters)
    resident = step_ms(replace(profile, parameters=frozen), (NONE,) * 4, 0, 4)
    assert resident == pytest.approx(4 * 9.0, rel=1e-4)
    assert step_ms(replace(profile, parameters=frozen), (NONE,) * 4, 0, 1) > resident + MOVE


def test_slow_blocks_hide_transfers_but_not_the_first_update() -> None:
    # Its gradient comes last: down, updated, up; the others follow under forward.
    expected = MOVE + UPDATE + MOVE + 4 * 9.0
    assert step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 0, 2) == pytest.approx(expected, rel=1e-3)
    # With a persistent chunk in front of it, that hides too.
    hidden = step_ms(make_profile(4.0, 6.0), (NONE,) * 4, 1, 2)
    assert hidden == pytest.approx(4 * 10.0 + DEVICE_UPDATE, rel=1e-3)


def test_fast_blocks_wait_for_the_link() -> None:
    fast = step_ms(make_profile(0.1, 0.2), (NONE,) * 4, 0, 2)
    # Forward: one update, every chunk up, computing of the last. Backward: two chunks are there and two come up again,
    # from the moment the first of them may take a buffer; every gradient down, after which the norm is known.
    assert 6 * MOVE + UPDATE < fast < 8 * MOVE + UPDATE + 1.5
    # More buffers save nothing, as gradients go down beside what comes up.
    assert fast == pytest.approx(step_ms(make_profile(0.1, 0.2), (NONE,) * 4, 0, 4))


def test_one_buffer_leaves_nothing_to_fetch_ahead() -> None:
    alone = step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 0, 1)
    assert alone == pytest.approx(MOVE + UPDATE + 4 * (3.0 + MOVE) + 3 * (6.0 + MOVE) + 6.0, rel=1e-3)


def test_the_host_updates_from_the_norm_to_the_last_chunk() -> None:
    slow: dict[str, Any] = {"host_adam_gparams": 0.0128}  # 100 ms a chunk
    step = step_ms(make_profile(3.0, 6.0), (NONE,) * 4, 1, 2, **slow)
    assert step == pytest.approx(3 * 100.0 + MOVE + 3.0 + 4 * 6.0, rel=1e-3)


def test_updates_in_backward_begin_with_the_first_gradient() -> None:
    profile = make_profile(6.0, 6.0)
    slow = replace(MACHINE, host_adam_gparams=0.256)  # 5 ms a chunk
    deferred = model_of(profile, slow).step_ms((NONE,) * 4, placed(1, 3))
    inside = model_of(profile, slow, update_in_backward=True).step_ms((NONE,) * 4, placed(1, 3))
    assert inside == pytest.approx(4 * 12.0 + DEVICE_UPDATE, rel=1e-3)
    assert deferred > inside + 1.0


def test_dram_is_shared_by_copies_and_the_host_update() -> None:
    profile, modes = make_profile(3.0, 6.0), (NONE,) * 4
    scarce: dict[str, Any] = {"host_adam_gparams": 0.0128, "host_dram_gbps": 0.0128 * 26}
    contended = model_of(profile, replace(MACHINE, **scarce)).timeline(modes, placed(0, 2))
    free = model_of(profile, replace(MACHINE, host_adam_gparams=0.0128)).timeline(modes, placed(0, 2))
    assert busy_ms(contended, HOST) > 1.005 * busy_ms(free, HOST)
    assert contended.step_ms > free.step_ms


def test_copies_in_both_directions_slow_each_other() -> None:
    profile = make_profile(0.1, 0.2, n=8)
    apart = step_ms(profile, (NONE,) * 8, 0, 2)
    assert step_ms(profile, (NONE,) * 8, 0, 2, bidirectional_gbps=1.0) > 1.1 * apart


def test_swapping_is_hidden_by_one_block_on_either_side() -> None:
    profile = make_profile(3.0, 6.0)
    plain = step_ms(profile, (NONE,) * 4, 4, 0)
    swapped = step_ms(profile, (SWAP, NONE, NONE, NONE), 4, 0)
    # 10 MB each way at 1 GB/s, beside 3 ms of the next forward and 6 ms of the backward before.
    assert swapped - plain == pytest.approx((10.0 + COPY_MS - 3.0) + (10.0 + COPY_MS - 6.0), rel=1e-3)


def test_on_a_cpu_everything_adds() -> None:
    profile = replace(make_profile(3.0, 6.0), device="cpu")
    step = model_of(profile, replace(MACHINE, device_type="cpu")).step_ms((NONE,) * 4, placed(0, 4))
    assert step == pytest.approx(4 * 9.0 + 4 * MOVE + 4 * MOVE + 4 * UPDATE, rel=1e-3)


@pytest.mark.parametrize("inside", [False, True])
def test_on_a_cpu_updates_are_shown_as_updates(inside: bool) -> None:
    profile = replace(make_profile(3.0, 6.0), device="cpu")
    model = model_of(profile, replace(MACHINE, device_type="cpu"), update_in_backward=inside)
    found = {op.name: op.end_ms - op.start_ms for op in model.timeline((NONE,) * 4, placed(0, 4)).operations}
    expected = {"forward": 4 * 3.0, "backward": 4 * 6.0, "copies": 8 * MOVE, "update": 4 * UPDATE}
    assert found == pytest.approx(expected, rel=1e-2)


def test_a_limit_that_a_step_keeps_changes_nothing_and_one_that_it_breaks_is_reported() -> None:
    draw = random.Random(0)
    for _ in range(300):
        n = draw.choice([3, 5, 9])
        profile = make_profile(draw.uniform(0.1, 5), draw.uniform(0.1, 9), n=n, saved=draw.choice([10**5, 10**7]))
        link = draw.choice([0.5, 1.0, 5.0])
        hardware = replace(
            MACHINE,
            h2d_gbps=link,
            d2h_gbps=link * draw.choice([0.5, 1.0]),
            bidirectional_gbps=1.7 * link,
            host_adam_gparams=draw.choice([0.05, 1.0]),
            host_dram_gbps=draw.choice([3.0, 100.0]),
            device_copy_gbps=100.0,
        )
        in_backward = draw.random() < 0.3
        runtime = model_of(profile, hardware, update_in_backward=in_backward)
        modes = tuple(draw.choice([NONE, CKPT, SWAP]) for _ in range(n))
        n_persist = draw.randint(0, n)
        n_buffer = draw.randint(min(1, n - n_persist), n - n_persist)
        n_speculate = 0 if in_backward else draw.choice([0, draw.randint(0, n - n_persist), n - n_persist])
        counts = placed(n_persist, n_buffer, n_speculate, n_weight_only=draw.randint(0, n_speculate))
        step = runtime.step_ms(modes, counts)
        assert runtime.step_ms(modes, counts, limit_ms=step * (1 + 1e-9)) == step
        for share in (0.5, 0.9, 0.999):
            assert runtime.step_ms(modes, counts, limit_ms=step * share) >= step * share * (1 - 1e-9)


def test_speculative_updates_hide_in_backward() -> None:
    profile = make_profile(1.0, 9.0, n=8)
    slow = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 6)
    runtime = model_of(profile, slow)
    steps = [runtime.step_ms((NONE,) * 8, placed(0, 8, n_speculate)) for n_speculate in range(9)]
    # Behind the norm eight updates of 6 ms hold up a forward whose uploads take less. Copies slow them anywhere.
    gain = 8 * 6.0 * UPDATE - (8 - 1) * MOVE
    assert 0.9 * gain < steps[0] - steps[8] < 1.1 * gain
    assert all(more <= fewer + 1e-9 for fewer, more in pairwise(steps))
    inside = model_of(profile, slow, update_in_backward=True)
    assert steps[8] >= inside.step_ms((NONE,) * 8, placed(0, 8)) - 1e-9


def test_chunks_that_forward_never_uses_are_neither_updated_nor_waited_for() -> None:
    profile = make_profile(1.0, 2.0, n=6)
    slow = replace(MACHINE, host_adam_gparams=0.0128)
    units = (*profile.units[:4], *(replace(unit, block=None) for unit in profile.units[4:]))
    called = tuple(segment for segment in profile.segments if segment.block is not None and segment.block < 4)
    profile = replace(profile, segments=called)
    unused = model_of(replace(profile, calls=(0, 1, 2, 3), blocks=profile.blocks[:4], units=units), slow)
    fewer = model_of(
        replace(
            profile,
            calls=(0, 1, 2, 3),
            parameters=profile.parameters[:4],
            units=profile.units[:4],
            blocks=profile.blocks[:4],
        ),
        slow,
    )
    modes = (NONE,) * 4
    for n_speculate in (0, 2):
        counts = placed(0, 3, n_speculate)
        assert unused.step_ms(modes, counts) == pytest.approx(fewer.step_ms(modes, counts))


def test_the_best_number_of_speculative_updates_may_be_less_than_all() -> None:
    # The host needs longer than backward. The speculative updates that begin in time are those of the chunks that
    # forward needs last, and the chunks that it needs first wait for them.
    runtime = model_of(make_profile(6.0, 6.0, n=8), replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 9))
    times = [runtime.step_ms((NONE,) * 8, placed(1, 7, n_speculate)) for n_speculate in range(8)]
    assert 0 < times.index(min(times)) < 7
    assert times[7] > 1.02 * min(times)


def test_speculative_updates_are_named_in_the_timeline() -> None:
    runtime = model_of(make_profile(6.0, 6.0), replace(MACHINE, host_adam_gparams=0.256))  # 5 ms a chunk
    found = runtime.timeline((NONE,) * 4, placed(1, 3, 2))
    updates = {one.name: one for one in found.operations if one.lane == HOST and one.start_ms > 0}
    assert {"speculative update 2", "speculative update 1", "update 3"} <= set(updates)
    assert updates["speculative update 2"].start_ms < found.backward_end_ms <= updates["update 3"].start_ms
    inside = model_of(make_profile(6.0, 6.0), MACHINE, update_in_backward=True).timeline((NONE,) * 4, placed(1, 3))
    assert {one.name for one in inside.operations if one.lane == HOST} == {
        f"speculative update {at}" for at in (1, 2, 3)
    }


def test_a_timeline_does_one_thing_at_a_time_on_every_lane() -> None:
    found = model_of(make_profile(1.0, 2.0, n=8)).timeline((SWAP, CKPT) * 4, placed(2, 3))
    assert isinstance(found, Timeline)
    lanes = defaultdict(list)
    for operation in found.operations:
        lanes[operation.lane].append((operation.start_ms, operation.end_ms))
    assert set(lanes) == {GPU, UP, DOWN, HOST}
    for intervals in lanes.values():
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(sorted(intervals)))
    assert busy_ms(found, GPU) <= found.step_ms
    assert 0 < found.forward_end_ms < found.backward_end_ms < found.step_ms
    assert Timeline.from_json(found.to_json()) == found


@pytest.mark.parametrize(("n_persist", "n_buffer"), [(0, 1), (0, 3), (2, 2), (3, 5), (1, 7)])
def test_predicted_fetches_are_those_of_the_engine(
    n_persist: int, n_buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randn(2, 16),)
    profile = protrain.profile(model, batch, optimizer=optimizer, device="cpu")
    hardware = detect(torch.device("cpu"), device_memory="1GiB", host_memory="1GiB")
    counts: dict[str, Any] = {"n_persist": n_persist, "n_buffer": n_buffer, "n_swap": 0, "n_ckpt": 3}
    plan = evaluate(profile, hardware, **counts, chunk_elements=256)
    issued: list[int] = []
    upload: Callable[..., None] = BufferPool._upload

    def record(self: BufferPool, buffer: Any, chunk: Chunk) -> None:
        issued.append(chunk.index)
        upload(self, buffer, chunk)

    monkeypatch.setattr(BufferPool, "_upload", record)
    wrapped, trainer = protrain.wrap(model, optimizer, example_batch=batch, device="cpu", plan=plan, progress=False)
    for _ in range(3):
        issued.clear()
        wrapped(*batch).square().mean().backward()
        trainer.step()
        trainer.zero_grad()
        trainer.state_dict()  # waits, so that no upload is late
    layout = pack(profile, 256)
    visits = [*profile.calls, *reversed(profile.calls)]
    held = [layout.unit_chunks[unit] for unit in visits]
    fetches = Fetches(visits, held, layout, [0] * (len(layout.chunks) + 1))
    predicted = [chunk for visit in fetches.of(n_persist, n_buffer) for chunk, _ in visit]
    assert sorted(issued) == sorted(predicted)


def test_times_of_another_device_are_estimated() -> None:
    profile = replace(make_profile(3.0, 6.0), device="meta")
    machine = replace(MACHINE, device_copy_gbps=3000.0, matmul_tflops=500.0)

    def times(**changes: Any) -> ComputeTimes:
        blocks = tuple(replace(block, **changes) for block in profile.blocks)
        return compute_times(replace(profile, blocks=blocks, compiled=compiled), machine)

    compiled = False
    products, traffic = times(forward_flops=10**13), times(forward_flops=0, forward_traffic_bytes=3 * 10**9)
    assert products.forward[0] == pytest.approx(0.86 * 20.0)
    assert traffic.forward[0] == pytest.approx(1.37 * 1.0)
    both = times(forward_flops=10**13, forward_traffic_bytes=3 * 10**9)
    assert both.forward[0] == pytest.approx(products.forward[0] + traffic.forward[0])
    assert both.backward[0] == pytest.approx(2.2 * both.forward[0])
    assert both.recompute[0] == pytest.approx(0.85 * both.forward[0])
    attending = {"forward_flops": 10**13, "attention_flops": 4 * 10**12}
    assert times(**attending).forward[0] == pytest.approx(0.86 * 12.0 + 1.36 * 8.0)
    assert times(**attending).recompute[0] == pytest.approx(0.85 * (0.86 * 12.0 + 1.36 * 8.0))
    assert times(**attending, recomputes_attention=False).recompute[0] == pytest.approx(0.85 * 0.86 * 12.0)
    compiled = True
    assert times(forward_flops=10**13).recompute[0] == pytest.approx(products.forward[0])
    assert compute_times(replace(profile, device="cuda"), machine).forward == (3.0,) * 4


@pytest.mark.parametrize(("words", "share"), [(50304, 1.6), (50257, 6.0)])
def test_a_head_of_odd_width_takes_long(words: int, share: float) -> None:
    """One that is tied to the embedding here, for each of its three products."""
    profile = make_profile(3.0, 6.0, n=2)
    outer = (
        ParameterRecord(name="embed", shape=(words, 64), group=0),
        ParameterRecord(name="positions", shape=(1024, 64), group=0),
    )
    unit = UnitRecord(name="", block=None, parameters=(2, 3))
    profile = replace(profile, device="meta", parameters=(*profile.parameters, *outer), units=(*profile.units, unit))
    found = compute_times(profile, MACHINE)
    product_ms = 2 * profile.tokens * words * 64 / MACHINE.matmul_tflops / 1e9
    assert (found.gap_forward[-1], found.gap_backward[-1]) == pytest.approx(
        (share * product_ms, 2 * share * product_ms)
    )
    chunked = compute_times(replace(profile, chunked_loss=True), MACHINE)  # its rows are made wider
    assert chunked.gap_forward[-1] == pytest.approx(3 * 1.06 * product_ms)


def test_a_step_of_several_batches_updates_once() -> None:
    three = replace(make_profile(3.0, 6.0), accumulation=3)
    assert step_ms(three, (NONE,) * 4, 4, 0) == pytest.approx(3 * 4 * 9.0 + 4 * DEVICE_UPDATE, rel=1e-4)
    # From the norm to the last chunk; an update reads sums of 4 bytes, or gradients of 2 where sums are on the device.
    slow: dict[str, Any] = {"host_adam_gparams": 0.0128}  # 100 ms a chunk of 26 bytes a parameter
    last = 28 / 26 * 3 * 100.0 + MOVE + 3.0 + 4 * 6.0
    assert step_ms(three, (NONE,) * 4, 1, 2, **slow) == pytest.approx(2 * 36.0 + last, rel=0.1)
    model = model_of(three, replace(MACHINE, **slow))
    on_device = model.step_ms((NONE,) * 4, placed(1, 2)._replace(n_device_sum=3))
    assert on_device == pytest.approx(2 * 36.0 + last - 2 / 26 * 300.0, rel=0.1)
    assert on_device < step_ms(three, (NONE,) * 4, 1, 2, **slow)


def test_a_forward_begins_when_the_sums_of_the_backward_before_are_in_host_memory() -> None:
    """Scripts look at a number on the device then, whose copy the copy engine takes after those of the sums."""
    slow: dict[str, Any] = {"h2d_gbps": MACHINE.h2d_gbps / 20, "d2h_gbps": MACHINE.d2h_gbps / 20}
    shorter, longer = (replace(make_profile(forward_ms, 6.0), accumulation=3) for forward_ms in (3.0, 5.0))
    more_ms = step_ms(longer, (NONE,) * 4, 0, 4, **slow) - step_ms(shorter, (NONE,) * 4, 0, 4, **slow)
    assert more_ms >= 2 * 4 * 2.0  # two forwards of four units, though the link alone decides how long backward takes


def test_the_papers_formula() -> None:
    profile = make_profile(3.0, 6.0)
    layout = pack(profile, N)
    counts: dict[str, Any] = {"n_persist": 1, "n_buffer": 2, "n_swap": 1, "n_ckpt": 1}
    plan = evaluate(profile, MACHINE, **counts, chunk_elements=N)
    forward = 10.0 + 3 * 3.0  # the swapped block's activations take longer than its computing
    backward = 10.0 + max(9.0, 2 * MOVE) + 2 * 6.0
    assert paper_step_ms(plan, profile, MACHINE, layout) == pytest.approx(forward + backward + DEVICE_UPDATE)
    slow = replace(MACHINE, host_adam_gparams=0.0128)
    assert paper_step_ms(plan, profile, slow, layout) == pytest.approx(forward + 300.0)
