"""Adds the adapter of `--lora` to a model, and freezes what `--freeze` names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

import protrain
from protrain.cli.lora import Lora, parse_lora
from protrain.cli.models import LoadedModel
from protrain.cli.options import need
from protrain.common.adapters import adapted_layers

_LEARNING_RATE = 2e-4  # an adapter starts at nothing, and takes larger steps than weights that were trained before


def choose_trained(loaded: LoadedModel, lora: str | None, freeze: Sequence[str]) -> LoadedModel:
    """``loaded`` with the adapter that ``lora`` asks for, and with what matches ``freeze`` frozen.

    Raises:
        ValueError: peft is not installed, there is nothing to adapt or to freeze, or nothing is left to train.
    """
    if lora is not None:
        _add_adapter(loaded, parse_lora(lora))
        rate = loaded.learning_rate if loaded.folder is None else _LEARNING_RATE
        loaded = replace(loaded, learning_rate=rate)
    named = dict(loaded.model.named_parameters(remove_duplicate=False))
    for pattern in freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            depth = pattern.count(".") + 1
            starts = list(dict.fromkeys(".".join(name.split(".")[:depth]) for name in named))
            near = difflib.get_close_matches(pattern, starts, n=3) or starts[:3]
            raise ValueError(f"--freeze {pattern!r} matches no parameter; there are {', '.join(near)}, ...")
        for name in matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("--freeze leaves nothing to train: freeze less")
    return loaded


def _add_adapter(loaded: LoadedModel, lora: Lora) -> None:
    need("peft", "--lora", extra="peft")
    import peft
    from transformers.pytorch_utils import Conv1D

    model: Any = loaded.model
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=lora.targets if lora.targets == "all-linear" else lora.targets.split("+"),
        lora_dropout=lora.dropout,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2 has weights [in, out]
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if loaded.folder is None else str(loaded.folder),
    )
    try:
        with protrain.empty_parameters():
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
        raise ValueError(
            f"--lora: targets={lora.targets} fits no layer of the model, whose linear layers are {names}: {error}"
        ) from None
    _refuse_other_than_linear(model)


def _refuse_other_than_linear(model: nn.Module) -> None:
    """Raise a ValueError for an adapter that could not be merged."""
    from transformers.pytorch_utils import Conv1D

    for path, module in adapted_layers(model):
        if not isinstance(module.base_layer, nn.Linear | Conv1D):
            raise ValueError(
                f"--lora: {path} is no linear layer, and only such get adapters: give targets that leave it out, like "
                "targets=q_proj+k_proj+v_proj+o_proj"
            )
