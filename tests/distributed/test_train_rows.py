"""`protrain train` on conversations: it learns the answers, and a step has the same bits however it is divided."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protrain.cli.data import COUNTED, marks_file
from protrain.cli.main import main
from protrain.planning import Plan
from tests.distributed.pool import on_ranks
from tests.distributed.train_runs import command, outcome

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SEQUENCE = 48


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with conversations, and a small model that drops out activations, whose tokenizer has no template."""
    folder = tmp_path_factory.mktemp("rows")
    alphabet = sorted({chr(byte) for byte in range(32, 127)})
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=120, special_tokens=["</s>", "<user>", "<assistant>"], initial_alphabet=alphabet
    )
    inner.train_from_iterator(["how many is it"], trainer)
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    tokenizer.save_pretrained(folder / "source")
    end = tokenizer.eos_token_id
    config = transformers.GPT2Config(
        vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=end, eos_token_id=end
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "source")
    (folder / "template.jinja").write_text(TEMPLATE)
    chats = [
        [
            {"role": "user", "content": f"how many is {'a' * number}"},
            {"role": "assistant", "content": "many" if number > 5 else "few of them"},
        ]
        for number in range(1, 13)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in 5 * chats))
    return folder


def arguments(workplace: Path, folder: Path, **more: Any) -> list[str]:
    data = {"model": workplace / "source", "data": workplace / "chat.jsonl", "folder": folder}
    how = {"chat_template": workplace / "template.jinja", "batch": 1, "sequence": SEQUENCE, "steps": 4}
    return command(**{**data, **how, "sample_tokens": 20, **more})


@pytest.fixture(scope="module")
def six(workplace: Path) -> Path:
    """The run of one process with six batches in a step."""
    folder = workplace / "six"
    assert main(arguments(workplace, folder, accumulation=6)) == 0
    return folder


def train_as_rank(rank: int, command: list[str]) -> int:
    """Run the command as one of the ranks."""
    return main(command)


@pytest.mark.slow
def test_the_number_of_gpus_changes_no_bit_where_batches_count_unequally(workplace: Path, six: Path) -> None:
    folder = workplace / "two"
    assert on_ranks(2, train_as_rank, arguments(workplace, folder, accumulation=3, device_memory="1145KiB")) == [0, 0]
    plan = Plan.load(folder / "plan.json")
    assert plan.n_persist < plan.n_chunks, "some states live in host memory"
    assert outcome(folder) == outcome(six)
    assert len({row.get("loss") for row in outcome(six)["rows"]}) > 4, "it trains"
    marks = np.fromfile(marks_file(six / "data", "train"), np.uint8).reshape(-1, SEQUENCE)
    assert len(set(np.count_nonzero(marks & COUNTED, axis=1))) > 2


def test_a_killed_run_goes_on_to_the_same_bits(workplace: Path, six: Path) -> None:
    folder = workplace / "again"
    assert main(arguments(workplace, folder, accumulation=6, checkpoint_every=2)) == 0
    for path in (*folder.glob("checkpoints/*-4"), folder / "model"):
        shutil.rmtree(path)
    (folder / "summary.json").unlink()
    (workplace / "template.jinja").rename(workplace / "moved.jinja")
    again = ["train", "--resume", "--folder", str(folder), "--chat-template", str(workplace / "moved.jinja")]
    try:
        assert main(again) == 0
    finally:
        (workplace / "moved.jinja").rename(workplace / "template.jinja")
    assert outcome(folder) == outcome(six)


@pytest.mark.slow
def test_the_loss_of_a_step_is_the_mean_over_counted_tokens(workplace: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(workplace / "source")
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model = transformers.AutoModelForCausalLM.from_pretrained(workplace / "source", config=config)
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(workplace / "source").save_pretrained(tmp_path / "model")
    losses = {}
    for batch, accumulation in ((6, 1), (2, 3), (1, 6)):
        folder = tmp_path / f"{batch}"
        more: dict[str, Any] = {"batch": batch, "accumulation": accumulation, "model": tmp_path / "model"}
        assert main(arguments(workplace, folder, steps=2, **more)) == 0
        losses[batch] = [row["loss"] for row in outcome(folder)["rows"] if "loss" in row]
    assert losses[2] == pytest.approx(losses[6], rel=1e-6)
    assert losses[1] == pytest.approx(losses[6], rel=1e-6)


@pytest.mark.slow
def test_a_chat_is_learnt_and_the_model_keeps_the_template(workplace: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"steps": 60, "batch": 4, "device_memory": "60MiB"}
    assert main(arguments(workplace, tmp_path / "run", **more)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["initial_loss"] > 4
    assert summary["evaluation_loss"] < 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.chat_template == TEMPLATE
    for question, answer in (("how many is aaaaaaaaa", "many</s>"), ("how many is aaa", "few of them</s>")):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(said[0, ids.shape[1] :]) == answer


def test_options_that_need_rows_are_refused_for_text(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some text")
    assert main(arguments(workplace, tmp_path / "run", data=tmp_path / "text.txt")) == 2
    said = capsys.readouterr().err.splitlines()
    refused = "--chat-template is for rows of data, and --data is read as plain text: leave it out"
    assert said[-1] == f"protrain train: {refused}"
    command = ["train", "--model", "tiny", "--data", str(tmp_path / "text.txt"), "--folder", str(tmp_path / "other")]
    assert main([*command, "--no-packing"]) == 2
    assert "--no-packing is for rows of data, and --data is read as plain text" in capsys.readouterr().err
