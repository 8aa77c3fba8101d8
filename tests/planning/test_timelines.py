"""What holds for every timeline, whatever the model, the plan, the machine and the number of ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from protrain.planning import BlockMode, MemoryModel, Models, pack
from protrain.planning.plan import Counts
from protrain.planning.timeline import DOWN, GATHER, HOST, REDUCE, STREAM, UP, Operation, Timeline
from tests.planning.brute_force import MIB, N, measured, random_machine, that_streams
from tests.planning.models import placed

ALMOST = 1e-9
MODES = (BlockMode.NONE, BlockMode.CKPT, BlockMode.SWAP, BlockMode.CKPT_SWAP)


def random_step(seed: int) -> tuple[MemoryModel, tuple[BlockMode, ...], Counts]:
    """A small random model under a random plan on one to four ranks, whose host has room for some gradients or all."""
    draw = random.Random(seed)
    world_size = draw.choice([1, 1, 2, 3, 4])
    profile = replace(measured(draw, seed), accumulation=draw.choice([1, 1, 2]))
    rates: dict[str, Any] = {name: draw.choice([None, 20.0, 200.0]) for name in ("all_gather_gbps", "all_to_all_gbps")}
    hardware = replace(random_machine(draw), world_size=world_size, host_bytes=10**12, **rates)
    hardware = that_streams(hardware) if draw.random() < 0.5 else hardware
    layout, profile = pack(profile, N, world_size), replace(profile, step_during_backward=draw.random() < 0.4)
    memory = MemoryModel(profile, hardware, layout)
    n_chunks = len(layout.chunks)
    n_persist = draw.randint(0, n_chunks - 1)
    modes = tuple(draw.choice(MODES) for _ in profile.blocks)
    if draw.random() < 0.5:
        least_bytes = memory.least_host_bytes(n_persist, memory.activations(modes).swapped_bytes)
        hardware = replace(hardware, host_bytes=least_bytes + draw.randint(0, 40) * MIB)
        memory = MemoryModel(profile, hardware, layout)
    n_buffer = draw.randint(memory.least_buffers[n_persist], memory.all_buffers[n_persist])
    speculates = not profile.step_during_backward and profile.accumulation == 1
    n_speculate = draw.randint(0, n_chunks - n_persist) if speculates else 0
    return memory, modes, placed(n_persist, n_buffer, n_speculate, draw.randint(0, n_speculate))


def number(operation: Operation) -> int:
    """The chunk or block that an operation is about."""
    return int(operation.name.split()[-1])


def lanes_of(timeline: Timeline) -> list[list[Operation]]:
    """The operations of each lane, none of which begins before the one before it has ended."""
    lanes = [[one for one in timeline.operations if one.lane == lane] for lane in range(REDUCE + 1)]
    for operations in lanes:
        assert all(one.end_ms <= other.start_ms + ALMOST for one, other in pairwise(operations))
    return lanes


@pytest.mark.parametrize("seeds", [range(first, first + 25) for first in range(0, 150, 25)], ids=str)
def test_operations_follow_what_they_need(seeds: range) -> None:
    for seed in seeds:
        memory, modes, counts = random_step(seed)
        model = Models(memory)
        timeline = model.timeline(modes, counts)
        chunks, n_persist = memory.layout.chunks, counts.n_persist
        lanes = lanes_of(timeline)
        assert 0 < timeline.forward_end_ms < timeline.backward_end_ms
        # Every weight is uploaded before it is gathered.
        for chunk in chunks if memory.layout.world_size > 1 else ():
            gathers = [one for one in lanes[GATHER] if number(one) == chunk.index]
            uploads = [one for one in lanes[UP] if one.name == f"weights {chunk.index}"]
            # The first upload may be over when the step begins.
            assert len(gathers) - len(uploads) in ((0, 1) if chunk.index >= n_persist else (len(gathers),)), seed
            for gather, upload in zip(reversed(gathers), reversed(uploads), strict=False):
                assert gather.start_ms >= upload.end_ms - ALMOST, seed
        # Every gradient is reduced, and offloaded afterwards.
        trainable = {chunk.index for chunk in chunks if chunk.trainable}
        offloaded = {chunk for chunk in trainable if chunk >= n_persist}
        reduced = {number(one): one.end_ms for one in lanes[REDUCE]}
        assert set(reduced) == (trainable if memory.layout.world_size > 1 else set()), seed
        gradients = [one for one in lanes[DOWN] if one.name.startswith("gradients")]
        offloads = {number(one): one for one in gradients if one.start_ms > timeline.forward_end_ms}
        assert set(offloads) == offloaded, seed
        assert all(one.start_ms >= reduced.get(chunk, 0.0) - ALMOST for chunk, one in offloads.items()), seed
        assert timeline.backward_end_ms >= max(reduced.values(), default=0.0) - ALMOST, seed
        # Every chunk in host memory is updated: at once, or its weight in backward and its moments later.
        updates = [one for one in (*lanes[HOST], *lanes[STREAM]) if one.end_ms > timeline.forward_end_ms + ALMOST]
        weights = {number(one) for one in updates if one.name.startswith("speculative weight")}
        assert weights <= {number(one) for one in updates if one.name.startswith("deferred update")}, seed
        whole = [number(one) for one in updates if not one.name.startswith("speculative weight")]
        assert set(whole) == offloaded, seed
        # A gradient goes down when there is a region for it: never are more taken than there are.
        if n_regions := memory.n_host_regions(n_persist, memory.activations(modes).swapped_bytes):
            assert len(whole) == len(offloaded), seed
            ends = {number(one): one.end_ms for one in updates}
            for one in offloads.values():
                taken = [at for at, two in offloads.items() if two.start_ms <= one.start_ms < ends[at] - ALMOST]
                assert len(taken) <= n_regions, seed


@pytest.mark.parametrize("seed", range(25))
def test_a_limit_that_a_step_keeps_changes_nothing_and_one_that_it_breaks_is_reported(seed: int) -> None:
    memory, modes, counts = random_step(seed)
    model = Models(memory)
    step_ms = model.step_ms(modes, counts)
    if memory.profile.accumulation == 1:
        assert model.timeline(modes, counts).step_ms == step_ms
    for share in (0.5, 0.97, 1.03):
        limited_ms = model.step_ms(modes, counts, limit_ms=share * step_ms)
        assert limited_ms >= share * step_ms * (1 - ALMOST) if share < 1 else limited_ms == step_ms
