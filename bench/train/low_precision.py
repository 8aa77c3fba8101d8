"""Blocks whose linear layers hold 4-bit weights (bitsandbytes) or multiply in float8 (torchao), for all contestants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from protrain.profiler.blocks import find_blocks

_SOURCE = "bench_source"  # attribute of a 4-bit weight: the one without memory that it is to be made of


def quantise_later(model: Any) -> None:
    """Let the linear layers of the blocks have frozen NF4 weights, with statistics that are quantised too (QLoRA).

    The weights keep those that they are to be made of, so that each layer can be quantised by itself when its values
    are made: see ``unquantised`` and ``quantised``. The model is marked as one that transformers loaded in 4 bits, and
    peft then puts its own 4-bit layers around these.

    Raises:
        ValueError: bitsandbytes is not installed.
    """
    try:
        import bitsandbytes
    except ImportError:
        raise ValueError("--quantised needs the package bitsandbytes: pip install bitsandbytes") from None
    for owner, name, linear in list(_linear_layers(model)):
        layer = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bitsandbytes.nn.Params4bit(linear.weight.detach(), quant_type="nf4", module=layer)
        vars(layer.weight)[_SOURCE] = linear.weight
        layer.bias = linear.bias
        setattr(owner, name, layer)
    model.is_loaded_in_4bit = True


def unquantised(parameter: nn.Parameter) -> nn.Parameter:
    """The weight without memory that a 4-bit ``parameter`` is to be made of. Any other is returned as it is."""
    found: nn.Parameter = vars(parameter).get(_SOURCE, parameter)
    return found


def quantised(parameter: Any, values: Tensor) -> Any:
    """``values`` quantised where they are, as the 4-bit ``parameter`` says. Its layer then computes in their type."""
    layer = parameter.module
    layer.compute_dtype, layer.compute_type_is_set = values.dtype, True
    options = {"quant_type": parameter.quant_type, "compress_statistics": parameter.compress_statistics}
    return type(parameter)(values, module=layer, **options).to(values.device)


def multiply_in_float8(model: nn.Module, *, emulate: bool) -> None:
    """Let the linear layers of the blocks multiply in float8, with one dynamic scale for each tensor (torchao).

    Args:
        model: its weights keep their type, and stay the parameters that they are.
        emulate: multiply numbers that were rounded to float8 in the type of the weights, for devices without float8.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise ValueError("--float8 needs the package torchao: pip install torchao") from None
    config = replace(Float8LinearConfig(), emulate=emulate)
    for block in find_blocks(model):
        convert_to_float8_training(model.get_submodule(block), config=config)


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers of the blocks, each with the module that has it and its name there."""
    for block in find_blocks(model):
        for owner in model.get_submodule(block).modules():
            for name, child in owner.named_children():
                if isinstance(child, nn.Linear):
                    yield owner, name, child
