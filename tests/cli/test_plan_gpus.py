"""`protrain plan --gpus`: a plan for several GPUs of one machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from protrain.hardware.shipped import load
from protrain.planning import Comparison, Plan
from tests.cli.test_main import run
from tests.cli.test_plan import TINY, by_label

TIGHT = ["--device-memory", "800MiB", "--host-memory", "1GiB", "--no-compile"]


def test_several_gpus_share_the_states_and_the_host(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture, out_file = tmp_path / "step.png", tmp_path / "plan.json"
    argv = [*TINY, *TIGHT, "--gpus", "4"]
    status, out, err = run(capsys, *argv, "--picture", str(picture), "--out", str(out_file))
    assert status == 0, err
    first, second, third, _, *rows = out.splitlines()
    assert f"{first}{second}" == (
        "fits on NVIDIA GeForce RTX 3090 in a machine with 1 GiB of RAM (as given), 4  GPUs with 1/4 of the states "
        "each, host memory a GPU 202 MiB, rates composed"
    )
    assert "256 tokens a step" in third, "4 of 2 x 32"
    said = by_label(rows[: rows.index("")], 18)
    assert said["host memory a GPU"].endswith("of the 202 MiB for training")
    assert said["GPU memory"].endswith("of 800 MiB")
    assert said["model states"].startswith("shards of")
    gathers, reductions, computing = said["collectives"].split(", ")
    assert (gathers, reductions) == ("gathers 6.3 GB/s (composed)", "reductions 6.1 GB/s (composed)")
    assert computing == "computing beside them 79% (composed)"
    plan = Plan.load(out_file)
    assert plan.world_size == 4
    assert f"{4 * 64 / plan.step_ms * 1e3:,.0f} tokens/s" in said["step"]
    lanes = [line.split("  ")[0] for line in out.splitlines()]
    assert {"gathers", "reductions"} <= set(lanes)
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_other_answers_are_for_several_gpus_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *TINY, *TIGHT, "--gpus", "2", "--explain")
    assert status == 0, err
    assert "device memory a GPU" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_nodes_are_named_first_with_what_is_assumed_of_their_network(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [*TINY, *TIGHT, "--gpus", "2", "--nodes", "2"]
    status, out, err = run(capsys, *nodes)
    assert status == 0, err
    assert " ".join(out.split()).startswith(
        "fits on 2 nodes of NVIDIA GeForce RTX 3090 in a machine with 1 GiB of RAM (as given), 1.25 GB/s of network "
        "each (assumed), 4 GPUs with 1/4 of the states each, host memory a GPU 403 MiB, rates composed"
    )
    assert "gathers 1.25 GB/s (composed), reductions 0.938 GB/s (composed)" in " ".join(out.split())
    assert "of the 403 MiB" in out, "each node has all of --host-memory, for two GPUs"
    limits = ["--network-gbps", "8", "--device-memory", "737MiB", "--host-memory", "24MiB"]
    status, out, err = run(capsys, *nodes, "--max-model", *limits)
    assert status == 0, err
    machine = "2 nodes of NVIDIA GeForce RTX 3090 in a machine with 24 MiB of RAM (as given), 8 GB/s of"
    assert " ".join(out.split()).startswith(machine)
    assert "world_size=4" in out
    status, _, err = run(capsys, "plan", "tiny", "--device", "cpu", "--nodes", "2", "--batch", "1", "--seq", "16")
    assert (status, "give --network-gbps" in err) == (2, True)


def test_machines_are_compared_in_one_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    replace(load("rtx3090"), device_bytes=2**20, all_gather_gbps=None).save("mine.json")
    tiny = ["plan", "tiny", "--batch", "2", "--sequence", "32", "--no-compile"]
    machines = "h100x1,rtx3090x4,a100x8x2,mine.jsonx2"
    out_file = tmp_path / "found.json"
    status, out, err = run(capsys, *tiny, "--compare", machines, "--out", str(out_file))
    assert status == 0, err
    title, table, *_ = out.split("\n\n")
    said, rows = " ".join(title.split()), table.splitlines()[1:]
    assert "a100x8x2: 2 nodes of NVIDIA A100-SXM4-80GB" in said
    assert "200 GB/s of network each (assumed), 16 GPUs with" in said
    assert max(map(len, out.splitlines())) <= 80
    found = Comparison.load(out_file)
    assert {*found.machines} == {*machines.split(",")}
    assert {name: each.machine.gpus for name, each in found.machines.items()} == {
        **{"h100x1": 1, "rtx3090x4": 4, "a100x8x2": 16, "mine.jsonx2": 2}
    }
    speeds = [each.tokens_per_s or 0.0 for each in found.machines.values()]
    assert speeds == sorted(speeds, reverse=True), "the fastest comes first"
    for (name, each), row in zip(list(found.machines.items())[:3], rows, strict=False):
        assert each.tokens_per_s is not None
        assert row.split()[:4] == [
            *(name, "yes", f"{each.tokens_per_s:,.0f}", f"{each.tokens_per_s / each.machine.gpus:,.0f}")
        ]
    assert rows[3].split() == ["mine.jsonx2", "no", "-", "-", "-", "GPU", "memory"]
    alone = run(capsys, *tiny, "--hardware", "rtx3090", "--gpus", "4", "--json")[1]
    assert found.machines["rtx3090x4"].plan == Plan.from_dict(json.loads(alone)["plan"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--compare", "h100x2,b300x2"], "'b300x2' is no machine: give NAME, NAMExGPUS or NAMExGPUSxNODES"),
        (["--compare", "h100x0"], "'h100x0' is no machine"),
        (["--hardware", "8xH100"], "no hardware profile '8xH100': give"),
        (["--hardware", "h100x8"], "rtx5090; --gpus N takes several"),
        (["--compare", "h100x1", "--gpus", "2"], "leave out --hardware, --gpus and --nodes"),
        (["--compare", "h100x1", "--explain"], "not allowed with argument"),
        (["--nodes", "0"], "--nodes: must be at least 1, not 0"),
        (["--gpus", "0"], "--gpus: must be at least 1, not 0"),
        (["--nodes", "2", "--network-gbps", "0"], "--network-gbps: must be at least 0.001, not 0"),
    ],
)
def test_what_is_no_machine_is_refused(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", "tiny", *options)
    assert (status, words in err) == (2, True), err
