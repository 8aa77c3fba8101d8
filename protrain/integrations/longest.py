"""The batch that is planned: of a row as long as any of a dataset, and completions as long as any.

Collators pad a batch to its longest row, so that the first batch of a training says little about later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.generation import GenerateDecoderOnlyOutput

# Lengths of the texts in a packed row (TRL), which add up to the tokens of the row.
_PARTS = "seq_lengths"
_ROWS_AT_ONCE = 1000


def longest_row(dataset: Any) -> dict[str, Any] | None:
    """A row as long in every column of tokens as any of ``dataset``, or None where nobody knows how long rows will be.

    Sequences of tokens are measured as they are, and in a dataset of Hugging Face in its Arrow files. That bounds also
    what a collator joins (prompts and answers). Texts and lists of other things, such as images or messages, are not
    measured, nor streams and datasets that may compute their rows.
    """
    lengths = None
    if isinstance(dataset, list) and dataset and isinstance(dataset[0], Mapping):
        lengths = _lengths_in(dataset)
    elif type(dataset).__module__ == "datasets.arrow_dataset" and len(dataset) and dataset.format["type"] != "custom":
        lengths = _lengths_in_arrow(dataset)
    return _stretched(dataset[0], lengths) if lengths else None


def _lengths_in(rows: list[Mapping[str, Any]]) -> dict[str, int] | None:
    """The longest length of each column of sequences, or None if there are other lists."""
    lengths: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if value is None or isinstance(value, str | int | float) or getattr(value, "ndim", None) == 0:
                continue
            if getattr(value, "ndim", None) != 1 and not (
                isinstance(value, list | tuple) and all(isinstance(each, int | float) for each in value)
            ):
                return None
            lengths[name] = max(lengths.get(name, 0), len(value))
    return lengths


def _lengths_in_arrow(dataset: Any) -> dict[str, int] | None:
    """What ``_lengths_in`` finds, of files of which nothing is decoded."""
    from pyarrow import compute, types

    lengths: dict[str, int] = {}
    for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in table.column_names:
            kind = table[name].type
            if types.is_nested(kind):
                if not types.is_primitive(getattr(kind, "value_type", kind)):
                    return None
                longest = compute.max(compute.list_value_length(table[name])).as_py()
                lengths[name] = max(lengths.get(name, 0), longest or 0)
    return lengths


def _stretched(row: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """``row`` with sequences of these ``lengths``, which repeat what the row has."""
    stretched = dict(row)
    for name, length in lengths.items():
        value = row.get(name)
        filled = np.resize([0] if value is None or not len(value) else value, length).tolist()
        if name == _PARTS:  # as many as any row has, as collators make an input as long as their number
            tokens = max(size for other, size in lengths.items() if other != _PARTS)
            filled = [1] * (length - 1) + [tokens - length + 1]
        stretched[name] = value.new_tensor(filled) if isinstance(value, Tensor) else filled
    return stretched


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
