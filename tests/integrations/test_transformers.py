"""The Trainers of transformers and TRL on ProTrain train as they do without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import protrain
from protrain.integrations.transformers import ProTrainTrainer
from protrain.optim.optimizer import ProTrainOptimizer
from tests.distributed.pool import on_ranks
from tests.engine.harness import assert_same
from tests.integrations.clients import CLIENTS, Run, is_before, llama, make, texts, train, train_on_rank
from tests.tiny_models import VOCABULARY

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:gradient checkpointing of:UserWarning", "ignore::FutureWarning")


def assert_close(ours: Run, plain: Run) -> None:
    """The first losses differ by no more than their last bits, and later ones by the rounding of torch's own AdamW."""
    assert ours.losses[0] == pytest.approx(plain.losses[0], rel=5e-7)
    assert len(ours.log) == len(plain.log) == 6
    for mine, theirs in zip(ours.log, plain.log, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert ours.weights[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def two(client: str, folder: Path, *, on_protrain: bool, **arguments: Any) -> list[Run]:
    found: list[Run] = on_ranks(2, train_on_rank, client, folder, on_protrain, arguments)
    return found


@pytest.mark.parametrize(
    "client",
    [pytest.param(each, marks=() if each in ("Trainer", "SFT", "Contrast") else pytest.mark.slow) for each in CLIENTS],
)
def test_one_process(client: str, tmp_path: Path) -> None:
    plain = train(client, tmp_path / "plain", on_protrain=False, save_strategy="no")
    ours = train(client, tmp_path / "ours", on_protrain=True, save_strategy="no")
    # Swapping activations is cheaper with LoRA, and before 1.16 the trainers of TRL need less memory.
    assert ours.offloaded or "LoRA" in client or is_before("trl", "1.16")
    assert torch.equal(ours.random, plain.random), "the random state was drawn from"
    assert_close(ours, plain)


def test_sft_of_a_model_whose_own_loss_shifts_no_labels(tmp_path: Path) -> None:
    """TRL computes its loss, as the model would learn to copy the token at its place."""
    config = transformers.BartConfig(
        **{"vocab_size": 96, "d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 64, "decoder_attention_heads": 4},
        **{"dropout": 0.0, "max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False},
    )
    torch.manual_seed(0)
    weights = transformers.BartForCausalLM(config).state_dict()

    def bart() -> Any:
        model = transformers.BartForCausalLM(config)
        model.load_state_dict(weights)
        return model

    arguments: dict[str, Any] = {"model": bart, "save_strategy": "no"}
    plain = train("SFT", tmp_path / "plain", on_protrain=False, **arguments)
    assert_close(train("SFT", tmp_path / "ours", on_protrain=True, memory="16MiB", **arguments), plain)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["GRPO", "Contrast"])  # others are compared on three
def test_two_processes(client: str, tmp_path: Path) -> None:
    plain = two(client, tmp_path / "plain", on_protrain=False)
    ours = two(client, tmp_path / "ours", on_protrain=True)
    assert_same(ours[0].weights, ours[1].weights)
    assert_close(ours[0], plain[0])


@pytest.mark.slow
def test_a_reference_without_a_model_is_computed_by_the_wrapped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain run with a reference model compares. One that computes the reference too would share a cache of it."""
    trl = pytest.importorskip("trl", "1.2")  # which loads a reference all the same before
    compute, wrapped = trl.DPOTrainer.compute_ref_log_probs, []

    def watched(trainer: Any, model: Any, inputs: Any) -> Any:
        wrapped.append(isinstance(getattr(trainer.optimizer, "optimizer", trainer.optimizer), ProTrainOptimizer))
        return compute(trainer, model, inputs)

    monkeypatch.setattr(trl.DPOTrainer, "compute_ref_log_probs", watched)
    ours = train("DPO", tmp_path / "ours", on_protrain=True, precompute_ref_log_probs=True, save_strategy="no")
    assert wrapped
    assert all(wrapped)
    assert_close(ours, train("DPO", tmp_path / "plain", on_protrain=False, save_strategy="no"))


@pytest.mark.slow
def test_two_processes_compute_a_reference_for_a_dataset_in_files(tmp_path: Path) -> None:
    pytest.importorskip("trl", "1.2")
    arguments: dict[str, Any] = {"precompute_ref_log_probs": True, "save_strategy": "no"}
    texts("prompt", "chosen", "rejected").save_to_disk(tmp_path / "data")
    ours = two("DPO", tmp_path / "ours", on_protrain=True, data=str(tmp_path / "data"), **arguments)
    plain = two("DPO", tmp_path / "plain", on_protrain=False, save_strategy="no")
    assert_close(ours[0], plain[0])


@pytest.mark.slow
def test_what_grpo_generates_at_once_is_cut_into_the_batches_of_several_steps(tmp_path: Path) -> None:
    """The plan is made for one of these batches, and for completions that are as long as they may be.

    Half of the rows end with the first word here, so that what is generated first is hardly ever the longest.
    """
    often_ended = {"sequence_bias": [[[2], 4.5]]}
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_iterations": 2, "save_strategy": "no"}

    def run(on_protrain: bool) -> tuple[list[float], list[int]]:
        folder = tmp_path / str(on_protrain)
        trainer = make("GRPO", folder, on_protrain=on_protrain, generation_kwargs=often_ended, **arguments)
        rewarded: list[int] = []
        [reward] = trainer.reward_funcs

        def counting(completion_ids: list[list[int]], **others: Any) -> list[float]:
            rewarded.append(max(map(len, completion_ids)))
            found: list[float] = reward(**others)
            return found

        trainer.reward_funcs[0] = counting
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], rewarded

    losses, rewarded = run(False)
    assert max(rewarded) > rewarded[0]
    ours, rewarded_ours = run(True)
    assert ours == pytest.approx(losses, rel=2e-5, abs=1e-7)
    assert rewarded_ours == rewarded, "the user's reward function was called for the plan"


@pytest.mark.parametrize("precomputed", [False, True])
def test_training_in_bf16_begins_at_the_reference_model(precomputed: bool, tmp_path: Path) -> None:
    """Where the model equals its reference, DPO's loss is log 2 and its margins are 0."""
    arguments: dict[str, Any] = {"bf16": True, "precompute_ref_log_probs": precomputed, "reference": True}
    unsaved: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 1}
    trainer = make("DPO", tmp_path, on_protrain=True, **arguments, **unsaved)
    trainer.train()
    (first,) = (row for row in trainer.state.log_history if "loss" in row)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["rewards/margins"] == 0


@pytest.mark.slow
def test_a_reference_model_follows_the_model_on_two_processes(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 2, "save_strategy": "no"}
    ours = two("DPO", tmp_path / "ours", on_protrain=True, **arguments)
    assert_close(ours[0], two("DPO", tmp_path / "plain", on_protrain=False, **arguments)[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fp16": True}, "fp16=True cannot be used.*use bf16"),
        ({"fsdp": True}, "fsdp shards the model, as ProTrain does"),
        ({"save_on_each_node": True}, "save_on_each_node=True: ProTrain gathers states on rank 0"),
        ({"optim": "adafactor"}, r"optimizer must be torch.optim.AdamW or torch.optim.Adam, not Adafactor"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], words: str, tmp_path: Path) -> None:
    if "fsdp" in arguments and is_before("accelerate", "1.6"):
        pytest.skip("transformers cannot switch fsdp on with Accelerate before 1.6, so nothing is there to refuse")
    with pytest.raises(ValueError, match=words):
        make("Trainer", tmp_path, on_protrain=True, **arguments).train()


def test_a_loss_that_is_called_as_the_models_forward_needs_an_example_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As TRL's DistillationTrainer calls it."""
    trainer = make("Trainer", tmp_path, on_protrain=True)
    model = trainer.model
    forward, compute = model.forward, trainer.compute_loss

    def redirected(model: Any, inputs: Any, **others: Any) -> Any:
        def loss(inputs: Any) -> Any:
            model.forward = forward
            return compute(model, inputs, **others)

        model.forward = loss
        return model(inputs)

    monkeypatch.setattr(type(trainer), "compute_loss", lambda self, *args, **others: redirected(*args, **others))
    with pytest.raises(ValueError, match=r"^ProTrainTrainer calls its loss in place.*\"example_batch\": batch"):
        trainer.train()
    assert model.forward == forward


def test_processes_that_the_trainer_does_not_see_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a GPU and without use_cpu, where it would train on all data in each process."""
    trainer = make("Trainer", tmp_path, on_protrain=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"announces 2 processes, and the Trainer sees 1 of them.*use_cpu=True"):
        trainer.create_accelerator_and_postprocess()


@pytest.mark.parametrize("another", ["none", "own", "function", "smoothing"])
def test_only_the_models_own_loss_is_computed_in_pieces(another: str, tmp_path: Path) -> None:
    """Also where the example batch has labels, which a Trainer with another loss keeps from the model."""
    trainer = make("Trainer", tmp_path, on_protrain=True, memory="64MiB", save_strategy="no", max_steps=1)
    kind = type(trainer)
    if another == "own":
        trainer.__class__ = type(
            "Own", (kind,), {"compute_loss": lambda self, *args, **options: kind.compute_loss(self, *args, **options)}
        )
    elif another == "function":
        trainer.compute_loss_func = lambda outputs, labels, **_: outputs.logits.float().logsumexp(-1).mean()
    elif another == "smoothing":
        trainer.label_smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.1)
    tokens = torch.randint(3, VOCABULARY, (2, 32))
    trainer._wrap_arguments["example_batch"] = {"input_ids": tokens, "labels": tokens}
    trainer.train()
    assert trainer.optimizer.optimizer.plan.chunked_loss is (another == "none")


class Masking:
    """A collator that draws labels by itself, from more words in each batch."""

    def __init__(self, collate: Any) -> None:
        self.collate, self.calls, self.generator = collate, 0, torch.Generator().manual_seed(3)

    def __call__(self, rows: list[Any]) -> Any:
        self.calls += 1
        batch = self.collate(rows)
        labels = torch.randint(2 * self.calls, batch["labels"].shape, generator=self.generator)
        return {**batch, "labels": labels}


def test_what_collator_and_trainer_count_and_draw_is_as_without_protrain(tmp_path: Path) -> None:
    """The batch for which the plan is made counts for neither of them."""

    def losses(on_protrain: bool) -> list[float]:
        trainer = make("Trainer", tmp_path, on_protrain=on_protrain, eval_strategy="no", save_strategy="no")
        kind, trainer.data_collator, trainer.seen = type(trainer), Masking(trainer.data_collator), {"batches": [0]}

        def compute_loss(self: Any, *args: Any, **options: Any) -> Any:
            self.seen["batches"].append(0)
            return kind.compute_loss(self, *args, **options) * len(self.seen["batches"])

        trainer.__class__ = type("Counting", (kind,), {"compute_loss": compute_loss})
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    assert losses(True) == pytest.approx(losses(False), rel=2e-5)


def test_evaluation_before_training_and_after(tmp_path: Path) -> None:
    def losses(on_protrain: bool) -> list[float]:
        trainer = make("Trainer", tmp_path, on_protrain=on_protrain, save_strategy="no")
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert not on_protrain or not [row for row in trainer.state.log_history if "eval_model_preparation_time" in row]
        return [before, trainer.evaluate()["eval_loss"]]

    assert losses(True) == pytest.approx(losses(False), rel=2e-5)


class Endless(torch.utils.data.IterableDataset[Any]):
    """Rows that nobody can measure beforehand."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = torch.Generator().manual_seed(2)
        while True:
            row = torch.randint(3, VOCABULARY, (8,), generator=generator)
            yield {"input_ids": row, "labels": row}


def test_a_stream_of_rows_with_an_optimizer_of_the_users(tmp_path: Path) -> None:
    """The plan is made for the first batch, and the optimizer is wrapped as it is."""

    def run(kind: Any, **more: Any) -> list[dict[str, float]]:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.8, 0.9))
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, logging_steps=1, save_strategy="no", use_cpu=True, report_to=[]
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        trainer = kind(model=model, args=args, train_dataset=Endless(), optimizers=(optimizer, schedule), **more)
        trainer.train()
        assert kind is transformers.Trainer or trainer.optimizer.optimizer.hardware.device_bytes == 64 << 20
        return [{name: row[name] for name in ("loss", "learning_rate")} for row in trainer.state.log_history[:-1]]

    ours = run(ProTrainTrainer, protrain={"device_memory": "64MiB"})
    for mine, theirs in zip(ours, run(transformers.Trainer), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


# -- auto_find_batch_size ----------------------------------------------------------------------------------------------

UNSAVED: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 2}


def found_on_rank(rank: int, folder: Path, batch: int, finds: bool) -> tuple[int, dict[str, Tensor]]:
    """The batch that was trained with, and the weights."""
    sizes: dict[str, Any] = {"per_device_train_batch_size": batch, "auto_find_batch_size": finds}
    trainer = make("Trainer", folder, on_protrain=True, memory="0.9MiB", **sizes, **UNSAVED)
    trainer.train()
    return trainer.state.train_batch_size, dict(trainer.model.state_dict())


def test_all_ranks_find_one_batch_and_train_as_with_it(tmp_path: Path) -> None:
    (batch, weights), (other, _) = on_ranks(2, found_on_rank, tmp_path, 24, True)
    assert batch == other < 24
    for _, expected in on_ranks(2, found_on_rank, tmp_path, batch, False):
        assert_same(weights, expected)


@pytest.mark.parametrize(("memory", "finds"), [("0.45MiB", False), ("20KiB", True)])
def test_without_it_or_where_no_batch_fits_the_error_says_what_does(memory: str, finds: bool, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"per_device_train_batch_size": 16, "auto_find_batch_size": finds}
    with pytest.raises(protrain.PlanError, match="no plan fits the device memory"):
        make("Trainer", tmp_path, on_protrain=True, memory=memory, **sizes, **UNSAVED).train()
