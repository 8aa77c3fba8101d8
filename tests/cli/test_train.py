"""`protrain train` from end to end: it learns, saves, stops, resumes with the same bits, and exports the model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.checkpoint.manifest import list_saves
from protrain.cli.codec import Codec
from protrain.cli.data import evaluation_batches
from protrain.cli.main import main
from protrain.cli.text import tokenize
from protrain.cli.training_run import Run
from protrain.planning import Plan
from tests.distributed.warm import Process

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.xdist_group("ranks")  # where processes can be forked already


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory, llama_folder: Callable[..., Path]) -> Path:
    """A folder with a small model that save_pretrained wrote, and a text whose letters follow a strict order."""
    folder = tmp_path_factory.mktemp("train")
    shutil.copytree(llama_folder(num_hidden_layers=3, num_key_value_heads=2), folder / "source")
    letters = "the quick brown fox jumps over the lazy dog\n"
    (folder / "text.txt").write_text(letters * 200)
    return folder


def arguments(workplace: Path, folder: Path, *more: str) -> list[str]:
    options: dict[str, Any] = {
        "model": workplace / "source",
        "data": workplace / "text.txt",
        "folder": folder,
        "device": "cpu",
        "batch": 4,
        "sequence": 32,
        "steps": 90,  # about 6 ms each, so that a process that waits for a core has time to send a signal
        "warmup": 3,
        "learning-rate": 0.01,
        "evaluate-every": 21,
        "checkpoint-every": 4,
        "sample-tokens": 8,
        "threads": 1,
    }
    return ["train", *[part for name, value in options.items() for part in (f"--{name}", str(value))], *more]


@pytest.fixture(scope="module")
def finished(workplace: Path) -> Path:
    """An uninterrupted run in fp32 without a memory limit."""
    folder = workplace / "finished"
    assert main(arguments(workplace, folder)) == 0
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    import safetensors.torch

    loaded: dict[str, torch.Tensor] = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    return loaded


def test_a_run_learns_and_leaves_its_files(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["initial_loss"] > 5
    assert summary["unigram_entropy"] == pytest.approx(3.05, abs=0.1)
    assert summary["final_loss"] < 1
    assert summary["tokens_per_step"] == 128
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    losses = [row for row in rows if "loss" in row]
    assert [row["step"] for row in losses] == list(range(1, 91))
    assert summary["final_loss"] == pytest.approx(sum(row["loss"] for row in losses[-9:]) / 9)
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [21, 42, 63, 84, 90]
    rates = [row["learning_rate"] for row in losses]
    assert rates[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert max(rates) == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(0.001)
    files = "checkpoints data job.json loss.png metrics.jsonl model plan.json sample.txt summary.json"
    assert sorted(path.name for path in finished.iterdir()) == files.split()
    assert len((finished / "sample.txt").read_text().encode()) == 40


@pytest.mark.slow
def test_the_exported_model_loads_and_is_the_trained_one(finished: Path, workplace: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / "model")
    assert model.dtype == torch.float32
    tokens = tokenize([workplace / "text.txt"], Codec(), tmp_path, held_out=0.05)
    losses = []
    with torch.no_grad():
        for batch in evaluation_batches(tokens, batch=4, sequence=32, count=8):
            losses += [float(model(input_ids=row[None], labels=row[None]).loss) for row in batch["input_ids"]]
    summary = json.loads((finished / "summary.json").read_text())
    assert sum(losses) / len(losses) == pytest.approx(summary["evaluation_loss"], rel=1e-5)


@pytest.mark.slow
def test_a_run_is_converted_as_its_checkpoints_are(finished: Path, tmp_path: Path) -> None:
    for name, source in (("run", finished), ("saves", finished / "checkpoints")):
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.distcp")} for name in ("run", "saves")
    ]
    assert written[0] == written[1] != {}


@pytest.mark.slow
def test_a_killed_and_a_stopped_run_resume_to_the_same_bits(finished: Path, workplace: Path) -> None:
    folder = workplace / "interrupted"
    printed = workplace / "printed.txt"
    assert ended_at_step(6, signal.SIGKILL, arguments(workplace, folder), folder, printed) == -signal.SIGKILL
    status = ended_at_step(14, signal.SIGINT, ["train", "--resume", "--folder", str(folder)], folder, printed)
    errors = printed.read_text()
    assert status == 130, errors
    assert "loading the checkpoint: " in errors
    assert "resumed at step" in errors
    assert f"continue with: protrain train --resume --folder {folder}" in errors
    assert not (folder / "model").exists()
    saved_step = int(list_saves(folder / "checkpoints")[-1].name.rpartition("-")[2])
    assert f"stopped at step {saved_step} of 90" in errors

    # The third process has another plan, because placement never changes the result.
    assert main(["train", "--resume", "--folder", str(folder), "--device-memory", "700KiB"]) == 0
    assert str(Plan.load(folder / "plan.json")) != str(Plan.load(finished / "plan.json"))
    expected, found = weights(finished), weights(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    def losses(run: Path) -> list[tuple[int, float]]:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"]) for row in rows if "loss" in row]

    assert losses(folder) == losses(finished)
    assert (folder / "sample.txt").read_text() == (finished / "sample.txt").read_text()


def ended_at_step(step: int, by: signal.Signals, command: list[str], folder: Path, printed: Path) -> int:
    """The status of ``protrain`` in a process of its own, which gets a signal when metrics.jsonl reports ``step``."""
    process = Process(run_command, command, environment={}, printed=printed)
    path, until = folder / "metrics.jsonl", time.monotonic() + 60
    while not (path.exists() and f'"step": {step},' in path.read_text()):
        assert process.status is None, f"the run ended early: {printed.read_text()}"
        assert time.monotonic() < until, f"step {step} was not reached within a minute"
        time.sleep(0.01)
    process.send(by)
    while process.status is None:
        time.sleep(0.01)
    return process.status


def run_command(command: list[str]) -> None:
    os.nice(10)  # on a busy machine it must not end before the other process sends its signal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set it to be ignored
    sys.exit(main(command))


@pytest.mark.slow
def test_lines_outside_a_terminal_name_first_and_last_step(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(workplace, tmp_path / "run", "--log-every", "2", "--no-model")
    command[command.index("--steps") + 1] = "5"
    assert main(command) == 0
    lines = [line.split()[0] for line in capsys.readouterr().err.splitlines() if "  loss " in line]
    assert lines == ["1/5", "2/5", "4/5", "5/5"]


@pytest.mark.slow
def test_start_values_follow_from_the_seed(workplace: Path, tmp_path: Path) -> None:
    found = []
    for index, seed in enumerate((1, 1, 2)):
        torch.manual_seed(index)  # independent of what ran before
        folder = tmp_path / str(index)
        named = ("--from-scratch", "--seed", str(seed), "--steps", "1", "--learning-rate", "1e-9", "--warmup", "0")
        assert main(arguments(workplace, folder, *named, "--sample-tokens", "0", "--evaluate-every", "0")) == 0
        found.append(weights(folder)["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 0.01  # no step with that learning rate could do this


@pytest.mark.slow
def test_a_model_begins_from_scratch_whatever_its_folder_holds(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder without weights is refused without --from-scratch, which starts any with the same random weights."""
    (tmp_path / "bare").mkdir()
    shutil.copy(workplace / "source" / "config.json", tmp_path / "bare")
    found = []
    for source in (tmp_path / "bare", workplace / "source"):
        command = arguments(workplace, tmp_path / f"run-{source.name}", "--sample-tokens", "0")
        command[command.index("--steps") + 1] = "3"
        command[command.index("--model") + 1] = str(source)
        if source.name == "bare":
            assert main(command) == 2
            assert "bare holds no safetensors" in capsys.readouterr().err
        assert main([*command, "--from-scratch"]) == 0
        found.append(weights(tmp_path / f"run-{source.name}"))
        end = capsys.readouterr().out.replace(str(tmp_path), "runs").rpartition("\n\n")[2]
        assert "loss " in end
        assert max(map(len, end.splitlines())) <= 80
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    resumed = ["train", "--folder", str(tmp_path / "run-bare"), "--steps", "4"]
    assert main(resumed) == 0


@pytest.mark.slow
def test_accumulated_batches_make_one_step(workplace: Path, tmp_path: Path) -> None:
    command = arguments(workplace, tmp_path / "run", "--accumulation", "3", "--no-model", "--dtype", "bfloat16")
    command[command.index("--steps") + 1] = "12"
    assert main([*command, "--json", "--out", str(tmp_path / "summary.json")]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tokens_per_step"] == 4 * 32 * 3
    assert summary["final_loss"] < summary["initial_loss"] - 1
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_updates_inside_backward_give_the_same_bits(workplace: Path, tmp_path: Path) -> None:
    for name, more in (("after", []), ("inside", ["--step-during-backward", "--device-memory", "700KiB"])):
        command = arguments(workplace, tmp_path / name, "--clip", "0", "--accumulation", "2", *more)
        command[command.index("--steps") + 1] = "6"
        assert main(command) == 0
    after, inside = weights(tmp_path / "after"), weights(tmp_path / "inside")
    assert all(torch.equal(inside[name], after[name]) for name in after)


def test_a_loss_that_is_no_number_stops_the_run(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(workplace, tmp_path / "run", "--clip", "0", "--dtype", "float16")
    command[command.index("--learning-rate") + 1] = "10"
    assert main(command) == 1
    assert "the loss is nan at step" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.slow
def test_a_bf16_run_exports_bf16_weights_that_load(workplace: Path, tmp_path: Path) -> None:
    command = arguments(workplace, tmp_path / "run", "--dtype", "bfloat16", "--sample-tokens", "0")
    command[command.index("--steps") + 1] = "4"
    assert main(command) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.dtype == torch.bfloat16
    assert weights(tmp_path / "run")["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert not (tmp_path / "run" / "sample.txt").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_learns_and_resumes(workplace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = arguments(workplace, folder)
    command[command.index("--device") + 1] = "cuda"
    assert main(command) == 0
    first = json.loads((folder / "summary.json").read_text())
    assert first["dtype"] == "bfloat16"
    assert first["final_loss"] < 2.8
    assert 0 < first["device_peak_bytes"] <= first["device_reserved_bytes"]
    shutil.rmtree(list_saves(folder / "checkpoints")[-1])
    assert main(["train", "--resume", "--folder", str(folder)]) == 0
    second = json.loads((folder / "summary.json").read_text())
    assert second["initial_loss"] == first["initial_loss"]
    assert second["final_loss"] == pytest.approx(first["final_loss"], rel=0.02)


def test_a_finished_run_is_not_finished_again(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert main(["train", "--resume", "--folder", str(finished), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((finished / "summary.json").read_text())
    assert printed.err == f"protrain: nothing to resume: all 90 steps of {finished} are done\n"
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", ["the saves", "the text"])
def test_a_run_that_lost_something_is_left_as_it_is(
    lost: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text = tmp_path / "run", tmp_path / "text.txt"
    shutil.copy(workplace / "text.txt", text)
    command = arguments(workplace, folder, "--no-model", "--sample-tokens", "0", "--checkpoint-every", "2")
    command[command.index("--data") + 1] = str(text)
    command[command.index("--steps") + 1] = "5"
    assert main(command) == 0
    (folder / "summary.json").unlink()  # as if it had been stopped before that
    rows = (folder / "metrics.jsonl").read_text()
    if lost == "the saves":
        shutil.rmtree(folder / "checkpoints")
        message = f"{folder}/checkpoints holds no save, and the run has reached step 5: put the saves back"
    else:
        text.rename(tmp_path / "moved.txt")
        message = f"--data: {text} does not exist; if the text has moved, give its new place"
    capsys.readouterr()
    assert main(["train", "--resume", "--folder", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == rows
    if lost == "the text":
        assert main(["train", "--resume", "--folder", str(folder), "--data", str(tmp_path / "moved.txt")]) == 0


@pytest.mark.slow
def test_a_save_that_finds_no_room_says_how_to_go_on(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    command = arguments(workplace, folder, "--no-model", "--sample-tokens", "0", "--checkpoint-every", "2")
    command[command.index("--steps") + 1] = "6"
    save = Run.save

    def full_at_4(run: Run) -> Path:
        if run.step == 4:
            raise OSError("cannot write it: No space left on device")
        return save(run)

    monkeypatch.setattr(Run, "save", full_at_4)
    assert main(command) == 1
    said = capsys.readouterr().err
    again = f"make room, then `protrain train --resume --folder {folder}` goes on from step 2"
    assert f"step 4 is not saved: cannot write it: No space left on device; {again}" in said
    monkeypatch.undo()
    assert main(["train", "--resume", "--folder", str(folder)]) == 0


@pytest.mark.slow
def test_what_is_saved_can_be_read_by_whom_the_umask_lets(finished: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    files = [path for path in finished.rglob("*") if path.suffix in (".safetensors", ".json")]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~mask}


@pytest.mark.slow
def test_changed_data_is_refused_on_resume(finished: Path, workplace: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((workplace / "text.txt").read_text())
    command = arguments(workplace, tmp_path / "run", "--no-model", "--sample-tokens", "0")
    command[command.index("--data") + 1] = str(text)
    command[command.index("--steps") + 1] = "4"
    assert main(command) == 0
    text.write_text(text.read_text().replace("fox", "cat"))
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped before that
    tokens = (tmp_path / "run" / "data" / "train.bin").read_bytes()
    assert main(["train", "--resume", "--folder", str(tmp_path / "run")]) == 2
    assert (tmp_path / "run" / "data" / "train.bin").read_bytes() == tokens, "of the text that is to be restored"
    text.write_text(text.read_text().replace("cat", "fox"))
    assert main(["train", "--resume", "--folder", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "data" / "train.bin").read_bytes() == tokens


def test_a_folder_of_weights_that_does_not_match_is_refused_before_the_text_is_read(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import safetensors.torch

    shutil.copytree(workplace / "source", tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, file)
    command = arguments(workplace, tmp_path / "run")
    command[command.index("--model") + 1] = str(tmp_path / "model")
    assert main(command) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"protrain train: --model: {tmp_path}/model lacks 1 of ")
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_tokenizer_is_said_to_read_bytes(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = arguments(workplace, tmp_path / "run", "--no-model", "--sample-tokens", "0", "--warmup", "0")
    command[command.index("--steps") + 1] = "1"
    assert main(command) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "read as bytes" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"protrain: training {workplace}/source on ")
    assert lines[0].endswith(", read as bytes, as there is no tokenizer")
