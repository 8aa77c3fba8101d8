"""The tensors in a folder of safetensors: files, headers and values, and the rules by which transformers loads them.

The files of a model have the layout in which it was published, and the classes of transformers have another one. A
Mixtral layer has two tensors for all of its experts, where the files have three matrices for each expert. transformers
renames and merges tensors when it loads, and does the reverse when it saves. This file applies the rules of
transformers itself, so that every layout that ``from_pretrained`` reads can be read. They are no documented interface,
and nothing outside this file uses them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, as the file's header describes it."""

    file: Path
    key: str
    dtype: str  # as in the header, for example "BF16"
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, which may itself be such a file. ValueError if there is none.

    As in transformers these are ``model.safetensors``, or else the files that the index names, or else all. Folders of
    the Hub may have the same weights a second time, in other files and under other names.
    """
    if folder.is_file():
        return [folder]
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        with _must_be_readable(index):
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(named))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights: no .safetensors file in {folder}")
    return files


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of ``folder`` by their keys, from the files' headers alone.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    found: dict[str, StoredTensor] = {}
    for file in weight_files(folder.absolute()):  # the weights may be loaded later, from another working folder
        with _must_be_readable(file), open_file(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                header = tensors.get_slice(key)
                stored = StoredTensor(file=file, key=key, dtype=header.get_dtype(), shape=tuple(header.get_shape()))
                found.setdefault(key, stored)
    return found


@contextmanager
def reading(stored: Iterable[StoredTensor]) -> Iterator[Callable[[StoredTensor], Tensor]]:
    """A function that reads any of ``stored``. Their files stay mapped while the context lasts.

    Raises:
        ValueError: a file cannot be read, when it is opened or later.
    """
    with ExitStack() as stack:
        files = {}
        for file in sorted({tensor.file for tensor in stored}):
            with _must_be_readable(file):
                files[file] = stack.enter_context(open_file(file))

        def read(tensor: StoredTensor) -> Tensor:
            with _must_be_readable(tensor.file):
                return files[tensor.file].get_tensor(tensor.key)

        yield read


def safetensors_package() -> Any:
    """The package ``safetensors``. An ImportError says what to install."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("checkpoints and weights= need the package safetensors: pip install 'protrain[hf]'") from None
    return safetensors


def open_file(file: Path) -> Any:
    """``safetensors.safe_open`` on ``file``, also where its path is not UTF-8, which safetensors itself refuses."""
    with open(file, "rb") as opened:
        return safetensors_package().safe_open(f"/dev/fd/{opened.fileno()}", framework="pt")


@contextmanager
def _must_be_readable(file: Path) -> Iterator[None]:
    """Name ``file`` in the error if reading it fails. Only reads belong inside, as other code may raise the same."""
    try:
        yield
    except (OSError, ValueError, safetensors_package().SafetensorError) as error:
        raise ValueError(f"weights: {file} cannot be read: {error}") from None


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
