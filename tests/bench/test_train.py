"""bench.train: rows for what fails, the arithmetic of the table, and a run of everything that a CPU can do."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.train import worker
from bench.train.__main__ import main
from bench.train.contestants import Contestant, parse
from bench.train.launch import supervise, take_part
from bench.train.results import UNFINISHED, Comparison, Outcome
from bench.train.task import Job, Task, make_tokens
from bench.train.trainers import Trainer
from protrain.planning.plan import BlockMode
from tests.bench.forked import ForkedWorkers
from tests.distributed.warm import Process

TASK = Task(model="tiny", layers=2, batch=2, sequence=64, steps=4, warm_up=1)
ONE = Contestant(kind="fsdp2")


@pytest.mark.slow
def test_other_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["--model", "llama-8t"], "there is no model 'llama-8t'"),
        (["--model", "gpt2", "--sequence", "2048"], "--sequence 2048 is longer than the 1024 positions"),
        (["--model", "opt-13b", "--sequence", "4096"], "--sequence 4096 is longer than the 2048 positions"),
        (["--quantised", "nf4"], "--quantised is for frozen weights: add --lora r=16"),
        (["--float8", "--contestants", "zero3"], "--float8: zero3 cannot here; protrain, floor, resident, fsdp2 can"),
        (["--lora", "r=4", "--contestants", "fsdp2"], "--lora: fsdp2 cannot here; protrain, floor, resident can"),
        (["--steps", "2"], "--steps: must be at least 3"),
        (["--host-rate", "170%"], "--host-rate: must be a share of the host's rate such as 70%, not '170%'"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(("options", "bytes_each"), [("", 16), ("--lora=r=1", 4)])
def test_without_a_gpu_what_does_not_fit_is_refused_before_anyone_runs(
    options: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    if "lora" in options:
        pytest.importorskip("peft")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("bench.train.models.available_host_bytes", lambda: 2**30)
    one_layer = 480_260_096  # parameters, with embedding and head
    with pytest.raises(SystemExit) as stop:
        main(["--model", "llama-7b", "--layers", "1", *options.split()])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    needed = re.search(r"moments take ([\d.]+) GiB of this machine's memory, of which 1 GiB are available", said)
    assert needed is not None, said
    assert float(needed[1]) * 2**30 == pytest.approx(one_layer * bytes_each, rel=0.01)
    assert "give fewer --layers, or --model tiny" in said


@pytest.mark.parametrize(
    ("options", "chunked"), [([], True), (["--no-chunked-loss"], False), (["--chunked-loss"], True)]
)
def test_the_loss_is_chunked_where_it_can_be(
    options: list[str], chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    tasks: list[Task] = []

    def compare(args: object, task: Task, *others: object) -> None:
        tasks.append(task)
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.train.__main__._compare", compare)
    with pytest.raises(KeyboardInterrupt):
        main(["--model", "tiny", *options])
    assert tasks[0].chunked_loss is chunked


def test_a_chunked_loss_that_cannot_be_is_refused_before_anyone_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.LlamaForCausalLM.loss_function", nn.CrossEntropyLoss())
    with pytest.raises(SystemExit) as stop:
        main(["--model", "tiny", "--chunked-loss"])
    assert stop.value.code == 2
    assert "chunked_loss=True works with causal language models" in capsys.readouterr().err


def _supervised(tmp_path: Path, code: str, *, limit_s: float = 60.0) -> Outcome:
    command = [sys.executable, "-c", code]
    return supervise(command, ONE, tmp_path / "out.json", tmp_path / "log", limit_s=limit_s)


def test_a_worker_that_the_system_kills_becomes_a_row(tmp_path: Path) -> None:
    outcome = _supervised(tmp_path, f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert outcome.error == "killed (SIGKILL): out of host memory?"
    assert outcome.host_available_bytes > 0


def test_a_failure_says_what_memory_was_taken_as_far_as_it_is_known() -> None:
    gib = 1024**3
    killed = Outcome(contestant=ONE, error="killed", host_used_bytes=118 * gib, host_available_bytes=int(120.5 * gib))
    assert killed.failure == "killed [memory taken: host 118.0 of 120.5 GiB]"
    full = replace(killed, error="no memory", device_reserved_bytes=78 * gib)
    assert full.failure == "no memory [memory taken: host 118.0 of 120.5 GiB, GPU 78.0 GiB]"
    begun = replace(killed, setup_s=41.3, losses=(3.0, 2.0))
    assert begun.failure == "killed [at least 2 steps done, ready after 41 s] [memory taken: host 118.0 of 120.5 GiB]"
    assert Outcome(contestant=ONE, error="skipped").failure == "skipped"
    assert replace(full, error="").failure == ""


@pytest.mark.xdist_group("ranks")
def test_the_first_line_of_a_worker_s_error_is_the_row_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.train.launch.subprocess", ForkedWorkers())
    job = Job(task=TASK, contestant=ONE, tokens=str(tmp_path / "none.pt"), planned_by=None, until=0.0)
    job.save(tmp_path / "job.json")
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.train.worker", str(tmp_path / "job.json"), str(out)]
    outcome = supervise(command, ONE, out, tmp_path / "log", limit_s=60.0)
    assert outcome.error.startswith("FileNotFoundError: [Errno 2]")
    assert outcome.host_available_bytes > 0
    assert outcome.host_resident_bytes > 50 * 1024**2
    out.unlink()
    os.mkfifo(tmp_path / "none.pt")  # tokens that never come
    late = supervise(command, ONE, out, tmp_path / "log", limit_s=4.0)
    assert late.error.startswith("not done within 4 s; it stood in ")
    assert " load (serialization.py:" in late.error, f"a line of torch.load: {late.error}"


def test_a_worker_that_crashes_becomes_a_row_with_its_last_words(tmp_path: Path) -> None:
    assert _supervised(tmp_path, "raise SystemExit('no driver')").error == "exit status 1: no driver"
    outcome = _supervised(tmp_path, f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})")
    assert outcome.error == "died of SIGSEGV: it said nothing"


@pytest.mark.slow
def test_a_worker_that_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert _supervised(tmp_path, code, limit_s=1.5).error == "not done within 2 s"
    waited = _supervised(tmp_path, "import time; time.sleep(4)")
    assert waited.error.startswith("exit status 0")
    assert not late.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "limit_s", "error"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 60.0, "killed (SIGKILL): out of host memory?"),
        ("import time; time.sleep(9)", 3.0, "not done within 3 s"),
    ],
    ids=["killed", "late"],
)
def test_what_a_worker_had_done_when_it_was_ended_is_kept(
    tmp_path: Path, ending: str, limit_s: float, error: str
) -> None:
    begun = Outcome(contestant=ONE, error=UNFINISHED, setup_s=3.0, losses=(2.5, 2.25), step_ms=(7.0,))
    begun.save(tmp_path / "begun.json")
    move = f"import os; os.replace({str(tmp_path / 'begun.json')!r}, {str(tmp_path / 'out.json')!r})"
    outcome = _supervised(tmp_path, f"{move}; {ending}", limit_s=limit_s)
    assert outcome.error == error
    assert (outcome.setup_s, outcome.losses, outcome.step_ms) == (3.0, (2.5, 2.25), (7.0,))
    assert outcome.host_available_bytes > 0


@pytest.mark.slow
def test_a_contestant_that_fails_in_a_step_leaves_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(TASK, model="tiny", layers=1, batch=1, sequence=8, steps=4, warm_up=1)
    make_tokens(task, tmp_path / "tokens.pt")
    losses = iter([4.0, 3.0, 2.0])

    def step(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        loss = next(losses, None)
        if loss is None:
            raise MemoryError("no room for another step")
        return torch.tensor(loss), None

    monkeypatch.setitem(worker.BUILDERS, ONE.kind, lambda *_: Trainer(step=step, parameters=5, config={}))
    monkeypatch.setattr(worker, "_KEEP_EVERY_S", 0.0)
    job = Job(task=task, contestant=ONE, tokens=str(tmp_path / "tokens.pt"), planned_by=None, until=time.time() + 60)
    job.save(tmp_path / "job.json")
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path / "job.json"), str(tmp_path / "out.json")])
    worker.main()
    outcome = Outcome.load(tmp_path / "out.json")
    assert outcome.error == "MemoryError: no room for another step"
    assert outcome.losses == (4.0, 3.0, 2.0)
    assert len(outcome.step_ms) == 2
    assert outcome.parameters == 5


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_worker_ends_with_a_bench_that_is_ended(tmp_path: Path, ending: signal.Signals) -> None:
    begun, late = tmp_path / "begun", tmp_path / "late"
    touch = "__import__('pathlib').Path({!r}).touch()".format
    code = f"import time; {touch(str(begun))}; time.sleep(3); {touch(str(late))}"
    bench = Process(_supervise_with_hangups, tmp_path, code, environment={})
    while not begun.exists():
        assert bench.status is None
        time.sleep(0.02)
    bench.send(ending)
    while bench.status is None:
        time.sleep(0.02)
    assert bench.status == 128 + ending
    time.sleep(4)
    assert not late.exists()


def _supervise_with_hangups(folder: Path, code: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup these tests, and what they start, ignore it
    _supervised(folder, code)


@pytest.mark.slow
def test_memory_that_goes_missing_while_a_worker_runs_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([1000, 900, 300])
    monkeypatch.setattr("bench.train.launch.available_host_bytes", lambda: next(seen, 800))
    assert _supervised(tmp_path, "import time; time.sleep(1.5)").host_used_bytes == 700


def test_what_needs_a_gpu_or_a_failed_plan_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert take_part(parse("torchao"), TASK, tmp_path, limit_s=9.0).error == "skipped: it needs a GPU"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bench.train.launch.find_spec", lambda name: None)
    skipped = take_part(parse("zero2"), TASK, tmp_path, limit_s=9.0)
    assert skipped.error == "skipped: deepspeed is not installed (pip install deepspeed)"
    skipped = take_part(parse("llmq-kept"), TASK, tmp_path, limit_s=9.0)
    assert skipped.error == "skipped: pyllmq is not installed (pip install pyllmq)"
    Outcome(contestant=parse("protrain"), error="PlanError: no").save(tmp_path / "protrain.json")
    assert take_part(parse("floor"), TASK, tmp_path, limit_s=9.0).error == "skipped: protrain has no plan to follow"


def _outcome(name: str, *step_ms: float) -> Outcome:
    return Outcome(contestant=parse(name), step_ms=step_ms, parameters=10**9, last_loss=5.25)


def test_ratios_are_of_medians_within_the_run() -> None:
    own = replace(_outcome("protrain", 100.0, 90.0, 400.0), first_step_s=12.34)
    inside = _outcome("protrain-unclipped", 80.0)
    peer, failed = _outcome("fsdp2", 300.0, 200.0), Outcome(contestant=parse("zero2"), error="no memory")
    comparison = Comparison(
        command="",
        driver="",
        commit="",
        versions={},
        dtype="bfloat16",
        task=TASK,
        outcomes=(own, _outcome("floor", 95.0), inside, peer, failed),
    )
    assert comparison.speedups(own) == {"floor": 0.95, "protrain-unclipped": 0.8, "fsdp2": 2.5}
    assert comparison.speedups(inside)["fsdp2"] == 3.125
    assert comparison.tokens_per_s(own) == 1280.0
    assert comparison.tflops(own) == pytest.approx(7.68)
    assert own.quantile_ms(0.2) == pytest.approx(94.0)
    assert own.quantile_ms(0.8) == pytest.approx(280.0)
    table = comparison.table()
    assert "100.0 (94.0 to 280.0)" in table
    heading = next(line for line in table.splitlines() if "protrain is faster" in line)
    after = heading.index("first step after, s")
    assert [line[after:].split()[0] for line in table.splitlines()[3:5]] == ["12.3", "-"]
    assert heading.endswith("protrain is faster  protrain-unclipped is faster")
    assert next(line for line in table.splitlines() if line.startswith("FSDP2")).split("  ")[-1] == "3.12 times"
    # Floors train nothing.
    assert [line.split("  ").count("5.2500") for line in table.splitlines()[3:7]] == [1, 0, 1, 1]
    assert "whole logits" in comparison.headline()
    assert "chunked loss" in replace(comparison, task=replace(TASK, chunked_loss=True)).headline()
    assert table.endswith("zero2: no memory")
    assert Comparison.from_json(comparison.to_json()) == comparison


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_everything_that_a_cpu_can_do_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("bench.train.launch.subprocess", ForkedWorkers())
    names = "protrain-eager,floor-eager,resident-eager,fsdp2-eager,fsdp2-eager-gathered-resident1,zero2"
    options = [
        "--layers",
        "4",
        "--batch",
        "4",
        "--sequence",
        "256",
        "--steps",
        "3",
        "--device-memory",
        "40MiB",
        "--out",
        str(tmp_path),
    ]
    assert main(["--contestants", names, *options]) == 0
    file = tmp_path / "compare-tiny-4layers-4x256-within-40MiB.json"
    comparison = Comparison.load(file)
    rows = {outcome.contestant.name: outcome for outcome in comparison.outcomes}
    assert ",".join(rows) == names
    assert rows.pop("zero2").error == "skipped: it needs a GPU"
    assert [outcome.error for outcome in rows.values()] == [""] * 5
    assert {outcome.parameters for outcome in rows.values()} == {1_820_352}
    for outcome in rows.values():
        assert len(outcome.step_ms) == 3
        assert min(outcome.step_ms) > 0
        assert len(outcome.losses) == len(outcome.step_ms) + comparison.task.warm_up
        assert outcome.losses[0] == pytest.approx(rows["resident-eager"].losses[0], rel=1e-5)
        assert outcome.losses[comparison.task.warm_up] == outcome.first_loss
        assert 4.0 < outcome.first_loss < 7.0  # the entropy of 256 equal bytes is 5.5
        assert outcome.host_resident_bytes > 50 * 1024**2
        assert outcome.first_step_s > outcome.setup_s > 0
    floor = rows.pop("floor-eager")
    for outcome in rows.values():
        assert outcome.last_loss < outcome.first_loss, outcome.contestant.name
        assert outcome.clipped_steps > 0
        # They train the same model, from the same weights, on the same tokens.
        assert outcome.losses == pytest.approx(rows["resident-eager"].losses, rel=1e-5), outcome.contestant.name
        assert outcome.gradient_norms == pytest.approx(rows["resident-eager"].gradient_norms, rel=1e-4)
    assert 0 < rows["fsdp2-eager"].config["clip_ms"] < rows["fsdp2-eager"].median_ms
    once = rows["fsdp2-eager-gathered-resident1"].config
    assert (once["reshard_after_forward"], once["blocks_not_offloaded"]) == (False, 1)
    plan, reached = rows["protrain-eager"].plan, rows["protrain-eager"].config
    assert reached["host_gparams"] > 0
    assert reached["predicted_host_gparams"] > 0
    assert reached["host_adam_gparams"] > 0
    assert plan is not None
    checkpointed = [index for index, mode in enumerate(plan.block_modes) if mode is BlockMode.CKPT]
    assert checkpointed  # the budget asks for it
    assert floor.config["checkpointed_blocks"] == checkpointed
    assert json.loads(file.read_text())["command"].startswith("python -m bench.train --contestants protrain-eager")
    assert {outcome.config["chunked_loss"] for outcome in rows.values()} == {True}
    assert "protrain-eager is faster" in capsys.readouterr().out
    assert (tmp_path / "compare-tiny-4layers-4x256-within-40MiB.png").stat().st_size > 5000


@pytest.mark.gpu
def test_a_contestant_gets_no_more_of_the_gpu_than_the_task_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    task = replace(TASK, device_memory="128MiB")  # of which each workspace of cuBLAS takes 32
    make_tokens(task, tmp_path / "tokens.pt")
    outcomes = [take_part(parse(name), task, tmp_path, limit_s=120.0) for name in ("resident-eager", "fsdp2-eager")]
    assert [outcome.error for outcome in outcomes] == ["", ""]
    outcome = take_part(parse("resident-eager"), replace(task, device_memory="16MiB"), tmp_path, limit_s=120.0)
    assert outcome.error.startswith("OutOfMemoryError")


def test_a_run_out_of_time_says_who_was_not_begun(tmp_path: Path) -> None:
    assert main(["--contestants", "protrain-eager", "--time-limit", "1", "--out", str(tmp_path)]) == 1
    comparison = Comparison.load(tmp_path / "compare-tiny-2x64.json")
    assert "not done within" in comparison.outcomes[0].error or "not begun" in comparison.outcomes[0].error
