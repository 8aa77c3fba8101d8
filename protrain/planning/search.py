"""The search: the integers that make a step fastest within the memory there is (paper section 4).

It is a pattern search from several starts, which race. A grid over the integers that follow from no others finds where
to begin. The smaller the model, the finer the grid. From the best of its plans, every integer is changed by a step,
alone or together with integers that trade against it, and a change that makes the step faster is kept. Then the
slowest third of the plans is out of the race, and the step halves, until it was 1. What each integer may be is said by
``protrain.planning.ranges``. Every time and size comes from the models of ``protrain.planning.predict``, in a fixed
order, so the search is deterministic.

Some integers follow from others. Offloading inputs only makes a step longer, and what it gains is memory for buffers.
So a plan offloads the fewest inputs with which as many buffers fit as the search asks for. More buffers hardly ever
make a step slower, so a plan has all that fit. Speculative updates compute only the weight if host memory has no room
for more.

[Note: what a plan is judged by] A plan's score is its step time on a host that is slower than usual
(``protrain.planning.rates``), plus a share of that time for every mechanism that costs memory:
``_MUST_GAIN``. The small shares break ties. Among plans that are as fast, the plan with the fewest transfers wins,
since a transfer may be late. A clipped step makes every speculative update twice, and plans expect that a few steps are
clipped. So a plan with device memory to spare keeps more chunks there.

If the whole training fits on the device, another plan must save ``_MOVING_MUST_GAIN``. An update on the host saves at
most about the bandwidth of the host's memory divided by that of the device's, 4% to 5% on an H100. It can cost far
more, because Python launches kernels more slowly beside it, and the model of a step does not know that. An eager model
of 1.35 B parameters with 8 x 1024 tokens took 206 ms on an H100 with everything on the device. A plan that updated half
of it on the host took 256 ms, where 203 ms had been predicted (torch 2.11, bench/results/h100/NOTES.md).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np

from protrain.hardware.profile import HardwareProfile
from protrain.planning.fits import nothing_fits
from protrain.planning.layout import pack
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import Counts, Plan
from protrain.planning.predict import Models
from protrain.planning.ranges import ranges
from protrain.planning.segments import Bytes
from protrain.profiler.model_profile import ModelProfile

# Shares of a step that a mechanism must save: see [Note: what a plan is judged by].
_MUST_GAIN = {"n_weight_only": 0.01, "keep_attention": 0.01}
_MOVING_MUST_GAIN = 0.05
_PER_CHUNK = {
    "n_persist": -0.005,
    "n_speculate": 0.001,
    "n_device_sum": 0.001,
}  # shares of a step if the integer counts all chunks
_PER_BLOCK = {"n_swap": 0.01, "n_ckpt_swap": 0.002}  # shares of a step if the integer counts all blocks
_PLACEMENTS = 8  # the numbers of persistent chunks on the grid
_VALUES = 64  # the grid has so many values of other integers, divided by the number of chunks or blocks; two at least
_FIRST_STEP = 3  # the first step is the number of chunks or blocks divided by this
_GAIN = 1e-4  # the least share of a step that a change must save, while steps are longer than 1

# By how many steps each integer changes. n_ckpt_swap is not among them, as it follows from the others.
_DIRECTIONS = [
    {name: sign * by for name, by in together.items()}
    for together in (
        *({name: 1} for name in Counts._fields if name != "n_ckpt_swap"),
        {"n_persist": 1, "n_ckpt": 1},
        {"n_persist": 1, "n_ckpt": 1, "n_speculate": -1},
        {"n_swap": 1, "n_ckpt": -1},
        {"n_speculate": 1, "n_weight_only": 1},
    )
    for sign in (1, -1)
]


class _Found(NamedTuple):
    """A plan that fits, and its score: see [Note: what a plan is judged by]."""

    score_ms: float
    keeps: bool  # whether recomputed blocks keep the outputs of attention
    counts: Counts


def search(
    profile: ModelProfile,
    hardware: HardwareProfile,
    *,
    chunk_elements: int | None = None,
    n_starts: int = 12,
) -> Plan:
    """The plan for ``profile`` on ``hardware`` with the shortest step: see [Note: what a plan is judged by].

    Its ``step_ms`` is for ``hardware`` as it was calibrated.

    Args:
        profile: of the model and the batch.
        hardware: the machine; its ``device_bytes`` and ``host_bytes`` are the limits.
        chunk_elements: size of a chunk; default: ``protrain.planning.layout.choose_chunk_elements``.
        n_starts: the plans with which the race begins. From one start a search takes a third of the time, and finds
            plans that are up to 2% slower (eight models on H100s and RTX cards).

    Raises:
        PlanError: nothing fits. The error says what is needed, what there is, and the smallest change that fits.
        ValueError: ``chunk_elements`` does not suit the model.
    """
    return _Search(profile, hardware, chunk_elements, n_starts).run()


class _Search:
    def __init__(
        self, profile: ModelProfile, hardware: HardwareProfile, chunk_elements: int | None, n_starts: int
    ) -> None:
        self._hardware = hardware
        self._n_starts = n_starts
        layout = pack(profile, chunk_elements, hardware.world_size)
        attends = any(block.attention_bytes for block in profile.blocks)
        self._models = {  # without kept attention, and with it if there is any
            keeps: Models(MemoryModel(profile.keeping_attention() if keeps else profile, hardware, layout))
            for keeps in ((False, True) if attends else (False,))
        }
        self._largest = max(self._models[False].n_chunks, self._models[False].n_blocks)
        self._scores_ms: dict[tuple[bool, Counts], float] = {}
        self._roomy = cache(self._roomy_of)

    def run(self) -> Plan:
        """The best plan that is found."""
        racing = sorted({*self._grid()})[: self._n_starts]
        if not racing:
            raise nothing_fits(self._models[False].memory)
        for keeps in self._models:  # the best start races without kept attention and with it
            if counts := self._fitted(keeps, racing[0].counts):
                racing.append(self._scored(keeps, counts))
        step, n_racing = max(2, self._largest // _FIRST_STEP), self._n_starts
        while step:
            n_racing -= n_racing // 3
            racing = sorted({self._descended(found, step) for found in racing})[:n_racing]
            step //= 2
        return self._models[racing[0].keeps].plan(racing[0].counts)

    def _grid(self) -> list[_Found]:
        """The best plans with values of every integer from the fewest to the most."""
        models = self._models[False]
        n_chunks, n_blocks = models.n_chunks, models.n_blocks
        fitting = [n for n in range(n_chunks + 1) if self._fitted(False, Counts(n, 0, 0, n_blocks))]
        best: list[_Found] = []
        if not fitting:
            return best
        n_values = max(2, _VALUES // self._largest)
        blocks = _spread(n_blocks, n_values)
        for place in reversed(_spread(len(fitting) - 1, _PLACEMENTS)):
            n_persist = fitting[place]
            away = _spread(n_chunks - n_persist, n_values)
            sums = _spread(n_chunks - n_persist, 3) if models.memory.accumulates else [0]
            updates = [(n_speculate, n) for n_speculate in away for n in sorted({0, n_speculate})]
            for n_swap, n_ckpt, (n_speculate, n_weight_only), n_sum in product(blocks, blocks, updates, sums):
                wanted = Counts(n_persist, 0, n_swap, n_ckpt, 0, n_speculate, n_weight_only, n_sum)
                if counts := self._fitted(False, wanted):
                    limit_ms = best[-1].score_ms if len(best) == self._n_starts else inf
                    best = sorted({*best, self._scored(False, counts, limit_ms)})[: self._n_starts]
        return best

    def _fitted(self, keeps: bool, wanted: Counts, *, more_ckpt: bool = True) -> Counts | None:
        """The plan nearest to ``wanted`` that fits the memory, None if there is none.

        With ``more_ckpt`` it recomputes as few more blocks as make room for the wanted number of buffers, or for as
        many as possible. Then it offloads as few inputs as make room for them, and takes all buffers that fit.
        """
        models = self._models[keeps]
        allowed, memory = ranges(wanted, models), models.memory
        if any(allowed[name].why_not(getattr(wanted, name)) for name in ("n_persist", "n_swap", "n_ckpt")):
            return None
        n_persist, n_swap = wanted.n_persist, wanted.n_swap
        n_sum = allowed["n_device_sum"].nearest(wanted.n_device_sum)
        enough = allowed["n_buffer"].nearest(wanted.n_buffer)
        most_ckpt = allowed["n_ckpt"].most if more_ckpt else wanted.n_ckpt
        n_ckpt, n_buffer, swapped_bytes = self._roomy(keeps, enough, n_persist, n_sum, n_swap, wanted.n_ckpt, most_ckpt)
        most = int(n_buffer.max())
        if most < 0:
            return None
        n_ckpt_swap = int(np.argmax(n_buffer >= min(enough, most)))  # the fewest
        n_speculate = allowed["n_speculate"].nearest(wanted.n_speculate) if models.steps.speculates else 0
        n_speculate, least = memory.speculation(n_persist, n_speculate, int(swapped_bytes[n_ckpt_swap]), n_sum)
        n_weight_only, buffers = min(max(wanted.n_weight_only, least), n_speculate), int(n_buffer[n_ckpt_swap])
        return Counts(n_persist, buffers, n_swap, n_ckpt, n_ckpt_swap, n_speculate, n_weight_only, n_sum)

    def _roomy_of(
        self, keeps: bool, enough: int, n_persist: int, n_device_sum: int, n_swap: int, least_ckpt: int, most_ckpt: int
    ) -> tuple[int, Bytes, Bytes]:
        """The fewest recomputed blocks that make room for ``enough`` buffers, or for as many as possible.

        Returns:
            n_ckpt, and two arrays by the number of offloaded inputs: the number of buffers that fit (-1 if the plan
            does not fit), and the host memory of offloaded inputs and swapped activations.
        """
        memory, found = self._models[keeps].memory, []
        host_bytes = memory.least_host_bytes(n_persist, 0, n_device_sum)
        for n_ckpt in range(least_ckpt, most_ckpt + 1):
            margined_bytes, swapped_bytes = memory.offloads(n_swap, n_ckpt)
            fits_host = host_bytes + swapped_bytes <= self._hardware.host_bytes
            n_buffer = np.where(fits_host, memory.most_buffers(n_persist, margined_bytes, n_device_sum), -1)
            found.append((n_ckpt, n_buffer, swapped_bytes))
            if n_buffer.max() >= enough:
                return found[-1]
        return max(found, key=lambda room: int(room[1].max()))

    def _scored(self, keeps: bool, counts: Counts, limit_ms: float = inf) -> _Found:
        """``counts`` with their score, which is infinite if it is clear without a simulation that it is too long."""
        score_ms = self._scores_ms.get((keeps, counts), inf)
        if score_ms == inf:
            models = self._models[keeps]
            share = _share(counts, models)
            score_ms = share * models.judged_ms(models.modes(counts), counts, limit_ms=limit_ms / share)
            self._scores_ms[keeps, counts] = score_ms
        return _Found(score_ms, keeps, counts)

    def _descended(self, best: _Found, step: int) -> _Found:
        """The plan to which ``best`` improves with changes by ``step``."""
        gain = _GAIN * (step > 1)
        improved = True
        while improved:
            improved = False
            for direction in _DIRECTIONS:
                more_ckpt = direction.get("n_ckpt", 0) >= 0
                while counts := self._fitted(best.keeps, _moved(best.counts, direction, step), more_ckpt=more_ckpt):
                    limit_ms = best.score_ms * (1 - gain)
                    found = self._scored(best.keeps, counts, limit_ms)
                    if found.score_ms >= limit_ms:
                        break
                    best, improved = found, True
        return best


def _spread(most: int, n_values: int) -> list[int]:
    """``n_values`` integers from 0 to ``most`` in even distances, or as many as there are."""
    return sorted({round(at * most / (n_values - 1)) for at in range(n_values)})


def _moved(counts: Counts, direction: dict[str, int], step: int) -> Counts:
    """``counts`` after ``step`` steps in ``direction``."""
    return counts._replace(**{name: getattr(counts, name) + step * by for name, by in direction.items()})


def _share(counts: Counts, models: Models) -> float:
    """The factor on the mean step time: see [Note: what a plan is judged by]."""
    used = {**counts._asdict(), "keep_attention": models.keep_attention}
    share = 1.0 + sum(gain for name, gain in _MUST_GAIN.items() if used[name])
    if counts.n_persist < models.n_chunks or counts.n_ckpt or counts.n_swap:
        share += _MOVING_MUST_GAIN
    share += sum(each * used[name] for name, each in _PER_CHUNK.items()) / max(1, models.n_chunks)
    return share + sum(each * used[name] for name, each in _PER_BLOCK.items()) / max(1, models.n_blocks)
