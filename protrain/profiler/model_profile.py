"""ModelProfile: what one training step of a model needs, as the trace saw it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class ParameterRecord(Record):
    """One distinct floating-point parameter; a tied parameter appears once, under its first name."""

    name: str  # first name in definition order, as model.named_parameters() gives it
    shape: tuple[int, ...]
    group: int  # index of its optimizer group; -1 when frozen or in no group

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class UnitRecord(Record):
    """A module whose parameters are fetched together: a block, or an outer module with parameters of its own.

    Units are listed in execution order of their first call; units never called in the trace come last.
    """

    name: str  # module path; "" is the model itself
    block: int | None  # index into ModelProfile.blocks
    parameters: tuple[int, ...]  # indexes into ModelProfile.parameters that it uses; tied ones occur in several
    within: tuple[int, ...] = ()  # indexes of the units that are active while it is called: what they hold stays held


@dataclass(frozen=True, kw_only=True)
class BlockRecord(Record):
    """One repeated layer, in execution order. Bytes and times are of one training step (all its calls)."""

    name: str
    saved_bytes: int  # what autograd keeps when the block is neither checkpointed nor swapped, inputs excluded
    saved_tensors: int  # distinct storages among saved_bytes
    forward_peak_bytes: (
        int  # most allocated during a forward that keeps what it saves, above what was there; of one call
    )
    input_bytes: int  # computed with gradients, given to it alone: kept while it is checkpointed, if not moved
    output_bytes: int
    forward_ms: float
    backward_ms: float
    forward_flops: int  # of products, convolutions and attention; of scores under a causal mask, half
    forward_traffic_bytes: int = 0  # read and written by what is neither a product nor attention
    recompute_ms: float | None = None  # until the last saved tensor is there; None: not measured
    unsaved_input_bytes: int = 0  # of input_bytes, what only a checkpoint keeps; no more than saved_bytes
    held_input_bytes: int = 0  # of input_bytes, what others than blocks keep: moving them frees nothing
    saved_bool_bytes: int = 0  # of saved_bytes, storages of which bools alone are saved
    attention_bytes: int = 0  # of saved_bytes, what attention operators put out
    attention_flops: int = 0  # of forward_flops, those of the same operators
    attention_ms: float = 0.0  # that they take
    recomputes_attention: bool = True

    @property
    def packed_bytes(self) -> int:
        """``saved_bytes`` with bools as bits."""
        return self.saved_bytes - self.saved_bool_bytes + -(-self.saved_bool_bytes // 8)

    def keeping_attention(self) -> BlockRecord:
        """The same with what attention puts out kept beside the inputs."""
        recompute_ms = self.forward_ms if self.recompute_ms is None else self.recompute_ms
        return replace(
            self,
            input_bytes=self.input_bytes + self.attention_bytes,
            unsaved_input_bytes=min(self.saved_bytes, self.unsaved_input_bytes + self.attention_bytes),
            recompute_ms=max(0.0, recompute_ms - self.attention_ms),
            recomputes_attention=False,
        )


@dataclass(frozen=True, kw_only=True)
class SegmentRecord(Record):
    """A stretch of the step between two boundaries of blocks or of units between them, with every block checkpointed.

    ``live_bytes`` is what is allocated when it starts and ``peak_bytes`` the most allocated above that while it runs,
    parameters of blocks and optimizer states excluded. In a block's backward segment the peak covers recomputation and
    backward. Parameters' gradients that are still held count.

    Of the inputs of a block's forward, others than a checkpoint hold ``held_bytes`` for longer, a list of hidden states
    say, up to the stretch of index ``held_until``. What is held until backward is among the block's
    ``held_input_bytes`` in place of these.
    """

    phase: str  # "forward" or "backward"
    block: int | None  # None: between blocks
    live_bytes: int
    peak_bytes: int
    duration_ms: float
    held_bytes: int = 0
    held_until: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelProfile(Record):
    """The model as the planner sees it (paper section 4: memory-aware runtime profiling)."""

    file_kind = "the profile of a model"

    model: str  # class name
    dtype: str  # "bfloat16", "float16" or "float32": of the managed parameters
    device: str  # device type of the trace: "cuda", "cpu" or "meta"
    batch_shapes: dict[str, tuple[int, ...]]  # name (or position) in the example batch -> shape
    tokens: int  # elements of the first integer tensor in the batch, or its first dimension when there is none
    buffer_bytes: int  # buffers and unmanaged (non-floating-point) parameters, on the device throughout
    parameters: tuple[ParameterRecord, ...]  # definition order
    units: tuple[UnitRecord, ...]
    calls: tuple[int, ...]  # unit indexes in the order of one forward
    blocks: tuple[BlockRecord, ...]
    segments: tuple[SegmentRecord, ...]
    output_bytes: int = 0  # returned by forward: a loop may hold it until the next one is over
    compiled: bool = False  # the blocks
    chunked_loss: bool = False  # logits are never whole, and the head's gradients are made in forward
    # Of how it is trained; nothing of the trace depends on these.
    accumulation: int = 1  # backward() calls of a step, each of such a batch
    moment_dtype: str = "float32"  # or "bfloat16": of Adam's two moments

    def keeping_attention(self) -> ModelProfile:
        """The same with every recomputed block keeping what attention puts out where it keeps its inputs."""
        calls = Counter(segment.block for segment in self.segments if segment.phase == "forward")
        kept_bytes = {index: block.attention_bytes // max(1, calls[index]) for index, block in enumerate(self.blocks)}
        alive_bytes = 0  # the trace recomputes all blocks
        segments: list[SegmentRecord] = []
        for segment in self.segments:
            more = 0 if segment.block is None else kept_bytes[segment.block]
            forward = segment.phase == "forward"
            # Forward may peak behind attention, whose output was gone by then. Backward peaks where all that the block
            # saves is there, this output too, which is among what is alive now.
            peak_bytes = segment.peak_bytes + more if forward else max(0, segment.peak_bytes - more)
            segments.append(replace(segment, live_bytes=segment.live_bytes + alive_bytes, peak_bytes=peak_bytes))
            alive_bytes += more if forward else -more
        blocks = tuple(block.keeping_attention() for block in self.blocks)
        return replace(self, blocks=blocks, segments=tuple(segments))

    @property
    def n_parameters(self) -> int:
        """Elements of all managed parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def n_trainable(self) -> int:
        """Elements of the parameters that an optimizer group holds."""
        return sum(parameter.numel for parameter in self.parameters if parameter.group >= 0)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def moment_bytes(self) -> int:
        """Bytes of one element of one moment."""
        return 4 if self.moment_dtype == "float32" else 2

    def rows(self) -> list[tuple[str, str]]:
        """Rows of the printed table, with the parts counted instead of listed."""
        return [
            ("parameters", f"{self.n_parameters:,} ({self.n_trainable:,} trainable)"),
            ("blocks", str(len(self.blocks))),
            *[row for row in super().rows() if row[0] not in ("parameters", "blocks")],
        ]
