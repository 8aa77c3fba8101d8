"""A plan holds for the row of the most tokens, which may be one of few characters, or come from a stream of TRL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from protrain.integrations.longest import longest_row
from tests.integrations.clients import make, prepare, tokenizer, train

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


@pytest.mark.parametrize(
    ("client", "max_length", "longest"), [("SFT", None, 11), ("SFT", 8, 8), ("DPO", None, 18), ("DPO", 15, 15)]
)
def test_the_row_of_the_most_tokens_is_planned_for(
    client: str, max_length: int | None, longest: int, tmp_path: Path
) -> None:
    """In every column it is as long as any. Rows of a stream are cut to a length."""
    prepare(client, tmp_path)
    texts(client).save_to_disk(tmp_path / "data")
    stream: dict[str, Any] = {} if max_length is None else {"stream": True, "max_length": max_length}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make(client, tmp_path, on_protrain=True, data=str(tmp_path / "data"), **stream, **UNSAVED)
        trainer.train()
    assert not [one for one in caught if "nobody knows" in str(one.message)]
    rows = 4 if client == "DPO" else 2
    assert trainer.optimizer.optimizer.plan.tokens == rows * longest


def test_a_packed_row_may_have_more_texts_than_the_planned_one(tmp_path: Path) -> None:
    prepare("SFT", tmp_path)
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


PREFERENCES: list[dict[str, Any]] = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [1], "rejected_ids": [], "score": 1.0, "text": "a"},
    {"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [7], "score": 2.0, "text": None},
    {"prompt_ids": [], "chosen_ids": [], "rejected_ids": [5, 6, 7], "score": 3.0, "text": "b"},
]
LONGEST = {"prompt_ids": 3, "chosen_ids": 2, "rejected_ids": 3}
PACKED = [{"input_ids": [1, 2, 3], "seq_lengths": [3]}, {"input_ids": [1, 2], "seq_lengths": [1, 1]}]
TEXTS = [{"question": "a", "answer": "long"}, {"question": "longer", "answer": "b"}, {"question": "c", "answer": "d"}]


@pytest.fixture(params=["list", "datasets"])
def made(request: pytest.FixtureRequest) -> Any:
    return list if request.param == "list" else pytest.importorskip("datasets").Dataset.from_list


def test_every_column_of_tokens_has_its_longest_length(made: Any) -> None:
    row = longest_row(made(PREFERENCES))
    assert row is not None
    assert {name: len(row[name]) for name in LONGEST} == LONGEST
    assert (row["score"], row["text"]) == (1.0, "a")
    assert longest_row(made(PACKED)) == {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}  # most parts of any


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
    transformed = pytest.importorskip("datasets").Dataset.from_list(TEXTS).with_transform(lambda batch: batch)
    assert longest_row(transformed) is None


def test_rows_of_tensors_have_lengths() -> None:
    rows = [{"input_ids": torch.arange(length), "label": torch.tensor(1)} for length in (2, 5, 3)]
    row = longest_row(rows)
    assert row is not None
    assert torch.equal(row["input_ids"], torch.tensor([0, 1, 0, 1, 0]))


def test_a_row_of_a_stream_is_stretched_to_its_limit() -> None:
    row = {"input_ids": [7, 8, 9], "labels": [], "score": 0.5, "seq_lengths": [2, 1]}

    def stream(row: dict[str, Any]) -> Any:
        return pytest.importorskip("datasets").Dataset.from_list([row]).to_iterable_dataset()

    stretched = {"input_ids": [7, 8, 9, 7, 8], "labels": [0] * 5, "score": 0.5, "seq_lengths": [1] * 5}
    assert longest_row(stream(row), 5) == stretched
    assert longest_row(stream(row)) is None
    assert longest_row(stream({"text": "yet to become tokens"}), 5) is None
