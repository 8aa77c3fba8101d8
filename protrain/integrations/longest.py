"""Rows as long as any of a dataset, of which the batch is made that is planned.

Collators pad a batch to its longest row, so that the first batch of a training says little about later ones. The rows
here have the longest value of every column, which bounds also what a collator joins (prompts and answers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import ConcatDataset
from transformers.generation import GenerateDecoderOnlyOutput

from protrain.common.trees import named_tensors
from protrain.integrations.text_lengths import TextLengths, is_conversation

# Lengths of the texts in a packed row (TRL), which add up to the tokens of the row.
_PARTS = "seq_lengths"
_ROWS_AT_ONCE = 1000


def longest_rows(dataset: Any, texts: TextLengths) -> list[dict[str, Any]]:
    """A row with the longest value of every column, or none where finding it would mean to make every row.

    Lists of mappings are measured as they are, and datasets of Hugging Face in their Arrow files, where nothing is
    decoded. Other datasets may compute their rows, or have no end. Only texts, conversations and tokens have lengths.
    Beside other lists, such as images that a text refers to, the longest row is taken as it is, as is one of which a
    transform of the dataset makes other columns. Of several datasets in one the columns must have the same names.

    A trainer may take a conversation without its last message for a prompt, and generate what follows. The longest
    prompt may be another row's, so there is then a second row, with that one's conversation.

    Args:
        dataset: of a trainer.
        texts: measures texts and conversations.
    """
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        found = _measured(_columns_of_list(dataset), texts)
    elif isinstance(dataset, ConcatDataset):  # of sentence-transformers, for several datasets
        parts = [longest_rows(part, texts) for part in dataset.datasets]
        if not all(parts) or len({frozenset(row) for rows in parts for row in rows}) > 1:
            return []
        return longest_rows([row for rows in parts for row in rows], texts)
    elif type(dataset).__module__ == "datasets.arrow_dataset" and len(dataset):
        found = _measured(_columns_of_arrow(dataset), texts)
        found.others = found.others or dataset.format["type"] == "custom"  # a transform, which makes other columns
    else:
        return []
    lengths = {name: np.concatenate(parts) for name, parts in found.lengths.items()}
    single = lengths.pop(_PARTS, None)
    if not lengths:
        return []
    row = dict(dataset[int(np.argmax(sum(lengths.values())))])
    if single is not None:  # as many as any row has, as collators make an input as long as their number
        ones = int(single.max()) - 1
        row[_PARTS] = [1] * ones + [int(sum(row[_PARTS])) - ones]
    if found.others:
        return [row]
    row |= {name: dataset[int(np.argmax(length))][name] for name, length in lengths.items() if length.any()}
    prompts = {name: np.concatenate(parts) for name, parts in found.prompts.items()}
    longest = {name: dataset[int(np.argmax(length))][name] for name, length in prompts.items() if length.any()}
    other = row | longest
    return [row] if other == row else [row, other]


def longest_collated(dataset: Any, collate: Callable[[list[Any]], Any]) -> list[dict[str, Any]]:
    """The rows of which ``collate`` makes the largest tensors, one row for each tensor, in an order of their own.

    Every row is collated, as only the collator knows how many tokens a text has.
    """
    largest: dict[str, tuple[int, int]] = {}  # by the name of a tensor: its elements, and the row
    for at in range(len(dataset)):
        for name, tensor in named_tensors(collate([dict(dataset[at])])):
            if name not in largest or tensor.numel() > largest[name][0]:
                largest[name] = tensor.numel(), at
    return [dict(dataset[at]) for at in dict.fromkeys(at for _, at in largest.values())]


def stretched_row(row: Mapping[str, Any], length: int) -> dict[str, Any] | None:
    """``row`` with ``length`` tokens in every column of tokens, or None if it has no tokens yet, or other lists.

    Texts beside tokens are those of which the tokens were made, and stay.
    """
    kinds = {name: _kind(value) for name, value in row.items()}
    if "tokens" not in kinds.values() or "other" in kinds.values():
        return None
    stretched = dict(row)
    for name in (name for name, kind in kinds.items() if kind == "tokens"):
        values = row[name].tolist() if isinstance(row[name], Tensor | np.ndarray) else list(row[name])
        filled = [1] * length if name == _PARTS else np.resize(values or [0], length).tolist()
        stretched[name] = row[name].new_tensor(filled) if isinstance(row[name], Tensor) else filled
    return stretched


class _Found:
    """The lengths that were found, in pieces one after another."""

    def __init__(self) -> None:
        self.lengths: dict[str, list[np.ndarray]] = {}  # by column of texts, conversations or tokens
        self.prompts: dict[str, list[np.ndarray]] = {}  # by column of conversations, each without its last message
        self.others = False  # whether columns have other lists


def generate_longest(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **given: Any) -> Any:
    """What ``generate()`` of a causal model returns where no row ends early, with one token in place of all new ones.

    Args:
        model: whose generation configuration counts where ``generation_config`` is None.
        inputs: token ids of the prompts, (rows, tokens), if they are not in ``given`` as ``input_ids``.
        generation_config: that of the call.
        given: further arguments of ``generate()``.

    Returns:
        Token ids of prompts with completions, (rows, tokens + new tokens), or an output with them as ``sequences``.
    """
    prompts: Tensor = given["input_ids"] if inputs is None else inputs
    limits = generation_config or model.generation_config
    new = given.get("max_new_tokens", limits.max_new_tokens)
    if new is None:
        new = max(given.get("max_length", limits.max_length) - prompts.shape[1], 1)
    ends = limits.eos_token_id if isinstance(limits.eos_token_id, list) else [limits.eos_token_id]
    token = next(each for each in range(len(ends) + 2) if each not in (*ends, limits.pad_token_id))
    sequences = nn.functional.pad(prompts, (0, new), value=token)
    return GenerateDecoderOnlyOutput(sequences=sequences) if given.get("return_dict_in_generate") else sequences


def _measured(pieces: Iterator[tuple[str, str, Any]], texts: TextLengths) -> _Found:
    """The lengths in ``pieces`` of columns, each a name, the kind of its values, and these or for tokens the lengths.

    All pieces of a column have one length for each row.
    """
    found = _Found()
    for name, kind, values in pieces:
        if kind == "tokens":
            found.lengths.setdefault(name, []).append(values)
        elif kind in ("text", "conversation"):
            found.lengths.setdefault(name, []).append(texts.of(values))
            if kind == "conversation":
                found.prompts.setdefault(name, []).append(texts.of([value and value[:-1] for value in values]))
        found.others = found.others or kind == "other"
    return found


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if getattr(value, "ndim", None) == 1:
        return "tokens"
    if isinstance(value, list | tuple):
        if all(isinstance(each, int) for each in value):
            return "tokens"
        return "conversation" if is_conversation(value) else "other"
    return "other" if getattr(value, "ndim", 0) > 1 else "number"


def _columns_of_list(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    """What ``_measured`` takes."""
    first: dict[str, Any] = {}  # by column a value that is not None, as rows need not have equal columns
    for row in rows:
        first = {name: value for name, value in row.items() if value is not None} | first
    for name, kind in {name: _kind(value) for name, value in first.items()}.items():
        values = [row.get(name) for row in rows]
        if kind == "tokens":
            yield name, kind, np.array([0 if value is None else len(value) for value in values])
        else:
            yield name, kind, values


def _columns_of_arrow(dataset: Any) -> Iterator[tuple[str, str, Any]]:
    """What ``_measured`` takes."""
    from pyarrow import compute, types

    kinds: dict[str, str] = {}  # by nested column, as soon as a value is not null
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in table.column_names:
            column, kind = table[name], table[name].type
            if types.is_string(kind) or types.is_large_string(kind):
                yield name, "text", column.to_pylist()
            elif (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type):
                yield name, "tokens", compute.fill_null(compute.list_value_length(column), 0).to_numpy()
            elif types.is_nested(kind):
                value = next((each.as_py() for each in column if each.is_valid), None)
                known = kinds.get(name) or (kinds.setdefault(name, _kind(value)) if value is not None else "unknown")
                yield (name, known, column.to_pylist()) if known == "conversation" else (name, known, None)
