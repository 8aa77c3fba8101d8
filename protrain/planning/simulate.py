"""A step as it really overlaps, worked out in order of issue on four lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out; an upload gets there once its chunk is updated
host      updates the other chunks, one after the other, in the order in which the next forward needs them

The engine's order of issue is known (:mod:`protrain.planning.fetches` for uploads), and every operation starts when
its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm known. The
step after the first is the steady state.

[Note: contention] What runs at the same time shares the link, the root complex, the host's DRAM and the card's power
(not in the paper). The first pass runs every operation at its own full rate; the second stretches each by what is left
of its rate beside the others (:mod:`protrain.planning.contention`), for the part of its time in which they ran in the
first, as if lanes were busy independently of each other within that time.

[Note: how many early updates] More are not always better. Gradients come in backward order, so what begins in time of
many early updates are chunks that the next forward needs last, and those that it needs first come after; of fewer it
may be all of them. The first pass knows when gradients arrive and when forward takes which chunk, and so for any number
how long that waits for updates; from the most that there may be it goes down until that does not fall any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, product, repeat
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.contention import OTHERS, Rates
from protrain.planning.fetches import Fetch
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, UP, Operation, Timeline

Times = NDArray[np.float64]

_TRIED = 3  # early updates fewer than what was best so far


@dataclass(frozen=True, slots=True)
class Visit:
    """A unit's turn in forward or backward, under one placement of the chunks."""

    name: str
    unit: int
    chunks: tuple[int, ...]  # in buffers, that it waits for
    fetches: Sequence[Fetch]
    gradients: tuple[tuple[int, bool], ...]  # backward: (index into Step.gradients, offloaded)


class Work(NamedTuple):
    """What a turn takes under one choice of block modes."""

    compute_ms: float
    swap_ms: float  # saved activations out after a forward, in before a backward; 0: not swapped
    swap_back: tuple[int, ...]  # in backward: units whose activations it fetches when it begins, its own or ahead


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that a step does; times in milliseconds at full rate."""

    forward: Sequence[Visit]
    backward: Sequence[Visit]
    forward_work: Sequence[Work]  # by visit
    backward_work: Sequence[Work]
    upload_ms: Sequence[float]  # by chunk
    swap_ms: Sequence[float]  # by unit: its saved activations to the device
    gradients: Sequence[tuple[int, float, float]]  # (chunk, flatten, offload)
    device_update_ms: Sequence[tuple[int, float]]  # (chunk, update) of persistent chunks
    host_update_ms: Sequence[tuple[int, float]]  # of the others, in execution order
    n_early: int  # of those, the first: updated as gradients come if that begins before backward is over
    after_host_ms: float  # at least, from the last host update to the end of forward
    chooses: bool = False  # n_early is how many there may be; see [Note: how many early updates]

    def host_updates(self, n_early: int) -> Sequence[tuple[int, float]]:
        """Host updates in the order in which they are done: as gradients come, then as the next forward needs them.

        ``n_early`` of the early ones begin in time: those whose gradients come first.
        """
        updates = self.host_update_ms
        first = self.n_early - n_early
        return [*updates[first : self.n_early][::-1], *updates[:first], *updates[self.n_early :]]


def simulate(step: Step, rates: Rates, *, limit_ms: float = inf) -> tuple[float, int]:
    """Milliseconds of one step in steady state, at least ``limit_ms`` as soon as it cannot be less; its early updates.

    Contention only makes operations longer, so the first pass bounds the second from below, unless uploads went in an
    order that depends on how long they and updates are; so does :func:`_least_ms`, in any order.
    """
    first = _Run.of(step)
    step = first.step
    if (first.step_ms >= limit_ms and not first.reordered) or not first.moves:
        return first.step_ms, step.n_early
    stretch = _stretches(first, rates)
    if limit_ms < inf and step.n_early < len(step.host_update_ms) and _least_ms(step, first, stretch) >= limit_ms:
        return limit_ms, step.n_early
    return _Run.of(step, stretch, first.n_early).step_ms, step.n_early


def _least_ms(step: Step, first: _Run, stretch: list[list[float]]) -> float:
    """What the second pass comes to at least: a quarter of its work.

    From one norm to the next go the host updates of the first step that wait for it, what follows them in forward, and
    backward: from the end of forward, when every upload and copy issued before it may be done. All with the durations
    of the second pass; later starts would only make the ends later. What the device updates comes after either norm.
    """
    starts, ends, factors = first.starts, first.ends, stretch[HOST]
    host_ms = sum((ends[HOST][at] - starts[HOST][at]) * factors[at] for at in range(step.n_early, len(factors) // 2))
    n_gpu, n_device = len(starts[GPU]) // 2, len(step.device_update_ms)
    after, before = (
        sum(duration * stretch[GPU][at] for at, (_, duration) in enumerate(step.device_update_ms, end - n_device))
        for end in (2 * n_gpu, n_gpu)
    )
    return host_ms + step.after_host_ms + _Run.backward_ms(step, stretch) + after - before


def timeline(step: Step, rates: Rates) -> Timeline:
    """The same with every operation."""
    run = _Run.of(step)
    if run.moves:
        run = _Run.of(step, _stretches(run, rates), run.n_early)
    step, begin = run.step, run.begin_ms
    operations = [
        Operation(lane=lane, name=f"{kind} {what}", start_ms=start - begin, end_ms=end - begin)
        for lane, names in enumerate(_names(step, run))
        for (kind, what), start, end in zip(names * 2, run.starts[lane], run.ends[lane], strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.forward_end_ms - begin,
        backward_end_ms=run.backward_end_ms - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )


def _names(step: Step, run: _Run) -> list[list[tuple[str, object]]]:
    """By lane, what it does in the second step in the order of issue: what and with what."""
    n_early = run.n_early or 0
    names: list[list[tuple[str, object]]] = [[], [], [], []]
    names[UP] = [("weights", fetch.chunk) for fetch in run.uploads]
    for visit, work in zip(step.forward, step.forward_work, strict=True):
        names[GPU].append(("forward", visit.name))
        if work.swap_ms:
            names[DOWN].append(("activations", visit.name))
    for visit, work in zip(step.backward, step.backward_work, strict=True):
        names[UP] += [("weights", fetch.chunk) for fetch in visit.fetches]
        names[UP] += [("activations", unit) for unit in work.swap_back]
        names[GPU].append(("backward", visit.name))
        names[GPU] += [("flatten", step.gradients[index][0]) for index, _ in visit.gradients]
        names[DOWN] += [("gradients", step.gradients[index][0]) for index, offloaded in visit.gradients if offloaded]
    updates = step.host_updates(n_early)
    names[HOST] = [("early update" if at < n_early else "update", chunk) for at, (chunk, _) in enumerate(updates)]
    names[GPU] += [("update", chunk) for chunk, _ in step.device_update_ms]
    return names


class _Run:
    """Two steps, the second of them in steady state.

    The search spends its time here, so operations are written out on local variables and not called.
    """

    def __init__(self, step: Step, stretch: list[Iterator[float]], start_ms: float) -> None:
        self.step = step  # with the early updates that were chosen
        self._stretch = stretch  # by lane, for one operation after the other
        self.n_early: int | None = None  # early updates that begin in time; found in the first step
        self.uploads: list[Fetch] = []  # of forward, as they get to the link
        self.reordered = False  # some went before others that were issued earlier
        self.step_ms = self.begin_ms = self.forward_end_ms = self.backward_end_ms = 0.0  # of the second step
        self.starts: list[list[float]] = [[], [], [], []]
        self.ends: list[list[float]] = [[], [], [], []]
        self._free = [start_ms] * 4
        n_chunks = len(step.upload_ms)
        self._updated = [start_ms] * n_chunks  # by chunk: its host update is done
        self._all_updated = start_ms
        self._released = [start_ms] * (n_chunks + 1)  # the GPU has read its buffer; at the end (-1) an empty buffer's
        self._loaded = [start_ms] * n_chunks  # a frozen one may be there all the time
        self._offloaded = [start_ms] * n_chunks
        self._drained = [start_ms, start_ms]  # gradient staging
        self._swapped = [start_ms] * len(step.swap_ms)  # by unit: its activations are in host memory
        self._back = [start_ms] * len(step.swap_ms)  # they are on the device again
        self._unsettled = start_ms

    @classmethod
    def of(cls, step: Step, stretch: list[list[float]] | None = None, n_early: int | None = None) -> _Run:
        """Both steps. Stretches belong to operations in the order of the run that they come from, and its n_early."""
        run = cls(step, [iter(one) for one in stretch] if stretch else [repeat(1.0)] * 4, 0.0)
        run.n_early = n_early
        ends = []
        for _ in range(2):
            run.begin_ms = run._free[GPU]
            run._forward()
            run.forward_end_ms = run._free[GPU]
            run._backward()
            run.backward_end_ms = run._free[GPU]
            run._update()
            ends.append(run._free[GPU])
        run.step_ms = ends[1] - ends[0]
        return run

    @classmethod
    def backward_ms(cls, step: Step, stretch: list[list[float]]) -> float:
        """The second backward by itself, as if all that was issued before had long been done."""
        n_before = [
            len(step.forward_work),
            sum(len(visit.fetches) for visit in step.forward),
            sum(work.swap_ms > 0 for work in step.forward_work),
            0,
        ]
        at = [len(factors) // 2 + before for factors, before in zip(stretch, n_before, strict=True)]
        run = cls(step, [islice(factors, first, None) for factors, first in zip(stretch, at, strict=True)], -inf)
        run._free[GPU] = 0.0
        run._backward()
        return run._free[GPU]

    @property
    def moves(self) -> bool:
        """Whether anything but the GPU works."""
        return any(self.starts[lane] for lane in (UP, DOWN, HOST))

    def _do(self, lane: int, earliest: float, duration: float) -> float:
        start = max(self._free[lane], earliest)
        end = self._free[lane] = start + duration * next(self._stretch[lane])
        self.starts[lane].append(start)
        self.ends[lane].append(end)
        return end

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """Weights go up, each when it is updated and its buffer given up."""
        up, stretch, starts, ends = self._free[UP], self._stretch[UP], self.starts[UP], self.ends[UP]
        updated, released, loaded, upload_ms = self._updated, self._released, self._loaded, self.step.upload_ms
        for chunk, victim in fetches:
            start = up
            if updated[chunk] > start:
                start = updated[chunk]
            if released[victim] > start:
                start = released[victim]
            up = loaded[chunk] = start + upload_ms[chunk] * next(stretch)
            starts.append(start)
            ends.append(up)
        self._free[UP] = up

    def _fetch_updated(self, fetches: Sequence[Fetch]) -> Sequence[Fetch]:
        """The same for those issued at once when forward begins; what is updated does not wait for what is not.

        Returns them as they went.
        """
        updated, left, gone = self._updated, list(fetches), []
        while left:
            free = self._free[UP]
            first = min(left, key=lambda fetch: max(free, updated[fetch.chunk]))  # of several the nearest
            left.remove(first)
            gone.append(first)
            self._fetch((first,))
        self.reordered = self.reordered or gone != list(fetches)
        return gone

    def _forward(self) -> None:
        gpu, stretch, starts, ends = self._free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        released, loaded, unsettled = self._released, self._loaded, self._unsettled
        self.uploads = []
        for visit, work in zip(self.step.forward, self.step.forward_work, strict=True):
            fetches = visit.fetches
            if fetches:
                if len(fetches) > 1 and self._all_updated > self._free[UP]:
                    fetches = self._fetch_updated(fetches)
                else:
                    self._fetch(fetches)
                self.uploads += fetches
            start = gpu
            chunks = visit.chunks
            for chunk in chunks:
                if loaded[chunk] > start:
                    start = loaded[chunk]
            gpu = start + work.compute_ms * next(stretch)
            starts.append(start)
            ends.append(gpu)
            for chunk in chunks:
                released[chunk] = gpu
            # The memory of the last swapped block is given up, for which the GPU waits for the copy.
            if unsettled > gpu:
                gpu = unsettled
            if work.swap_ms:
                unsettled = self._swapped[visit.unit] = self._do(DOWN, gpu, work.swap_ms)
        self._free[GPU] = gpu
        self._unsettled = unsettled

    def _backward(self) -> None:
        gpu, stretch, starts, ends = self._free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        down, stretch_down = self._free[DOWN], self._stretch[DOWN]
        starts_down, ends_down = self.starts[DOWN], self.ends[DOWN]
        released, loaded, drained, gradients = self._released, self._loaded, self._drained, self.step.gradients
        if self._unsettled > gpu:
            gpu = self._unsettled
        turn = 0
        for visit, work in zip(self.step.backward, self.step.backward_work, strict=True):
            start = gpu
            if visit.fetches:
                self._fetch(visit.fetches)
            for unit in work.swap_back:
                earliest = max(gpu, self._swapped[unit])  # allocated when the visit begins
                self._back[unit] = self._do(UP, earliest, self.step.swap_ms[unit])
            chunks = visit.chunks
            for chunk in chunks:
                if loaded[chunk] > start:
                    start = loaded[chunk]
            if work.swap_ms and self._back[visit.unit] > start:
                start = self._back[visit.unit]
            gpu = start + work.compute_ms * next(stretch)
            starts.append(start)
            ends.append(gpu)
            for chunk in chunks:
                released[chunk] = gpu
            for index, offloaded in visit.gradients:
                chunk, flatten_ms, offload_ms = gradients[index]
                start = gpu
                if offloaded and drained[turn] > start:
                    start = drained[turn]
                gpu = start + flatten_ms * next(stretch)
                starts.append(start)
                ends.append(gpu)
                if offloaded:
                    start = down if down > gpu else gpu
                    down = start + offload_ms * next(stretch_down)
                    starts_down.append(start)
                    ends_down.append(down)
                    drained[turn] = self._offloaded[chunk] = down
                    turn = 1 - turn
        self._free[GPU], self._free[DOWN] = gpu, down

    def _update(self) -> None:
        over = self._free[GPU]  # backward is, and the norm known
        if self.n_early is None:
            if self.step.chooses:
                self.step = self._chosen(over)
            self.n_early = self._in_time(self.step, over)
        step, n_early = self.step, self.n_early
        updates, updated = step.host_updates(n_early), self._updated
        for chunk, duration in updates[:n_early]:
            self._do(HOST, self._offloaded[chunk], duration)
        settled = max(over, self._free[HOST])  # the host looks at early ones when the norm is known and none runs
        for chunk, _ in updates[:n_early]:
            updated[chunk] = settled
        for chunk, duration in updates[n_early:]:
            updated[chunk] = self._do(HOST, max(over, self._offloaded[chunk]), duration)
        self._all_updated = max(over, self._free[HOST])
        for _, duration in step.device_update_ms:
            self._do(GPU, 0.0, duration)

    def _chosen(self, over: float) -> Step:
        """The step with a number of early updates for which its next forward waits least."""
        used: dict[int, float] = {}
        for visit, start in zip(self.step.forward, self.starts[GPU], strict=False):
            for chunk in visit.chunks:
                used.setdefault(chunk, start)
        # What is fetched once more is for backward.
        uploads = [
            (fetch.chunk, start, used.pop(fetch.chunk, inf))
            for fetch, start in zip(self.uploads, self.starts[UP], strict=False)
        ]
        chosen, least = self.step, self._wait_ms(self.step, over, uploads)
        none = replace(chosen, n_early=0)
        if least >= self._wait_ms(none, over, uploads):
            return none
        for n_early in range(self.step.n_early - 1, 0, -1):
            if least <= 0 or n_early < chosen.n_early - _TRIED:
                break
            fewer = replace(chosen, n_early=n_early)
            wait = self._wait_ms(fewer, over, uploads)
            if wait <= least:
                chosen, least = fewer, wait
        return chosen

    def _wait_ms(self, step: Step, over: float, uploads: list[tuple[int, float, float]]) -> float:
        """How long forward waits for updates, by its ``uploads`` without them: chunk, start and when it is used."""
        in_time = self._in_time(step, over)
        updates, free, done = step.host_updates(in_time), self._free[HOST], [0.0] * len(step.upload_ms)
        for chunk, duration in updates[:in_time]:
            free = max(free, self._offloaded[chunk]) + duration
        for chunk, _ in updates[:in_time]:
            done[chunk] = free
        for chunk, duration in updates[in_time:]:
            free = done[chunk] = max(free, over, self._offloaded[chunk]) + duration
        link = wait = 0.0
        issued = [(max(start, done[chunk] - over), chunk, use) for chunk, start, use in uploads]
        for ready, chunk, use in sorted(issued):
            link = max(link, ready) + step.upload_ms[chunk]
            wait = max(wait, link - use)
        return wait

    def _in_time(self, step: Step, over: float) -> int:
        """How many early updates of ``step`` begin before backward is ``over``."""
        free = self._free[HOST]
        for count, (chunk, duration) in enumerate(step.host_update_ms[: step.n_early][::-1]):
            start = max(free, self._offloaded[chunk])
            if start >= over:
                return count
            free = start + duration
        return step.n_early


def _stretches(run: _Run, rates: Rates) -> list[list[float]]:
    """By lane, per operation the factor on its duration. See [Note: contention]."""
    counts = [len(starts) for starts in run.starts]
    starts = np.array([moment for lane in run.starts for moment in lane])
    ends = np.array([moment for lane in run.ends for moment in lane])
    firsts = [0, *accumulate(counts)]
    lanes = [slice(first, last) for first, last in pairwise(firsts)]
    lengths = np.maximum(ends - starts, 1e-9)
    # By lane, per operation of any lane: the part of its time that the lane works, between 0 and 1.
    shares = []
    for lane in lanes:
        busy = _busy(starts[lane], ends[lane], ends) - _busy(starts[lane], ends[lane], starts)
        shares.append(np.clip(busy / lengths, 0.0, 1.0))
    beside = [
        np.concatenate([shares[others[which]][lane] for others, lane in zip(OTHERS, lanes, strict=True)])
        for which in range(len(LANES) - 1)
    ]
    alone = [1.0 - share for share in beside]
    rate = np.zeros(len(starts))
    for present in product((False, True), repeat=len(beside)):
        first, second, third = (beside[at] if runs else alone[at] for at, runs in enumerate(present))
        rate += first * second * third * np.repeat([of_lane[present] for of_lane in rates], counts)
    factors: list[float] = (1.0 / rate).tolist()
    return [factors[lane] for lane in lanes]


def _busy(starts: Times, ends: Times, until: Times) -> Times:
    """How much of the time up to each moment of ``until`` operations take that follow each other."""
    if not starts.size:
        return np.zeros_like(until)
    lengths = ends - starts
    before = np.concatenate(([0.0], np.cumsum(lengths)))  # busy time before each operation
    at = np.searchsorted(starts, until, side="right") - 1
    inside = np.minimum(until, ends[at]) - starts[at]
    return np.where(at < 0, 0.0, before[at] + inside)
