"""Models to which peft has added an adapter: what is saved and exported of them.

They are exported as the adapter alone, or with the adapter merged in. A checkpoint may leave out the weights that the
adapter was added to (``base``): they do not change, and are most of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.adapters import adapted_layers, adapter_names, base_name, in_peft_model, is_peft_model
from protrain.common.errors import CheckpointError
from protrain.engine.states.weight_files import reading, weight_sources

ADAPTER_FILE = "adapter_model"


def has_adapter(model: nn.Module) -> bool:
    """Whether peft has added an adapter to ``model``. Some adapters are no layers: prompts, and prefixes."""
    return bool(getattr(model, "peft_config", None)) and (is_peft_model(model) or bool(adapter_names(model)))


def base_weights(model: nn.Module, base: str | None) -> set[str]:
    """The names of the parameters that a save with ``base`` leaves out: all that is neither trained nor an adapter's.

    Quantised weights are among them, as they follow from the files of the base. Without a base there are none.
    """
    if base is None:
        return set()
    own = adapter_names(model)
    return {name for name, p in model.named_parameters() if not p.requires_grad and name not in own}


def check_base(save: Path, manifest: dict[str, Any], base: str | None) -> None:
    """Raise a CheckpointError unless ``base`` is what ``save`` calls the weights that it leaves out, if it does."""
    saved = manifest.get("base")
    if saved not in (None, base):
        raise CheckpointError(
            f"{save} holds an adapter and not the weights of {saved!r}, and base={base!r} was given: give the model "
            f"that the adapter was trained for, and base={saved!r}"
        )


@contextmanager
def reading_base(model: nn.Module, folder: Path, dtype: torch.dtype) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads a weight of the base of ``model`` from ``folder``, as training had it in ``dtype``."""
    sources = weight_sources(model, folder).sources
    by_name = {name: source for source in sources for name in source.names}
    with reading(tensor for source in sources for tensor in source.stored) as read:
        yield lambda name: by_name[name].values(read)[name].to(dtype)


def adapter_weights(
    model: Any, names: Iterable[str], read: Callable[[str], Tensor], others: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that peft saves of the adapter of ``model``, by the names that ``PeftModel.from_pretrained`` expects.

    ``read`` gives the value of each parameter in ``names``, so ``model`` may be on the meta device. ``others`` are its
    buffers. What the adapter trains is held at once, as adapters are small.

    Raises:
        ValueError: ``model`` has several adapters, or trains what peft does not save and would be lost.
    """
    from peft import get_peft_model_state_dict

    adapter, own = _only_adapter(model), adapter_names(model)
    every = {name: p.requires_grad for name, p in model.named_parameters()}
    values = {name: read(name) if every[name] or name in own else torch.empty(0, device="meta") for name in names}
    values.update(others)
    names_of = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tied = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first_names = {name: names_of[id(tensor)] for name, tensor in tied}
    state = {name: values[first] for name, first in first_names.items() if first in values}
    saved = get_peft_model_state_dict(model, state, adapter)
    kept = {id(value) for value in saved.values()}
    lost = [name for name, trained in every.items() if trained and name not in own and id(values.get(name)) not in kept]
    if lost and not model.peft_config[adapter].is_prompt_learning:  # of which peft saves what the trained modules make
        raise ValueError(
            f"{lost[0]} is trained and is no part of the adapter, so exporting the adapter would lose it: export with "
            "merge=True, or freeze it"
        )
    left = {id(value): name for name, value in values.items() if value.is_meta}
    for name, value in saved.items():  # a tied value is saved under several names
        whole = read(left[id(value)]) if value.is_meta else value.clone()
        yield name if is_peft_model(model) else in_peft_model(name), whole


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
        merged = merged_name(model, name)
        if name in own or merged is None:
            continue
        weight, path = read(name), name.removesuffix(".base_layer.weight")
        if path != name:
            layer: Any = model.get_submodule(path)
            a, b = (read(f"{path}.lora_{part}.{adapter}.weight").float() for part in "AB")
            product = (b @ a).T if layer.fan_in_fan_out else b @ a
            weight = (weight.float() + product * layer.scaling[adapter]).to(weight.dtype)
        yield merged, weight


def merged_name(model: Any, name: str) -> str | None:
    """The name that the tensor ``name`` has once the adapter is merged in. None if another takes its place.

    peft keeps a module twice that it trains as a whole. The trained copy stays, and the ``original_module`` goes.
    """
    if ".original_module." in name:
        return None
    return base_name(name.replace(f".modules_to_save.{_only_adapter(model)}.", "."))


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
