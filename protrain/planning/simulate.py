"""A step as it really overlaps, worked out in order of issue on five lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out; an upload gets there once its chunk is updated
host      updates the other chunks, one after the other, in the order in which the next forward needs them
streamed  some of those, updated by the device through the link, likewise (:mod:`protrain.planning.streaming`)

The engine's order of issue is known (:mod:`protrain.planning.fetches` for uploads), and every operation starts when
its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm known. The
step after the first is the steady state.

The first pass runs every operation at its own full rate; the second stretches each by what is left of that beside the
others (:mod:`protrain.planning.stretches`).

[Note: how many early updates] More are not always better. Gradients come in backward order, so what begins in time of
many early updates are chunks that the next forward needs last, and those that it needs first come after; of fewer it
may be all of them. The first pass knows when gradients arrive and when forward takes which chunk, and so for any number
how long that waits for updates; from the most that there may be it goes down until that does not fall any more.

[Note: waiting for regions] Inside backward, gradients share regions of host memory. Where none is free the engine waits
for the update of the chunk that has been complete for the longest time, before it issues anything else: the GPU does
what it has, which ends with the gradient that needs room, and then nothing until that update is done. Which updates
those are does not depend on how long anything takes (:mod:`protrain.planning.gradient_regions`), so they are in no
queue, and of each lane they come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, repeat
from math import inf
from typing import NamedTuple

from protrain.planning.contention import Rates
from protrain.planning.fetches import Fetch
from protrain.planning.stretches import stretches
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP, Operation, Timeline
from protrain.planning.updating import Queue

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


class Update(NamedTuple):
    """One that others wait for; see [Note: waiting for regions]."""

    lane: int  # HOST or STREAM
    chunk: int
    ms: float


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
    host: Queue  # of the others, but for those that make room
    streamed: Queue  # likewise, by the device
    after_host_ms: float  # at least, from the last host update to the end of forward, where nothing is streamed
    making_room: Mapping[int, Update] = field(default_factory=dict)  # by gradient that has no room until one is over
    chooses: bool = False  # host.n_early is how many there may be; see [Note: how many early updates]


def simulate(step: Step, rates: Rates, *, limit_ms: float = inf) -> tuple[float, int]:
    """Milliseconds of one step in steady state, at least ``limit_ms`` as soon as it cannot be less; its early updates.

    Contention only makes operations longer, so the first pass bounds the second from below, unless uploads went in an
    order that depends on how long they and updates are; so does :func:`_least_ms`, in any order.
    """
    first = _Run.of(step)
    step, n_early = first.step, first.step.host.n_early
    if (first.step_ms >= limit_ms and not first.reordered) or not first.moves:
        return first.step_ms, n_early
    stretch = stretches(first.starts, first.ends, rates)
    waits = n_early < len(step.host.updates) and not step.streamed.updates
    if limit_ms < inf and waits and _least_ms(step, first, stretch) >= limit_ms:
        return limit_ms, n_early
    return _Run.of(step, stretch, first.in_time).step_ms, n_early


def _least_ms(step: Step, first: _Run, stretch: list[list[float]]) -> float:
    """What the second pass comes to at least where nothing is streamed: a quarter of its work.

    From one norm to the next go the host updates of the first step that wait for it, what follows them in forward, and
    backward: from the end of forward, when every upload and copy issued before it may be done. All with the durations
    of the second pass; later starts would only make the ends later. What the device updates comes after either norm.
    """
    starts, ends, factors = first.starts, first.ends, stretch[HOST]
    host_ms = sum(
        (ends[HOST][at] - starts[HOST][at]) * factors[at] for at in range(step.host.n_early, len(factors) // 2)
    )
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
        run = _Run.of(step, stretches(run.starts, run.ends, rates), run.in_time)
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
    in_time = run.in_time or (0, 0)
    names: list[list[tuple[str, object]]] = [[] for _ in LANES]
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
    for update in step.making_room.values():
        names[update.lane].append(("early update", update.chunk))
    for lane, queue, early in zip((HOST, STREAM), (step.host, step.streamed), in_time, strict=True):
        updates = queue.ordered(early)
        names[lane] += [("early update" if at < early else "update", chunk) for at, (chunk, _) in enumerate(updates)]
    names[GPU] += [("update", chunk) for chunk, _ in step.device_update_ms]
    return names


class _Run:
    """Two steps, the second of them in steady state.

    The search spends its time here, so operations are written out on local variables and not called.
    """

    def __init__(self, step: Step, stretch: list[Iterator[float]], start_ms: float) -> None:
        self.step = step  # with the early updates that were chosen
        self._stretch = stretch  # by lane, for one operation after the other
        self.in_time: tuple[int, int] | None = None  # early updates, host and device; found in the first step
        self.uploads: list[Fetch] = []  # of forward, as they get to the link
        self.reordered = False  # some went before others that were issued earlier
        self.step_ms = self.begin_ms = self.forward_end_ms = self.backward_end_ms = 0.0  # of the second step
        self.starts: list[list[float]] = [[] for _ in LANES]
        self.ends: list[list[float]] = [[] for _ in LANES]
        self._free = [start_ms] * len(LANES)
        n_chunks = len(step.upload_ms)
        self._updated = [start_ms] * n_chunks  # by chunk: its update in host memory is done
        self._all_updated = start_ms
        self._released = [start_ms] * (n_chunks + 1)  # the GPU has read its buffer; at the end (-1) an empty buffer's
        self._loaded = [start_ms] * n_chunks  # a frozen one may be there all the time
        self._offloaded = [start_ms] * n_chunks
        self._drained = [start_ms, start_ms]  # gradient staging
        self._swapped = [start_ms] * len(step.swap_ms)  # by unit: its activations are in host memory
        self._back = [start_ms] * len(step.swap_ms)  # they are on the device again
        self._unsettled = start_ms

    @classmethod
    def of(cls, step: Step, stretch: list[list[float]] | None = None, in_time: tuple[int, int] | None = None) -> _Run:
        """Both steps. Stretches belong to operations in the order of the run that they come from, and its in_time."""
        run = cls(step, [iter(one) for one in stretch] if stretch else [repeat(1.0)] * len(LANES), 0.0)
        run.in_time = in_time
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
        return any(self.starts[lane] for lane in (UP, DOWN, HOST, STREAM))

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
        making_room = self.step.making_room
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
                    if index in making_room:
                        lane, before, duration = making_room[index]
                        room = self._do(lane, self._offloaded[before], duration)
                        self._free[UP] = max(self._free[UP], room)  # what comes next is not issued before
                        if room > gpu:
                            gpu = room
                    start = down if down > gpu else gpu
                    down = start + offload_ms * next(stretch_down)
                    starts_down.append(start)
                    ends_down.append(down)
                    drained[turn] = self._offloaded[chunk] = down
                    turn = 1 - turn
        self._free[GPU], self._free[DOWN] = gpu, down

    def _update(self) -> None:
        over = self._free[GPU]  # backward is, and the norm known
        if self.in_time is None:
            if self.step.chooses:
                self.step = self._chosen(over)
            self.in_time = (
                self.step.host.in_time(self._free[HOST], self._offloaded, over),
                self.step.streamed.in_time(self._free[STREAM], self._offloaded, over),
            )
        updated, queues = self._updated, (self.step.host, self.step.streamed)
        for lane, queue, in_time in zip((HOST, STREAM), queues, self.in_time, strict=True):
            updates = queue.ordered(in_time)
            for chunk, duration in updates[:in_time]:
                self._do(lane, self._offloaded[chunk], duration)
            settled = max(over, self._free[lane])  # early ones are looked at when the norm is known and none runs
            for chunk, _ in updates[:in_time]:
                updated[chunk] = settled
            for update in self.step.making_room.values():
                if update.lane == lane:
                    updated[update.chunk] = settled
            for chunk, duration in updates[in_time:]:
                updated[chunk] = self._do(lane, max(over, self._offloaded[chunk]), duration)
        self._all_updated = max(over, self._free[HOST], self._free[STREAM])
        for _, duration in self.step.device_update_ms:
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
        chosen, least = self.step.host, self._wait_ms(self.step.host, over, uploads, inf)
        none = chosen._replace(n_early=0)
        if least >= self._wait_ms(none, over, uploads, least):
            return replace(self.step, host=none)
        for n_early in range(chosen.n_early - 1, 0, -1):
            if least <= 0 or n_early < chosen.n_early - _TRIED:
                break
            fewer = chosen._replace(n_early=n_early)
            wait = self._wait_ms(fewer, over, uploads, least)
            if wait <= least:
                chosen, least = fewer, wait
        return replace(self.step, host=chosen)

    def _wait_ms(self, host: Queue, over: float, uploads: list[tuple[int, float, float]], limit_ms: float) -> float:
        """How long forward waits for updates, by its ``uploads`` without them: chunk, start and when it is used.

        If above ``limit_ms``, by how much is open.
        """
        offloaded, upload_ms = self._offloaded, self.step.upload_ms
        in_time = host.in_time(self._free[HOST], offloaded, over)
        updates, free, done = host.ordered(in_time), self._free[HOST], [0.0] * len(upload_ms)
        for chunk, duration in updates[:in_time]:
            free = max(free, offloaded[chunk]) + duration
        for chunk, _ in updates[:in_time]:
            done[chunk] = free
        free = max(free, over)
        for chunk, duration in updates[in_time:]:
            free = done[chunk] = max(free, offloaded[chunk]) + duration
        link = wait = 0.0
        for ready, chunk, use in sorted(
            [(max(start, done[chunk] - over), chunk, use) for chunk, start, use in uploads]
        ):
            if ready > link:
                link = ready
            link += upload_ms[chunk]
            if link - use > wait:
                wait = link - use
                if wait > limit_ms:
                    break
        return wait
