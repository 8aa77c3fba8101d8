"""bench.train: names of contestants, and what each of them means."""

from __future__ import annotations

import re

import pytest

from bench.train.__main__ import main
from bench.train.contestants import KINDS, VARIANTS, Contestant, default, parse, parse_all


@pytest.mark.parametrize(
    ("name", "contestant"),
    [
        ("protrain", Contestant(kind="protrain")),
        ("protrain-eager-unclipped", Contestant(kind="protrain", compile=False, clip=False)),
        ("protrain-unclipped-narrow", Contestant(kind="protrain", clip=False, narrow=True)),
        ("fsdp2-kept", Contestant(kind="fsdp2", checkpoint=False)),
        ("fsdp2-eager-kept-unclipped", Contestant(kind="fsdp2", compile=False, checkpoint=False, clip=False)),
        ("fsdp2-gathered", Contestant(kind="fsdp2", gathered=True)),
        ("fsdp2-unclipped-gathered-resident20", Contestant(kind="fsdp2", clip=False, gathered=True, resident=20)),
        ("fsdp2-resident", Contestant(kind="fsdp2", everything_resident=True)),
        (
            "fsdp2-gathered-prefetched-resident-checkpointed12",
            Contestant(kind="fsdp2", gathered=True, prefetched=True, everything_resident=True, checkpointed=12),
        ),
        ("fsdp2-prefetched3-summed", Contestant(kind="fsdp2", prefetched=True, ahead=3, own=("summed",))),
        ("zero3", Contestant(kind="zero3", compile=False)),
        ("zero3-superoffload", Contestant(kind="zero3", compile=False, own=("superoffload",))),
        (
            "llmq-kept-narrow-offloadedmoments-offloadedmasters",
            Contestant(
                kind="llmq",
                compile=False,
                checkpoint=False,
                narrow=True,
                own=("offloadedmoments", "offloadedmasters"),
            ),
        ),
        ("torchao", Contestant(kind="torchao", clip=False)),
    ],
)
def test_a_name_says_what_is_run(name: str, contestant: Contestant) -> None:
    assert parse(name) == contestant
    assert contestant.name == name


def test_the_help_tells_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert [variant for variant in VARIANTS if not re.search(rf"-{variant}\s+\(", said)] == []


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_defaults_are_valid(on_gpu: bool, gpus: int) -> None:
    names = default(on_gpu=on_gpu, gpus=gpus)
    contestants = parse_all(names)
    assert [contestant.name for contestant in contestants] == names.split(",")
    assert gpus == 1 or all(KINDS[contestant.kind].several_gpus for contestant in contestants)


def test_titles_tell_rows_apart() -> None:
    more = (
        "floor-unclipped,protrain-eager-unclipped,floor-eager-unclipped,zero3params,fsdp2-resident2,fsdp2-resident,"
        "fsdp2-resident-kept,fsdp2-resident-checkpointed2,fsdp2-resident-prefetched,fsdp2-resident-gathered,"
        "fsdp2-prefetched2,fsdp2-summed,zero3-superoffload,llmq,llmq-kept,llmq-narrow,llmq-normsrecomputed,"
        "llmq-offloadedvariances,llmq-offloadedmoments,llmq-offloadedmasters,llmq-offloadedmoments-zerocopied"
    )
    rows = parse_all(f"{default(on_gpu=True, gpus=1)},{more}")
    assert len({contestant.title for contestant in rows}) == len(rows)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("fsdp3", "there is no 'fsdp3'; known: protrain"),
        ("protrain-kept", "protrain has no variant 'kept'; it has eager, unclipped, narrow"),
        (
            "fsdp2-narrow",
            "fsdp2 has no variant 'narrow'; it has eager, kept, unclipped, gathered, prefetched, prefetchedN, resident",
        ),
        ("fsdp2-checkpointed", "fsdp2 has no variant 'checkpointed'; it has eager, kept, unclipped, gathered"),
        ("fsdp2-resident0", "fsdp2 has no variant 'resident0'"),
        ("fsdp2-resident2-resident", "fsdp2-resident2-resident says resident twice"),
        ("fsdp2-kept-checkpointed2", "fsdp2-kept-checkpointed2 checkpoints blocks and keeps them all"),
        ("llmq-kept-normsrecomputed", "llmq-kept-normsrecomputed checkpoints blocks and keeps them all"),
        ("fsdp2-prefetched,fsdp2-prefetched1", "fsdp2-prefetched is there twice"),
        ("zero2-superoffload", "zero2 has no variant 'superoffload'; it has eager, kept, unclipped"),
        ("protrain-resident2", "protrain has no variant 'resident2'; it has eager, unclipped, narrow"),
        ("torchao-unclipped", "torchao has no variant 'unclipped'; it has eager, kept"),
        ("fsdp2,fsdp2", "fsdp2 is there twice"),
        ("floor", "floor checkpoints the blocks that protrain does: name that before it"),
        ("protrain,floor-eager", "floor-eager checkpoints the blocks that protrain-eager does"),
    ],
)
def test_wrong_names_are_refused(names: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--contestants", names])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.count("\n") == 1
