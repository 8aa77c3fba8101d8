"""A batch of rows as long as any of a dataset, for which the plan is made.

Collators pad a batch to its longest row, so that the first batch of a training says little about later ones. The rows
here are made of the longest value of every column, which bounds also what a collator joins (prompts and answers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

# Lengths of the parts of a packed row (TRL), which must fit the row: it is no length of its own.
_PARTS = "seq_lengths"
_ROWS_AT_ONCE = 10_000


def longest_row(dataset: Any) -> dict[str, Any] | None:
    """A row with the longest value of every column, or None where finding it would mean to make every row.

    Lists of mappings are measured as they are, and datasets of Hugging Face in their Arrow files, where nothing is
    decoded. Other datasets may compute their rows, or have no end.
    """
    lengths = _lengths(dataset)
    if not lengths:
        return None
    row = dict(dataset[int(np.argmax(sum(lengths.values())))])
    return row | {name: dataset[int(np.argmax(found))][name] for name, found in lengths.items()}


def _lengths(dataset: Any) -> dict[str, np.ndarray]:
    """The length of every value of every column that has lengths."""
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        names = [name for name, value in dataset[0].items() if _has_length(value) and name != _PARTS]
        return {name: np.array([len(row[name]) for row in dataset]) for name in names}
    if type(dataset).__module__ != "datasets.arrow_dataset" or not len(dataset):
        return {}
    parts = list(_arrow_lengths(dataset))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _has_length(value: Any) -> bool:
    return isinstance(value, Sized) and not isinstance(value, Mapping) and getattr(value, "ndim", 1) > 0


def _arrow_lengths(dataset: Any) -> Iterator[dict[str, np.ndarray]]:
    import pyarrow
    from pyarrow import compute

    is_list, types = (pyarrow.types.is_list, pyarrow.types.is_large_list), pyarrow.types
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        found = {}
        for name in table.column_names:
            column = table[name]
            if name == _PARTS:
                continue
            if any(check(column.type) for check in is_list):
                found[name] = compute.list_value_length(column)
            elif types.is_string(column.type) or types.is_large_string(column.type):
                found[name] = compute.utf8_length(column)
        yield {name: compute.fill_null(lengths, 0).to_numpy() for name, lengths in found.items()}
