"""The runtime model: how long a step takes under a plan (paper section 4, and beyond).

[Note: several batches] A step of several batches is as many forwards and backwards, of which the last is followed by
the updates. In all of them the host adds the gradients that arrive to fp32 accumulators. Those before the last are
worked out as a step whose updates are these additions, inside backward; in the last one they are part of early updates,
and of other chunks they are over by the time the norm is known. For that the host goes through all it has added.

From the memory model of a profile, a machine and a layout to the :class:`~protrain.planning.step.Step` of any plan.
On a CPU, where nothing overlaps, the operations add up.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from protrain.planning.bounds import Bounds
from protrain.planning.layout import streamed_chunks
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode
from protrain.planning.simulate import in_a_row, simulate, timeline
from protrain.planning.step import Step, Update, Work
from protrain.planning.timeline import HOST, STREAM, Timeline
from protrain.planning.updating import Queue

Modes = tuple[BlockMode, ...]


class RuntimeModel(Bounds):
    """Predictions for the model, layout and machine of ``memory``, with updates inside backward if it says so.

    Args:
        memory: the memory model.
        only_adds: of a forward and backward whose gradients are added to others, without updates.
    """

    def __init__(self, memory: MemoryModel, *, only_adds: bool = False) -> None:
        super().__init__(memory, only_adds=only_adds)
        self._work: tuple[Modes, tuple[list[Work], list[float]]] | None = None  # of the modes asked for last

    def making_weights(self) -> RuntimeModel:
        """The same, but that early updates make weights alone; what is worked out of either is known to both."""
        other = copy.copy(self)
        other._memory = self._memory.making_weights()
        return other

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
    ) -> tuple[float, int]:
        """The same with up to ``most`` early updates: as many as seem best. See [Note: how many early updates].

        Returns:
            (step time, n_speculate).
        """
        if not most:
            return self.step_ms(modes, n_persist, n_buffer, limit_ms=limit_ms), 0
        before_ms = self._before_ms(modes, n_persist, n_buffer, limit_ms)
        if before_ms >= limit_ms:
            return before_ms, 0
        step = replace(self._step(modes, n_persist, n_buffer, most), open_early=True)
        step_ms, n_early = simulate(step, self._rates, limit_ms=limit_ms - before_ms)
        return before_ms + step_ms, step.host.updates[n_early - 1][0] - n_persist + 1 if n_early else 0

    def timeline(
        self, modes: Modes, n_persist: int, n_buffer: int, n_speculate: int = 0, n_stream: int = 0
    ) -> Timeline:
        """What runs where and when in that step, as on a GPU; of several batches with the last one."""
        return timeline(self._step(modes, n_persist, n_buffer, n_speculate, n_stream), self._rates)

    def _step(self, modes: Modes, n_persist: int, n_buffer: int, n_speculate: int, n_stream: int = 0) -> Step:
        n_visits, last = len(self._profile.calls), n_persist + n_speculate
        work, swap_in = self._work_for(modes)
        visits, fetches = self._placed(n_persist), self._fetches.of(n_persist, n_buffer)
        by_device = streamed_chunks([chunk for chunk in self._updated if chunk >= last], n_stream)
        host = [(c, t) for c, t in enumerate(self._host_update) if t and c >= n_persist and c not in by_device]
        if self._n_before:
            adds_all = self._in_backward or self._hardware.device_type == "cpu"
            host = [(c, t + self._host_add[c] * (adds_all or c < last)) for c, t in host]
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
            host=Queue(host, n_early, self._weight_share if n_speculate and self._memory.early_weights else 0.0),
            streamed=Queue(streamed, len(streamed) if self._in_backward else 0),
            after_host_ms=self._after_host_ms,
            making_room=making_room,
        )

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
