"""The tensors in a folder of safetensors: which of them make up a model, what else is there, and their values.

[Note: conversions] The files of a model have the layout in which it was published, and the classes of transformers have
another one. A Mixtral layer has two tensors for all of its experts, where the files have three matrices for each
expert. transformers renames and merges tensors when it loads, and does the reverse when it saves. This file applies the
rules of transformers itself, so that every layout that ``from_pretrained`` reads can be read. They are no documented
interface, and nothing outside this file uses them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.adapters import adapter_names, base_name, copied_names, within_peft
from protrain.common.errors import warn_user
from protrain.common.parameters import is_managed
from protrain.engine.states.initialisers import missing_start
from protrain.engine.weights.parameter import has_moved

_NAMED = 3  # tensors that a message names
_TRAINABLE = ("F64", "F32", "F16", "BF16")  # types of safetensors whose values are the weights, and not quantised
# Earlier releases of transformers saved these buffers in every layer. They are computed now.
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


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
            named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [folder / name for name in sorted(set(named.values()))]
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
    except (OSError, ValueError, KeyError, safetensors_package().SafetensorError) as error:
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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tensors of files that become tensors of the model together. Nearly always one becomes one."""

    stored: list[StoredTensor]
    names: list[str]  # the tensors of the model that they become
    values: Callable[[Callable[[StoredTensor], Tensor]], dict[str, Tensor]]  # given a reader, the value of each name


@dataclass(frozen=True, kw_only=True)
class WeightSources:
    """Which tensors in safetensors the tensors of a model are made of."""

    sources: list[Source]  # for every parameter, unless files may lack it, and for the persistent buffers in the files
    repeated: list[tuple[Source, Source]]  # pairs for one tensor of the model that the files have under several names
    unused: list[str]  # keys that the model has no place for, and is not known to do without


class _ModelNames:
    """The names that the tensors of a model have, in the model and in files.

    Attributes:
        prefix: The prefix of names in the base model, if a model of transformers contains one; otherwise empty.
        managed: The names of the parameters that lie in chunks, each once, in their order.
        first: For every name of a tensor its first name. Tied tensors have several names.
        shapes: The shape of every tensor, by first name.
        spelt: For every name that a file may give a tensor, its name in the model.
        copies: For a tensor of a module that peft trains as a whole, and so has twice, the names of its copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self.prefix: str = getattr(model, "base_model_prefix", "") or ""
        parameters = {id(p): name for name, p in model.named_parameters()}
        others = unmanaged(model)
        self.managed = dict.fromkeys(name for name in parameters.values() if name not in others)
        self.first = {name: parameters[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
        self.first.update((name, name) for name in others)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *others.items())}
        self.spelt: dict[str, str] = {}
        for name in self.first:
            own, other = _spellings(base_name(name), self.prefix)
            self.spelt[name] = self.spelt[own] = name
            self.spelt.setdefault(other, name)
        self.copies: dict[str, list[str]] = {}
        for copy, original in copied_names(model).items():
            self.copies.setdefault(self.first[original], []).append(self.first[copy])


def weight_sources(model: nn.Module, folder: Path) -> WeightSources:
    """Which tensors in the safetensors of ``folder`` the tensors of ``model`` are made of.

    Only the headers of files are read, so that a folder of another model is refused at once. Tensors that are merged or
    split are converted on the meta device, to learn the shapes of the results.

    Raises:
        ValueError: a file is missing or unreadable, or parameters are missing, quantized or of another shape.
    """
    stored, conversions, names = stored_tensors(folder), Conversions(within_peft(model)), _ModelNames(model)
    # Tensors that are converted together are one group; every other tensor is a group of its own.
    groups: dict[tuple[str, str], list[tuple[StoredTensor, str | None]]] = {}
    no_place: dict[str, str] = {}
    for key, (target, pattern) in conversions.targets(stored).items():
        own = target
        if own not in names.spelt:  # the rule was not meant for this key
            own, pattern = key, None
        if own not in names.spelt:
            no_place[key] = target
        else:
            groups.setdefault((own, key if pattern is None else ""), []).append((stored[key], pattern))
    found: dict[str, Source] = {}
    sources, repeated = [], []
    # If a tied tensor is stored under several names, the tensor under its first name counts.
    for group in sorted(groups, key=lambda group: names.first[names.spelt[group[0]]] != names.spelt[group[0]]):
        source = _source(conversions, names, group[0], groups[group])
        new = [name for name in source.names if name not in found]
        if new:
            sources.append(replace(source, names=new))
            found.update(dict.fromkeys(new, source))
        repeated += [(found[name], source) for name in source.names if found[name] is not source]
    # A model does without buffers that it computes, and without what a class of transformers says.
    buffers = {
        spelt for name, _ in model.named_buffers(remove_duplicate=False) for spelt in _spellings(name, names.prefix)
    }
    known = _matcher((*_FORMER_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())))
    unused = [key for key, to in no_place.items() if not any(name in buffers or known(name) for name in (key, to))]
    # Adapters, and what files may lack according to a class of transformers, keep the model's own values.
    may_lack, added = _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()), adapter_names(model)
    missing = [
        name
        for name in names.managed
        if name not in found and not ((name in added or may_lack(name)) and _has_values(model.get_parameter(name)))
    ]
    if missing:
        besides = f"; it holds {_listed(unused)}, which the model has no place for" if unused else ""
        if missing[0] in added and (first := model.get_parameter(missing[0])).is_meta:
            besides += (
                f". It {missing_start(first)}: build the model with its weights, as from_pretrained does, before an "
                "adapter that is computed from them, and leave out weights="
            )
        raise ValueError(
            f"weights: {folder} lacks {len(missing)} of {len(names.managed)} parameters, among them "
            f"{missing[0]}{besides}"
        )
    return WeightSources(sources=sources, repeated=repeated, unused=unused)


def _has_values(parameter: nn.Parameter) -> bool:
    """Whether the model itself has the value of ``parameter``, or initialisers that make it."""
    return not (missing_start(parameter) if parameter.is_meta else has_moved(parameter))


def check_weights(model: nn.Module, folder: Path) -> WeightSources:
    """``weight_sources``, and warn of tensors in ``folder`` that the model has no place for.

    Raises:
        ValueError: as ``weight_sources``, or names of one parameter have different values in the files.
    """
    found = weight_sources(model, folder)
    with reading(tensor for pair in found.repeated for source in pair for tensor in source.stored) as read:
        for kept, other in found.repeated:
            values = kept.values(read)
            for name, value in other.values(read).items():
                if name in values and not torch.equal(value, values[name].to(value.dtype)):
                    raise ValueError(
                        f"weights: {kept.stored[0].key} and {other.stored[0].key} in {folder} have different values, "
                        f"and both are {name} in {type(model).__name__}: where it ties the two, build it so that it "
                        "does not (tie_word_embeddings=False in a configuration of transformers)"
                    )
    if found.unused:
        warn_user(
            f"weights: {folder} holds what {type(model).__name__} has no place for: "
            f"{_listed(found.unused)}. Left out; for them to count, build the model that they were saved from"
        )
    return found


def unmanaged(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a file of weights that are in no chunk: persistent buffers, and parameters of integers."""
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if not is_managed(p)}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    return found


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A function that tells whether any of ``patterns`` is found in a name."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _listed(keys: list[str]) -> str:
    return f"{', '.join(keys[:_NAMED])}{f' and {len(keys) - _NAMED} more' if len(keys) > _NAMED else ''}"


def _spellings(name: str, prefix: str) -> tuple[str, str]:
    """``name``, and the name of the same tensor in files of the base model alone, or of the model around it."""
    bare = name.removeprefix(f"{prefix}.")
    return name, bare if bare != name or not prefix else f"{prefix}.{name}"


def _source(
    conversions: Conversions, names: _ModelNames, target: str, parts: list[tuple[StoredTensor, str | None]]
) -> Source:
    """The tensors of the model that ``parts`` become, ``target`` and others. ValueError if their shapes do not fit."""
    stored, name = [tensor for tensor, _ in parts], names.spelt[target]

    def values(read: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for other, value in conversions.convert(target, parts, read).items():
            if other in names.spelt:
                first = names.first[names.spelt[other]]
                made.update(dict.fromkeys((first, *names.copies.get(first, ())), value))
        return made

    origin = stored[0].key if len(stored) == 1 else f"{stored[0].key} and {len(stored) - 1} more"
    where = f"{origin} in {stored[0].file.name}"
    if names.first[name] in names.managed:
        for tensor in stored:
            if tensor.dtype not in _TRAINABLE:
                raise ValueError(
                    f"weights: {tensor.key} in {tensor.file.name} is {tensor.dtype}: quantized weights cannot be "
                    "trained; save the model in bfloat16 first"
                )
    try:
        made = values(lambda tensor: torch.empty(tensor.shape, device="meta"))
    except Exception as error:
        raise ValueError(f"weights: {where} do not make {name}, as transformers puts them together: {error}") from None
    shapes = {other: tuple(value.shape) for other, value in made.items()}
    for other, shape in shapes.items():
        if shape != names.shapes[other]:
            makes = f"{where} has" if stored[0].key == other else f"{where}, which is {other} in the model, has"
            raise ValueError(f"weights: {makes} shape {shape}, the model's is {names.shapes[other]}")
    return Source(stored=stored, names=list(shapes), values=values)
