"""Simulates a step as it really overlaps, in order of issue on its lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines, first in first out; a weight is uploaded once its chunk is updated
host      updates chunks in host memory, one after the other, in the order in which the next forward needs them
streamed  the GPU updates chunks in host memory with which the host would be late (``protrain.planning.sharing``)
gathers   several ranks make whole chunks of their shards
reduce    several ranks sum the gradients of a chunk, each to its shard

The engine's order of issue is known (``protrain.planning.schedule`` for uploads), so a step is a list of tasks in that
order. A lane is a resource that does one task at a time (``protrain.planning.timeline``). A task starts when its lane
is free and the tasks that it needs have ended: a buffer is given up, a chunk is updated, a gradient is offloaded, or
the norm is known. Pictures and reports read the same tasks.

``Times`` goes through the list twice. First every task has its full rate. Then each takes longer by its slowdown beside
the tasks of other lanes (``protrain.planning.contention``). On a CPU nothing overlaps, and each task needs the one
before it.

All times are in milliseconds, and moments count from the begin of the run. What a step finds is what the backward and
the updates before it have left. No forward need come before these.

[Note: waiting for regions] Gradients of chunks in host memory may share regions of it
(``protrain.planning.gradient_regions``). Where no region is free, the engine issues nothing until an update ends that
frees one: the update of the chunk whose gradient has been complete for the longest time. Until then the GPU runs what
was issued, which ends with the gradient that needs the region, and is idle after that. Which updates are awaited does
not depend on how long anything takes. The host makes awaited updates before all others.

[Note: weight-only updates] A speculative update that computes only the weight takes a share of the time of a whole
update. The chunk's other states are updated later ("deferred"), when the host has finished every update that the next
forward waits for. They must be updated before the chunk's next gradient arrives: the engine issues nothing until then,
as in [Note: waiting for regions]. So the host makes deferred updates in the order in which gradients arrive, and all of
them before the next speculative updates. A speculative update that does not begin before backward ends is made as one
whole update, and none of it is deferred.

[Note: looking at the loss] Between two micro-batches most scripts look at a number on the device: at the loss, or, as
transformers' models do, at the positions of tokens. The copy engine takes copies in the order in which they were
issued, so the script sees that number when all sums of the backward before are in host memory, and forward begins then.

[Note: collectives] Several ranks gather a chunk once its buffer is given up and each of them has its shard there, by an
upload or by a copy on the device. A visit waits for that. Gathers go in the order in which the schedule asks for
chunks, since all ranks must issue them in one order. A gradient is flattened into a staging buffer. Once a chunk has
all its gradients, the buffer is reduced. Shards in host memory are then offloaded. The norm is known when all gradients
are reduced. A visit computes for longer by what it loses to the collectives that were issued since the visit before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from math import inf

from protrain.planning.contention import slowdowns
from protrain.planning.layout import STAGING_BUFFERS
from protrain.planning.plan import Counts, Modes
from protrain.planning.schedule import Fetch
from protrain.planning.sharing import Sharing, Waiting, next_for_gpu
from protrain.planning.step import Gradient, Steps, Updates, Visit
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, LANES, REDUCE, STREAM, UP, Operation, Timeline

# What a lane does without interruption: the lane, milliseconds at full rate, the tasks that end before it begins, a
# task that ends before it ends, and two words that name it. A plain tuple, as the search makes millions of them.
Task = tuple[int, float, Sequence[int], int, str, object]
BEGIN = 0  # the task that everything may follow


class Run:
    """The tasks of a backward with its updates, and then of a step in steady state, in the order of issue.

    The search spends most of its time here. A task is known by its place in that order.

    Args:
        steps: what steps do under every plan.
        modes: of the blocks.
        counts: the integers of the plan.
        host_share: the host's rate of updates, as a share of the calibrated one.
        only_adds: no updates follow the forward and backward, whose gradients are only added to sums.
    """

    def __init__(
        self, steps: Steps, modes: Modes, counts: Counts, host_share: float = 1.0, *, only_adds: bool = False
    ) -> None:
        self._steps, self._counts = steps, counts
        self.tasks: list[Task] = [(GPU, 0.0, (), BEGIN, "", "")]
        n_chunks, costs = len(steps.upload_ms), steps.costs(modes)
        self._costs = costs
        self._visits = list(
            zip(
                steps.visits(counts.n_persist, counts.n_device_sum, only_adds=only_adds),
                *steps.fetched(counts.n_persist, counts.n_buffer, only_adds=only_adds),
                strict=True,
            )
        )
        self._last = [BEGIN] * len(LANES)  # by lane: its last task
        # By chunk, the task after which the weight in host memory is updated, the deferred update is done, the GPU has
        # read its buffer (the last, index -1, is an empty buffer), the weight is in its buffer, and the gradient is in
        # host memory.
        self._updated, self._deferred, self._released, self._loaded, self._offloaded = (
            [BEGIN] * (n_chunks + 1) for _ in range(5)
        )
        # By staging buffer: after it its gradient is offloaded (the last, index -1, is none), or reduced.
        self._drained, self._sent = ([BEGIN] * (STAGING_BUFFERS + 2) for _ in range(2))
        self._swapped_out = [BEGIN] * len(costs)  # by unit: after it the activations are in host memory
        self._beside_ms = 0.0  # collectives that the next visit computes beside
        # The GPU updates persistent chunks, and the host the others. By gradient: the update that it waits for.
        self._by_gpu, by_host = steps.updates(counts.n_persist, counts.n_device_sum, host_share, only_adds=only_adds)
        update_ms = dict(by_host)
        awaited = steps.handed_on(modes, counts.n_persist)
        self._awaited = {number: (chunk, update_ms.pop(chunk)) for number, chunk in awaited}
        self._backward()
        alone = Times()  # at full rate
        alone.add(self.tasks)
        self._choose(list(update_ms.items()), alone.ends, steps.sharing(counts.n_persist, host_share))
        self._update()
        self.begin, self.first = self._last[GPU], len(self.tasks)  # the step's begin, and its first task
        self._forward()
        self.forward_end = self._last[GPU]
        self._backward()
        self.backward_end = self._last[GPU]
        self._update()
        factors: Iterable[float] = repeat(1.0)
        if steps.overlaps:
            alone.add(self.tasks[len(alone.ends) :])
            factors = slowdowns(steps.shares(host_share), [task[0] for task in self.tasks], alone.starts, alone.ends)
        else:  # each task waits for the one before
            self.tasks[1:] = [
                (lane, ms, (at,), BEGIN, kind, what) for at, (lane, ms, _, _, kind, what) in enumerate(self.tasks[1:])
            ]
        times = Times()
        times.add(self.tasks, factors)
        self.starts, self.ends = times.starts, times.ends

    @property
    def step_ms(self) -> float:
        """How long the step takes."""
        of_step = zip(self.tasks[self.first :], self.starts[self.first :], self.ends[self.first :], strict=True)
        host_ms = sum(end - start for task, start, end in of_step if task[0] == HOST)
        # Updates that the next step does not wait for would pile up if the host had more to do than a step is long.
        return max(self.ends[self._last[GPU]] - self.ends[self.begin], host_ms)

    def _do(self, lane: int, ms: float, needs: Sequence[int], kind: str, what: object, beside: int = BEGIN) -> int:
        """Issue a task that begins when ``needs`` have ended, and does not end before ``beside`` has."""
        task = self._last[lane] = len(self.tasks)
        self.tasks.append((lane, ms, needs, beside, kind, what))
        return task

    def _wait(self, lane: int, needed: int) -> None:
        """Let ``lane`` do nothing before ``needed`` has ended."""
        if needed != BEGIN:
            self._do(lane, 0.0, (needed,), "wait", "")

    def _fetch(self, uploads: Iterable[Fetch], gathers: Iterable[Fetch]) -> None:
        """Upload weights when they are updated and buffers are given up. Make chunks whole: [Note: collectives]."""
        steps, updated, released, loaded = self._steps, self._updated, self._released, self._loaded
        for chunk, victim in uploads:
            there = updated[chunk], released[victim]
            loaded[chunk] = self._do(UP, steps.upload_ms[chunk], there, "weights", chunk)
        for chunk, victim in gathers:
            # A chunk that is not uploaded was loaded by the gather before, in the same lane.
            needs = updated[chunk], released[victim], loaded[chunk]
            loaded[chunk] = self._do(GATHER, steps.gather_ms[chunk], needs, "gather", chunk)
            self._beside_ms += steps.gather_ms[chunk]

    def _compute(self, visit: Visit, ms: float, needed: int, phase: str) -> int:
        """Compute a visit once its chunks are in buffers, which it gives up."""
        needs = [self._loaded[chunk] for chunk in visit.chunks]
        needs.append(needed)
        ms += visit.compute_ms + self._steps.lost_to_collectives * self._beside_ms
        computed = self._do(GPU, ms, needs, phase, visit.name)
        self._beside_ms = 0.0
        for chunk in visit.chunks:
            self._released[chunk] = computed
        return computed

    def _forward(self) -> None:
        """The GPU computes, weights are fetched, and activations of swapped blocks and inputs are offloaded."""
        if self._steps.accumulates:
            self._wait(GPU, self._last[DOWN])  # see [Note: looking at the loss]
        swapped_out = BEGIN  # the swap of the visit before
        for visit, uploads, gathers in self._visits[: self._steps.n_forward]:
            self._fetch(uploads, gathers)
            costs = self._costs[visit.unit]
            computed = self._compute(visit, costs.pack_ms, BEGIN, "forward")
            self._wait(GPU, swapped_out)  # its device memory is given up here
            swapped_out = BEGIN
            if costs.out_ms:
                swapped_out = self._do(DOWN, costs.out_ms, (computed,), "activations", visit.name)
                self._swapped_out[visit.unit] = swapped_out
        self._wait(GPU, swapped_out)

    def _backward(self) -> None:
        """The GPU computes and flattens beside fetches and offloads, and updates that gradients wait for are made."""
        back: dict[int, int] = {}  # by unit: after it the activations are on the device again
        visits = self._visits[self._steps.n_forward :]
        for at, (visit, uploads, gathers) in enumerate(visits):
            self._fetch(uploads, gathers)
            begin = self._last[GPU]  # device memory is allocated when the visit begins
            for unit in (visit.unit, visits[min(at + 1, len(visits) - 1)][0].unit):
                if self._costs[unit].out_ms and unit not in back:
                    needs = begin, self._swapped_out[unit]
                    back[unit] = self._do(UP, self._costs[unit].back_ms, needs, "activations", unit)
            recompute_ms = self._costs[visit.unit].recompute_ms
            self._compute(visit, recompute_ms, back.pop(visit.unit, BEGIN), "backward")
            for gradient in visit.gradients:
                self._take(gradient)
        self._wait(GPU, self._last[REDUCE])

    def _take(self, gradient: Gradient) -> None:
        """Flatten a gradient, reduce it if ranks do, and offload it if its chunk is in host memory."""
        chunk, staging, sent = gradient.chunk, gradient.staging, gradient.sent
        room = self._drained[staging] if sent < 0 else self._sent[sent]
        there = self._do(GPU, gradient.flatten_ms, (room,), "flatten", chunk)
        region, sum_there = self._deferred[chunk], BEGIN  # see [Note: weight-only updates]
        if gradient.number in self._awaited:  # see [Note: waiting for regions]
            awaited, update_ms = self._awaited[gradient.number]
            region = self._do(HOST, update_ms, (self._offloaded[awaited],), "speculative update", awaited)
        if gradient.sum_up_ms is not None:
            for_sum = there, region, self._drained[staging], self._offloaded[chunk]
            sum_there = self._do(UP, gradient.sum_up_ms, for_sum, "sum", chunk)
        if gradient.reduce_ms:  # see [Note: collectives]
            needs = there, self._drained[staging], sum_there
            there = self._sent[sent] = self._do(REDUCE, gradient.reduce_ms, needs, "reduce", chunk)
            self._beside_ms += gradient.reduce_ms
        if staging >= 0:  # a sum comes and goes in parts, each of which goes down while the next one comes up
            offloaded = self._do(DOWN, gradient.offload_ms, (there, region), "gradients", chunk, beside=sum_there)
            self._drained[staging] = self._offloaded[chunk] = offloaded
            self._wait(GPU, region)  # until then the engine issues nothing
            self._wait(UP, region)

    def _choose(self, updates: Updates, ends: Sequence[float], sharing: Sharing) -> None:
        """Choose when and where ``updates`` are made, by the ``ends`` of the first backward. Later ones do the same."""
        steps, first = self._steps, self._counts.n_persist + self._counts.n_speculate
        over, free = ends[self._last[GPU]], ends[self._last[HOST]]
        first_whole = self._counts.n_persist + self._counts.n_weight_only
        # The updates inside backward that begin before it is over, in the order in which gradients arrive.
        self._in_time: list[tuple[int, float]] = []
        self._put_off: dict[int, float] = {}  # deferred updates: see [Note: weight-only updates]
        for chunk, whole_ms in reversed(updates):
            if chunk < first or steps.in_backward:
                ms = whole_ms if chunk >= first_whole else whole_ms * steps.weight_share
                start = max(free, ends[self._offloaded[chunk]])
                if start >= over:
                    break
                free = start + ms
                self._in_time.append((chunk, ms))
                if chunk < first_whole:
                    self._put_off[chunk] = whole_ms
        in_time = dict(self._in_time)
        after = [(chunk, ms) for chunk, ms in updates if chunk not in in_time]
        by_gpu = _updated_by_gpu(after, first, sharing, free - over) if steps.streams else []
        self._streamed = [(chunk, steps.streamed_ms[chunk]) for chunk in by_gpu]
        self._after = [update for update in after if update[0] not in by_gpu]

    def _update(self) -> None:
        """Make all updates that no gradient waited for."""
        over, updated = self._last[GPU], self._updated  # backward is over, and the norm is known
        # Updates inside backward take effect when the norm is known and none of them runs any more.
        for chunk, ms in self._in_time:
            kind = "speculative weight" if chunk in self._put_off else "speculative update"
            self._do(HOST, ms, (self._offloaded[chunk],), kind, chunk)
        settled = self._do(HOST, 0.0, (over,), "wait", "")
        for chunk, _ in (*self._in_time, *self._awaited.values()):
            updated[chunk] = settled
        for lane, updates in ((HOST, self._after), (STREAM, self._streamed)):
            for chunk, ms in updates:
                updated[chunk] = self._do(lane, ms, (over, self._offloaded[chunk]), "update", chunk)
        for chunk, ms in self._put_off.items():
            self._deferred[chunk] = self._do(HOST, ms, (), "deferred update", chunk)
        for chunk, ms in self._by_gpu:
            updated[chunk] = self._do(GPU, ms, (), "update", chunk)


class Times:
    """When tasks start and end. A lane does its tasks one after the other, in the order of issue."""

    def __init__(self) -> None:
        self.starts: list[float] = []  # by task
        self.ends: list[float] = []
        self._free = [0.0] * len(LANES)  # when each lane has done all tasks so far

    def add(self, tasks: Iterable[Task], factors: Iterable[float] = repeat(1.0)) -> None:
        """Go on with ``tasks``, whose durations have these ``factors``."""
        starts, ends, free = self.starts, self.ends, self._free
        for (lane, ms, needs, beside, _, _), factor in zip(tasks, factors, strict=False):
            start = free[lane]
            for needed in needs:
                end = ends[needed]
                if end > start:
                    start = end
            duration = ms * factor
            if beside and ends[beside] - duration > start:
                start = ends[beside] - duration
            free[lane] = end = start + duration
            starts.append(start)
            ends.append(end)


def _updated_by_gpu(updates: Updates, first: int, sharing: Sharing, host_free_ms: float) -> list[int]:
    """The chunks that the GPU updates of those in ``updates``, in its order, as the engine chooses them.

    Times count from the norm, which the host knows at ``host_free_ms`` or at 0, whichever is later. Chunks before
    ``first`` have speculative updates. The engine also lets the GPU redo these. A plan does not count on that, as it is
    help for steps that are not as the plan foresees them.
    """
    host_free_ms, gpu_free_ms = max(0.0, host_free_ms), 0.0
    chunks = [chunk for chunk, _ in updates]
    waiting = [
        Waiting(
            host_ms=ms,
            device_ms=ms * sharing.host_gparams / sharing.device_gparams if chunk >= first else inf,
            needed_ms=sharing.needed_ms[chunk],
            upload_ms=sharing.upload_ms[chunk],
            states_ms=sharing.states_ms[chunk],
        )
        for chunk, ms in updates
    ]
    found = []
    while waiting:
        if host_free_ms <= gpu_free_ms:
            host_free_ms += waiting.pop(0).host_ms
            del chunks[0]
            continue
        index = next_for_gpu(waiting, gpu_free_ms, host_free_ms, sharing.host_kept)
        if index is None:
            gpu_free_ms = host_free_ms  # when the GPU looks again
        else:
            gpu_free_ms += waiting.pop(index).device_ms
            found.append(chunks.pop(index))
    return found


def timeline(run: Run) -> Timeline:
    """Every operation of a step."""
    begin = run.ends[run.begin]
    operations = [
        Operation(lane=lane, name=f"{kind} {what}", start_ms=start - begin, end_ms=end - begin)
        for (lane, *_, kind, what), start, end in zip(run.tasks, run.starts, run.ends, strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.ends[run.forward_end] - begin,
        backward_end_ms=run.ends[run.backward_end] - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )
