"""The names of parameters in a model to which peft has added adapters.

peft puts a layer that it adapts into a module of its own, as ``base_layer`` beside the adapter's parameters.
``get_peft_model`` also puts a module around the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_AROUND_MODEL = "base_model.model."


def within_peft(model: Any) -> Any:
    """The model that ``get_peft_model`` was given, if ``model`` is what it returned; otherwise ``model``."""
    return model.get_base_model() if is_peft_model(model) else model


def is_peft_model(model: Any) -> bool:
    """Whether ``get_peft_model`` returned ``model``."""
    return hasattr(model, "get_base_model")


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that peft has put around layers of ``model``, with their paths."""
    for path, module in model.named_modules():
        if isinstance(getattr(module, "base_layer", None), nn.Module):
            yield path, module


def adapter_names(model: nn.Module) -> set[str]:
    """The names of the parameters that adapters have added to ``model``."""
    return {
        f"{path}.{name}"
        for path, module in adapted_layers(model)
        for name, _ in module.named_parameters()
        if not name.startswith("base_layer.")
    }


def copied_names(model: nn.Module) -> dict[str, str]:
    """For each tensor of a module that peft trains as a whole (``modules_to_save``), the one that it begins as.

    peft keeps the ``original_module`` beside a copy for each adapter.
    """
    return {
        f"{path}.modules_to_save.{adapter}.{name}": f"{path}.original_module.{name}"
        for path, module in model.named_modules()
        if isinstance(getattr(module, "original_module", None), nn.Module)
        and isinstance(copies := getattr(module, "modules_to_save", None), nn.ModuleDict)
        for adapter, copy in copies.items()
        for name in copy.state_dict()
    }


def base_name(name: str) -> str:
    """The name that the parameter ``name`` has in the model without adapters, and so in its files."""
    return re.sub(r"(\.base_layer|\.original_module)+\.", ".", name.removeprefix(_AROUND_MODEL))


def in_peft_model(name: str) -> str:
    """The name that the parameter ``name`` has in what ``get_peft_model`` returns, and so in the files of peft."""
    return name if name.startswith(_AROUND_MODEL) else _AROUND_MODEL + name
