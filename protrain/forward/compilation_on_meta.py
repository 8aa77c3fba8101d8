"""Stands in for the compiler on the meta device: it runs the graphs that would be compiled, operator by operator.

What a compiled block saves is decided when the compiler splits its graph into forward and backward, before any code is
generated. What is alive between products depends on which operators are fused; ``inside_graph`` says where that
would be.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

_running = 0  # how many graphs are running


def graphs_alone(graph: Any, inputs: Any) -> Any:
    """A backend for torch.compile that splits a block's graph as the default backend does, and compiles nothing."""
    return _splitting()(graph, inputs)


@functools.cache
def _splitting() -> Any:
    # The compiler's own modules take long to import, and a model whose profile is cached never needs them.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    return aot_autograd(
        fw_compiler=_marked,
        bw_compiler=_marked,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )


def inside_graph() -> bool:
    """Whether such a graph is running."""
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
