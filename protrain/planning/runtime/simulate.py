"""A step as it really overlaps, worked out in order of issue on five lanes (paper section 4, and beyond).

GPU       computes, flattens gradients into chunks, updates persistent chunks
up, down  the copy engines: first in, first out; an upload gets there once its chunk is updated
host      updates the other chunks, one after the other, in the order in which the next forward needs them
streamed  some of those, updated by the device through the link, likewise (:mod:`protrain.planning.rates.streaming`)

The engine's order of issue is known (:mod:`protrain.planning.runtime.fetches` for uploads), and every operation starts
when its lane is free and what it needs is there: a buffer given up, a chunk updated, a gradient offloaded, a norm
known. The step after the first is the steady state.

The first pass runs every operation at its own full rate; the second stretches each by what is left of that beside the
others (:mod:`protrain.planning.runtime.stretches`). The first also chooses how many updates the host does early, where
that is open: [Note: how many early updates] in :mod:`protrain.planning.runtime.updating`.
"""

from __future__ import annotations

from itertools import accumulate, islice, zip_longest
from math import inf
from operator import mul, sub

from protrain.planning.runtime.passes import ROUNDED, Begun, Run, begin
from protrain.planning.runtime.step import Step
from protrain.planning.runtime.stretches import Stretches
from protrain.planning.timeline import DOWN, GPU, HOST, LANES, STREAM, UP, Operation, Timeline


def simulate(
    step: Step, stretches: Stretches, *, limit_ms: float = inf, begun: Begun | None = None
) -> tuple[float, int]:
    """Milliseconds of one step in steady state, at least ``limit_ms`` as soon as it cannot be less; its early updates.

    Contention only makes operations longer, so the first pass bounds the second from below, unless uploads went in an
    order that depends on how long they and updates are, and but for what the last early update lasts beyond backward,
    which a longer backward hides. So does :func:`_least_ms`, in any order. Either pass ends with the second forward
    where the GPU would be too late if it never waited after that.

    ``begun`` is the step's, if it is known.
    """
    begun = begun or begin(step)
    first = Run.of(step, begun=begun, limit_ms=limit_ms)
    step, n_early = first.step, first.step.host.n_early
    if first.is_at_least(limit_ms) or not first.moves:
        return first.step_ms, n_early
    stretch = stretches.of(first.starts, first.ends)
    if limit_ms < inf and _least_ms(step, begun, first, stretch) >= limit_ms * ROUNDED:
        return limit_ms, n_early
    return Run.of(step, stretch, first.in_time, begun=begun, limit_ms=limit_ms).step_ms, n_early


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
    total = sum(compute_ms for compute_ms, _, _ in (*step.forward_work, *step.backward_work))
    total += sum(
        step.upload_ms[chunk] for fetches in (*step.forward_fetches, *step.backward_fetches) for chunk, _ in fetches
    )
    total += sum(swap_ms for _, swap_ms, _ in step.forward_work) + sum(
        step.swap_ms[visit.unit] for visit in step.backward
    )
    for visit in step.backward:
        for _, _, flatten, offload, staging in visit.gradients:
            total += flatten + (offload if staging >= 0 else 0.0)
    early_ms = sum(time for _, time in step.host.updates[: step.host.n_early - step.host.n_whole])
    total += early_ms * step.host.weight_share  # of weights, beside whole updates
    updates = [*step.device_update_ms, *step.host.updates]
    return total + sum(time for _, time in updates) + sum(update.ms for update in step.making_room.values())


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
        names[update.lane].append(("early update", update.chunk))
    for lane, queue, early in zip((HOST, STREAM), (step.host, step.streamed), in_time, strict=True):
        whole = min(early, queue.n_whole if queue.weight_share else early)
        kinds = ["early update"] * whole + ["early weight"] * (early - whole)
        chunks = [chunk for chunk, _ in queue.ordered(early)]
        names[lane] += zip_longest(kinds, chunks, fillvalue="update")
        names[lane] += [("deferred update", chunk) for chunk, _ in queue.deferred(early)]
    names[GPU] += [("update", chunk) for chunk, _ in step.device_update_ms]
    return names
