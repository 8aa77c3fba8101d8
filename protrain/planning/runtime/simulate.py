"""Simulates a step as it really overlaps, in order of issue on its lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines, first in first out; a weight is uploaded once its chunk is updated
host      updates chunks in host memory, one after the other, in the order in which the next forward needs them
streamed  the GPU updates chunks in host memory with which the host would be late (``protrain.planning.sharing``)
gathers   several ranks make whole chunks of their shards
reduce    several ranks sum the gradients of a chunk, each to its shard

The engine's order of issue is known (``protrain.planning.runtime.fetches`` for uploads). Every operation starts when
its lane is free and what it needs is there: a buffer is given up, a chunk is updated, a gradient is offloaded, or the
norm is known. A backward with its updates comes first, so that the step after it is the steady state.

A first run gives every operation its full rate. A second run lengthens each operation by its slowdown beside the
operations of other lanes (``protrain.planning.contention``).
"""

from __future__ import annotations

from itertools import accumulate, pairwise, zip_longest
from math import inf

from protrain.planning.contention import Slowdowns
from protrain.planning.runtime.planned_step import PlannedStep
from protrain.planning.runtime.run import Choices, Run
from protrain.planning.timeline import DOWN, GATHER, GPU, HOST, LANES, REDUCE, STREAM, UP, Operation, Timeline


def simulate(step: PlannedStep, slowdowns: Slowdowns, *, limit_ms: float = inf) -> float:
    """Milliseconds of one step in steady state, or some number of at least ``limit_ms`` once it cannot be less.

    Contention only makes operations longer. So the full-rate run bounds the second run from below, with two
    exceptions: where uploads went in an order that depends on how long they and the updates take, and by the time that
    updates inside backward go on after backward, since a longer backward hides that time. What the GPU and the host do
    in the second run are bounds that take no run.
    """
    full_rate = Run.of(step)
    is_at_least = full_rate.step_ms - full_rate.beyond_ms >= limit_ms and not full_rate.reordered
    if is_at_least or full_rate.is_gpu_alone:
        return full_rate.step_ms
    factors = slowdowns.of(full_rate.starts, full_rate.ends)
    busy_ms = max(full_rate.busy_ms(lane, factors[lane]) for lane in (GPU, HOST))
    if busy_ms >= limit_ms:
        return busy_ms
    return Run.of(step, factors, full_rate.choices).step_ms


def timeline(step: PlannedStep, slowdowns: Slowdowns) -> Timeline:
    """Every operation of one step in steady state."""
    run = Run.of(step)
    if not run.is_gpu_alone:
        run = Run.of(step, slowdowns.of(run.starts, run.ends), run.choices)
    begin = run.begin_ms
    operations = [
        Operation(lane=lane, name=f"{kind} {what}", start_ms=start - begin, end_ms=end - begin)
        for lane, names in enumerate(_names(step, run))
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
