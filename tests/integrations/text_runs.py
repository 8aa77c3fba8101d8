"""Trainings on texts of which the one of the fewest characters has the most tokens, plain and on ProTrain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integrations.clients import forget_precision, in_order, llama, tokenizer

FEW, MANY = "unheardofunheardofunheardofunheardofunheardof w1", "w1 w2 w3 w4 w5 w6 w7 w8 w9"


def texts(*columns: str) -> list[dict[str, str]]:
    """The row with the most tokens comes late, and in another row for each column."""
    rows = [dict.fromkeys(columns, FEW) for _ in range(12)]
    for at, column in enumerate(columns):
        rows[7 + at][column] = MANY
    return rows


class TokenizingCollator:
    """Makes tokens of the texts in a batch, and pads them to the longest."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self._words([row["text"] for row in rows], padding=True, return_tensors="pt")
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
            "labels": batch["input_ids"],
        }


def trainer(
    kind: str,
    folder: Path,
    *,
    on_protrain: bool,
    stream: bool = False,
    **more: Any,
) -> Any:
    """A trainer of transformers or TRL that reads ``texts`` in their order.

    Args:
        kind: "Trainer" makes tokens batch by batch, "SFT" and "DPO" before the training.
        folder: for what it writes.
        on_protrain: whether it is one on ProTrain.
        stream: whether the rows come from a stream.
        more: arguments of the training.
    """
    import datasets
    import transformers

    from protrain.integrations.transformers import ProTrainMixin

    forget_precision()
    words = tokenizer()
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        **more,
    }
    others: dict[str, Any] = {"processing_class": words}
    data: Any = datasets.Dataset.from_list(texts(*("prompt", "chosen", "rejected") if kind == "DPO" else ("text",)))
    if kind == "Trainer":
        base: Any = transformers.Trainer
        args = transformers.TrainingArguments(remove_unused_columns=False, **given)
        others["data_collator"] = TokenizingCollator(words)
    else:
        import trl

        given["bf16"] = False
        if kind == "DPO":
            base, args = trl.DPOTrainer, trl.DPOConfig(**given)
            others["ref_model"] = llama()
        else:
            base, args = trl.SFTTrainer, trl.SFTConfig(**given)
    base = in_order(base)
    if on_protrain:
        base = type("Ours", (ProTrainMixin, base), {})
        others["protrain"] = {"device_memory": "64MiB"}
    return base(model=llama(), args=args, train_dataset=data.to_iterable_dataset() if stream else data, **others)


def losses(kind: str, folder: Path, *, on_protrain: bool, **more: Any) -> list[float]:
    run = trainer(kind, folder, on_protrain=on_protrain, **more)
    run.train()
    return [row["loss"] for row in run.state.log_history if "loss" in row]


def losses_on_rank(rank: int, kind: str, folder: Path, on_protrain: bool, more: dict[str, Any]) -> list[float]:
    return losses(kind, folder, on_protrain=on_protrain, **more)
