"""What of a model is trained: `--lora` adds an adapter, `--freeze` freezes parameters, `--load-in-4bit` all weights.

transformers quantises with bitsandbytes while it loads: to NF4, with statistics that are quantised too, as the paper of
QLoRA does (arXiv 2305.14314). Such weights are whole on every device. Planning, and all that is checked before weights
are loaded, needs only their shapes, which ``shape_in_4bit`` makes at no cost.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from protrain.cli.lora import Lora, parse_lora
from protrain.cli.models import LoadedModel
from protrain.cli.options import need
from protrain.common.adapters import adapted_layers
from protrain.engine.states.empty import empty_parameters


def choose_trained(loaded: LoadedModel, lora: str | None, freeze: Sequence[str]) -> LoadedModel:
    """``loaded`` with the adapter that ``lora`` asks for, and with what matches ``freeze`` frozen.

    Raises:
        ValueError: peft is not installed, there is nothing to adapt or to freeze, or nothing is left to train.
    """
    named = dict(loaded.model.named_parameters(remove_duplicate=False))
    for pattern in freeze:
        matching = [name for name in named if fnmatchcase(name, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, named, n=3) or list(named)[:3]
            raise ValueError(f"--freeze {pattern!r} matches no parameter; there are {', '.join(near)}, ...")
        for name in matching:
            named[name].requires_grad_(False)
    if lora is not None:
        loaded = replace(loaded, model=_with_adapter(loaded, parse_lora(lora)))
    if not any(parameter.requires_grad for parameter in loaded.model.parameters()):
        raise ValueError("--freeze leaves nothing to train: freeze less")
    return loaded


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with the groups that trainers make: the trainable matrices, and the vectors, which do not decay there."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [[p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]]
    return torch.optim.AdamW([{"params": group} for group in groups if group])


def _with_adapter(loaded: LoadedModel, lora: Lora) -> Any:
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
    with empty_parameters():
        adapted = peft.get_peft_model(model, config)
    for path, module in adapted_layers(adapted):
        if not isinstance(module.base_layer, nn.Linear | Conv1D):  # such as experts, which peft adapts by values
            raise ValueError(
                f"--lora: {path} is no linear layer, and only such get adapters: give targets that leave it out, like "
                "targets=q_proj+k_proj+v_proj+o_proj"
            )
    return adapted


def shape_in_4bit(model: Any) -> None:
    """Give ``model``, which has no adapter yet, 4-bit weights on the meta device.

    Raises:
        ValueError: bitsandbytes or accelerate is not installed.
    """
    for package in ("accelerate", "bitsandbytes"):  # transformers loads quantised models with both
        need(package, "--load-in-4bit", extra="qlora")
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import BitsAndBytesConfig
    from transformers.quantizers import AutoHfQuantizer

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.preprocess_model(model, device_map={"": "meta"})
    quantizer.postprocess_model(model)
    with torch.device("cpu"):  # bitsandbytes keeps the table of its first call, which is to have values
        quantize_4bit(torch.zeros(64), compress_statistics=True)
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            numbers, state = quantize_4bit(layer.weight.data, compress_statistics=True, quant_type="nf4")
            layer.weight = Params4bit(
                numbers, quant_type="nf4", compress_statistics=True, quant_state=state, module=layer, bnb_quantized=True
            )
