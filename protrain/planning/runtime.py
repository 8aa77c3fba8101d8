"""The runtime model: how long a step takes under a plan (paper section 4, and beyond).

[Note: several batches] A step of several batches is as many forwards and backwards, of which the last is followed by
the updates. In all of them the host adds the gradients that arrive to fp32 accumulators. Those before the last are
worked out as a step whose updates are these additions, inside backward; in the last one they are part of early updates,
and of other chunks they are over by the time the norm is known. For that the host goes through all it has added.

From the memory model of a profile, a machine and a layout to the :class:`~protrain.planning.step.Step` of any plan.
On a CPU, where nothing overlaps, the operations add up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate, compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.choices import Choices
from protrain.planning.compute_times import compute_times
from protrain.planning.contention import OTHERS, rates
from protrain.planning.fetches import Fetches
from protrain.planning.layout import streamed_chunks, updated_chunks
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode
from protrain.planning.simulate import in_a_row, simulate, timeline
from protrain.planning.step import Step, Update, Visit, Work
from protrain.planning.streaming import streamed_rates
from protrain.planning.timeline import DOWN, GPU, HOST, STREAM, UP, Timeline
from protrain.planning.updating import Queue
from protrain.planning.visits import computing_by_visit, gradients_by_visit

Modes = tuple[BlockMode, ...]
Times = NDArray[np.float64]
Counts = NDArray[np.int64] | int

# DRAM traffic per parameter of one host update, and what of it is written: the first of that is the weight.
_HOST_ADAM_BYTES = {"bfloat16": 26, "float16": 28, "float32": 28}
_HOST_ADAM_WRITTEN = {"bfloat16": 12, "float16": 14, "float32": 12}
_ACCUMULATOR_BYTES = 4  # of a parameter; an addition reads and writes it


class Undisturbed(NamedTuple):
    """The least of a step under choices of block modes: all weights on the device and nothing else running.

    By choice, all of them.
    """

    forward_ms: Times
    backward_ms: Times
    out_ms: Times  # the link's work for swapped activations
    back_ms: Times

    def some(self, which: NDArray[np.intp]) -> Undisturbed:
        """Those of the choices at the positions ``which``."""
        return Undisturbed(*(times[which] for times in self))


class RuntimeModel:
    """Predictions for the model, layout and machine of ``memory``, with updates inside backward if it says so.

    Args:
        memory: the memory model.
        only_adds: of a forward and backward whose gradients are added to others, without updates.
    """

    def __init__(self, memory: MemoryModel, *, only_adds: bool = False) -> None:
        profile, hardware, layout = memory.profile, memory.hardware, memory.layout
        self.times = compute_times(profile, hardware)
        self._profile = profile
        self._hardware = hardware
        self._layout = layout
        self._memory = memory
        self._in_backward = memory.update_in_backward or only_adds
        element = profile.element_bytes
        # Those before the last forward and backward of a step: see [Note: several batches].
        self._n_before = 0 if only_adds else profile.accumulation - 1
        self._before = RuntimeModel(memory, only_adds=True) if self._n_before else None
        held = [self._held(unit) for unit in profile.calls]
        held += [layout.unit_chunks[unit] for unit in reversed(profile.calls)]
        used = {chunk for chunks in held for chunk in chunks}
        self._updated = updated_chunks(profile, layout)
        updated = [chunk.index in self._updated for chunk in layout.chunks]
        trainable = [chunk.elements if updated[chunk.index] else 0 for chunk in layout.chunks]
        self._upload = [_ms(chunk.elements * element, hardware.h2d_gbps) for chunk in layout.chunks]
        adam_bytes = _HOST_ADAM_BYTES[profile.dtype]
        per_byte = [elements / hardware.host_adam_gparams / 1e6 / adam_bytes for elements in trainable]
        self._host_add = [ms * (element + 2 * _ACCUMULATOR_BYTES) if memory.accumulates else 0.0 for ms in per_byte]
        if memory.accumulates:
            adam_bytes += _ACCUMULATOR_BYTES - element
        self._host_norm = [ms * _ACCUMULATOR_BYTES if memory.accumulates else 0.0 for ms in per_byte]
        self._device_update = [0.0 if only_adds else n / hardware.device_adam_gparams / 1e6 for n in trainable]
        self._host_update = self._host_add if only_adds else [ms * adam_bytes for ms in per_byte]
        self._visits = [*profile.calls, *reversed(profile.calls)]
        self._forward_ms, self._backward_ms = computing_by_visit(profile, self.times)
        # By unit, of one call: out and back of its saved activations, of its inputs; recomputation; which block may be
        # swapped.
        self._swap_ms = [(0.0, 0.0)] * len(profile.units)
        self._inputs_ms = [(0.0, 0.0)] * len(profile.units)
        self._recompute_ms = [0.0] * len(profile.units)
        self._swappable: list[int | None] = [None] * len(profile.units)
        for unit, n_calls in Counter(profile.calls).items():
            if (block := profile.units[unit].block) is not None:
                size = profile.blocks[block].saved_bytes / n_calls
                self._swap_ms[unit] = _ms(size, hardware.d2h_gbps), _ms(size, hardware.h2d_gbps)
                size_in = profile.blocks[block].input_bytes / n_calls
                self._inputs_ms[unit] = _ms(size_in, hardware.d2h_gbps), _ms(size_in, hardware.h2d_gbps)
                self._recompute_ms[unit] = self.times.recompute[block] / n_calls
                self._swappable[unit] = block if size else None
        self._fetches = Fetches(self._visits, layout.unit_chunks, held, [chunk.trainable for chunk in layout.chunks])
        self._needed = held
        self._gradients, self._gradients_of_visit = gradients_by_visit(profile, hardware, layout)
        streamed_gparams, streamed_gbps = streamed_rates(hardware, profile.dtype)
        self._rates = rates(hardware, hardware.host_adam_gparams * _HOST_ADAM_BYTES[profile.dtype], streamed_gbps)
        self._streamed_ms = hardware.host_adam_gparams / streamed_gparams  # by the device, of a millisecond of the host
        # Of a whole update's time for the weight alone: it reads as much and writes no other state.
        whole = adam_bytes
        self._weight_share = (whole - _HOST_ADAM_WRITTEN[profile.dtype] + element) / whole
        self._work: tuple[Modes, tuple[list[Work], list[float]]] | None = None  # of the modes asked for last
        self._visits_of: dict[int, list[Visit]] = {}  # by n_persist
        # For bounds: sums from the first chunk on.
        self._forward_total = sum(self._forward_ms)
        self._backward_total = sum(self._backward_ms)
        self._flatten_all = sum(flatten for _, flatten, _ in self._gradients)
        self._flatten_of_visit = [
            sum(self._gradients[index][1] for index in visit) for visit in self._gradients_of_visit
        ]
        # What one early update more or less changes, at full rate.
        self.longest_update_ms = max(self._host_update, default=0.0) if self.speculates else 0.0
        self._device_before = [0.0, *accumulate(self._device_update)]
        self._host_before = [0.0, *accumulate(self._host_update)]
        uploads = [ms if fresh else 0.0 for ms, fresh in zip(self._upload, updated, strict=True)]
        self._fresh_from = [sum(uploads[first:]) for first in range(len(uploads) + 1)]  # uploads of updated weights
        last_trainable = max(compress(range(len(updated)), updated), default=0)
        starts = list(accumulate(self._forward_ms, initial=0.0))
        first_use = next((at for at, chunks in enumerate(held) if last_trainable in chunks), 0)
        forward_after_last = starts[-1] - starts[min(first_use, len(self._forward_ms))]
        self._last_trainable = last_trainable
        # From the last host update to the end of forward.
        self._after_host_ms = (self._upload[last_trainable] if self._upload else 0.0) + forward_after_last
        n_chunks = len(layout.chunks)
        self._used_from = [sum(chunk >= first for chunk in used) for first in range(n_chunks + 1)]
        self._least_upload = [min(self._upload[first:], default=0.0) for first in range(n_chunks + 1)]
        # What a millisecond of uploads or of offloads costs the host optimizer at least, both at once included.
        loss = {present: 1.0 - rate for present, rate in self._rates[HOST].items()}
        up, down = (loss[tuple(other == lane for other in OTHERS[HOST])] for lane in (UP, DOWN))
        both = loss[tuple(other in (UP, DOWN) for other in OTHERS[HOST])]
        self._slower_host = (min(up, max(0.0, both - down)), down)

    def streamable(self, n_persist: int, n_speculate: int) -> int:
        """How many chunks the device may update in host memory."""
        return sum(chunk >= n_persist + n_speculate for chunk in self._updated)

    def balanced(self, n_persist: int, n_speculate: int) -> int:
        """How many of those to end when the host ends, both beside computing."""
        host, device = (
            self._rates[lane][tuple(other in (GPU, HOST, STREAM) for other in OTHERS[lane])] for lane in (HOST, STREAM)
        )
        return round(self.streamable(n_persist, n_speculate) / (1 + self._streamed_ms * host / device))

    @property
    def streams(self) -> bool:
        """Whether the search may have the device update chunks in host memory: how fast it does must be known."""
        return self._hardware.device_type == "cuda" and self._hardware.streamed_adam_gparams is not None

    @property
    def speculates(self) -> bool:
        """Whether updates before step() save time: with updates inside backward, or on a CPU, there is none to save."""
        return not self._in_backward and self._hardware.device_type != "cpu"

    def step_ms(
        self,
        modes: Modes,
        n_persist: int,
        n_buffer: int,
        n_speculate: int = 0,
        n_stream: int = 0,
        *,
        limit_ms: float = float("inf"),
    ) -> float:
        """Predicted time of one step in steady state, in milliseconds; if above ``limit_ms``, by how much is open.

        None of its gradients is clipped: then no update is done twice.
        """
        before_ms = self._before_ms(modes, n_persist, n_buffer, limit_ms)
        if before_ms >= limit_ms:
            return before_ms
        if self._hardware.device_type == "cpu":  # where the device is the host as well
            return before_ms + in_a_row(self._step(modes, n_persist, n_buffer, n_speculate))
        step = self._step(modes, n_persist, n_buffer, n_speculate, n_stream)
        return before_ms + simulate(step, self._rates, limit_ms=limit_ms - before_ms)[0]

    def _before_ms(self, modes: Modes, n_persist: int, n_buffer: int, limit_ms: float) -> float:
        """All but the last forward and backward of a step."""
        if self._before is None:
            return 0.0
        each_ms = self._before.step_ms(modes, n_persist, n_buffer, limit_ms=limit_ms / self._n_before)
        return self._n_before * each_ms

    def fitted_ms(
        self,
        modes: Modes,
        n_persist: int,
        n_buffer: int,
        most: int,
        *,
        limit_ms: float = float("inf"),
        weights_from: int = 0,
    ) -> tuple[float, int]:
        """The same with up to ``most`` early updates: as many as seem best. See [Note: how many early updates].

        Whole ones, or ``weights_from`` or more of weights alone where that is not 0.

        Returns:
            (step time, n_speculate).
        """
        if not most:
            return self.step_ms(modes, n_persist, n_buffer, limit_ms=limit_ms), 0
        before_ms = self._before_ms(modes, n_persist, n_buffer, limit_ms)
        if before_ms >= limit_ms:
            return before_ms, 0
        step = self._step(modes, n_persist, n_buffer, most)
        host = step.host._replace(weight_share=self._weight_share if weights_from else 0.0)
        step = replace(step, host=host, fewest_early=sum(chunk < n_persist + weights_from for chunk, _ in host.updates))
        step_ms, n_early = simulate(step, self._rates, limit_ms=limit_ms - before_ms)
        return before_ms + step_ms, step.host.updates[n_early - 1][0] - n_persist + 1 if n_early else 0

    def timeline(
        self, modes: Modes, n_persist: int, n_buffer: int, n_speculate: int = 0, n_stream: int = 0
    ) -> Timeline:
        """What runs where and when in that step, as on a GPU; of several batches with the last one."""
        return timeline(self._step(modes, n_persist, n_buffer, n_speculate, n_stream), self._rates)

    def undisturbed(self, choices: Choices) -> Undisturbed:
        """Forward and backward as they would be with all weights on the device and every copy at full rate.

        The GPU waits as it does in the engine: a swapped block's activations have until the end of the next unit to go
        out, and come back one after the other, each from the start of the unit before it in backward.
        """
        nothing = np.zeros(choices.n_choices)
        if self._hardware.device_type == "cpu":
            recomputed = nothing
            for unit in self._profile.calls:
                if (block := self._profile.units[unit].block) is not None:
                    recomputed = recomputed + choices.ckpt[block] * self._recompute_ms[unit]
            return Undisturbed(
                nothing + self._forward_total, self._backward_total + self._flatten_all + recomputed, nothing, nothing
            )
        gpu = link = out = back = nothing
        for at, unit in enumerate(self._profile.calls):
            gpu = np.maximum(gpu + self._forward_ms[at], link)
            block = self._swappable[unit]
            if block is not None:
                out_ms, back_ms = self._swap_ms[unit]
                swapped = choices.swap[block]
                link = np.where(swapped, np.maximum(link, gpu) + out_ms, link)
                out = out + swapped * out_ms
                back = back + swapped * back_ms
        return Undisturbed(np.maximum(gpu, link), self._backward(choices), out, back)

    def _backward(self, choices: Choices, placement: tuple[int, int] | None = None) -> Times:
        """The least of backward, from when the GPU is done with forward, every operation at full rate.

        The GPU computes, the link brings weights and swapped activations, both in the order of issue; a buffer that
        was given up in backward is filled after that, and any other upload may have been done before backward began.
        Longer operations only make anything end later, for all that happens here is sums and maxima of ends.
        """
        calls, units = self._profile.calls, self._profile.units
        gpu = link = np.zeros(choices.n_choices)
        released: dict[int, Times] = {}  # by chunk
        loaded: dict[int, Times] = {}
        back: dict[int, Times] = {}  # by unit: its activations, where they were swapped
        for at in range(len(calls) - 1, -1, -1):
            unit, earlier = calls[at], calls[at - 1] if at else -1
            begin = start = gpu
            chunks: tuple[int, ...] = ()
            if placement is not None:
                chunks = self._placed(placement[0])[-1 - at].chunks
                for chunk, victim in self._fetches.of(*placement)[-1 - at]:
                    if victim in released:
                        link = loaded[chunk] = np.maximum(link, released[victim]) + self._upload[chunk]
                for chunk in chunks:
                    if chunk in loaded:
                        start = np.maximum(start, loaded[chunk])
            if (block := self._swappable[unit]) is not None:
                swapped = choices.swap[block]
                if unit not in back:
                    link = back[unit] = np.where(swapped, np.maximum(link, begin) + self._swap_ms[unit][1], link)
                start = np.where(swapped, np.maximum(start, back.pop(unit)), start)
            if earlier >= 0 and earlier != unit and (ahead := self._swappable[earlier]) is not None:
                swapped = choices.swap[ahead]
                link = back[earlier] = np.where(swapped, np.maximum(link, begin) + self._swap_ms[earlier][1], link)
            compute: Times | float = self._backward_ms[at]
            if (block := units[unit].block) is not None:
                compute = compute + choices.ckpt[block] * self._recompute_ms[unit]
            gpu = start + compute
            released.update(dict.fromkeys(chunks, gpu))
            gpu = gpu + self._flatten_of_visit[len(calls) - 1 - at]
        return gpu

    def bound_ms(self, step: Undisturbed, n_persist: int, n_buffer: Counts, n_speculate: Counts) -> Times:
        """What the step takes at least, whatever overlaps, by choice; counts may differ between choices.

        Of several batches each by itself.

        Each is a time that lanes need, at full rate but for the last, for work that must follow each other:

        - the GPU goes through forward and backward and updates what is persistent; in backward every chunk comes up
          again that was in no buffer when it began, beside the swapped activations;
        - every chunk that the host updates goes up in forward, and any that was in no buffer when that began; so it is
          in backward with what was in none of them by then;
        - the host updates all other chunks; waits for regions of gradients only add to that and to all above, and so do
          early updates of weights alone, whose whole ones lie between two norms, the deferred before their gradients;
        - from the norm, which is known when backward ends, it updates those that are not updated early; the last of
          them, the last of all, is needed in forward, and everything from there to the next norm comes after it (unless
          updates run in backward). Weights that go up and swapped activations that go out meanwhile slow it down (see
          :meth:`_late_ms`).
        """
        last = self._last_bound_ms(step, n_persist, n_buffer, n_speculate)
        if self._before is None:
            return last
        return last + self._n_before * self._before.bound_ms(step, n_persist, n_buffer, 0)

    def _last_bound_ms(self, step: Undisturbed, n_persist: int, n_buffer: Counts, n_speculate: Counts) -> Times:
        again = np.maximum(0, self._used_from[n_persist] - n_buffer) * self._least_upload[n_persist]
        backward = np.maximum(step.backward_ms, step.back_ms + again)
        gpu = step.forward_ms + backward + self._device_before[n_persist]
        if n_persist > self._last_trainable or self._hardware.device_type == "cpu":
            return gpu
        host = self._host_before[-1] - self._host_before[n_persist]
        up = self._fresh_from[n_persist]
        least = np.maximum(np.maximum(gpu, np.maximum(up, again) + again + step.back_ms), host)
        if self._in_backward:
            return least
        late = self._late(n_persist, n_speculate)
        return np.where(late > 0, np.maximum(least, late + self._late_ms(up, step.out_ms) + backward), least)

    def _late(self, n_persist: int, n_speculate: Counts) -> Times:
        """Host updates, undisturbed, that wait for the norm."""
        return self._host_before[-1] - np.array(self._host_before)[n_persist + n_speculate]

    def placed_bound_ms(
        self, step: Undisturbed, choices: Choices, n_persist: int, n_buffer: int, n_speculate: Counts
    ) -> Times:
        """The same, tighter and at more cost, for one placement: uploads of backward wait for buffers as they will.

        Backward is that of :meth:`_backward`. Host updates and backward together lie between two norms, which are as
        far apart as the step takes but for what the device updates after the second are less disturbed than those
        after the first (nothing goes up after the last step worked out).
        """
        if self._hardware.device_type == "cpu":
            return self.bound_ms(step, n_persist, n_buffer, n_speculate)
        last = self._last_placed_bound_ms(step, choices, n_persist, n_buffer, n_speculate)
        if self._before is None:
            return last
        return last + self._n_before * self._before.placed_bound_ms(step, choices, n_persist, n_buffer, 0)

    def _last_placed_bound_ms(
        self, step: Undisturbed, choices: Choices, n_persist: int, n_buffer: int, n_speculate: Counts
    ) -> Times:
        backward = np.maximum(step.backward_ms, self._backward(choices, (n_persist, n_buffer)))
        device = self._device_before[n_persist]
        gpu = step.forward_ms + backward + device
        if self._in_backward or n_persist > self._last_trainable:
            return gpu
        late = self._late(n_persist, n_speculate)
        up = self._fresh_from[n_persist]
        disturbed = device * (1.0 / min(self._rates[GPU].values()) - 1.0)
        return np.where(late > 0, np.maximum(gpu, late + self._late_ms(up, step.out_ms) + backward - disturbed), gpu)

    def _late_ms(self, up_ms: float, out_ms: Times) -> Times:
        """At least, from when the undisturbed host optimizer would be done to the end of forward.

        In the time of the host optimizer let u of ``up_ms`` and d of ``out_ms`` be done: it takes ``u * a + d * b``
        more, after which forward takes ``after`` more; what is not done then follows, so that forward ends no earlier
        than after ``up_ms - u`` and ``out_ms - d``. The least over u and d of the latest of the three is where all are
        the same, or the first alone with u or d at 0.
        """
        after = self._after_host_ms
        a, b = self._slower_host
        late = np.full_like(out_ms, after)
        for weights, activations in ((1, 1), (0, 1), (1, 0)):
            met = (after + weights * a * up_ms + activations * b * out_ms) / (1 + weights * a + activations * b)
            possible = (met <= up_ms if weights else True) & (met <= out_ms if activations else True)
            late = np.where(possible, np.maximum(late, met), late)
        return late

    def _held(self, unit: int) -> tuple[int, ...]:
        chunks = self._layout.unit_chunks
        around = (unit, *self._profile.units[unit].within)
        return tuple(sorted({chunk for member in around for chunk in chunks[member]}))

    def _step(self, modes: Modes, n_persist: int, n_buffer: int, n_speculate: int, n_stream: int = 0) -> Step:
        n_visits, last = len(self._profile.calls), n_persist + n_speculate
        work, swap_in = self._work_for(modes)
        visits, fetches = self._placed(n_persist), self._fetches.of(n_persist, n_buffer)
        by_device = streamed_chunks([chunk for chunk in self._updated if chunk >= last], n_stream)
        host = [(c, t) for c, t in enumerate(self._host_update) if t and c >= n_persist and c not in by_device]
        if self._n_before:
            in_a_row = self._hardware.device_type == "cpu"
            host = [(c, t + self._host_add[c] * (self._in_backward or in_a_row or c < last)) for c, t in host]
            if not self._in_backward:
                norm_ms = sum(self._host_norm[n_persist:])
                work = [*work[:-1], work[-1]._replace(compute_ms=work[-1].compute_ms + norm_ms)]
        streamed = [(chunk, self._host_update[chunk] * self._streamed_ms) for chunk in by_device]
        making_room: dict[int, Update] = {}
        if self._in_backward:
            n_regions = self._memory.host_regions(n_persist, self._memory.swapped_bytes(modes))
            if handed_on := self._memory.gradients.handed_on(n_persist, n_regions):
                updates = {chunk: Update(HOST, chunk, ms) for chunk, ms in host}
                updates.update({chunk: Update(STREAM, chunk, ms) for chunk, ms in streamed})
                making_room = {index: updates[chunk] for index, chunk in handed_on}
                first = {chunk for _, chunk in handed_on}
                host, streamed = ([pair for pair in one if pair[0] not in first] for one in (host, streamed))
        n_early = len(host) if self._in_backward else sum(chunk < last for chunk, _ in host)
        weights = n_speculate and self._memory.early_weights(n_persist, n_speculate, self._memory.swapped_bytes(modes))
        return Step(
            forward=visits[:n_visits],
            backward=visits[n_visits:],
            forward_fetches=fetches[:n_visits],
            backward_fetches=fetches[n_visits:],
            forward_work=work[:n_visits],
            backward_work=work[n_visits:],
            upload_ms=self._upload,
            swap_ms=swap_in,
            gradients=self._gradients,
            device_update_ms=[(c, t) for c, t in enumerate(self._device_update[:n_persist]) if t],
            host=Queue(host, n_early, self._weight_share if weights else 0.0),
            streamed=Queue(streamed, len(streamed) if self._in_backward else 0),
            after_host_ms=self._after_host_ms,
            making_room=making_room,
        )

    def _placed(self, n_persist: int) -> list[Visit]:
        """The turns of forward and backward where so many chunks are persistent."""
        known = self._visits_of.get(n_persist)
        if known is not None:
            return known
        n_visits = len(self._profile.calls)
        visits = self._visits_of[n_persist] = [
            Visit(
                name=self._profile.units[unit].name,
                unit=unit,
                chunks=tuple(chunk for chunk in self._needed[at] if chunk >= n_persist),
                gradients=tuple(
                    (index, self._gradients[index][0] >= n_persist)
                    for index in (self._gradients_of_visit[at - n_visits] if at >= n_visits else ())
                ),
            )
            for at, unit in enumerate(self._visits)
        ]
        return visits

    def _work_for(self, modes: Modes) -> tuple[list[Work], list[float]]:
        if self._work is None or self._work[0] != modes:
            self._work = modes, self._work_of(modes)
        return self._work[1]

    def _work_of(self, modes: Modes) -> tuple[list[Work], list[float]]:
        """Work of every turn, and the time to fetch each unit's activations or inputs back."""
        profile = self._profile
        nothing = (0.0, 0.0)
        swap = [nothing] * len(profile.units)
        recompute = [0.0] * len(profile.units)
        for unit, record in enumerate(profile.units):
            mode = BlockMode.NONE if record.block is None else modes[record.block]
            if mode is BlockMode.SWAP:
                swap[unit] = self._swap_ms[unit]
            elif mode is BlockMode.CKPT_SWAP:
                swap[unit] = self._inputs_ms[unit]
            if mode.recomputes:
                recompute[unit] = self._recompute_ms[unit]
        work = [Work(compute, swap[unit][0], ()) for unit, compute in zip(profile.calls, self._forward_ms, strict=True)]
        fetched = -1  # ahead, by the visit before
        for at in range(len(profile.calls) - 1, -1, -1):
            unit, earlier = profile.calls[at], profile.calls[at - 1] if at else -1
            swap_back = (unit,) if swap[unit][0] and fetched != unit else ()
            fetched = earlier if earlier >= 0 and swap[earlier][0] and earlier != unit else -1
            if fetched >= 0:
                swap_back = (*swap_back, fetched)
            work.append(Work(self._backward_ms[at] + recompute[unit], swap[unit][0], swap_back))
        return work, [back for _, back in swap]


def _ms(size_bytes: float, gbps: float) -> float:
    return size_bytes / gbps / 1e6
