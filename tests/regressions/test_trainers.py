"""Trainers of transformers and TRL: they plan for every row, resume from a whole save, and count as they do alone."""

from __future__ import annotations

import math
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import protrain
from tests.regressions.plain import assert_same
from tests.tiny_models import VOCABULARY, tiny

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> Any:
    return tiny("llama", **SPECIAL)


def given(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments of a training of a few steps, with the precision of the last one forgotten."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    usual = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 4, "logging_steps": 1}
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "bf16": False}
    return {"output_dir": str(folder), **usual, **quiet, **more}


def rows(length: int = 12, count: int = 16) -> list[dict[str, list[int]]]:
    drawn = torch.randint(3, 90, (count, length), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer(folder: Path, memory: str | None, data: Any = None, **more: Any) -> Any:
    """A Trainer, within ``memory`` on ProTrain, or plain without."""
    from protrain.integrations.transformers import ProTrainTrainer

    args = transformers.TrainingArguments(**given(folder, **more))
    if memory is None:
        return transformers.Trainer(model=llama(), args=args, train_dataset=data or rows())
    return ProTrainTrainer(model=llama(), args=args, train_dataset=data or rows(), protrain={"device_memory": memory})


def losses(made: Any, **how: Any) -> list[float]:
    made.train(**how)
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def test_a_batch_is_found_for_which_there_is_a_plan(tmp_path: Path) -> None:
    """auto_find_batch_size of the Trainer ended with the error that no plan fits. It tries smaller batches now."""
    data, steps = rows(64, 32), {"max_steps": 2}
    found = trainer(tmp_path, "1300KiB", data, auto_find_batch_size=True, per_device_train_batch_size=8, **steps)
    found.train()
    batch = found.state.train_batch_size
    assert batch < 8
    same = trainer(tmp_path, "1300KiB", data, per_device_train_batch_size=batch, **steps)
    same.train()
    assert_same(found.model.state_dict(), same.model.state_dict())


@pytest.mark.parametrize("memory", ["64MiB", "0.45MiB"], ids=["on the device", "offloaded"])
def test_the_newest_whole_save_is_resumed_with_the_same_bits(memory: str, tmp_path: Path) -> None:
    """resume_from_checkpoint=True took the newest checkpoint, torn or not. It takes the newest whole one."""
    through = trainer(tmp_path, memory, save_strategy="steps", save_steps=2)
    expected = losses(through)
    newest = tmp_path / "checkpoint-4"
    assert not (newest / "optimizer.pt").exists()
    (state,) = newest.glob("protrain/*/state-00001.safetensors")
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(protrain.CheckpointError, match=r"checkpoint-4 was not saved to its end"):
        trainer(tmp_path, memory).train(resume_from_checkpoint=str(newest))
    resumed = trainer(tmp_path, "64MiB")
    with pytest.warns(UserWarning, match="goes back to an older checkpoint"):
        assert losses(resumed, resume_from_checkpoint=True) == expected
    assert_same(resumed.model.state_dict(), through.model.state_dict())


def test_the_save_of_a_plain_trainer_is_refused(tmp_path: Path) -> None:
    """Checkpoints of a plain Trainer, which have an optimizer.pt, are refused."""
    trainer(tmp_path, None, save_strategy="steps", save_steps=2).train()
    with pytest.raises(protrain.CheckpointError, match=r"checkpoint-4 has no protrain/ with the optimizer's state"):
        trainer(tmp_path, "64MiB").train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    shutil.rmtree(tmp_path / "checkpoint-4")


class Collator:
    """Labels that it draws, from as many as it has made batches."""

    def __init__(self) -> None:
        self.calls, self.generator = 0, torch.Generator().manual_seed(3)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self.calls += 1
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": torch.randint(self.calls, VOCABULARY, ids.shape, generator=self.generator)}


def test_what_collator_and_trainer_count_and_draw_is_as_without_protrain(tmp_path: Path) -> None:
    """The plan was made for a batch of the training's own collator, so that seeded masks were those of one later."""
    from protrain.integrations.transformers import ProTrainTrainer

    def run(kind: Any, **more: Any) -> list[float]:
        class Counting(kind):
            calls = 0

            def compute_loss(self, model: Any, inputs: Any, **others: Any) -> Any:
                self.calls += 1
                self.seen["rows"].append(len(inputs["input_ids"]))
                return super().compute_loss(model, inputs, **others) * self.calls * len(self.seen["rows"])

        args = transformers.TrainingArguments(**given(tmp_path))
        made = Counting(model=llama(), args=args, train_dataset=rows(), data_collator=Collator(), **more)
        made.seen = {"rows": []}
        return losses(made)

    ours = run(ProTrainTrainer, protrain={"device_memory": "64MiB"})
    assert ours == pytest.approx(run(transformers.Trainer), rel=1e-5)


def test_bf16_is_autocast_around_the_model(tmp_path: Path) -> None:
    """With bf16=True of the Trainer a model ran without autocast, and one that mixed bf16 with fp32 failed."""
    made, seen = trainer(tmp_path, "64MiB", bf16=True), set()
    made.model.register_buffer("scale", torch.ones(32))
    made.model.model.norm.register_forward_hook(lambda module, args, output: output.float() * made.model.scale)
    made.model.lm_head.register_forward_hook(lambda *_: seen.add(torch.is_autocast_enabled("cpu")))
    found = losses(made)
    assert seen == {True}
    assert found[-1] < found[0]
    assert not torch.is_autocast_enabled("cpu")


# -- TRL ---------------------------------------------------------------------------------------------------------------

FEW, MANY = "unheardofunheardofunheardofunheardofunheardof w1", "w1 w2 w3 w4 w5 w6 w7 w8 w9"


def tokenizer() -> Any:
    """One token for every word: a long word that it does not know is one, too."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*marks.values(), *(f"w{index}" for index in range(VOCABULARY - len(marks)))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **marks)


needs_trl = pytest.mark.skipif(not (find_spec("trl") and find_spec("datasets")), reason="needs TRL")


def sft(folder: Path, texts: list[str], *, on_protrain: bool, **more: Any) -> Any:
    import datasets
    import trl

    from protrain.integrations.transformers import ProTrainMixin

    class SFT(ProTrainMixin, trl.SFTTrainer): ...

    options: dict[str, Any] = {"model": llama(), "args": trl.SFTConfig(**given(folder, **more))}
    options |= {"train_dataset": datasets.Dataset.from_list([{"text": text} for text in texts])}
    options |= {"processing_class": tokenizer()}
    return SFT(protrain={"device_memory": "64MiB"}, **options) if on_protrain else trl.SFTTrainer(**options)


@needs_trl
def test_the_row_of_the_most_tokens_is_planned_for(tmp_path: Path) -> None:
    """Texts were measured in characters. A row of fewer characters and more tokens was longer than the plan."""
    texts = [FEW] * 7 + [MANY] + [FEW] * 4
    found = [losses(sft(tmp_path, texts, on_protrain=ours, max_steps=6)) for ours in (True, False)]
    assert found[0] == pytest.approx(found[1], rel=2e-5)


@needs_trl
def test_a_packed_row_may_have_more_texts_than_the_planned_one(tmp_path: Path) -> None:
    """SFTTrainer with packing=True refused a row of more texts than the one that was planned for."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (24,), generator=generator).tolist()
    texts = [" ".join(f"w{index}" for index in range(length)) for length in lengths]
    more = {"packing": True, "max_length": 32}
    found = [losses(sft(tmp_path, texts, on_protrain=ours, **more)) for ours in (True, False)]
    assert found[0] == pytest.approx(found[1], rel=2e-5)


@needs_trl
def test_dpo_in_bf16_begins_at_the_reference_model(tmp_path: Path) -> None:
    """TRL's trainers compared a model in bf16 with a reference model in fp32: DPO did not begin at log 2."""
    import datasets
    import trl

    from protrain.integrations.transformers import ProTrainMixin

    class DPO(ProTrainMixin, trl.DPOTrainer): ...

    texts = [{"prompt": f"w{i} w5", "chosen": f"w{i + 1}", "rejected": "w7"} for i in range(8)]
    made = DPO(
        model=llama(),
        ref_model=llama(),
        args=trl.DPOConfig(**given(tmp_path, bf16=True, max_steps=1)),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=tokenizer(),
        protrain={"device_memory": "64MiB"},
    )
    assert losses(made)[0] == pytest.approx(math.log(2), abs=1e-6)
