"""Simulates a step as it really overlaps, in order of issue on its lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines, first in first out; a weight is uploaded once its chunk is updated
host      updates chunks in host memory, one after the other, in the order in which the next forward needs them
streamed  the GPU updates chunks in host memory with which the host would be late (``protrain.planning.sharing``)
gathers   several ranks make whole chunks of their shards
reduce    several ranks sum the gradients of a chunk, each to its shard

The engine's order of issue is known (``protrain.planning.schedule`` for uploads). Every operation starts when its lane
is free and what it needs is there: a buffer is given up, a chunk is updated, a gradient is offloaded, or the norm is
known. A ``Run`` is a backward with its updates, and then a step in steady state.

A first run gives every operation its full rate. A second run lengthens each operation by its slowdown beside the
operations of other lanes (``protrain.planning.contention``).

All times are in milliseconds, and moments count from the begin of the run. A lane is a resource that does one operation
at a time (``protrain.planning.timeline``).

What a step finds is what the backward and the updates before it have left. No forward need come before these.

[Note: waiting for regions] Gradients of chunks in host memory may share regions of it
(``protrain.planning.gradient_regions``). Where no region is free, the engine issues nothing until an update ends that
frees one: the update of the chunk whose gradient has been complete for the longest time. Until then the GPU runs what
was issued, which ends with the gradient that needs the region, and is idle after that. Which updates are awaited does
not depend on how long anything takes. So awaited updates are not in the ``UpdateQueue``, and the host makes them before
the updates of the queue.

[Note: looking at the loss] Between two micro-batches most scripts look at a number on the device: at the loss, or, as
transformers' models do, at the positions of tokens. The copy engine takes copies in the order in which they were
issued, so the script sees that number when all sums of the backward before are in host memory, and forward begins then.

[Note: collectives] Several ranks gather a chunk once its buffer is given up and each of them has its shard there, by an
upload or by a copy on the device. A visit waits for that. Gathers go in the order in which the schedule asks for
chunks, since all ranks must issue them in one order. A gradient is flattened
into a staging buffer. Once a chunk has all its gradients, the buffer is reduced. Shards in host memory are then
offloaded. The norm is known when all gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, repeat
from math import inf
from operator import sub
from typing import NamedTuple

from protrain.planning.contention import Shares, slowdowns
from protrain.planning.layout import STAGING_BUFFERS
from protrain.planning.planned_step import Gradient, PlannedStep, Updates, Visit
from protrain.planning.schedule import Fetch
from protrain.planning.sharing import Waiting, next_for_gpu
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, LANES, REDUCE, UP, Operation, Timeline


class Choices(NamedTuple):
    """What depends on how long operations take, in the first updates of a full-rate run. Later updates are the same."""

    n_in_time: int  # updates inside backward that begin before backward is over
    by_gpu: tuple[int, ...]  # the chunks in host memory that the GPU updates, in its order


class Lane:
    """A resource that does one operation after the other, in the order of issue. Moments are in milliseconds."""

    __slots__ = ("_factors", "ends", "free", "names", "starts")

    def __init__(self, factors: Iterator[float]) -> None:
        self._factors = factors  # on the duration of one operation after the other
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.names: list[str] = []  # only a NamedLane has them
        self.free = 0.0  # when it has done all operations so far

    def do(self, earliest: float, duration: float, kind: str, what: object) -> float:
        """Do one operation of this ``kind`` on ``what``, from ``earliest`` on. Returns its end."""
        start = self.free if self.free > earliest else earliest
        self.free = end = start + duration * next(self._factors)
        self.starts.append(start)
        self.ends.append(end)
        return end

    def wait(self, until: float) -> None:
        """Do nothing before ``until``."""
        self.free = max(self.free, until)


class NamedLane(Lane):
    """A lane that names its operations, for timelines. The search has no use for names, which take a tenth of a run."""

    __slots__ = ()

    def do(self, earliest: float, duration: float, kind: str, what: object) -> float:
        """Do one operation, and keep its name."""
        self.names.append(f"{kind} {what}")
        return super().do(earliest, duration, kind, what)


class Run:
    """A backward with its updates, and then a step in steady state. The search spends most of its time here.

    Args:
        step: what a step does.
        factors: by lane, the factor on the duration of one operation after the other, in the order of the full-rate run
            that they were made from. None: this is a full-rate run.
        choices: those of that run.
        lane: the type of its lanes.
    """

    def __init__(
        self,
        step: PlannedStep,
        factors: list[list[float]] | None = None,
        choices: Choices | None = None,
        lane: type[Lane] = Lane,
    ) -> None:
        self.step = step
        self.lanes = [lane(repeat(1.0) if factors is None else iter(factors[at])) for at in range(len(LANES))]
        self._gpu, self._up, self._down, self._host, self._streamed, self._gathers, self._reductions = self.lanes
        self.choices = choices  # the first updates make them, if there are none
        n_chunks = len(step.upload_ms)
        self._updated = [0.0] * n_chunks  # by chunk: when its weight in host memory is updated
        self._deferred = [0.0] * n_chunks  # by chunk: when its deferred update is done
        # By chunk: when the GPU has read its buffer. The last (index -1) is an empty buffer, which always is free.
        self._released = [0.0] * (n_chunks + 1)
        # By chunk: when its weight is in its buffer. A frozen chunk may never be fetched.
        self._loaded = [0.0] * n_chunks
        self.offloaded = [0.0] * n_chunks  # by chunk: when its gradient is in host memory
        # By staging buffer: when its gradient has been offloaded. The last (index -1) is none, and always is free.
        self._drained = [0.0] * (STAGING_BUFFERS + 2)
        self._sent = [0.0] * (STAGING_BUFFERS + 1)  # by staging buffer: when its gradient has been reduced
        self._swapped_out = [0.0] * len(step.swap_in_ms)  # by unit: when its activations are in host memory
        self._back = [0.0] * len(step.swap_in_ms)  # by unit: when its activations are on the device again
        self._last_swap_out = 0.0  # when the last swap out ends, whose device memory the next visit gives up
        self._visits = list(zip(step.visits, step.work, step.fetches, step.gathers, strict=True))
        self.backward()
        self.update()
        self.begin_ms = self._gpu.free
        self.first = [len(each.starts) for each in self.lanes]  # by lane: its first operation of the step
        self.forward()
        self.forward_end_ms = self._gpu.free
        self.backward()
        self.backward_end_ms = self._gpu.free
        self.update()
        # Updates that the next step does not wait for would pile up if the host had more to do than a step is long.
        self.step_ms = max(self._gpu.free - self.begin_ms, self.busy_ms(HOST))

    def busy_ms(self, lane: int) -> float:
        """How long ``lane`` is busy in the step."""
        first = self.first[lane]
        return sum(map(sub, self.lanes[lane].ends[first:], self.lanes[lane].starts[first:]))

    def _fetch(self, fetches: Iterable[Fetch]) -> None:
        """Upload weights, each as soon as it is updated and its buffer is given up."""
        for chunk, victim in fetches:
            there = max(self._updated[chunk], self._released[victim])
            self._loaded[chunk] = self._up.do(there, self.step.upload_ms[chunk], "weights", chunk)

    def _gather(self, fetches: Sequence[Fetch]) -> None:
        """Make chunks whole, one after the other: see [Note: collectives]."""
        for chunk, victim in fetches:
            # A chunk that is not uploaded was loaded by the gather before, in the same lane.
            there = max(self._updated[chunk], self._released[victim], self._loaded[chunk])
            self._loaded[chunk] = self._gathers.do(there, self.step.gather_ms[chunk], "gather", chunk)

    def _compute(self, visit: Visit, earliest: float, compute_ms: float, phase: str) -> None:
        """Compute a visit once its chunks are in buffers, which it gives up."""
        for chunk in visit.chunks:
            if self._loaded[chunk] > earliest:
                earliest = self._loaded[chunk]
        end = self._gpu.do(earliest, compute_ms, phase, visit.name)
        for chunk in visit.chunks:
            self._released[chunk] = end

    def forward(self) -> None:
        """The GPU computes, weights are fetched, and activations of swapped blocks and inputs are offloaded."""
        if self.step.fetches_sums:
            self._gpu.wait(self._down.free)  # see [Note: looking at the loss]
        for visit, (compute_ms, swap_ms, _), fetches, gathers in self._visits[: self.step.n_forward]:
            self._fetch(fetches)
            self._gather(gathers)
            self._compute(visit, 0.0, compute_ms, "forward")
            # The device memory of the last swapped block is given up here, and the GPU waits for its copy first.
            self._gpu.wait(self._last_swap_out)
            if swap_ms:
                self._last_swap_out = self._down.do(self._gpu.free, swap_ms, "activations", visit.name)
                self._swapped_out[visit.unit] = self._last_swap_out

    def backward(self) -> None:
        """The GPU computes and flattens beside fetches and offloads, and updates that gradients wait for are made."""
        step = self.step
        self._gpu.wait(self._last_swap_out)
        for visit, (compute_ms, swap_ms, swap_in), fetches, gathers in self._visits[step.n_forward :]:
            self._fetch(fetches)
            self._gather(gathers)
            for unit in swap_in:
                # Device memory is allocated when the visit begins.
                there = max(self._gpu.free, self._swapped_out[unit])
                self._back[unit] = self._up.do(there, step.swap_in_ms[unit], "activations", unit)
            self._compute(visit, self._back[visit.unit] if swap_ms else 0.0, compute_ms, "backward")
            for gradient in visit.gradients:
                self._take(gradient)
        self._gpu.wait(self._reductions.free)

    def _take(self, gradient: Gradient) -> None:
        """Flatten a gradient, reduce it if ranks do, and offload it if its chunk is in host memory."""
        chunk, staging = gradient.chunk, gradient.staging
        sent, sum_up_ms = gradient.sent, gradient.sum_up_ms
        room = self._drained[staging] if sent < 0 else self._sent[sent]
        gpu = self._gpu.do(room, gradient.flatten_ms, "flatten", chunk)
        ready = self._deferred[chunk]
        if gradient.number in self.step.awaited_updates:  # see [Note: waiting for regions]
            awaited, update_ms = self.step.awaited_updates[gradient.number]
            ready = self._host.do(self.offloaded[awaited], update_ms, "speculative update", awaited)
        there = None  # when it can be offloaded
        if sent < 0:
            gpu = there = max(gpu, ready)
            if sum_up_ms is not None:  # in parts, each of which goes down while the next one comes up
                sum_there = self._up.do(max(gpu, self.offloaded[chunk]), sum_up_ms, "sum", chunk)
                there = max(gpu, sum_there - gradient.offload_ms)
        elif gradient.reduce_ms:  # see [Note: collectives]
            there = max(gpu, self._drained[staging])
            if sum_up_ms is not None:
                there = self._up.do(max(there, self.offloaded[chunk]), sum_up_ms, "sum", chunk)
            reduced = self._sent[sent] = self._reductions.do(there, gradient.reduce_ms, "reduce", chunk)
            there = max(reduced, ready)
        if there is not None and staging >= 0:
            offloaded = self._down.do(there, gradient.offload_ms, "gradients", chunk)
            self._drained[staging] = self.offloaded[chunk] = offloaded
            self._gpu.wait(ready)  # until then the engine issues nothing
            self._up.wait(ready)

    def update(self) -> None:
        """Make all updates that no gradient waited for. The first time, choose when and where they are made."""
        over, step = self._gpu.free, self.step  # backward is over, and the norm is known
        if self.choices is None:
            n_in_time = step.host.in_time(self._host.free, self.offloaded, over)
        else:
            n_in_time = self.choices.n_in_time
        updates, updated, offloaded = step.host.ordered(n_in_time), self._updated, self.offloaded
        in_backward, after = updates[:n_in_time], updates[n_in_time:]
        # Updates inside backward take effect when the norm is known and none of them runs any more.
        n_whole = step.host.n_in_backward - step.host.n_weight_only
        for at, (chunk, duration) in enumerate(in_backward):
            kind = "speculative update" if at < n_whole else "speculative weight"
            self._host.do(offloaded[chunk], duration, kind, chunk)
        settled = max(over, self._host.free)
        for chunk, _ in (*in_backward, *step.awaited_updates.values()):
            updated[chunk] = settled
        if self.choices is None:
            self.choices = Choices(n_in_time, _updated_by_gpu(step, after, self._host.free - over))
        by_gpu = self.choices.by_gpu
        by_host = [(chunk, ms) for chunk, ms in after if chunk not in by_gpu]
        streamed = [(chunk, step.streamed_ms[chunk]) for chunk in by_gpu]
        for lane, of_lane in ((self._host, by_host), (self._streamed, streamed)):
            for chunk, duration in of_lane:
                updated[chunk] = lane.do(max(over, offloaded[chunk]), duration, "update", chunk)
        for chunk, duration in step.host.deferred(n_in_time):
            self._deferred[chunk] = self._host.do(over, duration, "deferred update", chunk)
        for chunk, duration in step.device_update_ms:
            updated[chunk] = self._gpu.do(0.0, duration, "update", chunk)


def _updated_by_gpu(step: PlannedStep, updates: Updates, host_free_ms: float) -> tuple[int, ...]:
    """The chunks that the GPU updates of those in ``updates``, in its order, as the engine chooses them.

    Times count from the norm, which the host knows at ``host_free_ms`` or at 0, whichever is later.
    """
    host_free_ms, gpu_free_ms = max(0.0, host_free_ms), 0.0
    if not step.streamed_ms:
        return ()
    sharing, chunks = step.sharing, [chunk for chunk, _ in updates]
    waiting = [
        Waiting(
            host_ms=ms,
            device_ms=step.streamed_ms.get(chunk, inf) / step.device_kept,
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
    return tuple(found)


def simulate(step: PlannedStep, shares: Shares, lane: type[Lane] = Lane) -> Run:
    """The run of ``step`` with contention, by the ``shares`` of their rates that lanes keep beside others."""
    full_rate = Run(step)
    starts, ends = [each.starts for each in full_rate.lanes], [each.ends for each in full_rate.lanes]
    return Run(step, slowdowns(shares, starts, ends), full_rate.choices, lane)


def timeline(step: PlannedStep, shares: Shares) -> Timeline:
    """Every operation of ``step`` with contention."""
    run = simulate(step, shares, NamedLane)
    begin = run.begin_ms
    operations = [
        Operation(lane=lane, name=name, start_ms=start - begin, end_ms=end - begin)
        for lane, done in enumerate(run.lanes)
        for name, start, end in zip(done.names, done.starts, done.ends, strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.forward_end_ms - begin,
        backward_end_ms=run.backward_end_ms - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )


def serial(step: PlannedStep) -> Timeline:
    """The timeline of a step on a CPU: all of its forward, then all of its backward, its copies and its updates."""
    run = Run(step)
    gpu = list(map(sub, run.lanes[GPU].ends, run.lanes[GPU].starts))[run.first[GPU] :]
    forward, update = step.n_forward, len(gpu) - len(step.device_update_ms)  # where they end, and begin
    stages = {
        "forward": sum(gpu[:forward]),
        "backward": sum(gpu[forward:update]),
        "copies": sum(map(run.busy_ms, (UP, DOWN, GATHER, REDUCE))),
        "update": sum(gpu[update:]) + run.busy_ms(HOST),
    }
    ends = list(accumulate(stages.values(), initial=0.0))
    operations = tuple(
        Operation(lane=lane, name=name, start_ms=start, end_ms=end)
        for lane, name, (start, end) in zip((GPU, GPU, UP, HOST), stages, pairwise(ends), strict=True)
        if end > start
    )
    return Timeline(step_ms=ends[4], forward_end_ms=ends[1], backward_end_ms=ends[2], operations=operations)
