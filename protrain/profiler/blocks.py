"""Finds a model's repeated blocks, and the other modules that own parameters, from the module tree alone.

A block is the unit of checkpointing and swapping. The search goes where models keep repetition: first among the
children of ModuleList, Sequential and ModuleDict, then among siblings with numbered names (layer1, layer2), then in
lists of one module (a model of one layer, or layers that share their weights). Only the outermost repetition counts. A
list of lists is the exception: the search descends into it, because neither a ModuleList nor a stage of several blocks
should be checkpointed as a whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn

from protrain.common.errors import warn_user
from protrain.common.parameters import is_managed

_NUMBERED = re.compile(r"(.*?)_?(\d+)")


def refuse_scripted(model: nn.Module) -> None:
    """ValueError if a module of ``model`` is a ScriptModule: others can neither take its weights nor put them back."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"module {name or type(model).__name__!r} is a ScriptModule, whose weights cannot be moved: use the "
                "module that it was made from, and compile=True"
            )


def find_blocks(model: nn.Module) -> list[str]:
    """The paths of ``model``'s repeated blocks in definition order; an empty list when nothing repeats.

    A model may have several lists of blocks, such as an encoder's and a decoder's. A list of leaf modules, such as the
    Linears of a head, counts only when the model repeats nothing larger.
    """
    listed = _outermost(model, "", _repeated)
    composite = [path for path, module in listed if not _is_leaf(module)]
    if not composite:
        composite = [path for path, _ in _outermost(model, "", _numbered)]
    if not composite:
        composite = [path for path, _ in _outermost(model, "", _single)]
    chosen = set(composite or [path for path, _ in listed])
    return [path for path, _ in model.named_modules() if path in chosen]


def find_units(model: nn.Module, blocks: list[str]) -> dict[str, list[nn.Parameter]]:
    """From the path of every unit to the floating-point parameters that it owns, in definition order.

    A unit is one of ``blocks``, which owns all parameters in it, or a module outside them that owns some directly.
    """
    inside = tuple(f"{path}." for path in blocks)
    chosen = set(blocks)
    units = {}
    for path, module in model.named_modules():
        owned = [parameter for parameter in module.parameters(recurse=path in chosen) if is_managed(parameter)]
        if path in chosen or (owned and not path.startswith(inside)):
            units[path] = owned
    return units


def checkpointing_switches(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The path and module of every module that has its own gradient-checkpointing switch."""
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "gradient_checkpointing")]


def switch_off_checkpointing(switches: Iterable[tuple[str, nn.Module]], *, warn: bool = False) -> None:
    """Turn off the modules' own gradient checkpointing, because the plan decides what is recomputed.

    With ``warn`` it warns if a switch was on.
    """
    on = [(path, module) for path, module in switches if module.gradient_checkpointing is True]
    for _, module in on:
        vars(module)["gradient_checkpointing"] = False
    if on and warn:
        warn_user(
            f"gradient checkpointing of {on[0][0] or 'the model'} was switched off: ProTrain's plan decides what is "
            "recomputed, with the same results"
        )


def _outermost(module: nn.Module, path: str, pick: Callable[[nn.Module], set[str]]) -> list[tuple[str, nn.Module]]:
    """The children of ``module`` that ``pick`` chooses, and those it chooses inside the children it leaves."""
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
    """The names of those children of a list that are blocks."""
    if not _is_list(module):
        return set()
    # named_children() would skip a module that the list holds a second time, and that is repetition too.
    children = {name: child for name, child in module._modules.items() if child is not None and _may_be_block(child)}
    counts = Counter(type(child) for child in children.values())
    taken = {name for name, child in children.items() if counts[type(child)] >= 2}
    # The model calls the modules of a ModuleList one by one. So an odd layer among them, such as the first dense layer
    # of a mixture of experts, is a block too.
    if isinstance(module, nn.ModuleList) and any(not _is_leaf(children[name]) for name in taken):
        taken = {name for name, child in children.items() if not _is_leaf(child)}
    return taken


def _numbered(module: nn.Module) -> set[str]:
    """The names of composite children of one class that are numbered, like layer1 and layer2."""
    families: dict[tuple[str, type], list[str]] = {}
    for name, child in module.named_children():
        match = _NUMBERED.fullmatch(name)
        if match and not _is_list(module) and not _is_leaf(child) and _may_be_block(child):
            families.setdefault((match.group(1), type(child)), []).append(name)
    return {name for names in families.values() if len(names) >= 2 for name in names}


def _single(module: nn.Module) -> set[str]:
    """The name of the only child of a ModuleList, if that child is composite."""
    if not isinstance(module, nn.ModuleList) or len(module) != 1:
        return set()
    child = module[0]
    return {"0"} if not _is_leaf(child) and _may_be_block(child) else set()


def _may_be_block(module: nn.Module) -> bool:
    """Whether ``module`` has floating-point parameters and is no list to search.

    A list to search cannot be called, or is a stage of several blocks.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict) or not any(map(is_managed, module.parameters())):
        return False
    return not isinstance(module, nn.Sequential) or all(
        _is_leaf(child) for name, child in module.named_children() if name in _repeated(module)
    )


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None
