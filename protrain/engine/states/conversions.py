"""How transformers makes the tensors of a model from the tensors in its files.

The files of a model have the layout in which it was published, and the classes of transformers have another one. A
Mixtral layer has two tensors for all of its experts, where the files have three matrices for each expert. transformers
renames and merges tensors when it loads, and does the reverse when it saves. This file applies the rules of
transformers itself, so that every layout that ``from_pretrained`` reads can be read. They are no documented interface,
and nothing outside this file uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

from torch import Tensor, nn

from protrain.engine.states.stored_tensors import StoredTensor


class Conversions:
    """The rules by which transformers loads files into ``model``. A model of another library has none."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._renamings, self._converters = _rules(model)
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def targets(self, keys: Iterable[str]) -> dict[str, tuple[str, str | None]]:
        """For each of ``keys`` the tensor of the model that it goes into, and the source of a converter that it is.

        The source is None if the tensor is not converted. A converter that makes several tensors is represented by the
        first of them. The result has the order in which a converter needs its parts.
        """
        if not self._renamings and not self._converters:
            return {key: (key, None) for key in keys}
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        # Some renamings depend on which keys came before, so transformers sorts the keys first.
        ordered = sorted(keys, key=dot_natural_key)
        return {key: rename_source_key(key, self._renamings, self._converters) for key in ordered}

    def convert(
        self, target: str, parts: list[tuple[StoredTensor, str | None]], read: Callable[[StoredTensor], Tensor]
    ) -> dict[str, Tensor]:
        """The tensors that ``parts`` become, by their names in the model. The first is ``target``.

        The parts, each with the source of a converter that it is, are read here, so that no other part of the model is
        in memory.
        """
        first, source = parts[0]
        if source is None:
            return {target: read(first)}
        converter = deepcopy(self._by_pattern[source])
        for stored, pattern in parts:
            converter.add_tensor(target, stored.key, pattern, partial(read, stored))
        made = converter.convert(target, model=self._model, config=self._model.config)
        if isinstance(made, tuple):  # transformers 5.0 and 5.1 also return errors, which were raised already
            made = made[0]
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _rules(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The renamings and converters of transformers for ``model``, if it is a model of transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")  # a script that has such a model has imported it
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return [], []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (  # noqa: F401 - all that is used must exist
            WeightConverter,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # another release has moved them, and files in the model's own layout load without them
        return [], []
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters
