"""Trainers of transformers and TRL on tiny models and made-up text, plain and on ProTrain."""

from __future__ import annotations

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
for library in ("accelerate", "datasets", "trl", "peft"):
    pytest.importorskip(library)


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
    """Rows to train on and to evaluate on: made-up ones, or those of a folder that ``arguments`` name."""
    import datasets

    saved = arguments.pop("data", None)
    data = datasets.load_from_disk(saved) if saved else texts(*columns)
    return data, data.select(range(4))


def is_before(library: str, version: str) -> bool:
    """Whether ``library`` is an earlier one than that of ``version``."""
    found = [int(part) for part in metadata.version(library).split(".")[:2]]
    return found < [int(part) for part in version.split(".")]


def forget_precision() -> None:
    """Forget the precision of the last training, which Accelerate keeps."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)


def llama() -> Any:
    torch.manual_seed(0)  # of adapters
    return tiny("llama", pad_token_id=0, bos_token_id=1, eos_token_id=2)


def causal(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Trainer, with a collator that pads to the longest row."""
    words = tokenizer()
    data = texts("text").map(lambda row: {"input_ids": words(row["text"])["input_ids"]}, remove_columns=["text"])
    return mixed(transformers.Trainer, ours)(
        model=arguments.pop("model", llama)(),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        data_collator=transformers.DataCollatorForLanguageModeling(words, mlm=False),
    )


def mixed(base: Any, ours: dict[str, Any]) -> Any:
    """The class ``base`` of trainers, on ProTrain if there are options for it."""
    from protrain.integrations.transformers import on_protrain

    return on_protrain(base, **ours) if ours else base


def of_trl(kind: str, arguments: dict[str, Any], ours: dict[str, Any], *columns: str, **options: Any) -> Any:
    """TRL's trainer of this ``kind``."""
    import trl

    data, evaluated = data_of(arguments, *columns)
    return mixed(getattr(trl, f"{kind}Trainer"), ours)(
        model=arguments.pop("model", llama)(),
        args=getattr(trl, f"{kind}Config")(**({"bf16": False} | arguments)),
        train_dataset=data,
        eval_dataset=evaluated,
        processing_class=tokenizer(),
        **options,
    )


def sft(arguments: dict[str, Any], ours: dict[str, Any], *, adapters: bool = False) -> Any:
    return of_trl("SFT", arguments, ours, "prompt", "completion", peft_config=lora() if adapters else None)


def dpo(arguments: dict[str, Any], ours: dict[str, Any], *, adapters: bool = False) -> Any:
    """With a reference model of its own, or that of the model without adapters, or computed before the training.

    ``arguments`` may say that there is a reference model all the same.
    """
    reference = arguments.pop("reference", not (adapters or arguments.get("precompute_ref_log_probs")))
    models = {"ref_model": llama() if reference else None, "peft_config": lora() if adapters else None}
    return of_trl("DPO", arguments, ours, "prompt", "chosen", "rejected", **models)


def grpo(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Rewards for what the model generates: the loss takes the weight of its head, and generation calls the head."""

    def unlike_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(each.split()))) for each in completions]

    sizes = {"num_generations": 2, "max_completion_length": 8}
    return of_trl("GRPO", arguments | sizes, ours, "prompt", reward_funcs=unlike_words)


def lora() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)


class Contrast(nn.Module):
    """A loss around a model, which tells the words of a row from those of the others. It calls the model twice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = [self.model(input_ids=ids, attention_mask=attention_mask) for ids in (input_ids, input_ids.roll(1, 1))]
        first, second = (nn.functional.normalize(each.logits.mean(1), dim=-1) for each in found)
        return nn.functional.cross_entropy(5 * first @ second.T, torch.arange(len(first)))


def contrasting(arguments: dict[str, Any], ours: dict[str, Any]) -> Any:
    """Trainer with a loss around the model, as that of sentence-transformers has it."""
    trainer = causal(arguments, ours)
    trainer.loss = Contrast(trainer.model)

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        self.loss.model = model  # around which the Trainer may have put DistributedDataParallel
        loss = self.loss(inputs["input_ids"], inputs["attention_mask"])
        return (loss, {}) if return_outputs else loss

    trainer.__class__ = type("Contrasting", (type(trainer),), {"compute_loss": compute_loss})
    return trainer


# By client: how its trainer is made, and a device memory in which not all of its states fit, for one rank and for two.
CLIENTS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Trainer": (causal, "0.45MiB", "1MiB"),
    "SFT": (sft, "0.6MiB", "1MiB"),
    "SFT with LoRA": (lambda *args: sft(*args, adapters=True), "0.5MiB", "1MiB"),
    "DPO": (dpo, "11.5MiB", "13MiB"),
    "DPO with LoRA": (lambda *args: dpo(*args, adapters=True), "11.1MiB", "13MiB"),
    "GRPO": (grpo, "5MiB", "5.4MiB"),
    "Contrast": (contrasting, "0.45MiB", "1MiB"),
}


def make(client: str, folder: Path, *, on_protrain: bool, memory: str | None = None, **arguments: Any) -> Any:
    """The trainer of ``client``, plain or on ProTrain, within ``memory`` or one in which not all states fit.

    ``arguments`` are those of its training, and ``model``, which makes another one than ``llama``.
    """
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
    ours = {"device_memory": memory or least} if on_protrain else {}
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
