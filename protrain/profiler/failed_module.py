"""Finds the module of a model that raised an error."""

from __future__ import annotations

import traceback
from contextlib import suppress

from torch import nn


def module_in(error: Exception, model: nn.Module) -> str | None:
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
