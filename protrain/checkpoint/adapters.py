"""A model to which peft has added an adapter is exported as the adapter alone, or with the adapter merged in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from protrain.common.adapters import adapted_layers, adapter_names, base_name, in_peft_model

ADAPTER_FILE = "adapter_model"


def has_adapter(model: nn.Module) -> bool:
    """Whether peft has added an adapter to ``model``."""
    return bool(getattr(model, "peft_config", None)) and bool(adapter_names(model))


def adapter_weights(
    model: nn.Module, names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of the adapter of ``model``, by the names that ``PeftModel.from_pretrained`` expects.

    Args:
        model: the model, of whose parameters no values are needed.
        names: those of its parameters.
        read: gives the value of a parameter by its name.

    Raises:
        ValueError: ``model`` has several adapters, or trains what is no part of the adapter and would be lost.
    """
    adapter, own = _only_adapter(model), adapter_names(model)
    lost = [name for name, p in model.named_parameters() if p.requires_grad and name not in own]
    if lost:
        raise ValueError(
            f"{lost[0]} is trained and is no part of the adapter, so exporting the adapter would lose it: export with "
            "merge=True, or freeze it"
        )
    for name in names:
        if name in own:
            # A name in the files of peft does not say which adapter it is of.
            yield in_peft_model(name).replace(f".{adapter}.", ".").removesuffix(f".{adapter}"), read(name)


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write the adapter_config.json of ``model``, for use of the adapter and not for more training, as peft does."""
    config = copy.deepcopy(model.peft_config[_only_adapter(model)])
    config.inference_mode = True
    config.save_pretrained(folder)


def merged_weights(
    model: nn.Module, names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The weights of ``model`` with its adapter merged in, by the names of the model without it, one after another.

    A sum is made in fp32 and rounded once to the type of the weight. peft's own merge rounds twice in 16 bits.

    Raises:
        ValueError: the adapter is not plain LoRA of linear layers.
    """
    adapter, own = _only_adapter(model), adapter_names(model)
    _refuse_other_than_lora(model)
    for name in names:
        if name in own:
            continue
        weight, path = read(name), name.removesuffix(".base_layer.weight")
        if path != name:
            layer: Any = model.get_submodule(path)
            a, b = (read(f"{path}.lora_{part}.{adapter}.weight").float() for part in "AB")
            product = (b @ a).T if layer.fan_in_fan_out else b @ a
            weight = (weight.float() + product * layer.scaling[adapter]).to(weight.dtype)
        yield base_name(name), weight


def _only_adapter(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) > 1:
        raise ValueError(f"the model has the adapters {', '.join(names)}: export one that has a single adapter")
    return str(names[0])


def _refuse_other_than_lora(model: nn.Module) -> None:
    from peft.tuners.lora import Linear

    for path, module in adapted_layers(model):
        if not isinstance(module, Linear) or module.lora_variant or any(module.lora_bias.values()):
            raise ValueError(
                f"{path} has an adapter that is not plain LoRA of a linear layer, and only such are merged: export "
                "without merge=True, and merge with peft's merge_and_unload"
            )
