"""ModelProfile: the memory, time and order of one training step of a model, as the trace measured them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from protrain.common.records import Record

_Sized = TypeVar("_Sized", "BlockRecord", "SegmentRecord")


@dataclass(frozen=True, kw_only=True)
class ParameterRecord(Record):
    """One floating-point parameter. A tied parameter appears once, under its first name."""

    name: str  # its first name in model.named_parameters()
    shape: tuple[int, ...]
    group: int  # index of its optimizer group; -1 if it is frozen or in no group

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class UnitRecord(Record):
    """A module whose parameters are fetched together: a block, or any other module that owns parameters directly.

    Units are listed in the execution order of their first calls. Units that the trace never called come last.
    """

    name: str  # module path; "" is the model itself
    block: int | None  # index into ModelProfile.blocks
    parameters: tuple[int, ...]  # indexes of the parameters it uses; a tied one occurs in several units
    # indexes of the units whose calls are active around its call; they keep what they hold
    within: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockRecord(Record):
    """One repeated layer.

    Blocks are listed in execution order. Bytes and times are those of one training step, with all calls of the block.
    """

    name: str
    saved_bytes: int  # what autograd saves if the block is neither checkpointed nor swapped, without its inputs
    saved_tensors: int  # the number of distinct storages in saved_bytes
    # The most that one call allocates above what was there before, in a forward that keeps what autograd saves. It is
    # no less than all that autograd saves, also for gradients that the block computes itself.
    forward_peak_bytes: int
    # Inputs with a gradient that only this block is given. They stay on the GPU while the block is checkpointed, unless
    # they are offloaded.
    input_bytes: int
    output_bytes: int
    forward_ms: float
    backward_ms: float
    recompute_ms: float  # until the last saved tensor exists
    forward_flops: int  # of products, convolutions and attention; under a causal mask, half of the scores
    forward_traffic_bytes: int = 0  # bytes read and written by the other operators
    # What only a checkpoint keeps: a part of input_bytes, and what lies or is copied in modules; at most saved_bytes.
    unsaved_input_bytes: int = 0
    # the part of input_bytes that code outside the blocks keeps too, so offloading frees nothing
    held_input_bytes: int = 0
    attention_bytes: int = 0  # the part of saved_bytes that attention operators put out
    attention_flops: int = 0  # the part of forward_flops that is attention
    attention_ms: float = 0.0  # the time of the attention operators
    recomputes_attention: bool = True
    collective: bool = False  # whether its forward has collectives of its own, which all ranks must begin together

    def keeping_attention(self) -> BlockRecord:
        """This record for a block that keeps its attention outputs along with its inputs when it is checkpointed."""
        return replace(
            self,
            input_bytes=self.input_bytes + self.attention_bytes,
            unsaved_input_bytes=min(self.saved_bytes, self.unsaved_input_bytes + self.attention_bytes),
            recompute_ms=max(0.0, self.recompute_ms - self.attention_ms),
            recomputes_attention=False,
        )


@dataclass(frozen=True, kw_only=True)
class SegmentRecord(Record):
    """A part of the step between two boundaries of blocks, or of units between blocks, with every block checkpointed.

    ``live_bytes`` is what is allocated when the segment starts. ``peak_bytes`` is the most that is allocated above that
    while it runs. Parameters of blocks and optimizer states are not counted; parameters' gradients count as long as
    they are held. In the backward segment of a block, the peak covers recomputation and backward.

    ``held_bytes`` are inputs of a block's forward that code outside the checkpoint holds for a while, for example in a
    list of hidden states. It holds them up to the segment of index ``held_until``. Inputs that are held until backward
    are counted in the block's ``held_input_bytes`` instead.
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
    """What the planner knows of a model (paper section 4: memory-aware runtime profiling)."""

    file_kind = "the profile of a model"

    model: str  # class name
    dtype: str  # the type of the managed parameters: "bfloat16", "float16" or "float32"
    device: str  # the device type that the trace ran on: "cuda", "cpu" or "meta"
    batch_shapes: dict[str, tuple[int, ...]]  # from the name or position of an input in the example batch to its shape
    # the elements of the first integer tensor in the batch; without one, the first dimension of the first tensor
    tokens: int
    buffer_bytes: int  # buffers and parameters that are not floating-point, which stay on the device
    parameters: tuple[ParameterRecord, ...]  # in definition order
    units: tuple[UnitRecord, ...]
    calls: tuple[int, ...]  # indexes of units in the order in which one forward calls them
    blocks: tuple[BlockRecord, ...]
    segments: tuple[SegmentRecord, ...]
    output_bytes: int = 0  # what forward returns; a training loop may hold it until the next forward is over
    compiled: bool = False  # whether the blocks are compiled
    chunked_loss: bool = False  # whether the loss is computed piece by piece, so that the logits never exist whole
    # The rest says how the model is trained. The trace does not depend on it.
    accumulation: int = 1  # micro-batches (backward() calls) in a step
    moment_dtype: str = "float32"  # the type of Adam's two moments: "float32" or "bfloat16"
    step_during_backward: bool = False  # whether updates are made inside backward

    def __post_init__(self) -> None:
        """Refuse a step without micro-batches."""
        if self.accumulation < 1:
            raise ValueError(f"ModelProfile.accumulation must be at least 1, not {self.accumulation!r}")

    def keeping_attention(self) -> ModelProfile:
        """This profile if every checkpointed block keeps its attention outputs along with its inputs."""
        calls = Counter(segment.block for segment in self.segments if segment.phase == "forward")
        kept_bytes = {index: block.attention_bytes // max(1, calls[index]) for index, block in enumerate(self.blocks)}
        alive_bytes = 0  # attention outputs kept by the blocks before; in the trace all blocks are recomputed
        segments: list[SegmentRecord] = []
        for segment in self.segments:
            more = 0 if segment.block is None else kept_bytes[segment.block]
            forward = segment.phase == "forward"
            # The peak of forward may come after attention, when the trace had freed its output; so the kept output adds
            # to it. The peak of backward comes when all that the block saves is there, which includes this output; so
            # it is not counted twice.
            peak_bytes = segment.peak_bytes + more if forward else max(0, segment.peak_bytes - more)
            segments.append(replace(segment, live_bytes=segment.live_bytes + alive_bytes, peak_bytes=peak_bytes))
            alive_bytes += more if forward else -more
        blocks = tuple(block.keeping_attention() for block in self.blocks)
        return replace(self, blocks=blocks, segments=tuple(segments))

    def at_batch(self, n_sequences: int, other: ModelProfile) -> ModelProfile:
        """About the profile of a batch of ``n_sequences``.

        Operations and bytes lie on a line through those of this profile and of ``other``, the profile of another batch.
        They are not in proportion to the batch: the gradients of weights, which add 224 MiB to the 172 MiB of each
        sequence of 1,024 tokens at the peak of a block's backward in llama3-8b, are the same for any, as is the peak of
        a loss in pieces.
        """
        share = (n_sequences - other.n_sequences) / (self.n_sequences - other.n_sequences)

        def on_line(record: _Sized, other: _Sized) -> _Sized:
            sizes = {
                name: max(0, round(share * size + (1 - share) * getattr(other, name)))
                for name, size in vars(record).items()
                if name.endswith(("_bytes", "_flops"))
            }
            return replace(record, **sizes)

        factor = n_sequences / self.n_sequences
        return replace(
            self,
            tokens=round(factor * self.tokens),
            batch_shapes={name: (n_sequences, *shape[1:]) for name, shape in self.batch_shapes.items()},
            output_bytes=round(factor * self.output_bytes),
            blocks=tuple(map(on_line, self.blocks, other.blocks)),
            segments=tuple(map(on_line, self.segments, other.segments)),
        )

    @property
    def n_sequences(self) -> int:
        """The sequences of the batch, by the first dimension of its first input that has one; 0 if none has."""
        return next((shape[0] for shape in self.batch_shapes.values() if shape), 0)

    @property
    def n_parameters(self) -> int:
        """The number of elements of all managed parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def n_trainable(self) -> int:
        """The number of elements of the parameters that belong to an optimizer group."""
        return sum(parameter.numel for parameter in self.parameters if parameter.group >= 0)

    @property
    def enclosing(self) -> tuple[int, ...]:
        """Indexes of the units whose calls enclose those of others, in ascending order."""
        return tuple(sorted({outer for unit in self.units for outer in unit.within}))

    @property
    def element_bytes(self) -> int:
        """The bytes of one weight element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def moment_bytes(self) -> int:
        """The bytes of one element of one moment."""
        return 4 if self.moment_dtype == "float32" else 2

    def rows(self) -> list[tuple[str, str]]:
        """The rows of the printed table, which counts parameters and blocks and does not list them."""
        return [
            ("parameters", f"{self.n_parameters:,} ({self.n_trainable:,} trainable)"),
            ("blocks", str(len(self.blocks))),
            *[row for row in super().rows() if row[0] not in ("parameters", "blocks")],
        ]
