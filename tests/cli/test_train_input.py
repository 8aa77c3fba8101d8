"""Input that could fail late or without its name: seeds, pipes, edited jobs, full disks."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protrain.cli.codec import Codec
from protrain.cli.data import training_batch
from protrain.cli.job import TrainJob
from protrain.cli.main import main
from protrain.cli.run_files import JOB_FILE
from protrain.cli.sources import find_source
from protrain.cli.text import tokenize


def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    most = 2**64 - 1  # what the generators take
    with pytest.raises(SystemExit) as stop:
        main(["train", "--model", "tiny", "--folder", str(tmp_path / "run"), "--seed", str(most + 1)])
    assert stop.value.code == 2
    assert f"--seed: must be between 0 and {most}, not {most + 1}" in capsys.readouterr().err


def test_the_largest_seeds_draw_other_batches(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(map(chr, np.random.default_rng(0).integers(32, 126, 5000))))
    tokens = tokenize([tmp_path / "text.txt"], Codec(), tmp_path / "data", held_out=0.0)
    drawn = [
        training_batch(tokens, seed=seed, step=step, micro_batch=0, batch=4, sequence=16)["input_ids"].tolist()
        for seed in (2**64 - 1, 2**64 - 2)
        for step in (0, 1)
    ]
    assert all(drawn.count(batch) == 1 for batch in drawn)


def test_text_that_is_no_regular_file_is_named_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"--data: {path} is no regular file"):
            find_source(path)


@pytest.mark.parametrize("option", ["--batch", "--sequence"])
@pytest.mark.parametrize(
    "command",
    [
        ["train", "--device", "cpu", "--device-memory", "60MiB", "--model", "tiny", "--steps", "2"],
        ["plan", "--device", "cpu", "--device-memory", "60MiB", "tiny"],
        ["plan", "--hardware", "h100", "llama2-13b"],
        ["plan", "--compare", "h100x1,a100x8", "llama2-13b"],
    ],
)
def test_a_batch_that_no_memory_holds_is_refused_before_it_is_made(
    command: list[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("a batch was made")

    monkeypatch.setattr("protrain.cli.prepare.read_corpus", made)
    monkeypatch.setattr("protrain.cli.plan_trace.stand_in", made)
    assert main([*command, option, str(10**12)]) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"no plan fits the (GPU|device) memory: needed .*embeddings of a batch of .*1,000,000,000,000", error
    )
    assert "Give a smaller --batch or --sequence: more than " in error
    assert not any(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *((name, 0, "must be at least") for name in ("batch", "steps", "keep", "log_every", "sequence")),
        ("accumulation", 0, "must be between 1 and 65536, not 0"),
        ("accumulation", 10**9, "must be between 1 and 65536, not 1000000000"),
        ("threads", 10**9, "must be between 1 and 1024, not 1000000000"),
        ("seed", -1, "must be between 0 and 18446744073709551615, not -1"),
        ("dtype", "foo", "must be one of bfloat16, float16, float32, not foo"),
        ("held_out", 1.5, "must be between 0 and 0.5, not 1.5"),
        ("clip", -1.0, "must be between 0 and 1e+09, not -1"),
        ("clip", float("nan"), "must be between 0 and 1e+09, not nan"),
        ("learning_rate", -0.1, "must be between 0 and 10, not -0.1"),
        ("min_learning_rate", 2.0, "must be between 0 and 1, not 2"),
        ("weight_decay", -1.0, "must be between 0 and 10, not -1"),
        ("micro_batches", 0, "must be at least 1, not 0"),
        ("logger", "paper", "must be one of tensorboard, wandb, not paper"),
        ("loss_on", "nothing", "must be one of answers, all, not nothing"),
        ("lora", "rank=16", "'rank=16' is none of r=N"),
        ("device_memory", "lots", "must be a number of bytes or text like '24GiB', not 'lots'"),
    ],
)
def test_an_edited_job_is_checked(
    name: str, value: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TrainJob(model="tiny", data=str(tmp_path / "nowhere")).save(tmp_path / JOB_FILE)
    job = json.loads((tmp_path / JOB_FILE).read_text())
    (tmp_path / JOB_FILE).write_text(json.dumps({**job, name: value}))
    assert main(["train", "--resume", "--folder", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / JOB_FILE) in error
    assert f"--{name.replace('_', '-')} {said}" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin"])
def test_a_full_disk_is_named_and_gets_its_bytes_back(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100_000)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"cannot write the tokens of the data to {folder}: No space left") as error:
        tokenize([tmp_path / "text.txt"], Codec(), folder, held_out=0.5)
    assert "make room there, or give another --folder" in str(error.value)
    assert list(folder.iterdir()) == []


@pytest.fixture(scope="module")
def with_a_late_token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 256 embeddings whose tokenizer was given one more token."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"word{number}": number for number in range(256)}, unk_token="word0")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="word1")
    tokenizer.add_tokens(["<late>"])
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
        "{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
    )
    folder = tmp_path_factory.mktemp("late")
    tokenizer.save_pretrained(folder)
    transformers.LlamaConfig(
        **{"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 1, "max_position_embeddings": 16},
    ).save_pretrained(folder)
    return folder


def _lines(kind: str, asked: str) -> str:
    answer = "word2 word3 word4 " * 40
    if kind == "text":
        return f"{asked} {answer}\n"
    if kind == "rows":
        return json.dumps({"prompt": f"{asked} ", "completion": answer}) + "\n"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


@pytest.mark.parametrize("kind", ["text", "rows", "conversations"])
def test_a_token_without_an_embedding_is_named_with_its_line(
    kind: str, with_a_late_token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / ("data.txt" if kind == "text" else "data.jsonl")
    command = ["train", "--model", str(with_a_late_token), "--from-scratch", "--device", "cpu", "--data", str(data)]
    command += ["--steps", "1", "--folder", str(tmp_path / "run"), "--no-model"]
    data.write_text(_lines(kind, "word5") * 2 + _lines(kind, "<late>") + _lines(kind, "word5"))
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"{data}, line 3: token 256 ('<late>') has no embedding, as --model has 256: take it out" in said
    assert "model.resize_token_embeddings(257)" in said
    data.write_text(_lines(kind, "word5") * 4)
    assert main(command) == 0


def test_a_token_that_every_text_has_needs_an_embedding(
    with_a_late_token: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(with_a_late_token, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<late>"}))
    command = ["train", "--model", str(model), "--from-scratch", "--data", __file__, "--folder", str(tmp_path / "run")]
    assert main(command) == 2
    assert f"{model} has 256 embeddings and its tokens need 257: put the tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("tokens", [7, 200])
def test_the_prompt_of_a_sample_leaves_room_for_what_follows(
    tokens: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        **{"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 1, "max_position_embeddings": 16},
    ).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("a line that is longer than all positions of the model\n" * 20)
    command = ["train", "--model", str(tmp_path / "model"), "--from-scratch", "--device", "cpu", "--steps", "1"]
    command += ["--data", str(tmp_path / "text.txt"), "--folder", str(tmp_path / "run"), "--no-model"]
    assert main([*command, "--sample-tokens", str(tokens)]) == 0
    assert (tmp_path / "run" / "summary.json").exists()
