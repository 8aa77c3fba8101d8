"""Regional compilation: each block's forward compiled, one graph for all blocks of a kind.

Only the forward is compiled, not the module: hooks stay outside the graph, and weights may lie elsewhere in every call
without a new compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules


class CompiledForward:
    """A block's forward: compiled where gradients are recorded, as it was elsewhere.

    Evaluation and generation meet other shapes, and caches that grow, in every call: compiling for each would take
    longer than it saves.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.eager = forward
        self.compiled = torch.compile(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return (self.compiled if torch.is_grad_enabled() else self.eager)(*args, **kwargs)


def eager_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as it was before compilation."""
    return forward.eager if isinstance(forward, CompiledForward) else forward


@functools.cache
def _leave_alone(package: str) -> None:
    """Have the compiler skip the code of ``package``: hooks on saved tensors run inside a compiled forward."""
    trace_rules.add(package)


@contextmanager
def compiled_blocks(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Compile the forward of every one of ``blocks``; undone when the body raises."""
    _leave_alone("protrain")
    _leave_alone("protrain_kernels")
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        vars(block)["forward"] = CompiledForward(block.forward)
    try:
        yield
    except BaseException:
        for block, forward in zip(blocks, before, strict=True):
            if forward is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = forward
        raise
