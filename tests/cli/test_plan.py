"""`protrain plan`: what it prints, draws and writes, and that what it writes drives a run or is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protrain.cli import plan_run
from protrain.cli.commands import build_parser
from protrain.cli.main import main
from protrain.cli.models import read_architecture
from protrain.cli.plan_machine import machine_of, other_machines
from protrain.cli.plan_text import summary_text
from protrain.common.errors import PlanError
from protrain.common.tables import format_bytes, format_ms
from protrain.hardware.shipped import load
from protrain.planning import Answer, Largest, Plan, evaluate, explain, search
from protrain.planning.answer import Job
from tests.cli.test_plan_timeline import dark_pixels
from tests.planning.models import make_profile, with_attention

TINY = ["plan", "tiny", "--hardware", "rtx3090", "--batch", "2", "--sequence", "32"]
TIGHT = ["--device-memory", "150MiB", "--host-memory", "1GiB"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_the_plan_is_printed_with_bytes_time_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = run(capsys, *TINY, "--device-memory", "134MiB")[1]
    assert "--explain says what each number would change" in verdict
    assert "n_persist 0 -> 1" not in verdict
    status, out, err = run(capsys, *TINY, "--device-memory", "134MiB", "--explain")
    assert status == 0, err
    for words in (
        "tokens/s",
        "persistent chunks",
        "activations",
        "optimizer states",
        "host optimizer  ",
        "limited by",
        "n_persist 0 -> 1",
        "infeasible: ",
        "64 GiB more RAM",
        "estimated from counted operations",
    ):
        assert words in out, words
    lanes = [line for line in out.splitlines() if line.startswith("GPU  ")]
    assert len(lanes) == 1
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
    status, out, err = run(capsys, *TINY, "--device-memory", "100MiB", "--json")
    answer = json.loads(out)
    assert (status, answer["fits"], answer["plan"]) == (2, False, None)
    assert answer["verdict"] in err
    assert "no plan fits the GPU memory: needed " in answer["verdict"]
    assert answer["machine"]["rates"] == "composed"
    whats = [other["what"] for other in answer["alternatives"]]
    more = "64 GiB more RAM (--host-memory 128GiB)"
    assert {"--batch 1", more, "2 GPUs (--gpus 2)"} <= {*whats}
    assert not any("rtx4090" in what for what in whats), "the limit that is given would be that of another card too"


def test_a_batch_that_no_plan_fits_is_an_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["--batch", "77", "--no-compile"]  # which no other test has counted before
    status, out, err = run(capsys, *TINY, *large, "--device-memory", "64KiB", "--json")
    answer = json.loads(out)
    assert (status, answer["fits"], answer["plan"], answer["parameters"]) == (2, False, None, 1_820_352)
    assert answer["verdict"] in err
    assert "Nothing that was tried instead fits." in err
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


@pytest.mark.parametrize(
    ("counts", "inside", "words"),
    [
        (
            {"n_persist": 1, "n_buffer": 2, "n_swap": 1, "n_ckpt": 2, "n_ckpt_swap": 1, "n_speculate": 1},
            False,
            (
                "1 of 6 chunks on the GPU; the weights of the other 5 pass from host memory through 2 buffers and 1 "
                "large one updates",
                "the host does 1 chunk before the norm is known; the GPU helps when the host is late",
                "of 4 blocks 1 keep theirs, 1 move them to host memory, 2 recompute them (1 of these from inputs in "
                "host memory)",
            ),
        ),
        (
            {"n_persist": 5, "n_buffer": 0, "n_swap": 0, "n_ckpt": 4},
            False,
            (
                "5 of 6 chunks on the GPU; the weight of the other passes from host memory through 1 large buffer "
                "updates",
            ),
        ),
        (
            {"n_persist": 6, "n_buffer": 0, "n_swap": 0, "n_ckpt": 4, "keep_attention": True},
            True,
            (
                "model states all 6 chunks on the GPU",
                "updates inside backward",
                "of 4 blocks 4 recompute them (what attention put out is kept)",
            ),
        ),
    ],
)
def test_a_plan_is_put_in_words(counts: dict[str, Any], inside: bool, words: tuple[str, ...]) -> None:
    known = with_attention(make_profile(4), 0.1, 8)
    large = replace(known.parameters[-1], shape=(4 * known.parameters[-1].numel,))  # more than a chunk
    profile = replace(known, parameters=(*known.parameters[:-1], large), accumulation=8)
    hardware = load("h100")
    size = known.parameters[0].numel
    plan = evaluate(profile, hardware, **counts, chunk_elements=size, step_during_backward=inside)
    answer = explain(plan, profile, hardware, step_during_backward=inside)
    text = " ".join(summary_text(replace(answer, job=Job(tokens=2 * 10**9, price=0.5))).split())
    for line in (
        *words,
        f"step {format_ms(plan.step_ms)}, {8192 / plan.step_ms * 1e3:,.0f} tokens/s (predicted)",
        "2 B tokens ",
        "batch 8 sequences x 8 a step",
        f"GPU memory {format_bytes(plan.device_bytes)} of {format_bytes(hardware.device_bytes)}",
        f"host memory {format_bytes(plan.host_bytes)} of the {format_bytes(hardware.host_bytes)} for training",
        "; the GPU computes ",
    ):
        assert line in text, text
    works = plan.n_persist < plan.n_chunks
    assert ("% more slowly" in text) == works, "a host without work slows nothing down"


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


@pytest.mark.slow
def test_logits_are_counted_where_the_loss_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], llama_folder: Callable[..., Path]
) -> None:
    model, plans = str(llama_folder(words=8192, max_position_embeddings=512)), []
    for options, loss in (([], "chunked loss"), (["--no-chunked-loss"], "whole logits")):
        out = tmp_path / "plan.json"
        argv = ["plan", model, "--hardware", "rtx3090", "--batch", "4", "--sequence", "512", *options]
        status, text, err = run(capsys, *argv, "--out", str(out))
        assert status == 0, err
        plans.append(Plan.load(out))
        assert f", {loss} step " in " ".join(text.split())
    assert [plan.chunked_loss for plan in plans] == [True, False]
    assert plans[1].device_bytes - plans[0].device_bytes > 4 * 4 * 512 * 8192, "logits in fp32"


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


def test_a_sequence_has_two_spellings() -> None:
    found = [build_parser("plan").parse_args(["plan", "tiny", option, "48"]) for option in ("--seq", "--sequence")]
    assert found[0] == found[1]
    assert found[0].sequence == 48


# -- pictures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [["--device-memory", "134MiB"], ["--device-memory", "138MiB", "--accumulation", "2"]])
def test_a_picture_of_a_step_is_drawn(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of one with sums in host memory, for whose copies the picture had no color."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "step.png"
    status, _, err = run(capsys, *TINY, *more, "--json", "--picture", str(path))
    assert status == 0, err
    assert dark_pixels(path).float().mean() > 0.1


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
