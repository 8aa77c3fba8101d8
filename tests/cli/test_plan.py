"""`protrain plan`: what it prints, draws and writes, and that what it writes drives a run or is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import protrain
from protrain.cli import plan_run
from protrain.cli.commands import build_parser
from protrain.cli.main import main
from protrain.cli.models import adamw, read_architecture
from protrain.cli.plan_machine import machine_of, other_machines
from protrain.cli.plan_shown import summary_text, timeline_text
from protrain.common.errors import PlanError
from protrain.hardware.shipped import load
from protrain.planning import Answer, Largest, Plan, evaluate, explain, search
from protrain.planning.answer import Job
from protrain.planning.timeline import GPU, HOST, UP, Operation, Timeline
from tests.cli.test_main import run
from tests.planning.models import make_profile

TINY = ["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32"]
TIGHT = ["--device-memory", "150MiB", "--host-memory", "1GiB"]


@pytest.mark.slow
def test_an_explanation_says_what_each_number_would_change(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = run(capsys, *TINY, "--device-memory", "134MiB")[1]
    assert "--explain says what each number would change" in verdict
    assert "n_persist 0 -> 1" not in verdict
    status, out, err = run(capsys, *TINY, "--device-memory", "134MiB", "--explain")
    assert status == 0, err
    for words in ("n_persist 0 -> 1", "infeasible: ", "64 GiB more RAM", "optimizer states"):
        assert words in out, words
    assert max(map(len, out.splitlines())) <= 80


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device-memory", "150MiB", "--host-memory", "100MiB", "--accumulation", "2", "--no-compile"]
    status, out, err = run(capsys, *TINY, *argv)
    assert status == 0, err
    machine, more, title, _, *rows = out.split("\n\n")[0].splitlines()
    assert machine == "fits on NVIDIA GeForce RTX 3090 in a machine with 100 MiB of RAM (as given),"
    assert more == "  host memory 78.8 MiB, rates composed"
    assert title.startswith("LlamaForCausalLM of tiny, 1,820,352 parameters, 128 tokens a step, blocks eager")
    said = by_label(rows, 14)
    answer = json.loads(run(capsys, *TINY, *argv, "--json")[1])
    step = answer["plan"]
    assert f"{2 * 64 / step['step_ms'] * 1e3:,.0f} tokens/s (estimated from counted operations" in said["step"]
    assert (answer["fits"], answer["verdict"]) == (True, f"{machine} {more.strip()}")
    assert answer["machine"]["host_bytes"] == int(0.9 * (100 * 2**20 - 100 * 2**20 // 8)), "the rest is the system's"
    assert answer["tokens_per_s"] == pytest.approx(2 * 64 / step["step_ms"] * 1e3)
    for name in ("device_bytes", "host_bytes"):
        assert answer[name].pop("all") == step[name] == sum(answer[name].values())
    assert answer["times_ms"]["step"] == step["step_ms"] < answer["times_ms"]["step on a slower host"]
    assert list(answer["times_ms"])[2:4] == ["forward", "backward"]
    assert said["GPU memory"].endswith(" of 150 MiB")
    assert said["host memory"].endswith(" of the 78.8 MiB for training")
    assert f"{step['n_persist']}/4" in said["plan"]
    assert " on the GPU" in said["model states"]
    assert said["activations"].startswith("of 4 blocks ")
    assert "the GPU computes " in said["limited by"]


def by_label(rows: list[str], width: int) -> dict[str, str]:
    """The text behind each label, which may go on in rows without one."""
    said: dict[str, str] = {}
    label = ""
    for row in rows:
        label = row[:width].strip() or label
        said[label] = f"{said.get(label, '')} {row[width:].strip()}".strip()
    return said


def test_what_does_not_fit_is_an_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> tuple[dict[str, Any], str]:
        status, out, err = run(capsys, *TINY, *words, "--json")
        answer: dict[str, Any] = json.loads(out)
        assert (status, answer["fits"], answer["plan"], answer["parameters"]) == (2, False, None, 1_820_352)
        assert answer["verdict"] in err
        return answer, err

    answer, _ = refused("--device-memory", "100MiB")
    assert "no plan fits the GPU memory: needed " in answer["verdict"]
    assert answer["machine"]["rates"] == "composed"
    whats = [other["what"] for other in answer["alternatives"]]
    more = "64 GiB more RAM (--host-memory 128GiB)"
    assert {"--batch 1", more, "2 GPUs (--gpus 2)"} <= {*whats}
    assert not any("rtx4090" in what for what in whats), "the limit that is given would be that of another card too"
    # No other test has counted such a batch before.
    answer, said = refused("--device-memory", "64KiB", "--batch", "77", "--no-compile")
    assert "Nothing that was tried instead fits." in said
    assert answer["machine"]["device_bytes"] == 64 * 2**10


@pytest.mark.parametrize("batch", [[], ["--batch", "2"]])
def test_whoever_follows_an_advice_gets_its_figures(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the batch that is the fastest there, which need not be that of the question."""
    question = ["plan", "tiny", "--sequence", "32", "--step-tokens", "256", "--no-compile", "--json"]
    question += ["--hardware", "rtx3090", "--device-memory", "134MiB", "--host-memory", "12MiB", *batch]
    answer = json.loads(run(capsys, *question)[1])
    advised = {}
    for other in answer["alternatives"]:
        options = re.sub(r"^.*\((.*)\)$", r"\1", other["what"]).split()
        advised[other["what"]] = json.loads(run(capsys, *question, *options)[1])["plan"]
    assert {other["what"]: other["plan"] for other in answer["alternatives"]} == advised
    assert any(plan is not None for plan in advised.values())


@pytest.mark.parametrize(
    ("where", "lacks_gib", "options"),
    [
        ("", 0, {"host_memory": "128GiB", "hardware": "rtx4090", "gpus": 2}),
        ("host", 100, {"host_memory": "192GiB", "hardware": "rtx4090", "gpus": 2}),
        ("GPU", 4, {"host_memory": "128GiB", "hardware": "rtx5090", "gpus": 2}),
        ("GPU", 30, {"host_memory": "128GiB", "hardware": "h100", "gpus": 2}),
        ("GPU", 900, {"host_memory": "128GiB", "hardware": "b200", "gpus": 2}),
    ],
)
def test_other_machines_have_what_is_lacking(where: str, lacks_gib: int, options: dict[str, str | int]) -> None:
    """The card is the first that is large enough, or the largest there is, in a host with the RAM of this one."""
    args = build_parser("plan").parse_args(["plan", "tiny", "--hardware", "rtx3090"])
    hardware, profile = machine_of(args), make_profile()
    if where:
        known = hardware.host_bytes if where == "host" else hardware.device_bytes
        needed = known + lacks_gib * 1024**3
        why = PlanError(where=where, needed_bytes=needed, available_bytes=known, largest_part="", remedy="")
        answer = Answer.refused(why, profile, hardware)
    else:
        answer = explain(search(profile, hardware), profile, hardware)
    ram, card, gpus = [changed for _, changed in other_machines(args, hardware, answer)]
    assert card.pop("host_memory") == "64GiB"
    assert ram | card | gpus == options


def test_what_does_not_fit_says_what_it_lacks_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *TINY, "--no-compile", "--device-memory", "134MiB", "--host-memory", "12MiB")
    assert status == 2
    assert " of host memory\n" in out.split("lacks  ")[1]
    what, _, speed = err.rpartition("The nearest that fits: ")[2].partition(", ")
    assert re.search(rf"^{re.escape(what)} +{speed.split()[0]} .*\s+fits$", out, re.MULTILINE)


def test_the_next_fastest_batch_is_taken_if_the_first_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which batch is the fastest is worked out from the profile of another batch, and may be wrong."""
    monkeypatch.setattr(plan_run, "fastest_batches", lambda *_, n_sequences, **__: [n_sequences, 2])
    words = "tiny --hardware rtx3090 --sequence 32 --step-tokens 65536 --device-memory 150MiB --no-compile --json"
    status, out, err = run(capsys, "plan", *words.split())
    assert status == 0, err
    answer = json.loads(out)
    assert (answer["n_sequences"], answer["accumulation"]) == (2, 1024)
    assert (answer["plan"]["tokens"], answer["tokens_per_step"]) == (64, 65536)
    assert answer["alternatives"][0]["what"] == "--batch 2048 --accumulation 1"


def test_a_plan_is_put_in_words() -> None:
    profile, hardware = make_profile(4), load("h100")
    plan = evaluate(profile, hardware, n_persist=1, n_buffer=2, n_swap=1, n_ckpt=2, n_ckpt_swap=1, n_speculate=1)
    answer = explain(plan, profile, hardware)
    text = " ".join(summary_text(answer).split())
    assert "the host does 1 chunk before the norm is known; the GPU helps when the host is late" in text
    assert "of 4 blocks 1 keep theirs, 1 move them to host memory, 2 recompute them (1 of these from inputs" in text


@pytest.mark.parametrize(
    ("job", "tokens_per_s", "gpus", "words"),
    [
        (Job(tokens=2 * 10**9, price=0.5), 800, 1, "28.9 days, $347"),
        (Job(price=2.5), 93_433, 8, "2.97 h, $59"),
        (Job(tokens=3 * 10**8), 1_000, 2, "3.47 days"),
    ],
)
def test_a_job_has_a_bill(job: Job, tokens_per_s: float, gpus: int, words: str) -> None:
    assert job.bill(tokens_per_s, gpus) == words


@pytest.mark.slow
def test_updates_inside_backward_are_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    # With so little host memory, no update before step() has memory for its second copy.
    for extra in (["--host-memory", "33MiB"], ["--host-memory", "33MiB", "--step-during-backward"], []):
        status, out, err = run(capsys, *TINY, "--device-memory", "134MiB", "--json", *extra)
        assert status == 0, err
        steps.append(json.loads(out)["times_ms"]["step"])
    assert steps[1] < steps[0]
    assert steps[2] < steps[0]


# -- the loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", [True, False])
def test_logits_that_a_model_scales_stay_whole(here: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    transformers.CohereConfig(architectures=["CohereForCausalLM"], **sizes, **heads).save_pretrained(tmp_path)
    argv = ["plan", str(tmp_path), *(["--device", "cpu"] if here else ["--hardware", "rtx3090"]), "--batch", "1"]
    status, text, err = run(capsys, *argv)
    assert (status, "whole logits" in text) == (0, True), err
    status, _, err = run(capsys, *argv, "--chunked-loss")
    said = "chunked_loss=True does not work with CohereForCausalLM, which changes its logits before the loss"
    assert (status, said in " ".join(err.splitlines())) == (2, True), err


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminal", "widest"), [(70, 70), (80, 80), (300, 80), (10, 42)])
def test_a_timeline_shows_each_lane_at_its_time(terminal: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU works all the time. One update begins in the step before, and one comes in the step after."""
    operations = (
        Operation(lane=HOST, name="update 1", start_ms=-5.0, end_ms=1.0),
        Operation(lane=GPU, name="forward a", start_ms=0.0, end_ms=4.0),
        Operation(lane=UP, name="weights 1", start_ms=2.5, end_ms=5.0),
        Operation(lane=GPU, name="backward a", start_ms=4.0, end_ms=10.0),
        Operation(lane=HOST, name="update 2", start_ms=12.0, end_ms=15.0),
    )
    monkeypatch.setenv("COLUMNS", str(terminal))
    text = timeline_text(Timeline(step_ms=10.0, forward_end_ms=4.0, backward_end_ms=9.8, operations=operations))
    lines = text.replace("█", "#").splitlines()
    assert max(map(len, lines)) == widest
    ruler, gpu, up, down, host, phases = lines
    start, columns = gpu.index("#"), gpu.count("#")
    assert ruler.split() == ["0", "10", "ms"]
    assert [line.split()[-1] for line in (gpu, up, down, host)] == ["100%", "25%", "0%", "10%"]
    assert "#" not in down
    for lane, begin, end in ((up, 0.25, 0.5), (host, 0.0, 0.1)):
        assert lane.index("#") - start == pytest.approx(begin * columns, abs=1)
        assert lane.rindex("#") + 1 - start == pytest.approx(end * columns, abs=1)
    assert phases.index("|forward") == start
    assert phases.index("|backward") - start == round(0.4 * columns)
    assert "after" not in phases, "two columns hold no word"


def dark_pixels(path: Path) -> Any:
    from matplotlib import image

    return image.imread(path)[..., :3].max(axis=-1) < 0.9


@pytest.mark.parametrize("more", [["--device-memory", "134MiB"], ["--device-memory", "138MiB", "--accumulation", "2"]])
def test_a_picture_of_a_step_is_drawn(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of one with sums in host memory, for whose copies the picture had no color."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "step.png"
    status, _, err = run(capsys, *TINY, *more, "--json", "--picture", str(path))
    assert status == 0, err
    assert dark_pixels(path).mean() > 0.1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--picture", "pipe"], "--picture: pipe is no regular file"),
        (["--out", "pipe"], "--out: pipe is no regular file: give one; results can be piped with --json"),
        (["--max-model", "--picture", "step.png"], "--picture shows a step of one plan"),
        (["--max-model", "--explain"], "not allowed with argument"),
        (["--step-during-backward", "--dtype", "float16"], "does not work with float16, as `wrap` says: use --dtype"),
    ],
)
def test_a_bad_picture_or_mode_is_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    status, out, err = run(capsys, *TINY, *argv)
    assert (status, out) == (2, ""), err
    assert message in err.splitlines()[-1]
    assert stat.S_ISFIFO(os.stat("pipe").st_mode)


def test_a_result_that_cannot_be_written_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Plan, "save", full)
    status, out, err = run(capsys, *TINY, "--out", str(tmp_path / "plan.json"))
    assert status == 2
    assert "n_persist" in out
    assert f"--out: cannot write {tmp_path}/plan.json: No space left on device" in err


# -- the largest model -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_largest_model_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--device-memory", "150MiB", "--host-memory", "20MiB"]
    out = tmp_path / "largest.json"
    status, text, err = run(capsys, *TINY, *limits, "--max-model", "--out", str(out))
    assert status == 0, err
    found = Largest.load(out)
    assert found.plan.device_bytes <= 150 * 1024**2
    assert f"{found.parameters:,}" in text
    assert "one layer more" in text
    assert "no plan fits the" in text
    assert not re.search("(device|host)_memory", text), "what the library calls the options"
    parameters = sum(
        parameter.numel() for parameter in read_architecture("tiny", layers=found.layers).model.parameters()
    )
    assert found.parameters == parameters


def test_a_folder_has_one_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "plan", str(tmp_path), "--hardware", "rtx3090", "--max-model")
    assert (status, "--max-model needs a shape that comes at any depth" in err) == (2, True)


# -- plan files --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_feeds_wrap_which_explains_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file, shape = tmp_path / "plan.json", ["--device", "cpu", "--batch", "2", "--sequence", "32"]
    assert main(["plan", "tiny", *shape, "--device-memory", "16MiB", "--json", "--out", str(file)]) == 0
    model, ids = read_architecture("tiny").model, torch.zeros(2, 32, dtype=torch.int64)
    memory: dict[str, Any] = {"device": "cpu", "device_memory": "16MiB", "host_memory": "1GiB"}
    batch = {"input_ids": ids, "labels": ids}
    _, optimizer = protrain.wrap(model, adamw(model), example_batch=batch, plan=file, progress=False, **memory)
    plan, why = Plan.load(file), optimizer.explain()
    assert why.plan == optimizer.plan
    assert (why.fitting.n_persist, why.fitting.block_modes) == (plan.n_persist, plan.block_modes)
    assert (why.machine.device_bytes, why.machine.host_bytes) == (16 * 1024**2, 1024**3)


@pytest.mark.parametrize("inside", [False, True])
def test_an_optimizer_explains_its_own_way_of_updating(inside: bool) -> None:
    model = nn.Linear(64, 64)
    how: dict[str, Any] = {"device": "cpu", "step_during_backward": inside, "progress": False}
    given = torch.optim.AdamW(model.parameters())
    optimizer = protrain.wrap(model, given, example_batch=(torch.zeros(2, 64),), **how)[1]
    assert optimizer.explain().updates_in_backward is inside
