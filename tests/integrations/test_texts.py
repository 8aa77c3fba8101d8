"""A plan holds for the row of the most tokens, which may be one of few characters."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.integrations.longest import longest_row
from tests.integrations.clients import make, tokenizer, train

datasets = pytest.importorskip("datasets")

FEW, MANY = "unheardofunheardofunheardofunheardofunheardof w1", "w1 w2 w3 w4 w5 w6 w7 w8 w9"
COLUMNS = {"Trainer": ["text"], "SFT": ["prompt", "completion"], "DPO": ["prompt", "chosen", "rejected"]}
UNSAVED: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "memory": "64MiB"}


def texts(client: str) -> Any:
    """Twelve rows of the columns of ``client``. The most tokens come late, and in another row for each column."""
    rows = [dict.fromkeys(COLUMNS[client], FEW) for _ in range(12)]
    for at, column in enumerate(COLUMNS[client]):
        rows[7 + at][column] = MANY
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize(("client", "longest"), [("SFT", 11), ("DPO", 18)])
def test_the_row_of_the_most_tokens_is_planned_for(client: str, longest: int, tmp_path: Path) -> None:
    """In every column it is as long as any."""
    texts(client).save_to_disk(tmp_path / "data")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(client, tmp_path, on_protrain=True, data=str(tmp_path / "data"), **UNSAVED)
        trainer.train()
    assert not [one for one in caught if "nobody knows" in str(one.message)]
    rows = 4 if client == "DPO" else 2
    assert trainer.optimizer.optimizer.plan.tokens == rows * longest


def test_a_packed_row_may_have_more_texts_than_the_planned_one(tmp_path: Path) -> None:
    packed: dict[str, Any] = {**UNSAVED, "packing": True, "max_length": 32}
    ours, plain = (train("SFT", tmp_path, on_protrain=each, **packed) for each in (True, False))
    assert ours.losses == pytest.approx(plain.losses, rel=2e-5)


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


# -- rows --------------------------------------------------------------------------------------------------------------


TEXTS = [{"question": "a", "answer": "long"}, {"question": "longer", "answer": "b"}, {"question": "c", "answer": "d"}]


@pytest.mark.parametrize("made", [list, datasets.Dataset.from_list])
def test_nobody_knows_the_lengths_of_other_rows(made: Any) -> None:
    talk = [{"role": "user", "content": "a"}]
    assert longest_row(made(TEXTS)) is None
    assert longest_row(made([{"input_ids": [1], "messages": talk}])) is None
    assert longest_row(made([{"input_ids": [1], "images": [[0.5]]}])) is None
    assert longest_row([]) is None

    class Made(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a row was made")

    assert longest_row(Made()) is None
    transformed = datasets.Dataset.from_list(TEXTS).with_transform(lambda batch: batch)
    assert longest_row(transformed) is None


def test_rows_of_tensors_have_lengths() -> None:
    rows = [{"input_ids": torch.arange(length), "label": torch.tensor(1)} for length in (2, 5, 3)]
    row = longest_row(rows)
    assert row is not None
    assert torch.equal(row["input_ids"], torch.tensor([0, 1, 0, 1, 0]))
