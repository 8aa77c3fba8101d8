"""One pass of the simulation: two steps in order of issue on five lanes, the second of them in steady state.

[Note: waiting for regions] Inside backward, gradients share regions of host memory. Where none is free the engine waits
for the update of the chunk that has been complete for the longest time, before it issues anything else: the GPU does
what it has, which ends with the gradient that needs room, and then nothing until that update is done. Which updates
those are does not depend on how long anything takes (:mod:`protrain.planning.memory.gradient_regions`), so they are in
no queue, and of each lane they come first.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from math import inf
from operator import mul, sub

from protrain.planning.layout import STAGING_BUFFERS
from protrain.planning.runtime.fetches import Fetch
from protrain.planning.runtime.step import Step
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP

_BY_CHUNK_OR_UNIT = ("_updated", "_deferred", "_released", "_loaded", "offloaded", "_drained", "_swapped", "_back")
ROUNDED = 1 + 1e-9  # what sums in another order differ by, and more


class Begun:
    """The first forward and backward of the first pass, in which nothing waits for updates.

    It does not depend on how many updates are speculative or streamed, nor on how fast the host is, as long as no
    update has to make room. So many steps have it in common.
    """

    def __init__(self, run: Run, n_forward: list[int]) -> None:
        self.run = run
        self.n_forward = n_forward  # by lane, its operations in forward
        starts, ends = (times[GPU][n_forward[GPU] :] for times in (run.starts, run.ends))
        self.computing = list(map(sub, ends, starts))  # of the GPU in backward
        self.computing_ms = sum(self.computing)


def begin(step: Step) -> Begun:
    """How ``step`` begins."""
    run = Run(step, [repeat(1.0)] * len(LANES), 0.0)
    run.forward()
    n_forward = list(map(len, run.starts))
    run.backward()
    return Begun(run, n_forward)


class Run:
    """Two steps, the second of them in steady state.

    The search spends its time here, so operations are written out on local variables and not called.
    """

    def __init__(self, step: Step, stretch: list[Iterator[float]], start_ms: float) -> None:
        self.step = step
        self._stretch = stretch  # by lane, for one operation after the other
        self.in_time: tuple[int, int] | None = None  # early updates, host and device; found in the first step
        self.uploads: list[Fetch] = []  # of forward, as they get to the link
        self.beyond_ms = 0.0  # what the last early update of the first step lasts beyond backward
        self.reordered = False  # some went before others that were issued earlier
        self.step_ms = self.begin_ms = self.forward_end_ms = self.backward_end_ms = 0.0  # of the second step
        self.starts: list[list[float]] = [[] for _ in LANES]
        self.ends: list[list[float]] = [[] for _ in LANES]
        self.free = [start_ms] * len(LANES)
        n_chunks = len(step.upload_ms)
        self._updated = [start_ms] * n_chunks  # by chunk: its update in host memory is done
        self._all_updated = start_ms  # but for deferred updates
        self._deferred = [start_ms] * n_chunks  # by chunk: of an early weight the states have been updated too
        self._released = [start_ms] * (n_chunks + 1)  # the GPU has read its buffer; at the end (-1) an empty buffer's
        self._loaded = [start_ms] * n_chunks  # a frozen one may be there all the time
        self.offloaded = [start_ms] * n_chunks
        self._drained = [start_ms] * (STAGING_BUFFERS + 1)  # gradient staging
        self._swapped = [start_ms] * len(step.swap_ms)  # by unit: its activations are in host memory
        self._back = [start_ms] * len(step.swap_ms)  # they are on the device again
        self._unsettled = start_ms

    @classmethod
    def of(
        cls,
        step: Step,
        stretch: list[list[float]] | None = None,
        in_time: tuple[int, int] | None = None,
        *,
        begun: Begun | None = None,
        limit_ms: float = inf,
    ) -> Run:
        """Both steps, or no more than shows that :meth:`is_at_least` ``limit_ms``.

        Stretches belong to operations in the order of the run that they come from, and its in_time.
        """
        begun = begun or begin(step)
        if stretch is None:
            run, to_go_ms = begun.run._continued(step), begun.computing_ms
        else:
            run = cls(step, [iter(one) for one in stretch], 0.0)
            run.in_time = in_time
            run.forward()
            run.backward()
            in_backward = islice(stretch[GPU], len(stretch[GPU]) // 2 + begun.n_forward[GPU], None)
            to_go_ms = sum(map(mul, begun.computing, in_backward))
        run.update()
        run.begin_ms = run.free[GPU]
        run.forward()
        run.forward_end_ms = run.free[GPU]
        run.step_ms = run.forward_end_ms + to_go_ms - run.begin_ms
        if run.step_ms >= limit_ms * ROUNDED and (stretch is not None or run.is_at_least(limit_ms * ROUNDED)):
            return run
        run.backward()
        run.backward_end_ms = run.free[GPU]
        run.update()
        run.step_ms = run.free[GPU] - run.begin_ms
        if run.step.host.n_weight_only:  # deferred updates may pile up from step to step
            half = len(run.starts[HOST]) // 2
            run.step_ms = max(run.step_ms, sum(run.ends[HOST][half:]) - sum(run.starts[HOST][half:]))
        return run

    def is_at_least(self, limit_ms: float) -> bool:
        """Of a first pass, whether the second takes as much. See :func:`simulate`."""
        return self.step_ms - self.beyond_ms >= limit_ms and not self.reordered

    def _continued(self, step: Step) -> Run:
        """The same with all its times in lists of its own, and from now on with ``step``."""
        run = copy.copy(self)
        run.step = step
        run.starts, run.ends = [times.copy() for times in self.starts], [times.copy() for times in self.ends]
        for name in ("free", *_BY_CHUNK_OR_UNIT):
            setattr(run, name, getattr(self, name).copy())
        return run

    @classmethod
    def backward_ms(cls, step: Step, begun: Begun, stretch: list[list[float]], deferred: Mapping[int, float]) -> float:
        """The second backward by itself, as if all that was issued before had long been done, but for these updates.

        ``deferred`` has by chunk when they are, from the begin of backward.
        """
        at = [len(factors) // 2 + before for factors, before in zip(stretch, begun.n_forward, strict=True)]
        run = cls(step, [islice(factors, first, None) for factors, first in zip(stretch, at, strict=True)], -inf)
        run.free[GPU] = 0.0
        for chunk, done in deferred.items():
            run._deferred[chunk] = done
        run.backward()
        return run.free[GPU]

    @property
    def moves(self) -> bool:
        """Whether anything but the GPU works."""
        return any(self.starts[lane] for lane in (UP, DOWN, HOST, STREAM))

    def _do(self, lane: int, earliest: float, duration: float) -> float:
        free = self.free[lane]
        start = free if free > earliest else earliest
        end = self.free[lane] = start + duration * next(self._stretch[lane])
        self.starts[lane].append(start)
        self.ends[lane].append(end)
        return end

    def _do_all(self, lane: int, operations: Iterable[tuple[float, float]]) -> float:
        """(earliest start, duration) of each, one after the other. Returns the end of the last."""
        free, stretch, starts, ends = self.free[lane], self._stretch[lane], self.starts[lane], self.ends[lane]
        for earliest, duration in operations:
            if earliest > free:
                free = earliest
            starts.append(free)
            free += duration * next(stretch)
            ends.append(free)
        self.free[lane] = free
        return free

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """Weights go up, each when it is updated and its buffer given up."""
        up, stretch, starts, ends = self.free[UP], self._stretch[UP], self.starts[UP], self.ends[UP]
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
        self.free[UP] = up

    def _fetch_updated(self, fetches: Sequence[Fetch]) -> Sequence[Fetch]:
        """The same for those issued at once when forward begins; what is updated does not wait for what is not.

        Returns them as they went.
        """
        updated, left, gone = self._updated, list(fetches), []
        while left:
            free = self.free[UP]
            first = next((fetch for fetch in left if updated[fetch[0]] <= free), None)  # of several the nearest
            if first is None:
                first = min(left, key=lambda fetch: updated[fetch[0]])
            left.remove(first)
            gone.append(first)
            self._fetch((first,))
        self.reordered = self.reordered or gone != list(fetches)
        return gone

    def forward(self) -> None:
        """The GPU computes, weights go up, activations of swapped blocks and inputs that move go down."""
        gpu, stretch, starts, ends = self.free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        released, loaded, unsettled = self._released, self._loaded, self._unsettled
        step, self.uploads = self.step, []
        for visit, (compute_ms, swap_ms, _), fetches in zip(
            step.forward, step.forward_work, step.forward_fetches, strict=True
        ):
            if fetches:
                if len(fetches) > 1 and self._all_updated > self.free[UP]:
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
        self.free[GPU] = gpu
        self._unsettled = unsettled

    def backward(self) -> None:
        """Likewise, and gradients go down; what is waited for to make room for them is updated."""
        gpu, stretch, starts, ends = self.free[GPU], self._stretch[GPU], self.starts[GPU], self.ends[GPU]
        down, stretch_down = self.free[DOWN], self._stretch[DOWN]
        starts_down, ends_down = self.starts[DOWN], self.ends[DOWN]
        up, stretch_up, starts_up, ends_up = self.free[UP], self._stretch[UP], self.starts[UP], self.ends[UP]
        updated, released, loaded = self._updated, self._released, self._loaded
        swapped, back = self._swapped, self._back
        drained, all_offloaded, deferred, step = self._drained, self.offloaded, self._deferred, self.step
        upload_ms, swap_in_ms, making_room = step.upload_ms, step.swap_ms, step.making_room
        if self._unsettled > gpu:
            gpu = self._unsettled
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
            for index, chunk, flatten_ms, offload_ms, staging in visit.gradients:
                start = gpu
                if staging >= 0 and drained[staging] > start:
                    start = drained[staging]
                gpu = start + flatten_ms * next(stretch)
                starts.append(start)
                ends.append(gpu)
                if staging >= 0:
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
                    drained[staging] = all_offloaded[chunk] = down
        self.free[GPU], self.free[UP], self.free[DOWN] = gpu, up, down

    def update(self) -> None:
        """All other updates. The first step finds out how many early ones begin in time."""
        over = self.free[GPU]  # backward is, and the norm known
        if self.in_time is None:
            self.in_time = (
                self.step.host.in_time(self.free[HOST], self.offloaded, over),
                self.step.streamed.in_time(self.free[STREAM], self.offloaded, over),
            )
        updated, offloaded = self._updated, self.offloaded
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
        self._all_updated = max(over, self.free[HOST], self.free[STREAM])
        for chunk, duration in self.step.host.deferred(self.in_time[0]):
            self._deferred[chunk] = self._do(HOST, over, duration)
        self._do_all(GPU, [(0.0, duration) for _, duration in self.step.device_update_ms])
