"""Lets a Trainer find a batch that fits (``auto_find_batch_size``) where it is the plan that needs a smaller one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from protrain.common.errors import PlanError


@contextmanager
def smaller_if_it_fits(*modules: nn.Module) -> Iterator[None]:
    """Raise a PlanError inside as the error for which Accelerate takes a smaller batch, if one fits.

    ``modules``, whose forwards may be changed inside, then have those of before.
    """
    forwards = [(module, vars(module).get("forward")) for module in dict.fromkeys(modules)]
    try:
        yield
    except PlanError as error:
        if not error.fitting_batch:
            raise
        for module, forward in forwards:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        # For these words in a RuntimeError all versions of Accelerate try a smaller batch.
        raise RuntimeError(f"As with CUDA out of memory. {error}") from None
