"""The plans that the ideas of the paper are compared by differ in one thing only, and train alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.planner import ideas
from bench.planner.chunk_order import ChunkOrder, chunks_in
from bench.planner.ideas import FILE, NARROW, Ideas, main, planned
from bench.swap.training import Training, profiled
from protrain.hardware.detection import detect

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("profiled_once")


@pytest.mark.slow
def test_a_run_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the command's cases for a GPU take minutes
    chosen = [0, 4]  # the others differ from them in the order of chunks, which the next test compares
    only = ",".join(map(str, chosen))
    assert main(["--only", only, "--rounds", "1", "--steps", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for index, found in zip(chosen, Ideas.load(tmp_path / FILE).comparisons, strict=True):
        comparison = NARROW[index]
        assert found.case == comparison.case
        assert {way.group for way in found.ways} == {0}, "all plans fit the memory at once"
        assert [way.name for way in found.ways] == [way.name for way in comparison.ways]
        plans = [way.measured.plan for way in found.ways]
        assert len({(plan.n_persist, plan.n_buffer, plan.n_speculate, plan.chunk_elements) for plan in plans}) == 1
        assert 0 < plans[0].n_persist < plans[0].n_chunks
        for way in found.ways:
            assert way.measured.median_ms > 0
            assert way.measured.device_bytes <= way.measured.plan.device_bytes
            assert way.name in printed


def test_plans_that_do_not_fit_at_once_are_measured_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison, hardware = NARROW[0], detect(CPU)
    profile = profiled(comparison.case, CPU)
    swapped, recomputed, kept = (planned(comparison, way, profile, hardware).device_bytes for way in comparison.ways)
    assert recomputed < swapped < kept < swapped + recomputed
    monkeypatch.setattr(ideas, "detect", lambda device: replace(hardware, device_bytes=swapped))
    found = ideas.compare(comparison, CPU, rounds=1, steps=1, until=float("inf"))
    assert [way.group for way in found.ways] == [0, 1], "the plan that keeps all is too large"
    assert "all blocks kept: the plan does not fit" in capsys.readouterr().err
    assert not ideas.compare(comparison, CPU, rounds=1, steps=1, until=0.0).ways


# By order of chunks: a block whose weights persist, and one whose weights do not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("idea", "blocks"),
    [
        ("first persist", {ChunkOrder.EXECUTION: (0, 7), ChunkOrder.LAST_PERSIST: (7, 0)}),
        # The block that runs first is defined last, and so its name is layers.7.
        ("execution order", {ChunkOrder.EXECUTION: (7, 0), ChunkOrder.DEFINITION: (0, 7)}),
    ],
)
def test_the_order_of_chunks_decides_which_persist_and_changes_no_loss(
    idea: str, blocks: dict[ChunkOrder, tuple[int, int]]
) -> None:
    comparison = next(one for one in NARROW if one.idea == idea)
    profile, hardware = profiled(comparison.case, CPU), detect(CPU)
    assert [way.order for way in comparison.ways] == list(blocks)
    losses = []
    for way in comparison.ways:
        plan = planned(comparison, way, profile, hardware)
        with chunks_in(way.order, n_persist=plan.n_persist):
            training = Training(comparison.case, plan, CPU)
        training.run(3)
        losses.append([float(loss) for loss in training.losses])
        persistent = {
            record.name: training.optimizer._engine.members[index].chunk.persistent
            for index, record in enumerate(profile.parameters)
        }
        here, away = (f"model.layers.{block}.mlp.up_proj.weight" for block in blocks[way.order])
        assert persistent[here]
        assert not persistent[away]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_blocks_that_are_defined_in_reverse_run_first_to_last() -> None:
    case = next(one.case for one in NARROW if one.case.defined_in_reverse)
    profile = profiled(case, CPU)
    ran = [profile.units[unit].name for unit in profile.calls]
    in_order = [f"model.layers.{at}" for at in reversed(range(case.layers))]
    assert ran == ["model.embed_tokens", *in_order, "model.norm", "lm_head"]
    names = [record.name for record in profile.parameters]
    assert names.index("model.layers.0.mlp.up_proj.weight") < names.index("model.layers.7.mlp.up_proj.weight")
