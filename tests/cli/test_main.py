"""The command line: help with an example, one line and status 2 for what the user can correct, and JSON on request."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protrain.cli.commands import COMMANDS, build_parser
from protrain.cli.job import MAY_DIFFER, TrainJob
from protrain.cli.main import main
from protrain.cli.options import in_options
from protrain.common.cache import say_unwritable
from protrain.hardware.profile import HardwareProfile
from protrain.hardware.shipped import load
from protrain.planning import Plan


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"protrain {importlib.metadata.version('protrain')}\n", "")


def test_the_package_runs_as_a_program() -> None:
    refused = subprocess.run([sys.executable, "-m", "protrain", "nothing"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("protrain: ")


@pytest.mark.parametrize("command", ["train", "plan", "calibrate"])
def test_help_shows_a_real_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "example" in out
    assert f"  protrain {command} " in out


@pytest.mark.parametrize("command", ["", "train", "plan", "export", "convert", "calibrate", "bench"])
def test_a_help_text_fits_into_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run(capsys, *command.split(), "--help")
    assert status == 0
    assert [line for line in out.splitlines() if len(line) > 80 or re.search(r"--\w[\w-]*-$", line)] == []


def test_a_learning_rate_has_two_spellings() -> None:
    found = [build_parser("train").parse_args(["train", option, "1e-3"]) for option in ("--lr", "--learning-rate")]
    assert found[0] == found[1]
    assert found[0].learning_rate == 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_plan_is_not_made_for_a_cpu_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "plan", "llama2-13b")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "this machine has no GPU to plan for: name another with --hardware" in err
    assert "give --device cpu" in err


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "train", "--folder", str(tmp_path / "mine"), "--steps", "9")
    assert status == 2
    assert f"--folder {tmp_path}/mine holds no run to go on with: for a new one give --model" in err


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)])
def test_help_does_not_wait_for_torch(words: list[str]) -> None:
    code = (
        f"import sys, protrain.cli.main as command\ntry:\n  command.main({words})\n"
        "finally:\n  print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (
            ["train", "--modle", "tiny"],
            "protrain train: unrecognized arguments: --modle tiny; did you mean --model? (see protrain train --help)",
        ),
        (
            ["plan", "tiny", "--acumulation=2"],
            "--acumulation=2; did you mean --accumulation? (see protrain plan --help)",
        ),
        (["train", "tiny"], "unrecognized arguments: tiny; did you mean --model tiny? (see protrain train --help)"),
        (["train", "--model", "tinny", "--data", "nowhere"], "--data: nowhere does not exist"),
        (["plan", "tiny", "--zzzzzz"], "unrecognized arguments: --zzzzzz (see"),
        (["train", "--model", "tiny", "--batch", "0"], "--batch: must be at least 1, not 0"),
        (["train", "--model", "tiny", "--batch", "x"], "--batch: must be a whole number, not 'x'"),
        (
            ["train", "--model", "tiny", "--learning-rate", "-1"],
            "--learning-rate/--lr: must be between 0 and 10",
        ),
        (["train", "--model", "tiny", "--device-memory", "lots"], "--device-memory: must be a number of bytes"),
        (
            ["train", "--model", "tiny", "--device-memory", "0.5"],
            "--device-memory: must be at least 1 byte and less than 1048576 TiB, like '24GiB', not '0.5'",
        ),
        (
            ["train", "--model", "tiny", "--host-memory", "0"],
            "--host-memory: must be at least 1 byte and less than 1048576 TiB, like '24GiB'",
        ),
        (["train", "--model", "tiny", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["train"], "--model is missing"),
        (["train", "--resume"], "--resume needs the --folder"),
        (["train", "--model", "tinny"], "there is no model 'tinny': give a folder with config.json, or one of tiny,"),
        (["train", "--model", "tiny", "--warmup", "401"], "--warmup 401 is longer than the run: give at most --steps"),
        (
            ["train", "--model", "tiny", "--data", "zeros.bin", "--device", "cpu"],
            "zeros.bin is no text, as it holds zero",
        ),
        (
            ["train", "--model", "tiny", "--device", "cpu", "--plan", "config.json"],
            "config.json is not a plan of this version of ProTrain: Plan has no field",
        ),
        (
            ["plan", "tiny", "--hardware", "config.json"],
            "config.json is not a hardware profile of this version of ProTrain: ",
        ),
        (["train", "--model", "tiny", "--device", "tpu"], "device must be a CUDA GPU or the CPU, not 'tpu'"),
        (["train", "--model", "tiny", "--device", "meta"], "device must be a CUDA GPU or the CPU, not meta"),
        (["train", "--model", "gpt2", "--device", "cpu", "--sequence", "2000"], "longer than the 1024 positions"),
        (["train", "--model", "tiny", "--device", "cpu", "--data", "nowhere"], "--data: nowhere does not exist"),
        (["plan", "tiny", "--hardware", "no-such-card"], "no-such-card"),
        (["plan", "tiny", "--hardware", "h100", "--device", "gpu"], "--device 'gpu' is no device"),
        (["plan", "tiny", "--hardware", "h100", "--device", "cpu"], "h100, whose device is cuda"),
        # It fails before the work whose result would be written.
        (["plan", "tiny", "--device", "cpu", "--out", "file.txt/plan.json"], "--out: "),
        (["calibrate", "--device", "cpu", "--out", "folder"], "--out: folder is a folder"),
        (["train", "--model", "tiny", "--device", "cpu", "--out", "file.txt/summary.json"], "file.txt is no folder"),
        (
            ["train", "--model", "tiny", "--device", "cpu", "--steps", "4", "--trace", "trace.json"],
            "--trace needs 5 steps, and --steps is 4",
        ),
        (["train", "--model", "tiny", "--device", "cpu", "--trace", "folder"], "--trace: folder is a folder"),
        (["train", "--model", "tiny", "--device", "cpu", "--folder", "file.txt"], "--folder: file.txt is a file"),
        (["export", "folder", "out"], "folder holds no checkpoint; give the folder that save_checkpoint wrote to"),
        (["convert", "folder", __file__], f"argument TARGET: {__file__} is a file: give a folder"),
        (["export", "folder", "."], "argument FOLDER: . is not empty: give a folder of its own"),
        (["export", "folder", "file.txt"], "argument FOLDER: file.txt is a file: give a folder"),
        (["plan", "tiny", "--device", "cpu", "--picture", "folder"], "--picture: folder is a folder"),
        (
            ["train", "--model", "tiny", "--device", "cpu", "--folder", ""],
            "--folder '': nothing is given, as by a shell",
        ),
        (["train", "--model", "tiny", "--device", "cpu", "--folder="], "--folder=: nothing is given, as by a shell"),
        (["train", "--model", "tiny", "--device", "cpu", "--folder", "link"], "link is a link that leads to no folder"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").touch()
    (tmp_path / "link").symlink_to("link")
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # stands for a GPU where the loss is chosen
    status, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if not line.startswith(("reading data", "protrain: profiling"))]
    assert (status, len(lines), out) == (2, 1, ""), err
    assert lines[0].startswith("protrain")
    assert message in lines[0]


def test_a_torch_that_cannot_be_imported_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "protrain.cli.calibrate_run", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out, err = run(capsys, "calibrate", "--device", "cpu")
    assert (status, out) == (2, "")
    assert err == "protrain calibrate: import of torch halted; None in sys.modules\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("argv", [["train", "--model", "tiny"], ["calibrate"], ["plan", "tiny"]])
def test_a_missing_gpu_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, *argv, "--device", "cuda")
    assert status == 2
    assert "--device cuda, but there is no CUDA GPU here: pass --device cpu, or install a CUDA build of torch" in err


def test_several_processes_need_a_launcher_that_says_where_they_meet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = run(capsys, "train", "--model", "tiny", "--device", "cpu")
    assert status == 2
    assert "WORLD_SIZE announces 2 processes and MASTER_ADDR is missing" in err
    status, _, err = run(capsys, "train", "--model", "tiny", "--device", "cpu", "--gpus", "3")
    assert status == 2
    assert err == "protrain train: --gpus 3: 2 processes were started, each for one GPU; leave --gpus out\n"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            "make a new plan, or leave plan= out to have one searched",
            "make a new plan, or leave --plan out to have one",
        ),
        ("chunked_loss=True does not work", "--chunked-loss does not work"),
        ("merge=True: the model has no adapter", "--merge: the model has no adapter"),
        ("compile=False; device_memory='0.5' is", "--no-compile; --device-memory 0.5 is"),
        (
            "device_memory of at least 2.00GiB with host_memory",
            "--device-memory of at least 2.00GiB with --host-memory",
        ),
        ("weights: m lacks 2 of 3 parameters (accumulation=1, here 2)", "--model: m lacks 2 of 3 parameters (--accum"),
        (
            "/data/plan=3/device_memory/x.json: the plan of a device",
            "/data/plan=3/device_memory/x.json: the plan of a d",
        ),
    ],
)
def test_the_command_line_speaks_of_options(message: str, said: str) -> None:
    assert in_options(message).startswith(said)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    say_unwritable.cache_clear()
    status, _, err = run(capsys, "calibrate", "--device", "cpu", "--seconds", "0.02", "--json")
    assert status == 0, err
    lines = [line for line in err.splitlines() if "(Not a directory), so everything is measured again" in line]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"protrain: {tmp_path}/file/cache cannot be written")
    assert "let PROTRAIN_CACHE name a folder that can be" in lines[0]
    assert "the profile was not kept" in err


def test_the_options_of_a_resumed_run_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    help_text = " ".join(run(capsys, "train", "--help")[1].split())
    listed = help_text.partition("that never change the weights: ")[2].partition(" --seed")[0]
    assert sorted(listed.replace(" ", "").split(",")) == sorted(MAY_DIFFER.values())
    guide = (Path(__file__).resolve().parents[2] / "docs" / "command-line.md").read_text()
    listed = guide.partition("`--resume` takes the options of the run.")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(--[\w-]+)`", listed)) == sorted(MAY_DIFFER.values())


def test_all_that_a_job_says_can_be_said_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    job = TrainJob(model="tiny").to_dict()
    args = build_parser("train").parse_args(["train", "--model", "tiny"])
    assert vars(args).keys() & job.keys() == {"model"}, "only what is given is said: the job has the defaults"
    offered = set(re.findall(r"--[\w-]+", run(capsys, "train", "--help")[1]))
    missing = {f"--{name.replace('_', '-')}" for name in job} - offered
    assert missing == {"--micro-batches", "--save-model"}
    assert "--no-model" in offered


def test_what_the_end_of_a_run_needs_is_asked_for_at_its_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protrain.cli.options.find_spec", lambda name: None)
    status, _, err = run(capsys, "train", "--model", "tiny", "--device", "cpu", "--folder", str(tmp_path / "run"))
    assert (status, len(err.splitlines())) == (2, 1), err
    assert "the loss curve needs the package matplotlib: pip install 'protrain[hf]'" in err
    assert not (tmp_path / "run").exists()


def test_a_warning_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers, tensors = pytest.importorskip("transformers"), pytest.importorskip("safetensors.torch")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors.save_file({**tensors.load_file(file), "score.weight": torch.zeros(2)}, file)
    (tmp_path / "text.txt").write_text("some text " * 100)
    options = f"--model={tmp_path}/model --data={tmp_path}/text.txt --folder={tmp_path}/run --device=cpu --batch=1"
    status, _, err = run(capsys, "train", *options.split(), "--sequence=16", "--steps=1", "--sample-tokens=0")
    assert status == 0, err
    lines = [line for line in err.splitlines() if "score.weight" in line]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"protrain: --model: {tmp_path}/model holds what LlamaForCausalLM has no place")
    assert "UserWarning" not in err


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "train", "--device", "cpu", "--data", __file__, "--model", str(tmp_path))
    assert (status, "holds no config.json" in err) == (2, True)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status, _, err = run(capsys, "train", "--device", "cpu", "--data", __file__, "--model", str(tmp_path))
    assert (status, "holds no safetensors" in err) == (2, True)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    status, _, err = run(capsys, "train", "--device", "cpu", "--data", __file__, "--model", str(tmp_path))
    assert (status, "is no causal language model" in err) == (2, True)


@pytest.mark.slow
def test_a_plan_is_printed_as_a_table_or_json_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "tiny", "--device", "cpu", "--batch", "2", "--sequence", "32"]
    status, table, err = run(capsys, *argv)
    assert status == 0, err
    assert "n_persist" in table
    status, text, _ = run(capsys, *argv, "--json", "--out", str(tmp_path / "new" / "plan.json"))
    assert status == 0
    plan = json.loads(text)["plan"]
    assert plan["n_persist"] <= plan["n_chunks"]
    assert json.loads((tmp_path / "new" / "plan.json").read_text()) == plan


def test_an_impossible_machine_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(load("h100").to_dict() | {"h2d_gbps": 0}))
    status, out, err = run(capsys, "plan", "tiny", "--hardware", str(path))
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert f"{path} is not a hardware profile" in err
    assert "h2d_gbps must be a finite number above 0, not 0.0" in err


@pytest.mark.slow
def test_a_plan_file_drives_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--device", "cpu", "--batch", "2", "--sequence", "32"]
    plan = tmp_path / "plan.json"
    status, text, err = run(capsys, "plan", "tiny", *shape, "--device-memory", "16MiB", "--json", "--out", str(plan))
    assert status == 0, err
    found = json.loads(text)["plan"]
    assert found["n_persist"] < found["n_chunks"], "16 MiB do not hold every state"
    command = ["train", "--model", "tiny", *shape, "--steps", "2", "--warmup", "0", "--plan", str(plan)]
    command += ["--folder", str(tmp_path / "run"), "--no-model", "--sample-tokens", "0", "--checkpoint-every", "0"]
    status, _, err = run(capsys, *command)
    assert status == 0, err
    planned, used = Plan.load(plan), Plan.load(tmp_path / "run" / "plan.json")
    # Times are predicted again for the machine that runs the plan.
    assert replace(used, step_ms=planned.step_ms) == planned


@pytest.mark.slow
def test_memory_that_holds_no_plan_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--model", "tiny", "--device", "cpu", "--device-memory", "1MiB", "--folder", str(tmp_path)]
    status, _, err = run(capsys, *command)
    assert status == 2
    assert "no plan fits the" in err.splitlines()[-1]
    assert "available 1 MiB" in err.splitlines()[-1]
    assert not (tmp_path / "job.json").exists(), "a failed start leaves no run behind"


@pytest.mark.slow
def test_a_shipped_profile_plans_for_a_machine_that_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    status, text, err = run(capsys, "plan", "llama-7b", "--hardware", "rtx3090", "--batch", "1", "--json")
    assert status == 0, err
    plan = json.loads(text)["plan"]
    assert plan["device_bytes"] <= 24 * 1024**3
    assert plan["n_persist"] < plan["n_chunks"]


@pytest.mark.parametrize("option", ["--device-memory", "--host-memory"])
def test_a_negative_size_is_named(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", "tiny", "--hardware", "h100", option, "-8GiB")
    assert (status, f"{option}: must be a number of bytes or text like '24GiB', not '-8GiB'" in err) == (2, True), err


def test_a_gpu_too_full_to_be_measured_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 MiB.")

    monkeypatch.setattr("protrain.calibrate", fail)
    assert main(["calibrate", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "protrain calibrate: close what else uses the GPU, as nvidia-smi or rocm-smi lists it: CUDA out of memory. "
        "Tried to allocate 32.00 MiB."
    )


@pytest.mark.slow
def test_calibrate_measures_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "machine.json"
    status, text, err = run(capsys, "calibrate", "--device", "cpu", "--seconds", "0.05", "--json", "--out", str(out))
    assert status == 0, err
    hardware = HardwareProfile.load(out)
    assert HardwareProfile.from_json(text) == hardware
    assert (hardware.device_type, hardware.source) == ("cpu", "measured")
    status, text, err = run(
        capsys, "plan", "tiny", "--hardware", str(out), "--batch", "1", "--sequence", "16", "--json"
    )
    assert status == 0, err
    assert json.loads(text)["plan"]["tokens"] == 16


@pytest.mark.parametrize("command", ["calibrate", "train"])
def test_gpus_starts_the_command_in_as_many_processes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, list[str]]] = []

    def launch(count: int, words: list[str]) -> int:
        started.append((count, words))
        return 3 * (len(started) - 1)

    monkeypatch.setattr("protrain.cli.launch.launch", launch)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = [command, "--gpus", "2", "--device", "cpu"]
    assert main(words) == 0
    with pytest.raises(SystemExit, match="3"):
        main(words)
    assert started == [(2, words)] * 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(words) == 2, "4 processes were started, and 2 are wanted"
    assert len(started) == 2
