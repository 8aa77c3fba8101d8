"""The runtime model: steps that can be worked out by hand, and fetches that the engine really issues."""

from __future__ import annotations

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
from protrain.planning import BlockMode, MemoryModel, evaluate, pack
from protrain.planning.rates import COPY_MS
from protrain.planning.schedule import Fetches
from protrain.planning.simulate import Run
from protrain.planning.step import Steps
from protrain.planning.timeline import DOWN, UP
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import DEVICE_UPDATE_MS, MACHINE, MOVE_MS, UPDATE_MS, N, chain, model_of, placed

NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP
Modes = tuple[BlockMode, ...]


def step_ms(profile: ModelProfile, modes: Modes, n_persist: int, n_buffer: int, **changes: Any) -> float:
    return model_of(profile, replace(MACHINE, **changes)).step_ms(modes, placed(n_persist, n_buffer))


def test_everything_resident_is_computing_and_the_device_update() -> None:
    assert step_ms(chain(3.0, 6.0), (NONE,) * 4, 4, 0) == pytest.approx(4 * (9.0 + DEVICE_UPDATE_MS), rel=1e-4)


def test_checkpointing_adds_a_forward() -> None:
    profile = chain(3.0, 6.0)
    assert step_ms(profile, (CKPT, CKPT, NONE, NONE), 4, 0) - step_ms(profile, (NONE,) * 4, 4, 0) == pytest.approx(6.0)


def test_frozen_chunks_stay_in_their_buffers() -> None:
    profile = chain(3.0, 6.0)
    frozen = tuple(replace(record, group=-1) for record in profile.parameters)
    resident = step_ms(replace(profile, parameters=frozen), (NONE,) * 4, 0, 4)
    assert resident == pytest.approx(4 * 9.0, rel=1e-4)
    assert step_ms(replace(profile, parameters=frozen), (NONE,) * 4, 0, 1) > resident + MOVE_MS


def test_slow_blocks_hide_transfers_but_not_the_first_update() -> None:
    # Its gradient comes last: down, updated, up; the others follow under forward.
    expected = MOVE_MS + UPDATE_MS + MOVE_MS + 4 * 9.0
    assert step_ms(chain(3.0, 6.0), (NONE,) * 4, 0, 2) == pytest.approx(expected, rel=1e-3)
    # With a persistent chunk in front of it, that hides too.
    hidden = step_ms(chain(4.0, 6.0), (NONE,) * 4, 1, 2)
    assert hidden == pytest.approx(4 * 10.0 + DEVICE_UPDATE_MS, rel=1e-3)


def test_one_buffer_leaves_nothing_to_fetch_ahead() -> None:
    alone = step_ms(chain(3.0, 6.0), (NONE,) * 4, 0, 1)
    assert alone == pytest.approx(MOVE_MS + UPDATE_MS + 4 * (3.0 + MOVE_MS) + 3 * (6.0 + MOVE_MS) + 6.0, rel=1e-3)


def test_the_host_updates_from_the_norm_to_the_last_chunk() -> None:
    slow: dict[str, Any] = {"host_adam_gparams": 0.0128}  # 100 ms a chunk
    step = step_ms(chain(3.0, 6.0), (NONE,) * 4, 1, 2, **slow)
    assert step == pytest.approx(3 * 100.0 + MOVE_MS + 3.0 + 4 * 6.0, rel=1e-3)


def test_swapping_is_hidden_by_one_block_on_either_side() -> None:
    profile = chain(3.0, 6.0)
    plain = step_ms(profile, (NONE,) * 4, 4, 0)
    swapped = step_ms(profile, (SWAP, NONE, NONE, NONE), 4, 0)
    # 10 MB each way at 1 GB/s, beside 3 ms of the next forward and 6 ms of the backward before.
    assert swapped - plain == pytest.approx((10.0 + COPY_MS - 3.0) + (10.0 + COPY_MS - 6.0), rel=1e-3)


def test_on_a_cpu_everything_adds() -> None:
    profile = replace(chain(3.0, 6.0), device="cpu")
    step = model_of(profile, replace(MACHINE, device_type="cpu")).step_ms((NONE,) * 4, placed(0, 4))
    assert step == pytest.approx(4 * 9.0 + 4 * MOVE_MS + 4 * MOVE_MS + 4 * UPDATE_MS, rel=1e-3)


def test_speculative_updates_hide_in_backward() -> None:
    profile = chain(1.0, 9.0, n=8)
    slow = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 6)
    runtime = model_of(profile, slow)
    steps = [runtime.step_ms((NONE,) * 8, placed(0, 8, n_speculate)) for n_speculate in range(9)]
    # Behind the norm eight updates of 6 ms hold up a forward whose uploads take less. The last of the speculative ones
    # to be done, that of the first chunk, is the first that forward waits for.
    gain = 8 * 6.0 * UPDATE_MS - (8 - 1) * MOVE_MS
    assert 0.75 * gain < steps[0] - steps[8] < 1.1 * gain
    assert all(more <= fewer + 1e-9 for fewer, more in pairwise(steps))
    inside = model_of(profile, slow, step_during_backward=True)
    assert steps[8] >= inside.step_ms((NONE,) * 8, placed(0, 8)) - 1e-9


def test_speculative_updates_take_effect_when_the_last_of_them_is_done() -> None:
    # The last gradient is in host memory 3.44 ms before backward ends, its update takes 4, and three weights go up.
    slow = replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 4)
    step = model_of(chain(1.0, 6.0), slow).step_ms((NONE,) * 4, placed(1, 3, 3))
    assert step == pytest.approx(4 * UPDATE_MS - 3.44 + 3 * MOVE_MS + 1.0 + 4 * 6.0, abs=0.02)


def test_chunks_that_forward_never_uses_are_neither_updated_nor_waited_for() -> None:
    profile, slow = chain(1.0, 2.0, n=6), replace(MACHINE, host_adam_gparams=0.0128)
    segments = tuple(segment for segment in profile.segments if segment.block is not None and segment.block < 4)
    units = (*profile.units[:4], *(replace(unit, block=None) for unit in profile.units[4:]))
    unused = replace(profile, calls=(0, 1, 2, 3), units=units, blocks=profile.blocks[:4], segments=segments)
    fewer = replace(unused, parameters=profile.parameters[:4], units=profile.units[:4])
    for n_speculate in (0, 2):
        times = [model_of(each, slow).step_ms((NONE,) * 4, placed(0, 3, n_speculate)) for each in (unused, fewer)]
        assert times[0] == pytest.approx(times[1])


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


def test_a_step_of_several_batches_updates_once() -> None:
    three = replace(chain(3.0, 6.0), accumulation=3)
    assert step_ms(three, (NONE,) * 4, 4, 0) == pytest.approx(3 * 4 * 9.0 + 4 * DEVICE_UPDATE_MS, rel=1e-4)
    # From the norm to the last chunk; an update reads sums of 4 bytes, or gradients of 2 where sums are on the device.
    slow: dict[str, Any] = {"host_adam_gparams": 0.0128}  # 100 ms a chunk of 26 bytes a parameter
    last = 28 / 26 * 3 * 100.0 + MOVE_MS + 3.0 + 4 * 6.0
    assert step_ms(three, (NONE,) * 4, 1, 2, **slow) == pytest.approx(2 * 36.0 + last, rel=0.1)
    model = model_of(three, replace(MACHINE, **slow))
    on_device = model.step_ms((NONE,) * 4, placed(1, 2)._replace(n_device_sum=3))
    assert on_device == pytest.approx(2 * 36.0 + last - 2 / 26 * 300.0, rel=0.1)
    assert on_device < step_ms(three, (NONE,) * 4, 1, 2, **slow)


def test_sums_in_host_memory_come_up_and_go_down_with_four_bytes_a_parameter() -> None:
    timeline = model_of(replace(chain(3.0, 6.0), accumulation=2)).timeline((NONE,) * 4, placed(1, 2))
    for lane, kind in ((UP, "sum"), (DOWN, "gradients")):
        found = {one.name: one.end_ms - one.start_ms for one in timeline.operations if one.lane == lane}
        times = {name: time_ms for name, time_ms in found.items() if name.startswith(kind)}
        assert times == pytest.approx({f"{kind} {chunk}": 2 * MOVE_MS for chunk in (1, 2, 3)})


def test_a_forward_begins_when_the_sums_of_the_batch_before_are_in_host_memory() -> None:
    profile = replace(chain(1.0, 1.0), accumulation=2)
    memory = MemoryModel(profile, MACHINE, pack(profile, N))
    run = Run(Steps(memory), (NONE,) * 4, placed(1, 2), only_adds=True)
    times = list(zip(run.tasks, run.starts, run.ends, strict=True))
    last_sum_ms = max(end for task, _, end in times[: run.first] if task[0] == DOWN)
    forward_ms = next(start for task, start, _ in times[run.first :] if "forward" in task)
    assert forward_ms == last_sum_ms > run.ends[run.begin]


def test_the_papers_formula() -> None:
    profile = chain(3.0, 6.0)
    layout = pack(profile, N)
    counts: dict[str, Any] = {"n_persist": 1, "n_buffer": 2, "n_swap": 1, "n_ckpt": 1}
    plan = evaluate(profile, MACHINE, **counts, chunk_elements=N)
    forward = 10.0 + 3 * 3.0  # the swapped block's activations take longer than its computing
    backward = 10.0 + max(9.0, 2 * MOVE_MS) + 2 * 6.0
    assert paper_step_ms(plan, profile, MACHINE, layout) == pytest.approx(forward + backward + DEVICE_UPDATE_MS)
    slow = replace(MACHINE, host_adam_gparams=0.0128)
    assert paper_step_ms(plan, profile, slow, layout) == pytest.approx(forward + 300.0)
