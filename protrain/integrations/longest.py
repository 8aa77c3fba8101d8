"""A row as long as any of a dataset, of which the batch is made that is planned.

Collators pad a batch to its longest row, so that the first batch of a training says little about later ones. The row
here has the longest value of every column, which bounds also what a collator joins (prompts and answers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

# Lengths of the texts in a packed row (TRL), which add up to the tokens of the row.
_PARTS = "seq_lengths"
_ROWS_AT_ONCE = 10_000


def longest_row(dataset: Any) -> dict[str, Any] | None:
    """A row with the longest value of every column, or None where finding it would mean to make every row.

    Lists of mappings are measured as they are, and datasets of Hugging Face in their Arrow files, where nothing is
    decoded. Other datasets may compute their rows, or have no end. Only texts, conversations and tokens have lengths.
    A conversation is as long as all its texts. Beside other lists, such as images that a text refers to, the longest
    row is taken as it is, as is one of which a transform of the dataset makes other columns. Of several datasets in one
    the columns must have the same names.
    """
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        lengths, others = _lengths_of_list(dataset)
    elif isinstance(dataset, ConcatDataset):  # of sentence-transformers, for several datasets
        rows = [longest_row(part) for part in dataset.datasets]
        known = [row for row in rows if row is not None and row.keys() == (rows[0] or {}).keys()]
        return longest_row(known) if len(known) == len(rows) else None
    elif type(dataset).__module__ == "datasets.arrow_dataset" and len(dataset):
        lengths, others = _lengths_of_arrow(dataset)
    else:
        return None
    parts = lengths.pop(_PARTS, None)
    if not lengths:
        return None
    row = dict(dataset[int(np.argmax(sum(lengths.values())))])
    if parts is not None:  # as many as any row has, as collators make an input as long as their number
        single = int(parts.max()) - 1
        row[_PARTS] = [1] * single + [int(sum(row[_PARTS])) - single]
    if others:
        return row
    return row | {name: dataset[int(np.argmax(found))][name] for name, found in lengths.items() if found.any()}


def _lengths_of_list(rows: list[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], bool]:
    """By column of texts, conversations or tokens the lengths of its values. And whether other columns have lists."""
    first: dict[str, Any] = {}  # by column a value that is not None, as rows need not have equal columns
    for row in rows:
        first = {name: value for name, value in row.items() if value is not None} | first
    kinds = {name: _kind(value) for name, value in first.items()}
    lengths = {
        name: np.array([_length(row.get(name)) for row in rows]) for name, kind in kinds.items() if kind == "measured"
    }
    return lengths, "other" in kinds.values()


def _kind(value: Any) -> str:
    if isinstance(value, str) or getattr(value, "ndim", None) == 1:
        return "measured"
    if isinstance(value, list | tuple):
        tokens = all(isinstance(each, int) for each in value)
        return "measured" if tokens or _is_conversation(value) else "other"
    return "other" if getattr(value, "ndim", 0) > 1 else "number"


def _is_conversation(value: list[Any] | tuple[Any, ...]) -> bool:
    plain = str | int | float | None
    return all(isinstance(each, Mapping) for each in value) and all(isinstance(leaf, plain) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, Mapping | list | tuple):
        yield value
        return
    for each in value.values() if isinstance(value, Mapping) else value:
        yield from _leaves(each)


def _length(value: Any) -> int:
    """The length of a text or of tokens, or of all texts in a conversation. 0 for None."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        return sum(len(leaf) for leaf in _leaves(value) if isinstance(leaf, str))
    return 0 if value is None else len(value)


def _lengths_of_arrow(dataset: Any) -> tuple[dict[str, np.ndarray], bool]:
    """What ``_lengths_of_list`` returns."""
    from pyarrow import compute, types

    found: dict[str, list[np.ndarray]] = {}
    others = dataset.format["type"] == "custom"  # a transform, which makes other columns of these
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in table.column_names:
            kind = table[name].type
            if types.is_string(kind) or types.is_large_string(kind):
                lengths = compute.fill_null(compute.utf8_length(table[name]), 0).to_numpy()
            elif (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type):
                lengths = compute.fill_null(compute.list_value_length(table[name]), 0).to_numpy()
            elif (first := _first(table[name])) is not None and _kind(first) == "measured":
                lengths = np.array([_length(value) for value in table[name].to_pylist()])
            else:
                others = others or types.is_nested(kind)
                continue
            found.setdefault(name, []).append(lengths)
    return {name: np.concatenate(parts) for name, parts in found.items()}, others


def _first(column: Any) -> Any:
    """The first value of a column that is not null, if it is nested, as conversations are."""
    from pyarrow import types

    return next((each.as_py() for each in column if each.is_valid), None) if types.is_nested(column.type) else None
