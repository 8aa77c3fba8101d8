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
chunks, since all ranks must issue them in one order, while uploads may overtake each other. A gradient is flattened
into a staging buffer. Once a chunk has all its gradients, the buffer is reduced. Shards in host memory are then
offloaded. The norm is known when all gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, repeat, zip_longest
from math import inf
from operator import sub
from typing import NamedTuple

from protrain.planning.contention import Slowdowns
from protrain.planning.layout import STAGING_BUFFERS
from protrain.planning.schedule import Fetch
from protrain.planning.sharing import Waiting, next_for_gpu
from protrain.planning.step import Gradient, PlannedStep, Updates
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, LANES, REDUCE, STREAM, UP, Operation, Timeline


class Choices(NamedTuple):
    """What depends on how long operations take, in the first updates of a full-rate run. Later updates are the same."""

    n_in_time: int  # updates inside backward that begin before backward is over
    by_gpu: tuple[int, ...]  # the chunks in host memory that the GPU updates, in its order


class Run:
    """A backward with its updates, and then a step in steady state.

    The search spends most of its time here. So the loops over visits keep what the GPU does in local variables.

    Args:
        step: what a step does.
        factors: by lane, the factor on the duration of one operation after the other.
    """

    def __init__(self, step: PlannedStep, factors: list[Iterator[float]]) -> None:
        self.step = step
        self._visits = list(zip(step.visits, step.work, step.fetches, step.gathers, strict=True))
        self._factors = factors
        self.choices: Choices | None = None  # the first updates make them
        self.uploads: list[Fetch] = []  # in forward, in the order in which they went
        self.step_ms = self.begin_ms = self.forward_end_ms = self.backward_end_ms = 0.0  # of the step
        self.starts: list[list[float]] = [[] for _ in LANES]  # by lane: when its operations start, and when they end
        self.ends: list[list[float]] = [[] for _ in LANES]
        self.first = [0] * len(LANES)  # by lane: its first operation of the step
        self.free = [0.0] * len(LANES)  # by lane: when it has done all operations so far
        n_chunks = len(step.upload_ms)
        self._updated = [0.0] * n_chunks  # by chunk: when its weight in host memory is updated
        self._all_updated = 0.0  # when all weights are, deferred updates of states aside
        self._deferred = [0.0] * n_chunks  # by chunk: when its deferred update is done
        # By chunk: when the GPU has read its buffer. The last (index -1) is an empty buffer, which always is free.
        self._released = [0.0] * (n_chunks + 1)
        # By chunk: when its weight is in its buffer. A frozen chunk may never be fetched.
        self._loaded = [0.0] * n_chunks
        self.offloaded = [0.0] * n_chunks  # by chunk: when its gradient is in host memory
        self._drained = [0.0] * (STAGING_BUFFERS + 1)  # by staging buffer: when its gradient has been offloaded
        self._sent = [0.0] * (STAGING_BUFFERS + 1)  # by staging buffer: when its gradient has been reduced
        self._swapped_out = [0.0] * len(step.swap_in_ms)  # by unit: when its activations are in host memory
        self._back = [0.0] * len(step.swap_in_ms)  # by unit: when its activations are on the device again
        self._last_swap_out = 0.0  # when the last swap out ends, whose device memory the next visit gives up

    @classmethod
    def of(cls, step: PlannedStep, factors: list[list[float]] | None = None, choices: Choices | None = None) -> Run:
        """The run of ``step``.

        ``factors`` are by lane and operation, in the order of the full-rate run that they were made from; ``choices``
        are that run's. Without ``factors`` this is a full-rate run.
        """
        run = cls(step, [repeat(1.0)] * len(LANES) if factors is None else list(map(iter, factors)))
        run.choices = choices
        run.backward()
        run.update()
        run.begin_ms, run.first = run.free[GPU], [len(each) for each in run.starts]
        run.forward()
        run.forward_end_ms = run.free[GPU]
        run.backward()
        run.backward_end_ms = run.free[GPU]
        run.update()
        run.step_ms = run.free[GPU] - run.begin_ms
        # Updates that the next step does not wait for would pile up if the host had more to do than a step is long.
        run.step_ms = max(run.step_ms, run.busy_ms(HOST))
        return run

    def busy_ms(self, lane: int) -> float:
        """How long ``lane`` is busy in the step."""
        first = self.first[lane]
        return sum(map(sub, self.ends[lane][first:], self.starts[lane][first:]))

    @property
    def is_gpu_alone(self) -> bool:
        """Whether no lane does anything that the GPU could slow down, or that could slow it down."""
        return not any(self.starts[lane] for lane in (UP, DOWN, HOST, STREAM))

    def _do(self, lane: int, earliest: float, duration: float) -> float:
        """Run one operation on ``lane``, from ``earliest`` on. Returns its end."""
        free = self.free[lane]
        start = free if free > earliest else earliest
        end = self.free[lane] = start + duration * next(self._factors[lane])
        self.starts[lane].append(start)
        self.ends[lane].append(end)
        return end

    def _fetch(self, fetches: Sequence[Fetch]) -> None:
        """Upload weights, each as soon as it is updated and its buffer is given up."""
        for chunk, victim in fetches:
            there = max(self._updated[chunk], self._released[victim])
            self._loaded[chunk] = self._do(UP, there, self.step.upload_ms[chunk])

    def _fetch_updated(self, fetches: Sequence[Fetch]) -> Sequence[Fetch]:
        """Upload weights that forward fetches at its begin. No updated chunk waits for one that is not updated yet.

        Returns the fetches in the order in which they went.
        """
        updated, left, gone = self._updated, list(fetches), []
        while left:
            free = self.free[UP]
            first = next((fetch for fetch in left if updated[fetch[0]] <= free), None)  # the nearest use comes first
            if first is None:
                first = min(left, key=lambda fetch: updated[fetch[0]])
            left.remove(first)
            gone.append(first)
            self._fetch((first,))
        return gone

    def _gather(self, fetches: Sequence[Fetch]) -> None:
        """Make chunks whole, one after the other: see [Note: collectives]."""
        for chunk, victim in fetches:
            # A chunk that is not uploaded was loaded by the gather before, in the same lane.
            there = max(self._updated[chunk], self._released[victim], self._loaded[chunk])
            self._loaded[chunk] = self._do(GATHER, there, self.step.gather_ms[chunk])

    def _reduce(self, gradients: Sequence[Gradient], gpu: float) -> float:
        """Flatten, reduce and offload gradients of several ranks from ``gpu`` on. Returns when the GPU is done.

        See [Note: collectives].
        """
        step = self.step
        for index, chunk, flatten_ms, offload_ms, staging in gradients:
            reduction, ready = step.reductions[index], 0.0
            self.free[GPU] = gpu
            gpu = self._do(GPU, self._sent[reduction.sent], flatten_ms)
            if index in step.awaited_updates:
                before, duration = step.awaited_updates[index]
                ready = self._do(HOST, self.offloaded[before], duration)
            if reduction.ms:
                there = self._drained[staging] if staging >= 0 else gpu
                if index in step.sum_up_ms:
                    there = self._do(UP, max(gpu, there, self.offloaded[chunk]), step.sum_up_ms[index])
                reduced = self._sent[reduction.sent] = self._do(REDUCE, max(gpu, there), reduction.ms)
                if staging >= 0:
                    ready = max(ready, self._deferred[chunk])
                    offloaded = self._do(DOWN, max(reduced, ready), offload_ms)
                    self._drained[staging] = self.offloaded[chunk] = offloaded
            gpu, self.free[UP] = max(gpu, ready), max(self.free[UP], ready)
        return gpu

    def forward(self) -> None:
        """The GPU computes, weights are fetched, and activations of swapped blocks and inputs are offloaded."""
        gpu, factors, starts, ends = self.free[GPU], self._factors[GPU], self.starts[GPU], self.ends[GPU]
        released, loaded, last_swap_out = self._released, self._loaded, self._last_swap_out
        if self.step.sum_up_ms and self.free[DOWN] > gpu:
            gpu = self.free[DOWN]  # see [Note: looking at the loss]
        self.uploads = []
        for visit, (compute_ms, swap_ms, _), fetches, gathers in self._visits[: self.step.n_forward]:
            if fetches:
                if len(fetches) > 1 and self._all_updated > self.free[UP]:
                    fetches = self._fetch_updated(fetches)
                else:
                    self._fetch(fetches)
                self.uploads += fetches
            if gathers:
                self._gather(gathers)
            start = gpu
            chunks = visit.chunks
            for chunk in chunks:
                if loaded[chunk] > start:
                    start = loaded[chunk]
            gpu = start + compute_ms * next(factors)
            starts.append(start)
            ends.append(gpu)
            for chunk in chunks:
                released[chunk] = gpu
            # The device memory of the last swapped block is given up here, and the GPU waits for its copy first.
            if last_swap_out > gpu:
                gpu = last_swap_out
            if swap_ms:
                last_swap_out = self._swapped_out[visit.unit] = self._do(DOWN, gpu, swap_ms)
        self.free[GPU] = gpu
        self._last_swap_out = last_swap_out

    def backward(self) -> None:
        """The GPU computes and flattens beside fetches and offloads, and updates that gradients wait for are made."""
        gpu, factors, starts, ends = self.free[GPU], self._factors[GPU], self.starts[GPU], self.ends[GPU]
        released, loaded, swapped_out, back = self._released, self._loaded, self._swapped_out, self._back
        drained, all_offloaded, deferred, step = self._drained, self.offloaded, self._deferred, self.step
        swap_in_ms, awaited_updates, reductions = step.swap_in_ms, step.awaited_updates, step.reductions
        sum_up_ms = step.sum_up_ms
        if self._last_swap_out > gpu:
            gpu = self._last_swap_out
        for visit, (compute_ms, swap_ms, swap_in), fetches, gathers in self._visits[step.n_forward :]:
            if fetches:
                self._fetch(fetches)
            if gathers:
                self._gather(gathers)
            for unit in swap_in:
                # Device memory is allocated when the visit begins.
                back[unit] = self._do(UP, max(gpu, swapped_out[unit]), swap_in_ms[unit])
            start = gpu
            chunks = visit.chunks
            for chunk in chunks:
                if loaded[chunk] > start:
                    start = loaded[chunk]
            if swap_ms and back[visit.unit] > start:
                start = back[visit.unit]
            gpu = start + compute_ms * next(factors)
            starts.append(start)
            ends.append(gpu)
            for chunk in chunks:
                released[chunk] = gpu
            if reductions:
                gpu = self._reduce(visit.gradients, gpu)
                continue
            for index, chunk, flatten_ms, offload_ms, staging in visit.gradients:
                start = gpu
                if staging >= 0 and drained[staging] > start:
                    start = drained[staging]
                gpu = start + flatten_ms * next(factors)
                starts.append(start)
                ends.append(gpu)
                if staging >= 0:
                    ready = deferred[chunk]
                    if index in awaited_updates:
                        before, duration = awaited_updates[index]
                        ready = self._do(HOST, all_offloaded[before], duration)
                    if ready > self.free[UP]:
                        self.free[UP] = ready  # until then the engine issues no upload
                    if ready > gpu:
                        gpu = ready
                    there = gpu
                    if index in sum_up_ms:  # in parts, each of which goes down while the next one comes up
                        sum_there = self._do(UP, max(gpu, all_offloaded[chunk]), sum_up_ms[index])
                        there = max(gpu, sum_there - offload_ms)
                    drained[staging] = all_offloaded[chunk] = self._do(DOWN, there, offload_ms)
        self.free[GPU] = max(gpu, self.free[REDUCE])

    def update(self) -> None:
        """Make all updates that no gradient waited for. The first time, choose when and where they are made."""
        over, step = self.free[GPU], self.step  # backward is over, and the norm is known
        if self.choices is None:
            n_in_time = step.host.in_time(self.free[HOST], self.offloaded, over)
        else:
            n_in_time = self.choices.n_in_time
        updates, updated, offloaded = step.host.ordered(n_in_time), self._updated, self.offloaded
        in_backward, after = updates[:n_in_time], updates[n_in_time:]
        # Updates inside backward take effect when the norm is known and none of them runs any more.
        for chunk, duration in in_backward:
            self._do(HOST, offloaded[chunk], duration)
        settled = max(over, self.free[HOST])
        for chunk, _ in in_backward:
            updated[chunk] = settled
        for update in step.awaited_updates.values():
            updated[update.chunk] = settled
        if self.choices is None:
            self.choices = Choices(n_in_time, _updated_by_gpu(step, after, self.free[HOST] - over))
        by_gpu = self.choices.by_gpu
        by_host = [(chunk, ms) for chunk, ms in after if chunk not in by_gpu]
        streamed = [(chunk, step.streamed_ms[chunk]) for chunk in by_gpu]
        for lane, of_lane in ((HOST, by_host), (STREAM, streamed)):
            for chunk, duration in of_lane:
                updated[chunk] = self._do(lane, max(over, offloaded[chunk]), duration)
        self._all_updated = max(over, self.free[HOST], self.free[STREAM])
        for chunk, duration in step.host.deferred(n_in_time):
            self._deferred[chunk] = self._do(HOST, over, duration)
        for chunk, duration in step.device_update_ms:
            updated[chunk] = self._do(GPU, 0.0, duration)


def _updated_by_gpu(step: PlannedStep, updates: Updates, host_free_ms: float) -> tuple[int, ...]:
    """The chunks that the GPU updates of those in ``updates``, in its order, as the engine chooses them.

    Times count from the norm, which the host knows at ``host_free_ms`` or at 0, whichever is later.
    """
    host_free_ms, gpu_free_ms = max(0.0, host_free_ms), 0.0
    if not step.streamed_ms or not _is_late(step, updates, host_free_ms):
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


def _is_late(step: PlannedStep, updates: Updates, host_free_ms: float) -> bool:
    """Whether the host alone would be late with any of ``updates``."""
    end_ms, needed_ms = host_free_ms, step.sharing.needed_ms
    for chunk, duration in updates:
        end_ms += duration
        if end_ms > needed_ms[chunk]:
            return True
    return False


def simulate(step: PlannedStep, slowdowns: Slowdowns) -> Run:
    """The run of ``step`` with contention."""
    run = Run.of(step)
    if run.is_gpu_alone:
        return run
    return Run.of(step, slowdowns.of(run.starts, run.ends), run.choices)


def timeline(run: Run) -> Timeline:
    """Every operation of the step in ``run``."""
    begin = run.begin_ms
    operations = [
        Operation(lane=lane, name=f"{kind} {what}", start_ms=start - begin, end_ms=end - begin)
        for lane, names in enumerate(_names(run.step, run))
        for (kind, what), start, end in zip(names, run.starts[lane], run.ends[lane], strict=True)
        if end > start and end > begin
    ]
    return Timeline(
        step_ms=run.step_ms,
        forward_end_ms=run.forward_end_ms - begin,
        backward_end_ms=run.backward_end_ms - begin,
        operations=tuple(sorted(operations, key=lambda operation: (operation.start_ms, operation.lane))),
    )


def serial_ms(step: PlannedStep) -> float:
    """Milliseconds of a step on a CPU, where device and host are one processor and nothing overlaps."""
    return sum(map(Run.of(step).busy_ms, range(len(LANES))))


def serial(step: PlannedStep) -> Timeline:
    """The timeline of a step on a CPU: all of its forward, then all of its backward, its copies and its updates."""
    run = Run.of(step)
    gpu = [end - start for start, end in zip(run.starts[GPU], run.ends[GPU], strict=True)][run.first[GPU] :]
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


def _names(step: PlannedStep, run: Run) -> list[list[tuple[str, object]]]:
    """By lane, the kind of each of its operations and what it works on, in the order of issue."""
    forward, rest = _names_of_forward(step, run), _names_of_rest(step, run)
    return [[*after, *before, *after] for before, after in zip(forward, rest, strict=True)]


def _names_of_forward(step: PlannedStep, run: Run) -> list[list[tuple[str, object]]]:
    names: list[list[tuple[str, object]]] = [[] for _ in LANES]
    names[UP] = [("weights", chunk) for chunk, _ in run.uploads]
    names[GATHER] = [("gather", chunk) for of_visit in step.gathers[: step.n_forward] for chunk, _ in of_visit]
    for visit, (_, swap_ms, _) in zip(step.visits[: step.n_forward], step.work, strict=False):
        names[GPU].append(("forward", visit.name))
        if swap_ms:
            names[DOWN].append(("activations", visit.name))
    return names


def _names_of_rest(step: PlannedStep, run: Run) -> list[list[tuple[str, object]]]:
    """Of backward and the updates."""
    n_in_time, by_gpu = run.choices or Choices(0, ())
    names: list[list[tuple[str, object]]] = [[] for _ in LANES]
    names[GATHER] = [("gather", chunk) for of_visit in step.gathers[step.n_forward :] for chunk, _ in of_visit]
    visits = list(zip(step.visits, step.work, step.fetches, strict=True))
    for visit, (_, _, swap_in), fetches in visits[step.n_forward :]:
        names[UP] += [("weights", chunk) for chunk, _ in fetches]
        names[UP] += [("activations", unit) for unit in swap_in]
        names[GPU].append(("backward", visit.name))
        names[GPU] += [("flatten", chunk) for _, chunk, _, _, _ in visit.gradients]
        names[UP] += [("sum", chunk) for index, chunk, *_ in visit.gradients if index in step.sum_up_ms]
        names[DOWN] += [("gradients", chunk) for _, chunk, _, _, staging in visit.gradients if staging >= 0]
        if step.reductions:
            names[REDUCE] += [("reduce", chunk) for index, chunk, *_ in visit.gradients if step.reductions[index].ms]
    names[HOST] = [("speculative update", update.chunk) for update in step.awaited_updates.values()]
    whole = min(n_in_time, step.host.n_in_backward - step.host.n_weight_only)
    kinds = ["speculative update"] * whole + ["speculative weight"] * (n_in_time - whole)
    chunks = [chunk for chunk, _ in step.host.ordered(n_in_time) if chunk not in by_gpu]
    names[HOST] += zip_longest(kinds, chunks, fillvalue="update")
    names[HOST] += [("deferred update", chunk) for chunk, _ in step.host.deferred(n_in_time)]
    names[STREAM] = [("update", chunk) for chunk in by_gpu]
    names[GPU] += [("update", chunk) for chunk, _ in step.device_update_ms]
    return names
