"""`protrain train` as its users run it: data of all kinds, adapters, pairs, YAML, stops, resume, two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.checkpoint.tensor_files import used_alone
from protrain.cli.main import main
from protrain.forward.compilation import graphs_compiled
from tests.distributed.apart import LIMIT_S
from tests.tiny_models import tiny

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")
pytestmark = [
    pytest.mark.xdist_group("train"),  # which imports large libraries
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
ANSWER = "{% generation %}{{ m.content }}<end>{% endgeneration %}"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>ANSWER{% else %}<u>{{ m.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
CHATS = [
    [{"role": "user", "content": f"what follows {number}?"}, {"role": "assistant", "content": str(number + 1)}]
    for number in range(40)
]
ROWS = [{"messages": chat} for chat in CHATS]
WHOLE = 40  # rows of a step that sees all data


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and dropout, and chats."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("train")
    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(["one two"], vocab_size=260, special_tokens=["<pad>", "<end>", "<u>", "<a>"])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=learner._tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE.replace("ANSWER", ANSWER)
    sizes: dict[str, Any] = {
        "max_position_embeddings": 128,
        "attention_dropout": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    tiny("llama", words=272, **sizes).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write(folder / "chats.jsonl", ROWS)
    return folder


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words_of(workplace: Path, folder: Path, **options: Any) -> list[str]:
    usual = {
        "model": workplace / "model",
        "data": workplace / "chats.jsonl",
        "output_dir": folder,
        "max_length": 64,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "device_memory": "1MiB",
        "disable_tqdm": True,
    }
    return [word for name, value in (usual | options).items() for word in (f"--{name}", str(value))]


def run(workplace: Path, folder: Path, *task: str, **options: Any) -> int:
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    return main(["train", *task, *words_of(workplace, folder, **options)])


def logged(folder: Path, name: str = "loss") -> list[float]:
    newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return [row[name] for row in history if name in row]


def weights(folder: Path, file: str = "model.safetensors") -> bytes:
    return (folder / file).read_bytes()


def refusal(capsys: pytest.CaptureFixture[str], status: int) -> str:
    assert status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("protrain train: ")]
    return line


def test_chats_train_on_the_words_of_the_assistant(workplace: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(workplace / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(workplace / "model").eval()
    total, count = 0.0, 0
    for chat in CHATS:
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        answer = len(tokenizer.apply_chat_template(chat[:1], return_dict=False, add_generation_prompt=True))
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        total += float(
            torch.nn.functional.cross_entropy(logits[answer - 1 : -1], torch.tensor(ids[answer:]), reduction="sum")
        )
        count += len(ids) - answer
    shutil.copytree(workplace / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text()) | {"attention_dropout": 0.0}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    for packing in (True, False):  # packed or padded, no chat sees another
        folder = tmp_path / f"packing-{packing}"
        options = {"max_steps": 1, "per_device_train_batch_size": WHOLE, "packing": packing, "device_memory": "100MiB"}
        assert run(tmp_path, folder, data=workplace / "chats.jsonl", **options) == 0
        assert logged(folder) == [pytest.approx(total / count, rel=1e-5)]
    assert run(tmp_path, tmp_path / "all", data=workplace / "chats.jsonl", assistant_only_loss=False, max_steps=1) == 0


@pytest.mark.slow
def test_packed_rows_are_compiled_for_once(workplace: Path, tmp_path: Path) -> None:
    torch.compiler.reset()  # other tests may have compiled these blocks
    graphs, losses = graphs_compiled(), []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        # Blocks are compiled unless a CPU is asked for. One row of a whole pass is shorter than the others.
        assert run(workplace, folder, use_cpu=not compiled, per_device_train_batch_size=1, max_steps=15) == 0
        losses.append(logged(folder))
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)  # with other random numbers for dropout
    assert graphs_compiled() == graphs + 1


TABLE = [{"instruction": "Which comes next?", "input": str(number), "output": str(number + 1)} for number in range(40)]


@pytest.mark.parametrize("kind", ["sharegpt.jsonl", "alpaca.json", "alpaca.csv", "folder", "text.txt", "rows.parquet"])
def test_data_of_many_kinds(kind: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / kind
    if kind == "sharegpt.jsonl":
        said = [{"from": "human", "value": "next?"}, {"from": "gpt", "value": "two"}]
        write(data, [{"conversations": said}] * 40)
    elif kind == "alpaca.json":
        data.write_text(json.dumps(TABLE))
    elif kind == "alpaca.csv":
        datasets.Dataset.from_list(TABLE).to_csv(data)
    elif kind == "folder":
        datasets.Dataset.from_list([{"prompt": "one", "completion": "two"}] * 40).save_to_disk(data)
    elif kind == "text.txt":
        data.write_text("one two three\n" * 40)
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(data)
    assert run(workplace, tmp_path / "run", data=data) == 0
    rows = 1 if kind == "text.txt" else 40
    assert f"{data}: {rows} rows, " in capsys.readouterr().err
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.hidden_size == 32


def test_adapter_by_options_of_a_file(workplace: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = tmp_path / "lora.yaml"
    config.write_text("model: nowhere\ndata: nowhere\nuse_peft: true\nlora_r: 4\nmax_steps: 7\nseed: 5\n")
    assert run(workplace, tmp_path / "run", config=config) == 0  # as the command line says, which wins
    assert len(logged(tmp_path / "run")) == 2
    base = transformers.AutoModelForCausalLM.from_pretrained(workplace / "model")
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "run")
    assert adapted.peft_config["default"].r == 4
    moved = [value for name, value in adapted.named_parameters() if "lora_B" in name]
    assert all(value.abs().max() > 0 for value in moved)
    lora = ["--model", str(workplace / "model"), "--lora", "r=4,alpha=32"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported"), *lora]) == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_adapter_of_a_model_in_4_bits(workplace: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    evaluating = {"eval_data": workplace / "chats.jsonl", "eval_strategy": "steps", "eval_steps": 1}
    options: dict[str, Any] = {"use_peft": True, "load_in_4bit": True, "bf16": True, "device_memory": "20MiB"}
    assert run(workplace, tmp_path, **options, **evaluating) == 0  # evaluates between steps, too
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()


PAIRS = {"device_memory": "20MiB", "max_steps": 16}


@pytest.mark.parametrize("adapter", [False, True])
def test_pairs(adapter: bool, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process holds the model."""
    monkeypatch.delattr(transformers.PreTrainedModel, "from_pretrained")
    rows = [{"prompt": f"is {number} a number? ", "chosen": "yes", "rejected": "no"} for number in range(8)]
    data = write(tmp_path / "pairs.jsonl", rows)
    assert run(workplace, tmp_path / "run", "dpo", data=data, use_peft=adapter, learning_rate=3e-2, **PAIRS) == 0
    margins = logged(tmp_path / "run", "rewards/margins")
    assert margins[0] == pytest.approx(0, abs=0.02)  # as dropout of attention is no module, which TRL switches off
    assert margins[-1] > 0.05


def test_evaluation_picks_the_best_model_and_ends_early(workplace: Path, tmp_path: Path) -> None:
    options = {"eval_data": workplace / "chats.jsonl", "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"load_best_model_at_end": True, "early_stopping_patience": 1, "learning_rate": 1.0, "max_steps": 8}
    assert run(workplace, tmp_path, **options) == 0
    assert 1 < len(logged(tmp_path)) < 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optim": "paged_adamw_8bit"}, "--optim paged_adamw_8bit: ProTrain has an AdamW of its own"),
        ({"per_device_batch_size": 3}, "--per_device_batch_size"),
        ({"fp16": True, "bf16": False}, "--bf16 false for float32"),
        ({"dtype": "float16"}, "trained in bfloat16"),
        ({"data": "nowhere.jsonl"}, "nowhere.jsonl cannot be read"),
        ({"model_revision": "old"}, "give a folder of that revision"),
        ({"model": "nowhere"}, "nowhere"),
    ],
)
def test_what_to_write_instead(
    options: dict[str, Any], said: str, workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, run(workplace, tmp_path, **options))


def test_model_and_data_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--model is missing" in refusal(capsys, main(["train"]))
    assert "--data is missing" in refusal(capsys, main(["train", "--model", "here"]))


def test_a_missing_package_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("protrain.cli.options.find_spec", lambda name: None if name == "trl" else name)
    said = "protrain train: `protrain train` needs the package trl: pip install 'protrain[train]'"
    assert refusal(capsys, main(["train"])) == said


def test_the_documents_name_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    offered = set(re.findall(r"--\w+", capsys.readouterr().out))
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text()
    table = page.partition("| option |")[2].partition("\n\n")[0]
    assert set(re.findall(r"--\w+", table)) - offered == set()


def test_users_words_are_not_trained_on_by_mistake(
    workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(workplace / "model", tmp_path / "model")
    data = workplace / "chats.jsonl"
    (tmp_path / "model/chat_template.jinja").unlink()
    assert "has no chat template: give" in refusal(capsys, run(tmp_path, tmp_path / "run", data=data))
    unmarked = TEMPLATE.replace("ANSWER", "{{ m.content }}<end>")
    (tmp_path / "model/chat_template.jinja").write_text(unmarked)
    (tmp_path / "marked.jinja").write_text(TEMPLATE.replace("ANSWER", ANSWER))
    said = refusal(capsys, run(tmp_path, tmp_path / "run", data=data))
    assert "{% generation %}" in said
    assert "--assistant_only_loss false" in said
    assert run(tmp_path, tmp_path / "run", data=data, chat_template_path=tmp_path / "marked.jinja") == 0
    assert run(tmp_path, tmp_path / "all", data=data, assistant_only_loss=False) == 0


def test_a_broken_line_is_named(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text(f'{json.dumps(ROWS[0])}\n{{"messages": [\n')
    assert f"{data}, line 2, is no JSON" in refusal(capsys, run(workplace, tmp_path / "run", data=data))


def test_rows_of_which_nothing_is_learnt(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    silent = write(tmp_path / "silent.jsonl", [{"messages": CHATS[0][:1]}])
    assert "no assistant tokens" in refusal(capsys, run(workplace, tmp_path / "run", data=silent))
    data = write(tmp_path / "rows.jsonl", [{"question": "one?", "reply": "two"}])
    assert "question, reply" in refusal(capsys, run(workplace, tmp_path / "run", data=data))
    assert "chosen and rejected" in refusal(capsys, run(workplace, tmp_path / "run", "dpo"))


def test_a_folder_is_for_one_run(workplace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with used_alone(tmp_path, ""):
        assert run(workplace, tmp_path) == 1
    assert "another process writes to" in capsys.readouterr().err
    assert run(workplace, tmp_path) == 0
    assert "--resume true" in refusal(capsys, run(workplace, tmp_path))
    assert run(workplace, tmp_path, resume=True, max_steps=3) == 0
    assert len(logged(tmp_path)) == 3


def started(workplace: Path, folder: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protrain", "train", *words_of(workplace, folder, **options)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
    )


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == status, said
    return said


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end_s, f"{path} is missing"
        time.sleep(0.02)


loaded_machine = pytest.mark.timeout(4 * LIMIT_S)
LONG = {"max_steps": 120, "save_steps": 20, "save_total_limit": 100, "device_memory": "2MiB"}


@loaded_machine
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_run_goes_on_to_the_same_bits(number: signal.Signals, workplace: Path, tmp_path: Path) -> None:
    assert run(workplace, tmp_path / "through", **LONG) == 0
    process = started(workplace, tmp_path / "stopped", **LONG)
    wait_for(tmp_path / "stopped/checkpoint-20/trainer_state.json")
    process.send_signal(number)
    said = finished(process, 130 if number == signal.SIGINT else -number)
    assert number == signal.SIGKILL or "has stopped the training after step" in said
    assert not (tmp_path / "stopped/model.safetensors").exists()
    assert run(workplace, tmp_path / "stopped", resume=True, **LONG) == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "through")


@loaded_machine
@pytest.mark.slow
def test_two_ranks_have_the_bits_of_one(workplace: Path, tmp_path: Path) -> None:
    """Also when they are stopped and one goes on."""
    assert run(workplace, tmp_path / "one", gradient_accumulation_steps=2, **LONG) == 0
    process = started(workplace, tmp_path / "two", gpus=2, **LONG)
    wait_for(tmp_path / "two/checkpoint-20/trainer_state.json")
    process.send_signal(signal.SIGTERM)
    said = finished(process, 128 + signal.SIGTERM)
    assert "has stopped the training after step" in said
    assert "Traceback" not in said
    shutil.copytree(tmp_path / "two", tmp_path / "one again")
    finished(started(workplace, tmp_path / "two", gpus=2, resume=True, **LONG))
    assert run(workplace, tmp_path / "one again", gradient_accumulation_steps=2, resume=True, **LONG) == 0
    assert weights(tmp_path / "two") == weights(tmp_path / "one") == weights(tmp_path / "one again")


@loaded_machine
@pytest.mark.slow
def test_an_error_of_two_ranks_is_said_once(workplace: Path, tmp_path: Path) -> None:
    said = finished(started(workplace, tmp_path / "two", gpus=2, data="nowhere.jsonl"), 2)
    assert said.count("nowhere.jsonl cannot be read") == 1
    assert "Traceback" not in said
