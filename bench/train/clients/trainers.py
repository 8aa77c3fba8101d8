"""Clients that inherit from the Trainer of transformers: itself, TRL's SFT and DPO, and sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bench.train.clients.run import Run
from bench.train.task import BETAS, EPSILON, WEIGHT_DECAY

_MARKS = "<pad>", "</s>", "<unk>"  # in place of three bytes that no text has
_BYTES = 256


def trainer(run: Run) -> None:
    """The Trainer of transformers."""
    import transformers

    _train(
        run,
        transformers.Trainer,
        model=run.model(),
        args=transformers.TrainingArguments(**_arguments(run)),
        train_dataset=[{"input_ids": row, "labels": row} for row in run.rows.tolist()],
    )


def sft(run: Run) -> None:
    """TRL's SFTTrainer, on rows that are tokens already."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    _train(
        run,
        SFTTrainer,
        model=run.model(),
        args=SFTConfig(max_length=run.task.sequence, **_arguments(run)),
        train_dataset=Dataset.from_dict({"input_ids": run.rows.tolist()}),
        processing_class=_tokenizer(run),
    )


def dpo(run: Run) -> None:
    """TRL's DPOTrainer. A prompt is half as long as a sequence, and its two answers are the rest of two rows."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    half = run.task.sequence // 2
    prompts, chosen = _texts(run.rows[:, :half]), _texts(run.rows[:, half:-1])  # the trainer adds </s>
    answers = {"chosen": [f" {text}" for text in chosen], "rejected": [f" {text}" for text in chosen[1:] + chosen[:1]]}
    reference = run.model().to(run.device).requires_grad_(False)
    _train(
        run,
        DPOTrainer,
        model=run.model(),
        ref_model=reference,
        args=DPOConfig(max_length=run.task.sequence, **_arguments(run)),
        train_dataset=Dataset.from_dict({"prompt": prompts, **answers}),
        processing_class=_tokenizer(run),
    )


def sentences(run: Run) -> None:
    """The trainer of sentence-transformers: pairs of sentences, whose embeddings are means of the decoder's outputs."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules

    decoder = run.model().base_model
    folder = run.folder / f"decoder-{run.rank}"  # a decoder of one layer, which ours replaces
    small = type(decoder.config)(**(decoder.config.to_dict() | {"num_hidden_layers": 1}))
    type(decoder)(small).save_pretrained(folder)
    _tokenizer(run).save_pretrained(folder)
    transformer: Any = modules.Transformer(str(folder))
    transformer.model = decoder
    transformer.max_seq_length = run.task.sequence
    model: Any = st.SentenceTransformer(
        modules=[transformer, modules.Pooling(decoder.config.hidden_size)],
        device="cpu" if run.on_protrain else str(run.device),
    )
    texts = _texts(run.rows)
    _train(
        run,
        st.SentenceTransformerTrainer,
        model=model,
        args=st.SentenceTransformerTrainingArguments(**_arguments(run)),
        train_dataset=Dataset.from_dict({"anchor": texts, "positive": texts[1:] + texts[:1]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )


def _arguments(run: Run) -> dict[str, Any]:
    """Training arguments of all trainers.

    Nothing is recomputed, and no parameter is unused: transformers and TRL assume otherwise.
    """
    return {
        "output_dir": str(run.folder / "trainer"),
        "per_device_train_batch_size": run.task.batch,
        "max_steps": run.total_steps,
        "learning_rate": run.task.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPSILON,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": run.task.clip_norm,
        "optim": "adamw_torch_fused",
        "bf16": run.on_gpu,
        "use_cpu": not run.on_gpu,
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def _train(run: Run, kind: Any, **arguments: Any) -> None:
    """Train with a trainer of this kind, on ProTrain or as it is.

    The loss of each step is kept as it is on the device: to log it would wait for the device.
    """
    from protrain.integrations.transformers import ProTrainMixin

    if run.on_protrain:
        kind = type(kind.__name__, (ProTrainMixin, kind), {})
        arguments["protrain"] = run.options
    trainer = kind(**arguments)
    step = trainer.training_step

    def kept(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = step(*args, **kwargs)
        run.losses.append(loss.detach())
        return loss

    trainer.training_step = kept
    trainer.train()


def _tokenizer(run: Run) -> Any:
    """One token for each word of ``_texts``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [*_MARKS, *(f"w{index}" for index in range(len(_MARKS), _BYTES))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=run.task.sequence, **marks)


def _texts(rows: Tensor) -> list[str]:
    """A word for each byte."""
    return [" ".join(f"w{token}" for token in row) for row in rows.tolist()]


TRAINERS: dict[str, Callable[[Run], None]] = {"trainer": trainer, "sft": sft, "dpo": dpo, "sentences": sentences}
