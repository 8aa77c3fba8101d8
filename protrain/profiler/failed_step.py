"""What an error of the model says in a trace: where it came from, and what may be its remedy."""

from __future__ import annotations

import re
import traceback
from contextlib import suppress

import torch
from torch import nn

from protrain.common.errors import MisuseError
from protrain.forward.recomputation import autocast_dtype

# How torch says that an operation does not mix two types.
_MIXED_TYPES = re.compile("bfloat16|float16|half|dtype|scalar type", re.IGNORECASE)
# What torch says of an operation, or of a view, of a tensor without memory.
_NO_MEMORY = ("data is not allocated yet", "out of bounds for storage of size 0")


def explain(
    error: Exception, model: nn.Module, device: torch.device, dtype: torch.dtype, *, phase: str, block: str | None
) -> None:
    """Note in ``error``, which ``model`` raised in the ``phase`` of ``block``, where it came from and what may help.

    Args:
        error: raised in a step on ``device`` with parameters of ``dtype``.
        model: the model.
        device: where the step ran.
        dtype: the type of the parameters.
        phase: "forward" or "backward".
        block: the path of the block whose segment was open, or None between blocks.

    Raises:
        ValueError: an operation was given a weight that was not there.
    """
    if any(words in str(error) for words in _NO_MEMORY):
        raise ValueError(
            f"the {phase} of {type(model).__name__} uses a weight while the block that owns it does not run. "
            "Reversible layers do so (Reformer), as the backward of their torch.autograd.Function calls modules "
            "again. Call the modules without such a Function: the plan decides what is recomputed"
        ) from error
    where = _module_in(error, model) or (f"block {block}" if block else "the model")
    error.add_note(f"raised while profiling {type(model).__name__}, in the {phase} of {where}")
    is_mixed = not isinstance(error, MisuseError) and _MIXED_TYPES.search(str(error))
    if is_mixed and dtype != torch.float32:
        under = "" if autocast_dtype(device.type) else "call the model under torch.autocast of that type, or "
        error.add_note(
            f"parameters become {str(dtype).removeprefix('torch.')}, and buffers and what the model makes keep their "
            f'types: {under}pass dtype="float32" to protrain.wrap'
        )
    if device.type == "meta":
        error.add_note("a model whose forward depends on values cannot be traced on meta; use the CPU or a GPU")


def _module_in(error: Exception, model: nn.Module) -> str | None:
    """The name and the settings of the innermost module of ``model`` in whose forward ``error`` was raised.

    None if there is no other than the model. An embedding says so how many rows it has, and a linear layer its widths.
    """
    names = {id(module): name for name, module in model.named_modules() if name}
    own = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = next((each for each in reversed(own) if id(each) in names), None)
    if not isinstance(module, nn.Module):
        return None
    settings = ""
    with suppress(Exception):  # a module of the user may say anything, and must not hide the error
        settings = f"({module.extra_repr()})" if not next(module.children(), None) else ""
    return f"{names[id(module)]}, which is {type(module).__name__}{settings}"
