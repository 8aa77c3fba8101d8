"""Models to which peft has added an adapter: what is saved and exported of them.

They are exported as the adapter alone. A checkpoint may leave out the weights that the adapter was added to (``base``):
they do not change, and are most of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protrain.common.adapters import adapter_names, in_peft_model, is_peft_model
from protrain.common.errors import CheckpointError

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
            f"{lost[0]} is trained and is no part of the adapter, so exporting the adapter would lose it: name "
            "its module in modules_to_save of the adapter's configuration, or freeze it"
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


def _only_adapter(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) > 1:
        raise ValueError(f"the model has the adapters {', '.join(names)}: export one that has a single adapter")
    return str(names[0])
