"""Where a model's tensors are in a folder of safetensors, and what lies there besides."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from protrain.errors import not_downloaded
from protrain.parameters import is_managed

_NAMED = 3  # tensors in a message
_TRAINABLE = ("F64", "F32", "F16", "BF16")  # what safetensors calls the types whose values are the weights themselves
# Earlier releases of transformers saved these buffers in every layer; they are computed now.
_FORMER_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``, or the one that it is. ValueError when there is none.

    As transformers does: ``model.safetensors``, else what the index names, else all. Folders of the Hub may hold the
    same weights a second time, under other names, in files that neither is.
    """
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise ValueError(f"weights: there is no folder {folder}{not_downloaded(str(folder))}")
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"weights: {index} is no readable index: {error}") from None
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"weights: {folder} lacks {len(missing)} of the {len(named)} files that its index names, among them "
                f"{missing[0]}: get the folder again"
            )
        return [folder / name for name in named]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"weights: no .safetensors file in {folder}")
    return files


@dataclass(frozen=True, kw_only=True)
class WeightSources:
    """Where the tensors of a model are in safetensors: file and key, by name."""

    parameters: dict[str, tuple[Path, str]]  # floating-point ones, all of them
    others: dict[str, tuple[Path, str]]  # of persistent buffers and other parameters those that the files hold
    unused: list[str]  # keys that the model has no place for, nor is known to do without


def weight_sources(model: nn.Module, folder: Path) -> WeightSources:
    """Where in the safetensors of ``folder`` the tensors of ``model`` are.

    Only the files' headers are read, so that a folder of another model is found out before anything takes time.

    Raises:
        ValueError: a file is missing or unreadable, or parameters are missing, quantized or of another shape.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("weights= needs the package safetensors: pip install 'protrain[hf]'") from None
    prefix = getattr(model, "base_model_prefix", "") or ""
    managed = {id(p): name for name, p in model.named_parameters() if is_managed(p)}
    others = unmanaged(model)
    quantizable = set(managed.values())
    shapes = {name: tuple(tensor.shape) for name, tensor in (*model.named_parameters(), *others.items())}
    aliases = [(alias, managed.get(id(p))) for alias, p in model.named_parameters(remove_duplicate=False)]
    wanted: dict[str, str] = {}
    for alias, name in (*aliases, *((name, name) for name in others)):
        if name is not None:
            own, other = _spellings(alias, prefix)
            wanted[own] = name
            wanted.setdefault(other, name)
    found: dict[str, tuple[Path, str]] = {}
    unused = []
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                    name = wanted.get(key)
                    if name is None:
                        unused.append(key)
                        continue
                    if name in found:
                        continue
                    stored = tensors.get_slice(key)
                    dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
                    if name in quantizable and dtype not in _TRAINABLE:
                        raise ValueError(
                            f"weights: {key} in {file.name} is {dtype}: quantized weights cannot be trained; save the "
                            "model in bfloat16 first"
                        )
                    if shape != shapes[name]:
                        raise ValueError(
                            f"weights: {key} in {file.name} has shape {shape}, the model's is {shapes[name]}"
                        )
                    found[name] = (file, key)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"weights: {file} is no readable safetensors file: {error}") from None
    needed = list(managed.values())
    missing = [name for name in needed if name not in found]
    if missing:
        raise ValueError(f"weights: {folder} lacks {len(missing)} of {len(needed)} parameters, among them {missing[0]}")
    dispensable = _known_to_be_dispensable(model, prefix)
    return WeightSources(
        parameters={name: found[name] for name in needed},
        others={name: found[name] for name in others if name in found},
        unused=[key for key in unused if not dispensable(key)],
    )


def check_weights(model: nn.Module, folder: Path, *, stacklevel: int) -> None:
    """What :func:`weight_sources` refuses, and a warning of what ``folder`` holds in vain."""
    unused = weight_sources(model, folder).unused
    if unused:
        several = f"{len(unused)} tensors" if len(unused) > 1 else "a tensor"
        warnings.warn(
            f"weights: {folder} holds {several} that {type(model).__name__} has no place for: "
            f"{', '.join(unused[:_NAMED])}{', ...' if len(unused) > _NAMED else ''}. Left out; for "
            "them to count, build the model that they were saved from",
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
    patterns = [*_FORMER_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    known = re.compile("|".join(f"({pattern})" for pattern in patterns))
    return lambda key: key in names or known.search(key) is not None


def _spellings(name: str, prefix: str) -> tuple[str, str]:
    """``name`` as the model calls it, and as files of its base model alone, or of the model around it, do."""
    bare = name.removeprefix(f"{prefix}.")
    return name, bare if bare != name or not prefix else f"{prefix}.{name}"
