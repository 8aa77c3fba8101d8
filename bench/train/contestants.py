"""Who takes part, by name: a kind, and the ways in which a row differs from that kind's usual configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from protrain.common.records import Record


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way to train."""

    title: str
    variants: tuple[str, ...]  # that a name may carry; N stands for a number
    packages: tuple[str, ...] = ()  # that must be installed
    needs_gpu: bool = False
    several_gpus: bool = False  # whether it runs with more than one here
    one_process: bool = False  # whether it has one process for all GPUs, not one for each
    is_client: bool = False  # whether it is a client of ProTrain, with its own loop
    sequences: int = 1  # of a row of the batch that pass through the trained model


def _client(title: str, *packages: str, sequences: int = 1) -> Kind:
    return Kind(
        title=title, variants=("plain",), packages=packages, several_gpus=True, is_client=True, sequences=sequences
    )


# What LLM.Q alone has, as tables say it.
OWN = {
    "normsrecomputed": "norms and SwiGLU recomputed",
    "offloadedvariances": "second moments offloaded",
    "offloadedmoments": "moments offloaded",
}
_FSDP2 = ("gathered", "prefetched", "prefetchedN", "resident", "residentN", "checkpointedN")
KINDS = {
    "protrain": Kind(title="ProTrain", variants=("eager", "unclipped", "narrow"), several_gpus=True),
    "floor": Kind(title="forward and backward alone", variants=("eager", "unclipped"), several_gpus=True),
    "resident": Kind(title="resident weights, fused AdamW", variants=("eager", "kept", "unclipped")),
    "fsdp2": Kind(
        title="FSDP2, CPU offload",
        variants=("eager", "kept", "unclipped", *_FSDP2),
        several_gpus=True,
    ),
    # Their hooks on modules inside a block are Python that a graph cannot hold, so they are never compiled.
    "zero3": Kind(
        title="DeepSpeed ZeRO-3, optimizer offload",
        variants=("kept", "unclipped"),
        packages=("deepspeed",),
        needs_gpu=True,
        several_gpus=True,
    ),
    "zero3params": Kind(
        title="DeepSpeed ZeRO-3, parameter offload",
        variants=("kept", "unclipped"),
        packages=("deepspeed",),
        needs_gpu=True,
        several_gpus=True,
    ),
    "zero2": Kind(
        title="DeepSpeed ZeRO-2, optimizer offload",
        variants=("eager", "kept", "unclipped"),
        packages=("deepspeed",),
        needs_gpu=True,
        several_gpus=True,
    ),
    # Gradients leave for the host one by one inside backward, before a norm is known, so nothing is clipped.
    "torchao": Kind(
        title="torchao CPUOffloadOptimizer", variants=("eager", "kept"), packages=("torchao",), needs_gpu=True
    ),
    "llmq": Kind(
        title="LLM.Q",
        variants=("kept", "unclipped", "narrow", *OWN),
        packages=("pyllmq",),
        needs_gpu=True,
        several_gpus=True,
        one_process=True,
    ),
    "loop": _client("a loop"),
    "accelerate": _client("Accelerate", "accelerate"),
    "lightning": _client("Lightning's Trainer", "lightning"),
    "trainer": _client("transformers' Trainer", "accelerate"),
    "sft": _client("TRL's SFTTrainer", "trl", "datasets"),
    "dpo": _client("TRL's DPOTrainer", "trl", "datasets", sequences=2),
    "sentences": _client("SentenceTransformerTrainer", "sentence_transformers", "datasets", sequences=2),
}
WITH_LORA = ("protrain", "floor", "resident")  # the kinds that also train an adapter
WITH_FLOAT8 = (*WITH_LORA, "fsdp2")  # the kinds whose layers also multiply in float8


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
    gathered: bool = False  # weights are gathered once, and stay on the GPU from forward to backward
    prefetched: bool = False  # the weights of the next blocks are gathered before this one computes
    ahead: int = 1  # of how many blocks, where ``prefetched``
    everything_resident: bool = False  # nothing is offloaded
    resident: int = 0  # blocks that stay on the GPU with all their states, where the rest is offloaded
    checkpointed: int = 0  # how many of the first blocks are checkpointed; 0: all or none, as ``checkpoint`` says
    own: tuple[str, ...] = ()  # of OWN
    plain: bool = False  # a client without ProTrain

    @property
    def is_ours(self) -> bool:
        """Whether ProTrain trains."""
        return self.kind == "protrain" or (KINDS[self.kind].is_client and not self.plain)

    @property
    def name(self) -> str:
        """As on the command line."""
        variants = KINDS[self.kind].variants
        marks = (
            "-eager" if "eager" in variants and not self.compile else "",
            "-kept" if "kept" in variants and not self.checkpoint else "",
            "-unclipped" if "unclipped" in variants and not self.clip else "",
            "-narrow" if self.narrow else "",
            "-gathered" if self.gathered else "",
            f"-prefetched{self.ahead if self.ahead > 1 else ''}" if self.prefetched else "",
            "-resident" if self.everything_resident else "",
            f"-resident{self.resident}" if self.resident else "",
            f"-checkpointed{self.checkpointed}" if self.checkpointed else "",
            *(f"-{mark}" for mark in self.own),
            "-plain" if self.plain else "",
        )
        return self.kind + "".join(marks)

    @property
    def title(self) -> str:
        """For tables: what it is, and where it differs."""
        kind = KINDS[self.kind]
        if self.planned_by is not None:
            return f"{kind.title} (as {self.planned_by.name})"
        if kind.is_client:
            return f"{kind.title} ({'plain' if self.plain else 'on ProTrain'})"
        parts = ["C++" if self.kind == "llmq" else "compiled" if self.compile else "eager"]
        if "kept" in kind.variants and not self.checkpoint:
            parts.append("nothing checkpointed")
        if self.checkpointed:
            parts.append(f"{self.checkpointed} blocks checkpointed")
        if not self.clip:
            parts.append("updates inside backward" if self.kind == "protrain" else "no clipping")
        if self.narrow:
            parts.append("moments in bf16")
        if self.gathered:
            parts.append("weights gathered once")
        if self.prefetched:
            parts.append("prefetched by one block" if self.ahead == 1 else f"prefetched by {self.ahead} blocks")
        if self.resident:
            parts.append(f"{self.resident} blocks resident")
        parts.extend(OWN[mark] for mark in self.own)
        title = "FSDP2, everything resident" if self.everything_resident else kind.title
        return f"{title} ({', '.join(parts)})"

    def checkpoints(self, blocks: int) -> list[bool]:
        """Whether each of so many blocks is checkpointed, where no plan decides. ValueError when there are too few."""
        if max(self.checkpointed, self.resident) > blocks:
            raise ValueError(f"{self.name}: the model has {blocks} blocks")
        return [index < self.checkpointed if self.checkpointed else self.checkpoint for index in range(blocks)]

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
    numbers: dict[str, int] = {}  # by the word of each mark; 0: it has no number
    for mark in marks:
        numbered = re.fullmatch("([a-z]+)([1-9][0-9]*)", mark)
        word, number = (numbered[1], int(numbered[2])) if numbered else (mark, 0)
        if (word + "N" if number else word) not in kind.variants:
            raise ValueError(f"--contestants: {name} has no variant {mark!r}; it has {', '.join(kind.variants)}")
        if word in numbers:
            raise ValueError(f"--contestants: {text.strip()} says {word} twice")
        numbers[word] = number
    if "kept" in numbers and ("checkpointed" in numbers or "normsrecomputed" in numbers):
        raise ValueError(f"--contestants: {text.strip()} checkpoints blocks and keeps them all: leave one of both out")
    return Contestant(
        kind=name,
        compile="eager" in kind.variants and "eager" not in numbers,
        checkpoint=not (kind.is_client or "kept" in numbers),
        clip=kind.is_client or ("unclipped" in kind.variants and "unclipped" not in numbers),
        narrow="narrow" in numbers,
        gathered="gathered" in numbers,
        prefetched="prefetched" in numbers,
        ahead=numbers.get("prefetched") or 1,
        everything_resident=numbers.get("resident") == 0,
        resident=numbers.get("resident", 0),
        checkpointed=numbers.get("checkpointed", 0),
        own=tuple(mark for mark in OWN if mark in numbers),
        plain="plain" in numbers,
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


_DEFAULT = (
    "protrain,floor,fsdp2,fsdp2-prefetched,protrain-unclipped,fsdp2-unclipped,fsdp2-gathered,fsdp2-eager,fsdp2-kept,"
    "protrain-eager,floor-eager,zero2,zero3,torchao,resident,resident-kept"
)
_DEFAULT_ON_SEVERAL = "protrain,floor,fsdp2-resident,fsdp2-gathered-resident,fsdp2,protrain-unclipped,fsdp2-unclipped"
_DEFAULT_ON_CPU = "protrain-eager,floor-eager,resident-eager,fsdp2-eager"
_DEFAULT_ON_SEVERAL_CPU = "protrain-eager,floor-eager,fsdp2-eager,fsdp2-eager-resident"


def default(*, on_gpu: bool, gpus: int, lora: bool = False) -> str:
    """Names of those who take part when nobody is named."""
    if lora:
        return ",".join(WITH_LORA if gpus == 1 else WITH_LORA[:2])
    if gpus > 1:
        return _DEFAULT_ON_SEVERAL if on_gpu else _DEFAULT_ON_SEVERAL_CPU
    return _DEFAULT if on_gpu else _DEFAULT_ON_CPU
