"""Which tensors of a folder of safetensors make up a model, and what lies there besides."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from protrain.common.parameters import is_managed
from protrain.engine.states.conversions import Conversions, Part
from protrain.engine.states.empty import is_empty
from protrain.engine.states.stored_tensors import StoredTensor, reading, stored_tensors
from protrain.engine.weights.parameter import has_moved

_NAMED = 3  # tensors in a message
_TRAINABLE = ("F64", "F32", "F16", "BF16")  # what safetensors calls the types whose values are the weights themselves
# Earlier releases of transformers saved these buffers in every layer; they are computed now.
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Tensors of files that become tensors of the model together: nearly always one that becomes one."""

    stored: list[StoredTensor]
    names: list[str]  # of the tensors in the model whose values these are
    values: Callable[[Callable[[StoredTensor], Tensor]], dict[str, Tensor]]  # given what reads, the value of each name


@dataclass(frozen=True, kw_only=True)
class WeightSources:
    """Where the tensors of a model are in safetensors."""

    sources: list[Source]  # each parameter is in one, unless the files may lack it; of persistent buffers those there
    repeated: list[tuple[Source, Source]]  # two that hold one tensor of the model, which has several names there
    unused: list[str]  # keys that the model has no place for, nor is known to do without


class _Places:
    """The names that the tensors of a model have, in the model and in files.

    Attributes:
        prefix: Of the names in a model of transformers, where its base model is a part of it; else empty.
        managed: Names of the parameters that chunks hold, each once, in their order.
        first: Every name of a tensor in the model, and the first name of the same tensor: tied ones have several.
        shapes: By first name.
        spelt: What a file may call a tensor, and its name in the model.
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
            own, other = _spellings(name, self.prefix)
            self.spelt[own] = name
            self.spelt.setdefault(other, name)


def weight_sources(model: nn.Module, folder: Path) -> WeightSources:
    """Which tensors in the safetensors of ``folder`` the tensors of ``model`` are made of.

    Only the files' headers are read, so that a folder of another model is found out before anything takes time. What
    becomes of tensors that are merged or split is tried out on the meta device, which has shapes and no memory.

    Raises:
        ValueError: a file is missing or unreadable, or parameters are missing, quantized or of another shape.
    """
    stored, conversions, places = stored_tensors(folder), Conversions(model), _Places(model)
    # Tensors that are converted together are one group; every other tensor is a group of its own.
    groups: dict[tuple[str, str], list[tuple[StoredTensor, str | None]]] = {}
    no_place: dict[str, str] = {}
    for key, (target, pattern) in conversions.targets(stored).items():
        place = places.spelt.get(target)
        if place is None:  # a key that no rule was meant for
            place, pattern = places.spelt.get(key), None
        if place is None:
            no_place[key] = target
        else:
            groups.setdefault((place, key if pattern is None else ""), []).append((stored[key], pattern))
    found: dict[str, Source] = {}
    sources, repeated = [], []
    # Where a tensor of several names is stored under more than one, that under the first of its names counts.
    for group in sorted(groups, key=lambda group: places.first[group[0]] != group[0]):
        source = _source(conversions, places, group[0], groups[group])
        new = [name for name in source.names if name not in found]
        if new:
            sources.append(replace(source, names=new))
            found.update(dict.fromkeys(new, source))
        repeated += [(found[name], source) for name in source.names if found[name] is not source]
    dispensable = _known_to_be_dispensable(model, places.prefix)
    unused = [key for key, target in no_place.items() if not dispensable(key) and not dispensable(target)]
    # What a class of transformers says that files may lack is what it computes: the model's own values stay.
    may_lack = _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    missing = [
        name
        for name in places.managed
        if name not in found and not (may_lack(name) and _has_values(model.get_parameter(name)))
    ]
    if missing:
        besides = f"; it holds {_listed(unused)}, which the model has no place for" if unused else ""
        raise ValueError(
            f"weights: {folder} lacks {len(missing)} of {len(places.managed)} parameters, among them "
            f"{missing[0]}{besides}"
        )
    return WeightSources(sources=sources, repeated=repeated, unused=unused)


def _has_values(parameter: nn.Parameter) -> bool:
    """Whether the model itself has the values of ``parameter``, or the record of how they are made."""
    return is_empty(parameter) or not (parameter.is_meta or has_moved(parameter))


def check_weights(model: nn.Module, folder: Path, *, stacklevel: int) -> None:
    """What :func:`weight_sources` refuses, and a warning of what ``folder`` holds in vain.

    Raises:
        ValueError: as :func:`weight_sources`, or names of one parameter have different values in the files.
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
        several = f"{len(found.unused)} tensors" if len(found.unused) > 1 else "a tensor"
        warnings.warn(
            f"weights: {folder} holds {several} that {type(model).__name__} has no place for: "
            f"{_listed(found.unused)}. Left out; for them to count, build the model that they were saved from",
            stacklevel=stacklevel + 1,
        )


def unmanaged(model: nn.Module) -> dict[str, Tensor]:
    """What a file of weights holds and no chunk does: persistent buffers, parameters that are not floating-point."""
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if not is_managed(p)}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    return found


def _known_to_be_dispensable(model: nn.Module, prefix: str) -> Callable[[str], bool]:
    """Whether a key of a file is one that the model does without: buffers that it computes itself."""
    names = {spelt for name, _ in model.named_buffers(remove_duplicate=False) for spelt in _spellings(name, prefix)}
    known = _matcher((*_FORMER_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())))
    return lambda key: key in names or known(key)


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether any of ``patterns`` is found in a name."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def _listed(keys: list[str]) -> str:
    return f"{', '.join(keys[:_NAMED])}{', ...' if len(keys) > _NAMED else ''}"


def _spellings(name: str, prefix: str) -> tuple[str, str]:
    """``name`` as the model calls it, and as files of its base model alone, or of the model around it, do."""
    bare = name.removeprefix(f"{prefix}.")
    return name, bare if bare != name or not prefix else f"{prefix}.{name}"


def _source(
    conversions: Conversions, places: _Places, place: str, parts: list[tuple[StoredTensor, str | None]]
) -> Source:
    """What ``parts`` become in the model, ``place`` first. ValueError where that is not what the model has there."""
    stored = [tensor for tensor, _ in parts]

    def values(read: Callable[[StoredTensor], Tensor]) -> dict[str, Tensor]:
        made = conversions.convert(place, [Part(t.key, pattern, partial(read, t)) for t, pattern in parts])
        return {places.first[name]: value for name, value in made.items() if name in places.first}

    origin = stored[0].key if len(stored) == 1 else f"{stored[0].key} and {len(stored) - 1} more"
    where = f"{origin} in {stored[0].file.name}"
    if places.first[place] in places.managed:
        for tensor in stored:
            if tensor.dtype not in _TRAINABLE:
                raise ValueError(
                    f"weights: {tensor.key} in {tensor.file.name} is {tensor.dtype}: quantized weights cannot be "
                    "trained; save the model in bfloat16 first"
                )
    try:
        shapes = {name: tuple(value.shape) for name, value in values(_without_values).items()}
    except Exception as error:
        raise ValueError(f"weights: {where} do not make {place}, as transformers puts them together: {error}") from None
    for name, shape in shapes.items():
        if shape != places.shapes[name]:
            makes = f"{where} has" if stored[0].key == name else f"{where}, which is {name} in the model, has"
            raise ValueError(f"weights: {makes} shape {shape}, the model's is {places.shapes[name]}")
    return Source(stored=stored, names=list(shapes), values=values)


def _without_values(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.shape, device="meta")
