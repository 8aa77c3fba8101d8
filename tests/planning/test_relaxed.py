"""Choices that are ruled out together are all too slow, and numbers of early updates that are not simulated as well."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protrain.planning import MemoryModel, RuntimeModel, block_modes, pack
from protrain.planning.choices import Choices
from protrain.planning.search.early_times import takes_at_least, times_by_early
from protrain.planning.search.relaxed import Relaxed, _Common
from tests.planning.test_brute_force import N, as_measured, random_machine, random_profile

SEEDS = range(12)


def drawn(seed: int, *, inside: bool, **changes: Any) -> tuple[MemoryModel, RuntimeModel]:
    draw = random.Random(seed)
    profile = as_measured(random_profile(draw, 8), random.Random(-seed - 1))
    hardware = replace(random_machine(draw), host_bytes=10**12, **changes)
    memory = MemoryModel(profile, hardware, pack(profile, N), update_in_backward=inside)
    return memory, RuntimeModel(memory)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_ruled_out_together_is_too_slow_one_by_one(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n_ruled_out = n_left = n_beyond_untouched = n_whatever_is_early = 0
    always_takes = _Common.always_takes

    def counted(common: _Common, limit_ms: float) -> bool:
        nonlocal n_whatever_is_early
        found = always_takes(common, limit_ms)
        n_whatever_is_early += found
        return found

    monkeypatch.setattr(_Common, "always_takes", counted)
    for seed in SEEDS:
        memory, runtime = drawn(seed, inside=inside)
        n_blocks, n_chunks = len(memory.profile.blocks), len(memory.layout.chunks)
        counts = [(n_swap, n_ckpt) for n_swap in range(n_blocks + 1) for n_ckpt in range(n_blocks - n_swap + 1)]
        modes = [block_modes(n_blocks, *pair) for pair in counts]
        n_swap = np.array([pair[0] for pair in counts])
        for n_persist in (0, 1):
            draw = random.Random(seed)
            least, most = memory.least_buffers(n_persist), n_chunks - n_persist
            n_buffer = np.array([draw.choice([-1, least, most, most]) for _ in modes])
            most_early = np.array([0 if inside else draw.randint(most - 1, most) for _ in modes])
            rows = [row for row in range(len(modes)) if n_swap[row] and n_buffer[row] >= 0]
            times = {
                row: runtime.fitted_ms(modes[row], n_persist, int(n_buffer[row]), int(most_early[row]))[0]
                for row in rows
            }
            relaxed = Relaxed(runtime, Choices.of(modes), n_swap)
            untouched_ms = runtime.fitted_ms(block_modes(n_blocks, 0, 0), n_persist, most, 0 if inside else most)[0]
            # Just above every one of them, so that it must be left; and limits only fall.
            for limit_ms in sorted({time * (1 + 1e-9) for time in times.values()}, reverse=True):
                for row in rows:
                    if relaxed.is_too_slow(row, n_persist, n_buffer, most_early, limit_ms):
                        assert times[row] >= limit_ms
                        n_ruled_out += 1
                        n_beyond_untouched += untouched_ms < limit_ms
                    else:
                        n_left += times[row] >= limit_ms
    assert n_ruled_out > n_left  # of those that are too slow
    assert n_beyond_untouched > n_ruled_out // 10
    assert inside == (n_whatever_is_early == 0)


@pytest.mark.parametrize("seed", range(12))
def test_every_number_of_early_updates_counts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, runtime = drawn(seed, inside=False)
    n_blocks, most = len(memory.profile.blocks), len(memory.layout.chunks)
    modes, n_buffer = block_modes(n_blocks, 1, n_blocks - 1), memory.least_buffers(0)
    least = min(runtime.step_ms(modes, 0, n_buffer, early) for early in range(most + 1))
    for limit_ms in (least * (1 - 1e-6), least * (1 + 1e-6), least * 1.1):
        assert takes_at_least(limit_ms, runtime, modes, 0, n_buffer, most) == (limit_ms < least)
    common = _Common(runtime, modes, (0, n_buffer, most), least)
    answers = [common.always_takes(least * 0.999) for _ in range(most + 3)]
    assert answers == [False] * (most + 1) + [True] * 2, "not before as many were simulated"
    monkeypatch.setattr(runtime, "step_ms", None)  # it is known now
    assert common.always_takes(least * 0.9)
    weights = runtime.making_weights()
    assert not _Common(weights, modes, (0, n_buffer, -1), least).always_takes(0.0), "of weights alone it is never said"


@pytest.mark.parametrize("seed", range(12))
def test_no_number_of_early_updates_close_to_the_best_is_left_out(seed: int) -> None:
    memory, runtime = drawn(seed, inside=False)
    n_blocks, n_chunks = len(memory.profile.blocks), len(memory.layout.chunks)
    for n_swap, n_ckpt, n_persist in ((0, n_blocks, 0), (1, n_blocks - 1, 0), (0, 1, 1)):
        modes, most = block_modes(n_blocks, n_swap, n_ckpt), n_chunks - n_persist
        n_buffer = memory.least_buffers(n_persist)
        times = [runtime.step_ms(modes, n_persist, n_buffer, early) for early in range(most + 1)]
        for likely, tolerance in ((0, 0.001), (most, 0.05), (times.index(min(times)), 0.0)):
            found = times_by_early(runtime, modes, n_persist, n_buffer, most, likely=likely, tolerance=tolerance)
            for time, known in zip(times, found, strict=True):
                assert known in (time, float("inf"))
                assert known == time or time > min(times) * (1 + tolerance)


def test_numbers_of_early_updates_whose_bounds_are_too_long_are_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, runtime = drawn(5, inside=False, host_adam_gparams=0.2)
    n_blocks, most = len(memory.profile.blocks), len(memory.layout.chunks)
    modes, n_buffer = block_modes(n_blocks, 0, n_blocks), memory.least_buffers(0)
    times = [runtime.step_ms(modes, 0, n_buffer, early) for early in range(most + 1)]
    likely, step_ms, tried = times.index(min(times)), runtime.step_ms, []

    def count(*args: Any, **options: Any) -> float:
        tried.append(args[3])
        return step_ms(*args, **options)

    monkeypatch.setattr(runtime, "step_ms", count)
    times_by_early(runtime, modes, 0, n_buffer, most, likely=likely, tolerance=0.001)
    assert tried[0] == likely
    assert len(tried) < len(times)
