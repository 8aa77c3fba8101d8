"""The memory of activations: what forward and backward take beside model states, for many choices of block modes.

[Note: activations] The trace measured every segment of the step (a block, or what runs between blocks) with every block
checkpointed. Other modes of a block add to that:

    untouched block   its saved activations, from its forward until its backward
    swapped block     its saved activations while they are copied: in forward until the next unit is done, and in
                      backward from the begin of the backward before its own. If they are packed, the packed buffer in
                      their place, and also beside them at the end of its forward and throughout its backward

and they take away from it:

    input offload          the block's inputs that nothing outside blocks holds, from the end of the next unit's forward
                           until the backward before its own begins. Those that are held are there twice in backward
    untouched or swapped   the block's inputs that none of its saved tensors holds, between its forward and its backward

An input goes only once the model itself, in a list of hidden states say, no longer holds it.

The model's output stays in backward, as in the trace. It also stays in the forward of the next step, as in a loop with
``output = model(**batch)``. In a block's own backward, its saved activations are part of the measured peak, since the
trace recomputed them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protrain.planning.plan import BlockMode, swapped_block_bytes
from protrain.profiler.model_profile import ModelProfile

Bytes = NDArray[np.int64]


class ModeChoices(NamedTuple):
    """Some choices of block modes. Arrays are [block, choice], as the memory model reads one block of all choices."""

    ckpt: NDArray[np.bool_]  # recomputed, whether its inputs are offloaded or not
    swap: NDArray[np.bool_]
    ckpt_swap: NDArray[np.bool_]  # recomputed from offloaded inputs

    @classmethod
    def of(cls, choices: Sequence[Sequence[BlockMode]]) -> ModeChoices:
        """From the modes of each choice, by block."""
        modes = np.array([mode for of_choice in choices for mode in of_choice], dtype=np.object_)
        columns = modes.reshape(len(choices), -1).T
        is_mode = {mode: np.ascontiguousarray(columns == mode) for mode in BlockMode}
        offloads_inputs = is_mode[BlockMode.CKPT_SWAP]
        return cls(is_mode[BlockMode.CKPT] | offloads_inputs, is_mode[BlockMode.SWAP], offloads_inputs)


class Segments(NamedTuple):
    """The segments of the trace as columns. Blocks are given by index, -1 for none.

    A segment's neighbour is the swapped or offloaded block whose copies may still run beside it: in forward the block
    before it if no unit lies between, in backward the block whose backward comes next.
    """

    held_inputs: list[tuple[int, int, int]]  # inputs that the model holds: segment, first segment without them, bytes
    block: NDArray[np.int64]  # has one dimension, as neighbour has; all columns below are [segment, 1]
    neighbour: NDArray[np.int64]
    forward: NDArray[np.bool_]
    live_bytes: Bytes  # held at the begin of the segment
    peak_bytes: Bytes  # the most at once beside live_bytes, with every block checkpointed
    keeping_bytes: Bytes  # the most at once in a forward of the block that keeps what it saves
    output_bytes: Bytes  # of one call of the block
    packed_bytes: Bytes  # of the buffer that one call of the block is packed into; 0 if it is not packed
    share_bytes: Bytes  # saved by one call of the block
    unsaved_input_bytes: Bytes  # inputs of one call that none of its saved tensors holds
    input_bytes: Bytes  # inputs of one call that input offload frees, saved or not
    held_bytes: Bytes  # inputs of one call that input offload does not free, but fetches
    neighbour_bytes: Bytes  # what one call of the neighbour saves, or its packed buffer
    neighbour_input_bytes: Bytes

    @classmethod
    def of(cls, profile: ModelProfile, packs: tuple[bool, ...]) -> Segments:
        """The segments of ``profile``. ``packs`` says by block whether it is packed where it is swapped."""
        calls = Counter(segment.block for segment in profile.segments if segment.phase == "forward")
        blocks = profile.blocks
        sizes = [  # by block
            (
                block.output_bytes,
                swapped_block_bytes(block) * is_packed,
                block.saved_bytes,
                block.unsaved_input_bytes,
                block.input_bytes - block.held_input_bytes,
                block.held_input_bytes,
            )
            for block, is_packed in zip(blocks, packs, strict=True)
        ]
        # Of one call of each block, in the order of the columns. The last one is of no block (index -1).
        per_call = [[size // max(1, calls[at]) for size in of_block] for at, of_block in enumerate(sizes)] + [[0] * 6]
        _, packed, share, _, inputs, held = zip(*per_call, strict=True)
        order = [segment.block for segment in profile.segments]
        rows, held_inputs = [], []
        before, at_loss = -1, True  # at_loss: the backward of no block has begun yet
        held_before = (0, 0)  # inputs of the block before that the model holds: bytes, first segment without them
        for index, segment in enumerate(profile.segments):
            forward, at = segment.phase == "forward", -1 if segment.block is None else segment.block
            after = next((other for other in order[index + 1 :] if other is not None), -1)
            at_loss = at_loss and (forward or at < 0)
            if at_loss and not forward and order[index + 1 : index + 2] == [None]:
                after = -1  # fetched when the backward of the segment right after it begins, not with the loss
            keeping = segment.peak_bytes
            if share[at]:
                # What the block saves may be part of the most it uses at once, and then it is counted once.
                keeping = max(share[at], min(segment.peak_bytes + share[at], blocks[at].forward_peak_bytes))
            if at < 0 and order[max(0, index - 1)] is None:
                before = -1  # a unit lies between, and when that ended, what the block offloads was gone
            neighbour = before if forward else after
            # Before the backward of any unit nothing is fetched.
            neighbour_inputs = inputs[neighbour] + held[neighbour] * (profile.segments[index - 1].phase != "forward")
            if forward and index < held_before[1]:
                neighbour_inputs = max(0, neighbour_inputs - held_before[0])  # the model holds the others anyway
            if segment.held_bytes:
                held_inputs.append((index, segment.held_until, segment.held_bytes))
            live = segment.live_bytes + profile.output_bytes * forward  # the output of the step before
            copied = packed[neighbour] or share[neighbour]
            rows.append(
                (at, neighbour, forward, live, segment.peak_bytes, keeping, *per_call[at], copied, neighbour_inputs)
            )
            if at >= 0:
                before, held_before = at, (segment.held_bytes, segment.held_until)
        block_column, neighbours, is_forward, *columns = (
            np.array(rows, dtype=np.int64).reshape(-1, len(cls._fields) - 1).T
        )
        return cls(
            held_inputs, block_column, neighbours, is_forward[:, None] > 0, *(column[:, None] for column in columns)
        )

    def peaks(self, choices: ModeChoices) -> tuple[Bytes, Bytes]:
        """By choice, the peak of activations, and an upper bound of the saved activations held at once."""
        # By block and choice. The last row is for "no block" (index -1), which saves nothing.
        ckpt, swap, offload = (np.pad(of_block, ((0, 1), (0, 0))) for of_block in choices)
        recomputed, swapped, offloaded = ckpt[self.block], swap[self.block], offload[self.block]
        # By segment and choice: what a block adds on the device from its forward until its backward. Untouched blocks
        # add what they save. Inputs that the trace held there are subtracted if the choice gives them up.
        kept = ~(recomputed | swapped) * self.share_bytes
        kept -= offloaded * self.input_bytes + ~recomputed * self.unsaved_input_bytes
        waiting = np.cumsum(np.where(self.forward, kept, -kept), axis=0) - self.forward * kept
        for row, until, held_bytes in self.held_inputs:  # inputs that the model holds for a while are not gone yet
            unsaved = ~recomputed[row] * np.minimum(held_bytes, self.unsaved_input_bytes[row])
            waiting[row + 1 : until] += offloaded[row] * np.minimum(held_bytes, self.input_bytes[row]) + unsaved
        waiting += self.live_bytes
        # A block is packed when what the neighbour offloads is gone.
        packing = waiting + self.forward * swapped * (self.share_bytes + self.output_bytes + self.packed_bytes)
        # The neighbour's saved activations or inputs, which are still there while they are copied.
        waiting += swap[self.neighbour] * self.neighbour_bytes + offload[self.neighbour] * self.neighbour_input_bytes
        keeps = self.forward & ~recomputed
        own = np.where(keeps, self.keeping_bytes, self.peak_bytes)
        own += ~self.forward * (swapped * self.packed_bytes + offloaded * self.held_bytes)
        peak = np.maximum(waiting + own, packing).max(axis=0, initial=0)
        # In backward the block has been recomputed or fetched, so what it saves is held in either case. That is more
        # than it still holds at its end if it computes gradients itself.
        of_block = (keeps | ~self.forward) * self.keeping_bytes + swapped * self.packed_bytes
        return peak, (waiting + of_block).max(axis=0, initial=0)
