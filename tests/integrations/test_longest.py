"""The row for which a plan is made is as long as any of its dataset, in every column."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from protrain.integrations.longest import longest_rows, stretched_row
from protrain.integrations.text_lengths import TextLengths
from tests.integrations.clients import tokenizer

PREFERENCES: list[dict[str, Any]] = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [1], "rejected_ids": [], "score": 1.0},
    {"prompt_ids": [1], "chosen_ids": [1, 2], "rejected_ids": [7], "score": 2.0},
    {"prompt_ids": [], "chosen_ids": [], "rejected_ids": [5, 6, 7], "score": 3.0},
]
LONGEST = {"prompt_ids": [1, 2, 3], "chosen_ids": [1, 2], "rejected_ids": [5, 6, 7]}
PACKED = [{"input_ids": [1, 2, 3], "seq_lengths": [3]}, {"input_ids": [1, 2], "seq_lengths": [1, 1]}]
# Images that a text refers to belong to their row.
PICTURES = [{"text": "two of them", "images": [[1.0], [2.0]]}, {"text": "none", "images": [[1.0], [2.0], [3.0]]}]


TALKS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": word}, {"role": "assistant", "content": "yes"}], "answer": answer}
    for word, answer in (("one", "long answer"), ("the longest of all", "x"), ("two", "y"))
]


def longest_row(dataset: Any) -> dict[str, Any] | None:
    """The one row that is as long as any of ``dataset``, in characters."""
    rows = longest_rows(dataset, TextLengths())
    assert len(rows) < 2
    return rows[0] if rows else None


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_every_column_has_its_longest_value(kind: str) -> None:
    def row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        if kind == "list":
            return longest_row(rows)
        return longest_row(pytest.importorskip("datasets").Dataset.from_list(rows))

    assert row(PREFERENCES) == {**LONGEST, "score": 1.0}
    assert row(PACKED) == {"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}  # as many parts as any row has
    assert row(PICTURES) == PICTURES[0]
    assert row(TALKS) == {"prompt": TALKS[1]["prompt"], "answer": "long answer"}
    assert row([{"prompt": talk["prompt"]} for talk in TALKS]) == {"prompt": TALKS[1]["prompt"]}
    assert row([{"files": [{"path": "a", "bytes": b""}]}]) is None  # an image is no conversation
    assert row([{"label": 1}, {"label": 2}]) is None


def test_tensors_have_lengths() -> None:
    rows = [{"input_ids": torch.arange(length), "label": torch.tensor(1)} for length in (2, 5, 3)]
    found = longest_row(rows)
    assert found is not None
    assert torch.equal(found["input_ids"], torch.arange(5))


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_rows_need_not_have_equal_columns(kind: str) -> None:
    rows: list[dict[str, Any]] = [{"text": None, "note": "a"}, {"text": "long"}, {"text": "x", "note": "abc"}]
    given: Any = rows if kind == "list" else pytest.importorskip("datasets").Dataset.from_list(rows)
    assert longest_row(given) == {"text": "long", "note": "abc"}


def test_several_datasets_in_one_have_the_longest_of_all() -> None:
    def of(*parts: Any) -> dict[str, Any] | None:
        return longest_row(torch.utils.data.ConcatDataset(parts))

    first, second = [{"a": "x", "b": "xyz"}, {"a": "xy", "b": "x"}], [{"a": "long", "b": ""}]
    assert of(first, second) == {"a": "long", "b": "xyz"}
    assert of(first, [{"a": "long"}]) is None
    assert of([{"label": 1}], second) is None


def test_a_row_that_a_transform_makes_is_taken_as_it_is() -> None:
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_list([{"text": "ab"}, {"text": "abcd"}, {"text": "a"}])
    made = texts.with_transform(
        lambda batch: {"input_ids": [[ord(letter) for letter in text] for text in batch["text"]]}
    )
    assert longest_row(made) == {"input_ids": [97, 98, 99, 100]}


def test_rows_that_are_made_when_they_are_asked_for_are_not_measured() -> None:
    class Made(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise AssertionError("a row was made")

    assert longest_row(Made()) is None
    assert longest_row([]) is None


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_texts_are_as_long_as_their_tokens(kind: str) -> None:
    words = tokenizer()
    rows: list[dict[str, Any]] = [{"text": "w1" * 40}, {"text": "w1 w2 w3"}, {"text": "w1 " * 2}, {"text": None}]
    talks = [{"talk": [{"role": "user", "content": row["text"] or ""}]} for row in rows]

    def longest(rows: list[dict[str, Any]], texts: TextLengths) -> list[dict[str, Any]]:
        given: Any = rows if kind == "list" else pytest.importorskip("datasets").Dataset.from_list(rows)
        return longest_rows(given, texts)

    guess = TextLengths()
    assert longest(rows, guess) == rows[:1]
    assert guess.guessed
    for source in (words, type("Processor", (), {"tokenizer": words})()):
        texts = TextLengths(None, source)
        assert longest(rows, texts) == rows[1:2]
        assert longest(talks, texts) == talks[1:2]
        assert not texts.guessed

    def template(marks: str) -> TextLengths:
        return TextLengths(words, chat_template="{% for m in messages %}{{ m.content }} " + marks + "{% endfor %}")

    # Short messages are longer than a long one by the marks of each.
    many = [{"talk": [{"role": "user", "content": "w1"}] * 3}, *talks]
    assert longest(many, template("w9 w9"))[0] == many[0]
    assert longest(many, template("{{ raise_exception('no') }}"))[0] == many[0]  # by the roles among its texts


@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_the_longest_prompt_has_a_row_of_its_own(kind: str) -> None:
    def talk(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    rows = [{"talk": talk("a", "an answer of many words"), "id": 1}, {"talk": talk("a question?", "yes"), "id": 2}]
    given: Any = rows if kind == "list" else pytest.importorskip("datasets").Dataset.from_list(rows)
    assert longest_rows(given, TextLengths()) == [rows[0], {**rows[1], "id": 1}]


def test_a_row_of_a_stream_is_stretched_to_its_limit() -> None:
    row = {"input_ids": [7, 8, 9], "labels": [], "score": 0.5, "seq_lengths": [2, 1]}
    stretched = {"input_ids": [7, 8, 9, 7, 8], "labels": [0] * 5, "score": 0.5, "seq_lengths": [1] * 5}
    assert stretched_row(row, 5) == stretched
    tensors = stretched_row({"input_ids": torch.tensor([1, 2])}, 3)
    assert tensors is not None
    assert torch.equal(tensors["input_ids"], torch.tensor([1, 2, 1]))
    assert stretched_row({"text": "a", "input_ids": [1]}, 2) == {"text": "a", "input_ids": [1, 1]}
    assert stretched_row({"text": "yet to become tokens"}, 5) is None
    assert stretched_row({"input_ids": [1], "images": [[0.5]]}, 5) is None
    assert stretched_row({"label": 1}, 5) is None
