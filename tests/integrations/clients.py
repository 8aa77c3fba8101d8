"""Trainers of transformers, TRL and sentence-transformers on tiny models and made-up text, plain and on ProTrain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tiny_models import VOCABULARY, tiny

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")

BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True)
class Run:
    """What a training has logged, its final weights, and the random state after it."""

    log: list[dict[str, float]]
    weights: dict[str, Tensor]
    random: Tensor
    offloaded: bool  # whether a plan has states in host memory

    @property
    def losses(self) -> list[float]:
        return [value for row in self.log for name, value in row.items() if name in ("loss", "eval_loss")]


def tokenizer() -> Any:
    """One token for every word, and for the marks of a sentence."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    marks = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*marks.values(), *(f"w{index}" for index in range(VOCABULARY - len(marks)))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **marks)


def texts(*columns: str, count: int = 24) -> Any:
    """A dataset of random sentences, of random lengths: the first batch is not the longest."""
    import datasets

    generator = torch.Generator().manual_seed(1)

    def sentence() -> str:
        length = int(torch.randint(3, 12, (), generator=generator))
        return " ".join(f"w{index}" for index in torch.randint(0, 90, (length,), generator=generator).tolist())

    return datasets.Dataset.from_list([{column: sentence() for column in columns} for _ in range(count)])


def data_of(arguments: dict[str, Any], *columns: str) -> tuple[Any, Any]:
    """Rows to train on and to evaluate on: made-up ones, or those of a folder that ``arguments`` name, as a stream."""
    import datasets

    saved, stream = arguments.pop("data", None), arguments.pop("stream", False)
    data = datasets.load_from_disk(saved) if saved else texts(*columns)
    return data.to_iterable_dataset() if stream else data, data.select(range(4))


def is_before(library: str, version: str) -> bool:
    """Whether ``library`` is an earlier one than that of ``version``."""
    found = [int(part) for part in metadata.version(library).split(".")[:2]]
    return found < [int(part) for part in version.split(".")]


def forget_precision() -> None:
    """Forget the precision of the last training, which Accelerate and early versions of transformers keep."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


def llama() -> Any:
    torch.manual_seed(0)  # of adapters
    return tiny("llama", pad_token_id=0, bos_token_id=1, eos_token_id=2)


def causal(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Trainer, with a collator that pads to the longest row."""
    from protrain.integrations.transformers import ProTrainTrainer

    words = tokenizer()
    data = texts("text").map(lambda row: {"input_ids": words(row["text"])["input_ids"]}, remove_columns=["text"])
    return (ProTrainTrainer if ours else transformers.Trainer)(
        model=llama(),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
        **ours,
    )


def sft(arguments: dict[str, Any], ours: dict[str, Any], *, adapters: bool = False) -> Any:
    from trl import SFTConfig, SFTTrainer

    from protrain.integrations.transformers import ProTrainMixin

    class SFT(ProTrainMixin, SFTTrainer): ...

    data, evaluated = data_of(arguments, "prompt", "completion")
    return (SFT if ours else SFTTrainer)(
        model=llama(),
        args=SFTConfig(bf16=False, **arguments),
        train_dataset=data,
        eval_dataset=evaluated,
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
        **ours,
    )


def dpo(arguments: dict[str, Any], ours: dict[str, Any], *, adapters: bool = False) -> Any:
    """With a reference model of its own, or that of the model without adapters, or computed before the training.

    ``arguments`` may say that there is a reference model all the same.
    """
    from trl import DPOConfig, DPOTrainer

    from protrain.integrations.transformers import ProTrainMixin

    class DPO(ProTrainMixin, DPOTrainer): ...

    data, evaluated = data_of(arguments, "prompt", "chosen", "rejected")
    reference = arguments.pop("reference", not (adapters or arguments.get("precompute_ref_log_probs")))
    return (DPO if ours else DPOTrainer)(
        model=llama(),
        ref_model=llama() if reference else None,
        args=DPOConfig(**({"bf16": False} | arguments)),
        train_dataset=data,
        eval_dataset=evaluated,
        processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
        **ours,
    )


def grpo(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Rewards for what the model generates: the loss takes the weight of its head, and generation calls the head."""
    from trl import GRPOConfig, GRPOTrainer

    from protrain.integrations.transformers import ProTrainMixin

    class GRPO(ProTrainMixin, GRPOTrainer): ...

    def unlike_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    data = texts("prompt")
    return (GRPO if ours else GRPOTrainer)(
        model=llama(),
        args=GRPOConfig(bf16=False, num_generations=2, max_completion_length=8, **arguments),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        reward_funcs=unlike_words,
        processing_class=tokenizer(),
        **ours,
    )


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)


def prepare(client: str, folder: Path) -> None:
    """Skip the test if a library of ``client`` is missing, and save what its trainer reads beside its own folder."""
    libraries = {"SFT": "trl", "DPO": "trl", "GRPO": "trl", "LoRA": "peft", "sentences": "sentence_transformers"}
    for part, library in libraries.items():
        if part in client:
            pytest.importorskip(library)
    if client == "sentences":
        torch.manual_seed(0)
        transformers.BertModel(transformers.BertConfig(**BERT)).save_pretrained(folder / "bert")
        tokenizer().save_pretrained(folder / "bert")


def sentences(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Contrastive training of sentence embeddings, whose loss calls the model three times."""
    import sentence_transformers as st
    from sentence_transformers.sentence_transformer import losses, modules

    from protrain.integrations.transformers import ProTrainMixin

    class Sentences(ProTrainMixin, st.SentenceTransformerTrainer): ...

    bert = modules.Transformer(str(Path(arguments["output_dir"]).parent / "bert"))
    model = st.SentenceTransformer(modules=[bert, modules.Pooling(32)], device="cpu")
    data = texts("anchor", "positive", "negative")
    return (Sentences if ours else st.SentenceTransformerTrainer)(
        model=model,
        args=st.SentenceTransformerTrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        loss=losses.MultipleNegativesRankingLoss(model),
        **ours,
    )


# By client: how its trainer is made, and a device memory in which not all of its states fit, for one rank and for two.
CLIENTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Trainer": (causal, "0.45MiB", "1MiB"),
    "SFT": (sft, "0.6MiB", "1MiB"),
    "SFT with LoRA": (lambda *args: sft(*args, adapters=True), "0.5MiB", "1MiB"),
    "DPO": (dpo, "11.5MiB", "13MiB"),
    "DPO with LoRA": (lambda *args: dpo(*args, adapters=True), "11.1MiB", "13MiB"),
    "GRPO": (grpo, "5MiB", "5.4MiB"),
    "sentences": (sentences, "0.6MiB", "1MiB"),
}


def make(client: str, folder: Path, *, on_protrain: bool, memory: str | None = None, **arguments: Any) -> Any:
    """The trainer of ``client``, plain or on ProTrain, within ``memory`` or one in which not all states fit."""
    forget_precision()
    build, least, least_of_two = CLIENTS[client]
    if dist.is_initialized():
        least = least_of_two
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    ours = {"protrain": {"device_memory": memory or least}} if on_protrain else {}
    return build(settings | arguments, ours)


def train(client: str, folder: Path, *, on_protrain: bool, resume: Path | bool | None = None, **arguments: Any) -> Run:
    trainer = make(client, folder, on_protrain=on_protrain, **arguments)
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    plan = trainer.optimizer.optimizer.plan if on_protrain else None
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate")
    model: nn.Module = trainer.model
    return Run(
        log=[{name: row[name] for name in kept if name in row} for row in trainer.state.log_history[:-1]],
        weights={name: value.detach().clone() for name, value in model.state_dict().items()},
        random=torch.get_rng_state(),
        offloaded=plan is not None and plan.n_persist < plan.n_chunks,
    )


def train_on_rank(rank: int, client: str, folder: Path, on_protrain: bool, arguments: dict[str, Any]) -> Run:
    return train(client, folder, on_protrain=on_protrain, **arguments)


def error_on_rank(rank: int, client: str, folder: Path, arguments: dict[str, Any]) -> str:
    """The error of a training on ProTrain."""
    try:
        train(client, folder, on_protrain=True, **arguments)
    except ValueError as error:
        return str(error)
    return ""
