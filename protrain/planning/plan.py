"""Plan: the integers, and what they were chosen for.

[Note: whose inputs move] Of the recomputed blocks it is the first in execution order. A block's input is away from when
the next block's forward is done until that block's backward begins, and the earlier the block, the longer: the stretch
of an earlier block contains that of a later one. So where inputs are of one size, no other choice of as many moves
leaves more memory at any moment. It also costs the least time: an early input has most of the step between its way out
and its way back, and both lie where the link has least to do, as the first chunks are those that persist.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protrain.common.records import Record
from protrain.hardware.profile import HardwareProfile
from protrain.planning.layout import Layout, pack
from protrain.profiler.model_profile import BlockRecord, ModelProfile

if TYPE_CHECKING:
    from protrain.planning.explain.explanation import Explanation


MOMENT_DTYPES = ("float32", "bfloat16")
SWAP_ALIGNMENT_BYTES = 256  # of every storage, on the device and in host memory
_INPUT_ALIGNMENT_BYTES = 64 * 256  # of up to 64 tensors in a step, more than any block keeps


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

    Chunks ``0 .. n_persist - 1`` of :func:`layout_of` are persistent. Counts that the paper
    calls n_buffer, n_swap and n_ckpt have its meaning; ``block_modes`` spells the last two out, one per block. Of the
    ``n_ckpt`` recomputed blocks ``n_ckpt_swap`` have their inputs moved, which the paper does not have.
    """

    file_kind = "a plan"
    file_source = "`protrain plan MODEL --out FILE` writes one"

    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    chunk_elements: int  # a multiple of 128
    large_first: bool = False  # chunks of one large parameter come before all others
    n_chunks: int
    block_modes: tuple[BlockMode, ...]
    model: str  # fingerprint of the ModelProfile it was made for: planning.fingerprint
    tokens: int  # of the planned batch
    accumulation: int = 1  # batches of a step, whose gradients are summed in fp32
    moment_dtype: str = "float32"  # or "bfloat16": of Adam's two moments
    chunked_loss: bool = False  # predicted for the loss that never holds all logits
    device_bytes: int  # predicted peak
    host_bytes: int  # predicted, all host memory of the engine
    step_ms: float  # predicted
    n_ckpt_swap: int = 0  # of n_ckpt, those recomputed from inputs that wait in host memory
    keep_attention: bool = False  # recomputed blocks keep outputs of attention, where they keep their inputs
    n_speculate: int = 0  # chunks after the persistent ones that are updated before step(), into second copies
    early_weights: bool = False  # of their weights alone; the states follow
    n_whole: int = 0  # but for the last of them, whose gradients come first: those are whole even so
    n_stream: int = 0  # of the other chunks in host memory: planning.layout says which the device updates
    # Regions that gradients of persistent chunks (of chunks in host memory) share while updates run inside backward; 0:
    # each has its own.
    n_device_gradient: int = 0
    n_host_gradient: int = 0
    pack_swaps: tuple[bool, ...] = ()  # by block: if it is swapped, what it saves is packed; empty: no block's is
    transient_bytes: int  # the part of device_bytes that is neither chunks, buffers, staging nor saved activations

    def __post_init__(self) -> None:
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ValueError(f"Plan.moment_dtype must be {' or '.join(MOMENT_DTYPES)}, not {self.moment_dtype!r}")
        if self.pack_swaps and len(self.pack_swaps) != len(self.block_modes):
            raise ValueError(
                f"Plan.pack_swaps must be empty or say something of each of {len(self.block_modes)} blocks, not of "
                f"{len(self.pack_swaps)}"
            )

    def __str__(self) -> str:
        n_blocks = len(self.block_modes)
        return (
            f"n_persist={self.n_persist}/{self.n_chunks} "
            + ("large_first " if self.large_first else "")
            + f"n_buffer={self.n_buffer} "
            f"n_swap={self.n_swap} n_ckpt={self.n_ckpt}/{n_blocks}"
            + (f" n_ckpt_swap={self.n_ckpt_swap}" if self.n_ckpt_swap else "")
            + (" keep_attention" if self.keep_attention else "")
            + (f" n_speculate={self.n_speculate}" if self.n_speculate else "")
            + (" (weights)" if self.early_weights and not self.n_whole else "")
            + (f" n_whole={self.n_whole}" if self.n_whole else "")
            + (f" n_stream={self.n_stream}" if self.n_stream else "")
            + (f" n_host_gradient={self.n_host_gradient}" if self.n_host_gradient else "")
            + (f" packed={n_packed}/{self.n_swap}" if (n_packed := sum(map(self.packs, range(n_blocks)))) else "")
            + (f" accumulation={self.accumulation}" if self.accumulation > 1 else "")
            + (f" moments={self.moment_dtype}" if self.moment_dtype != "float32" else "")
        )

    def packs(self, block: int) -> bool:
        """Whether what the block of this index saves is swapped as one packed buffer."""
        packed = bool(self.pack_swaps) and self.pack_swaps[block]
        return packed and self.block_modes[block] is BlockMode.SWAP

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        return self.tokens * self.accumulation / self.step_ms * 1e3

    def explain(
        self, profile: ModelProfile, hardware: HardwareProfile, *, step_during_backward: bool = False
    ) -> Explanation:
        """What limits this plan and what would change that: :func:`protrain.planning.explain.explanation.explain`."""
        from protrain.planning.explain.explanation import explain  # it makes plans

        return explain(self, profile, hardware, step_during_backward=step_during_backward)


def layout_of(profile: ModelProfile, plan: Plan) -> Layout:
    """Where ``plan`` has every parameter."""
    return pack(profile, plan.chunk_elements, large_first=plan.large_first)


def as_planned(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """``profile`` as the models of time and memory are to see it for ``plan``."""
    return profile.keeping_attention() if plan.keep_attention else profile


def swapped_block_bytes(record: BlockRecord, *, packed: bool) -> int:
    """Host memory that what a swapped block saves takes in one step."""
    return (record.packed_bytes if packed else record.saved_bytes) + SWAP_ALIGNMENT_BYTES * record.saved_tensors


def moved_input_bytes(record: BlockRecord) -> int:
    """Host memory that the inputs of a CKPT_SWAP block, and what is kept with them, take in one step."""
    return record.input_bytes + _INPUT_ALIGNMENT_BYTES if record.input_bytes else 0


def block_modes(n_blocks: int, n_swap: int, n_ckpt: int, n_ckpt_swap: int = 0) -> tuple[BlockMode, ...]:
    """Modes in execution order: swapped blocks early with checkpointed ones between them, untouched blocks last.

    Recomputing the block between two swapped ones gives the link time for the transfer (paper section 3). Of the
    checkpointed blocks the first ``n_ckpt_swap`` have their inputs moved: see [Note: whose inputs move].
    """
    if min(n_swap, n_ckpt) < 0 or n_swap + n_ckpt > n_blocks:
        raise ValueError(
            f"n_swap={n_swap} and n_ckpt={n_ckpt} must not be negative, nor more than {n_blocks} blocks in all"
        )
    if not 0 <= n_ckpt_swap <= n_ckpt:
        raise ValueError(f"n_ckpt_swap must be 0 to {n_ckpt}, the number of recomputed blocks, not {n_ckpt_swap}")
    pairs = min(n_swap, n_ckpt)
    recomputed = [BlockMode.CKPT_SWAP] * n_ckpt_swap + [BlockMode.CKPT] * (n_ckpt - n_ckpt_swap)
    early = [mode for recompute in recomputed[:pairs] for mode in (BlockMode.SWAP, recompute)]
    early += [BlockMode.SWAP] * (n_swap - pairs) + recomputed[pairs:]
    return (*early, *[BlockMode.NONE] * (n_blocks - n_swap - n_ckpt))
