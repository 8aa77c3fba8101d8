"""Plan: the integers, and the model, batch and limits that they were chosen for.

[Note: whose inputs are offloaded] Input offload begins with the first recomputed block in execution order. A block's
input is in host memory from the end of the next block's forward until the begin of that block's backward. For an
earlier block this time is longer, and it contains the time of any later block. So if inputs have one size, no other
choice of as many blocks leaves more memory at any moment. It also costs the least time: an early input has most of the
step between its two copies, and both copies run when the link has least to do, because the first chunks are the
persistent ones.

[Note: another use] A plan holds what it was made for, so a plan that is given for another model, another number of
ranks or other options is refused with an error that names the difference.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from protrain.common.dtypes import MOMENT_DTYPES
from protrain.common.errors import PlanError
from protrain.common.records import Record
from protrain.planning.layout import Layout, pack, summed_on_device
from protrain.profiler.model_profile import BlockRecord, ModelProfile, ParameterRecord

SWAP_ALIGNMENT_BYTES = 256  # every swapped storage is aligned to this, on the device and in host memory
_INPUT_ALIGNMENT_BYTES = 64 * 256  # aligning up to 64 offloaded tensors of a block, which are more than any block has


class BlockMode(enum.StrEnum):
    """What happens to a block's saved activations between forward and backward."""

    NONE = "none"  # kept
    CKPT = "ckpt"  # dropped, and recomputed in backward from the block's inputs, which are kept
    SWAP = "swap"  # offloaded to host memory, and fetched in backward
    CKPT_SWAP = "ckpt_swap"  # dropped, and recomputed from inputs that are offloaded and fetched (input offload)

    @property
    def recomputes(self) -> bool:
        """Whether the block's forward runs again in backward."""
        return self in (BlockMode.CKPT, BlockMode.CKPT_SWAP)


Modes = tuple[BlockMode, ...]  # by block


class Counts(NamedTuple):
    """The integers that decide how a step runs. Chunks and blocks are counted in execution order."""

    n_persist: int  # chunks whose states stay on the device: the first ones
    n_buffer: int  # chunk buffers, without those for large chunks
    n_swap: int  # blocks whose saved activations are offloaded
    n_ckpt: int  # blocks that are recomputed
    n_ckpt_swap: int = 0  # blocks among n_ckpt whose inputs are offloaded
    n_speculate: int = 0  # chunks with speculative updates: the first after the persistent ones
    n_weight_only: int = 0  # the first of n_speculate, whose speculative update computes only the weight
    n_device_sum: int = 0  # chunks in host memory whose sums of several backwards are on the device


@dataclass(frozen=True, kw_only=True)
class Plan(Record):
    """Everything the engine needs to know. The engine never searches, and never changes its plan.

    Chunks ``0 .. n_persist - 1`` of ``layout_of`` are persistent. n_buffer, n_swap and n_ckpt have the paper's
    meaning; ``block_modes`` spells the last two out, one mode per block. ``Counts`` describes every integer.
    """

    file_kind = "a plan"
    file_source = "`protrain plan MODEL --out FILE` writes one"

    n_persist: int
    n_buffer: int
    n_swap: int
    n_ckpt: int
    chunk_elements: int  # a multiple of 128
    n_chunks: int
    world_size: int = 1  # ranks that train together, each with one shard of every chunk
    block_modes: Modes
    model: str  # the fingerprint of the ModelProfile that the plan was made for
    tokens: int  # of the planned batch, of one rank
    accumulation: int = 1  # batches of a step, whose gradients are summed in fp32
    moment_dtype: str = "float32"  # type of Adam's two moments, one of MOMENT_DTYPES
    chunked_loss: bool = False  # predicted for the loss that never holds all logits
    device_bytes: int  # predicted peak of each rank's device
    host_bytes: int  # predicted, all host memory of one rank's engine
    step_ms: float  # predicted
    n_ckpt_swap: int = 0
    keep_attention: bool = False  # recomputed blocks keep the outputs of attention beside their inputs
    n_speculate: int = 0
    n_weight_only: int = 0
    n_device_sum: int = 0
    stream: bool = False  # the GPU may update chunks in host memory, and has staging for their states
    # How many regions the gradients of persistent chunks share, and those of chunks in host memory. 0: every chunk has
    # a region of its own.
    n_device_gradient: int = 0
    n_host_gradient: int = 0
    pack_swaps: tuple[bool, ...] = ()  # by block: whether what it saves is packed if it is swapped; empty: none is
    transient_bytes: int  # the part of device_bytes that is neither chunks, buffers, staging nor saved activations

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"Plan.world_size must be at least 1, not {self.world_size}")
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
            f"n_buffer={self.n_buffer} "
            f"n_swap={self.n_swap} n_ckpt={self.n_ckpt}/{n_blocks}"
            + (f" n_ckpt_swap={self.n_ckpt_swap}" if self.n_ckpt_swap else "")
            + (" keep_attention" if self.keep_attention else "")
            + (f" n_speculate={self.n_speculate}" if self.n_speculate else "")
            + (f" n_weight_only={self.n_weight_only}" if self.n_weight_only else "")
            + (f" n_device_sum={self.n_device_sum}" if self.n_device_sum else "")
            + (" stream" if self.stream else "")
            + (f" n_host_gradient={self.n_host_gradient}" if self.n_host_gradient else "")
            + (f" packed={n_packed}/{self.n_swap}" if (n_packed := sum(map(self.packs, range(n_blocks)))) else "")
            + (f" accumulation={self.accumulation}" if self.accumulation > 1 else "")
            + (f" moments={self.moment_dtype}" if self.moment_dtype != "float32" else "")
            + (f" world_size={self.world_size}" if self.world_size > 1 else "")
        )

    def packs(self, block: int) -> bool:
        """Whether ``block`` is swapped, as one packed buffer."""
        packed = bool(self.pack_swaps) and self.pack_swaps[block]
        return packed and self.block_modes[block] is BlockMode.SWAP

    @property
    def device_sums(self) -> int | None:
        """``n_device_sum``, or None if a step has one backward and so no sums."""
        return self.n_device_sum if self.accumulation > 1 else None

    def sums_on_device(self, chunk: int) -> bool:
        """Whether ``chunk`` is in host memory, and its gradients of several backwards are summed on the device."""
        return chunk in summed_on_device(self.n_chunks, self.n_persist, self.n_device_sum)

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens a second, of all ranks together."""
        return self.world_size * self.tokens * self.accumulation / self.step_ms * 1e3

    @property
    def counts(self) -> Counts:
        """The plan's integers."""
        return Counts(*(getattr(self, name) for name in Counts._fields))


def layout_of(profile: ModelProfile, plan: Plan) -> Layout:
    """The place of every parameter under ``plan``."""
    return pack(profile, plan.chunk_elements, plan.world_size)


def as_planned(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """``profile`` as the models of time and memory need it under ``plan``."""
    return profile.keeping_attention() if plan.keep_attention else profile


def swapped_block_bytes(record: BlockRecord) -> int:
    """Host memory of what a swapped block saves in one step, packed or not."""
    return record.saved_bytes + SWAP_ALIGNMENT_BYTES * record.saved_tensors


def offloaded_input_bytes(record: BlockRecord) -> int:
    """Host memory of the offloaded inputs of one block in a step, and of kept attention, which goes with them."""
    return record.input_bytes + _INPUT_ALIGNMENT_BYTES if record.input_bytes else 0


def block_modes(n_blocks: int, n_swap: int, n_ckpt: int, n_ckpt_swap: int = 0) -> Modes:
    """Modes in execution order: swapped blocks early with checkpointed ones between them, untouched blocks last.

    Recomputing the block between two swapped ones gives the link time for the transfer (paper section 3). The first
    ``n_ckpt_swap`` checkpointed blocks have their inputs offloaded: see [Note: whose inputs are offloaded].
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


def fingerprint(profile: ModelProfile) -> str:
    """A hash of parameters, their shapes and optimizer groups, units, blocks and dtype. The batch is not part of it.

    It has two parts: a hash of parameters and dtype, and a hash of the rest.
    """
    units = [(unit.name, unit.block, unit.parameters) for unit in profile.units]
    rest = _digest([units, [block.name for block in profile.blocks]])
    return f"{_of_parameters(profile.parameters, profile.dtype)}-{rest}"


def _of_parameters(parameters: Iterable[ParameterRecord], dtype: str) -> str:
    return _digest([dtype, [(record.name, record.shape, record.group) for record in parameters]])


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


_DTYPES = ("bfloat16", "float16", "float32")
_REMEDY = "make a new plan, or leave plan= out to have one searched"


def refuse_other_model(plan: Plan, profile: ModelProfile) -> None:
    """Raise ValueError if ``plan`` was made for another model, dtype or optimizer groups. It names the difference.

    A plan holds a hash of what it was made for, so the difference is found by trying.
    """
    if plan.model == fingerprint(profile):
        return
    made_for, n_blocks = plan.model.partition("-")[0], len(profile.blocks)
    one_group = [replace(record, group=min(record.group, 0)) for record in profile.parameters]
    dtypes = [dtype for dtype in _DTYPES if made_for == _of_parameters(profile.parameters, dtype)]
    if profile.dtype in dtypes:
        difference = "it has the same parameters, but other modules use them, or in another order"
    elif dtypes:
        difference = f"its dtype differs, {dtypes[0]} in place of {profile.dtype}"
    elif len(plan.block_modes) != n_blocks:
        difference = f"it has {len(plan.block_modes)} blocks, this one {n_blocks}"
    elif made_for == _of_parameters(one_group, profile.dtype):
        difference = "its optimizer has a single group of parameters, this one several"
    else:
        difference = "its parameters or their optimizer groups differ"
    raise ValueError(f"the plan was made for another model than {profile.model}: {difference}; {_REMEDY}")


def refuse_other_world_size(plan: Plan, world_size: int) -> None:
    """Raise ValueError if ``plan`` was made for another number of ranks than ``world_size``."""
    if plan.world_size != world_size:
        raise ValueError(
            f"the plan was made for world_size={plan.world_size}, and here it is {world_size}: every rank has another "
            f"share of the model states; start {plan.world_size} process{'es' * (plan.world_size > 1)}, {_REMEDY}"
        )


def name_other_use(error: PlanError, plan: Plan, profile: ModelProfile) -> PlanError:
    """``error`` of a ``plan`` that does not fit, which also names the option that the plan was made for, if any."""
    planned_bytes = plan.host_bytes if error.where == "host" else plan.device_bytes
    if plan.accumulation == 1 < profile.accumulation:
        made_for = f"accumulation=1, and here it is {profile.accumulation}: make"
    elif plan.moment_dtype == "bfloat16" != profile.moment_dtype and planned_bytes <= error.available_bytes:
        made_for = f"moment_dtype=bfloat16, and here it is {profile.moment_dtype}: pass it here as well, or make"
    elif plan.chunked_loss and not profile.chunked_loss and error.where != "host":
        made_for = "chunked_loss=True, and here logits are whole: pass it here as well, or make"
    else:
        return error
    return replace(error, remedy=f"The plan was made for {made_for} a new plan. {error.remedy}", given=True)
