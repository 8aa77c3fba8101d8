"""The runtime model: how long a step takes under a plan (paper section 4, and beyond).

From the memory model of a profile, a machine and a layout it makes the ``PlannedStep`` of any plan, whose time the
simulation works out. On a CPU nothing overlaps, and the operations add up.

[Note: several batches] A step of several batches is as many forwards and backwards, and updates follow the last of
them. In all of them the device adds gradients to sums. A sum in host memory comes to the device for that and goes back.
One on the device goes to host memory in the last backward. A forward and backward before the last is predicted as a
step without updates, so that weights stay in their buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from math import inf

from protrain.hardware.profile import HardwareProfile
from protrain.planning.contention import OTHERS, Slowdowns
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode, Counts, Modes
from protrain.planning.rates import NO_COPIES, staging_bytes
from protrain.planning.runtime.durations import Durations
from protrain.planning.runtime.fetches import Fetch
from protrain.planning.runtime.planned_step import AwaitedUpdate, PlannedStep, UpdateQueue, Work
from protrain.planning.runtime.simulate import serial, serial_ms, simulate, timeline
from protrain.planning.sharing import Sharing
from protrain.planning.timeline import HOST, STREAM, UP, Timeline

_KEPT_WORK = 200  # entries of a cache, which may be small, as a search asks about similar plans soon after each other


class RuntimeModel(Durations):
    """Predictions for the model, layout and machine of ``memory``, with updates inside backward if it says so.

    The arguments are those of ``Durations``.
    """

    def __init__(
        self, memory: MemoryModel, hardware: HardwareProfile | None = None, *, only_adds: bool = False
    ) -> None:
        super().__init__(memory, hardware, only_adds=only_adds)
        self._slowdowns = Slowdowns(self._rates)
        self._device_kept = self._kept_beside(STREAM, HOST)
        # The forwards and backwards before the last one of a step: see [Note: several batches].
        self._n_before = 0 if only_adds else memory.profile.accumulation - 1
        self._before = RuntimeModel(memory, hardware, only_adds=True) if self._n_before else None
        starts = list(accumulate(self._forward_ms, initial=0.0))
        first_use = {chunk: at for at in range(len(self._held) - 1, -1, -1) for chunk in self._held[at]}
        # By chunk, when forward first uses it, from its begin on; a chunk that it does not use counts as used at once.
        used_ms = [starts[min(first_use.get(chunk, 0), len(self._forward_ms))] for chunk in range(len(self._upload_ms))]
        fetch_ms = [upload + gather for upload, gather in zip(self._upload_ms, self._gather_ms, strict=True)]
        # By chunk, when its fetch must begin, from the begin of forward on.
        self._needed_ms = [used - fetch for fetch, used in zip(fetch_ms, used_ms, strict=True)]
        self._work_for = lru_cache(_KEPT_WORK)(self._work_of)
        self._fetched = cache(self._fetched_under)
        self._summed = cache(self._sums_up)
        self._streamed_ms = cache(self._streamed_from)
        self.sharing = cache(self._sharing_under)
        # By visit, if nothing is swapped: its work in forward, and in backward without and with recomputation.
        calls, units = memory.profile.calls, enumerate(memory.profile.units)
        self._unit_blocks = [(unit, record.block) for unit, record in units if record.block is not None]
        self._forward_work: list[Work] = [(compute_ms, 0.0, ()) for compute_ms in self._forward_ms]
        self._backward_work: list[tuple[Work, Work]] = [
            ((compute_ms, 0.0, ()), (compute_ms + self._recompute_ms[unit], 0.0, ()))
            for unit, compute_ms in zip(calls, self._backward_ms, strict=True)
        ]

    def step_ms(self, modes: Modes, counts: Counts, *, limit_ms: float = inf) -> float:
        """Predicted milliseconds of one step in steady state, or some number of at least ``limit_ms`` if it is no less.

        The step's gradients are not clipped, so no speculative update is redone.
        """
        before_ms = 0.0
        if self._before is not None:
            each_ms = self._before.step_ms(
                modes, counts._replace(n_speculate=0, n_weight_only=0), limit_ms=limit_ms / self._n_before
            )
            before_ms = self._n_before * each_ms
            if before_ms >= limit_ms:
                return before_ms
        step = self._step(modes, counts)
        if self._hardware.device_type == "cpu":
            return before_ms + serial_ms(step)
        return before_ms + simulate(step, self._slowdowns, limit_ms=limit_ms - before_ms)

    def timeline(self, modes: Modes, counts: Counts) -> Timeline:
        """What runs where and when in that step, or in its last forward and backward if it has several batches."""
        step = self._step(modes, counts)
        return serial(step) if self._hardware.device_type == "cpu" else timeline(step, self._slowdowns)

    def _step(self, modes: Modes, counts: Counts) -> PlannedStep:
        n_persist, last = counts.n_persist, counts.n_persist + counts.n_speculate
        work, swap_in_ms = self._work_for(modes)
        fetches, gathers = self._fetched(n_persist, counts.n_buffer)
        if self._lost_to_collectives:
            lost_ms = [self._lost_to_collectives * sum(self._gather_ms[chunk] for chunk, _ in each) for each in gathers]
            work = [(ms + lost, out, back) for (ms, out, back), lost in zip(work, lost_ms, strict=True)]
        host = [(c, t) for c, t in enumerate(self._host_update_ms) if t and c >= n_persist]
        if self._n_before:
            on_device = self._layout.summed_on_device(n_persist, counts.n_device_sum)
            host = [(c, t if c in on_device else t * self._from_sum) for c, t in host]
        awaited_updates: dict[int, AwaitedUpdate] = {}
        if self._in_backward:
            n_regions = self._memory.n_host_regions(n_persist, self._memory.swapped_bytes(modes))
            if handed_on := self._memory.gradients.handed_on(n_persist, n_regions):
                updates = dict(host)
                awaited_updates = {index: AwaitedUpdate(chunk, updates[chunk]) for index, chunk in handed_on}
                awaited = {chunk for _, chunk in handed_on}
                host = [pair for pair in host if pair[0] not in awaited]
        n_in_backward = len(host) if self._in_backward else sum(chunk < last for chunk, _ in host)
        n_weight_only = sum(chunk < n_persist + counts.n_weight_only for chunk, _ in host)
        return PlannedStep(
            n_forward=len(self._profile.calls),
            visits=self._placed(n_persist, counts.n_device_sum),
            work=work,
            fetches=fetches,
            gathers=gathers,
            upload_ms=self._upload_ms,
            gather_ms=self._gather_ms,
            reductions=self._reductions,
            swap_in_ms=swap_in_ms,
            sum_up_ms=self._summed(n_persist, counts.n_device_sum),
            device_update_ms=[(c, t) for c, t in enumerate(self._device_update_ms[:n_persist]) if t],
            host=UpdateQueue(host, n_in_backward, n_weight_only, self._weight_share),
            streamed_ms=self._streamed_ms(last),
            device_kept=self._device_kept,
            sharing=self.sharing(n_persist),
            awaited_updates=awaited_updates,
        )

    def _fetched_under(
        self, n_persist: int, n_buffer: int
    ) -> tuple[Sequence[Sequence[Fetch]], Sequence[Sequence[Fetch]]]:
        """By visit, what is uploaded from host memory, and what ranks gather.

        One rank gathers nothing. Several ranks gather every chunk that comes into a buffer. Their shards of persistent
        chunks are copied there on the device, which is taken to take no time.
        """
        first = self._layout.first_buffered(n_persist)
        fetches = self._fetches.of(first, n_buffer, after_update=not self._only_adds)
        if self._layout.world_size == 1:
            return fetches, [()] * len(fetches)
        return [[fetch for fetch in of_visit if fetch[0] >= n_persist] for of_visit in fetches], fetches

    def _streamed_from(self, first: int) -> dict[int, float]:
        """By chunk that the GPU may update in host memory: how long that takes. Nothing if there is no staging.

        ``first`` is the first chunk without a speculative update. The engine also lets the GPU redo a speculative
        update. A plan does not count on that, as it is help for steps that are not as the plan foresees them.
        """
        if not self._memory.stream or self._only_adds or self._hardware.device_type == "cpu":
            return {}
        by_host, by_device = self._update_gparams
        return {chunk: self._host_update_ms[chunk] * by_host / by_device for chunk in self._updated if chunk >= first}

    def _kept_beside(self, lane: int, other: int) -> float:
        """The share of its rate that ``lane`` keeps beside ``other`` alone."""
        return float(self._rates[*(int(beside == other) for beside in OTHERS[lane]), lane])

    def _sharing_under(self, n_persist: int) -> Sharing:
        """When updates are needed, and the rates of host and GPU, with ``n_persist`` persistent chunks."""
        before_ms = sum(self._device_update_ms[:n_persist])  # forward follows the updates of persistent chunks
        needed_ms = tuple(before_ms + needed_ms for needed_ms in self._needed_ms)
        staging = staging_bytes(self._layout.usual_shard_elements)
        host_gparams, device_gparams = self._update_gparams
        link_kept = self._kept_beside(UP, HOST)
        return Sharing(
            needed_ms=needed_ms,
            upload_ms=tuple(ms / link_kept for ms in self._upload_ms),
            states_ms=tuple(ms / link_kept for ms in self._states_ms),
            host_gparams=host_gparams,
            device_gparams=device_gparams * self._device_kept,
            host_kept=self._kept_beside(HOST, STREAM),
            staging_bytes=staging,
        )

    def _work_of(self, modes: Modes) -> tuple[list[Work], list[float]]:
        """The work of every visit, and by unit the time to fetch its activations or offloaded inputs back."""
        profile = self._profile
        copies = [NO_COPIES] * len(profile.units)
        recomputes = [False] * len(profile.units)
        for unit, block in self._unit_blocks:
            mode = modes[block]
            if mode is BlockMode.SWAP:
                copies[unit] = self._swap_copies[unit]
            elif mode is not BlockMode.NONE:
                recomputes[unit] = True
                if mode is BlockMode.CKPT_SWAP:
                    copies[unit] = self._input_copies[unit]
        calls = profile.calls
        work = self._forward_work.copy()
        for at, unit in enumerate(calls):
            if out_ms := copies[unit].out_ms:
                work[at] = self._forward_ms[at] + copies[unit].pack_ms, out_ms, ()
        fetched = -1  # the unit whose activations the visit before fetched ahead
        for at in range(len(calls) - 1, -1, -1):
            unit, earlier = calls[at], calls[at - 1] if at else -1
            of_unit = self._backward_work[at][recomputes[unit]]
            swap_ms, ahead = copies[unit].out_ms, earlier >= 0 and copies[earlier].out_ms and earlier != unit
            if swap_ms or ahead:
                swap_in = (unit,) if swap_ms and fetched != unit else ()
                compute_ms = of_unit[0] + copies[unit].unpack_ms
                of_unit = compute_ms, swap_ms, (*swap_in, earlier) if ahead else swap_in
            fetched = earlier if ahead else -1
            work.append(of_unit)
        return work, [each.back_ms for each in copies]
