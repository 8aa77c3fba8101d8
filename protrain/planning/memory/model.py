"""The memory model: what a plan takes on the device and in host memory (paper section 4).

Device memory is what lies there for good (buffers, persistent chunks, chunk buffers, gradient staging, room for states
that are streamed through for their update) plus the largest, over all stretches of the step, of what the trace measured
with every block checkpointed and what the plan's other modes keep on top:

    untouched block   its saved activations, from its forward until its backward
    swapped block     its saved activations while they are on the way: in forward until the next unit is done, in
                      backward from the block before it (in backward order) on; where they are packed, the packed
                      buffer in their place, beside them at the end of its forward and all through its backward

and less what its modes take away:

    recomputed from moved inputs   its inputs that nothing outside blocks keeps, from when the next unit's forward is
                                   done until the backward of the block after it begins
    untouched or swapped           those of its inputs that none of its saved tensors holds, between its forward and
                                   its backward

either only from when the model itself, in a list of hidden states say, no longer holds them.

What the model returns stays in backward, where the trace has it, and in the forward of the next step, as in a loop that
has ``output = model(**batch)``.

A block's own saved activations in its own backward are part of the measured peak, which recomputed them.

Where a step has several batches, every chunk has an fp32 accumulator in place of its gradient, and 16-bit gradients on
their way to those in host memory share regions.

Where updates run inside backward, gradients share regions (:mod:`protrain.planning.memory.gradient_regions`): on the
device as many as are needed, in host memory as many as there is room for, for more only make backward wait less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.hardware.profile import HardwareProfile
from protrain.planning.choices import Choices
from protrain.planning.layout import STAGING_BUFFERS, ChunkRecord, Layout, most_held
from protrain.planning.memory.gradient_regions import GradientRegions
from protrain.planning.plan import BlockMode, Counts, block_modes, offloaded_input_bytes, swapped_block_bytes
from protrain.planning.rates.streaming import staging_bytes
from protrain.planning.rates.swap_copies import choose_packed
from protrain.profiler.model_profile import ModelProfile

Bytes = NDArray[np.int64]

MIB = 1024**2
TILE_ELEMENTS = 16384  # of the gradient norm: one partial sum each
_HOST_SMALL_BYTES = 1 * MIB  # partial sums, page rounding of the arena's segments
_CUDA_WORKSPACE_BYTES = 128 * MIB  # matmul workspaces that a trace may have found allocated, the engine's small tensors
_CUDA_FRAGMENTATION = 0.05  # of the activations: what the caching allocator loses to sizes that don't fit each other
_CPU_SLACK = 0.01
_AT_ONCE = 256  # choices of block modes whose activations are worked out at once: what a core's cache holds
_MOVING = (BlockMode.SWAP, BlockMode.CKPT_SWAP)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a step takes beside model states under one choice of block modes."""

    peak_bytes: int
    held_bytes: int  # upper bound of the saved activations among it
    swapped_bytes: int  # host memory of the swapped blocks and of moved inputs


def state_bytes(chunk: ChunkRecord, profile: ModelProfile, *, gradient_bytes: int | None = None) -> int:
    """All states of ``chunk``: weight, and when trainable master (or remainder), both moments and gradient.

    ``gradient_bytes`` is of one element of the gradient; default: as many as the weight's.
    """
    element = profile.element_bytes
    if not chunk.trainable:
        return chunk.elements * element
    master = {"bfloat16": 2, "float16": 4, "float32": 0}[profile.dtype]
    gradient = element if gradient_bytes is None else gradient_bytes
    return chunk.elements * (element + master + 2 * profile.moment_bytes + gradient)


class MemoryModel:
    """Predictions for one model in one layout on one machine.

    Args:
        profile: of the model and the batch.
        hardware: the machine and its limits.
        layout: of the model.
        update_in_backward: whether updates run inside backward (``step_during_backward``).
        pack_swaps: by block, whether what it saves is packed where it is swapped; by default what takes less time.
    """

    def __init__(
        self,
        profile: ModelProfile,
        hardware: HardwareProfile,
        layout: Layout,
        *,
        update_in_backward: bool = False,
        pack_swaps: tuple[bool, ...] | None = None,
    ) -> None:
        self.profile = profile
        self.hardware = hardware
        self.layout = layout
        self.update_in_backward = update_in_backward
        self.pack_swaps = choose_packed(profile, hardware) if pack_swaps is None else pack_swaps
        packs = self.pack_swaps or (False,) * len(profile.blocks)
        self.gradients = GradientRegions(profile, hardware, layout, update_in_backward=update_in_backward)
        self.accumulates = profile.accumulation > 1  # in fp32, into an accumulator of every chunk
        element = profile.element_bytes
        placements = range(len(layout.chunks) + 1)
        # By n_persist: chunks that have a buffer at most, and those that are held at once, with large ones apart.
        self._away = [sum(not layout.is_large(chunk) for chunk in layout.chunks[first:]) for first in placements]
        self._held = most_held(profile, layout)
        # By n_persist: of one chunk buffer, and of all for large chunks; of what gradients pass through.
        sizes = [layout.buffer_elements(n_persist) for n_persist in placements]
        self._buffer_bytes = [usual * element for usual, _ in sizes]
        self._large_bytes = [n * large * element for (_, n), (_, large) in zip(self._held, sizes, strict=True)]
        sizes = [layout.gradient_elements(n_persist) for n_persist in placements]
        self._staging_bytes = [(STAGING_BUFFERS * usual + large) * element for usual, large in sizes]
        self.streaming_bytes = staging_bytes(layout.chunk_elements)  # where the device updates host chunks
        self._persistent = [0]  # by n_persist
        for chunk in layout.chunks:
            self._persistent.append(self._persistent[-1] + self.chunk_bytes(chunk))
        states = [state_bytes(chunk, profile, gradient_bytes=0) if chunk.trainable else 0 for chunk in layout.chunks]
        weights = [chunk.elements * element if chunk.trainable else 0 for chunk in layout.chunks]
        # Bytes of second copies of all chunks before: of their states, and of their weights alone.
        self._state_copies = list(accumulate(states, initial=0))
        self._weight_copies = list(accumulate(weights, initial=0))
        tiles = sum(-(-parameter.numel // TILE_ELEMENTS) for parameter in profile.parameters if parameter.group >= 0)
        self.partial_bytes = 4 * tiles
        self._kept = [
            sum(block.saved_bytes for block in profile.blocks[first:]) for first in range(len(profile.blocks) + 1)
        ]
        self._swapped = [  # by block: its saved activations in host memory, its inputs there
            (swapped_block_bytes(record, packed=packed), offloaded_input_bytes(record))
            for record, packed in zip(profile.blocks, packs, strict=True)
        ]
        self._walk = _walk(profile, packs)
        self._activations: dict[tuple[BlockMode, ...], Activations] = {}  # those worked out one by one
        self._offloads: dict[tuple[int, int], tuple[Bytes, Bytes]] = {}

    def chunk_bytes(self, chunk: ChunkRecord) -> int:
        """All states of ``chunk``, with its gradient or with what gradients are added to."""
        return state_bytes(chunk, self.profile, gradient_bytes=4 if self.accumulates else None)

    def accumulator_bytes(self, n_persist: int) -> int:
        """Host memory of what gradients of several batches are added to."""
        away = self.layout.chunks[n_persist:]
        return 4 * sum(chunk.elements for chunk in away if chunk.trainable) if self.accumulates else 0

    def least_buffers(self, n_persist: int) -> int:
        """The most non-persistent chunks, without large ones, that the units active at one time hold."""
        return self._held[n_persist][0]

    def large_buffers(self, n_persist: int) -> int:
        """Those for large chunks: as many of these as are held at once."""
        return self._held[n_persist][1]

    def all_buffers(self, n_persist: int) -> int:
        """The most that there may be: one for every non-persistent chunk, without large ones."""
        return self._away[n_persist]

    def most_buffers(self, n_persist: int, margined_bytes: Bytes, n_stream: int = 0) -> Bytes:
        """Chunk buffers that fit beside activations of these sizes; -1 where not as many as are needed do."""
        least, most = self.least_buffers(n_persist), self.all_buffers(n_persist)
        spare = self.hardware.device_bytes - self.static_bytes(n_persist, least, n_stream) - margined_bytes
        n_buffer = np.minimum(most, least + spare // max(1, self._buffer_bytes[n_persist]))
        return np.where(spare < 0, -1, n_buffer)

    def static_bytes(self, n_persist: int, n_buffer: int, n_stream: int = 0) -> int:
        """Device memory that is taken for the whole training."""
        return sum(self.static_parts(n_persist, n_buffer, n_stream).values())

    def static_parts(self, n_persist: int, n_buffer: int, n_stream: int = 0) -> dict[str, int]:
        """What ``static_bytes`` consists of, by name."""
        parts = {"persistent chunks": self._persistent[n_persist]}
        if self.device_regions(n_persist):
            parts["persistent chunks"] -= self.gradients.own_bytes(n_persist)[0]
            parts["gradients of persistent chunks"] = self.gradients.device_bytes(n_persist)
        parts |= {
            "chunk buffers": n_buffer * self._buffer_bytes[n_persist] + self._large_bytes[n_persist],
            "gradient staging": self._staging_bytes[n_persist] + self.partial_bytes,
            "the model's buffers": self.profile.buffer_bytes,
        }
        if n_stream and self.streaming_bytes:
            parts["states on their way through"] = self.streaming_bytes
        return parts

    def device_bytes(self, n_persist: int, n_buffer: int, activations: Activations, n_stream: int = 0) -> int:
        """Predicted peak."""
        return self.static_bytes(n_persist, n_buffer, n_stream) + self.margined_bytes(activations)

    def margined_bytes(self, activations: Activations) -> int:
        """The peak of ``activations`` with the margin that the kind of device needs."""
        return int(self.with_margin(np.array(activations.peak_bytes)))

    def with_margin(self, peak_bytes: Bytes) -> Bytes:
        """Peaks of activations with that margin."""
        if self.hardware.device_type == "cuda":
            return (peak_bytes * (1 + _CUDA_FRAGMENTATION)).astype(np.int64) + _CUDA_WORKSPACE_BYTES
        return (peak_bytes * (1 + _CPU_SLACK)).astype(np.int64)

    def kept_bytes(self, first_kept: int) -> int:
        """Saved activations of the blocks from ``first_kept`` on: what those hold at once when they are untouched."""
        return self._kept[first_kept]

    def device_regions(self, n_persist: int) -> int:
        """Regions that gradients of persistent chunks share; 0: each has its own."""
        return self.gradients.on_device(n_persist)

    def host_regions(self, n_persist: int, swapped_bytes: int) -> int:
        """Regions that gradients of the other chunks share, as many as there is room for; 0: each has its own."""
        return self.gradients.on_host(
            n_persist, self.hardware.host_bytes - self.host_bytes_beside(n_persist, swapped_bytes)
        )

    def host_gradient_bytes(self, n_persist: int, swapped_bytes: int) -> int:
        """Host memory of gradients."""
        return self.gradients.host_bytes(n_persist, self.host_regions(n_persist, swapped_bytes))

    def host_bytes(self, counts: Counts, activations: Activations) -> int:
        """Predicted host memory of the engine."""
        swapped_bytes = activations.swapped_bytes
        more = self.host_gradient_bytes(counts.n_persist, swapped_bytes) - self._least_gradient_bytes(counts.n_persist)
        copies = self.copy_bytes(counts.n_persist, counts.n_speculate, counts.n_weight_only)
        return self.host_bytes_beside(counts.n_persist, swapped_bytes) + copies + more

    def host_bytes_beside(self, n_persist: int, swapped_bytes: int) -> int:
        """The least host memory of any plan with so many persistent chunks: no second copies, fewest regions."""
        states = self._persistent[-1] - self._persistent[n_persist]
        if not self.accumulates:
            states -= self.gradients.own_bytes(n_persist)[1]
        chunks = states + self._least_gradient_bytes(n_persist)
        return chunks + swapped_bytes + self.partial_bytes + _HOST_SMALL_BYTES

    def _least_gradient_bytes(self, n_persist: int) -> int:
        return self.gradients.host_bytes(n_persist, self.gradients.on_host(n_persist))

    def copy_bytes(self, n_persist: int, n_speculate: int, n_weight_only: int = 0) -> int:
        """Second copies that speculative updates write, the first ``n_weight_only`` of weights alone."""
        first, last = n_persist + n_weight_only, n_persist + n_speculate
        weights = self._weight_copies[first] - self._weight_copies[n_persist]
        return weights + self._state_copies[last] - self._state_copies[first]

    def speculation(
        self, n_persist: int, n_speculate: int, swapped_bytes: int, *, whole: bool = False
    ) -> tuple[int, int]:
        """(n_speculate, n_weight_only): at most ``n_speculate`` updates, as many as host memory has room for.

        An update of the weight alone is work that the host does twice, so as few as possible are: the first in
        execution order. Their gradients come last, when the end of backward is near, and the next forward needs them
        first; their next gradients leave the host the most time for the states. With ``whole`` there is none.
        """
        room_bytes = self.hardware.host_bytes - self.host_bytes_beside(n_persist, swapped_bytes)
        copies = self._state_copies if whole else self._weight_copies
        fit = bisect_right(copies, copies[n_persist] + room_bytes) - 1 - n_persist
        n_speculate = max(0, min(n_speculate, fit, len(self.layout.chunks) - n_persist))
        low, high = 0, n_speculate  # the fewest of weights alone lie from low to high
        while low < high:
            middle = (low + high) // 2
            if self.copy_bytes(n_persist, n_speculate, middle) <= room_bytes:
                high = middle
            else:
                low = middle + 1
        return n_speculate, low

    def swapped_bytes(self, modes: tuple[BlockMode, ...]) -> int:
        """Host memory of the swapped blocks and of moved inputs."""
        sizes = zip(modes, self._swapped, strict=True)
        return sum(size[mode is BlockMode.CKPT_SWAP] for mode, size in sizes if mode in _MOVING)

    def activations(self, modes: tuple[BlockMode, ...]) -> Activations:
        """What the step takes beside model states when blocks are treated as ``modes`` says."""
        known = self._activations.get(modes)
        if known is None:
            found = self.all_activations(Choices.of([modes]))
            peak, held, swapped = (int(array[0]) for array in found)
            known = Activations(peak_bytes=peak, held_bytes=held, swapped_bytes=swapped)
            self._activations[modes] = known
        return known

    def offloads(self, n_swap: int, n_ckpt: int) -> tuple[Bytes, Bytes]:
        """Device bytes with their margin, and host bytes, by the number of input offloads: from 0 to ``n_ckpt``."""
        known = self._offloads.get((n_swap, n_ckpt))
        if known is None:
            modes = [block_modes(len(self.profile.blocks), n_swap, n_ckpt, n) for n in range(n_ckpt + 1)]
            peak_bytes, _, swapped_bytes = self.all_activations(Choices.of(modes))
            known = self._offloads[n_swap, n_ckpt] = self.with_margin(peak_bytes), swapped_bytes
        return known

    def all_activations(self, choices: Choices) -> tuple[Bytes, Bytes, Bytes]:
        """The fields of :class:`Activations` in their order, each an array by choice."""
        parts = [self._some_activations(choices, first) for first in range(0, choices.n_choices, _AT_ONCE)]
        peak, held, swapped = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return peak, np.minimum(held, peak), swapped

    def _some_activations(self, choices: Choices, first: int) -> tuple[Bytes, Bytes, Bytes]:
        """The same of _AT_ONCE choices from ``first`` on. Arrays are [stretch, choice]."""
        walk = self._walk
        # By block and choice, with a last row for "no block" (index -1), which saves nothing.
        ckpt, swap, moves = (np.pad(of_block[:, first : first + _AT_ONCE], ((0, 1), (0, 0))) for of_block in choices)
        recomputed = ckpt[walk.block]
        # On the device from a block's forward until its backward: what untouched ones save, less inputs that the trace
        # has there and these choices have not.
        kept = (~(recomputed | swap[walk.block])) * walk.share_bytes
        kept -= moves[walk.block] * walk.input_bytes + ~recomputed * walk.unsaved_input_bytes
        waiting = np.cumsum(np.where(walk.forward, kept, -kept), axis=0) - walk.forward * kept
        for row, until, held_bytes in walk.held:  # those that others hold for a while are not gone yet
            block = walk.block[row]
            unsaved = ~recomputed[row] * np.minimum(held_bytes, walk.unsaved_input_bytes[row])
            waiting[row + 1 : until] += moves[block] * np.minimum(held_bytes, walk.input_bytes[row]) + unsaved
        # On its way; the trace has all inputs on the device, and the neighbour's is there in truth.
        waiting += swap[walk.neighbour] * walk.neighbour_bytes + moves[walk.neighbour] * walk.neighbour_input_bytes
        waiting += walk.live_bytes
        keeps = walk.forward & ~recomputed
        own = np.where(keeps, walk.keeping_bytes, walk.peak_bytes)
        packing = swap[walk.block]
        peak = (waiting + np.where(packing, walk.packing_bytes, own)).max(axis=0, initial=0)
        # Backward recomputes or fetches it, and it was measured as such.
        of_block = (keeps | ~walk.forward) * walk.share_bytes + packing * walk.packed_bytes
        held = (waiting + of_block).max(axis=0, initial=0)
        saved_bytes, moved_bytes = np.array([*self._swapped, (0, 0)], dtype=np.int64).T
        return peak, held, saved_bytes @ swap + moved_bytes @ moves


class _Walk(NamedTuple):
    """The stretches of the trace and their neighbours, as columns; blocks by index, -1 for none."""

    held: list[tuple[int, int, int]]  # inputs that others hold a while: row of the forward, first row without, bytes
    block: NDArray[np.int64]  # 1-d, as the neighbours are
    neighbour: NDArray[np.int64]  # forward: the block before, if no unit lies between; backward: whose comes next
    forward: NDArray[np.bool_]
    live_bytes: Bytes
    peak_bytes: Bytes
    keeping_bytes: Bytes  # the most at once in forward when the block keeps what it saves
    packing_bytes: Bytes  # the most at once when it is swapped, in forward or backward
    packed_bytes: Bytes  # of the buffer that one call is packed into; 0 where it is not
    share_bytes: Bytes  # saved by one call of the block
    unsaved_input_bytes: Bytes  # of one call of the block
    input_bytes: Bytes  # the same, saved or not, if moving it frees it
    neighbour_bytes: Bytes  # of one call of the neighbour, saved or packed, and its inputs
    neighbour_input_bytes: Bytes


def _walk(profile: ModelProfile, packs: tuple[bool, ...]) -> _Walk:
    calls = Counter(segment.block for segment in profile.segments if segment.phase == "forward")
    share = {index: block.saved_bytes // max(1, calls[index]) for index, block in enumerate(profile.blocks)}
    packed = {
        index: -(-swapped_block_bytes(block, packed=True) // max(1, calls[index])) * packs[index]
        for index, block in enumerate(profile.blocks)
    }
    output = {index: block.output_bytes // max(1, calls[index]) for index, block in enumerate(profile.blocks)}
    inputs = {
        index: (block.input_bytes - block.held_input_bytes) // max(1, calls[index])
        for index, block in enumerate(profile.blocks)
    }
    unsaved = {index: block.unsaved_input_bytes // max(1, calls[index]) for index, block in enumerate(profile.blocks)}
    share[-1] = packed[-1] = inputs[-1] = unsaved[-1] = 0
    order = [segment.block for segment in profile.segments]
    rows, held = [], []
    before, at_loss = -1, True  # not yet in the backward of a block
    held_before = (0, 0)  # inputs of the block before that others hold, and until when
    for index, segment in enumerate(profile.segments):
        forward, block = segment.phase == "forward", -1 if segment.block is None else segment.block
        after = next((other for other in order[index + 1 :] if other is not None), -1)
        at_loss = at_loss and (forward or block < 0)
        if at_loss and not forward and order[index + 1 : index + 2] == [None]:
            after = -1  # fetched when the backward of what comes right behind the block begins, not with the loss
        keeping = segment.peak_bytes
        if share[block]:
            # What it saves may be part of the most it uses at once: never count it twice.
            most = min(segment.peak_bytes + share[block], profile.blocks[block].forward_peak_bytes)
            keeping = max(share[block], most)
        if block < 0 and order[max(0, index - 1)] is None:
            before = -1  # a unit lies between, and with its end what the block moves is gone
        neighbour = before if forward else after
        moving = inputs[neighbour]
        if forward and index < held_before[1]:
            moving = max(0, moving - held_before[0])  # there anyway
        if segment.held_bytes:
            held.append((index, segment.held_until, segment.held_bytes))
        live = segment.live_bytes + (profile.output_bytes if forward else 0)  # of the step before
        packing = keeping if forward else segment.peak_bytes
        if packed[block] and forward:
            packing = max(keeping, share[block] + output[block] + packed[block])
        elif packed[block]:
            packing += packed[block]
        sizes = (live, segment.peak_bytes, keeping, packing, packed[block], share[block], unsaved[block], inputs[block])
        rows.append((block, neighbour, forward, *sizes, packed[neighbour] or share[neighbour], moving))
        if block >= 0:
            before, held_before = block, (segment.held_bytes, segment.held_until)
    blocks, neighbours, is_forward, *columns = np.array(rows, dtype=np.int64).reshape(-1, len(_Walk._fields) - 1).T
    return _Walk(held, blocks, neighbours, is_forward[:, None] > 0, *(column[:, None] for column in columns))
