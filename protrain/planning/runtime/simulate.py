"""A step as it really overlaps, worked out in order of issue on five lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out; an upload gets there once its chunk is updated
host      updates the other chunks, one after the other, in the order in which the next forward needs them
streamed  some of those, updated by the device through the link, likewise (:mod:`protrain.planning.rates.streaming`)

The engine's order of issue is known (:mod:`protrain.planning.runtime.fetches` for uploads), and every operation starts
when its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm
known. The step after the first is the steady state.

The first pass runs every operation at its own full rate. The second stretches each by what is left of that rate beside
the others (:mod:`protrain.planning.runtime.stretches`).
"""

from __future__ import annotations

from itertools import accumulate, islice, zip_longest
from math import inf
from operator import mul, sub

from protrain.planning.runtime.passes import ROUNDED, Begun, Run, begin
from protrain.planning.runtime.step import Step
from protrain.planning.runtime.stretches import Stretches
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP, Operation, Timeline


def simulate(step: Step, stretches: Stretches, *, limit_ms: float = inf, begun: Begun | None = None) -> float:
    """Milliseconds of one step in steady state, or something above ``limit_ms`` as soon as it cannot be less.

    Contention only makes operations longer, so the first pass bounds the second from below, unless uploads went in an
    order that depends on how long they and updates are, and but for what the last early update lasts beyond backward,
    which a longer backward hides. So does :func:`_least_ms`, in any order. Either pass ends with the second forward
    where the GPU would be too late if it never waited after that.

    ``begun`` is the step's, if it is known.
    """
    begun = begun or begin(step)
    first = Run.of(step, begun=begun, limit_ms=limit_ms)
    if first.is_at_least(limit_ms) or not first.moves:
        return first.step_ms
    stretch = stretches.of(first.starts, first.ends)
    if limit_ms < inf and _least_ms(step, begun, first, stretch) >= limit_ms * ROUNDED:
        return limit_ms
    return Run.of(step, stretch, first.in_time, begun=begun, limit_ms=limit_ms).step_ms


def _least_ms(step: Step, begun: Begun, first: Run, stretch: list[list[float]]) -> float:
    """What the second pass comes to at least where updates wait for the norm, otherwise 0: a quarter of its work.

    From one norm to the next go the updates of the first step that wait for it, what follows the last of them in
    forward, on the host or by the device, and backward: from the end of forward, when every upload and copy issued
    before it may be done. Deferred updates follow those that wait, whatever forward does meanwhile. All with the
    durations of the second pass; later starts would only make the ends later. What the device updates comes after
    either norm.
    """
    assert first.in_time is not None
    host, streamed = (
        list(map(mul, map(sub, first.ends[lane], first.starts[lane]), stretch[lane][: len(stretch[lane]) // 2]))
        for lane in (HOST, STREAM)
    )
    in_time, n_updates = first.in_time[0], len(step.host.updates)
    host_ms = sum(host[in_time:n_updates])
    late = [
        late_ms + step.after_ms[queue.updates[-1][0]]
        for queue, late_ms in ((step.host, host_ms), (step.streamed, sum(streamed)))
        if queue.n_early < len(queue.updates)
    ]
    if not late:
        return 0.0
    forward_end_ms = max(late)  # from the norm
    done = accumulate(host[n_updates:], initial=host_ms - forward_end_ms)
    deferred = zip((chunk for chunk, _ in step.host.deferred(in_time)), islice(done, 1, None), strict=True)
    n_gpu, n_device = len(stretch[GPU]) // 2, len(step.device_update_ms)
    after, before = (
        sum(duration * stretch[GPU][at] for at, (_, duration) in enumerate(step.device_update_ms, end - n_device))
        for end in (2 * n_gpu, n_gpu)
    )
    return forward_end_ms + Run.backward_ms(step, begun, stretch, dict(deferred)) + after - before


def timeline(step: Step, stretches: Stretches) -> Timeline:
    """The same with every operation."""
    run = Run.of(step)
    if run.moves:
        run = Run.of(step, stretches.of(run.starts, run.ends), run.in_time)
    begin = run.begin_ms
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


def stages_ms(step: Step) -> tuple[float, float, float, float]:
    """Milliseconds of forward, backward, copies and updates, one after the other: a CPU is device and host at once."""
    forward_ms, backward_ms = (
        sum(compute_ms for compute_ms, _, _ in work) for work in (step.forward_work, step.backward_work)
    )
    backward_ms += sum(flatten_ms for visit in step.backward for _, _, flatten_ms, _, _ in visit.gradients)
    fetches = (*step.forward_fetches, *step.backward_fetches)
    copy_ms = sum(step.upload_ms[chunk] for of_visit in fetches for chunk, _ in of_visit)
    copy_ms += sum(swap_ms for _, swap_ms, _ in step.forward_work)
    copy_ms += sum(step.swap_ms[visit.unit] for visit in step.backward)
    gradients = (gradient for visit in step.backward for gradient in visit.gradients)
    copy_ms += sum(offload_ms for _, _, _, offload_ms, staging in gradients if staging >= 0)
    update_ms = step.host.weight_share * sum(ms for _, ms in step.host.updates[: step.host.n_weight_only])
    update_ms += sum(ms for _, ms in (*step.device_update_ms, *step.host.updates))
    update_ms += sum(update.ms for update in step.making_room.values())
    return forward_ms, backward_ms, copy_ms, update_ms


def stages(step: Step) -> Timeline:
    """The same as a timeline."""
    ends = list(accumulate(stages_ms(step)))
    operations = tuple(
        Operation(lane=lane, name=name, start_ms=start, end_ms=end)
        for lane, name, start, end in zip(
            (GPU, GPU, UP, HOST), ("forward", "backward", "copies", "update"), [0.0, *ends], ends, strict=False
        )
        if end > start
    )
    return Timeline(step_ms=ends[3], forward_end_ms=ends[0], backward_end_ms=ends[1], operations=operations)


def _names(step: Step, run: Run) -> list[list[tuple[str, object]]]:
    """By lane, what it does in the second step in the order of issue: what and with what."""
    in_time = run.in_time or (0, 0)
    names: list[list[tuple[str, object]]] = [[] for _ in LANES]
    names[UP] = [("weights", chunk) for chunk, _ in run.uploads]
    for visit, (_, swap_ms, _) in zip(step.forward, step.forward_work, strict=True):
        names[GPU].append(("forward", visit.name))
        if swap_ms:
            names[DOWN].append(("activations", visit.name))
    for visit, (_, _, swap_back), fetches in zip(step.backward, step.backward_work, step.backward_fetches, strict=True):
        names[UP] += [("weights", chunk) for chunk, _ in fetches]
        names[UP] += [("activations", unit) for unit in swap_back]
        names[GPU].append(("backward", visit.name))
        names[GPU] += [("flatten", chunk) for _, chunk, _, _, _ in visit.gradients]
        names[DOWN] += [("gradients", chunk) for _, chunk, _, _, staging in visit.gradients if staging >= 0]
    for update in step.making_room.values():
        names[update.lane].append(("speculative update", update.chunk))
    for lane, queue, early in zip((HOST, STREAM), (step.host, step.streamed), in_time, strict=True):
        whole = min(early, queue.n_early - queue.n_weight_only)
        kinds = ["speculative update"] * whole + ["speculative weight"] * (early - whole)
        chunks = [chunk for chunk, _ in queue.ordered(early)]
        names[lane] += zip_longest(kinds, chunks, fillvalue="update")
        names[lane] += [("deferred update", chunk) for chunk, _ in queue.deferred(early)]
    names[GPU] += [("update", chunk) for chunk, _ in step.device_update_ms]
    return names
