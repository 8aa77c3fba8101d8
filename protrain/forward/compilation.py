"""Regional compilation: compiles each block's forward, with one graph for all blocks of a kind.

Only the forward is compiled, not the module. So hooks stay outside the graph, and weights may lie at another address in
every call without a new compilation.

[Note: compilation on meta] On the meta device the graphs that would be compiled are run operator by operator. What a
compiled block saves is decided when the compiler splits its graph into forward and backward, before any code is
generated. What is alive between products depends on which operators are fused; ``inside_graph`` says where that would
be.

[Note: what a compiled block saves] torch's compiler saves the result of a cheap operator when backward needs it as an
operand of a product, because backward would have to write it to memory again. For a transformer these are the results
of its norms and of its gated activation: a third of what a block of Qwen2 saves, by count. Writing them again in
backward, by kernels that run there anyway, took no time that could be measured. 7.6 billion parameters, all on one
H200, 4 batches of 8 x 1024 tokens a step, moments in bf16, torch 2.11: 2,398 ms and 111 GiB, where it had been 2,402
ms and 122 GiB. (That run set activation_memory_budget to 0.99, which makes the same choice.) So blocks are compiled
without that rule. Products and attention are still saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

# The modules of torch.compile take longer to import than the rest of torch, so functions import them when they compile.
# A model whose profile is cached never needs them.

_running = 0  # how many graphs are running on the meta device


class CompiledForward:
    """A block's forward, which runs compiled where gradients are recorded and unchanged elsewhere.

    Evaluation and generation meet other shapes, and caches that grow, in every call. Compiling for each of them would
    take longer than it saves.
    """

    def __init__(self, forward: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.eager = forward
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        return (self.compiled if torch.is_grad_enabled() else self.eager)(*args, **kwargs)


def eager_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as it was before compilation."""
    return forward.eager if isinstance(forward, CompiledForward) else forward


def graphs_compiled() -> int:
    """The number of graphs that this process has compiled so far."""
    import torch._dynamo.utils

    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@functools.cache
def _leave_alone(package: str) -> None:
    """Make the compiler skip the code of ``package``, because hooks on saved tensors run inside a compiled forward."""
    from torch._dynamo import trace_rules

    trace_rules.add(package)


def compile_blocks(blocks: Sequence[nn.Module], *, on_meta: bool = False) -> Callable[[], None]:
    """Compile the forward of each of ``blocks``. Returns a function that undoes it.

    With ``on_meta`` it compiles as far as the meta device can show: see [Note: compilation on meta].
    """
    from torch._dynamo import lookup_backend

    _leave_alone("protrain")
    _leave_alone("protrain_kernels")
    backend = graphs_alone() if on_meta else _saving_little(lookup_backend("inductor"))

    @functools.cache  # torch.compile takes milliseconds, and blocks of one class have one function
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend=backend)

    def compiled_forward(forward: Any) -> CompiledForward:
        if isinstance(forward, MethodType):
            return CompiledForward(forward, MethodType(compiled(forward.__func__), forward.__self__))
        return CompiledForward(forward, compiled(forward))

    return replace_attributes([(block, "forward", compiled_forward(block.forward)) for block in blocks])


@functools.cache  # the compiler compiles anew for another backend
def _saving_little(backend: Callable[..., Any]) -> Callable[..., Any]:
    """``backend``, but for what is saved: see [Note: what a compiled block saves]."""
    import torch._functorch.config

    return torch._functorch.config.patch(ban_recompute_materialized_backward=False)(backend)


@functools.cache
def graphs_alone() -> Any:
    """A backend for torch.compile that splits a block's graph as it is split elsewhere, and compiles nothing."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return _saving_little(
        aot_autograd(
            fw_compiler=_marked,
            bw_compiler=_marked,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
    )


def inside_graph() -> bool:
    """Whether a graph is running on the meta device that would be compiled elsewhere."""
    return _running > 0


def _marked(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.debugging import boxed_nop

    run = boxed_nop(graph, inputs)

    def marked(args: Any) -> Any:
        global _running
        _running += 1
        try:
            results = run(args)
        finally:
            _running -= 1
        # an operator outside the graph, so that a meter counts what is alive when the graph ends
        torch.empty(0, device="meta")
        return results

    vars(marked)["_boxed_call"] = True
    return marked


def replace_attributes(replacements: Iterable[tuple[Any, str, Any]]) -> Callable[[], None]:
    """Set each (object, name, value). Returns a function that restores the attributes that were there before."""
    before = []
    for owner, name, value in replacements:
        attributes = vars(owner)
        before.append((attributes, name, name in attributes, attributes.get(name)))
        attributes[name] = value

    def put_back() -> None:
        for attributes, name, was_there, value in reversed(before):
            if was_there:
                attributes[name] = value
            else:
                del attributes[name]

    return put_back
