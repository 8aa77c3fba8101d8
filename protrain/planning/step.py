"""What steps do under every plan: visits, gradients and updates, and how long each of them takes at full rate.

``Steps`` works it out from the memory model of a profile, a machine and a layout. ``protrain.planning.simulate`` makes
the tasks of one plan from it, and works out when they happen.

[Note: several batches] A step of several batches is as many forwards and backwards, and updates follow the last of
them. In all of them the device adds gradients to sums. A sum in host memory comes to the device for that and goes back.
One on the device goes to host memory in the last backward. A forward and backward before the last is predicted as a
step without updates, so that weights stay in their buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, cycle

from protrain.planning.contention import Shares, lost_to_collectives, shares_kept
from protrain.planning.layout import STAGING_BUFFERS, summed_on_device, updated_chunks
from protrain.planning.memory import SUM_BYTES, MemoryModel
from protrain.planning.plan import BlockMode, Counts, Modes
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

Updates = Sequence[tuple[int, float]]  # (chunk, ms)


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a visit of backward adds to the gradient of a chunk, and what is done with it under one placement."""

    number: int  # as a GradientPart
    chunk: int
    flatten_ms: float
    offload_ms: float
    staging: int  # the staging buffer that it is offloaded from; -1: it is not offloaded
    sum_up_ms: float | None  # to fetch the sum in host memory that it is added to; None: it is added to none
    sent: int  # the staging buffer that several ranks send the chunk's whole gradient from; -1: one rank
    reduce_ms: float  # of the reduction by several ranks; 0 if the chunk has not all its gradients yet


@dataclass(frozen=True, slots=True)
class Visit:
    """One call of a unit in forward, or the backward of that call, under one placement."""

    name: str
    unit: int
    compute_ms: float  # without what the mode of a block adds
    chunks: tuple[int, ...]  # chunks in buffers that the visit waits for
    gradients: tuple[Gradient, ...]  # the gradients that it yields; in forward none


class Steps:
    """What steps do under every plan, for the model, layout and machine of ``memory``. Times are at full rate.

    Where ``only_adds`` is given, it says whether no updates follow the forward and backward, as gradients are only
    added to sums. ``host_share`` is the host's rate of updates as a share of the calibrated one.
    """

    def __init__(self, memory: MemoryModel) -> None:
        self._profile, self._layout = profile, layout = memory.profile, memory.layout
        self._hardware = hardware = memory.hardware
        self._memory = memory
        self.overlaps = hardware.device_type != "cpu"  # a CPU does one thing after the other
        self.in_backward, self.accumulates = profile.step_during_backward, memory.accumulates
        element, world_size = profile.element_bytes, layout.world_size
        self.n_forward = len(profile.calls)  # the visits of forward, which those of backward follow
        visits = [*profile.calls, *reversed(profile.calls)]
        # By visit, the chunks that its unit needs, and those that units around it hold.
        held = [layout.held_by((unit, *profile.units[unit].within)) for unit in profile.calls]
        throughout = profile.enclosing if world_size > 1 else ()  # the backward, as several ranks hold them
        held += [layout.held_by((unit, *throughout)) for unit in reversed(profile.calls)]
        self._fetches = Fetches(visits, held, layout, memory.large_buffers)
        times = compute_times(profile, hardware)
        forward_ms, backward_ms = computing_by_visit(profile, times)
        self._computed = list(zip(visits, held, [*forward_ms, *reversed(backward_ms)], strict=True))  # by visit
        self._mode_costs = [
            (unit, block, self._costs_of(block, n_calls, times.recompute[block] / n_calls))
            for unit, n_calls in Counter(profile.calls).items()
            if (block := profile.units[unit].block) is not None
        ]
        self.lost_to_collectives = lost_to_collectives(hardware)
        self._gradients = gradients_by_visit(profile, hardware, layout)
        parts = list(chain.from_iterable(self._gradients))
        self._least_ms = sum(forward_ms) + sum(backward_ms) + sum(part.flatten_ms for part in parts)
        # With several ranks, by chunk: its last gradient, whose reduction is that of the chunk, and the buffer that the
        # chunk is sent from.
        last = {part.chunk: part.number for part in parts if world_size > 1}
        self._sent = self._rotated({chunk: chunk for chunk in last})
        self._reduce_ms = {
            number: _collective_ms(layout.chunks[chunk].elements * element, hardware.reduce_gbps)
            for chunk, number in last.items()
        }
        # By chunk: the elements that a step updates on this rank, and milliseconds of what is done with the chunk.
        shards = [layout.shard_elements(chunk) for chunk in layout.chunks]
        updated = updated_chunks(profile, layout)
        self._updated_elements = [n * (chunk in updated) for chunk, n in enumerate(shards)]
        self.upload_ms = [bytes_ms(n * element, hardware.h2d_gbps) for n in shards]
        self.gather_ms = [
            _collective_ms(chunk.elements * element, hardware.gather_gbps) if world_size > 1 else 0.0
            for chunk in layout.chunks
        ]
        dtype, moment_bytes = profile.dtype, profile.moment_bytes
        self._host_gparams = host_update_gparams(profile, hardware)
        self._streamed_gparams, self._streamed_gbps = streamed_rates(hardware, dtype, moment_bytes)
        self._device_update_ms = self._updates_ms(device_update_gparams(profile, hardware))
        self.streamed_ms = self._updates_ms(self._streamed_gparams)
        self.streams = memory.stream and self.overlaps  # the GPU may update chunks in host memory
        self._adam_bytes = adam_bytes = moved_bytes(dtype, moment_bytes)
        # The factor on the update of a chunk whose sum is in host memory: it reads that in place of a gradient.
        self._from_sum = 1 + (SUM_BYTES - element) / adam_bytes if memory.accumulates else 1.0
        # An update of the weight alone reads as much as a whole update, and writes only the weight. How long it takes
        # beside a whole update is calibrated in bf16, since arithmetic may be what limits it, not memory.
        self.weight_share = (read_bytes(dtype, moment_bytes) + element) / adam_bytes
        if hardware.host_adam_weight_gparams is not None:
            measured = hardware.host_adam_gparams / hardware.host_adam_weight_gparams
            counted = (read_bytes(CALIBRATED_DTYPE) + 2) / moved_bytes(CALIBRATED_DTYPE)
            self.weight_share = min(1.0, self.weight_share * (measured / counted))
        there_bytes = self._streamed_gbps[0] / self._streamed_gparams  # a parameter
        self._states_ms = [bytes_ms(n * there_bytes, hardware.h2d_gbps) for n in self._updated_elements]
        starts = list(accumulate(forward_ms, initial=0.0))
        first_use = {chunk: at for at in range(len(held) - 1, -1, -1) for chunk in held[at]}
        # By chunk, when forward first uses it, from its begin on; a chunk that it does not use counts as used at once.
        used_ms = [starts[min(first_use.get(chunk, 0), self.n_forward)] for chunk in range(len(shards))]
        # By chunk, when its fetch must begin, from the begin of forward on.
        self._needed_ms = [
            used - upload - gather for used, upload, gather in zip(used_ms, self.upload_ms, self.gather_ms, strict=True)
        ]
        self.visits = cache(self._visits_under)
        self.updates = cache(self._updates_under)
        self.costs = cache(self._costs_under)
        self.fetched = cache(self._fetched_under)
        self._collectives_ms = cache(self._collectives_under)
        self.sharing = cache(self._sharing_under)
        self.shares = cache(self._shares_under)

    @property
    def speculates(self) -> bool:
        """Whether speculative updates can save time. With updates inside backward, or on a CPU, they cannot."""
        return self.overlaps and not self.in_backward

    def gpu_ms(self, modes: Modes, counts: Counts) -> float:
        """How long the GPU is busy with what it does in any case. No step is shorter."""
        more_ms = [costs.pack_ms + costs.recompute_ms for costs in self.costs(modes)]
        beside_ms = self.lost_to_collectives * self._collectives_ms(counts.n_persist, counts.n_buffer)
        updates_ms = sum(self._device_update_ms[: counts.n_persist])
        return self._least_ms + sum(more_ms[unit] for unit in self._profile.calls) + beside_ms + updates_ms

    def _collectives_under(self, n_persist: int, n_buffer: int) -> float:
        """How long all collectives of a forward and backward take."""
        _, gathers = self.fetched(n_persist, n_buffer, only_adds=False)
        gathers_ms = sum(self.gather_ms[chunk] for chunk, _ in chain.from_iterable(gathers))
        return gathers_ms + sum(self._reduce_ms.values())

    def _rotated(self, chunks: Mapping[int, int]) -> dict[int, int]:
        """The staging buffers of gradients: the usual ones in rotation, and the last one for large chunks.

        ``chunks`` says by gradient of which chunk it is.
        """
        layout, usual = self._layout, cycle(range(STAGING_BUFFERS))
        return {
            key: STAGING_BUFFERS if layout.is_large(layout.chunks[chunk]) else next(usual)
            for key, chunk in chunks.items()
        }

    def _visits_under(self, n_persist: int, n_device_sum: int, *, only_adds: bool) -> list[Visit]:
        """The visits of forward and backward under these placements.

        Gradients of persistent chunks are not offloaded, nor are sums on the device before the last batch of a step.
        Ranks that reduce the gradients of a chunk offload one shard, with the last of them.
        """
        on_device = summed_on_device(len(self._layout.chunks), n_persist, n_device_sum)
        stay = on_device if only_adds else ()
        away = {
            part.number: part.chunk
            for part in chain.from_iterable(self._gradients)
            if part.chunk >= n_persist and part.chunk not in stay and (not self._sent or part.number in self._reduce_ms)
        }
        staging, first = self._rotated(away), self._layout.first_buffered(n_persist)
        gradients = [
            tuple(
                self._gradient(part, staging.get(part.number, -1), part.chunk not in on_device, only_adds=only_adds)
                for part in of_visit
            )
            for of_visit in self._gradients
        ]
        return [
            Visit(
                name=self._profile.units[unit].name,
                unit=unit,
                compute_ms=compute_ms,
                chunks=tuple(chunk for chunk in held if chunk >= first),
                gradients=of_visit,
            )
            for (unit, held, compute_ms), of_visit in zip(
                self._computed, [()] * self.n_forward + gradients, strict=True
            )
        ]

    def _gradient(self, part: GradientPart, staging: int, sum_is_away: bool, *, only_adds: bool) -> Gradient:
        """The work on ``part``. ``sum_is_away``: an offloaded chunk has its sum in host memory."""
        element = self._profile.element_bytes  # what flattening reads, and writes
        offload_ms, sum_up_ms, added_bytes = part.offload_ms, None, 0
        if self._memory.accumulates and staging >= 0 and sum_is_away:
            # The first batch of a step fetches no sum.
            n_batches = self._profile.accumulation - only_adds  # those that this is the mean of
            share = (n_batches - 1) / n_batches if only_adds else 1.0
            up_ms = offload_ms * self._hardware.d2h_gbps / self._hardware.h2d_gbps
            sum_up_ms = share * up_ms * SUM_BYTES / element
        if self._memory.accumulates and not self._sent:  # the time of a reduction has the additions
            if sum_up_ms is None:  # it is flattened into the sum
                added_bytes = 2 * SUM_BYTES - element
            else:  # it is added when it is flattened
                added_bytes = element + 2 * SUM_BYTES
                offload_ms *= SUM_BYTES / element
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

    def _updates_ms(self, gparams: float) -> list[float]:
        """By chunk, how long its update takes at ``gparams`` 1e9 parameters a second."""
        return [n / gparams / 1e6 for n in self._updated_elements]

    def _updates_under(
        self, n_persist: int, n_device_sum: int, host_share: float, *, only_adds: bool
    ) -> tuple[Updates, Updates]:
        """The updates of persistent chunks by the GPU, and of chunks in host memory by the host, in execution order."""
        if only_adds:
            return [], []
        on_device = summed_on_device(len(self._layout.chunks), n_persist, n_device_sum)
        by_gpu = [(chunk, ms) for chunk, ms in enumerate(self._device_update_ms[:n_persist]) if ms]
        by_host = [
            (chunk, ms if chunk in on_device else ms * self._from_sum)
            for chunk, ms in enumerate(self._updates_ms(self._host_gparams * host_share))
            if ms and chunk >= n_persist
        ]
        return by_gpu, by_host

    def handed_on(self, modes: Modes, n_persist: int) -> Sequence[tuple[int, int]]:
        """The gradients that wait for updates of other chunks: see ``GradientRegions.handed_on``."""
        swapped_bytes = self._memory.activations(modes).swapped_bytes
        return self._memory.gradients.handed_on(n_persist, self._memory.n_host_regions(n_persist, swapped_bytes))

    def _fetched_under(
        self, n_persist: int, n_buffer: int, *, only_adds: bool
    ) -> tuple[Sequence[Sequence[Fetch]], Sequence[Sequence[Fetch]]]:
        """By visit, what is uploaded from host memory, and what ranks gather.

        One rank gathers nothing. Several ranks gather every chunk that comes into a buffer. Their shards of persistent
        chunks are copied there on the device, which is taken to take no time.
        """
        first = self._layout.first_buffered(n_persist)
        fetches = self._fetches.of(first, n_buffer, after_update=not only_adds)
        if self._layout.world_size == 1:
            return fetches, [()] * len(fetches)
        return [[fetch for fetch in of_visit if fetch[0] >= n_persist] for of_visit in fetches], fetches

    def _shares_under(self, host_share: float) -> Shares:
        """The share of its rate that every lane keeps beside every other lane."""
        return shares_kept(self._hardware, self._host_gparams * host_share * self._adam_bytes, self._streamed_gbps)

    def _sharing_under(self, n_persist: int, host_share: float = 1.0) -> Sharing:
        """When updates are needed, and the rates of host and GPU, with ``n_persist`` persistent chunks."""
        before_ms = sum(self._device_update_ms[:n_persist])  # forward follows the updates of persistent chunks
        needed_ms = tuple(before_ms + needed_ms for needed_ms in self._needed_ms)
        shares = self.shares(host_share)
        link_kept = float(shares[UP, HOST])
        return Sharing(
            needed_ms=needed_ms,
            upload_ms=tuple(ms / link_kept for ms in self.upload_ms),
            states_ms=tuple(ms / link_kept for ms in self._states_ms),
            host_gparams=self._host_gparams * host_share,
            device_gparams=self._streamed_gparams * float(shares[STREAM, HOST]),
            host_kept=float(shares[HOST, STREAM]),
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

    def _costs_under(self, modes: Modes) -> list[ModeCosts]:
        """By unit, what the mode of its block costs each of its calls."""
        costs = [ModeCosts()] * len(self._profile.units)
        for unit, block, by_mode in self._mode_costs:
            costs[unit] = by_mode[modes[block]]
        return costs


def _collective_ms(size_bytes: int, gbps: float) -> float:
    """Milliseconds of a collective on a tensor of ``size_bytes`` in all, at ``gbps`` GB/s of the whole tensor."""
    return COLLECTIVE_MS + bytes_ms(size_bytes, gbps)
