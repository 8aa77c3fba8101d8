"""What a step does under one plan: its visits, what each operation takes at full rate, and the order of its updates.

From the memory model of a profile, a machine and a layout ``Steps`` makes the ``PlannedStep`` of any plan.
``protrain.planning.simulate`` works out when all of it happens.

[Note: several batches] A step of several batches is as many forwards and backwards, and updates follow the last of
them. In all of them the device adds gradients to sums. A sum in host memory comes to the device for that and goes back.
One on the device goes to host memory in the last backward. A forward and backward before the last is predicted as a
step without updates, so that weights stay in their buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, cycle

from protrain.hardware.profile import HardwareProfile
from protrain.planning.contention import lost_to_collectives, shares_kept
from protrain.planning.layout import STAGING_BUFFERS, summed_on_device, updated_chunks
from protrain.planning.memory import MemoryModel
from protrain.planning.plan import BlockMode, Counts, Modes
from protrain.planning.planned_step import AwaitedUpdate, Gradient, PlannedStep, UpdateQueue, Visit, Work
from protrain.planning.rates import (
    CALIBRATED_DTYPE,
    GradientPart,
    ModeCosts,
    bytes_ms,
    compute_times,
    computing_by_visit,
    device_update_gparams,
    gradients_by_visit,
    host_update_gparams,
    moved_bytes,
    read_bytes,
    staging_bytes,
    streamed_rates,
    swap_costs,
)
from protrain.planning.schedule import Fetch, Fetches
from protrain.planning.sharing import Sharing
from protrain.planning.timeline import HOST, STREAM, UP

# The time of a collective beyond the time of its bytes. On two H100s with NVLink, gathering 64 MiB takes 162 us and
# gathering 1 GiB takes 2.00 ms. On eight, 16 MiB take 73 us and 64 MiB take 175 us. Straight lines through these times
# begin at 39 us.
COLLECTIVE_MS = 0.04
_SUM_BYTES = 4  # a parameter in fp32


class Steps:
    """What steps do under every plan, for the model, layout and machine of ``memory``. Times are at full rate.

    Args:
        memory: the memory model.
        hardware: the machine, if its host updates at another rate than that of ``memory``.
        only_adds: the steps are a forward and backward that no updates follow, and whose gradients are only added to
            sums.
    """

    def __init__(
        self, memory: MemoryModel, hardware: HardwareProfile | None = None, *, only_adds: bool = False
    ) -> None:
        profile, layout = memory.profile, memory.layout
        self._hardware = hardware = hardware or memory.hardware
        times = compute_times(profile, hardware)
        self._profile = profile
        self._layout = layout
        self._memory = memory
        self._only_adds = only_adds
        self._in_backward = memory.step_during_backward
        element = profile.element_bytes
        # By visit, the chunks that its unit needs, and those that units around it hold.
        held = [layout.held_by((unit, *profile.units[unit].within)) for unit in profile.calls]
        throughout = profile.enclosing if layout.world_size > 1 else ()  # the backward, as several ranks hold them
        held += [layout.held_by((unit, *throughout)) for unit in reversed(profile.calls)]
        self._updated = updated_chunks(profile, layout)
        # By chunk: the elements that a step updates on this rank, and milliseconds of what is done with the chunk.
        self._updated_elements = [
            layout.shard_elements(chunk) if chunk.index in self._updated else 0 for chunk in layout.chunks
        ]
        self._upload_ms = [
            bytes_ms(layout.shard_elements(chunk) * element, hardware.h2d_gbps) for chunk in layout.chunks
        ]
        self._gather_ms = [
            _collective_ms(chunk.elements * element, hardware.gather_gbps) if layout.world_size > 1 else 0.0
            for chunk in layout.chunks
        ]
        device_gparams = device_update_gparams(profile, hardware)
        self._device_update_ms = [0.0 if only_adds else n / device_gparams / 1e6 for n in self._updated_elements]
        self._visits = [*profile.calls, *reversed(profile.calls)]
        self._forward_ms, self._backward_ms = computing_by_visit(profile, times)
        self._mode_costs = [
            (unit, block, self._costs_of(block, n_calls, times.recompute[block] / n_calls))
            for unit, n_calls in Counter(profile.calls).items()
            if (block := profile.units[unit].block) is not None
        ]
        self._fetches = Fetches(self._visits, held, layout, memory.large_buffers)
        self._held = held
        self._gradients = gradients_by_visit(profile, hardware, layout)
        # With several ranks, by chunk: its last gradient, whose reduction is that of the chunk, and the buffer that the
        # chunk is sent from.
        parts = chain.from_iterable(self._gradients if layout.world_size > 1 else ())
        last = {part.chunk: part.number for part in parts}
        self._sent = self._rotated({chunk: chunk for chunk in last})
        self._reduce_ms = {
            number: _collective_ms(layout.chunks[chunk].elements * element, hardware.reduce_gbps)
            for chunk, number in last.items()
        }
        self._lost_to_collectives = lost_to_collectives(hardware)
        for at, of_visit in enumerate(self._gradients if self._sent else ()):
            reduce_ms = sum(self._reduce_ms.get(part.number, 0.0) for part in of_visit)
            self._backward_ms[at] += self._lost_to_collectives * reduce_ms
        self._placed = cache(self._visits_under)
        dtype, moment_bytes = profile.dtype, profile.moment_bytes
        host_gparams = host_update_gparams(profile, hardware)
        adam_bytes = moved_bytes(dtype, moment_bytes)
        self._host_update_ms = [0.0 if only_adds else n / host_gparams / 1e6 for n in self._updated_elements]
        # The factor on the update of a chunk whose sum is in host memory: it reads that in place of a gradient.
        self._from_sum = 1 + (_SUM_BYTES - element) / adam_bytes if memory.accumulates else 1.0
        streamed_gparams, streamed_gbps = streamed_rates(hardware, dtype, moment_bytes)
        there_bytes = streamed_gbps[0] / streamed_gparams  # a parameter
        self._states_ms = [bytes_ms(n * there_bytes, hardware.h2d_gbps) for n in self._updated_elements]
        self.shares = shares_kept(hardware, host_gparams * adam_bytes, streamed_gbps)
        self._update_gparams = host_gparams, streamed_gparams
        # An update of the weight alone reads as much as a whole update, and writes only the weight. How long it takes
        # beside a whole update is calibrated in bf16, since arithmetic may be what limits it, not memory.
        self._weight_share = (read_bytes(dtype, moment_bytes) + element) / adam_bytes
        if hardware.host_adam_weight_gparams is not None:
            measured = hardware.host_adam_gparams / hardware.host_adam_weight_gparams
            counted = (read_bytes(CALIBRATED_DTYPE) + 2) / moved_bytes(CALIBRATED_DTYPE)
            self._weight_share = min(1.0, self._weight_share * (measured / counted))
        starts = list(accumulate(self._forward_ms, initial=0.0))
        first_use = {chunk: at for at in range(len(self._held) - 1, -1, -1) for chunk in self._held[at]}
        # By chunk, when forward first uses it, from its begin on; a chunk that it does not use counts as used at once.
        used_ms = [starts[min(first_use.get(chunk, 0), len(self._forward_ms))] for chunk in range(len(self._upload_ms))]
        fetch_ms = [upload + gather for upload, gather in zip(self._upload_ms, self._gather_ms, strict=True)]
        # By chunk, when its fetch must begin, from the begin of forward on.
        self._needed_ms = [used - fetch for fetch, used in zip(fetch_ms, used_ms, strict=True)]
        self._work_for = cache(self._work_of)
        self._fetched = cache(self._fetched_under)
        self.sharing = cache(self._sharing_under)

    @property
    def speculates(self) -> bool:
        """Whether speculative updates can save time. With updates inside backward, or on a CPU, they cannot."""
        return not self._in_backward and self._hardware.device_type != "cpu"

    def _rotated(self, chunks: Mapping[int, int]) -> dict[int, int]:
        """The staging buffers of gradients: the usual ones in rotation, and the last one for large chunks.

        ``chunks`` says by gradient of which chunk it is.
        """
        layout, usual = self._layout, cycle(range(STAGING_BUFFERS))
        return {
            key: STAGING_BUFFERS if layout.is_large(layout.chunks[chunk]) else next(usual)
            for key, chunk in chunks.items()
        }

    def _gradients_under(self, n_persist: int, n_device_sum: int) -> list[tuple[Gradient, ...]]:
        """By visit of backward its gradients under these placements.

        Gradients of persistent chunks are not offloaded, nor are sums on the device before the last batch of a step.
        Ranks that reduce the gradients of a chunk offload one shard, with the last of them.
        """
        on_device = summed_on_device(len(self._layout.chunks), n_persist, n_device_sum)
        stay = on_device if self._only_adds else ()
        staging = self._rotated(
            {
                part.number: part.chunk
                for part in chain.from_iterable(self._gradients)
                if part.chunk >= n_persist
                and part.chunk not in stay
                and (not self._sent or part.number in self._reduce_ms)
            }
        )
        return [
            tuple(self._gradient(part, staging.get(part.number, -1), on_device) for part in of_visit)
            for of_visit in self._gradients
        ]

    def _gradient(self, part: GradientPart, staging: int, on_device: Container[int]) -> Gradient:
        """The work on ``part``. An offloaded chunk has its sum in host memory, unless it is ``on_device``."""
        element = self._profile.element_bytes  # what flattening reads, and writes
        offload_ms, sum_up_ms, added_bytes = part.offload_ms, None, 0
        if self._memory.accumulates and staging >= 0 and part.chunk not in on_device:
            # The first batch of a step fetches no sum.
            n_batches = self._profile.accumulation - self._only_adds  # those that this is the mean of
            share = (n_batches - 1) / n_batches if self._only_adds else 1.0
            up_ms = offload_ms * self._hardware.d2h_gbps / self._hardware.h2d_gbps
            sum_up_ms = share * up_ms * _SUM_BYTES / element
        if self._memory.accumulates and not self._sent:  # the time of a reduction has the additions
            if sum_up_ms is None:  # it is flattened into the sum
                added_bytes = 2 * _SUM_BYTES - element
            else:  # it is added when it is flattened
                added_bytes = element + 2 * _SUM_BYTES
                offload_ms *= _SUM_BYTES / element
        return Gradient(
            number=part.number,
            chunk=part.chunk,
            flatten_ms=part.flatten_ms * (1 + added_bytes / (2 * element)),
            offload_ms=offload_ms,
            staging=staging,
            sum_up_ms=sum_up_ms,
            sent=self._sent.get(part.chunk, -1),
            reduce_ms=self._reduce_ms.get(part.number, 0.0),
        )

    def _visits_under(self, n_persist: int, n_device_sum: int) -> list[Visit]:
        """The visits of forward and backward under these placements."""
        gradients = [()] * len(self._profile.calls) + self._gradients_under(n_persist, n_device_sum)
        first = self._layout.first_buffered(n_persist)
        return [
            Visit(
                name=self._profile.units[unit].name,
                unit=unit,
                chunks=tuple(chunk for chunk in self._held[at] if chunk >= first),
                gradients=gradients[at],
            )
            for at, unit in enumerate(self._visits)
        ]

    def step(self, modes: Modes, counts: Counts) -> PlannedStep:
        """What a step does under ``modes`` and ``counts``."""
        n_persist, last = counts.n_persist, counts.n_persist + counts.n_speculate
        visits = self._placed(n_persist, counts.n_device_sum)
        work, swap_in_ms = self._work_for(modes)
        fetches, gathers = self._fetched(n_persist, counts.n_buffer)
        if self._lost_to_collectives:
            lost_ms = [self._lost_to_collectives * sum(self._gather_ms[chunk] for chunk, _ in each) for each in gathers]
            work = [(ms + lost, out, back) for (ms, out, back), lost in zip(work, lost_ms, strict=True)]
        host = [(c, t) for c, t in enumerate(self._host_update_ms) if t and c >= n_persist]
        if self._memory.accumulates:
            on_device = summed_on_device(len(self._layout.chunks), n_persist, counts.n_device_sum)
            host = [(c, t if c in on_device else t * self._from_sum) for c, t in host]
        awaited_updates: dict[int, AwaitedUpdate] = {}
        if self._in_backward:
            n_regions = self._memory.n_host_regions(n_persist, self._memory.activations(modes).swapped_bytes)
            if handed_on := self._memory.gradients.handed_on(n_persist, n_regions):
                updates = dict(host)
                awaited_updates = {index: AwaitedUpdate(chunk, updates[chunk]) for index, chunk in handed_on}
                awaited = {chunk for _, chunk in handed_on}
                host = [pair for pair in host if pair[0] not in awaited]
        n_in_backward = len(host) if self._in_backward else sum(chunk < last for chunk, _ in host)
        n_weight_only = sum(chunk < n_persist + counts.n_weight_only for chunk, _ in host)
        return PlannedStep(
            n_forward=len(self._profile.calls),
            visits=visits,
            work=work,
            fetches=fetches,
            gathers=gathers,
            upload_ms=self._upload_ms,
            gather_ms=self._gather_ms,
            swap_in_ms=swap_in_ms,
            fetches_sums=any(one.sum_up_ms is not None for visit in visits for one in visit.gradients),
            device_update_ms=[(c, t) for c, t in enumerate(self._device_update_ms[:n_persist]) if t],
            host=UpdateQueue(host, n_in_backward, n_weight_only, self._weight_share),
            streamed_ms=self._streamed_from(last),
            device_kept=float(self.shares[STREAM, HOST]),
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

    def _sharing_under(self, n_persist: int) -> Sharing:
        """When updates are needed, and the rates of host and GPU, with ``n_persist`` persistent chunks."""
        before_ms = sum(self._device_update_ms[:n_persist])  # forward follows the updates of persistent chunks
        needed_ms = tuple(before_ms + needed_ms for needed_ms in self._needed_ms)
        host_gparams, device_gparams = self._update_gparams
        link_kept = float(self.shares[UP, HOST])
        return Sharing(
            needed_ms=needed_ms,
            upload_ms=tuple(ms / link_kept for ms in self._upload_ms),
            states_ms=tuple(ms / link_kept for ms in self._states_ms),
            host_gparams=host_gparams,
            device_gparams=device_gparams * float(self.shares[STREAM, HOST]),
            host_kept=float(self.shares[HOST, STREAM]),
            staging_bytes=staging_bytes(self._layout.usual_shard_elements),
        )

    def _costs_of(self, block: int, n_calls: int, recompute_ms: float) -> dict[BlockMode, ModeCosts]:
        """By mode, what it costs one of ``n_calls`` of a block in a forward."""
        record, hardware, packs = self._profile.blocks[block], self._hardware, self._memory.pack_swaps
        input_bytes = record.input_bytes / n_calls
        out_ms, back_ms = bytes_ms(input_bytes, hardware.d2h_gbps), bytes_ms(input_bytes, hardware.h2d_gbps)
        return {
            BlockMode.NONE: ModeCosts(),
            BlockMode.SWAP: swap_costs(record, n_calls, hardware, packed=bool(packs) and packs[block]),
            BlockMode.CKPT: ModeCosts(recompute_ms=recompute_ms),
            BlockMode.CKPT_SWAP: ModeCosts(out_ms, back_ms, recompute_ms=recompute_ms),
        }

    def _work_of(self, modes: Modes) -> tuple[list[Work], list[float]]:
        """The work of every visit, and by unit the time to fetch its activations or offloaded inputs back."""
        calls, costs = self._profile.calls, [ModeCosts()] * len(self._profile.units)
        for unit, block, by_mode in self._mode_costs:
            costs[unit] = by_mode[modes[block]]
        work: list[Work] = [
            (compute_ms + costs[unit].pack_ms, costs[unit].out_ms, ())
            for unit, compute_ms in zip(calls, self._forward_ms, strict=True)
        ]
        is_there = False  # whether the visit before fetched what this one needs
        for at in reversed(range(len(calls))):
            unit, earlier = calls[at], calls[max(0, at - 1)]
            swap_ms = costs[unit].out_ms
            swap_in = (unit,) if swap_ms and not is_there else ()
            is_there = earlier != unit and costs[earlier].out_ms > 0
            if is_there:
                swap_in = (*swap_in, earlier)
            work.append((self._backward_ms[at] + costs[unit].recompute_ms, swap_ms, swap_in))
        return work, [each.back_ms for each in costs]


def _collective_ms(size_bytes: int, gbps: float) -> float:
    """Milliseconds of a collective on a tensor of ``size_bytes`` in all, at ``gbps`` GB/s of the whole tensor."""
    return COLLECTIVE_MS + bytes_ms(size_bytes, gbps)
