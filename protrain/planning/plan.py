"""Plan: the four integers, and what they were chosen for."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protrain.hardware.profile import HardwareProfile
from protrain.profiler.model_profile import BlockRecord, ModelProfile
from protrain.records import Record

if TYPE_CHECKING:
    from protrain.planning.explain import Explanation


_INPUT_ALIGNMENT_BYTES = 16 * 256  # of up to 16 inputs in a step, more than any block has


class BlockMode(enum.Enum):
    """What happens to a block's saved activations between forward and backward."""

    NONE = "none"  # kept
    CKPT = "ckpt"  # dropped, recomputed in backward from the block's inputs, which are kept
    SWAP = "swap"  # moved to host memory, fetched in backward
    CKPT_SWAP = "ckpt_swap"  # dropped, recomputed from inputs that are moved to host memory and fetched

    @property
    def recomputes(self) -> bool:
        """Whether the block's forward runs again in backward."""
        return self in (BlockMode.CKPT, BlockMode.CKPT_SWAP)


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Everything the engine needs to know; the engine never searches and never changes it.

    Chunks ``0 .. n_persist - 1`` of the layout that ``chunk_elements`` produces are persistent. Counts that the paper
    calls n_buffer, n_swap and n_ckpt have its meaning; ``block_modes`` spells the last two out, one per block.
    CKPT_SWAP blocks, which the paper does not have, count as neither.
    """

    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    chunk_elements: int  # a multiple of 128
    n_chunks: int
    block_modes: tuple[BlockMode, ...]
    model: str  # fingerprint of the ModelProfile it was made for: planning.search.fingerprint
    tokens: int  # of the planned batch
    device_bytes: int  # predicted peak
    host_bytes: int  # predicted, all host memory of the engine
    step_ms: float  # predicted
    n_speculate: int = 0  # chunks after the persistent ones that are updated before step() where host memory has room
    n_stream: int = 0  # of the other chunks in host memory: planning.layout says which the device updates
    transient_bytes: int  # the part of device_bytes that is neither chunks, buffers, staging nor saved activations

    def __str__(self) -> str:
        n_ckpt_swap = self.block_modes.count(BlockMode.CKPT_SWAP)
        return (
            f"n_persist={self.n_persist}/{self.n_chunks} n_buffer={self.n_buffer} "
            f"n_swap={self.n_swap} n_ckpt={self.n_ckpt}/{len(self.block_modes)}"
            + (f" n_ckpt_swap={n_ckpt_swap}" if n_ckpt_swap else "")
            + (f" n_speculate={self.n_speculate}" if self.n_speculate else "")
            + (f" n_stream={self.n_stream}" if self.n_stream else "")
        )

    def explain(
        self, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
    ) -> Explanation:
        """What limits this plan and what would change that: :func:`protrain.planning.explain.explain`."""
        from protrain.planning.explain import explain  # it makes plans

        return explain(self, profile, hardware, step_during_backward=step_during_backward)


def moved_input_bytes(record: BlockRecord) -> int:
    """Host memory that the inputs of a CKPT_SWAP block take in one step."""
    return record.input_bytes + _INPUT_ALIGNMENT_BYTES if record.input_bytes else 0


def block_modes(n_blocks: int, n_swap: int, n_ckpt: int) -> tuple[BlockMode, ...]:
    """Modes in execution order: swapped blocks early with checkpointed ones between them, untouched blocks last.

    Recomputing the block between two swapped ones gives the link time for the transfer (paper section 3).
    """
    if min(n_swap, n_ckpt) < 0 or n_swap + n_ckpt > n_blocks:
        raise ValueError(
            f"n_swap={n_swap} and n_ckpt={n_ckpt} must not be negative, nor more than {n_blocks} blocks in all"
        )
    pairs = min(n_swap, n_ckpt)
    early = [BlockMode.SWAP, BlockMode.CKPT] * pairs
    early += [BlockMode.SWAP] * (n_swap - pairs) + [BlockMode.CKPT] * (n_ckpt - pairs)
    return (*early, *[BlockMode.NONE] * (n_blocks - n_swap - n_ckpt))
