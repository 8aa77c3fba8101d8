"""When runs are stopped, refused or resumed at an odd moment, nothing is lost or left behind, and a message says so."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
import protrain.cli.finish
import protrain.cli.loop
import protrain.cli.training_run
from protrain.checkpoint.manifest import list_saves
from protrain.cli.folder_lock import claimed
from protrain.cli.main import main
from protrain.cli.run_files import LOCK_FILE, UNFINISHED_DATA
from protrain.common.signals import SIGNALS, Stopped, StopRequests, stop_requests
from tests.distributed.warm import Process

transformers = pytest.importorskip("transformers")

STEPS = 8


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, llama_folder: Callable[..., Path]) -> Path:
    """A folder with a small model and a text."""
    folder = tmp_path_factory.mktemp("stops")
    shutil.copytree(llama_folder(num_key_value_heads=2, tie_word_embeddings=False), folder / "source")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return folder


def arguments(workplace: Path, folder: Path, **more: Any) -> list[str]:
    options: dict[str, Any] = {
        "model": workplace / "source",
        "data": workplace / "text.txt",
        "folder": folder,
        "device": "cpu",
        "batch": 2,
        "sequence": 32,
        "steps": STEPS,
        "checkpoint-every": 0,
        "sample-tokens": 4,
        "threads": 1,
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return ["train", *[part for name, value in options.items() for part in (f"--{name}", str(value))]]


def test_a_second_process_in_a_folder_is_refused(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with claimed(folder):
        (folder / UNFINISHED_DATA).mkdir()
        for command in (arguments(workplace, folder), ["train", "--resume", "--folder", str(folder)]):
            assert main(command) == 2
            said = f"another process trains in {folder}: wait for it, or pick another --folder"
            assert capsys.readouterr().err == f"protrain train: {said}\n"
        assert sorted(path.name for path in folder.iterdir()) == [UNFINISHED_DATA, LOCK_FILE]
    assert not folder.exists(), "no run came of it"


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny-20261126-205600"
    with claimed(folder, new=True) as one, claimed(folder, new=True) as other:
        (one / "notes.txt").touch()
        with claimed(folder, new=True) as third:
            assert [path.name for path in (one, other, third)] == [f"{folder.name}{end}" for end in ("", "-2", "-3")]
    assert list(folder.parent.iterdir()) == [one], "no run came of the others"


def test_a_run_that_chooses_its_folder_waits_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "now")
    with claimed(Path("runs") / "model-now"):
        assert main(["train", "--model", str(model), "--data", __file__, "--device", "cpu"]) == 2
    assert f"{model} is no causal language model" in capsys.readouterr().err


def test_the_lock_of_a_killed_process_is_none(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch()
    with claimed(tmp_path):
        assert (tmp_path / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with claimed(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_a_failed_start_leaves_what_was_there(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for folder in (tmp_path / "deep" / "run", tmp_path / "mine"):
        assert main(arguments(workplace, folder, data=tmp_path / "short.txt")) == 2
        assert "fewer than one sequence" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "short.txt"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_what_is_there_is_not_overwritten(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workplace / "source", tmp_path / "model")
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(arguments(workplace, Path(), model="model")) == 2
    said = "which belongs to no run and would be overwritten: give another --folder, or move that"
    assert capsys.readouterr().err == f"protrain train: . holds checkpoints, model, {said}\n"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_start_that_is_stopped_leaves_nothing(
    number: signal.Signals,
    workplace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrap(*_: Any, **__: Any) -> None:
        assert (folder / UNFINISHED_DATA / "train.bin").exists()
        assert not (folder / "data").exists(), "a killed start would leave what looks like the user's own"
        os.kill(os.getpid(), number)
        pytest.fail("not stopped")

    folder = tmp_path / "run"
    monkeypatch.setattr(protrain, "wrap", wrap)
    before = signal.signal(number, signal.default_int_handler)  # a shell may have it ignored
    try:
        assert main(arguments(workplace, folder)) == 128 + number
    finally:
        signal.signal(number, before)
    said = f"protrain train: stopped before a step was taken: {folder} is as it was"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert list(tmp_path.iterdir()) == []


def weights(folder: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    loaded: dict[str, torch.Tensor] = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    return loaded


@pytest.mark.slow
def test_a_run_that_is_stopped_after_its_last_step_is_saved(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments(workplace, tmp_path / "whole")) == 0
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:

        def export(_: Any, target: Path, **__: Any) -> None:
            (target.parent / ".model.tmp").mkdir()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

        patch.setattr(protrain.cli.finish, "export", export)
        capsys.readouterr()
        assert main(arguments(workplace, folder)) == 143
    said = f"stopped at step {STEPS} of {STEPS}; continue with: protrain train --resume --folder {folder}"
    assert capsys.readouterr().err.splitlines()[-1] == f"protrain train: {said}"
    assert len(list_saves(folder / "checkpoints")) == 1
    assert not {".model.tmp", "model", LOCK_FILE} & {path.name for path in folder.iterdir()}

    # Stopped again in the middle of a forward, the run does not save again what is saved already.
    with monkeypatch.context() as patch:
        mlp: Any = transformers.models.llama.modeling_llama.LlamaMLP
        forward = mlp.forward

        def interrupted_forward(self: Any, states: torch.Tensor) -> Any:
            if states.shape[1] == 1:  # it generates a sample, token by token
                os.kill(os.getpid(), signal.SIGINT)
            return forward(self, states)

        patch.setattr(mlp, "forward", interrupted_forward)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        try:
            assert main(["train", "--resume", "--folder", str(folder)]) == 130
        finally:
            signal.signal(signal.SIGINT, handler)
    assert len(list_saves(folder / "checkpoints")) == 1

    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    expected, found = weights(tmp_path / "whole"), weights(folder)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Times are those of the process that ran the steps. The peak is of both, as the evaluation's may be higher.
    rows = metrics(folder)
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [STEPS]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["step_ms"] in [row.get("step_ms") for row in rows]
    assert summary["tokens_per_s"] == pytest.approx(64 / summary["step_ms"] * 1000)
    assert summary["device_peak_bytes"] >= max(row.get("device_bytes", 0) for row in rows)


@pytest.mark.slow
def test_a_trace_is_of_one_start_and_a_failed_end_keeps_the_steps(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, traced, again = tmp_path / "run", tmp_path / "trace.json", ["train", "--resume", "--folder"]
    with monkeypatch.context() as patch:

        def step(run: Any) -> Any:
            if run.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            return take_step(run)

        take_step = protrain.cli.loop._step
        patch.setattr(protrain.cli.loop, "_step", step)
        assert main(arguments(workplace, folder, trace=traced)) == 143
    assert traced.exists()
    job = (folder / "job.json").read_bytes()
    capsys.readouterr()
    assert main([*again, str(folder), "--keep", "3", "--trace", str(traced)]) == 2
    said = f"protrain train: --trace needs 5 steps, and 2 of {folder} are left: leave it out"
    assert capsys.readouterr().err.splitlines()[-1] == said
    assert (folder / "job.json").read_bytes() == job

    with monkeypatch.context() as patch:

        def evaluate(run: Any) -> None:
            raise MemoryError("no room for an evaluation")

        patch.setattr(protrain.cli.training_run.Run, "evaluate", evaluate)
        assert main([*again, str(folder)]) == 1
    assert "no room for an evaluation" in capsys.readouterr().err
    assert [path.name.rpartition("-")[2] for path in list_saves(folder / "checkpoints")] == ["6", str(STEPS)]

    # Lost losses are not in the summary, and must not end the run.
    rows = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([b"damage", *rows[1:]]))
    capsys.readouterr()
    assert main([*again, str(folder)]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["initial_loss"] is summary["final_loss"] is None
    assert "loss - -> - (unigram entropy" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_resumed_on_another_device_keeps_its_numbers(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:  # as if the run had begun on a GPU
        patch.setattr("protrain.cli.prepare.choose_dtype", lambda name, device: torch.bfloat16)
        assert main(arguments(workplace, folder)) == 0
    job = json.loads((folder / "job.json").read_text())
    assert [job[name] for name in ("dtype", "compile", "chunked_loss")] == ["bfloat16", False, True]
    (folder / "summary.json").unlink()  # as if it had been stopped before that
    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    assert json.loads((folder / "summary.json").read_text())["dtype"] == "bfloat16"


def test_an_ignored_signal_stays_ignored() -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        with stop_requests() as requests:
            for number in SIGNALS:
                os.kill(os.getpid(), number)
            assert requests.received == 0
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with stop_requests() as requests:
            os.kill(os.getpid(), signal.SIGHUP)
            assert requests.received == signal.SIGHUP
            with pytest.raises(Stopped), requests.raised():
                pytest.fail("a signal came before")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_request_to_stop_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("protrain.common.signals.time.monotonic", lambda: now_s)
    for number in SIGNALS:
        requests = StopRequests()
        requests.receive(number, None)
        for _ in range(3):  # a wrapper passes it on as well, or bash reports the terminal that the kernel reported
            now_s += 0.3
            requests.receive(number, None)
        now_s += 1.1
        requests.receive(signal.SIGHUP, None)
        now_s += 1.1
        with pytest.raises(KeyboardInterrupt) as stop:
            requests.receive(signal.SIGTERM, None)
        assert stop.type is KeyboardInterrupt, "at once, without a save"
        assert requests.received == number


@pytest.mark.parametrize("every", [0, 2])
def test_two_requests_stop_at_once_and_say_what_is_left(
    every: int,
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, take_step = tmp_path / "run", protrain.cli.loop._step

    def step(run: Any) -> Any:
        if run.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.1)  # less apart they count as one
            os.kill(os.getpid(), signal.SIGINT)
        return take_step(run)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(protrain.cli.loop, "_step", step)
            assert main(arguments(workplace, folder, checkpoint_every=every)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    saves = list_saves(folder / "checkpoints")
    assert len(saves) == (1 if every else 0)
    since = f"from {saves[0]}" if saves else "from the start, as nothing was saved yet"
    said = f"stopped at once in step 4 of 8, and not saved; `protrain train --resume --folder {folder}` goes on {since}"
    assert capsys.readouterr().err.splitlines()[-1] == f"protrain train: {said}"
    assert main(["train", "--resume", "--folder", str(folder), "--no-model"]) == 0
    resumed = "resumed at step 2" if every else "nothing was saved yet: starting at step 1"
    assert resumed in capsys.readouterr().err


def test_who_goes_on_asking_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("protrain.common.signals.time.monotonic", lambda: now_s)
    requests = StopRequests()
    for _ in range(2):
        requests.receive(signal.SIGINT, None)
        now_s += 0.5
    with pytest.raises(KeyboardInterrupt):
        requests.receive(signal.SIGINT, None)


def test_a_run_that_nobody_reads_goes_on_and_is_saved_when_stopped(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    reader, writer = os.pipe()
    taken = 0

    def step(run: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken == 2:  # Ctrl-C ends `tee` as well, and nobody reads the next lines
            os.close(reader)
        if taken == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(run)

    take_step = protrain.cli.loop._step
    monkeypatch.setattr(protrain.cli.loop, "_step", step)
    with open(writer, "w", buffering=1) as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        assert main(arguments(workplace, folder, log_every=1)) == 143
        print("what Python says at its exit", file=pipe)
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4]
    assert len(list_saves(folder / "checkpoints")) == 1


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.xdist_group("ranks")
def test_a_run_whose_terminal_is_closed_is_saved(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    terminal, inside = os.openpty()
    process = Process(run_in_terminal, os.ttyname(inside), arguments(workplace, folder, steps=100000), environment={})
    os.set_blocking(terminal, False)
    path = folder / "metrics.jsonl"
    while not (path.exists() and '"step": 3,' in path.read_text()):
        assert process.status is None
        with suppress(BlockingIOError):
            os.read(terminal, 2**16)  # a full terminal would block the run
        time.sleep(0.01)
    os.close(inside)
    os.close(terminal)
    process.send(signal.SIGHUP)  # as bash does, right after the kernel
    while process.status is None:
        time.sleep(0.01)
    assert process.status == 128 + signal.SIGHUP
    assert len(list_saves(folder / "checkpoints")) == 1


def run_in_terminal(name: str, command: list[str]) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)  # the first one that a session opens is its own
    for standard in range(3):
        os.dup2(terminal, standard)
    os.close(terminal)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(main(command))


def test_a_first_loss_that_is_no_number_is_not_of_the_learning_rate(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(workplace / "source")
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    assert main(arguments(workplace, tmp_path / "run", model=tmp_path / "broken")) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the loss is nan at step 1, before any update: the weights of --model" in error
    assert "--dtype" in error
    assert "--learning-rate" not in error
