"""Who takes part, by name: a kind, and the ways in which a row differs from that kind's usual configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to train."""

    title: str
    package: str = ""  # that must be installed
    needs_gpu: bool = False
    can_compile: bool = True
    can_keep: bool = True  # without checkpointing; False where a plan decides
    can_clip: bool = True
    can_narrow: bool = False  # Adam's moments to bf16
    can_gather: bool = False  # weights once for forward and backward
    can_place: bool = False  # blocks that are not offloaded, as many as the user says


KINDS = {
    "protrain": Kind(title="ProTrain", can_keep=False, can_narrow=True),
    "floor": Kind(title="forward and backward alone", can_keep=False),
    "resident": Kind(title="resident weights, fused AdamW"),
    "fsdp2": Kind(title="FSDP2, CPU offload", can_gather=True, can_place=True),
    # Their hooks on modules inside a block are Python that a graph cannot hold.
    "zero3": Kind(title="DeepSpeed ZeRO-3, optimizer offload", package="deepspeed", needs_gpu=True, can_compile=False),
    "zero3params": Kind(
        title="DeepSpeed ZeRO-3, parameter offload", package="deepspeed", needs_gpu=True, can_compile=False
    ),
    "zero2": Kind(title="DeepSpeed ZeRO-2, optimizer offload", package="deepspeed", needs_gpu=True),
    # Gradients leave for the host one by one inside backward, before a norm is known.
    "torchao": Kind(title="torchao CPUOffloadOptimizer", package="torchao", needs_gpu=True, can_clip=False),
}
VARIANTS = ("eager", "kept", "unclipped", "narrow", "gathered", "resident")


@dataclass(frozen=True, kw_only=True)
class Contestant(Record):
    """One row: how the model is trained.

    Without clipping ProTrain updates inside backward. The floor has the compiler setting and the activation modes of
    the ProTrain row with the same variants.
    """

    kind: str
    compile: bool = True
    checkpoint: bool = True
    clip: bool = True
    narrow: bool = False  # moments in bf16
    gathered: bool = False  # weights of offloaded blocks stay on the GPU from forward to backward
    resident: int = 0  # blocks that stay on the GPU with all their states

    @property
    def name(self) -> str:
        """As on the command line."""
        kind = KINDS[self.kind]
        marks = (
            "-eager" if kind.can_compile and not self.compile else "",
            "-kept" if kind.can_keep and not self.checkpoint else "",
            "-unclipped" if kind.can_clip and not self.clip else "",
            "-narrow" if self.narrow else "",
            "-gathered" if self.gathered else "",
            f"-resident{self.resident}" if self.resident else "",
        )
        return self.kind + "".join(marks)

    @property
    def title(self) -> str:
        """For tables: what it is, and where it differs."""
        kind = KINDS[self.kind]
        if self.planned_by is not None:
            return f"{kind.title} (as {self.planned_by.name})"
        parts = ["compiled" if self.compile else "eager"]
        if kind.can_keep and not self.checkpoint:
            parts.append("nothing checkpointed")
        if not self.clip:
            parts.append("updates inside backward" if self.kind == "protrain" else "no clipping")
        if self.narrow:
            parts.append("moments in bf16")
        if self.gathered:
            parts.append("weights gathered once")
        if self.resident:
            parts.append(f"{self.resident} blocks resident")
        return f"{kind.title} ({', '.join(parts)})"

    @property
    def planned_by(self) -> Contestant | None:
        """The ProTrain row whose plan says which blocks the floor checkpoints; None for all others."""
        if self.kind != "floor":
            return None
        return Contestant(kind="protrain", compile=self.compile, clip=self.clip)


def parse(text: str) -> Contestant:
    """The contestant of a name like ``fsdp2-eager-kept``. ValueError when there is none."""
    name, *marks = text.strip().split("-")
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"--contestants: there is no {name!r}; known: {', '.join(KINDS)}")
    possible = kind.can_compile, kind.can_keep, kind.can_clip, kind.can_narrow, kind.can_gather, kind.can_place
    allowed = dict(zip(VARIANTS, possible, strict=True))
    resident = 0
    for mark in marks:
        placed = re.fullmatch("resident([1-9][0-9]*)", mark)
        if placed is not None and kind.can_place and not resident:
            resident = int(placed[1])
        elif mark == "resident" or not allowed.get(mark, False):
            known = [variant + "N" * (variant == "resident") for variant in VARIANTS if allowed[variant]]
            raise ValueError(f"--contestants: {name} has no variant {mark!r}; it has {', '.join(known)}")
    return Contestant(
        kind=name,
        compile=kind.can_compile and "eager" not in marks,
        checkpoint="kept" not in marks,
        clip=kind.can_clip and "unclipped" not in marks,
        narrow="narrow" in marks,
        gathered="gathered" in marks,
        resident=resident,
    )


def parse_all(text: str) -> tuple[Contestant, ...]:
    """Comma-separated names. ValueError also for one named twice, and for a floor not preceded by its ProTrain row."""
    found: list[Contestant] = []
    for part in text.split(","):
        contestant = parse(part)
        if contestant in found:
            raise ValueError(f"--contestants: {contestant.name} is there twice")
        planner = contestant.planned_by
        if planner is not None and planner not in found:
            raise ValueError(
                f"--contestants: {contestant.name} checkpoints the blocks that {planner.name} does: name that before it"
            )
        found.append(contestant)
    return tuple(found)


DEFAULT = (
    "protrain,floor,fsdp2,protrain-unclipped,fsdp2-unclipped,fsdp2-gathered,fsdp2-eager,fsdp2-kept,protrain-eager,"
    "floor-eager,zero2,zero3,torchao,resident,resident-kept"
)
DEFAULT_ON_CPU = "protrain-eager,floor-eager,resident-eager,fsdp2-eager"
