"""A plan holds for the row of the most tokens, which may be one of few characters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.clients import make, prepare, tokenizer

FEW, MANY = "unheardofunheardofunheardofunheardofunheardof w1", "w1 w2 w3 w4 w5 w6 w7 w8 w9"
COLUMNS = {"Trainer": ["text"], "SFT": ["prompt", "completion"], "DPO": ["prompt", "chosen", "rejected"]}
UNSAVED: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "memory": "64MiB"}
BY_COLLATOR: dict[str, Any] = {**UNSAVED, "remove_unused_columns": False, "max_steps": 1}


def texts(client: str) -> Any:
    """Twelve rows of the columns of ``client``. The most tokens come late, and in another row for each column."""
    datasets = pytest.importorskip("datasets")
    rows = [dict.fromkeys(COLUMNS[client], FEW) for _ in range(12)]
    for at, column in enumerate(COLUMNS[client]):
        rows[7 + at][column] = MANY
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize(("client", "longest"), [("SFT", 11), ("DPO", 18)])
def test_the_row_of_the_most_tokens_is_planned_for(client: str, longest: int, tmp_path: Path) -> None:
    """In every column it is as long as any."""
    prepare(client, tmp_path)
    texts(client).save_to_disk(tmp_path / "data")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(client, tmp_path, on_protrain=True, data=str(tmp_path / "data"), **UNSAVED)
        trainer.train()
    assert not [one for one in caught if "nobody knows" in str(one.message)]
    rows = 4 if client == "DPO" else 2
    assert trainer.optimizer.optimizer.plan.tokens == rows * longest


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_a_collator_are_warned_of_before_the_training(stream: bool, tmp_path: Path) -> None:
    words = tokenizer()

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = words([row["text"] for row in rows], padding=True, return_tensors="pt")
        return {**{name: batch[name] for name in ("input_ids", "attention_mask")}, "labels": batch["input_ids"]}

    def losses(on_protrain: bool) -> list[float]:
        trainer = make(
            "Trainer", tmp_path, on_protrain=on_protrain, remove_unused_columns=False, max_steps=1, **UNSAVED
        )
        trainer.data_collator = collate
        trainer.train_dataset = texts("Trainer").to_iterable_dataset() if stream else texts("Trainer")
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    with pytest.warns(UserWarning, match="so the plan is made for the first batch, and a much longer batch") as caught:
        ours = losses(True)
    [warned] = [one for one in caught if "nobody knows" in str(one.message)]
    assert Path(warned.filename).name == "test_texts.py"
    assert ours == pytest.approx(losses(False), rel=2e-5)
