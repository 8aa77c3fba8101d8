"""Every benchmark runs once on a tiny case on a CPU, its record is read again, and figures follow from times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.exactness.__main__ import Exactness
from bench.exactness.__main__ import main as run_exactness
from bench.kernels.recorder import Recorder
from bench.kernels.rows import COMPILED, EAGER, OURS, Row, this_machine, with_speedups
from bench.planner.__main__ import main as run_planner
from bench.planner.accuracy import errors_of, regret, regret_table
from bench.planner.cases import SMOKE
from bench.planner.measure import Point
from bench.planner.results import Results
from bench.train.__main__ import main as run_train
from bench.train.contestants import parse
from bench.train.launch import supervise
from bench.train.results import Comparison, Outcome
from bench.train.task import Task
from protrain.cli.main import main
from protrain.planning.plan import BlockMode

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs what suits a CPU")


@pytest.mark.gpu
def test_kernels_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "protrain", "bench", "kernels", "-k", "protrain and 100", "--out", str(tmp_path)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}  # so that it times
    subprocess.run(command, cwd=ROOT, env=alone, check=True, timeout=240)
    rows = json.loads((tmp_path / "kernels.json").read_text())
    assert {"flatten, norm", "unflatten"} <= {row["operator"] for row in rows}
    most = 120 if alone == os.environ else float("inf")  # other tests work on the GPU, and change the rates
    assert all(0 < row["percent_of_roof"] < most for row in rows)


@pytest.mark.slow
@needs_no_gpu
def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All contestants train the same model, from the same weights, on the same tokens."""
    pytest.importorskip("transformers")
    names = "protrain-eager,floor-eager,fsdp2-eager,loop,zero2"
    sizes = ["--layers", "4", "--batch", "4", "--sequence", "256", "--steps", "3", "--device-memory", "40MiB"]
    assert run_train(["--contestants", names, *sizes, "--out", str(tmp_path)]) == 0
    comparison = Comparison.load(tmp_path / "compare-tiny-4layers-4x256-within-40MiB.json")
    rows = {outcome.contestant.name: outcome for outcome in comparison.outcomes}
    assert ",".join(rows) == names
    assert rows.pop("zero2").error == "skipped: it needs a GPU"
    assert [outcome.error for outcome in rows.values()] == [""] * 4
    floor, client, plan = rows.pop("floor-eager"), rows.pop("loop"), rows["protrain-eager"].plan
    assert plan is not None
    checkpointed = [index for index, mode in enumerate(plan.block_modes) if mode is BlockMode.CKPT]
    assert checkpointed
    assert floor.config["checkpointed_blocks"] == checkpointed
    for outcome in rows.values():
        assert min(outcome.step_ms) > 0
        assert outcome.losses == pytest.approx(rows["fsdp2-eager"].losses, rel=1e-5)
        assert outcome.gradient_norms == pytest.approx(rows["fsdp2-eager"].gradient_norms, rel=1e-4)
    said = capsys.readouterr().out
    assert "protrain-eager is faster" in said
    assert f"loop: {client.plan}" in said


@pytest.mark.slow
@needs_no_gpu
def test_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = replace(SMOKE[0], layers=2, sequence=16, n_plans=1)
    monkeypatch.setattr("bench.planner.__main__.SMOKE", (smallest,))
    assert run_planner(["--steps", "1", "--out", str(tmp_path)]) == 0
    (result,) = Results.load(tmp_path / "planner.json").cases
    assert [point.error for point in result.points] == ["", ""]
    capsys.readouterr()
    assert run_planner(["--read", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "time_within_5" in said
    assert result.case.name in said


@pytest.mark.slow
@needs_no_gpu
def test_exactness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "exactness.json"
    sizes = ["--layers", "2", "--batch", "1", "--sequence", "16", "--steps", "3", "--warm-up", "1"]
    assert run_exactness(["--gpus", "2", *sizes, "--out", str(out)]) == 0
    record = Exactness.load(out)
    one, two = record.trainings
    assert (one.gpus, two.gpus, len(one.losses), record.same) == (1, 2, 4 * 2, True)
    assert "every bit agrees" in capsys.readouterr().out
    for other in (
        replace(two, losses=(*two.losses[:-1], 0.0)),
        replace(two, norms=(*two.norms[:-1], 0.0)),
        replace(two, checksum="0" * 16),
    ):
        assert "NOT THE SAME BITS" in replace(record, trainings=(one, other)).table()


def test_records_are_read() -> None:
    files = list(RESULTS.rglob("compare-*.json"))
    assert files
    for file in files:
        assert Comparison.load(file).task.label


@pytest.mark.parametrize(("machine", "points"), [("h100", 31), ("h200", 10)])
def test_recorded_plans_of_two_gpus_take_the_time_and_memory_that_was_predicted(machine: str, points: int) -> None:
    errors = errors_of(Results.load(RESULTS / machine / "planner-2gpus.json").cases)
    assert errors is not None
    assert errors.points == points
    assert errors.time_within_5 >= 0.75
    assert errors.time_within_10 == 1.0
    assert errors.device_highest < 0.05
    if machine == "h200":  # on H100s three plans were measured while the engine took more memory than today
        assert errors.device_lowest > -0.01


def test_errors_and_regret_are_relative_to_what_was_measured() -> None:
    recorded = Results.load(RESULTS / "h100" / "planner-2gpus.json").cases[0]
    points = recorded.points[:4]
    plans = [point.plan for point in points]

    def taking(*step_ms: float) -> tuple[Point, ...]:
        found = [replace(point, step_ms=(ms, ms * 1.1, ms * 0.9)) for point, ms in zip(points, step_ms, strict=True)]
        return (*found[:3], replace(found[3], error="OutOfMemoryError")) if step_ms[3] == 0 else tuple(found)

    predicted_ms = [recorded.predict(plan).step_ms for plan in plans]
    ratios = 1.0, 1.04, 0.93, 1.25
    measured = taking(*(ms / ratio for ms, ratio in zip(predicted_ms, ratios, strict=True)))
    errors = errors_of([replace(recorded, points=measured)])
    assert errors is not None
    assert (errors.time_within_3, errors.time_within_5, errors.time_within_10) == (0.25, 0.5, 0.75)
    assert errors.time_worst == pytest.approx(0.25)
    result = replace(recorded, points=taking(105.0, 100.0, 103.0, 0.0))
    assert regret(result) == (pytest.approx(0.05), str(plans[1]))
    assert "+5.0% over the fastest of 4" in regret_table([result])
    # Plans that were measured again count without their first run, which may have been the luckiest.
    again = taking(102.0, 110.0, 103.0, 0.0)
    assert regret(replace(result, points=(*result.points, *again))) == (0.0, str(plans[0]))


def test_ratios_are_of_medians_within_the_run() -> None:
    def outcome(name: str, *step_ms: float) -> Outcome:
        return Outcome(contestant=parse(name), step_ms=step_ms, parameters=10**9, last_loss=5.25)

    own, inside = outcome("protrain", 100.0, 90.0, 400.0), outcome("protrain-unclipped", 80.0)
    failed = Outcome(contestant=parse("zero2"), error="no memory")
    clients = outcome("loop-plain", 120.0), outcome("loop", 80.0)
    comparison = Comparison(
        command="",
        driver="",
        commit="",
        versions={},
        dtype="bfloat16",
        task=Task(model="tiny", layers=2, batch=2, sequence=64, steps=4, warm_up=1),
        outcomes=(own, outcome("floor", 95.0), inside, outcome("fsdp2", 300.0, 200.0), *clients, failed),
    )
    assert [comparison.gain(client) for client in clients] == [None, 1.5]
    others = {"floor": 0.95, "protrain-unclipped": 0.8, "fsdp2": 2.5, "loop-plain": 1.2, "loop": 0.8}
    assert comparison.speedups(own) == others
    assert comparison.tokens_per_s(own) == 1280.0
    assert comparison.tflops(own) == pytest.approx(7.68)
    assert "100.0 (94.0 to 280.0)" in comparison.table()
    assert comparison.table().endswith("zero2: no memory")


@pytest.mark.parametrize(
    ("code", "limit_s", "gpus", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 60, 1, "killed (SIGKILL): out of host memory?"),
        ("sys.exit('no driver')", 60, 1, "exit status 1: no driver"),
        ("subprocess.run(['sleep', '300'])", 1, 1, "not done within 1 s"),
        ("time.sleep(300) if os.environ['RANK'] == '0' else os.abort()", 60, 2, "rank 1: died of SIGABRT: it said no"),
    ],
)
def test_what_ends_a_worker_is_the_error_of_its_row(
    code: str, limit_s: int, gpus: int, error: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", f"import os, signal, subprocess, sys, time; {code}"]
    outcome = supervise(command, parse("fsdp2"), tmp_path / "out", tmp_path / "log", limit_s=limit_s, gpus=gpus)
    assert outcome.error.startswith(error)
    assert outcome.host_available_bytes > 0


def _row(implementation: str, median_ms: float | None, **fields: Any) -> Row:
    values: dict[str, Any] = {
        **{"operator": "mix", "shape": "a block", "dtype": "bfloat16", "implementation": implementation},
        **{"version": "", "verdict": "bits equal", "bytes": 3_000_000_000, "flops": 0, "roof": "device copy"},
        **{"roof_gbps": 2000.0, "datasheet_gbps": 3000.0, "median_ms": median_ms, "machine": this_machine()},
    }
    return Row(**(values | fields))


def test_gains_of_a_kernel_are_over_peers_of_the_same_operator_shape_and_type() -> None:
    peers = [_row(EAGER, 9.0), _row(COMPILED, 5.0), _row("a peer", 3.0)]
    other = [_row("wrong and fast", None, verdict="RED: off"), _row("elsewhere", 0.1, shape="another block")]
    ours = with_speedups([_row(OURS, 2.0), *peers, *other])[0]
    assert (ours.gbps, ours.percent_of_roof, ours.percent_of_datasheet) == (1500.0, 75.0, 50.0)
    assert (ours.speedup_over_eager, ours.speedup_over_compile, ours.speedup_over_best_peer) == (4.5, 2.5, 1.5)
    assert ours.best_peer == "a peer"


def test_a_wrong_kernel_has_no_figure(benchmark: Any) -> None:
    rows: list[Row] = []
    ran: list[int] = []

    def check() -> str:
        raise AssertionError("half of it\nis off")

    with pytest.raises(pytest.fail.Exception, match="wrong, so it has no figure: RED: half of it is off"):
        Recorder(benchmark, rows, None, None, budget_s=0.01).measure(
            operator="add",
            shape="a block",
            dtype="float32",
            implementation=OURS,
            roof="device copy",
            bytes_moved=4096,
            run=lambda: ran.append(1),
            check=check,
        )
    assert (rows[0].red, rows[0].median_ms, ran) == (True, None, [])


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (run_train, "--model llama-8t", "there is no model 'llama-8t'"),
        (run_train, "--quantised nf4", "--quantised is for frozen weights: add --lora r=16"),
        (run_train, "--float8 --contestants zero3", "--float8: zero3 cannot here; protrain, floor, resident"),
        (run_train, "--contestants floor", "floor checkpoints the blocks that protrain does: name that before it"),
        (run_planner, "--read {folder}", "--read: cannot read Results from {folder}/planner.json"),
        (run_exactness, "--gpus 3", "--gpus must be a power of two"),
        (run_exactness, "--host-memory all", "host_memory must be a number of bytes or text like '24GiB', not 'all'"),
        *(
            (run, "--out {folder}/file/deeper/record", "{folder}/file/deeper")
            for run in (run_train, run_planner, run_exactness)
        ),
    ],
)
@needs_no_gpu
def test_wrong_options_are_refused(
    command: Callable[[list[str]], int], options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        command(options.format(folder=tmp_path).split())
    assert stop.value.code == 2
    assert message.format(folder=tmp_path) in capsys.readouterr().err


def test_options_of_protrain_bench_reach_the_benchmark_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: commands.append(words[2:]))
    monkeypatch.chdir(ROOT)
    options = ["-k", "adam or pack", "--quick", "--benchmark-compare-fail=median:5%", "-x"]
    main(["bench", "kernels", *options])
    main(["bench", "train", "--help"])
    assert commands == [["pytest", "bench/kernels", *options], ["bench.train", "--help"]]
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "kernels"]) == 2
    assert "run this in a checkout of the repository" in capsys.readouterr().err
