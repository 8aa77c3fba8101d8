"""The row for which a plan is made is as long as any of its dataset, in every column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain.integrations.longest import longest_row

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
