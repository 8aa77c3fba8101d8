"""Finds a model's repeated blocks and the other modules that own parameters, by structure alone.

A block is the unit of checkpointing and swapping. It is looked for where models keep repetition: among the children of
ModuleList, Sequential and ModuleDict, then among siblings with numbered names (layer1, layer2), then in lists that hold
one module (a model of one layer, or layers that share their weights). Only the outermost repetition counts, except that
a list of lists is opened: neither a ModuleList nor a stage made of blocks is what one wants to checkpoint.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable

from torch import nn

from protrain.common.parameters import is_managed

_NUMBERED = re.compile(r"(.*?)_?(\d+)")


def find_blocks(model: nn.Module) -> list[str]:
    """Paths of ``model``'s repeated blocks in definition order; [] when nothing in it repeats.

    Several lists count (an encoder's and a decoder's). Lists of leaf modules, like the Linears of a head, count only
    when there is nothing larger.
    """
    listed = _outermost(model, "", _repeated)
    composite = [path for path, module in listed if not _is_leaf(module)]
    if not composite:
        composite = [path for path, _ in _outermost(model, "", _numbered)]
    if not composite:
        composite = [path for path, _ in _outermost(model, "", _single)]
    chosen = set(composite or [path for path, _ in listed])
    return [path for path, _ in model.named_modules() if path in chosen]


def find_units(model: nn.Module, blocks: list[str]) -> list[str]:
    """``blocks`` and every module outside them that owns floating-point parameters itself, in definition order."""
    inside = tuple(f"{path}." for path in blocks)
    chosen = set(blocks)
    return [
        path
        for path, module in model.named_modules()
        if path in chosen
        or (
            not path.startswith(inside) and any(is_managed(parameter) for parameter in module.parameters(recurse=False))
        )
    ]


def checkpointing_switches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of everything in ``model`` that says whether it checkpoints its activations itself."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "gradient_checkpointing")]


def switch_off_checkpointing(switches: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Switch off what checkpoints its activations itself, as the plan decides what is recomputed: its paths."""
    on = [(path, module) for path, module in switches if module.gradient_checkpointing is True]
    for _, module in on:
        vars(module)["gradient_checkpointing"] = False
    return [path for path, _ in on]


def say_switched_off(paths: list[str], *, stacklevel: int) -> None:
    """Warn of the checkpointing that was switched off, if any."""
    if paths:
        warnings.warn(
            f"gradient checkpointing of {paths[0] or 'the model'} was switched off: ProTrain's plan decides what is "
            "recomputed, with the same results",
            stacklevel=stacklevel + 1,
        )


def _outermost(module: nn.Module, path: str, pick: Callable[[nn.Module], set[str]]) -> list[tuple[str, nn.Module]]:
    """What ``pick`` takes from ``module``'s children, and from inside the children that it leaves."""
    taken = pick(module)
    found = []
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if name in taken:
            found.append((inner, child))
        else:
            found += _outermost(child, inner, pick)
    return found


def _repeated(module: nn.Module) -> set[str]:
    """Names of the children of a list that are blocks."""
    if not _is_list(module):
        return set()
    # _modules and not named_children: a list that holds one module several times repeats it.
    children = {name: child for name, child in module._modules.items() if child is not None and _has_parameters(child)}
    children = {name: child for name, child in children.items() if not _opens(child)}
    counts = Counter(type(child) for child in children.values())
    taken = {name for name, child in children.items() if counts[type(child)] >= 2}
    # A ModuleList is called one by one, so an odd layer among the others (a first dense one in an MoE) is a block too.
    if isinstance(module, nn.ModuleList) and any(not _is_leaf(children[name]) for name in taken):
        taken = {name for name, child in children.items() if not _is_leaf(child)}
    return taken


def _numbered(module: nn.Module) -> set[str]:
    """Names of composite children like layer1, layer2 of one class."""
    families: dict[tuple[str, type], list[str]] = {}
    for name, child in module.named_children():
        match = _NUMBERED.fullmatch(name)
        if match and not _is_list(module) and _has_parameters(child) and not _is_leaf(child) and not _opens(child):
            families.setdefault((match.group(1), type(child)), []).append(name)
    return {name for names in families.values() if len(names) >= 2 for name in names}


def _single(module: nn.Module) -> set[str]:
    """Name of the composite child of a ModuleList that holds one."""
    if not isinstance(module, nn.ModuleList) or len(module) != 1:
        return set()
    child = module[0]
    return {"0"} if _has_parameters(child) and not _is_leaf(child) and not _opens(child) else set()


def _opens(module: nn.Module) -> bool:
    """Whether ``module`` is a list to look into, not a block: it cannot be called, or it is a stage of blocks."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return True
    return isinstance(module, nn.Sequential) and any(
        not _is_leaf(child) for name, child in module.named_children() if name in _repeated(module)
    )


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _has_parameters(module: nn.Module) -> bool:
    return any(is_managed(parameter) for parameter in module.parameters())
