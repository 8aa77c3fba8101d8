"""Small random models on random machines, and every plan that they can have."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import NamedTuple

from protrain.hardware.profile import HardwareProfile
from protrain.planning import MemoryModel, Models, Plan, block_modes, check, search
from protrain.planning.layout import pack
from protrain.planning.plan import Counts, Modes
from protrain.planning.predict import CLIPPED
from protrain.profiler.model_profile import ModelProfile
from tests.planning.models import H100, MIB, equal_blocks, profile_of

N = 8 * MIB  # elements of a chunk
# A mechanism that saves a smaller share of a step may be left unused.
MUST_GAIN = {"n_weight_only": 0.01, "keep_attention": 0.01}
MOVING_MUST_GAIN = 0.05
CLOSE = 1.01  # the search may miss the best plan by so much


def random_profile(draw: random.Random, share: int) -> ModelProfile:
    """Blocks of different or equal size, time and activations between an embedding and a head, some of it frozen.

    A block's input is one of ``share`` parts of what it saves.
    """
    n = draw.choice([3, 4, 5, 6])
    sizes = [draw.choice([N, N // 2, N // 4]) if draw.random() < 0.5 else N for _ in range(n + 2)]
    saved = [draw.choice([50, 100, 200, 400]) * MIB for _ in range(n)]
    if draw.random() < 0.5:
        saved = [saved[0]] * n
    ms = [draw.choice([1.0, 3.0, 10.0]) for _ in range(n)]
    if draw.random() < 0.5:
        ms = [ms[0]] * n
    freezes = draw.random() < 0.3
    live = [sum(size // share for size in saved[:at]) for at in range(n + 1)]

    segments: list[tuple[str, int | None, int, int, float]] = []
    for at in range(n):
        segments.append(("forward", None, live[at], MIB, 0.2))
        segments.append(("forward", at, live[at], saved[at] // 4, ms[at]))
    segments += [(phase, None, live[n], max(saved) // 2, 2.0) for phase in ("forward", "backward")]
    for at in reversed(range(n)):
        segments.append(("backward", at, live[at + 1], saved[at] + saved[at] // 4, 3 * ms[at]))
        segments.append(("backward", None, live[at], 0, 0.2))
    dtype = draw.choice(["bfloat16", "bfloat16", "bfloat16", "float16", "float32"])
    parameters = [(size, -1 if freezes and draw.random() < 0.4 else 0) for size in sizes]
    units = [(at - 1 if 0 < at <= n else None, (at,)) for at in range(n + 2)]
    blocks = tuple(
        replace(block, name=f"b{at}")
        for at in range(n)
        for block in equal_blocks(
            1,
            ms[at],
            2 * ms[at],
            saved[at],
            input_bytes=saved[at] // share,
            output_bytes=saved[at] // share,
            forward_flops=10**10,
        )
    )
    return replace(profile_of(parameters, units, blocks, segments), dtype=dtype)


def as_measured(profile: ModelProfile, draw: random.Random) -> ModelProfile:
    """Recomputation takes a time of its own, and some blocks save nothing of their inputs; one saves hardly more."""
    blocks = []
    for block in profile.blocks:
        saved_bytes = block.input_bytes if draw.random() < 0.2 else block.saved_bytes
        blocks.append(
            replace(
                block,
                saved_bytes=saved_bytes,
                recompute_ms=draw.choice([0.6, 1.0, 1.1]) * block.forward_ms,
                unsaved_input_bytes=draw.choice([0, block.input_bytes]),
            )
        )
    return replace(profile, blocks=tuple(blocks))


def measured(draw: random.Random, seed: int, *, share: int | None = None) -> ModelProfile:
    """A random model as it is measured. Inputs of its blocks are one of ``share`` parts of what they save."""
    return as_measured(random_profile(draw, share or draw.choice([4, 8, 16])), random.Random(-seed - 1))


def large_vocabulary(draw: random.Random, *, tied: bool) -> ModelProfile:
    """Random blocks between an embedding of several of them and a head that is as large or tied."""
    profile = as_measured(random_profile(draw, draw.choice([1, 4, 16])), draw)
    parameters, units = list(profile.parameters), profile.units
    for at in (0,) if tied else (0, -1):
        parameters[at] = replace(parameters[at], shape=(draw.choice([2, 3, 5]) * N,))
    if tied:
        units = (*units[:-1], replace(units[-1], parameters=(0, *units[-1].parameters)))
    return replace(profile, parameters=tuple(parameters), units=units)


def random_machine(draw: random.Random) -> HardwareProfile:
    """From a slow host or link to fast ones, with measured contention or shared ceilings, tight or roomy.

    The GPU cannot help to update.
    """
    known = H100
    contention = known.contention if draw.random() < 0.5 else ()
    host_adam = draw.choice([0.2, 1.0, 2.0, 5.0])
    link = draw.choice([2.0, 10.0, 55.0, 200.0])
    device_bytes = int(draw.uniform(500, 2500)) * MIB
    host_bytes = int(draw.choice([draw.uniform(300, 1500), draw.uniform(1000, 4000)])) * MIB
    return replace(
        known,
        contention=contention,
        host_adam_gparams=host_adam,
        h2d_gbps=link,
        d2h_gbps=link,
        bidirectional_gbps=1.6 * link,
        streamed_adam_gparams=None,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )


def that_streams(machine: HardwareProfile) -> HardwareProfile:
    """``machine`` with a GPU that may help to update, as fast as the link allows."""
    draw = random.Random(machine.host_bytes)
    return replace(machine, streamed_adam_gparams=machine.h2d_gbps * draw.uniform(0.04, 0.06))


def tight_case(seed: int) -> tuple[ModelProfile, HardwareProfile]:
    """Room in host memory for some second weights and hardly a whole copy, and where updates matter."""
    draw = random.Random(seed)
    profile = measured(draw, seed)
    hardware = replace(random_machine(draw), host_adam_gparams=draw.choice([0.5, 1.0, 2.0]), host_bytes=0)
    memory = MemoryModel(profile, hardware, pack(profile, N))
    beside_bytes = memory.least_host_bytes(draw.randint(0, 1), 0)
    weights_bytes = draw.randint(1, 8) * memory.layout.buffer_elements(0)[0] * profile.element_bytes
    return profile, replace(hardware, host_bytes=beside_bytes + weights_bytes)


class Faster(NamedTuple):
    """A plan that the search should have found."""

    step_ms: float
    counts: Counts


def every_plan(memory: MemoryModel) -> Iterator[Counts]:
    """The counts of all plans that fit ``memory``'s machine."""
    hardware, n_blocks, n_chunks = memory.hardware, len(memory.profile.blocks), len(memory.layout.chunks)
    models = Models(memory)
    for n_swap, n_ckpt, n_ckpt_swap in product(range(n_blocks + 1), repeat=3):
        if n_swap + n_ckpt > n_blocks or n_ckpt_swap > n_ckpt:
            continue
        modes = block_modes(n_blocks, n_swap, n_ckpt, n_ckpt_swap)
        for n_persist, n_sum in product(range(n_chunks + 1), range(n_chunks + 1 if memory.accumulates else 1)):
            if n_persist + n_sum > n_chunks:
                continue
            least, most = memory.least_buffers[n_persist], memory.all_buffers[n_persist]
            updates = [  # the same whatever buffers there are
                (n_speculate, n_weight_only)
                for n_speculate in range(n_chunks - n_persist + 1 if models.steps.speculates else 1)
                for n_weight_only in range(n_speculate + 1)
                if memory.host_bytes(
                    Counts(n_persist, 0, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_weight_only, n_sum), modes
                )
                <= hardware.host_bytes
            ]
            for n_buffer in range(least, most + 1):
                if (
                    memory.device_bytes(Counts(n_persist, n_buffer, n_swap, n_ckpt, n_device_sum=n_sum), modes)
                    > hardware.device_bytes
                ):
                    break
                for n_speculate, n_weight_only in updates:
                    yield Counts(n_persist, n_buffer, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_weight_only, n_sum)


def margin(counts: Counts, n_chunks: int, *, keep_attention: bool = False) -> float:
    """What a step time is multiplied by before plans are compared, for the mechanisms that must gain something."""
    used = {**counts._asdict(), "keep_attention": keep_attention}
    moving = MOVING_MUST_GAIN if counts.n_persist < n_chunks or counts.n_ckpt or counts.n_swap else 0.0
    return 1 + moving + sum(share for name, share in MUST_GAIN.items() if used[name])


def mean_ms(models: Models, modes: Modes, counts: Counts, *, limit_ms: float = inf) -> float:
    """Milliseconds of a step where a few are clipped, or infinite if computing alone takes ``limit_ms``."""
    step_ms = models.step_ms(modes, counts, limit_ms=limit_ms)
    if not counts.n_speculate or step_ms >= limit_ms:
        return step_ms
    return step_ms + CLIPPED * (models.step_ms(modes, counts._replace(n_speculate=0, n_weight_only=0)) - step_ms)


def faster_than(found: Plan, memory: MemoryModel, *, keep_attention: bool = False) -> Faster | None:
    """The fastest plan that beats ``found`` by more than is allowed; None where there is none.

    ``memory`` is of the profile that keeps attention where ``keep_attention`` says so.
    """
    models, n_blocks = Models(memory), len(memory.profile.blocks)
    found_ms = mean_ms(models, found.block_modes, found.counts)
    limit_ms = found_ms * margin(found.counts, found.n_chunks, keep_attention=found.keep_attention) / CLOSE
    best, n_plans, is_there = None, 0, False
    for counts in every_plan(memory):
        is_there |= counts == found.counts
        n_plans += 1
        share = margin(counts, len(memory.layout.chunks), keep_attention=keep_attention)
        modes = block_modes(n_blocks, counts.n_swap, counts.n_ckpt, counts.n_ckpt_swap)
        step_ms = mean_ms(models, modes, counts, limit_ms=limit_ms / share)
        if step_ms * share < limit_ms:
            limit_ms, best = step_ms * share, Faster(step_ms, counts)
    same_kind = keep_attention is found.keep_attention
    assert is_there or not same_kind
    assert n_plans > 10 or not same_kind
    return best


def check_search(profile: ModelProfile, hardware: HardwareProfile) -> Plan:
    """The plan that the search finds, after no other plan turned out to be better, with and without kept attention."""
    found = search(profile, hardware, chunk_elements=N)
    assert found.device_bytes <= hardware.device_bytes
    assert found.host_bytes <= hardware.host_bytes
    assert check(found, profile, hardware) == found
    keeps = (False, True) if any(block.attention_bytes for block in profile.blocks) else (False,)
    for keep in keeps:
        kept = profile.keeping_attention() if keep else profile
        memory = MemoryModel(kept, hardware, pack(profile, N, hardware.world_size))
        better = faster_than(found, memory, keep_attention=keep)
        assert better is None, f"{better} beats {found.step_ms} ms of {found.counts}"
    return found
