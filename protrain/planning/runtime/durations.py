"""How long every operation of a step takes at full rate, and which visits a step has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from functools import cache
from itertools import chain, cycle

from protrain.hardware.profile import HardwareProfile
from protrain.planning.contention import lost_to_collectives, rates
from protrain.planning.layout import STAGING_BUFFERS, updated_chunks
from protrain.planning.memory import MemoryModel
from protrain.planning.rates import (
    CALIBRATED_DTYPE,
    NO_COPIES,
    SwapCopies,
    bytes_ms,
    compute_times,
    computing_by_visit,
    device_update_gparams,
    gradients_by_visit,
    host_update_gparams,
    moved_bytes,
    streamed_rates,
    swap_copies,
    written_bytes,
)
from protrain.planning.runtime.fetches import Fetches
from protrain.planning.runtime.planned_step import Gradient, Reduction, Visit

# The time of a collective beyond the time of its bytes. On two H100s with NVLink, gathering 64 MiB takes 162 us and
# gathering 1 GiB takes 2.00 ms. On eight, 16 MiB take 73 us and 64 MiB take 175 us. Straight lines through these times
# begin at 39 us.
COLLECTIVE_MS = 0.04
_SUM_BYTES = 4  # a parameter in fp32


class Durations:
    """Durations in milliseconds at full rate, for the model, layout and machine of ``memory``.

    Args:
        memory: the memory model.
        hardware: the machine, if its host updates at another rate than that of ``memory``.
        only_adds: the durations are for a forward and backward that no updates follow, and whose gradients are only
            added to sums.
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
        self._in_backward = memory.update_in_backward
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
        self._gather_ms = [0.0] * len(layout.chunks)
        if layout.world_size > 1:
            self._gather_ms = [
                _collective_ms(chunk.elements * element, hardware.gather_gbps) for chunk in layout.chunks
            ]
        device_gparams = device_update_gparams(profile, hardware)
        self._device_update_ms = [0.0 if only_adds else n / device_gparams / 1e6 for n in self._updated_elements]
        self._visits = [*profile.calls, *reversed(profile.calls)]
        self._forward_ms, self._backward_ms = computing_by_visit(profile, times)
        # By unit, for one call: the copies of its saved activations, those of its inputs, and its recomputation.
        self._swap_copies = [NO_COPIES] * len(profile.units)
        self._input_copies = [NO_COPIES] * len(profile.units)
        self._recompute_ms = [0.0] * len(profile.units)
        for unit, n_calls in Counter(profile.calls).items():
            if (block := profile.units[unit].block) is not None:
                packed = bool(memory.pack_swaps) and memory.pack_swaps[block]
                self._swap_copies[unit] = swap_copies(profile.blocks[block], n_calls, hardware, packed=packed)
                size_in = profile.blocks[block].input_bytes / n_calls
                self._input_copies[unit] = SwapCopies(
                    out_ms=bytes_ms(size_in, hardware.d2h_gbps), back_ms=bytes_ms(size_in, hardware.h2d_gbps)
                )
                self._recompute_ms[unit] = times.recompute[block] / n_calls
        n_large = [memory.large_buffers(n_persist) for n_persist in range(len(layout.chunks) + 1)]
        self._fetches = Fetches(self._visits, held, layout, n_large)
        self._held = held
        self._gradients, self._gradients_of_visit = gradients_by_visit(profile, hardware, layout)
        self._reductions = self._reduced() if layout.world_size > 1 else {}
        self._lost_to_collectives = lost_to_collectives(hardware)
        for at, of_visit in enumerate(self._gradients_of_visit if self._reductions else ()):
            reduce_ms = sum(self._reductions[index].ms for index in of_visit)
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
        self._rates = rates(hardware, host_gparams * moved_bytes(dtype, moment_bytes), streamed_gbps)
        self._update_gparams = host_gparams, streamed_gparams
        # An update of the weight alone reads as much as a whole update, and writes only the weight. How long it takes
        # beside a whole update is calibrated in bf16, since arithmetic may be what limits it, not memory.
        self._weight_share = _weight_bytes_share(adam_bytes, written_bytes(dtype, moment_bytes), element)
        if hardware.host_adam_weight_gparams is not None:
            measured = hardware.host_adam_gparams / hardware.host_adam_weight_gparams
            counted = _weight_bytes_share(moved_bytes(CALIBRATED_DTYPE), written_bytes(CALIBRATED_DTYPE), 2)
            self._weight_share = min(1.0, self._weight_share * (measured / counted))

    @property
    def speculates(self) -> bool:
        """Whether speculative updates can save time. With updates inside backward, or on a CPU, they cannot."""
        return not self._in_backward and self._hardware.device_type != "cpu"

    def _reduced(self) -> dict[int, Reduction]:
        """By gradient, its part in the reduction of its chunk.

        Chunks are sent from the usual staging buffers in rotation. Large chunks are sent from the last buffer.
        """
        layout, usual, found = self._layout, cycle(range(STAGING_BUFFERS)), {}
        order = list(chain.from_iterable(self._gradients_of_visit))
        last = {self._gradients[index][0]: index for index in order}
        sent: dict[int, int] = {}
        for index in order:
            chunk = layout.chunks[self._gradients[index][0]]
            if chunk.index not in sent:
                sent[chunk.index] = STAGING_BUFFERS if layout.is_large(chunk) else next(usual)
            size_bytes = chunk.elements * self._profile.element_bytes
            reduce_ms = _collective_ms(size_bytes, self._hardware.reduce_gbps)
            found[index] = Reduction(sent[chunk.index], reduce_ms if last[chunk.index] == index else 0.0)
        return found

    def _staging(self, n_persist: int, n_device_sum: int) -> dict[int, int]:
        """By gradient, the staging buffer that it is offloaded from; -1 if it is not offloaded.

        Gradients take the usual buffers in rotation. Those of large chunks take the last buffer. Those of persistent
        chunks are not offloaded, nor are sums on the device before the last batch of a step. Ranks that reduce the
        gradients of a chunk offload one shard, with the last of them.
        """
        stay = self._layout.summed_on_device(n_persist, n_device_sum) if self._only_adds else ()
        usual, found = cycle(range(STAGING_BUFFERS)), {}
        for index in chain.from_iterable(self._gradients_of_visit):
            chunk = self._layout.chunks[self._gradients[index][0]]
            found[index] = -1
            stays = chunk.index < n_persist or chunk.index in stay
            if not stays and (not self._reductions or self._reductions[index].ms):
                found[index] = STAGING_BUFFERS if self._layout.is_large(chunk) else next(usual)
        return found

    def _sums_up(self, n_persist: int, n_device_sum: int) -> dict[int, float]:
        """By gradient, the time of the sum in host memory on its way up. The first batch of a step fetches none."""
        if not self._memory.accumulates:
            return {}
        n_batches = self._profile.accumulation - self._only_adds  # those that this is the mean of
        share = (n_batches - 1) / n_batches if self._only_adds or n_batches == 1 else 1.0
        on_device, found = self._layout.summed_on_device(n_persist, n_device_sum), {}
        for index, staging in self._staging(n_persist, n_device_sum).items():
            chunk, _, offload_ms = self._gradients[index]
            if staging >= 0 and chunk not in on_device:
                up_ms = offload_ms * self._hardware.d2h_gbps / self._hardware.h2d_gbps
                found[index] = share * up_ms * _SUM_BYTES / self._profile.element_bytes
        return found

    def _gradient(self, index: int, on_device: Container[int], staging: int) -> Gradient:
        """The gradient ``index``. Sums of chunks that are offloaded and not ``on_device`` are in host memory."""
        chunk, flatten_ms, offload_ms = self._gradients[index]
        if not self._memory.accumulates:
            return index, chunk, flatten_ms, offload_ms, staging
        element = self._profile.element_bytes  # what flattening reads, and writes
        if self._reductions:  # their time has the additions
            added_bytes = 0
        elif staging >= 0 and chunk not in on_device:  # it is added when it is flattened
            added_bytes = element + 2 * _SUM_BYTES
            offload_ms *= _SUM_BYTES / element
        else:  # it is flattened into the sum
            added_bytes = 2 * _SUM_BYTES - element
        return index, chunk, flatten_ms * (1 + added_bytes / (2 * element)), offload_ms, staging

    def _visits_under(self, n_persist: int, n_device_sum: int) -> list[Visit]:
        """The visits of forward and backward under these placements."""
        n_visits, staging = len(self._profile.calls), self._staging(n_persist, n_device_sum)
        on_device = self._layout.summed_on_device(n_persist, n_device_sum)
        first = self._layout.first_buffered(n_persist)
        return [
            Visit(
                name=self._profile.units[unit].name,
                unit=unit,
                chunks=tuple(chunk for chunk in self._held[at] if chunk >= first),
                gradients=tuple(
                    self._gradient(index, on_device, staging[index])
                    for index in (self._gradients_of_visit[at - n_visits] if at >= n_visits else ())
                ),
            )
            for at, unit in enumerate(self._visits)
        ]


def _weight_bytes_share(adam_bytes: int, written: int, element_bytes: int) -> float:
    """The share of an update's bytes that an update of the weight alone moves."""
    return (adam_bytes - written + element_bytes) / adam_bytes


def _collective_ms(size_bytes: int, gbps: float) -> float:
    """Milliseconds of a collective on a tensor of ``size_bytes`` in all, at ``gbps`` GB/s of the whole tensor."""
    return COLLECTIVE_MS + bytes_ms(size_bytes, gbps)
