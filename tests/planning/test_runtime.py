"""Predicted times: steps whose milliseconds can be worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from protrain.hardware.profile import Contention, HardwareProfile
from protrain.planning import BlockMode, MemoryModel, pack
from protrain.planning.plan import Counts, Modes
from protrain.planning.rates import COPY_MS
from protrain.planning.step import COLLECTIVE_MS
from protrain.planning.timeline import DOWN, UP
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import DEVICE_UPDATE_MS, MACHINE, MOVE_MS, TWO, UPDATE_MS, N, chain, model_of, placed

NONE, CKPT, SWAP = BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP
USUAL = chain(3.0, 6.0)
RESIDENT_MS = 4 * (9.0 + DEVICE_UPDATE_MS)
FROZEN = replace(USUAL, parameters=tuple(replace(record, group=-1) for record in USUAL.parameters))
SEVERAL = replace(USUAL, accumulation=3)
NARROW = replace(USUAL, moment_dtype="bfloat16")
SLOW = replace(MACHINE, host_adam_gparams=0.0128)  # 100 ms a chunk
# From the norm to the last chunk, of three batches. An update reads sums of 4 bytes, where it else moves 26.
SLOW_MS = 2 * 36.0 + 28 / 26 * 3 * 100.0 + MOVE_MS + 3.0 + 4 * 6.0
HELPED = replace(SLOW, streamed_adam_gparams=0.00639)  # by the GPU, which takes just over 200 ms
FASTER = replace(TWO, all_gather_gbps=12.8, all_to_all_gbps=6.4)  # 0.1 and 0.2 ms
WHOLE_MS = 1.0 + COLLECTIVE_MS  # one chunk gathered or reduced
RANKS_MS = 4 * 9.0 + WHOLE_MS + DEVICE_UPDATE_MS / 2 + WHOLE_MS
# While a collective runs, which it does twice as long as alone, computing goes on at three quarters of its rate.
SLOWED = replace(TWO, contention=(Contention(activities=("matmul", "collective"), shares=(0.75, 0.5)),))
REGION_MS = 20.0  # one chunk on the host of a machine with few regions for gradients


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of a chain of blocks, and how long it takes by hand."""

    counts: Counts
    expected_ms: float
    profile: ModelProfile = USUAL
    hardware: HardwareProfile = MACHINE
    modes: Modes = ()
    within: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)  # of the memory model


def with_regions(n_regions: int) -> dict[str, Any]:
    """A step with updates inside backward whose host has memory for so many gradients of the three offloaded chunks."""
    hardware = replace(MACHINE, host_adam_gparams=1.28 / REGION_MS, bidirectional_gbps=2.1, host_bytes=10**12)
    memory = MemoryModel(replace(USUAL, step_during_backward=True), hardware, pack(USUAL, N))
    gradients = memory.gradients
    beside_bytes = memory.least_host_bytes(1, 0) - gradients.host_bytes(1, 2)
    hardware = replace(hardware, host_bytes=beside_bytes + gradients.host_bytes(1, n_regions))
    profile = replace(chain(6.0, 6.0), step_during_backward=True)
    return {"profile": profile, "hardware": hardware, "counts": placed(1, 3)}


STEPS = {
    "everything is resident": Step(counts=placed(4, 0), expected_ms=RESIDENT_MS),
    "two blocks are recomputed": Step(
        counts=placed(4, 0), modes=(CKPT, CKPT, NONE, NONE), expected_ms=RESIDENT_MS + 2 * 3.0
    ),
    # 10 MB each way at 1 GB/s, beside 3 ms of the next forward and 6 ms of the backward before.
    "a swapped block is hidden by one on either side": Step(
        counts=placed(4, 0),
        modes=(SWAP, NONE, NONE, NONE),
        expected_ms=RESIDENT_MS + (10.0 + COPY_MS - 3.0) + (10.0 + COPY_MS - 6.0),
    ),
    "frozen chunks stay in their buffers": Step(profile=FROZEN, counts=placed(0, 4), expected_ms=4 * 9.0),
    # The gradient of the first chunk comes last: down, updated, up; the others follow under forward.
    "slow blocks hide transfers but not the first update": Step(
        counts=placed(0, 2), expected_ms=MOVE_MS + UPDATE_MS + MOVE_MS + 4 * 9.0
    ),
    "a persistent chunk in front hides that too": Step(
        profile=chain(4.0, 6.0), counts=placed(1, 2), expected_ms=4 * 10.0 + DEVICE_UPDATE_MS
    ),
    "one buffer leaves nothing to fetch ahead": Step(
        counts=placed(0, 1), expected_ms=MOVE_MS + UPDATE_MS + 4 * (3.0 + MOVE_MS) + 3 * (6.0 + MOVE_MS) + 6.0
    ),
    "the host updates from the norm to the last chunk": Step(
        hardware=SLOW, counts=placed(1, 2), expected_ms=3 * 100.0 + MOVE_MS + 3.0 + 4 * 6.0
    ),
    # An update moves 18 bytes in place of 26.
    "moments are in bf16": Step(
        profile=NARROW,
        hardware=replace(SLOW, host_adam_narrow_gparams=0.0128 * 26 / 18),
        counts=placed(1, 2),
        expected_ms=3 * 100.0 * 18 / 26 + MOVE_MS + 3.0 + 4 * 6.0,
    ),
    "moments in bf16 are resident": Step(
        profile=NARROW, counts=placed(4, 0), expected_ms=4 * (9.0 + DEVICE_UPDATE_MS * 18 / 26), within=1e-5
    ),
    # The last gradient is in host memory 3.44 ms before backward ends, its update takes 4, and three weights go up.
    "speculative updates take effect when the last is done": Step(
        profile=chain(1.0, 6.0),
        hardware=replace(MACHINE, host_adam_gparams=MACHINE.host_adam_gparams / 4),
        counts=placed(1, 3, 3),
        expected_ms=4 * UPDATE_MS - 3.44 + 3 * MOVE_MS + 1.0 + 4 * 6.0,
    ),
    # The host makes the first, second, fourth and fifth of six updates, and the GPU the third and the last.
    "the GPU helps": Step(
        profile=chain(3.0, 6.0, n=7),
        hardware=HELPED,
        counts=placed(1, 6),
        expected_ms=4 * 100.0 + MOVE_MS + 3.0 + 7 * 6.0,
        within=0.02,
    ),
    "on a CPU everything adds": Step(
        profile=replace(USUAL, device="cpu"),
        hardware=replace(MACHINE, device_type="cpu"),
        counts=placed(0, 4),
        expected_ms=4 * 9.0 + 4 * MOVE_MS + 4 * MOVE_MS + 4 * UPDATE_MS,
    ),
    "several batches are updated once": Step(
        profile=SEVERAL, counts=placed(4, 0), expected_ms=3 * 4 * 9.0 + 4 * DEVICE_UPDATE_MS
    ),
    "sums lie in host memory": Step(
        profile=SEVERAL, hardware=SLOW, counts=placed(1, 2), expected_ms=SLOW_MS, within=0.02
    ),
    "sums lie on the device": Step(
        profile=SEVERAL,
        hardware=SLOW,
        counts=placed(1, 2)._replace(n_device_sum=3),
        expected_ms=SLOW_MS - 2 / 26 * 300.0,
        within=0.02,
    ),
    "ranks: the last reduction and the first gather are not hidden": Step(
        hardware=TWO, counts=placed(4, 4), expected_ms=RANKS_MS
    ),
    "ranks: gathers of backward are hidden": Step(hardware=TWO, counts=placed(4, 2), expected_ms=RANKS_MS),
    "ranks: both links are faster": Step(
        hardware=FASTER, counts=placed(4, 4), expected_ms=4 * 9.0 + 0.1 + 0.2 + 2 * COLLECTIVE_MS + DEVICE_UPDATE_MS / 2
    ),
    "ranks: computing is slower beside four gathers and reductions": Step(
        hardware=SLOWED, counts=placed(4, 4), expected_ms=RANKS_MS + 2 * 0.25 * (4 + 4) * WHOLE_MS
    ),
    "ranks: and beside two gathers more": Step(
        hardware=SLOWED, counts=placed(4, 2), expected_ms=RANKS_MS + 2 * 0.25 * (6 + 4) * WHOLE_MS
    ),
    # The last gradient is reduced, offloaded and updated, and its weight is uploaded and gathered: half of each.
    "ranks: a chunk goes down and up in shards": Step(
        hardware=TWO,
        counts=placed(0, 4),
        expected_ms=WHOLE_MS + (MOVE_MS + UPDATE_MS + MOVE_MS) / 2 + WHOLE_MS + 4 * 9.0,
    ),
    # The third gradient waits for the first one's update; after backward come two more, the upload of the last of them
    # and the forward of three blocks.
    "two regions make backward wait": Step(
        **with_regions(2), expected_ms=6.0 + MOVE_MS + 3 * REGION_MS + MOVE_MS + 3 * 6.0
    ),
    # The host updates what forward needs first one update earlier.
    "a region for each gradient": Step(
        **with_regions(3), expected_ms=6.0 + MOVE_MS + 3 * REGION_MS + MOVE_MS + 2 * 6.0
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_as_long_as_by_hand(name: str) -> None:
    step = STEPS[name]
    modes = step.modes or (NONE,) * len(step.profile.blocks)
    found_ms = model_of(step.profile, step.hardware, **step.options).step_ms(modes, step.counts)
    assert found_ms == pytest.approx(step.expected_ms, rel=step.within)


def test_chunks_that_forward_never_uses_are_neither_updated_nor_waited_for() -> None:
    profile = chain(1.0, 2.0, n=6)
    segments = tuple(segment for segment in profile.segments if segment.block is not None and segment.block < 4)
    units = (*profile.units[:4], *(replace(unit, block=None) for unit in profile.units[4:]))
    unused = replace(profile, calls=(0, 1, 2, 3), units=units, blocks=profile.blocks[:4], segments=segments)
    fewer = replace(unused, parameters=profile.parameters[:4], units=profile.units[:4])
    for n_speculate in (0, 2):
        times = [model_of(each, SLOW).step_ms((NONE,) * 4, placed(0, 3, n_speculate)) for each in (unused, fewer)]
        assert times[0] == pytest.approx(times[1])


def test_sums_in_host_memory_come_up_and_go_down_with_four_bytes_a_parameter() -> None:
    timeline = model_of(replace(USUAL, accumulation=2)).timeline((NONE,) * 4, placed(1, 2))
    for lane, kind in ((UP, "sum"), (DOWN, "gradients")):
        found = {one.name: one.end_ms - one.start_ms for one in timeline.operations if one.lane == lane}
        times = {name: time_ms for name, time_ms in found.items() if name.startswith(kind)}
        assert times == pytest.approx({f"{kind} {chunk}": 2 * MOVE_MS for chunk in (1, 2, 3)})


def test_what_a_weight_alone_takes_is_calibrated() -> None:
    """Calibration has bf16; another type takes as much longer as it moves more bytes."""
    measured = replace(MACHINE, host_adam_weight_gparams=MACHINE.host_adam_gparams * 1.25)  # 1.625 by its bytes
    shares = {"bfloat16": 0.8, "float16": 16 / 28 / (16 / 26) * 0.8, "float32": 20 / 28 * 26 / 16 * 0.8}
    for dtype, share in shares.items():
        assert model_of(replace(USUAL, dtype=dtype), measured).steps.weight_share == pytest.approx(share)
