"""A step as it really overlaps, worked out in order of issue on five lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out; an upload gets there once its chunk is updated
host      updates the other chunks, one after the other, in the order in which the next forward needs them
streamed  some of those, updated by the device through the link, likewise (:mod:`protrain.planning.streaming`)

The engine's order of issue is known (:mod:`protrain.planning.fetches` for uploads), and every operation starts when
its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm known. The
step after the first is the steady state.

The first pass runs every operation at its own full rate; the second stretches each by what is left of that beside the
others (:mod:`protrain.planning.stretches`). The first also chooses how many updates the host does early, where that is
open: [Note: how many early updates] in :mod:`protrain.planning.updating`.

[Note: waiting for regions] Inside backward, gradients share regions of host memory. Where none is free the engine waits
for the update of the chunk that has been complete for the longest time, before it issues anything else: the GPU does
what it has, which ends with the gradient that needs room, and then nothing until that update is done. Which updates
those are does not depend on how long anything takes (:mod:`protrain.planning.gradient_regions`), so they are in no
queue, and of each lane they come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, repeat
from math import inf

from protrain.planning.contention import Rates
from protrain.planning.early_weights import least_waiting_weights, next_gradients
from protrain.planning.fetches import Fetch
from protrain.planning.step import Step
from protrain.planning.stretches import stretches
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP, Operation, Timeline
from protrain.planning.updating import Known, Queue, least_waiting


def simulate(step: Step, rates: Rates, *, limit_ms: float = inf) -> tuple[float, int]:
    """Milliseconds of one step in steady state, at least ``limit_ms`` as soon as it cannot be less; its early updates.

    Contention only makes operations longer, so the first pass bounds the second from below, unless uploads went in an
    order that depends on how long they and updates are, and but for what the last early update lasts beyond backward,
    which a longer backward hides. So does :func:`_least_ms`, in any order.
    """
    first = _Run.of(step)
    step, n_early = first.step, first.step.host.n_early
    if (first.step_ms - first.beyond_ms >= limit_ms and not first.reordered) or not first.moves:
        return first.step_ms, n_early
    stretch = stretches(first.starts, first.ends, rates)
    waits = n_early < len(step.host.updates) and not step.streamed.updates
    if limit_ms < inf and waits and _least_ms(step, first, stretch) >= limit_ms:
        return limit_ms, n_early
    return _Run.of(step, stretch, first.in_time).step_ms, n_early


def _least_ms(step: Step, first: _Run, stretch: list[list[float]]) -> float:
    """What the second pass comes to at least where nothing is streamed: a quarter of its work.

    From one norm to the next go the host updates of the first step that wait for it, what follows them in forward, and
    backward: from the end of forward, when every upload and copy issued before it may be done. Deferred updates follow
    those that wait, whatever forward does meanwhile. All with the durations of the second pass; later starts would only
    make the ends later. What the device updates comes after either norm.
    """
    assert first.in_time is not None
    in_time, n_updates = first.in_time[0], len(step.host.updates)
    starts, ends, factors = first.starts, first.ends, stretch[HOST]
    lengths = [(ends[HOST][at] - starts[HOST][at]) * factors[at] for at in range(len(factors) // 2)]
    host_ms = sum(lengths[in_time:n_updates])
    forward_end_ms = host_ms + step.after_host_ms  # from the norm
    done = list(accumulate(lengths[n_updates:], initial=host_ms - forward_end_ms))[1:]
    deferred = dict(zip((chunk for chunk, _ in step.host.deferred(in_time)), done, strict=True))
    n_gpu, n_device = len(starts[GPU]) // 2, len(step.device_update_ms)
    after, before = (
        sum(duration * stretch[GPU][at] for at, (_, duration) in enumerate(step.device_update_ms, end - n_device))
        for end in (2 * n_gpu, n_gpu)
    )
    return forward_end_ms + _Run.backward_ms(step, stretch, deferred) + after - before


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


def in_a_row(step: Step) -> float:
    """Milliseconds with everything one after the other: a CPU is device and host at once."""
    total = sum(work.compute_ms for work in (*step.forward_work, *step.backward_work))
    total += sum(
        step.upload_ms[fetch.chunk] for fetches in (*step.forward_fetches, *step.backward_fetches) for fetch in fetches
    )
    total += sum(work.swap_ms for work in step.forward_work) + sum(step.swap_ms[visit.unit] for visit in step.backward)
    for visit in step.backward:
        for index, offloaded in visit.gradients:
            _, flatten, offload = step.gradients[index]
            total += flatten + (offload if offloaded else 0.0)
    early_ms = sum(time for _, time in step.host.updates[: step.host.n_early])
    total += early_ms * step.host.weight_share  # of weights, beside whole updates
    updates = [*step.device_update_ms, *step.host.updates]
    return total + sum(time for _, time in updates) + sum(update.ms for update in step.making_room.values())


def _names(step: Step, run: _Run) -> list[list[tuple[str, object]]]:
    """By lane, what it does in the second step in the order of issue: what and with what."""
    in_time = run.in_time or (0, 0)
    names: list[list[tuple[str, object]]] = [[] for _ in LANES]
    names[UP] = [("weights", fetch.chunk) for fetch in run.uploads]
    for visit, work in zip(step.forward, step.forward_work, strict=True):
        names[GPU].append(("forward", visit.name))
        if work.swap_ms:
            names[DOWN].append(("activations", visit.name))
    for visit, work, fetches in zip(step.backward, step.backward_work, step.backward_fetches, strict=True):
        names[UP] += [("weights", fetch.chunk) for fetch in fetches]
        names[UP] += [("activations", unit) for unit in work.swap_back]
        names[GPU].append(("backward", visit.name))
        names[GPU] += [("flatten", step.gradients[index][0]) for index, _ in visit.gradients]
        names[DOWN] += [("gradients", step.gradients[index][0]) for index, offloaded in visit.gradients if offloaded]
    for update in step.making_room.values():
        names[update.lane].append(("early update", update.chunk))
    for lane, queue, early in zip((HOST, STREAM), (step.host, step.streamed), in_time, strict=True):
        ahead = "early weight" if queue.weight_share else "early update"
        updates = queue.ordered(early)
        names[lane] += [(ahead if at < early else "update", chunk) for at, (chunk, _) in enumerate(updates)]
        names[lane] += [("deferred update", chunk) for chunk, _ in queue.deferred(early)]
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
        self.beyond_ms = 0.0  # what the last early update of the first step lasts beyond backward
        self.reordered = False  # some went before others that were issued earlier
        self.step_ms = self.begin_ms = self.forward_end_ms = self.backward_end_ms = 0.0  # of the second step
        self.starts: list[list[float]] = [[] for _ in LANES]
        self.ends: list[list[float]] = [[] for _ in LANES]
        self._free = [start_ms] * len(LANES)
        n_chunks = len(step.upload_ms)
        self._updated = [start_ms] * n_chunks  # by chunk: its update in host memory is done
        self._all_updated = start_ms  # but for deferred updates
        self._deferred = [start_ms] * n_chunks  # by chunk: of an early weight the states have been updated too
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
        if run.step.host.weight_share:  # deferred updates may pile up from step to step
            half = len(run.starts[HOST]) // 2
            run.step_ms = max(run.step_ms, sum(run.ends[HOST][half:]) - sum(run.starts[HOST][half:]))
        return run

    @classmethod
    def backward_ms(cls, step: Step, stretch: list[list[float]], deferred: Mapping[int, float]) -> float:
        """The second backward by itself, as if all that was issued before had long been done, but for these updates.

        ``deferred`` has by chunk when they are, from the begin of backward.
        """
        n_before = [
            len(step.forward_work),
            sum(map(len, step.forward_fetches)),
            sum(work.swap_ms > 0 for work in step.forward_work),
            0,
            0,
        ]
        at = [len(factors) // 2 + before for factors, before in zip(stretch, n_before, strict=True)]
        run = cls(step, [islice(factors, first, None) for factors, first in zip(stretch, at, strict=True)], -inf)
        run._free[GPU] = 0.0
        for chunk, done in deferred.items():
            run._deferred[chunk] = done
        run._backward()
        return run._free[GPU]

    @property
    def moves(self) -> bool:
        """Whether anything but the GPU works."""
        return any(self.starts[lane] for lane in (UP, DOWN, HOST, STREAM))

    def _do(self, lane: int, earliest: float, duration: float) -> float:
        free = self._free[lane]
        start = free if free > earliest else earliest
        end = self._free[lane] = start + duration * next(self._stretch[lane])
        self.starts[lane].append(start)
        self.ends[lane].append(end)
        return end

    def _do_all(self, lane: int, operations: Iterable[tuple[float, float]]) -> float:
        """(earliest start, duration) of each, one after the other. Returns the end of the last."""
        free, stretch, starts, ends = self._free[lane], self._stretch[lane], self.starts[lane], self.ends[lane]
        for earliest, duration in operations:
            if earliest > free:
                free = earliest
            starts.append(free)
            free += duration * next(stretch)
            ends.append(free)
        self._free[lane] = free
        return free

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
            first = next((fetch for fetch in left if updated[fetch.chunk] <= free), None)  # of several the nearest
            if first is None:
                first = min(left, key=lambda fetch: updated[fetch.chunk])
            left.remove(first)
            gone.append(first)
            self._fetch((first,))
        self.reordered = self.reordered or gone != list(fetches)
        return gone

    def _forward(self) -> None:
        gpu, stretch, starts, ends = self._free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        released, loaded, unsettled = self._released, self._loaded, self._unsettled
        step, self.uploads = self.step, []
        for visit, (compute_ms, swap_ms, _), fetches in zip(
            step.forward, step.forward_work, step.forward_fetches, strict=True
        ):
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
            gpu = start + compute_ms * next(stretch)
            starts.append(start)
            ends.append(gpu)
            for chunk in chunks:
                released[chunk] = gpu
            # The memory of the last swapped block is given up, for which the GPU waits for the copy.
            if unsettled > gpu:
                gpu = unsettled
            if swap_ms:
                unsettled = self._swapped[visit.unit] = self._do(DOWN, gpu, swap_ms)
        self._free[GPU] = gpu
        self._unsettled = unsettled

    def _backward(self) -> None:
        gpu, stretch, starts, ends = self._free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        down, stretch_down = self._free[DOWN], self._stretch[DOWN]
        starts_down, ends_down = self.starts[DOWN], self.ends[DOWN]
        up, stretch_up, starts_up, ends_up = self._free[UP], self._stretch[UP], self.starts[UP], self.ends[UP]
        updated, released, loaded = self._updated, self._released, self._loaded
        swapped, back = self._swapped, self._back
        drained, all_offloaded, deferred, step = self._drained, self._offloaded, self._deferred, self.step
        upload_ms, swap_in_ms, gradients, making_room = step.upload_ms, step.swap_ms, step.gradients, step.making_room
        if self._unsettled > gpu:
            gpu = self._unsettled
        turn = 0
        for visit, (compute_ms, swap_ms, swap_back), fetches in zip(
            step.backward, step.backward_work, step.backward_fetches, strict=True
        ):
            for chunk, victim in fetches:  # as in _fetch
                start = up
                if updated[chunk] > start:
                    start = updated[chunk]
                if released[victim] > start:
                    start = released[victim]
                up = loaded[chunk] = start + upload_ms[chunk] * next(stretch_up)
                starts_up.append(start)
                ends_up.append(up)
            for unit in swap_back:
                start = max(up, gpu, swapped[unit])  # allocated when the visit begins
                up = back[unit] = start + swap_in_ms[unit] * next(stretch_up)
                starts_up.append(start)
                ends_up.append(up)
            start = gpu
            chunks = visit.chunks
            for chunk in chunks:
                if loaded[chunk] > start:
                    start = loaded[chunk]
            if swap_ms and back[visit.unit] > start:
                start = back[visit.unit]
            gpu = start + compute_ms * next(stretch)
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
                    room = deferred[chunk]
                    if index in making_room:
                        lane, before, duration = making_room[index]
                        room = self._do(lane, all_offloaded[before], duration)
                    if room > up:
                        up = room  # what comes next is not issued before
                    if room > gpu:
                        gpu = room
                    start = down if down > gpu else gpu
                    down = start + offload_ms * next(stretch_down)
                    starts_down.append(start)
                    ends_down.append(down)
                    drained[turn] = all_offloaded[chunk] = down
                    turn = 1 - turn
        self._free[GPU], self._free[UP], self._free[DOWN] = gpu, up, down

    def _update(self) -> None:
        over = self._free[GPU]  # backward is, and the norm known
        if self.in_time is None:
            if self.step.open_early:
                self.step = replace(self.step, host=self._least_waiting(over))
            self.in_time = (
                self.step.host.in_time(self._free[HOST], self._offloaded, over),
                self.step.streamed.in_time(self._free[STREAM], self._offloaded, over),
            )
        updated, offloaded = self._updated, self._offloaded
        queues = (self.step.host, self.step.streamed)
        for lane, queue, in_time in zip((HOST, STREAM), queues, self.in_time, strict=True):
            updates = queue.ordered(in_time)
            early, late = updates[:in_time], updates[in_time:]
            # Early ones are looked at when the norm is known and none runs.
            settled = max(over, self._do_all(lane, [(offloaded[chunk], duration) for chunk, duration in early]))
            self.beyond_ms = self.beyond_ms or (settled - over)
            for chunk, _ in early:
                updated[chunk] = settled
            for update in self.step.making_room.values():
                if update.lane == lane:
                    updated[update.chunk] = settled
            self._do_all(lane, [(max(over, offloaded[chunk]), duration) for chunk, duration in late])
            for (chunk, _), end in zip(late, self.ends[lane][-len(late) :] if late else (), strict=True):
                updated[chunk] = end
        self._all_updated = max(over, self._free[HOST], self._free[STREAM])
        for chunk, duration in self.step.host.deferred(self.in_time[0]):
            self._deferred[chunk] = self._do(HOST, over, duration)
        self._do_all(GPU, [(0.0, duration) for _, duration in self.step.device_update_ms])

    def _least_waiting(self, over: float) -> Queue:
        """The host's updates with the best number of early ones."""
        host = self.step.host
        if host.weight_share:
            return least_waiting_weights(host, self._known(over))
        return least_waiting(host, self._known(over))

    def _known(self, over: float) -> Known:
        """By which the number of early updates is chosen, when the first backward is ``over``."""
        step = self.step
        used: dict[int, float] = {}
        for visit, start in zip(step.forward, self.starts[GPU], strict=False):
            for chunk in visit.chunks:
                used.setdefault(chunk, start)
        # What is fetched once more is for backward.
        uploads = [
            (fetch.chunk, start, used.pop(fetch.chunk, inf))
            for fetch, start in zip(self.uploads, self.starts[UP], strict=False)
        ]
        known = Known(self._free[HOST], over, self._offloaded, uploads, step.upload_ms)
        if not step.host.weight_share:
            return known
        offloads = self.starts[DOWN][sum(work.swap_ms > 0 for work in step.forward_work) :]
        n_at_once = len(next(filter(None, step.forward_fetches), ()))
        device_ms = sum(duration for _, duration in step.device_update_ms)
        gradients = next_gradients(step, offloads, device_ms)
        return known._replace(n_at_once=n_at_once, next_gradients=gradients, step_ms=over + device_ms)
