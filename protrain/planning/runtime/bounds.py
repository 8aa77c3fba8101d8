"""What a step takes at least, by choice of block modes, without working it out: by this the search leaves plans out."""

from __future__ import annotations

from itertools import accumulate, compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.choices import Choices
from protrain.planning.memory.model import MemoryModel
from protrain.planning.rates.contention import OTHERS
from protrain.planning.runtime.durations import Durations
from protrain.planning.timeline import DOWN, GPU, HOST, UP

Times = NDArray[np.float64]
Counts = NDArray[np.int64] | int


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


class Bounds(Durations):
    """Bounds of the step of any plan, with the arguments of :class:`Durations`."""

    def __init__(self, memory: MemoryModel, *, only_adds: bool = False) -> None:
        super().__init__(memory, only_adds=only_adds)
        layout, held = memory.layout, self._needed
        used = {chunk for chunks in held for chunk in chunks}
        updated = [chunk.index in self._updated for chunk in layout.chunks]
        # Those before the last forward and backward of a step: see [Note: several batches] in planning.runtime.model.
        self._n_before = 0 if only_adds else memory.profile.accumulation - 1
        self._before: Any = type(self)(memory, only_adds=True) if self._n_before else None  # of the same class
        # Sums from the first chunk on.
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
        first_use = {chunk: at for at in range(len(held) - 1, -1, -1) for chunk in held[at]}
        self._last_trainable = last_trainable
        # By chunk, from its update to the end of forward: it goes up, and all that is computed from its first use on.
        self._after_ms = [
            upload + (starts[-1] - starts[min(first_use.get(chunk, 0), len(self._forward_ms))])
            for chunk, upload in enumerate(self._upload or [0.0])
        ]
        n_chunks = len(layout.chunks)
        self._used_from = [sum(chunk >= first for chunk in used) for first in range(n_chunks + 1)]
        self._least_upload = [min(self._upload[first:], default=0.0) for first in range(n_chunks + 1)]
        # What a millisecond of uploads or of offloads costs the host optimizer at least, both at once included.
        loss = {present: 1.0 - rate for present, rate in self._rates[HOST].items()}
        up, down = (loss[tuple(other == lane for other in OTHERS[HOST])] for lane in (UP, DOWN))
        both = loss[tuple(other in (UP, DOWN) for other in OTHERS[HOST])]
        self._slower_host = (min(up, max(0.0, both - down)), down)

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
                out_ms, back_ms = self._swap_copies[unit].out_ms, self._swap_copies[unit].back_ms
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
        swapped_blocks = set(np.flatnonzero(choices.swap.any(axis=1)).tolist())
        swappable = [block if block in swapped_blocks else None for block in self._swappable]  # by unit
        ckpt = choices.ckpt.astype(np.float64)
        visits, fetches = (self._placed(placement[0]), self._fetches.of(*placement)) if placement else ([], [])
        released: dict[int, Times] = {}  # by chunk
        loaded: dict[int, Times] = {}
        back: dict[int, Times] = {}  # by unit: its activations, where they were swapped
        for at in range(len(calls) - 1, -1, -1):
            unit, earlier = calls[at], calls[at - 1] if at else -1
            begin = start = gpu
            chunks: tuple[int, ...] = ()
            if placement is not None:
                chunks = visits[-1 - at].chunks
                for chunk, victim in fetches[-1 - at]:
                    if victim in released:
                        link = loaded[chunk] = np.maximum(link, released[victim]) + self._upload[chunk]
                for chunk in chunks:
                    if chunk in loaded:
                        start = np.maximum(start, loaded[chunk])
            if (block := swappable[unit]) is not None:
                swapped = choices.swap[block]
                if unit not in back:
                    link = back[unit] = np.where(
                        swapped, np.maximum(link, begin) + self._swap_copies[unit].back_ms, link
                    )
                start = np.where(swapped, np.maximum(start, back.pop(unit)), start)
            if earlier >= 0 and earlier != unit and (ahead := swappable[earlier]) is not None:
                swapped = choices.swap[ahead]
                link = back[earlier] = np.where(
                    swapped, np.maximum(link, begin) + self._swap_copies[earlier].back_ms, link
                )
            compute: Times | float = self._backward_ms[at]
            if (block := units[unit].block) is not None:
                compute = compute + ckpt[block] * self._recompute_ms[unit]
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
        return last + self._n_before * np.asarray(self._before.bound_ms(step, n_persist, n_buffer, 0))

    def _last_bound_ms(self, step: Undisturbed, n_persist: int, n_buffer: Counts, n_speculate: Counts) -> Times:
        without_buffer = np.maximum(0, self._used_from[n_persist] - self._n_large[n_persist] - n_buffer)
        again = without_buffer * self._least_upload[n_persist]
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
        after = self._after_ms[self._last_trainable]
        a, b = self._slower_host
        late = np.full_like(out_ms, after)
        for weights, activations in ((1, 1), (0, 1), (1, 0)):
            met = (after + weights * a * up_ms + activations * b * out_ms) / (1 + weights * a + activations * b)
            possible = (met <= up_ms if weights else True) & (met <= out_ms if activations else True)
            late = np.where(possible, np.maximum(late, met), late)
        return late
